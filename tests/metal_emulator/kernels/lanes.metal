// Each operation across lanes, one result for each lane.
#include <metal_stdlib>
using namespace metal;

kernel void lanes(device const int *in [[buffer(0)]], device int *out [[buffer(1)]],
                  uint lane [[thread_index_in_simdgroup]]) {
    const int v = in[lane];
    out[0 * 32 + lane] = simd_sum(v);
    out[1 * 32 + lane] = simd_max(v);
    out[2 * 32 + lane] = simd_min(v);
    out[3 * 32 + lane] = simd_shuffle_xor(v, 5);
    out[4 * 32 + lane] = simd_shuffle_down(v, 3);
    out[5 * 32 + lane] = simd_shuffle_up(v, 3);
    out[6 * 32 + lane] = simd_prefix_exclusive_sum(v);
    out[7 * 32 + lane] = simd_prefix_inclusive_sum(v);
    out[8 * 32 + lane] = int(uint(ulong(simd_ballot(v > 0))));
    out[9 * 32 + lane] = simd_broadcast(v, 7);
    out[10 * 32 + lane] = simd_shuffle(v, ushort(31 - lane));
    out[11 * 32 + lane] = simd_any(v == 3) ? 1 : 0;
}
