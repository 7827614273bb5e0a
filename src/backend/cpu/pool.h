/* A fixed set of threads that run one function together, meeting at barriers.
 *
 * A whole decode step or prefill chunk is one cpu_pool_run: every thread executes the same sequence
 * of stages on its own static part and waits at cpu_pool_barrier between stages. Waiting threads
 * spin for a short while (a stage is tens of microseconds), then sleep, so that a machine shared
 * with other programs is not held up by threads that wait for one without a processor. No result
 * depends on the number of threads: a part never splits a sum. */
#ifndef LILY_CPU_POOL_H
#define LILY_CPU_POOL_H

#include <stdint.h>

#include "base/err.h"

struct cpu_pool;

typedef void (*cpu_pool_fn)(void *arg, int32_t thread, int32_t threads);

/* threads >= 1, the caller of cpu_pool_run included. The caller owns *out (cpu_pool_free). */
int cpu_pool_new(int32_t threads, struct cpu_pool **out, lily_err *err);
void cpu_pool_free(struct cpu_pool *p); /* joins the workers; NULL is fine */
int32_t cpu_pool_threads(const struct cpu_pool *p);

/* Runs fn(arg, i, threads) on every thread i, the caller being 0; returns when all are done. */
void cpu_pool_run(struct cpu_pool *p, cpu_pool_fn fn, void *arg);

/* Inside cpu_pool_run: returns when all threads of the pool have arrived. */
void cpu_pool_barrier(struct cpu_pool *p);

/* The part of n units that thread i of threads works on: [*begin, *end), sizes equal within 1. */
static inline void cpu_pool_part(int32_t n, int32_t i, int32_t threads, int32_t *begin,
                                 int32_t *end) {
    *begin = (int32_t)((int64_t)n * i / threads);
    *end = (int32_t)((int64_t)n * (i + 1) / threads);
}

/* Cores this process may use, hyper-threads counted once, container quota respected; at least 1. */
int32_t cpu_pool_physical_cores(void);

#endif
