/* Memory that lives as long as one checkpoint: taken piece by piece, freed all at once. */
#ifndef LILY_CKPT_POOL_H
#define LILY_CKPT_POOL_H

#include <stddef.h>

struct pool {
    void **blocks; /* [n] owned */
    size_t n, cap;
};

/* bytes (uninitialised, aligned to 64) owned by the pool; NULL: out of memory. */
void *pool_alloc(struct pool *p, size_t bytes);
void pool_free(struct pool *p);

#endif
