/* The processor time of this thread: what a calculation costs, whatever else runs on the machine.
 */
#ifndef LILY_TESTS_CPU_CLOCK_H
#define LILY_TESTS_CPU_CLOCK_H

#include <time.h>

static inline double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#endif
