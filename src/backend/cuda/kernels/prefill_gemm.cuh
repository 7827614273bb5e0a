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

/* What a thread copies of 128 inputs of its warp's 16 rows: two runs of 16 bytes of codes, the
 * second CODES_APART behind the first, and 16 bytes of the scales and biases of the first four such
 * blocks; all of them `step` bytes further for the next 128 inputs.
 *
 * A thread multiplies rows 2 (lane / 4) and the next one, inputs 32 (lane % 4) and on. In wide tiles
 * (tile.h) it copies just these. Tiles of `down` hold 32 inputs: lane % 4 is a tile, and 64 bytes in
 * it are the eights of codes of four rows, 0, 2, 1, 3 in turns; of the two lanes that have these rows
 * one copies the even and one the odd eights. The scales of a group are taken from the first of its
 * two tiles. */
struct weight_tiles {
    const uint8_t *codes, *factors;
    uint32_t step;
};

/* first: the matrix's (with DOWN the expert's) first tile; row: the warp's first, a multiple of 16. */
template <bool DOWN>
__device__ __forceinline__ weight_tiles weights_of(const cuda_mat &m, const uint8_t *first,
                                                   int row) {
    int lane = threadIdx.x % 32, four = lane / 8, odd = lane / 4 % 2, part = lane % 4;
    int half = row / 16 % 2;
    weight_tiles w;
    w.step = (uint32_t)m.code_pair;
    const uint8_t *tile = first + (int64_t)(row / (DOWN ? 128 : 32)) * m.row_tiles;
    const uint8_t *factors = tile + TILE_CODES + four * w.step;
    if (DOWN) {
        uint32_t slice = w.step / 4;
        w.codes = tile + part * slice + row % 128 / 32 * 512 + half * 256 + four * 64 + odd * 16;
        w.factors = factors + odd * 2 * slice + row % 128 * 4 + part * 16;
    } else {
        w.codes = tile + half * 256 + odd * 1024 + four * 64 + part * 16;
        w.factors = factors + half * 128 + lane % 8 * 16;
    }
    return w;
}

/* Rings of a tile in turn: activations by rounds, codes by two, constants by eight. */
enum { CONSTANT_STAGES = 2, CONSTANT_ROUNDS = 8 };

template <int WGS, int N, int STAGES, bool DOWN = false> struct Product {
    static constexpr int THREADS = WGS * 128, LEAD = STAGES - 2;
    static constexpr int CODE_STAGES = (STAGES + 1) / 2, CODES_APART = DOWN ? 32 : 512;
    static constexpr int X_BYTES = N * 128, W_BYTES = THREADS * 32, C_BYTES = THREADS * 16;
    static constexpr int PARTS = (N * 8 + THREADS - 1) / THREADS; /* of 16 bytes, of a thread */
    static_assert(STAGES * X_BYTES + CODE_STAGES * W_BYTES + CONSTANT_STAGES * C_BYTES +
                          SHARED_SLACK ==
                      PREFILL_TILE_SHARED(WGS, N, STAGES),
                  "what the host asks for");
    static_assert(LEAD >= 2, "a stage on its way while the next one has landed");
    static_assert(LEAD <= CONSTANT_ROUNDS, "constants are not overwritten while they are read");
    static_assert(LEAD / 2 < CODE_STAGES, "nor codes, which another lane may have copied");

    float acc[N / 2];
    uint32_t weights[2][2][4]; /* half a round each: two steps of 16 inputs */
    uint32_t x_from[PARTS];    /* this thread's parts of a round of activations, in 16 bytes; */
    const bf16 *x;             /* ~0: there is no such row */
    weight_tiles w;
    shared_at shared;
    int rounds;

    __device__ __forceinline__ shared_at x_stage(int stage) const {
        return shared + (uint32_t)(stage * X_BYTES);
    }
    /* This thread's among the block's 16 bytes. With DOWN every second four lanes change places, so
     * that what is read at once lies in more banks. */
    static __device__ __forceinline__ int place() {
        int tid = (int)threadIdx.x;
        return DOWN ? tid ^ (tid >> 1 & 4) : tid;
    }
    /* Where this thread copies its first 16 bytes of codes to; the second are THREADS * 16 on. */
    __device__ __forceinline__ shared_at w_stage(int round) const {
        int stage = round / 2 % CODE_STAGES;
        return shared + (uint32_t)(STAGES * X_BYTES + stage * W_BYTES + place() * 16);
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
            uint32_t at = (uint32_t)(round / 2) * w.step;
            if (round % 2 == 0) {
                shared_at to = w_stage(round);
                copy16(to, w.codes + at, true);
                copy16(to + THREADS * 16, w.codes + at + CODES_APART, true);
            }
            if (round % CONSTANT_ROUNDS == 0) {
                copy16(c_stage(round) + (uint32_t)tid * 16, w.factors + at, true);
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
        int lane = (int)threadIdx.x % 32, group = lane % 4 / 2, g = lane / 4;
        int place = DOWN ? group * 64 + g * 8 : g * 16 + group * 8;
        shared_at at = c_stage(round) + (uint32_t)((int)threadIdx.x / 32 * 512 +
                                                   round % CONSTANT_ROUNDS / 2 * 128 + place);
        uint2 pair = load_shared8(at);
        constants k;
        k.scale[0] = __byte_perm(pair.x, pair.x, 0x1010u);
        k.bias[0] = __byte_perm(pair.x, pair.x, 0x3232u);
        k.scale[1] = __byte_perm(pair.y, pair.y, 0x1010u);
        k.bias[1] = __byte_perm(pair.y, pair.y, 0x3232u);
        return k;
    }

    /* The 16 codes of each of a thread's two rows that belong to a round. */
    struct codes {
        uint2 first, second;
    };
    __device__ __forceinline__ codes codes_of(int round) const {
        shared_at at = w_stage(round);
        uint32_t later = (uint32_t)(round % 2);
        if (!DOWN) {
            at = at + later * 8;
            return {load_shared8(at), load_shared8(at + THREADS * 16)};
        }
        /* Two lanes copied for each other; which of the places is whose takes turns, see place(). */
        uint32_t odd = threadIdx.x / 4 % 2, turned = threadIdx.x / 8 % 2;
        at = at + later * (THREADS * 16) - (odd ^ turned) * 64 + odd * 4;
        shared_at low = at + turned * 64, high = at + (turned ^ 1) * 64;
        return {make_uint2(load_shared4(low), load_shared4(high)),
                make_uint2(load_shared4(low + 8), load_shared4(high + 8))};
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

    /* acc = the sums over all rounds: acc[4 j + i] for row 2 (lane / 4) of the warp's 16 of weights
     * and row 8 j + 2 (lane % 4) + i of activations, acc[4 j + 2 + i] for the next row of weights.
     * Rows of activations: index(n) of row n of the tile, negative where there is none. */
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
        codes c = codes_of(0);
        unpack(weights[0], 0, c.first.x, k.scale[0], k.bias[0]);
        unpack(weights[0], 1, c.second.x, k.scale[1], k.bias[1]);
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
            unpack(weights[1], 0, c.first.y, k.scale[0], k.bias[0]);
            unpack(weights[1], 1, c.second.y, k.scale[1], k.bias[1]);
            multiply_half(stage, 1);
            products_wait<1>();
            if (round + 1 < rounds) {
                if (round % 2) k = constants_of(round + 1);
                c = codes_of(round + 1);
                unpack(weights[0], 0, c.first.x, k.scale[0], k.bias[0]);
                unpack(weights[0], 1, c.second.x, k.scale[1], k.bias[1]);
            }
            stage = next;
        }
        products_wait<0>();
        hold(acc);
    }
};

#endif
