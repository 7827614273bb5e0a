/* The instructions of src/backend/cuda/kernels/prefill_wgmma.cuh on a processor: included by
 * kernels in its place. Products happen at once, small copies too: what a missing wait would spoil
 * is not seen, where operands lie is. */
#ifndef LILY_CUDA_PREFILL_WGMMA_CUH
#define LILY_CUDA_PREFILL_WGMMA_CUH

inline uint2 load_shared8(shared_at at) {
    return *(const uint2 *)at;
}
inline uint32_t load_shared4(shared_at at) {
    return *(const uint32_t *)at;
}
inline uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    return (a & b) | c;
}
inline float power_of_two(float x) {
    return exp2f(x);
}
inline float reciprocal(float x) {
    return 1.0f / x;
}
inline void publish_shared() {}

/* To fp16, nearest even, at most 65,504 in size. */
inline uint32_t half_round(float x) {
    uint32_t sign = __float_as_uint(x) >> 16 & 0x8000u;
    double size = fabs((double)x);
    if (isnan(x)) return 0x7fffu;
    if (size >= 65504) return sign | 0x7bffu;
    if (size < 0x1p-14) return sign | (uint32_t)nearbyint(size * 0x1p24);
    int exponent = ilogb(size);
    return sign | ((uint32_t)(exponent + 14) * 1024 + (uint32_t)nearbyint(ldexp(size, 10 - exponent)));
}
inline uint32_t half_pair(float a, float b) {
    return half_round(a) | half_round(b) << 16;
}
inline float half_float(uint32_t h) {
    int exponent = (int)(h >> 10 & 31), fraction = (int)(h & 1023);
    double size = exponent == 31 ? (double)NAN
                  : exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return (float)(h & 0x8000u ? -size : size);
}
inline float2 half_floats(uint32_t pair) {
    return {half_float(pair & 0xffff), half_float(pair >> 16)};
}

/* Signals: how many arrivals a turn takes, how many are left of this one, its parity. */
struct signal_state {
    uint16_t all, left;
    uint32_t turn;
};
inline void signal_init(shared_at at, int count) {
    emulator::unwatched(); /* watch.cpp knows no order by signals */
    *(signal_state *)at = {(uint16_t)count, (uint16_t)count, 0};
}
inline void signal_arrive(shared_at at) {
    signal_state *s = (signal_state *)at;
    if (--s->left == 0) s->left = s->all, s->turn ^= 1;
}
inline void signal_when_copied(shared_at at) {
    emulator::copy_commit();
    emulator::copy_wait(0);
    signal_arrive(at);
}
inline void signal_wait(shared_at at, uint32_t turn) {
    while (((signal_state *)at)->turn == turn) emulator::give_way();
}
inline void copy_wait_all() {
    emulator::copy_commit();
    emulator::copy_wait(0);
}
template <int n> inline void fewer_registers() {}
template <int n> inline void more_registers() {}

/* Where an operand's elements lie: n counts rows of output, k the summed index. */
struct operand {
    uintptr_t at;
    int stride; /* of columns; 0: along rows */
    float element(int n, int k) const {
        uintptr_t a = stride ? at + n / 64 * stride + k / 8 * 1024 + k % 8 * 128 + n % 64 * 2
                             : at + n / 8 * 1024 + n % 8 * 128 + k * 2;
        a ^= a >> 3 & 0x70; /* the permutation by row */
        return __uint_as_float((uint32_t) * (const uint16_t *)a << 16);
    }
};
inline operand operand_rows(shared_at at) {
    return {at, 0};
}
inline operand operand_columns(shared_at at, int stride) {
    return {at, stride};
}
inline operand operand_at(operand o, int bytes) {
    return {o.at + (uintptr_t)bytes, o.stride};
}
inline void products_begin() {}
inline void products_commit() {}
template <int n> inline void products_wait() {}
template <int n> inline void hold(float (&)[n]) {}
inline void settle(shared_at at, float x) {
    *(float *)at = x;
}

struct four_words {
    uint32_t w[4];
};
template <int HALF_N> inline void product(float (&d)[HALF_N], const uint32_t (&a)[4], operand b) {
    auto all = emulator::exchange(four_words{{a[0], a[1], a[2], a[3]}});
    int lane = emulator::lane();
    float rows[2][16];
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 16; k++) {
            uint32_t w = all[lane / 4 * 4 + k % 8 / 2].w[half + k / 8 * 2];
            rows[half][k] = __uint_as_float(k % 2 ? w & 0xffff0000u : w << 16);
        }
    for (int i = 0; i < HALF_N; i++) {
        int n = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += rows[half][k] * b.element(n, k);
        d[i] += sum;
    }
}
template <int HALF_N>
inline void product_columns(float (&d)[HALF_N], const uint32_t (&a)[4], operand b) {
    product(d, a, b);
}
inline void product(float (&d)[32], operand a, operand b, bool add) {
    int lane = emulator::lane(), warp = (int)emulator::context->thread.x / 32 % 4;
    for (int i = 0; i < 32; i++) {
        int n = i / 4 * 8 + lane % 4 * 2 + i % 2, m = warp * 16 + lane / 4 + i / 2 % 2 * 8;
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += a.element(m, k) * b.element(n, k);
        d[i] = add ? d[i] + sum : sum;
    }
}

#endif
