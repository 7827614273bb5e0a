/* Mathematics: logits = router x; w = softmax of 8; h += sum w down(silu(gate x) up x) + shared.
 * Layout: router, shared gate 8 bits, the rest 4, row-major; expert e at e * expert_stride bytes.
 * Threads: a simdgroup makes a wave of rows (router), two waves of pairs (up), of nine rows (down).
 * Fused: norm, choice, SiLU, weighted sum, residual. Agrees with ref/moe.c: the choice exactly.
 * Bytes: weights; a group 8H (router), 4H + 4E (up), 36I + 4E (down); not measured on a Mac. */
#include <metal_stdlib>
using namespace metal;
#include "decode_rows.h"

/* x = norm(h); the shared expert, times sigmoid of a scalar, is the ninth. Down has the nine
 * vectors side by side in threadgroup memory, 18 KB, and reads a row of all nine matrices at once.
 * All but the choice agrees with ref up to the order of sums. */

/* ---- router --------------------------------------------------------------------------------- */

KERNEL_THREADS(DECODE_ROUTER_THREADS)
kernel void decode_router(
    device const float4 *h [[buffer(DECODE_ROUTER_H)]],
    device const float4 *norm [[buffer(DECODE_ROUTER_NORM)]],
    device const uint4 *router [[buffer(DECODE_ROUTER_LOGITS_W)]],
    device const ushort *router_scales [[buffer(DECODE_ROUTER_LOGITS_W + 1)]],
    device const ushort *router_biases [[buffer(DECODE_ROUTER_LOGITS_W + 2)]],
    device const uint4 *scalar [[buffer(DECODE_ROUTER_SHARED_GATE)]],
    device const ushort *scalar_scales [[buffer(DECODE_ROUTER_SHARED_GATE + 1)]],
    device const ushort *scalar_biases [[buffer(DECODE_ROUTER_SHARED_GATE + 2)]],
    device const uint4 *gate [[buffer(DECODE_ROUTER_GATE)]],
    device const ushort *gate_scales [[buffer(DECODE_ROUTER_GATE + 1)]],
    device const ushort *gate_biases [[buffer(DECODE_ROUTER_GATE + 2)]],
    device const uint4 *up [[buffer(DECODE_ROUTER_UP)]],
    device const ushort *up_scales [[buffer(DECODE_ROUTER_UP + 1)]],
    device const ushort *up_biases [[buffer(DECODE_ROUTER_UP + 2)]],
    device float4 *normed [[buffer(DECODE_ROUTER_X)]],
    device float *logits [[buffer(DECODE_ROUTER_LOGITS)]],
    device float *shared [[buffer(DECODE_ROUTER_SHARED)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum {
        BYTE_GROUPS = DECODE_CEIL(SHAPE_EXPERTS + 1, DECODE_BYTE_ROWS(SHAPE_HIDDEN)),
        BYTE_WAVE = DECODE_BYTE_ROWS(SHAPE_HIDDEN) / 8
    };
    threadgroup float4 x[HIDDEN_QUADS];
    threadgroup float sums[HIDDEN_CHUNKS];
    threadgroup float partial[DECODE_ROUTER_THREADS / 32];
    const float r = decode_stage_norm<SHAPE_HIDDEN, DECODE_ROUTER_THREADS>(h, norm, x, sums,
                                                                           partial, thread_index);
    if (group == 0) {
        for (uint i = thread_index; i < SHAPE_HIDDEN / 4; i += DECODE_ROUTER_THREADS) {
            normed[i] = h[i] * norm[i] * r;
        }
    }
    if (group < BYTE_GROUPS) {
        const uint wave = (group * 8 + simdgroup) * BYTE_WAVE;
        if (wave > SHAPE_EXPERTS) return; /* the whole simdgroup */
        const uint row = wave + lane / (32 / BYTE_WAVE);
        const bool routed = row < SHAPE_EXPERTS;
        quantised m = quantised_of(scalar, scalar_scales, scalar_biases);
        if (routed) m = quantised_of(router, router_scales, router_biases);
        const float y = decode_byte_row<SHAPE_HIDDEN>(m, routed ? row : 0, x, sums, lane);
        if (lane % (32 / BYTE_WAVE) == 0 && row <= SHAPE_EXPERTS) logits[row] = y * r;
    } else {
        const uint first =
            ((group - BYTE_GROUPS) * 8 + simdgroup) * DECODE_WAVE_ROWS(SHAPE_HIDDEN) +
            decode_lane_row<SHAPE_HIDDEN>(lane);
        float y[1];
        decode_pairs<SHAPE_HIDDEN, 1>(quantised_of(gate, gate_scales, gate_biases),
                                      quantised_of(up, up_scales, up_biases), first,
                                      SHAPE_SHARED_WIDTH, r, x, sums, lane, y);
        if (decode_lane_part<SHAPE_HIDDEN>(lane) == 0 && first < SHAPE_SHARED_WIDTH) {
            shared[first] = y[0];
        }
    }
}

/* ---- the choice ----------------------------------------------------------------------------- */

/* The eight largest logits, in descending order, ties to the lower id: ids to chosen[8]. One
 * simdgroup; lanes 0 .. 7 return their expert's share of softmax over the eight, others 0. */
inline float moe_choose(device const float *logits, threadgroup uint *chosen, uint lane) {
    enum { MINE = SHAPE_EXPERTS / 32 };
    static_assert(SHAPE_EXPERTS % 32 == 0 && SHAPE_TOP_K == 8, "a lane has every 32nd expert");
    uint keys[MINE];
    UNROLL
    for (int i = 0; i < MINE; i++) keys[i] = ordered_key(logits[i * 32 + lane]);
    uint mine = 0;
    uint first = 0;
    for (uint j = 0; j < SHAPE_TOP_K; j++) {
        uint best = keys[0];
        uint id = lane;
        UNROLL
        for (int i = 1; i < MINE; i++) {
            id = keys[i] > best ? (uint)i * 32 + lane : id;
            best = max(best, keys[i]);
        }
        const uint largest = simd_max(best);
        id = simd_min(best == largest ? id : (uint)SHAPE_EXPERTS - 1); /* valid whatever happens */
        UNROLL
        for (int i = 0; i < MINE; i++) keys[i] = (uint)i * 32 + lane == id ? 0 : keys[i];
        if (lane == 0) chosen[j] = id;
        if (j == 0) first = largest;
        if (lane == j) mine = largest;
    }
    float share = 0.0f;
    if (lane < SHAPE_TOP_K) share = precise::exp(ordered_value(mine) - ordered_value(first));
    return share / lanes_sum<32>(share);
}

/* ---- up ------------------------------------------------------------------------------------- */

KERNEL_THREADS(DECODE_EXPERTS_UP_THREADS)
kernel void decode_experts_up(
    constant decode_experts_args &args [[buffer(DECODE_EXPERTS_UP_ARGS)]],
    device const float4 *normed [[buffer(DECODE_EXPERTS_UP_X)]],
    device const float *logits [[buffer(DECODE_EXPERTS_UP_LOGITS)]],
    device const uint4 *gate [[buffer(DECODE_EXPERTS_UP_GATE)]],
    device const ushort *gate_scales [[buffer(DECODE_EXPERTS_UP_GATE + 1)]],
    device const ushort *gate_biases [[buffer(DECODE_EXPERTS_UP_GATE + 2)]],
    device const uint4 *up [[buffer(DECODE_EXPERTS_UP_UP)]],
    device const ushort *up_scales [[buffer(DECODE_EXPERTS_UP_UP + 1)]],
    device const ushort *up_biases [[buffer(DECODE_EXPERTS_UP_UP + 2)]],
    device float *inner [[buffer(DECODE_EXPERTS_UP_INNER)]],
    uint group [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum { PARTS = DECODE_CEIL(SHAPE_EXPERT_WIDTH, DECODE_UP_ROWS(SHAPE_HIDDEN)), R = 2 };
    threadgroup float4 x[HIDDEN_QUADS];
    threadgroup float sums[HIDDEN_CHUNKS];
    threadgroup uint chosen[SHAPE_TOP_K];
    for (uint octet = thread_index; octet < SHAPE_HIDDEN / 8; octet += DECODE_EXPERTS_UP_THREADS) {
        decode_stage<SHAPE_HIDDEN>(x, sums, octet, SHAPE_HIDDEN / 8, normed[2 * octet],
                                   normed[2 * octet + 1]);
    }
    if (simdgroup == 7) moe_choose(logits, chosen, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    const uint rank = group / PARTS;
    const size_t at = (size_t)chosen[rank] * args.expert_stride;
    const uint first = group % PARTS * DECODE_UP_ROWS(SHAPE_HIDDEN) +
                       simdgroup * R * DECODE_WAVE_ROWS(SHAPE_HIDDEN) +
                       decode_lane_row<SHAPE_HIDDEN>(lane);
    float y[R];
    decode_pairs<SHAPE_HIDDEN, R>(quantised_at(quantised_of(gate, gate_scales, gate_biases), at),
                                  quantised_at(quantised_of(up, up_scales, up_biases), at), first,
                                  SHAPE_EXPERT_WIDTH, 1.0f, x, sums, lane, y);
    const uint mine = decode_lane_part<SHAPE_HIDDEN>(lane);
    const uint row = first + mine * DECODE_WAVE_ROWS(SHAPE_HIDDEN);
    if (mine < R && row < SHAPE_EXPERT_WIDTH) {
        inner[rank * SHAPE_EXPERT_WIDTH + row] = decode_pick<R>(y, mine);
    }
}

/* ---- down ----------------------------------------------------------------------------------- */

KERNEL_THREADS(DECODE_EXPERTS_DOWN_THREADS)
kernel void decode_experts_down(
    constant decode_experts_args &args [[buffer(DECODE_EXPERTS_DOWN_ARGS)]],
    device const float *logits [[buffer(DECODE_EXPERTS_DOWN_LOGITS)]],
    device const float4 *inner [[buffer(DECODE_EXPERTS_DOWN_INNER)]],
    device const float4 *shared [[buffer(DECODE_EXPERTS_DOWN_SHARED)]],
    device const uint4 *down [[buffer(DECODE_EXPERTS_DOWN_DOWN)]],
    device const ushort *down_scales [[buffer(DECODE_EXPERTS_DOWN_DOWN + 1)]],
    device const ushort *down_biases [[buffer(DECODE_EXPERTS_DOWN_DOWN + 2)]],
    device const uint4 *shared_down [[buffer(DECODE_EXPERTS_DOWN_SHARED_DOWN)]],
    device const ushort *shared_scales [[buffer(DECODE_EXPERTS_DOWN_SHARED_DOWN + 1)]],
    device const ushort *shared_biases [[buffer(DECODE_EXPERTS_DOWN_SHARED_DOWN + 2)]],
    device float *h [[buffer(DECODE_EXPERTS_DOWN_H)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
    enum {
        I = SHAPE_EXPERT_WIDTH,
        NINE = 9 * I, /* the vectors of eight experts and of the shared one */
        QUADS = DECODE_QUADS(NINE),
        CHUNKS = DECODE_CHUNKS(NINE),
        LANES = 32 / DECODE_WAVE_ROWS(I),
        R = 2,
        AT_ONCE = 3 /* experts whose codes are on their way together */
    };
    static_assert(SHAPE_SHARED_WIDTH == I && I <= 1024,
                  "nine equal vectors, one read of a row each");
    threadgroup float4 x[QUADS];
    threadgroup float sums[CHUNKS];
    threadgroup uint chosen[SHAPE_TOP_K];
    threadgroup float weights[SHAPE_TOP_K + 1];
    for (uint octet = thread_index; octet < DECODE_CEIL(NINE / 8, 32) * 32;
         octet += DECODE_EXPERTS_DOWN_THREADS) {
        float4 low = float4(0.0f);
        float4 high = float4(0.0f);
        if (octet < I) { /* eight vectors of I / 8 octets */
            low = inner[2 * octet];
            high = inner[2 * octet + 1];
        } else if (octet < NINE / 8) {
            low = shared[2 * (octet - I)];
            high = shared[2 * (octet - I) + 1];
        }
        decode_stage<NINE>(x, sums, octet, NINE / 8, low, high);
    }
    if (simdgroup == 3) {
        const float share = moe_choose(logits, chosen, lane);
        if (lane < SHAPE_TOP_K) weights[lane] = share;
        if (lane == SHAPE_TOP_K) weights[lane] = sigmoid(logits[SHAPE_EXPERTS]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */

    const uint first = group * DECODE_DOWN_ROWS(I) + simdgroup * R * DECODE_WAVE_ROWS(I) +
                       decode_lane_row<I>(lane);
    const uint part = decode_lane_part<I>(lane);
    uint place[R];
    float y[R];
    decode_places<I, R>(first, SHAPE_HIDDEN, lane, place);
    UNROLL
    for (int i = 0; i < R; i++) y[i] = 0.0f;
    UNROLL
    for (uint from = 0; from <= SHAPE_TOP_K; from += AT_ONCE) {
        decode_codes<R> codes[AT_ONCE];
        UNROLL
        for (uint j = 0; j < AT_ONCE; j++) {
            quantised m = quantised_of(shared_down, shared_scales, shared_biases);
            if (from + j < SHAPE_TOP_K) {
                m = quantised_at(quantised_of(down, down_scales, down_biases),
                                 (size_t)chosen[from + j] * args.expert_stride);
            }
            codes[j] = decode_fetch<R>(m, place);
        }
        UNROLL
        for (uint j = 0; j < AT_ONCE; j++) {
            float own[R];
            UNROLL
            for (int i = 0; i < R; i++) own[i] = 0.0f;
            const uint at = (from + j) * DECODE_CHUNKS(I) + part;
            decode_multiply<DECODE_CHUNKS(NINE), R>(codes[j], at, x, sums, own);
            UNROLL
            for (int i = 0; i < R; i++) y[i] = fma(weights[from + j], own[i], y[i]);
        }
    }
    UNROLL
    for (int i = 0; i < R; i++) y[i] = lanes_sum<LANES>(y[i]);
    const uint row = first + part * DECODE_WAVE_ROWS(I);
    if (part < R && row < SHAPE_HIDDEN) h[row] += decode_pick<R>(y, part);
}
