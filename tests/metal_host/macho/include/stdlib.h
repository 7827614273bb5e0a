#include <stddef.h>
void *malloc(size_t bytes);
void *calloc(size_t count, size_t bytes);
void *realloc(void *at, size_t bytes);
void free(void *at);
_Noreturn void abort(void);
void qsort(void *base, size_t count, size_t bytes, int (*compare)(const void *, const void *));
