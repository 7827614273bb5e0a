/* The MTLBuffers of a model, by their numbers of layout.h: made once, counted, and checked against
 * what the GPU can keep resident before any is made. */
#ifndef LILY_METAL_BUFFERS_H
#define LILY_METAL_BUFFERS_H

#include "backend/backend.h"
#include "backend/metal/device.h"
#include "backend/metal/layout.h"
#include "base/buf.h"

struct metal_buffers {
    const struct metal_layout *layout;
    id *buffer;      /* [layout->buffers] owned; NULL: not made */
    uint64_t *bytes; /* [layout->buffers] of those made */
    uint64_t copied; /* bytes of weights in memory of the program's own: all or none of them */
};

/* Bytes of weights, scratch and `sessions` of the largest context. */
uint64_t buffers_need(const struct metal_layout *l);

/* Refuses with LILY_ENOMEM when weights, scratch and `sessions` of the largest context exceed the
 * device's working set; the message holds the exact remedy. */
int buffers_preflight(const struct metal_device *d, const struct metal_layout *l, lily_err *err);

/* Makes and fills the fixed buffers and the weights' windows. The caller ends *out with
 * buffers_free, which also releases sessions' buffers. */
int buffers_new(const struct metal_device *d, const struct metal_layout *l, const struct weights *w,
                const struct backend_options *options, struct metal_buffers *out, lily_err *err);
void buffers_free(struct metal_buffers *b);

/* Buffers of the session in that slot, contents undefined. A failure leaves none. */
int buffers_new_session(struct metal_buffers *b, const struct metal_device *d, int32_t slot,
                        int32_t context, lily_err *err);
void buffers_free_session(struct metal_buffers *b, int32_t slot);

/* Of one buffer, for the CPU; NULL when it is not made. */
static inline void *buffers_contents(const struct metal_buffers *b, int32_t buffer) {
    return b->buffer[buffer] ? mtl_buffer_contents(b->buffer[buffer]) : NULL;
}

/* Every buffer made, by its number, as text for people and tests: "label bytes" lines. It shows
 * that no copy of dequantised weights exists: none is as large. */
bool buffers_list(const struct metal_buffers *b, struct buf *out);

#endif
