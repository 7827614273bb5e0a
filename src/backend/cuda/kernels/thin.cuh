/* Few rows (16 or 32) times a quantised matrix: time is that of reading the codes. A warp computes
 * eight outputs and takes their codes from memory straight into the fragments of its products, many
 * groups ahead; only the activations go through shared memory. The products and their order are
 * those of gemm.cuh, so that a row's results are the same bits by either. */
#ifndef LILY_CUDA_THIN_CUH
#define LILY_CUDA_THIN_CUH

#include "common.cuh"

enum { THIN_THREADS = 256, THIN_AHEAD = 4, THIN_BYTES = 32 * 1024 + 32 * 16 };

/* The matrix row that gives one output, as lane l of a warp sees it: output l / 4. A lane loads
 * codes [16 q, 16 q + 16) of every group, q = l % 4, which its quad shares by exchange. */
struct thin_column {
    mat_row from;
    bool split, valid; /* its eights of codes lie apart; there is such an output */
};

__device__ __forceinline__ thin_column thin_column_of(const cuda_mat &m, int64_t row, bool valid) {
    thin_column c = {row_of(m, valid ? row : 0), lies_as(m, CUDA_DOWN), valid};
    c.from.codes += code_sixteen(m, threadIdx.x % 4);
    return c;
}

struct thin_codes {
    uint2 words;
    uint32_t factors; /* scale, bias */
};

/* m: the column's matrix, or one that lies alike. SPLIT: it may lie as tiles of `down`. */
template <bool SPLIT>
__device__ __forceinline__ thin_codes thin_load(const cuda_mat &m, const thin_column &c,
                                                int group) {
    thin_codes x = {};
    if (!c.valid) return x;
    const uint8_t *at = c.from.codes + code_at(m, group);
    if (SPLIT && c.split) {
        x.words = make_uint2(__ldg((const uint32_t *)at), __ldg((const uint32_t *)(at + 16)));
    } else {
        x.words = __ldg((const uint2 *)at);
    }
    int factor = factor_at(m, group);
    x.factors = __ldg(c.from.scales + factor) | (uint32_t)__ldg(c.from.biases + factor) << 16;
    return x;
}

/* Two neighbouring codes, the byte at bits 8 q of a word, as bf16 values. */
__device__ __forceinline__ uint32_t thin_pair(uint32_t word, uint32_t scale, uint32_t bias) {
    uint32_t byte = word >> (threadIdx.x % 4 * 8);
    uint32_t x = (byte & 15) | (byte & 0xf0) << 12 | 0x43004300u;
    return fma_bf16x2(fma_bf16x2(x, 0x3f803f80u, 0xc300c300u), scale, bias);
}

/* acc[i][j] = rows 16 i and on times the outputs of column j, of m or of a matrix that lies alike.
 * All threads of the block call it with the same rows; shared has THIN_BYTES. */
template <int MT, int NT, bool SPLIT, class Rows>
__device__ __forceinline__ void thin_product(char *shared, const Rows &rows, const cuda_mat &m,
                                             const thin_column (&column)[NT],
                                             float (&acc)[MT][NT][4]) {
    constexpr int PIECE = 1024 / MT, PITCH = PIECE * 2 + 16; /* columns at once; bytes of a row */
    int lane = threadIdx.x % 32, cols = m.cols, groups = cols / 64;
    thin_codes next[THIN_AHEAD][NT];
#pragma unroll
    for (int d = 0; d < THIN_AHEAD; d++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            if (d < groups) next[d][j] = thin_load<SPLIT>(m, column[j], d);
        }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int v = 0; v < 4; v++) acc[i][j][v] = 0;
    for (int first = 0; first < cols; first += PIECE) {
        int n = min(PIECE, cols - first), pieces = n / 8;
        __syncthreads(); /* the piece before has been read */
        for (int i = threadIdx.x; i < MT * 16 * pieces; i += blockDim.x) {
            int r = i / pieces, p = i % pieces;
            const bf16 *row = rows.row(r);
            copy16(shared_address(shared) + r * PITCH + p * 16, row ? row + first + p * 8 : rows.a,
                   row != nullptr);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        for (int g0 = 0; g0 < n / 64; g0 += THIN_AHEAD) {
#pragma unroll
            for (int d = 0; d < THIN_AHEAD; d++) {
                int g = g0 + d, ahead = first / 64 + g + THIN_AHEAD;
                if (g >= n / 64) break;
                thin_codes now[NT];
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    now[j] = next[d][j];
                    if (ahead < groups) next[d][j] = thin_load<SPLIT>(m, column[j], ahead);
                }
#pragma unroll
                for (int s = 0; s < 4; s++) {
                    uint32_t a[MT][4];
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        load_matrices(a[i], shared_address(shared) + (i * 16 + lane % 16) * PITCH +
                                                g * 128 + s * 32 + lane / 16 * 16);
                    }
#pragma unroll
                    for (int j = 0; j < NT; j++) {
                        uint32_t scale = (now[j].factors & 0xffffu) * 0x10001u;
                        uint32_t bias = (now[j].factors >> 16) * 0x10001u;
                        uint32_t low = __shfl_sync(ALL_LANES, now[j].words.x, lane / 4 * 4 + s);
                        uint32_t high = __shfl_sync(ALL_LANES, now[j].words.y, lane / 4 * 4 + s);
                        uint32_t b0 = thin_pair(low, scale, bias);
                        uint32_t b1 = thin_pair(high, scale, bias);
#pragma unroll
                        for (int i = 0; i < MT; i++) multiply(acc[i][j], a[i], b0, b1);
                    }
                }
            }
        }
    }
}

#endif
