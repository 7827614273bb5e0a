/* A recorded graph into a command buffer: one concurrent encoder, the graph's barriers and nothing
 * else between its dispatches. */
#ifndef LILY_METAL_ENCODE_H
#define LILY_METAL_ENCODE_H

#include "backend/metal/device.h"
#include "backend/metal/graph.h"

/* Dispatches [from, to) of g; buffers holds the MTLBuffer of every buffer number that g names. */
void metal_encode(const struct metal_device *d, const struct graph *g, int32_t from, int32_t to,
                  const id *buffers, id command_buffer);

#endif
