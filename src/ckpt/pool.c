#include "ckpt/pool.h"

#include <stdlib.h>

#include "base/buf.h"

void *pool_alloc(struct pool *p, size_t bytes) {
    if (p->n == p->cap) {
        size_t cap = p->cap ? p->cap * 2 : 64, size;
        void *grown = size_mul(cap, sizeof *p->blocks, &size) ? realloc(p->blocks, size) : NULL;
        if (!grown) return NULL;
        p->blocks = grown;
        p->cap = cap;
    }
    void *block = NULL;
    if (posix_memalign(&block, 64, bytes ? bytes : 1) != 0) return NULL;
    p->blocks[p->n++] = block;
    return block;
}

void pool_free(struct pool *p) {
    for (size_t i = 0; i < p->n; i++) free(p->blocks[i]);
    free(p->blocks);
    *p = (struct pool){0};
}
