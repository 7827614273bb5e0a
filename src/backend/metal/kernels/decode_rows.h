/* Quantised rows times a vector, and the vector itself as threadgroups stage it: what the decode
 * kernels share.
 *
 * A simdgroup reads a row of 4-bit codes 16 bytes a lane, 512 neighbouring bytes at once; a row
 * shorter than that shares the read with its neighbours (DECODE_WAVE_ROWS). Each lane takes the
 * same part of R rows, so that the vector's part is fetched once for R of them:
 *
 *   y = sum over groups of 64: scale * sum(code * x) + bias * sum(x)
 *
 * The vector lies in threadgroup memory as [8 quads][COLS / 32 chunks] float4, so that lanes with
 * neighbouring chunks read neighbouring 16 bytes. Element e of every eight is kept divided by
 * 16^e: a code can then stay where it is in its word, masked but not shifted (powers of two:
 * exact). Sums of the chunks stand beside it for the bias. All sums are float32 in one fixed order.
 */
#ifndef LILY_METAL_DECODE_ROWS_H
#define LILY_METAL_DECODE_ROWS_H

#include "common.h"
#include "decode_args.h"

/* Four products on top of sum, one after the other. */
inline float decode_dot4(float4 a, float4 b, float sum) {
    return fma(a.w, b.w, fma(a.z, b.z, fma(a.y, b.y, fma(a.x, b.x, sum))));
}

/* ---- the staged vector ---------------------------------------------------------------------- */

#define DECODE_QUADS(cols)  ((cols) / 4)  /* float4 of a staged vector of so many elements */
#define DECODE_CHUNKS(cols) ((cols) / 32) /* sums of it */
enum { HIDDEN_QUADS = DECODE_QUADS(SHAPE_HIDDEN), HIDDEN_CHUNKS = DECODE_CHUNKS(SHAPE_HIDDEN) };

#define DECODE_LOW  float4(1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096)
#define DECODE_HIGH (DECODE_LOW * (1.0f / 65536))

/* Puts elements 8 * octet .. + 7 in place. All lanes take part, octets ascend with them from a
 * multiple of 32; those from `octets` on are ignored. */
template <int COLS>
inline void decode_stage(threadgroup float4 *x, threadgroup float *sums, uint octet, uint octets,
                         float4 low, float4 high) {
    const uint chunk = octet / 4;
    const uint part = octet % 4;
    const float sum = neighbours_sum<4>(sum4(low) + sum4(high));
    if (octet < octets) {
        x[2 * part * DECODE_CHUNKS(COLS) + chunk] = low * DECODE_LOW;
        x[(2 * part + 1) * DECODE_CHUNKS(COLS) + chunk] = high * DECODE_HIGH;
        if (part == 0) sums[chunk] = sum;
    }
}

/* Stages v * weight and returns 1 / sqrt(mean(v^2) + eps), by which every product with the staged
 * vector is yet to be multiplied. partial: [threads / 32]. Ends with a barrier. */
template <int COLS, int THREADS>
inline float decode_stage_norm(device const float4 *v, device const float4 *weight,
                               threadgroup float4 *x, threadgroup float *sums,
                               threadgroup float *partial, uint thread_index) {
    static_assert(COLS % 256 == 0, "whole simdgroups stage");
    float squares = 0.0f;
    for (uint octet = thread_index; octet < COLS / 8; octet += THREADS) {
        const float4 low = v[2 * octet];
        const float4 high = v[2 * octet + 1];
        squares = decode_dot4(high, high, decode_dot4(low, low, squares));
        decode_stage<COLS>(x, sums, octet, COLS / 8, low * weight[2 * octet],
                           high * weight[2 * octet + 1]);
    }
    squares = lanes_sum<32>(squares);
    if (thread_index % 32 == 0) partial[thread_index / 32] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup); /* STAGED */
    float total = 0.0f;
    for (int i = 0; i < THREADS / 32; i++) total += partial[i];
    return norm_factor(total, COLS);
}

/* ---- rows of 4 bits -------------------------------------------------------------------------- */

/* sum of code * x over eight codes: a = x[0..3], b = x[4..7], as staged. */
inline float decode_dot8(uint w, float4 a, float4 b, float sum) {
    sum = fma((float)(w & 0xfu), a.x, sum);
    sum = fma((float)(w & 0xf0u), a.y, sum);
    sum = fma((float)(w & 0xf00u), a.z, sum);
    sum = fma((float)(w & 0xf000u), a.w, sum);
    sum = fma((float)(w & 0xf0000u), b.x, sum);
    sum = fma((float)(w & 0xf00000u), b.y, sum);
    sum = fma((float)(w & 0xf000000u), b.z, sum);
    return fma((float)(w & 0xf0000000u), b.w, sum);
}

/* One chunk of R rows as it comes from memory: codes, and their group's scale and bias. */
template <int R> struct decode_codes {
    uint4 w[R];
    float scale[R];
    float bias[R];
};
/* place[r]: of row r's chunk in the matrix, in units of 16 bytes. */
template <int R> inline decode_codes<R> decode_fetch(quantised m, thread const uint *place) {
    decode_codes<R> c;
    UNROLL
    for (int r = 0; r < R; r++) {
        c.w[r] = m.codes[place[r]];
        c.scale[r] = bf16_value(m.scales[place[r] / 2]);
        c.bias[r] = bf16_value(m.biases[place[r] / 2]);
    }
    return c;
}
/* y[r] += chunk of row r times chunk `at` of a staged vector of CHUNKS. */
template <int CHUNKS, int R>
inline void decode_multiply(thread const decode_codes<R> &c, uint at, threadgroup const float4 *x,
                            threadgroup const float *sums, thread float *y) {
    float dot[R];
    UNROLL
    for (int r = 0; r < R; r++) dot[r] = 0.0f;
    UNROLL
    for (int part = 0; part < 4; part++) {
        const float4 a = x[2 * part * CHUNKS + at];
        const float4 b = x[(2 * part + 1) * CHUNKS + at];
        UNROLL
        for (int r = 0; r < R; r++) dot[r] = decode_dot8(c.w[r][part], a, b, dot[r]);
    }
    const float sum = sums[at];
    UNROLL
    for (int r = 0; r < R; r++) y[r] = fma(c.scale[r], dot[r], fma(c.bias[r], sum, y[r]));
}

/* Where a lane stands in a wave of DECODE_WAVE_ROWS(COLS) rows of COLS columns: its first row, and
 * which of its chunks, and of its rows to write, it begins with. */
template <int COLS> inline uint decode_lane_row(uint lane) {
    return lane / (32 / DECODE_WAVE_ROWS(COLS));
}
template <int COLS> inline uint decode_lane_part(uint lane) {
    return lane % (32 / DECODE_WAVE_ROWS(COLS));
}

/* place[r] of the lane's first chunk in its r-th row, `first` + r waves; rows from `rows` on are
 * read as the last one. */
template <int COLS, int R>
inline void decode_places(uint first, uint rows, uint lane, thread uint *place) {
    static_assert((COLS & (COLS - 1)) == 0 && COLS >= 64, "a row is a power of two");
    UNROLL
    for (int r = 0; r < R; r++) {
        const uint row = min(first + r * DECODE_WAVE_ROWS(COLS), rows - 1);
        place[r] = row * DECODE_CHUNKS(COLS) + decode_lane_part<COLS>(lane);
    }
}

/* y[r] = row first + r * DECODE_WAVE_ROWS(COLS) of m times the staged vector, in every lane of the
 * row. `first` is the lane's: lanes of one wave can have neighbouring rows. */
template <int COLS, int R>
inline void decode_rows(quantised m, uint first, uint rows, threadgroup const float4 *x,
                        threadgroup const float *sums, uint lane, thread float *y) {
    enum { CHUNKS = DECODE_CHUNKS(COLS), LANES = 32 / DECODE_WAVE_ROWS(COLS) };
    uint place[R];
    decode_places<COLS, R>(first, rows, lane, place);
    UNROLL
    for (int r = 0; r < R; r++) y[r] = 0.0f;
    UNROLL
    for (int step = 0; step < CHUNKS / LANES; step++) {
        const decode_codes<R> c = decode_fetch<R>(m, place);
        decode_multiply<CHUNKS, R>(c, decode_lane_part<COLS>(lane) + step * LANES, x, sums, y);
        UNROLL
        for (int r = 0; r < R; r++) place[r] += LANES;
    }
    UNROLL
    for (int r = 0; r < R; r++) y[r] = lanes_sum<LANES>(y[r]);
}

/* y[i] without an index that the compiler does not know: y stays in registers. */
template <int R> inline float decode_pick(thread const float *y, uint i) {
    float value = y[0];
    UNROLL
    for (int k = 1; k < R; k++) {
        const float other = y[k];
        value = i == (uint)k ? other : value;
    }
    return value;
}

/* The rows of decode_rows, times r, to out[row], or added to it: each by one lane. */
template <int COLS, int R, bool ADD>
inline void decode_rows_out(quantised m, uint first, uint rows, float r,
                            threadgroup const float4 *x, threadgroup const float *sums, uint lane,
                            device float *out) {
    float y[R];
    decode_rows<COLS, R>(m, first, rows, x, sums, lane, y);
    const uint mine = decode_lane_part<COLS>(lane);
    const uint row = first + mine * DECODE_WAVE_ROWS(COLS);
    if (mine < R && row < rows) {
        const float value = decode_pick<R>(y, mine) * r;
        out[row] = ADD ? out[row] + value : value;
    }
}

/* As decode_rows, of two matrices that are used in pairs: silu(gate x) * up x. r: that of
 * decode_stage_norm, or 1. */
template <int COLS, int R>
inline void decode_pairs(quantised gate, quantised up, uint first, uint rows, float r,
                         threadgroup const float4 *x, threadgroup const float *sums, uint lane,
                         thread float *y) {
    enum { CHUNKS = DECODE_CHUNKS(COLS), LANES = 32 / DECODE_WAVE_ROWS(COLS) };
    uint place[R];
    float u[R];
    decode_places<COLS, R>(first, rows, lane, place);
    UNROLL
    for (int i = 0; i < R; i++) y[i] = u[i] = 0.0f;
    UNROLL
    for (int step = 0; step < CHUNKS / LANES; step++) {
        const uint at = decode_lane_part<COLS>(lane) + step * LANES;
        const decode_codes<R> c = decode_fetch<R>(gate, place);
        const decode_codes<R> d = decode_fetch<R>(up, place);
        decode_multiply<CHUNKS, R>(c, at, x, sums, y);
        decode_multiply<CHUNKS, R>(d, at, x, sums, u);
        UNROLL
        for (int i = 0; i < R; i++) place[i] += LANES;
    }
    UNROLL
    for (int i = 0; i < R; i++) {
        const float g = lanes_sum<LANES>(y[i]) * r;
        y[i] = silu(g) * (lanes_sum<LANES>(u[i]) * r);
    }
}

/* ---- rows of 8 bits -------------------------------------------------------------------------- */

/* One row of 8-bit codes times the staged vector; lanes take 16 codes each. */
template <int COLS>
inline float decode_byte_row(quantised m, uint row, threadgroup const float4 *x,
                             threadgroup const float *sums, uint lane) {
    enum { HALVES = COLS / 16, LANES = HALVES < 32 ? HALVES : 32, CHUNKS = COLS / 32 };
    float y = 0.0f;
    for (uint at = lane % LANES; at < HALVES; at += LANES) {
        const uint4 w = m.codes[row * HALVES + at];
        const uint group = (row * HALVES + at) / 4;
        const uint odd = at % 2;
        float dot = 0.0f;
        UNROLL
        for (int part = 0; part < 4; part++) {
            /* The staged factors 16^-e become 256^-(e % 4). */
            const float4 factor =
                part % 2 == 0 ? DECODE_LOW : float4(65536.0f, 4096.0f, 256.0f, 16.0f);
            const float4 v = x[(4 * odd + part) * CHUNKS + at / 2] * factor;
            dot = fma((float)(w[part] & 0xffu), v.x, dot);
            dot = fma((float)(w[part] & 0xff00u), v.y, dot);
            dot = fma((float)(w[part] & 0xff0000u), v.z, dot);
            dot = fma((float)(w[part] & 0xff000000u), v.w, dot);
        }
        y = fma(bf16_value(m.scales[group]), dot, y);
        if (odd == 0) y = fma(bf16_value(m.biases[group]), sums[at / 2], y);
    }
    return lanes_sum<LANES>(y);
}

#endif
