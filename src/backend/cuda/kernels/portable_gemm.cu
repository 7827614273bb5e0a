/* Mathematics: out [n][N] = X [n][K] W^T, W = scale * code + bias rounded to bf16; silu(gate) up.
 * Layout: X and hidden bf16, out float32, W planar or tiles (device.h); rows sorted by expert.
 * Threads: 256 a block of 64 or 128 rows and 128 outputs, 64 columns a round, m16n8k16.
 * Fused: unpacking; SiLU(gate) * up. Agrees with ref to 1e-2 of a stage's output (docs/cuda.md).
 * Bytes: 4,096 rows, dense: 514 us, 32 % of 790 TFLOP/s (bench/cuda-portable-h200.json; planar).
 *
 * Many rows times a quantised matrix, for prompts: 4-bit tiles are dequantised to bf16 on their way
 * into shared memory and multiplied by tensor cores, sums in float32. A row's sum runs over the
 * columns in one fixed order, whatever the tile height and the rows beside it, so that results do
 * not depend on how a prompt was cut.
 *
 * A block computes TILE_M rows x TILE_N outputs, 64 columns (one quantisation group) a round: the
 * next rounds' activations are copied and their codes loaded while one is multiplied. Tiles lie
 * in shared memory as rows of 64 bf16, whose 16-byte pieces are permuted by row (swizzled), so that
 * neither ldmatrix nor the stores meet bank conflicts. */
#include "gemm.cuh"

/* out[row][n] = sum_k a[row][k] w[n][k]: a bf16 [rows, w.cols], out float [rows, ldo]. */
template <int TILE_M>
__device__ void dense(const bf16 *a, const cuda_mat &w, float *out, int ldo, int rows) {
    DYNAMIC_SHARED(char, shared);
    int m0 = blockIdx.x * TILE_M, n0 = blockIdx.y * TILE_N;
    dense_rows source = {a, w.cols, m0, rows};
    plain_columns columns = {w, n0};
    Tile<TILE_M> tile;
    tile.run(shared, source, columns, w.cols / 64);
    tile.each([&](int m, int n, float v0, float v1) {
        if (m0 + m >= rows || n0 + n >= w.rows) return;
        float *to = out + (int64_t)(m0 + m) * ldo + n0 + n;
        to[0] = v0;
        if (n0 + n + 1 < w.rows) to[1] = v1;
    });
}

KERNEL __launch_bounds__(THREADS)
    gemm_64(const bf16 *a, cuda_mat w, float *out, int ldo, int rows) {
    dense<64>(a, w, out, ldo, rows);
}
KERNEL __launch_bounds__(THREADS, 2)
    gemm_128(const bf16 *a, cuda_mat w, float *out, int ldo, int rows) {
    dense<128>(a, w, out, ldo, rows);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* hidden[place][i] = silu(gate_e x) * (up_e x) for the block's expert e and its places, x the row
 * of the pair at that place. Even 8-column tiles are gate, odd ones up: both products of an output
 * meet in one thread. */
template <int TILE_M>
__device__ void experts_up(const bf16 *a, const cuda_mat &gate, const cuda_mat &up,
                           const cuda_groups &groups, bf16 *hidden, int inner) {
    DYNAMIC_SHARED(char, shared);
    expert_block b = block_of(groups, blockIdx.x, TILE_M);
    if (b.rows <= 0) return;
    int n0 = blockIdx.y * (TILE_N / 2);
    gathered_rows source = {a, gate.cols, groups.pairs, b.first, b.rows};
    paired_columns columns = {gate, up, b.expert * inner + n0, inner - n0};
    Tile<TILE_M> tile;
    tile.run(shared, source, columns, gate.cols / 64);
    tile.each_pair([&](int m, int n, float g0, float g1, float u0, float u1) {
        if (m >= b.rows || n0 + n >= inner) return;
        *(uint32_t *)(hidden + (int64_t)(b.first + m) * inner + n0 + n) =
            bf16_pair(silu(g0) * u0, silu(g1) * u1);
    });
}

/* out[place][h] = down_e hidden[place] */
template <int TILE_M>
__device__ void experts_down(const bf16 *hidden, const cuda_mat &down, const cuda_groups &groups,
                             float *out) {
    DYNAMIC_SHARED(char, shared);
    expert_block b = block_of(groups, blockIdx.x, TILE_M);
    if (b.rows <= 0) return;
    int n0 = blockIdx.y * TILE_N;
    dense_rows source = {hidden, down.cols, b.first, b.first + b.rows};
    cuda_mat of_expert = down;
    of_expert.rows = b.expert * H + H; /* the tile ends where the expert does */
    plain_columns columns = {of_expert, b.expert * H + n0};
    Tile<TILE_M, true> tile;
    tile.run(shared, source, columns, down.cols / 64);
    tile.each([&](int m, int n, float v0, float v1) {
        if (m >= b.rows || n0 + n >= H) return;
        float *to = out + (int64_t)(b.first + m) * H + n0 + n;
        to[0] = v0;
        to[1] = v1;
    });
}

#define EXPERT_KERNELS(rows)                                                                       \
    KERNEL __launch_bounds__(THREADS, 2) experts_up_##rows(                                        \
        const bf16 *a, cuda_mat gate, cuda_mat up, cuda_groups groups, bf16 *hidden, int inner) {  \
        experts_up<rows>(a, gate, up, groups, hidden, inner);                                      \
    }                                                                                              \
    KERNEL __launch_bounds__(THREADS, 2)                                                           \
        experts_down_##rows(const bf16 *hidden, cuda_mat down, cuda_groups groups, float *out) {   \
        experts_down<rows>(hidden, down, groups, out);                                             \
    }
EXPERT_KERNELS(64)
EXPERT_KERNELS(128)
