/* Mathematics: out [n][N] = X [n][K] W^T for few rows, W rounded to bf16; silu(gate x) (up x).
 * Layout: X and hidden bf16, out float32, W 4 bits, planar or tiles; rows sorted by expert.
 * Threads: 256 a block of 16 or 32 rows, a warp eight outputs and all columns, m16n8k16.
 * Fused: unpacking; SiLU(gate) * up. Agrees with ref to 1e-2 of a stage's output (docs/cuda.md).
 * Bytes: 16 rows, dense: 5 % of 4,642 GB/s (bench/cuda-portable-h200.json; planar).
 *
 * Few rows times a quantised matrix: short prompts, decode steps of several sessions, experts with
 * few rows. 4-bit codes. See thin.cuh. */
#include "rows.cuh"
#include "thin.cuh"

/* First output of this warp's tile of eight. */
__device__ __forceinline__ int thin_first() {
    return (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * 8;
}

/* out[row][n] = sum_k a[row][k] w[n][k]: a bf16 [rows, w.cols], out float [rows, ldo]. Grid: blocks
 * of 16 MT rows in x, of eight outputs a warp in y. */
template <int MT>
__device__ void thin(const bf16 *a, const cuda_mat &w, float *out, int ldo, int rows,
                     char *shared) {
    int lane = threadIdx.x % 32, m0 = blockIdx.x * 16 * MT, n0 = thin_first(), n = n0 + lane / 4;
    dense_rows source = {a, w.cols, m0, rows};
    thin_column column[1] = {thin_column_of(w, n, n < w.rows)};
    float acc[MT][1][4];
    thin_product<MT, 1, false>(shared, source, w, column, acc);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            int m = m0 + i * 16 + lane / 4 + v / 2 * 8, c = n0 + lane % 4 * 2 + v % 2;
            if (m < rows && c < w.rows) out[(int64_t)m * ldo + c] = acc[i][0][v];
        }
}

/* hidden[place][i] = silu(gate_e x) * (up_e x), as in portable_gemm.cu. */
template <int MT>
__device__ void thin_up(const bf16 *a, const cuda_mat &gate, const cuda_mat &up,
                        const cuda_groups &groups, bf16 *hidden, int inner, char *shared) {
    expert_block b = block_of(groups, blockIdx.x, 16 * MT);
    if (b.rows <= 0) return;
    int lane = threadIdx.x % 32, n0 = thin_first(), n = n0 + lane / 4;
    gathered_rows source = {a, gate.cols, groups.pairs, b.first, b.rows};
    int64_t row = (int64_t)b.expert * inner + n;
    thin_column column[2] = {thin_column_of(gate, row, n < inner),
                             thin_column_of(up, row, n < inner)};
    float acc[MT][2][4];
    thin_product<MT, 2, false>(shared, source, gate, column, acc);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int m = i * 16 + lane / 4 + half * 8, c = n0 + lane % 4 * 2;
            if (m >= b.rows || c >= inner) continue;
            const float *g = acc[i][0] + 2 * half, *u = acc[i][1] + 2 * half;
            *(uint32_t *)(hidden + (int64_t)(b.first + m) * inner + c) =
                bf16_pair(silu(g[0]) * u[0], silu(g[1]) * u[1]);
        }
}

/* out[place][h] = down_e hidden[place] */
template <int MT>
__device__ void thin_down(const bf16 *hidden, const cuda_mat &down, const cuda_groups &groups,
                          float *out, char *shared) {
    expert_block b = block_of(groups, blockIdx.x, 16 * MT);
    if (b.rows <= 0) return;
    int lane = threadIdx.x % 32, n0 = thin_first(), n = n0 + lane / 4;
    dense_rows source = {hidden, down.cols, b.first, b.first + b.rows};
    thin_column column[1] = {thin_column_of(down, (int64_t)b.expert * H + n, n < H)};
    float acc[MT][1][4];
    thin_product<MT, 1, true>(shared, source, down, column, acc);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            int m = i * 16 + lane / 4 + v / 2 * 8, c = n0 + lane % 4 * 2 + v % 2;
            if (m < b.rows && c < H) out[(int64_t)(b.first + m) * H + c] = acc[i][0][v];
        }
}

#define THIN_KERNELS(rows, tiles)                                                                  \
    KERNEL __launch_bounds__(THIN_THREADS, 3)                                                      \
        thin_##rows(const bf16 *a, cuda_mat w, float *out, int ldo, int n) {                       \
        DYNAMIC_SHARED(char, shared);                                                              \
        thin<tiles>(a, w, out, ldo, n, shared);                                                    \
    }                                                                                              \
    KERNEL __launch_bounds__(THIN_THREADS, 2) thin_up_##rows(                                      \
        const bf16 *a, cuda_mat gate, cuda_mat up, cuda_groups groups, bf16 *hidden, int inner) {  \
        DYNAMIC_SHARED(char, shared);                                                              \
        thin_up<tiles>(a, gate, up, groups, hidden, inner, shared);                                \
    }                                                                                              \
    KERNEL __launch_bounds__(THIN_THREADS, 3)                                                      \
        thin_down_##rows(const bf16 *hidden, cuda_mat down, cuda_groups groups, float *out) {      \
        DYNAMIC_SHARED(char, shared);                                                              \
        thin_down<tiles>(hidden, down, groups, out, shared);                                       \
    }
THIN_KERNELS(16, 1)
THIN_KERNELS(32, 2)
