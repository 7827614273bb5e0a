/* The tile of prefill_gemm.cu: ROWS = 64 * WGS outputs for up to N rows of activations. Weights are
 * the operand in registers: a thread copies its own codes through shared memory, unpacks them to
 * bf16 and multiplies them at once, so that an unpacked weight serves N rows and never goes back to
 * memory. Activations are the operand in shared memory.
 *
 * A round is 64 inputs. With the round k that is multiplied, k + 1 has landed (its codes are
 * unpacked meanwhile), k - 1 may still be read and later ones are on their way; half a round of
 * unpacked weights waits while the other half is multiplied. Activations come a round at a time,
 * codes two rounds (16 bytes of a row a thread), scales and biases eight groups: what limits the
 * copies is the number of cache lines they touch. */
#ifndef LILY_CUDA_PREFILL_GEMM_CUH
#define LILY_CUDA_PREFILL_GEMM_CUH

#include "prefill_common.cuh"

/* Where the weights of a thread lie: rows `first` and `second` of its fragment (prefill_wgmma.cuh),
 * codes from its lane's 32 of each 128 on; `constants` is one of the four rows of scales and biases
 * of its four lanes: first scale, first bias, second scale, second bias. */
struct weight_rows {
    const uint8_t *first, *second;
    const uint16_t *constants;
};

__device__ __forceinline__ weight_rows weights_of(const cuda_mat &first, int64_t first_row,
                                                  const cuda_mat &second, int64_t second_row) {
    int part = threadIdx.x % 4, bytes = first.cols / 2, groups = first.cols / 64;
    weight_rows w;
    w.first = first.codes + first_row * bytes + part * 16;
    w.second = second.codes + second_row * bytes + part * 16;
    const uint16_t *of_first = part == 1 ? first.biases : first.scales;
    const uint16_t *of_second = part == 3 ? second.biases : second.scales;
    w.constants = part < 2 ? of_first + first_row * groups : of_second + second_row * groups;
    return w;
}

/* Rings of a tile in turn: activations by rounds, codes by two, constants by eight. */
enum { CONSTANT_STAGES = 2, CONSTANT_ROUNDS = 8 };

template <int WGS, int N, int STAGES> struct Product {
    static constexpr int THREADS = WGS * 128, LEAD = STAGES - 2;
    static constexpr int CODE_STAGES = (STAGES + 1) / 2;
    static constexpr int X_BYTES = N * 128, W_BYTES = THREADS * 32, C_BYTES = THREADS * 16;
    static constexpr int PARTS = (N * 8 + THREADS - 1) / THREADS; /* of 16 bytes, of a thread */
    static_assert(STAGES * X_BYTES + CODE_STAGES * W_BYTES + CONSTANT_STAGES * C_BYTES +
                          SHARED_SLACK ==
                      PREFILL_TILE_SHARED(WGS, N, STAGES),
                  "what the host asks for");
    static_assert(LEAD >= 2, "a stage on its way while the next one has landed");
    static_assert(LEAD <= CONSTANT_ROUNDS, "constants are not overwritten while they are read");

    float acc[N / 2];
    uint32_t weights[2][2][4]; /* half a round each: two steps of 16 inputs */
    uint32_t x_from[PARTS];    /* this thread's parts of a round of activations, in 16 bytes; */
    const bf16 *x;             /* ~0: there is no such row */
    weight_rows w;
    shared_at shared;
    int rounds;

    __device__ __forceinline__ shared_at x_stage(int stage) const {
        return shared + (uint32_t)(stage * X_BYTES);
    }
    /* This thread's 16 bytes of the first row, those of the second row follow. */
    __device__ __forceinline__ shared_at w_stage(int round) const {
        int stage = round / 2 % CODE_STAGES;
        return shared + (uint32_t)(STAGES * X_BYTES + stage * W_BYTES + (int)threadIdx.x * 16);
    }
    __device__ __forceinline__ shared_at c_stage(int round) const {
        int stage = round / CONSTANT_ROUNDS % CONSTANT_STAGES;
        return shared + (uint32_t)(STAGES * X_BYTES + CODE_STAGES * W_BYTES + stage * C_BYTES);
    }

    /* Copies a round's activations into their stage, and the codes and constants that begin with
     * this round; an empty group of copies after the last. */
    __device__ __forceinline__ void fetch(int round, int stage) {
        if (round < rounds) {
            int tid = threadIdx.x;
            if (round % 2 == 0) {
                shared_at to = w_stage(round);
                copy16(to, w.first + (int64_t)round * 32, true);
                copy16(to + THREADS * 16, w.second + (int64_t)round * 32, true);
            }
            if (round % CONSTANT_ROUNDS == 0) {
                copy16(c_stage(round) + (uint32_t)tid * 16, w.constants + round, true);
            }
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

    /* Scale and bias of both rows for two rounds, each twice in a word. */
    struct constants {
        uint32_t scale[2], bias[2];
    };
    __device__ __forceinline__ constants constants_of(int round) const {
        int group = round % CONSTANT_ROUNDS + (int)threadIdx.x % 4 / 2; /* of this lane's codes */
        shared_at at = c_stage(round) + (uint32_t)((int)threadIdx.x / 4 * 64 + group * 2);
        constants k;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t scale = load_shared2(at + i * 32), bias = load_shared2(at + i * 32 + 16);
            k.scale[i] = __byte_perm(scale, scale, 0x1010u);
            k.bias[i] = __byte_perm(bias, bias, 0x1010u);
        }
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

    /* Two steps of products from half a round. */
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
        __syncthreads(); /* constants are copied by other lanes */
        constants k = constants_of(0);
        uint2 first = load_shared8(w_stage(0)), second = load_shared8(w_stage(0) + THREADS * 16);
        unpack(weights[0], 0, first.x, k.scale[0], k.bias[0]);
        unpack(weights[0], 1, second.x, k.scale[1], k.bias[1]);
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
            unpack(weights[1], 0, first.y, k.scale[0], k.bias[0]);
            unpack(weights[1], 1, second.y, k.scale[1], k.bias[1]);
            multiply_half(stage, 1);
            products_wait<1>();
            if (round + 1 < rounds) {
                if (round % 2) k = constants_of(round + 1);
                shared_at at = w_stage(round + 1) + (uint32_t)(round % 2 ? 0 : 8);
                first = load_shared8(at), second = load_shared8(at + THREADS * 16);
                unpack(weights[0], 0, first.x, k.scale[0], k.bias[0]);
                unpack(weights[0], 1, second.x, k.scale[1], k.bias[1]);
            }
            stage = next;
        }
        products_wait<0>();
        hold(acc);
    }
};

#endif
