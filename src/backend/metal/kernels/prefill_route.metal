/* Mathematics: sorted[8n] = pairs 8 * row + rank by expert, rows ascending; blocks of at most 32.
 * Layout: ids uint16 [n, 8], distinct in a row; sorted uint32; blocks uint32 [max][4].
 * Threads: each threadgroup counts all pairs and places those of 8 experts, one a simdgroup.
 * Fused: histogram, scan, scatter, block map. Agrees with router_group (backend/cpu/router.c).
 * Bytes: ids 16n (cached: 9.4 MB at 2048), sorted 32n, blocks 16 each; not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "tile.h"

/* A block is expert, first place, pairs, 0; those not needed have 0 pairs. 32 rows at a time are
 * placed by ballots: no order depends on timing, and no word passes between threadgroups. */

static_assert(SHAPE_EXPERTS % PREFILL_ROUTE_SIMDS == 0, "whole threadgroups of experts");
static_assert(SHAPE_TOP_K == 8, "a row's experts are one 16 byte read");

inline uint route_blocks(uint pairs) {
    return (pairs + PREFILL_TILE_M - 1) / PREFILL_TILE_M;
}

/* Rank of the expert among the row's eight, or 8. */
inline uint route_rank(uint4 ids, uint expert) {
    uint rank = SHAPE_TOP_K;
    UNROLL
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
        const uint4 eight = ids[row];
        UNROLL
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
        const uint row = first + lane;
        const uint rank = row < rows ? route_rank(ids[row], expert) : (uint)SHAPE_TOP_K;
        const bool chosen = rank < SHAPE_TOP_K;
        const uint votes = (uint)(ulong)simd_ballot(chosen);
        if (chosen) sorted[at + popcount(votes & ((1u << lane) - 1))] = row * SHAPE_TOP_K + rank;
        at += popcount(votes);
    }
}

KERNEL_THREADS(PREFILL_ROUTE_THREADS)
kernel void prefill_route(constant prefill_route_args &args [[buffer(PREFILL_ROUTE_ARGS)]],
                          device const uint4 *ids [[buffer(PREFILL_ROUTE_IDS)]],
                          device uint *sorted [[buffer(PREFILL_ROUTE_SORTED)]],
                          device uint4 *blocks [[buffer(PREFILL_ROUTE_BLOCKS)]],
                          uint group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
    threadgroup uint counts[SHAPE_EXPERTS];
    route_count(ids, args.rows, counts, thread_index);
    const uint expert = group * PREFILL_ROUTE_SIMDS + thread_index / 32;
    const uint lane = thread_index % 32;
    uint3 before = uint3(0); /* pairs and blocks of the experts before, blocks of all */
    for (uint e = lane; e < SHAPE_EXPERTS; e += 32) {
        const uint count = counts[e];
        const uint b = route_blocks(count);
        before += e < expert ? uint3(count, b, b) : uint3(0, 0, b);
    }
    const uint first = simd_sum(before.x);
    const uint block = simd_sum(before.y);
    const uint all = simd_sum(before.z);
    const uint count = counts[expert];
    route_place(ids, sorted, args.rows, expert, first, lane);
    for (uint b = lane; b < route_blocks(count); b += 32) {
        const uint done = b * PREFILL_TILE_M;
        blocks[block + b] = uint4(expert, first + done, min(count - done, (uint)PREFILL_TILE_M), 0);
    }
    if (expert != SHAPE_EXPERTS - 1) return;
    for (uint b = all + lane; b < args.blocks; b += 32) blocks[b] = uint4(0);
}
