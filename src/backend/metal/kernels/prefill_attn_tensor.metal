/* Mathematics: that of prefill_attn_prep.metal and prefill_attn.metal; weights of P V are bf16.
 * Layout: as there, but queries bf16 [kv_heads][n][8][256]: 64 rows are a plain matrix. Metal 4.0.
 * Threads: 8 tokens of a kv head (64 rows) a threadgroup; its 8 simdgroups multiply together.
 * Fused: as there. Agrees with attend (ref/attention.c) to 2^-8 of each weight; whole = split.
 * Bytes: 1,024 a position and 32 KiB of queries a block of 64 query rows; not measured on Macs. */
#include <metal_stdlib>
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
#define PREFILL_QUERIES_BY_HEAD
#define prefill_attn_prep prefill_attn_prep_tensor
#include "prefill_attn_prep.metal"
#undef PREFILL_QUERIES_BY_HEAD

#include "prefill_attn_tensor.h"

/* Blocks and spans are those of prefill_attn.metal, whose prefill_attn_merge joins what _split
 * leaves here too. */

KERNEL_THREADS(PREFILL_ATTN_THREADS)
kernel void prefill_attn_tensor(constant prefill_attn_args &args [[buffer(PREFILL_ATTN_ARGS)]],
                                device bfloat *query [[buffer(PREFILL_ATTN_QUERY)]],
                                device bfloat *keys [[buffer(PREFILL_ATTN_KEYS)]],
                                device bfloat *values [[buffer(PREFILL_ATTN_VALUES)]],
                                device const float *qg [[buffer(PREFILL_ATTN_QG)]],
                                device bfloat *out [[buffer(PREFILL_ATTN_OUT)]],
                                device float *total [[buffer(PREFILL_ATTN_TOTAL)]],
                                uint2 group [[threadgroup_position_in_grid]],
                                uint2 groups [[threadgroups_per_grid]],
                                uint lane [[thread_index_in_simdgroup]],
                                uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    ATTN_MEMORY(memory);
    const uint first = (groups.x - 1 - group.x) * ATTN_TOKENS; /* those that see most begin first */
    const uint at = (first * SHAPE_KV_HEADS + group.y) * (ATTN_HEADS * ATTN_DIM);
    attn_tile t = attn_tile_of(args, query, keys, values, first, group.y);
    t.gate = qg + first * args.qg_stride + group.y * (ATTN_HEADS * 2 * ATTN_DIM) + ATTN_DIM;
    t.out = out + at;
    t.total = total + at;
    t.stats = nullptr;
    attn_run<false>(t, memory, 0, (t.end - 1) / ATTN_BLOCK + 1, simdgroup, lane);
}

KERNEL_THREADS(PREFILL_ATTN_THREADS)
kernel void prefill_attn_split_tensor(constant prefill_attn_args &args
                                      [[buffer(PREFILL_ATTN_SPLIT_ARGS)]],
                                      device bfloat *query [[buffer(PREFILL_ATTN_SPLIT_QUERY)]],
                                      device bfloat *keys [[buffer(PREFILL_ATTN_SPLIT_KEYS)]],
                                      device bfloat *values [[buffer(PREFILL_ATTN_SPLIT_VALUES)]],
                                      device float *total [[buffer(PREFILL_ATTN_SPLIT_TOTAL)]],
                                      device float2 *stats [[buffer(PREFILL_ATTN_SPLIT_STATS)]],
                                      uint3 group [[threadgroup_position_in_grid]],
                                      uint lane [[thread_index_in_simdgroup]],
                                      uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    ATTN_MEMORY(memory);
    const uint first = group.x * ATTN_TOKENS;
    const uint block = group.z * ATTN_SPAN_BLOCKS;
    const uint blocks =
        min(block + ATTN_SPAN_BLOCKS, (attn_seen_by(args, first) - 1) / ATTN_BLOCK + 1);
    if (block >= blocks) return; /* the whole threadgroup: none of its tokens sees this span */
    const uint head = (group.z * args.rows + first) * SHAPE_Q_HEADS + group.y * ATTN_HEADS;
    attn_tile t = attn_tile_of(args, query, keys, values, first, group.y);
    t.gate = nullptr;
    t.out = nullptr;
    t.total = total + head * ATTN_DIM;
    t.stats = stats + head;
    attn_run<true>(t, memory, block, blocks, simdgroup, lane);
}
