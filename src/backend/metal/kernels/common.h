/* What all kernels build on: bf16 and 4-bit codes as they lie in memory, the model's small
 * functions, sums over lanes, floats as ordered numbers. MSL only, after metal_stdlib and the
 * shape's macros.
 *
 * Simdgroups are 32 neighbouring threads of a threadgroup, in order. An index is a uint that counts
 * elements of its pointer's type; the asserts keep the largest of them below 2^32. Strides that the
 * host tells in bytes are multiplied as size_t. */
#ifndef LILY_METAL_COMMON_H
#define LILY_METAL_COMMON_H

/* a * b + c is two roundings, as in the C backends; where one is meant the text says fma. The
 * functions say precise::, since compilers choose between fast and precise ones apart from the math
 * mode, and fast ones where nobody says. */
#pragma METAL fp contract(off)

/* Of a kernel: the threads of its threadgroups, to which the compiler fits its registers. */
#define KERNEL_THREADS(n) [[max_total_threads_per_threadgroup(n)]]

/* Before a loop over an array or over the elements of a vector: these live in registers only where
 * every index is a constant. */
#define UNROLL _Pragma("clang loop unroll(full)")

static_assert((ulong)SHAPE_VOCAB * SHAPE_HIDDEN < 1ul << 32, "embedding and head by uint");
static_assert((ulong)SHAPE_MAX_CONTEXT * SHAPE_KV_DIM < 1ul << 32, "keys and values by uint");

/* ---- bf16: two in a word, the first one low; eight in 16 bytes ---------------------------------
 */

inline float bf16_value(ushort bits) {
    return as_type<float>((uint)bits << 16);
}
inline float bf16_low(uint word) {
    return as_type<float>(word << 16);
}
inline float bf16_high(uint word) {
    return as_type<float>(word & 0xffff0000u);
}
inline float4 bf16_first(uint4 eight) {
    return float4(bf16_low(eight.x), bf16_high(eight.x), bf16_low(eight.y), bf16_high(eight.y));
}
inline float4 bf16_last(uint4 eight) {
    return float4(bf16_low(eight.z), bf16_high(eight.z), bf16_low(eight.w), bf16_high(eight.w));
}
/* Rounded to nearest, ties to even. */
inline uint bf16_pair(float low, float high) {
    return (uint)as_type<ushort>(bfloat(low)) | (uint)as_type<ushort>(bfloat(high)) << 16;
}
inline uint4 bf16_eight(float4 first, float4 last) {
    return uint4(bf16_pair(first.x, first.y), bf16_pair(first.z, first.w),
                 bf16_pair(last.x, last.y), bf16_pair(last.z, last.w));
}

/* ---- matrices of codes -------------------------------------------------------------------------
 */

/* value = scale * code + bias, bf16 scale and bias for each SHAPE_GROUP columns; codes row by row,
 * the first one lowest, bound at a multiple of 16 bytes. */
struct quantised {
    device const uint4 *codes;
    device const ushort *scales;
    device const ushort *biases;
};
inline quantised quantised_of(device const uint4 *codes, device const ushort *scales,
                              device const ushort *biases) {
    quantised m;
    m.codes = codes;
    m.scales = scales;
    m.biases = biases;
    return m;
}
/* The same matrix of another expert. */
inline quantised quantised_at(quantised m, size_t bytes) {
    return quantised_of((device const uint4 *)((device const uchar *)m.codes + bytes),
                        (device const ushort *)((device const uchar *)m.scales + bytes),
                        (device const ushort *)((device const uchar *)m.biases + bytes));
}

/* Eight codes of 4 bits. */
inline float4 codes_first(uint word) {
    return float4(uint4(word, word >> 4, word >> 8, word >> 12) & 0xfu);
}
inline float4 codes_last(uint word) {
    return codes_first(word >> 16);
}

/* ---- functions ---------------------------------------------------------------------------------
 */

inline float sigmoid(float x) {
    return 1.0f / (1.0f + precise::exp(-x));
}
template <typename T> inline T silu(T x) {
    return x / (1.0f + precise::exp(-x));
}
/* log(1 + e^x). Where 1 + y rounds, log(1 + y) y / ((1 + y) - 1) takes the error back out. */
inline float softplus(float x) {
    if (x > 20.0f) return x;
    const float y = precise::exp(x);
    const float u = 1.0f + y;
    return u == 1.0f ? y : precise::log(u) * (y / (u - 1.0f));
}
inline float inverse_sqrt(float x) {
    return 1.0f / precise::sqrt(x);
}
/* 1 / rms of n values, from the sum of their squares. */
inline float norm_factor(float squares, int n) {
    return inverse_sqrt(squares / n + SHAPE_NORM_EPS);
}
inline float sum4(float4 v) {
    return (v.x + v.y) + (v.z + v.w);
}

/* ---- lanes -------------------------------------------------------------------------------------
 */

/* Over LANES neighbouring lanes, a power of two; every lane gets the sum. The order is part of the
 * result: halves of the lanes first, or neighbours first. */
template <int LANES, typename T> inline T lanes_sum(T value) {
    UNROLL
    for (ushort mask = LANES / 2; mask > 0; mask /= 2) value += simd_shuffle_xor(value, mask);
    return value;
}
template <int LANES, typename T> inline T neighbours_sum(T value) {
    UNROLL
    for (ushort mask = 1; mask < LANES; mask *= 2) value += simd_shuffle_xor(value, mask);
    return value;
}

/* ---- order -------------------------------------------------------------------------------------
 */

/* Larger numbers for larger floats, for all bit patterns; both zeros are equal. 0 is below all. */
inline uint ordered_key(float value) {
    const uint bits = as_type<uint>(value + 0.0f);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
inline float ordered_value(uint key) {
    return as_type<float>((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

#endif
