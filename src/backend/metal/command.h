/* Command buffers. While the GPU works on one step, the host records and commits the next. No event
 * is needed between them: a queue starts its command buffers in the order of their commits, and
 * Metal orders encoders that share a tracked buffer, which all buffers here are; so step N + 1
 * reads the token slot that step N wrote.
 *
 * Command buffers hold no references: the model outlives them, since every path that frees a buffer
 * waits first. */
#ifndef LILY_METAL_COMMAND_H
#define LILY_METAL_COMMAND_H

#include "backend/metal/device.h"

struct metal_command {
    id buffer; /* owned from begin to wait; NULL otherwise */
};

/* Opens a command buffer; the label shows in Apple's tools and in error messages. */
int metal_command_begin(const struct metal_device *d, const char *label, struct metal_command *out,
                        lily_err *err);
void metal_command_commit(struct metal_command *c);

/* Waits for the end. seconds: of GPU time. An error says what the GPU reported and what helps; then
 * the queue is to be replaced (metal_device_new_queue) once all others were waited for. */
int metal_command_wait(struct metal_command *c, double *seconds, lily_err *err);

#endif
