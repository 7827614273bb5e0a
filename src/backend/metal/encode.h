/* A recorded graph into a command buffer: one concurrent encoder, the graph's barriers and nothing
 * else between its dispatches. */
#ifndef LILY_METAL_ENCODE_H
#define LILY_METAL_ENCODE_H

#include "backend/metal/command.h"
#include "backend/metal/device.h"
#include "backend/metal/graph.h"

/* Dispatches [from, to) of g; buffers holds the MTLBuffer of every buffer number that g names.
 * LILY_EBACKEND: Metal gave no encoder, and nothing was encoded. */
int metal_encode(const struct metal_device *d, const struct graph *g, int32_t from, int32_t to,
                 const id *buffers, id command_buffer, lily_err *err);

/* The same in a command buffer of its own, and waits for its end. seconds: of GPU time. */
int metal_run(const struct metal_device *d, const char *label, const struct graph *g, int32_t from,
              int32_t to, const id *buffers, double *seconds, lily_err *err);

#endif
