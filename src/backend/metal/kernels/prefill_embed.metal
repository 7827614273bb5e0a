/* Mathematics: h[n, H] = rows ids[n] of embedding [V, H]: scale * code + bias, not scaled further.
 * Layout: ids int32 [n]; codes 4 bits by rows, bf16 scale and bias per 64 columns; h float32.
 * Threads: a threadgroup has a row, a thread a word of codes: both sides are read in a line.
 * Fused: nothing, the first norm follows. Agrees with mat_row (model/weights.h) bit for bit.
 * Bytes: 0.5625 H a row read, 4 H written, each once; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "tile.h"

KERNEL_THREADS(PREFILL_ROW_THREADS)
kernel void prefill_embed(constant prefill_embed_args &args [[buffer(PREFILL_EMBED_ARGS)]],
                          device const int *ids [[buffer(PREFILL_EMBED_IDS)]],
                          device const uint *codes [[buffer(PREFILL_EMBED_CODES)]],
                          device const ushort *scales [[buffer(PREFILL_EMBED_CODES + 1)]],
                          device const ushort *biases [[buffer(PREFILL_EMBED_CODES + 2)]],
                          device float4 *h [[buffer(PREFILL_EMBED_H)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
    if (row >= args.rows) return;
    const uint id = (uint)ids[row];
    const uint word = codes[id * (SHAPE_HIDDEN / 8) + thread_index];
    const uint group = id * (SHAPE_HIDDEN / SHAPE_GROUP) + thread_index / (SHAPE_GROUP / 8);
    const float scale = bf16_value(scales[group]);
    const float bias = bf16_value(biases[group]);
    const uint at = 2 * (row * PREFILL_ROW_THREADS + thread_index);
    h[at] = scale * codes_first(word) + bias;
    h[at + 1] = scale * codes_last(word) + bias;
}
