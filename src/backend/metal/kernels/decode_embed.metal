/* h[H] = embedding row of the token; counts[token] goes from 0 to 2, from n to n + 1 (as output).
 * Codes [V, H] of 4 bits, scales and biases bf16 [V, H/64]; h float32.
 * 32 threads make 256 elements, eight each; the first thread of all counts.
 * Nothing is fused but the count; agrees with mat_row (model/weights.c) bit for bit.
 * Bytes: H/2 + H/16 of weights, 4H written, 8 of the count. Not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_common.h"

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
    const float scale = decode_bf16(scales[group]);
    const float bias = decode_bf16(biases[group]);
    const uint4 low = uint4(w, w >> 4, w >> 8, w >> 12) & 0xfu;
    const uint4 high = uint4(w >> 16, w >> 20, w >> 24, w >> 28) & 0xfu;
    h[2 * octet] = scale * float4(low) + bias;
    h[2 * octet + 1] = scale * float4(high) + bias;
    if (octet == 0 && args.count != 0) counts[token] = max(counts[token], 1u) + 1;
}
