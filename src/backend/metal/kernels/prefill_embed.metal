// 1 Mathematics: h[n, H] = row id of the embedding [V, H]: scale * code + bias, not scaled further.
// 2 Layout: ids int32 [n]; codes of 4 bits row by row, eight to a word, least significant first,
//   bf16 scale and bias per 64 columns; h float32.
// 3 Threads: a threadgroup has a row, a thread a word of codes: both sides are read in a line.
// 4 Fused: nothing; layer 0's norm follows. Agrees with mat_row (model/weights.h) bit for bit.
// 5 Bytes per row: 0.5625 H read, 4 H written, each once. Not measured on a Mac.
#include <metal_stdlib>
using namespace metal;
#include "tile.h"

[[max_total_threads_per_threadgroup(PREFILL_ROW_THREADS)]]
kernel void prefill_embed(device const int *ids [[buffer(PREFILL_EMBED_IDS)]],
                          device const uint *codes [[buffer(PREFILL_EMBED_CODES)]],
                          device const ushort *scales [[buffer(PREFILL_EMBED_SCALES)]],
                          device const ushort *biases [[buffer(PREFILL_EMBED_BIASES)]],
                          device float4 *h [[buffer(PREFILL_EMBED_H)]],
                          constant prefill_embed_args &args [[buffer(PREFILL_EMBED_ARGS)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
    if (row >= args.rows) return;
    uint id = (uint)ids[row];
    uint word = codes[id * (SHAPE_HIDDEN / 8) + thread_index];
    uint group = id * (SHAPE_HIDDEN / SHAPE_GROUP) + thread_index / (SHAPE_GROUP / 8);
    float scale = tile_bf16(scales[group]);
    float bias = tile_bf16(biases[group]);
    float4 low = float4(uint4(word, word >> 4, word >> 8, word >> 12) & 15u);
    float4 high = float4(uint4(word >> 16, word >> 20, word >> 24, word >> 28) & 15u);
    uint at = 2 * (row * PREFILL_ROW_THREADS + thread_index);
    h[at] = scale * low + bias;
    h[at + 1] = scale * high + bias;
}
