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
 * A thread multiplies rows 2 (lane / 4) and the next one, inputs 32 (lane % 4) and on. In wide
 * tiles (tile.h) it copies just these. Tiles of `down` hold 32 inputs: lane % 4 is a tile, and 64
 * bytes in it are the eights of codes of four rows, 0, 2, 1, 3 in turns; of the two lanes that have
 * these rows one copies the even and one the odd eights. The scales of a group are taken from the
 * first of its two tiles. */
struct weight_tiles {
    const uint8_t *codes, *factors;
    uint32_t step;

    /* Codes of the next 128 inputs, their second run to `further` bytes behind the first. */
    template <int CODES_APART>
    __device__ __forceinline__ void copy_codes(shared_at to, int further) {
        copy16(to, codes, true);
        copy16(to + (uint32_t)further, codes + CODES_APART, true);
        codes += step;
    }
    /* Scales and biases of the next four times 128. */
    __device__ __forceinline__ void copy_factors(shared_at to) {
        copy16(to, factors, true);
        factors += 4 * step;
    }
};

/* first: the matrix's (with DOWN the expert's) first tile; row: the warp's first, a multiple of 16.
 */
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

/* Eight codes of one row as the pairs of two steps of products. */
__device__ __forceinline__ void unpack_codes(uint32_t (&to)[2][4], int row, uint32_t word,
                                             uint32_t scale, uint32_t bias) {
    const uint32_t one = 0x3f803f80u, minus_128 = 0xc300c300u;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t code = and_or(word >> (4 * i), 0x000f000fu, 0x43004300u);
        code = fma_bf16x2(code, one, minus_128);
        to[i / 2][i % 2 * 2 + row] = fma_bf16x2(code, scale, bias);
    }
}

/* Scale and bias of a thread's two rows and one group, each twice in a word. */
struct row_constants {
    uint32_t scale[2], bias[2];
};
/* Both rows' lie side by side in shared memory. */
__device__ __forceinline__ row_constants load_constants(shared_at at) {
    uint2 pair = load_shared8(at);
    row_constants k;
    k.scale[0] = __byte_perm(pair.x, pair.x, 0x1010u);
    k.bias[0] = __byte_perm(pair.x, pair.x, 0x3232u);
    k.scale[1] = __byte_perm(pair.y, pair.y, 0x1010u);
    k.bias[1] = __byte_perm(pair.y, pair.y, 0x3232u);
    return k;
}

/* The 16 codes of each of a thread's two rows that belong to a round. */
struct row_codes {
    uint2 first, second;
};

/* Half a round's codes, eight of each row. */
__device__ __forceinline__ void unpack_half(uint32_t (&to)[2][4], uint32_t first, uint32_t second,
                                            const row_constants &k) {
    unpack_codes(to, 0, first, k.scale[0], k.bias[0]);
    unpack_codes(to, 1, second, k.scale[1], k.bias[1]);
}

/* acc += half a round's weights times its activations: two steps of products, queued. */
template <int N>
__device__ __forceinline__ void multiply_half(float (&acc)[N], const uint32_t (&weights)[2][4],
                                              shared_at rows, int half) {
    operand b = operand_rows(rows);
    products_begin();
    product(acc, weights[0], operand_at(b, half * 64));
    product(acc, weights[1], operand_at(b, half * 64 + 32));
    products_commit();
}

/* Rings of a tile in turn: activations by rounds, codes by two, constants by eight. */
enum { CONSTANT_STAGES = 2, CONSTANT_ROUNDS = 8 };
static_assert(CONSTANT_ROUNDS * 64 == 4 * 128, "copy_factors");

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
    uint32_t x_from[PARTS];    /* this thread's parts of a round of activations, in 16 bytes */
    const bf16 *x;
    weight_tiles w; /* what is copied next */
    shared_at shared;
    int rounds;
    /* Places in the rings: of the round that is multiplied and the one that is fetched; of this
     * thread's codes of the round that is unpacked and of those that are fetched. */
    uint32_t x_read, x_write, w_read, w_write;

    /* This thread's among the block's 16 bytes. With DOWN every second four lanes change places, so
     * that what is read at once lies in more banks. */
    static __device__ __forceinline__ int place() {
        int tid = (int)threadIdx.x;
        return DOWN ? tid ^ (tid >> 1 & 4) : tid;
    }
    static __device__ __forceinline__ void advance(uint32_t &at, int bytes, int stages) {
        at += (uint32_t)bytes;
        if (at == (uint32_t)(bytes * stages)) at = 0;
    }
    __device__ __forceinline__ shared_at codes_at(uint32_t stage) const {
        return shared + (uint32_t)(STAGES * X_BYTES + place() * 16) + stage;
    }
    __device__ __forceinline__ shared_at constants_at(int round) const {
        int stage = round / CONSTANT_ROUNDS % CONSTANT_STAGES;
        return shared + (uint32_t)(STAGES * X_BYTES + CODE_STAGES * W_BYTES + stage * C_BYTES);
    }

    /* Copies a round's activations into their stage, and the codes and constants that begin with
     * this round (with the even ones); an empty group of copies after the last. */
    template <bool EVEN> __device__ __forceinline__ void fetch(int round) {
        if (round < rounds) {
            int tid = threadIdx.x;
            if (EVEN) {
                w.template copy_codes<CODES_APART>(codes_at(w_write), THREADS * 16);
                advance(w_write, W_BYTES, CODE_STAGES);
                if (round % CONSTANT_ROUNDS == 0) {
                    w.copy_factors(constants_at(round) + (uint32_t)tid * 16);
                }
            }
            const uint4 *from = (const uint4 *)(x + round * 64);
            shared_at to_x = shared + x_write + part_at(tid / 8, tid % 8);
#pragma unroll
            for (int i = 0; i < PARTS; i++) {
                if (N * 8 % THREADS && tid + i * THREADS >= N * 8) break;
                copy16(to_x + (uint32_t)(i * THREADS * 16), from + x_from[i], true);
            }
            advance(x_write, X_BYTES, STAGES);
        }
        copy_commit();
    }

    /* For two rounds. */
    __device__ __forceinline__ row_constants constants_of(int round) const {
        int lane = (int)threadIdx.x % 32, group = lane % 4 / 2, g = lane / 4;
        int place = DOWN ? group * 64 + g * 8 : g * 16 + group * 8;
        shared_at at = constants_at(round) + (uint32_t)((int)threadIdx.x / 32 * 512 +
                                                        round % CONSTANT_ROUNDS / 2 * 128 + place);
        return load_constants(at);
    }

    template <bool EVEN> __device__ __forceinline__ row_codes codes_of() const {
        shared_at at = codes_at(w_read);
        const uint32_t later = EVEN ? 0 : 1;
        if (!DOWN) {
            at = at + later * 8;
            return {load_shared8(at), load_shared8(at + THREADS * 16)};
        }
        /* Two lanes copied for each other; which of the places is whose takes turns, see place().
         */
        uint32_t odd = threadIdx.x / 4 % 2, turned = threadIdx.x / 8 % 2;
        at = at + later * (THREADS * 16) - (odd ^ turned) * 64 + odd * 4;
        shared_at low = at + turned * 64, high = at + (turned ^ 1) * 64;
        return {make_uint2(load_shared4(low), load_shared4(high)),
                make_uint2(load_shared4(low + 8), load_shared4(high + 8))};
    }

    /* Multiplies a round; c and k are those of it, then of the next one. */
    template <bool EVEN>
    __device__ __forceinline__ void step(int round, row_codes &c, row_constants &k) {
        copy_wait<LEAD - 2>();
        publish_shared();
        __syncthreads(); /* round + 1 has landed, round - 2 has been read */
        multiply_half(acc, weights[0], shared + x_read, 0);
        fetch<EVEN == (LEAD % 2 == 0)>(round + LEAD);
        products_wait<1>(); /* the half before: its registers are free */
        unpack_half(weights[1], c.first.y, c.second.y, k);
        multiply_half(acc, weights[1], shared + x_read, 1);
        products_wait<1>();
        advance(x_read, X_BYTES, STAGES);
        if (EVEN) {
            c = codes_of<false>();
            unpack_half(weights[0], c.first.x, c.second.x, k);
        } else if (round + 1 < rounds) {
            advance(w_read, W_BYTES, CODE_STAGES);
            k = constants_of(round + 1);
            c = codes_of<true>();
            unpack_half(weights[0], c.first.x, c.second.x, k);
        }
    }

    /* acc = the sums over all rounds (an even number): acc[4 j + i] for row 2 (lane / 4) of the
     * warp's 16 of weights and row 8 j + 2 (lane % 4) + i of activations, acc[4 j + 2 + i] for the
     * next row of weights. Rows of activations: index(n) of row n of the tile, 0 <= n < n_rows; in
     * the place of the missing ones the last is multiplied. */
    template <class Rows> __device__ __forceinline__ void run(int n_rows, const Rows &index) {
        uint32_t parts = (uint32_t)(rounds * 8); /* 16 bytes each, of a row */
        x_read = x_write = w_read = w_write = 0;
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[i] = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            int part = (int)threadIdx.x + i * THREADS;
            x_from[i] = (uint32_t)index(min(part / 8, n_rows - 1)) * parts + (uint32_t)(part % 8);
        }
#pragma unroll
        for (int i = 0; i < LEAD; i++) {
            if (i % 2) {
                fetch<false>(i);
            } else {
                fetch<true>(i);
            }
        }
        copy_wait<LEAD - 1>();
        __syncthreads(); /* constants are copied by other lanes */
        row_constants k = constants_of(0);
        row_codes c = codes_of<true>();
        unpack_half(weights[0], c.first.x, c.second.x, k);
        for (int round = 0; round < rounds; round += 2) {
            step<true>(round, c, k);
            step<false>(round + 1, c, k);
        }
        products_wait<0>();
        hold(acc);
    }
};

#endif
