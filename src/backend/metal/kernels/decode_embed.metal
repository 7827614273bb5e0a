/* Mathematics: h[H] = row `token` of embedding [V, H], scale * code + bias; counts[token] rises.
 * Layout: codes of 4 bits [V, H] row-major, scales and biases bf16 [V, H/64]; h float32.
 * Threads: 32 make 256 elements, eight each; the first thread of all counts.
 * Fused: nothing but the count. Agrees with mat_row (model/weights.h) bit for bit.
 * Bytes: 0.5625 H of weights read, 4 H written, 8 of the count; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_rows.h"

KERNEL_THREADS(DECODE_EMBED_THREADS)
kernel void decode_embed(constant decode_embed_args &args [[buffer(DECODE_EMBED_ARGS)]],
                         device const uint *slot [[buffer(DECODE_EMBED_TOKEN)]],
                         device const uint *codes [[buffer(DECODE_EMBED_CODES)]],
                         device const ushort *scales [[buffer(DECODE_EMBED_CODES + 1)]],
                         device const ushort *biases [[buffer(DECODE_EMBED_CODES + 2)]],
                         device uint *counts [[buffer(DECODE_EMBED_COUNTS)]],
                         device float4 *h [[buffer(DECODE_EMBED_H)]],
                         uint octet [[thread_position_in_grid]]) {
    uint token = args.token < 0 ? slot[0] : (uint)args.token;
    token = min(token, (uint)SHAPE_VOCAB - 1);
    const uint w = codes[token * (SHAPE_HIDDEN / 8) + octet];
    const uint group = token * (SHAPE_HIDDEN / SHAPE_GROUP) + octet / 8;
    const float scale = bf16_value(scales[group]);
    const float bias = bf16_value(biases[group]);
    h[2 * octet] = scale * codes_first(w) + bias;
    h[2 * octet + 1] = scale * codes_last(w) + bias;
    if (octet == 0 && args.count != 0) counts[token] = max(counts[token], 1u) + 1;
}
