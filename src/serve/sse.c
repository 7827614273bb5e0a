#include "serve/sse.h"

#include "serve/json_safe.h"

bool sse_data(struct buf *out, const json_t *value) {
    return buf_puts(out, "data: ") && jsafe_write(out, value) && buf_puts(out, "\n\n");
}

bool sse_done(struct buf *out) {
    return buf_puts(out, "data: [DONE]\n\n");
}

bool sse_keepalive(struct buf *out) {
    return buf_puts(out, ": keep-alive\n\n");
}
