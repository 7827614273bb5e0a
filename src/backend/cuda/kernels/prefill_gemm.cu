/* Mathematics: out [n][N] = X [n][K] W^T, W = scale * code + bias rounded to bf16; silu(gate) up.
 * Layout: X and hidden bf16 reordered (prefill_common.cuh), W as tiles (tile.h), out fp16.
 * Threads: a warpgroup has 64 outputs and up to 256 rows (wgmma); W in registers, X shared.
 * Fused: unpacking; SiLU(gate) * up; the shared expert. Agrees with ref to 1.5e-3 and bf16 inputs.
 * Bytes: 4,096 rows: dense 84 to 92, up 66, down 48 % of 790 TFLOP/s (bench/cuda-prompt-h200.json).
 *
 * Many rows times a quantised matrix on Hopper's tensor cores (prefill_gemm.cuh), for prompts:
 * whole matrices, and the experts' two halves over rows sorted by expert. A row's sum runs over the
 * inputs in one order whatever the tile and its neighbours. Weights are rounded to bf16 once
 * unpacked (scale * code + bias, relative error 2^-9 at most), activations are bf16, sums float32.
 *
 * Matrices lie as the tiles of the decode kernel (tile.h), 4-bit codes and a multiple of 512
 * inputs; activations are reordered (prefill_common.cuh). Grid: tiles of outputs in x, blocks of
 * rows in y. */
#include "prefill_gemm.cuh"
#include "prefill_wide.cuh"

/* A thread's sums of rows n0 and on to out fp16 [rows][ldo]: its two rows of weights are
 * neighbours, so that outputs f and the next are stored in pairs. */
template <int N>
__device__ __forceinline__ void store_pairs(fp16 *out, int ldo, const float (&acc)[N / 2], int n0,
                                            int f, int rows, int lane) {
#pragma unroll
    for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = n0 + 8 * j + lane % 4 * 2 + i;
            if (row >= rows) continue;
            *(uint32_t *)(out + (int64_t)row * ldo + f) =
                half_pair(acc[4 * j + i], acc[4 * j + 2 + i]);
        }
}

/* out[row][f] = sum_k x[row][k] w[f][k]: x bf16 [rows][w.cols] reordered, out fp16 [rows][ldo]. */
template <int WGS, int N, int STAGES>
__device__ void dense(const bf16 *x, const cuda_mat &w, fp16 *out, int ldo, int rows) {
    SHARED_PIECES(shared);
    begin_after_previous();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n0 = blockIdx.y * N;
    int f = (blockIdx.x * WGS * 4 + warp) * 16 + lane / 4 * 2;
    Product<WGS, N, STAGES> p;
    p.x = x;
    p.w = weights_of<false>(w, w.codes, f / 16 * 16);
    p.shared = shared_address(shared);
    p.rounds = w.cols / 64;
    p.run(rows - n0, [&](int n) { return n0 + n; });
    store_pairs<N>(out, ldo, p.acc, n0, f, rows, lane);
}

#define DENSE(wgs, n, stages, at_least, pair, alone)                                               \
    KERNEL __launch_bounds__(wgs * 128, at_least)                                                  \
        dense_##wgs##_##n(const bf16 *x, cuda_mat w, fp16 *out, int ldo, int rows) {               \
        dense<wgs, n, stages>(x, w, out, ldo, rows);                                               \
    }
PREFILL_DENSE_TILES(DENSE)

/* The same for many rows. Grid: blocks that share the tiles. */
__device__ __forceinline__ void dense_rows_256(const bf16 *x, const cuda_mat &w, fp16 *out, int ldo,
                                               int rows) {
    SHARED_PIECES(shared);
    wide_stage stage = {shared_address(shared), 0, 0};
    wide_tiles tiles(w.rows, rows);
    wide_begin(stage);
    begin_after_previous();
    if (threadIdx.x < WIDE_COPIERS) {
        fewer_registers<56>();
        wide_copy(stage, x, w.cols, rows, tiles);
        return;
    }
    more_registers<224>();
    wide_multiply(stage, w, tiles, [&](const float(&acc)[WIDE_ROWS / 2], int n0, int f) {
        int lane = threadIdx.x % 32;
        f += lane / 4 * 2;
        store_pairs<WIDE_ROWS>(out, ldo, acc, n0, f, rows, lane);
    });
}
KERNEL __launch_bounds__(WIDE_THREADS, 1)
    dense_wide(const bf16 *x, cuda_mat w, fp16 *out, int ldo, int rows) {
    dense_rows_256(x, w, out, ldo, rows);
}

/* ---- experts --------------------------------------------------------------------------------- */

/* Rows [first, first + rows) of the sorted pairs, of one expert, or of all rows, of the shared one.
 */
struct expert_rows {
    int expert, first, rows;
    bool shared;
};

/* Block b: the shared expert's come first, then those of the map. An expert's rows are shared
 * evenly among its blocks, in sixteens. */
__device__ __forceinline__ expert_rows rows_of_block(const cuda_groups &g, int rows, int b,
                                                     int height) {
    int own = (rows + height - 1) / height;
    if (b < own) return {0, b * height, min(height, rows - b * height), true};
    b -= own;
    if (b >= *g.n_blocks) return {0, 0, 0, false};
    int entry = g.blocks[b], expert = entry >> 16;
    int begin = g.begin[expert], count = g.begin[expert + 1] - begin;
    int blocks = (count + height - 1) / height, share = (count + blocks - 1) / blocks;
    share = (share + 15) / 16 * 16;
    int first = begin + (entry & 0xffff) * share;
    return {expert, first, min(share, begin + count - first), false};
}

/* Calls f(tile of the fewest columns that hold the rows): N a multiple of 16 up to MOST. */
template <int N, class F> __device__ __forceinline__ void with_tile(int rows, F f) {
    if constexpr (N > 16) {
        if (rows <= N - 16) return with_tile<N - 16>(rows, f);
    }
    f.template run<N>();
}

/* hidden[place][i] = silu(gate_e x) * (up_e x), bf16 reordered, x the row of the pair at that
 * place. Rows of gate and of up take turns in the tiles, so that both products of an output meet in
 * one thread. A block gives the 64 outputs whose places are one half of a block of the next
 * product's inputs: 16 of every 32. */
struct experts_up_tile {
    const bf16 *x;
    cuda_mat gate_up;
    const int32_t *pairs; /* NULL: rows in order */
    bf16 *hidden;
    int inner;
    expert_rows b;
    char *shared;

    template <int N, int STAGES> __device__ __forceinline__ void run_tile() const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32, half = blockIdx.x % 2;
        int i = lane / 4, k = warp / 2 * 32 + half * 16 + warp % 2 * 8 + i; /* in its block */
        int row = b.expert * inner + (int)blockIdx.x / 2 * ORDERED + k - i; /* the warp's first */
        Product<2, N, STAGES> p;
        p.x = x;
        p.w = weights_of<false>(gate_up, gate_up.codes, 2 * row);
        p.shared = shared_address(shared);
        p.rounds = gate_up.cols / 64;
        p.run(b.rows, [&](int n) { return pairs ? pairs[b.first + n] / TOP_K : b.first + n; });
        __syncthreads(); /* the ring has been read */
        int place = place_of_input(k) - half * 64;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int n = 8 * j + lane % 4 * 2 + e;
                float v = quick_silu(p.acc[4 * j + e]) * p.acc[4 * j + 2 + e];
                *(bf16 *)(shared + n * 128 + ((place / 8 ^ (n / 2 & 7)) * 16) + place % 8 * 2) =
                    to_bf16(v);
            }
        __syncthreads();
        for (int at = threadIdx.x; at < b.rows * 8; at += 256) {
            int n = at / 8, part = at % 8;
            *(uint4 *)(hidden + (int64_t)(b.first + n) * inner + blockIdx.x * 64 + part * 8) =
                *(const uint4 *)(shared + n * 128 + ((part ^ (n / 2 & 7)) * 16));
        }
    }
};

/* out[place][h] = down_e hidden[place] / EXPERT_UNIT */
struct experts_down_tile {
    const bf16 *hidden;
    cuda_mat down;
    fp16 *out;
    expert_rows b;
    char *shared;

    template <int N, int STAGES> __device__ __forceinline__ void run_tile() const {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int f = (blockIdx.x * 8 + warp) * 16 + lane / 4 * 2;
        Product<2, N, STAGES, true> p;
        p.x = hidden;
        int64_t of_expert = (int64_t)b.expert * (H / TILE_DOWN_ROWS * TILE_DOWN_BYTES);
        p.w = weights_of<true>(down, down.codes + of_expert * (down.cols / TILE_DOWN_COLS),
                               f / 16 * 16);
        p.shared = shared_address(shared);
        p.rounds = down.cols / 64;
        p.run(b.rows, [&](int n) { return b.first + n; });
#pragma unroll
        for (int j = 0; j < N / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int n = 8 * j + lane % 4 * 2 + i;
                if (n >= b.rows) continue;
                const float unit = 1 / EXPERT_UNIT;
                *(uint32_t *)(out + (int64_t)(b.first + n) * H + f) =
                    half_pair(p.acc[4 * j + i] * unit, p.acc[4 * j + 2 + i] * unit);
            }
    }
};

template <class Tile, int STAGES> struct staged_tile {
    const Tile &tile;
    template <int N> __device__ __forceinline__ void run() const {
        tile.template run_tile<N, STAGES>();
    }
};

template <int N, int STAGES>
__device__ void experts_up(const bf16 *x, const cuda_mat &gate_up, const cuda_groups &groups,
                           bf16 *hidden, const cuda_mat &shared_gate_up, int rows) {
    SHARED_PIECES(shared);
    begin_after_previous();
    expert_rows b = rows_of_block(groups, rows, blockIdx.y, N);
    int inner = b.shared ? SHARED : INNER;
    if (b.rows <= 0 || (int)blockIdx.x * 64 >= inner) return;
    experts_up_tile tile = {x,
                            b.shared ? shared_gate_up : gate_up,
                            b.shared ? nullptr : groups.pairs,
                            b.shared ? hidden + (int64_t)rows * TOP_K * INNER : hidden,
                            inner,
                            b,
                            shared};
    with_tile<N>(b.rows, staged_tile<experts_up_tile, STAGES>{tile});
}
template <int N, int STAGES>
__device__ void experts_down(const bf16 *hidden, const cuda_mat &down, const cuda_groups &groups,
                             fp16 *out, const cuda_mat &shared_down, fp16 *shared_out, int rows) {
    SHARED_PIECES(shared);
    begin_after_previous();
    expert_rows b = rows_of_block(groups, rows, blockIdx.y, N);
    if (b.rows <= 0) return;
    experts_down_tile tile = {b.shared ? hidden + (int64_t)rows * TOP_K * INNER : hidden,
                              b.shared ? shared_down : down, b.shared ? shared_out : out, b,
                              shared};
    with_tile<N>(b.rows, staged_tile<experts_down_tile, STAGES>{tile});
}

#define EXPERTS(n, stages, at_least)                                                               \
    KERNEL __launch_bounds__(256, at_least)                                                        \
        prompt_up_##n(const bf16 *x, cuda_mat gate_up, cuda_groups groups, bf16 *hidden,           \
                      cuda_mat shared_gate_up, int rows) {                                         \
        experts_up<n, stages>(x, gate_up, groups, hidden, shared_gate_up, rows);                   \
    }                                                                                              \
    KERNEL __launch_bounds__(256, at_least)                                                        \
        prompt_down_##n(const bf16 *hidden, cuda_mat down, cuda_groups groups, fp16 *out,          \
                        cuda_mat shared_down, fp16 *shared_out, int rows) {                        \
        experts_down<n, stages>(hidden, down, groups, out, shared_down, shared_out, rows);         \
    }
PREFILL_EXPERT_TILES(EXPERTS)
