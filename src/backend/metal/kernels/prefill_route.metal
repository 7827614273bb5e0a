// 1 Mathematics: sorted[8n] = the pairs 8 * row + rank by expert, rows ascending within one;
//   blocks = runs of at most 32 pairs of one expert.
// 2 Layout: ids uint16 [n, 8], the eight of a row distinct; sorted uint32; blocks uint32 [max][4]:
//   expert, first place, pairs, 0; those not needed have 0 pairs.
// 3 Threads: each threadgroup counts all pairs (64 per thread at n = 2048) and places those of 8
//   experts, one per simdgroup, 32 rows at a time, by ballots: no order depends on timing.
// 4 Fused: histogram, exclusive scan, scatter, block map, with no word between threadgroups. Agrees
//   with router_group (backend/cpu/router.c).
// 5 Bytes: ids 16 n once per threadgroup to count, once per simdgroup to place (9.4 MB from cache
//   at n = 2048, 33 KB at least), sorted 32 n, blocks 16 each written once. Not measured on a Mac.
#include <metal_stdlib>
using namespace metal;
#include "prefill_gemm_args.h"

static_assert(SHAPE_EXPERTS % PREFILL_ROUTE_SIMDS == 0, "whole threadgroups of experts");
static_assert(SHAPE_TOP_K == 8, "a row's experts are one 16 byte read");

inline uint route_blocks(uint pairs) {
    return (pairs + PREFILL_TILE_M - 1) / PREFILL_TILE_M;
}

/* Rank of the expert among the row's eight, or 8. */
inline uint route_rank(uint4 ids, uint expert) {
    uint rank = SHAPE_TOP_K;
    for (uint i = 0; i < 4; i++) {
        if ((ids[i] & 0xFFFFu) == expert) rank = 2 * i;
        if (ids[i] >> 16 == expert) rank = 2 * i + 1;
    }
    return rank;
}

/* Counts do not depend on the order of the additions, so these atomics keep results fixed. */
inline void route_count(device const uint4 *ids, uint rows, threadgroup uint *counts,
                        uint thread_index) {
    threadgroup atomic_uint *atomics = (threadgroup atomic_uint *)counts;
    for (uint e = thread_index; e < SHAPE_EXPERTS; e += PREFILL_ROUTE_THREADS) counts[e] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* CLEARED */
    for (uint row = thread_index; row < rows; row += PREFILL_ROUTE_THREADS) {
        uint4 eight = ids[row];
        for (uint i = 0; i < 4; i++) {
            atomic_fetch_add_explicit(&atomics[eight[i] & 0xFFFFu], 1u, memory_order_relaxed);
            atomic_fetch_add_explicit(&atomics[eight[i] >> 16], 1u, memory_order_relaxed);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* COUNTED */
}

/* The pairs of one expert from place `at` on, by one simdgroup. */
inline void route_place(device const uint4 *ids, device uint *sorted, uint rows, uint expert,
                        uint at, uint lane) {
    for (uint first = 0; first < rows; first += 32) {
        uint row = first + lane;
        uint rank = row < rows ? route_rank(ids[row], expert) : (uint)SHAPE_TOP_K;
        bool chosen = rank < SHAPE_TOP_K;
        uint votes = (uint)(ulong)simd_ballot(chosen);
        if (chosen) sorted[at + popcount(votes & ((1u << lane) - 1))] = row * SHAPE_TOP_K + rank;
        at += popcount(votes);
    }
}

[[max_total_threads_per_threadgroup(PREFILL_ROUTE_THREADS)]]
kernel void prefill_route(device const uint4 *ids [[buffer(PREFILL_ROUTE_IDS)]],
                          device uint *sorted [[buffer(PREFILL_ROUTE_SORTED)]],
                          device uint4 *blocks [[buffer(PREFILL_ROUTE_BLOCKS)]],
                          constant prefill_route_args &args [[buffer(PREFILL_ROUTE_ARGS)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint counts[SHAPE_EXPERTS];
    route_count(ids, args.rows, counts, thread_index);
    uint expert = group * PREFILL_ROUTE_SIMDS + thread_index / 32;
    uint lane = thread_index % 32;
    uint3 before = uint3(0); /* pairs and blocks of the experts before, blocks of all */
    for (uint e = lane; e < SHAPE_EXPERTS; e += 32) {
        uint count = counts[e];
        uint b = route_blocks(count);
        before += e < expert ? uint3(count, b, b) : uint3(0, 0, b);
    }
    uint first = simd_sum(before.x);
    uint block = simd_sum(before.y);
    uint all = simd_sum(before.z);
    uint count = counts[expert];
    route_place(ids, sorted, args.rows, expert, first, lane);
    for (uint b = lane; b < route_blocks(count); b += 32) {
        uint done = b * PREFILL_TILE_M;
        blocks[block + b] = uint4(expert, first + done, min(count - done, (uint)PREFILL_TILE_M), 0);
    }
    if (expert != SHAPE_EXPERTS - 1) return;
    for (uint b = all + lane; b < args.blocks; b += 32) blocks[b] = uint4(0);
}
