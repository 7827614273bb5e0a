/* Independent pieces of work on all cores: checking, quantising and writing whole checkpoints. */
#ifndef LILY_CKPT_PARALLEL_H
#define LILY_CKPT_PARALLEL_H

#include <stddef.h>

#include "base/err.h"

/* Calls item(arg, i, err) once for each i in [0, n), in rising order of start, on the caller's and
 * up to one further thread per core. Between its own pieces, and once at the end, the calling
 * thread runs tick(arg, err) (may be NULL). The first nonzero return of either stops further pieces
 * from starting and is returned, with its message in err; running ones finish first. */
int parallel_for(size_t n, int (*item)(void *arg, size_t i, lily_err *err),
                 int (*tick)(void *arg, lily_err *err), void *arg, lily_err *err);

/* Threads parallel_for uses at most. */
int parallel_threads(void);

#endif
