/* Mathematics: W x for n slots of every matrix; top 8, silu(gate x) (up x), weighted sum, norm.
 * Layout: weights planar; x bf16 [n][H]; scores float32 [n][E + 1]; hidden bf16 [place][I].
 * Threads: 16 warps a block share a unit's columns; slots are columns of m16n8k16; sums in order.
 * Fused: choice and shared expert; weighted sum and next norm. Agrees with ref/moe.c.
 * Bytes: each weight once for all slots; not timed since only planar weights come here.
 *
 * The products of a decode step of several slots, and what lies between them: see batch.cuh and
 * docs/cuda-batch.md. Launches are of BATCH_THREADS threads; a block walks over `units` of work one
 * after the other, the weights of the next ones on their way meanwhile. Units take turns at two
 * places for their sums: one barrier a unit then parts both writing from reading and the other way
 * round.
 *
 * From sm_90 on a kernel may begin while the ones before it still run: weights are asked for at
 * once, everything else is read and written behind wait_for_previous. */
#include "batch.cuh"
#include "routing.cuh"

enum {
    BATCH_AHEAD = 3 /* units on their way */,
    MAX_BLOCKS = EXPERTS + CUDA_FEW_ROWS * TOP_K / BATCH_ROWS
};

/* Share i of n of `units`, as [begin, end). */
struct span {
    int begin, end;
    __device__ span(int units, int i, int n)
        : begin((int)((int64_t)units * i / n)), end((int)((int64_t)units * (i + 1) / n)) {}
};

/* ---- matrices for all slots ------------------------------------------------------------------ */

/* out[r][n] = sum_k a[r][k] w[n][k], out rows ldo floats apart, for 8 NT rows from r0 on, by share
 * i of n blocks. A unit is ROWS rows of w for each set of warps: as many as registers hold three
 * times. At most 2,048 columns. */
template <int NT>
__device__ void dense(const bf16 *a, const cuda_mat &w, float *out, int ldo, int r0, int rows,
                      int i, int n, batch_sums *kept) {
    enum { HALVES = NT == 1 ? 2 : 1, ROWS = 16 * HALVES };
    int warp = threadIdx.x / 32;
    batch_split split(w.cols);
    int set = warp / split.slices, chunk = warp % split.slices, per = ROWS * split.sets;
    span share((w.rows + per - 1) / per, i, n);
    if (share.begin == share.end) return;
    batch_weights next[BATCH_AHEAD][HALVES];
    auto fetch = [&](batch_weights(&to)[HALVES], int unit) {
        if (unit >= share.end) return;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            to[half] = batch_fetch(w, unit * per + set * ROWS + half * 16, w.rows, chunk);
        }
    };
#pragma unroll
    for (int d = 0; d < BATCH_AHEAD; d++) fetch(next[d], share.begin + d);
    wait_for_previous();
    batch_inputs<NT> x;
    batch_load(x, dense_rows{a, w.cols, r0, rows}, w.cols, chunk);
    for (int first = share.begin; first < share.end; first += BATCH_AHEAD) {
#pragma unroll
        for (int d = 0; d < BATCH_AHEAD; d++) {
            int unit = first + d;
            if (unit >= share.end) break;
            batch_sums *now = kept + unit % 2 * BATCH_WARPS * NT;
#pragma unroll
            for (int half = 0; half < HALVES; half++) {
                float acc[NT][4] = {};
                batch_multiply(acc, next[d][half], x);
#pragma unroll
                for (int t = 0; t < NT; t++) batch_keep(now[warp * NT + t], acc[t], half);
            }
            fetch(next[d], unit + BATCH_AHEAD);
            __syncthreads();
            for (int item = threadIdx.x; item < per * NT * BATCH_ROWS; item += BATCH_THREADS) {
                int row = item % ROWS, slot = item / ROWS % BATCH_ROWS;
                int t = item / (ROWS * BATCH_ROWS) % NT, of = item / (ROWS * BATCH_ROWS * NT);
                int r = r0 + t * BATCH_ROWS + slot, to = unit * per + of * ROWS + row;
                if (r >= rows || to >= w.rows) continue;
                out[(int64_t)r * ldo + to] = batch_sum(now + t, split, of, NT, slot, row);
            }
        }
    }
}

/* Row groups of a launch take turns among its blocks, so that those of the same weights run at the
 * same time and only one of them waits for memory. */
template <int NT> struct turn {
    int groups, r0, i, n;
    __device__ turn(int rows, int block, int blocks) {
        groups = (rows + 8 * NT - 1) / (8 * NT);
        r0 = block % groups * 8 * NT;
        i = block / groups, n = blocks / groups;
    }
};

/* proj = all projections that share the input; then, in near float32 accuracy, a small matrix of
 * its own (DeltaNet's gates; no rows: none): small_out[r][small.rows]. Blocks [0, dense_blocks), a
 * multiple of the row groups, do the first, one for each 16 rows of small the second. */
template <int NT>
__device__ void project(const bf16 *a, const float *exact, const cuda_mat &w, float *out, int ldo,
                        const cuda_mat &small, float *small_out, int rows, int dense_blocks,
                        batch_sums *kept) {
    int block = blockIdx.x;
    if (block < dense_blocks) {
        let_next_begin();
        turn<NT> t(rows, block, dense_blocks);
        if (t.i < t.n) dense<NT>(a, w, out, ldo, t.r0, rows, t.i, t.n, kept);
        return;
    }
    let_next_begin();
    wait_for_previous();
    for (int r0 = 0; r0 < rows; r0 += BATCH_ROWS) {
        __syncthreads();
        batch_precise(exact, small, (block - dense_blocks) * 16, r0, rows, small_out, kept);
    }
}

/* out[r] = w a[r] where w has few rows and many columns: a block takes 16 rows of weights. */
template <int NT>
__device__ void deep(const bf16 *a, const cuda_mat &w, float *out, int rows, batch_sums *kept) {
    enum {
        PASSES = ((Q_DIM > V_DIM ? Q_DIM : V_DIM) / BATCH_CHUNK + BATCH_WARPS - 1) / BATCH_WARPS
    };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    turn<NT> t(rows, blockIdx.x, gridDim.x);
    int first = t.i * 16;
    let_next_begin();
    batch_weights codes[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        codes[p] = batch_fetch(w, first, w.rows, warp + p * BATCH_WARPS);
    }
    wait_for_previous();
    float acc[NT][4] = {};
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        batch_inputs<NT> x;
        batch_load(x, dense_rows{a, w.cols, t.r0, rows}, w.cols, warp + p * BATCH_WARPS);
        batch_multiply(acc, codes[p], x);
    }
#pragma unroll
    for (int u = 0; u < NT; u++) batch_keep(kept[warp * NT + u], acc[u], 0);
    __syncthreads();
    batch_split split(w.cols);
    int slot = threadIdx.x / 16 % BATCH_ROWS, u = warp / 4, row = lane % 16;
    int r = t.r0 + u * BATCH_ROWS + slot;
    if (u < NT && r < rows && first + row < w.rows) {
        out[(int64_t)r * w.rows + first + row] = batch_sum(kept + u, split, 0, NT, slot, row);
    }
}

#define DENSE_KERNELS(rows, tiles)                                                                 \
    KERNEL __launch_bounds__(BATCH_THREADS, 1)                                                     \
        batch_project_##rows(const bf16 *a, const float *exact, cuda_mat w, float *out, int ldo,   \
                             cuda_mat small, float *small_out, int n, int dense_blocks) {          \
        DYNAMIC_SHARED(batch_sums, kept);                                                          \
        project<tiles>(a, exact, w, out, ldo, small, small_out, n, dense_blocks, kept);            \
    }                                                                                              \
    KERNEL __launch_bounds__(BATCH_THREADS, 1)                                                     \
        batch_out_##rows(const bf16 *a, cuda_mat w, float *out, int n) {                           \
        DYNAMIC_SHARED(batch_sums, kept);                                                          \
        deep<tiles>(a, w, out, n, kept);                                                           \
    }
DENSE_KERNELS(8, 1)
DENSE_KERNELS(16, 2)

/* ---- experts --------------------------------------------------------------------------------- */

/* Eight inputs of one expert after the other: gate and up rows of 16 hidden values a set of warps.
 * hidden[place][i] = silu(gate x) * (up x). */
struct up_unit {
    const cuda_mat &gate, &up;
    int inner, set, chunk;
    __device__ void fetch(batch_weights (&to)[2], int expert, int first) const {
        int row = expert * inner, end = row + inner;
        to[0] = batch_fetch(gate, row + first + set * 16, end, chunk);
        to[1] = batch_fetch(up, row + first + set * 16, end, chunk);
    }
};

/* The sums of a unit of up_unit to hidden. */
__device__ __forceinline__ void keep_hidden(const batch_sums *kept, const batch_split &split,
                                            int first, int inner, int place, int rows,
                                            bf16 *hidden) {
    int lane = threadIdx.x % 32;
    for (int job = threadIdx.x / 32; job < split.sets * BATCH_ROWS; job += BATCH_WARPS) {
        int slot = job % BATCH_ROWS, set = job / BATCH_ROWS, i = first + set * 16 + lane % 16;
        float sum = batch_sum(kept, split, set, 1, slot, lane);
        float other = __shfl_xor_sync(ALL_LANES, sum, 16);
        float value = silu(sum) * other; /* of use in the lower half of the warp */
        float next = __shfl_xor_sync(ALL_LANES, value, 1);
        if (lane < 16 && lane % 2 == 0 && slot < rows && i < inner) {
            *(uint32_t *)(hidden + (int64_t)(place + slot) * inner + i) = bf16_pair(value, next);
        }
    }
}

/* Both halves of 32 rows of weights (or 16 rows of two matrices) times the inputs, to kept. */
__device__ __forceinline__ void multiply_both(batch_sums *kept, const batch_weights (&w)[2],
                                              const batch_inputs<1> &x) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float acc[1][4] = {};
        batch_multiply(acc, w[half], x);
        batch_keep(kept[threadIdx.x / 32], acc[0], half);
    }
}

/* The shared expert's first half for eight rows from r0 on: unit `unit`. */
__device__ void shared_up(const bf16 *a, const cuda_mat &gate, const cuda_mat &up, bf16 *hidden,
                          int r0, int rows, int unit, batch_sums *kept) {
    int warp = threadIdx.x / 32;
    batch_split split(gate.cols);
    up_unit of = {gate, up, gate.rows, warp / split.slices, warp % split.slices};
    int first = unit * 16 * split.sets;
    batch_weights w[2];
    of.fetch(w, 0, first);
    wait_for_previous();
    batch_inputs<1> x;
    batch_load(x, dense_rows{a, gate.cols, r0, rows}, gate.cols, of.chunk);
    multiply_both(kept, w, x);
    __syncthreads();
    keep_hidden(kept, split, first, gate.rows, r0, rows - r0, hidden);
}

/* 32 rows of a matrix a set of warps, for one unit's rows of inputs: out[place][n]. */
__device__ __forceinline__ void keep_down(const batch_sums *kept, const batch_split &split,
                                          int first, int place, int rows, float *out) {
    int lane = threadIdx.x % 32;
    for (int job = threadIdx.x / 32; job < split.sets * BATCH_ROWS; job += BATCH_WARPS) {
        int slot = job % BATCH_ROWS, set = job / BATCH_ROWS, n = first + set * 32 + lane;
        if (slot >= rows || n >= H) continue;
        out[(int64_t)(place + slot) * H + n] = batch_sum(kept, split, set, 1, slot, lane);
    }
}

/* scores[r] = router; hidden[r] = the shared expert's first half. Grid: router blocks of 16 scores,
 * then blocks of the shared expert, in x; groups of eight rows in y. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    batch_gate(const bf16 *a, const float *exact, cuda_mat router, float *scores, cuda_mat gate,
               cuda_mat up, bf16 *hidden, int rows, int router_blocks) {
    DYNAMIC_SHARED(batch_sums, kept);
    int block = blockIdx.x, r0 = blockIdx.y * BATCH_ROWS;
    let_next_begin();
    if (block < router_blocks) {
        wait_for_previous();
        batch_precise(exact, router, block * 16, r0, rows, scores, kept);
    } else {
        shared_up(a, gate, up, hidden, r0, rows, block - router_blocks, kept);
    }
}

/* Sorts pairs by expert as `group` does (portable_moe.cu), in blocks of eight. One block; one
 * expert a thread. */
__device__ void sort_pairs(const float *routing, int rows, int32_t *begin, int32_t *blocks,
                           int32_t *n_blocks, int32_t *pairs, int32_t *places) {
    __shared__ int count[EXPERTS], first[EXPERTS], warp_sum_of[BATCH_WARPS];
    int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, n = rows * TOP_K;
    static_assert((int)EXPERTS <= (int)BATCH_THREADS, "a thread an expert");
    if (tid < EXPERTS) count[tid] = 0;
    __syncthreads();
    int expert = 0;
    if (tid < n) {
        expert = (int)routing[tid / TOP_K * 2 * TOP_K + tid % TOP_K];
        atomicAdd(&count[expert], 1);
    }
    __syncthreads();
    /* Sums of pairs (low half) and blocks (high half) of the experts before. */
    int own = tid < EXPERTS ? count[tid] : 0, own_blocks = (own + BATCH_ROWS - 1) / BATCH_ROWS;
    int both = own | own_blocks << 16, before = both;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(ALL_LANES, before, step);
        if (lane >= step) before += other;
    }
    if (lane == 31) warp_sum_of[warp] = before;
    __syncthreads();
    before -= both;
    for (int w = 0; w < warp; w++) before += warp_sum_of[w];
    if (tid < EXPERTS) {
        begin[tid] = first[tid] = before & 0xffff;
        for (int b = 0; b < own_blocks; b++) blocks[(before >> 16) + b] = tid << 16 | b;
    }
    if (tid == EXPERTS - 1) {
        begin[EXPERTS] = n;
        *n_blocks = (before >> 16) + own_blocks;
    }
    __syncthreads();
    if (tid < n) { /* no value depends on which place of its group a pair gets */
        int place = atomicAdd(&first[expert], 1);
        pairs[place] = tid;
        places[tid] = place;
    }
}

/* Block 0 of row group 0: the choice of experts and the sort. Meanwhile the others: the shared
 * expert's second half, out[r]. Grid: 1 + blocks of `out` in x, groups of eight rows in y. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    batch_route(const float *scores, float *routing, int rows, int32_t *begin, int32_t *blocks,
                int32_t *n_blocks, int32_t *pairs, int32_t *places, const bf16 *hidden,
                cuda_mat down, float *out) {
    DYNAMIC_SHARED(batch_sums, kept);
    int warp = threadIdx.x / 32;
    let_next_begin();
    if (blockIdx.x == 0) {
        if (blockIdx.y) return;
        wait_for_previous();
        for (int r = warp; r < rows; r += BATCH_WARPS) {
            route_row(scores + r * (EXPERTS + 1), routing + r * 2 * TOP_K);
        }
        __syncthreads();
        sort_pairs(routing, rows, begin, blocks, n_blocks, pairs, places);
        return;
    }
    batch_split split(down.cols);
    int set = warp / split.slices, chunk = warp % split.slices, r0 = blockIdx.y * BATCH_ROWS;
    int first = ((int)blockIdx.x - 1) * 32 * split.sets;
    batch_weights w[2] = {batch_fetch(down, first + set * 32, down.rows, chunk),
                          batch_fetch(down, first + set * 32 + 16, down.rows, chunk)};
    wait_for_previous();
    batch_inputs<1> x;
    batch_load(x, dense_rows{hidden, down.cols, r0, rows}, down.cols, chunk);
    multiply_both(kept, w, x);
    __syncthreads();
    keep_down(kept, split, first, r0, rows - r0, out);
}

/* The blocks of a grouped product, at hand: their number, where their pairs begin, how many they
 * are. */
struct expert_table {
    int n;
    int expert[MAX_BLOCKS], first[MAX_BLOCKS], rows[MAX_BLOCKS];
};
__device__ __forceinline__ void read_table(expert_table &table, const cuda_groups &groups) {
    int n = *groups.n_blocks;
    for (int b = threadIdx.x; b < n; b += BATCH_THREADS) {
        expert_block e = block_of(groups, b, BATCH_ROWS);
        table.expert[b] = e.expert, table.first[b] = e.first, table.rows[b] = e.rows;
    }
    if (threadIdx.x == 0) table.n = n;
    __syncthreads();
}

/* First half of the routed experts. Any number of blocks. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    batch_up(const bf16 *a, cuda_mat gate, cuda_mat up, cuda_groups groups, bf16 *hidden) {
    DYNAMIC_SHARED(batch_sums, kept);
    __shared__ expert_table table;
    int warp = threadIdx.x / 32;
    batch_split split(H);
    up_unit of = {gate, up, INNER, warp / split.slices, warp % split.slices};
    let_next_begin();
    wait_for_previous();
    read_table(table, groups);
    int per = 16 * split.sets, each = (INNER + per - 1) / per; /* units of a block of rows */
    span share(table.n * each, blockIdx.x, gridDim.x);
    batch_weights next[BATCH_AHEAD][2];
    auto fetch = [&](batch_weights(&to)[2], int unit) {
        if (unit < share.end) of.fetch(to, table.expert[unit / each], unit % each * per);
    };
#pragma unroll
    for (int d = 0; d < BATCH_AHEAD; d++) fetch(next[d], share.begin + d);
    batch_inputs<1> x;
    int loaded = -1;
    for (int from = share.begin; from < share.end; from += BATCH_AHEAD) {
#pragma unroll
        for (int d = 0; d < BATCH_AHEAD; d++) {
            int unit = from + d, b = unit / each;
            if (unit >= share.end) break;
            if (b != loaded) {
                gathered_rows source = {a, H, groups.pairs, table.first[b], table.rows[b]};
                batch_load(x, source, H, of.chunk);
                loaded = b;
            }
            batch_sums *now = kept + unit % 2 * BATCH_WARPS;
            multiply_both(now, next[d], x);
            fetch(next[d], unit + BATCH_AHEAD);
            __syncthreads();
            keep_hidden(now, split, unit % each * per, INNER, table.first[b], table.rows[b],
                        hidden);
        }
    }
}

/* Second half: out[place]. Any number of blocks. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    batch_down(const bf16 *hidden, cuda_mat down, cuda_groups groups, float *out) {
    DYNAMIC_SHARED(batch_sums, kept);
    __shared__ expert_table table;
    int warp = threadIdx.x / 32;
    batch_split split(INNER);
    int set = warp / split.slices, chunk = warp % split.slices;
    let_next_begin();
    wait_for_previous();
    read_table(table, groups);
    int per = 32 * split.sets, each = (H + per - 1) / per;
    span share(table.n * each, blockIdx.x, gridDim.x);
    batch_weights next[BATCH_AHEAD][2];
    auto fetch = [&](batch_weights(&to)[2], int unit) {
        if (unit >= share.end) return;
        int first = table.expert[unit / each] * H, end = first + H;
        first += unit % each * per + set * 32;
        to[0] = batch_fetch(down, first, end, chunk);
        to[1] = batch_fetch(down, first + 16, end, chunk);
    };
#pragma unroll
    for (int d = 0; d < BATCH_AHEAD; d++) fetch(next[d], share.begin + d);
    batch_inputs<1> x;
    int loaded = -1;
    for (int from = share.begin; from < share.end; from += BATCH_AHEAD) {
#pragma unroll
        for (int d = 0; d < BATCH_AHEAD; d++) {
            int unit = from + d, b = unit / each;
            if (unit >= share.end) break;
            if (b != loaded) {
                int first = table.first[b];
                batch_load(x, dense_rows{hidden, INNER, first, first + table.rows[b]}, INNER,
                           chunk);
                loaded = b;
            }
            batch_sums *now = kept + unit % 2 * BATCH_WARPS;
            multiply_both(now, next[d], x);
            fetch(next[d], unit + BATCH_AHEAD);
            __syncthreads();
            keep_down(now, split, unit % each * per, table.first[b], table.rows[b], out);
        }
    }
}

/* ---- between layers -------------------------------------------------------------------------- */

/* The norm of what the threads of a block have in v, and in x[r]. */
__device__ __forceinline__ void norm_row(const float4 (&v)[CHANNELS], const float *weight,
                                         int64_t r, float *normed, bf16 *normed_bf) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        sum += fmaf(v[i].x, v[i].x, v[i].y * v[i].y) + fmaf(v[i].z, v[i].z, v[i].w * v[i].w);
    }
    float scale = 1.0f / sqrtf(block_sum(sum) / H + SHAPE_NORM_EPS);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        int c = (i * BATCH_THREADS + threadIdx.x) * 4;
        if (c < H) keep_normed(v[i], scale, weight, r, c, normed, normed_bf);
    }
}

/* x[r] += add[r]; then its norm. Grid: rows. */
KERNEL __launch_bounds__(BATCH_THREADS)
    batch_norm(const float *add, float *x, const float *weight, float *normed, bf16 *normed_bf) {
    int64_t r = blockIdx.x;
    float4 v[CHANNELS];
    let_next_begin();
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        int c = (i * BATCH_THREADS + threadIdx.x) * 4;
        v[i] = make_float4(0, 0, 0, 0);
        if (c >= H) continue;
        float4 *at = (float4 *)(x + r * H + c), y = *(const float4 *)(add + r * H + c);
        v[i] = *at;
        v[i] = make_float4(v[i].x + y.x, v[i].y + y.y, v[i].z + y.z, v[i].w + y.w);
        *at = v[i];
    }
    norm_row(v, weight, r, normed, normed_bf);
}

/* x[r] += the experts' weighted sum (in order of choice) + sigmoid(gate) * shared[r]; then the next
 * norm of the whole row: normed (float32) and normed_bf. Grid: rows. */
KERNEL __launch_bounds__(BATCH_THREADS, 1)
    batch_combine(const float *out, const int32_t *places, const float *routing,
                  const float *scores, const float *shared, float *x, const float *weight,
                  float *normed, bf16 *normed_bf) {
    int64_t r = blockIdx.x;
    float4 v[CHANNELS];
    let_next_begin();
    wait_for_previous();
    float gate = sigmoid(scores[r * (EXPERTS + 1) + EXPERTS]);
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
        int c = (i * BATCH_THREADS + threadIdx.x) * 4;
        v[i] = make_float4(0, 0, 0, 0);
        if (c >= H) continue;
        float4 own = *(const float4 *)(shared + r * H + c);
        float4 y = make_float4(0, 0, 0, 0), z[TOP_K];
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            z[j] = *(const float4 *)(out + (int64_t)places[r * TOP_K + j] * H + c);
        }
#pragma unroll
        for (int j = 0; j < TOP_K; j++) {
            float share = routing[r * 2 * TOP_K + TOP_K + j];
            add_scaled(y, z[j], share);
        }
        float4 *at = (float4 *)(x + r * H + c);
        v[i] = *at;
        v[i].x += fmaf(gate, own.x, y.x), v[i].y += fmaf(gate, own.y, y.y);
        v[i].z += fmaf(gate, own.z, y.z), v[i].w += fmaf(gate, own.w, y.w);
        *at = v[i];
    }
    norm_row(v, weight, r, normed, normed_bf);
}
