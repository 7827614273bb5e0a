/* The instructions of src/backend/cuda/kernels/instructions.cuh on a processor: included by kernels
 * in its place. Copies in the background happen when they are waited for and no earlier. */
#ifndef LILY_CUDA_INSTRUCTIONS_CUH
#define LILY_CUDA_INSTRUCTIONS_CUH

inline uint32_t bf16_round(float x) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

inline uint32_t bf16_pair(float a, float b) {
    return bf16_round(a) | bf16_round(b) << 16;
}

/* In double the product and the sum of bf16 numbers are exact or nearly so: one rounding is left.
 */
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    auto one = [](uint32_t x, uint32_t y, uint32_t z) {
        double r = (double)__uint_as_float(x << 16) * (double)__uint_as_float(y << 16) +
                   (double)__uint_as_float(z << 16);
        float f = (float)r; /* to odd, so that the second rounding is the only one */
        if ((double)f != r) {
            uint32_t bits = __float_as_uint(f);
            if (fabs((double)f) > fabs(r)) bits--;
            f = __uint_as_float(bits | 1);
        }
        return bf16_round(f);
    };
    return one(a & 0xffff, b & 0xffff, c & 0xffff) | one(a >> 16, b >> 16, c >> 16) << 16;
}

inline uint32_t select_or(uint32_t x, uint32_t mask, uint32_t bits) {
    return (x & mask) | bits;
}

inline void let_next_begin() {}
inline void wait_for_previous() {
    emulator::wait_for_previous();
}

typedef uintptr_t shared_at;

inline shared_at shared_address(const void *p) {
    return (shared_at)p;
}

#define DYNAMIC_SHARED(type, name) type *name = (type *)emulator::dynamic_shared()

inline void copy16(shared_at to, const void *from, bool valid) {
    emulator::copy_later((void *)to, from, valid);
}
inline void copy_commit() {
    emulator::copy_commit();
}
template <int n> inline void copy_wait() {
    emulator::copy_wait(n);
}

/* Every lane gives the address of one row of 16 bytes and gets, of matrix i, two elements of row
 * lane / 4: (transposed: of column lane / 4). */
inline void load_matrices(uint32_t (&r)[4], shared_at address) {
    auto all = emulator::exchange(address);
    int lane = emulator::lane();
    for (int i = 0; i < 4; i++) r[i] = ((const uint32_t *)all[i * 8 + lane / 4])[lane % 4];
}
inline void load_matrices_transposed(uint32_t (&r)[4], shared_at address) {
    auto all = emulator::exchange(address);
    int lane = emulator::lane();
    for (int i = 0; i < 4; i++) {
        uint32_t low = ((const uint16_t *)all[i * 8 + lane % 4 * 2])[lane / 4];
        uint32_t high = ((const uint16_t *)all[i * 8 + lane % 4 * 2 + 1])[lane / 4];
        r[i] = low | high << 16;
    }
}

struct mma_operands {
    uint32_t a[4], b[2];
};
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_operands mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}};
    auto all = emulator::exchange(mine);
    int lane = emulator::lane();
    auto part = [](uint32_t pair, int i) {
        return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
    };
    for (int v = 0; v < 4; v++) {
        int row = lane / 4 + v / 2 * 8, column = lane % 4 * 2 + v % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) {
            const mma_operands &x = all[row % 8 * 4 + k % 8 / 2];
            const mma_operands &y = all[column * 4 + k % 8 / 2];
            sum += part(x.a[row / 8 + k / 8 * 2], k % 2) * part(y.b[k / 8], k % 2);
        }
        c[v] += sum;
    }
}

#endif
