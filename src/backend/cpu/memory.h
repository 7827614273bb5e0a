/* Large blocks straight from the system, and how much memory there is. */
#ifndef LILY_CPU_MEMORY_H
#define LILY_CPU_MEMORY_H

#include <stddef.h>
#include <stdint.h>

/* size zeroed bytes, page aligned, in large pages where the system has them; NULL: none left.
 * Pages are taken when they are first touched. The caller frees with pages_free. */
void *pages_new(size_t size);
void pages_free(void *p, size_t size);

/* Bytes this process may use at all (physical, or its container's limit). */
uint64_t memory_limit(void);
/* Bytes that can be taken now without pushing others out. */
uint64_t memory_available(void);

/* Hands out parts of one block: call once with base NULL to add the sizes up, allocate, and call
 * again to place them. */
struct carver {
    char *base;
    size_t used;
};
void *carve(struct carver *c, size_t count, size_t size);

#endif
