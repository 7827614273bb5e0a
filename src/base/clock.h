/* Monotonic time. */
#ifndef LILY_BASE_CLOCK_H
#define LILY_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t clock_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline double clock_seconds(void) {
    return (double)clock_ns() * 1e-9;
}

#endif
