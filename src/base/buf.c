#include "base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool buf_reserve(struct buf *b, size_t extra) {
    size_t need;
    if (!size_add(b->len, extra, &need) || !size_add(need, 1, &need)) return false;
    if (need <= b->cap) return true;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need) {
        if (!size_mul(cap, 2, &cap)) return false;
    }
    char *grown = realloc(b->data, cap);
    if (!grown) return false;
    b->data = grown;
    b->cap = cap;
    b->data[b->len] = 0;
    return true;
}

bool buf_append(struct buf *b, const void *bytes, size_t n) {
    if (!buf_reserve(b, n)) return false;
    if (n) memcpy(b->data + b->len, bytes, n);
    b->len += n;
    b->data[b->len] = 0;
    return true;
}

bool buf_puts(struct buf *b, const char *text) {
    return buf_append(b, text, strlen(text));
}

bool buf_printf(struct buf *b, const char *fmt, ...) {
    va_list args, again;
    va_start(args, fmt);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    bool ok = n >= 0 && buf_reserve(b, (size_t)n);
    if (ok) {
        vsnprintf(b->data + b->len, (size_t)n + 1, fmt, again);
        b->len += (size_t)n;
    }
    va_end(again);
    return ok;
}

void buf_clear(struct buf *b) {
    b->len = 0;
    if (b->data) b->data[0] = 0;
}

void buf_free(struct buf *b) {
    free(b->data);
    *b = (struct buf){0};
}

char *buf_take(struct buf *b) {
    if (!buf_reserve(b, 0)) return NULL;
    char *data = b->data;
    *b = (struct buf){0};
    return data;
}
