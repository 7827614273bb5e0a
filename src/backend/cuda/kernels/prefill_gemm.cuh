/* The tile of prefill_gemm.cu: ROWS = 64 * WGS outputs for up to N rows of activations. Weights are
 * the operand in registers: a thread copies its own codes through shared memory, unpacks them to
 * bf16 and multiplies them at once, so that an unpacked weight serves N rows and never goes back to
 * memory. Activations are the operand in shared memory.
 *
 * One stage of the ring is 64 inputs, a quantisation group; with the stage k that is multiplied,
 * k + 1 has landed (its codes are unpacked meanwhile), k - 1 may still be read and later ones are
 * on their way. Half a stage of unpacked weights waits while the other half is multiplied. */
#ifndef LILY_CUDA_PREFILL_GEMM_CUH
#define LILY_CUDA_PREFILL_GEMM_CUH

#include "prefill_common.cuh"

/* Where the weights of a thread lie: rows `first` and `second` of its fragment (prefill_wgmma.cuh),
 * codes from its lane's 16 of each group on; `constants` is one of the four rows of scales and
 * biases of its four lanes: first scale, first bias, second scale, second bias. */
struct weight_rows {
    const uint8_t *first, *second;
    const uint16_t *constants;
};

__device__ __forceinline__ weight_rows weights_of(const cuda_mat &first, int64_t first_row,
                                                  const cuda_mat &second, int64_t second_row) {
    int part = threadIdx.x % 4, bytes = first.cols / 2, groups = first.cols / 64;
    weight_rows w;
    w.first = first.codes + first_row * bytes + part * 8;
    w.second = second.codes + second_row * bytes + part * 8;
    const uint16_t *of_first = part == 1 ? first.biases : first.scales;
    const uint16_t *of_second = part == 3 ? second.biases : second.scales;
    w.constants = part < 2 ? of_first + first_row * groups : of_second + second_row * groups;
    return w;
}

template <int WGS, int N, int STAGES> struct Product {
    static constexpr int THREADS = WGS * 128, LEAD = STAGES - 2;
    static constexpr int X_BYTES = N * 128, W_BYTES = THREADS * 16, C_BYTES = THREADS * 4;
    static constexpr int STAGE = X_BYTES + W_BYTES + C_BYTES;     /* arrays of all stages in turn */
    static constexpr int PARTS = (N * 8 + THREADS - 1) / THREADS; /* of 16 bytes, of a thread */
    static_assert(LEAD >= 2, "a stage on its way while the next one has landed");

    float acc[N / 2];
    uint32_t weights[2][2][4]; /* half a stage each: two steps of 16 inputs */
    uint32_t x_from[PARTS];    /* this thread's parts of a stage of activations, in 16 bytes; */
    const bf16 *x;             /* ~0: there is no such row */
    weight_rows w;
    shared_at shared;
    int rounds;

    __device__ __forceinline__ shared_at x_stage(int stage) const {
        return shared + (uint32_t)(stage * X_BYTES);
    }
    __device__ __forceinline__ shared_at w_stage(int stage) const {
        return shared + (uint32_t)(STAGES * X_BYTES + stage * W_BYTES);
    }
    __device__ __forceinline__ shared_at c_stage(int stage) const {
        return shared + (uint32_t)(STAGES * (X_BYTES + W_BYTES) + stage * C_BYTES);
    }

    /* Copies group `round` into its stage; an empty group of copies after the last. */
    __device__ __forceinline__ void fetch(int round, int stage) {
        if (round < rounds) {
            int tid = threadIdx.x;
            shared_at to = w_stage(stage) + (uint32_t)tid * 16;
            copy8(to, w.first + (int64_t)round * 32);
            copy8(to + 8, w.second + (int64_t)round * 32);
            copy4(c_stage(stage) + (uint32_t)tid * 4, w.constants + (round & ~1));
            shared_at to_x = x_stage(stage) + part_at(tid / 8, tid % 8);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                if (N * 8 % THREADS && tid + i * THREADS >= N * 8) break;
                bool valid = x_from[i] != ~0u;
                uint32_t from = (valid ? x_from[i] : 0) + (uint32_t)round * 8;
                copy16(to_x + (uint32_t)(i * THREADS * 16), (const uint4 *)x + from, valid);
            }
        }
        copy_commit();
    }

    /* Scale and bias of both rows, each twice in a word. */
    struct constants {
        uint32_t scale[2], bias[2];
    };
    __device__ __forceinline__ constants constants_of(int round, int stage) const {
        uint4 c = load_shared16(c_stage(stage) + (uint32_t)(threadIdx.x / 4 * 16));
        uint32_t half = round & 1 ? 0x3232u : 0x1010u;
        constants k;
        k.scale[0] = __byte_perm(c.x, c.x, half), k.bias[0] = __byte_perm(c.y, c.y, half);
        k.scale[1] = __byte_perm(c.z, c.z, half), k.bias[1] = __byte_perm(c.w, c.w, half);
        return k;
    }

    /* Eight codes of one row as the pairs of two steps. */
    static __device__ __forceinline__ void unpack(uint32_t (&to)[2][4], int row, uint32_t word,
                                                  uint32_t scale, uint32_t bias) {
        const uint32_t one = 0x3f803f80u, minus_128 = 0xc300c300u;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t code = and_or(word >> (4 * i), 0x000f000fu, 0x43004300u);
            code = fma_bf16x2(code, one, minus_128);
            to[i / 2][i % 2 * 2 + row] = fma_bf16x2(code, scale, bias);
        }
    }

    /* Two steps of products from half a stage. */
    __device__ __forceinline__ void multiply_half(int stage, int half) {
        operand b = operand_rows(x_stage(stage));
        products_begin();
        product(acc, weights[half][0], operand_at(b, half * 64));
        product(acc, weights[half][1], operand_at(b, half * 64 + 32));
        products_commit();
    }

    /* acc = the sums over all rounds. Rows of activations: index(n) of row n of the tile, negative
     * where there is none. */
    template <class Rows> __device__ __forceinline__ void run(const Rows &index) {
        int cols = rounds * 64;
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int part = (int)threadIdx.x + i * THREADS, row = part < N * 8 ? index(part / 8) : -1;
            x_from[i] = row < 0 ? ~0u : (uint32_t)row * (uint32_t)(cols / 8) + part % 8;
        }
#pragma unroll
        for (int i = 0; i < LEAD; i++) fetch(i, i);
        copy_wait<LEAD - 1>();
        __syncthreads(); /* scales are copied by other lanes */
        constants k = constants_of(0, 0);
        uint4 codes = load_shared16(w_stage(0) + threadIdx.x * 16);
        unpack(weights[0], 0, codes.x, k.scale[0], k.bias[0]);
        unpack(weights[0], 1, codes.z, k.scale[1], k.bias[1]);
        int stage = 0;
        for (int round = 0; round < rounds; round++) {
            copy_wait<LEAD - 2>();
            publish_shared();
            __syncthreads(); /* round + 1 has landed, round - 2 has been read */
            multiply_half(stage, 0);
            int later = stage + LEAD, next = stage + 1;
            fetch(round + LEAD, later >= STAGES ? later - STAGES : later);
            next = next >= STAGES ? 0 : next;
            products_wait<1>(); /* the half before: its registers are free */
            unpack(weights[1], 0, codes.y, k.scale[0], k.bias[0]);
            unpack(weights[1], 1, codes.w, k.scale[1], k.bias[1]);
            multiply_half(stage, 1);
            products_wait<1>();
            if (round + 1 < rounds) {
                k = constants_of(round + 1, next);
                codes = load_shared16(w_stage(next) + threadIdx.x * 16);
                unpack(weights[0], 0, codes.x, k.scale[0], k.bias[0]);
                unpack(weights[0], 1, codes.z, k.scale[1], k.bias[1]);
            }
            stage = next;
        }
        products_wait<0>();
        hold(acc);
    }
};

/* Shared memory of a tile. */
#define PRODUCT_SHARED(wgs, n, stages) ((stages) * ((n)*128 + (wgs)*128 * 20) + 1024)

#endif
