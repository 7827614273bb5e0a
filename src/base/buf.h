/* Growable byte buffer. The bytes belong to the buffer; buf_free releases them. Always terminated
 * by a zero byte beyond len, so data can be printed. A failed append leaves the buffer unchanged.
 */
#ifndef LILY_BASE_BUF_H
#define LILY_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"

struct buf {
    char *data; /* [len + 1], NULL while empty and never grown */
    size_t len;
    size_t cap;
};

bool buf_reserve(struct buf *b, size_t extra);               /* room for extra more bytes */
bool buf_append(struct buf *b, const void *bytes, size_t n); /* false: out of memory */
bool buf_puts(struct buf *b, const char *text);
bool buf_printf(struct buf *b, const char *fmt, ...) PRINTF_LIKE(2, 3);
void buf_clear(struct buf *b); /* len = 0, memory kept */
void buf_free(struct buf *b);
char *buf_take(struct buf *b); /* the bytes, now the caller's to free(); NULL: out of memory */

/* a * b in *out; false when it does not fit a size_t. */
static inline bool size_mul(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool size_add(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

#endif
