/* Mathematics: silu(conv x); d = beta (v - e S^T k), S <- e S + k d^T; norm(S^T q) w silu(z).
 * Layout: proj float32 [rows][C + V_DIM]; S float32 [heads][128 key][128 value], in, then out.
 * Threads: convolution a warp a head and 16 rows; rule 128 a block for 16 columns of a head.
 * Fused: convolution, SiLU, lengths; both sums over keys; norm, gate. Agrees with ref/deltanet.c.
 * Bytes: the rule, a chain: 2 % of 4,642 GB/s (bench/cuda-portable-h200.json; changed since).
 *
 * Gated DeltaNet. Every kernel serves prompts (one slot, many rows) and decode steps (one row of
 * each of many slots): rows r = slot * rows_per_slot + i. State and convolution state are read from
 * one buffer of the slot and written to the other. */
#include "common.cuh"

enum { CONV_WARPS = 4, CONV_ROWS = 16, HEADS = 2 * K_HEADS + V_HEADS };

/* channels[r][c] = silu(conv of the last four inputs), for one head of 128 channels a warp, four
 * channels a lane, CONV_ROWS rows each; norms[r][head] = 1 / sqrt(sum of squares + 1e-6) of query
 * heads (over sqrt(DIM)) and key heads. The inputs lie in proj[r][0 .. CONV_DIM). Grid: heads in x,
 * row blocks of CONV_WARPS * CONV_ROWS in y, slots in z. */
KERNEL __launch_bounds__(CONV_WARPS * 32)
    convolve(const float *proj, int width, const float4 *taps, const cuda_slot *slots,
             int rows_per_slot, int layer, float *channels, float *norms) {
    int head = blockIdx.x, lane = threadIdx.x % 32, c = head * DIM + lane * 4;
    const cuda_slot &slot = slots[blockIdx.z];
    int begin = (blockIdx.y * CONV_WARPS + threadIdx.x / 32) * CONV_ROWS;
    int end = min(begin + CONV_ROWS, rows_per_slot);
    if (begin >= end) return;
    const float *history = slot.conv_in + (int64_t)layer * 3 * CONV_DIM;
    int64_t first = (int64_t)blockIdx.z * rows_per_slot;
    auto input = [&](int i) { /* row i of the slot; negative: before this step */
                              return i < 0 ? *(const float4 *)(history + (3 + i) * CONV_DIM + c)
                                           : *(const float4 *)(proj + (first + i) * width + c);
    };
    float4 w0 = taps[c], w1 = taps[c + 1], w2 = taps[c + 2], w3 = taps[c + 3]; /* of a channel */
    float4 a = input(begin - 3), b = input(begin - 2), d = input(begin - 1);
    for (int i = begin; i < end; i++) {
        float4 u = input(i), y;
        y.x = silu(convolved(w0, a.x, b.x, d.x, u.x));
        y.y = silu(convolved(w1, a.y, b.y, d.y, u.y));
        y.z = silu(convolved(w2, a.z, b.z, d.z, u.z));
        y.w = silu(convolved(w3, a.w, b.w, d.w, u.w));
        *(float4 *)(channels + (first + i) * CONV_DIM + c) = y;
        if (head < 2 * K_HEADS) {
            float sum = warp_sum(dot_four(y, y));
            float scale = 1.0f / sqrtf(sum + 1e-6f);
            if (head < K_HEADS) scale *= rsqrtf((float)DIM);
            if (lane == 0) norms[(first + i) * 2 * K_HEADS + head] = scale;
        }
        a = b, b = d, d = u;
    }
    if (end < rows_per_slot) return;
    float *next = slot.conv_out + (int64_t)layer * 3 * CONV_DIM;
    *(float4 *)(next + c) = a;
    *(float4 *)(next + CONV_DIM + c) = b;
    *(float4 *)(next + 2 * CONV_DIM + c) = d;
}

/* gates[r] = beta[V_HEADS] = sigmoid(b), then decay[V_HEADS] = exp(-rate * softplus(a + dt_bias)),
 * from ba[r] = b, a. */
KERNEL gates(const float *ba, const float *rate, const float *dt_bias, float *out, int rows) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, r = i / V_HEADS, h = i % V_HEADS;
    if (r >= rows) return;
    const float *from = ba + (int64_t)r * 2 * V_HEADS;
    float dt = softplus(from[V_HEADS + h] + dt_bias[h]);
    out[(int64_t)r * 2 * V_HEADS + h] = sigmoid(from[h]);
    out[(int64_t)r * 2 * V_HEADS + V_HEADS + h] = expf(-rate[h] * dt);
}

/* The delta rule, token by token, with the state in registers: a block owns COLUMNS columns of one
 * value head's state, PARTS threads a column with 16 keys each. With e the decay and S the state
 * before a token,
 *   d = beta (v - e S^T k);  out = e S^T q + (k . q) d;  S <- e S + k d^T,
 * so that both reductions over the keys are one exchange. Queries, keys and values come through
 * shared memory, SCAN_ROWS tokens at a time, the next ones on their way meanwhile. The chain of a
 * token is short and serial: two blocks a multiprocessor fill each other's waits. Grid: value heads
 * * (DIM / COLUMNS) in x, slots in y. */
enum { SCAN_THREADS = 128, COLUMNS = 16, PARTS = SCAN_THREADS / COLUMNS, SCAN_ROWS = 16 };
enum { PIECES = SCAN_ROWS * DIM / 4 / SCAN_THREADS, KEYS = DIM / 4 / PARTS };

struct scan_inputs {
    float4 q[PIECES], k[PIECES], v;
};

/* Rows `from` and on of a slot, whose first row is `first`, from memory: PIECES pieces of queries
 * and keys a thread and at most one of values; zeros where there are none. */
__device__ __forceinline__ void load_inputs(scan_inputs &in, const float *channels,
                                            const float *norms, int64_t first, int from,
                                            int rows_per_slot, int head, int c0, int tid) {
    int key_head = head / (V_HEADS / K_HEADS);
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        int piece = tid + SCAN_THREADS * i, t = from + piece / (DIM / 4), d = piece % (DIM / 4);
        in.q[i] = in.k[i] = make_float4(0, 0, 0, 0);
        if (t < rows_per_slot) {
            const float *row = channels + (first + t) * CONV_DIM + key_head * DIM + d * 4;
            float nq = norms[(first + t) * 2 * K_HEADS + key_head];
            float nk = norms[(first + t) * 2 * K_HEADS + K_HEADS + key_head];
            float4 x = *(const float4 *)row, y = *(const float4 *)(row + K_DIM);
            in.q[i] = make_float4(x.x * nq, x.y * nq, x.z * nq, x.w * nq);
            in.k[i] = make_float4(y.x * nk, y.y * nk, y.z * nk, y.w * nk);
        }
    }
    int t = from + tid / (COLUMNS / 4);
    in.v = make_float4(0, 0, 0, 0);
    if (tid < SCAN_ROWS * COLUMNS / 4 && t < rows_per_slot) {
        in.v = *(const float4 *)(channels + (first + t) * CONV_DIM + 2 * K_DIM + head * DIM + c0 +
                                 tid % (COLUMNS / 4) * 4);
    }
}

/* m = S^T k and p = S^T q for token t and one column, whose keys PARTS threads share; kt: this
 * thread's keys of k. */
__device__ __forceinline__ void read_column(const float (&s)[KEYS][4],
                                            const float (&q)[SCAN_ROWS][DIM],
                                            const float (&k)[SCAN_ROWS][DIM], int t, int part,
                                            float4 (&kt)[KEYS], float &m, float &p) {
    float recall[4] = {}, read[4] = {};
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        kt[i] = *(const float4 *)&k[t][(PARTS * i + part) * 4];
        float4 qt = *(const float4 *)&q[t][(PARTS * i + part) * 4];
        recall[0] = fmaf(s[i][0], kt[i].x, recall[0]);
        recall[1] = fmaf(s[i][1], kt[i].y, recall[1]);
        recall[2] = fmaf(s[i][2], kt[i].z, recall[2]);
        recall[3] = fmaf(s[i][3], kt[i].w, recall[3]);
        read[0] = fmaf(s[i][0], qt.x, read[0]);
        read[1] = fmaf(s[i][1], qt.y, read[1]);
        read[2] = fmaf(s[i][2], qt.z, read[2]);
        read[3] = fmaf(s[i][3], qt.w, read[3]);
    }
    m = (recall[0] + recall[1]) + (recall[2] + recall[3]);
    p = (read[0] + read[1]) + (read[2] + read[3]);
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2) {
        m += __shfl_xor_sync(ALL_LANES, m, step);
        p += __shfl_xor_sync(ALL_LANES, p, step);
    }
}

/* delta[r][V_DIM] and the slots' next states. */
KERNEL __launch_bounds__(SCAN_THREADS)
    delta_scan(const float *channels, const float *norms, const float *gate, const cuda_slot *slots,
               int rows_per_slot, int layer, float *delta) {
    __shared__ __align__(16) float q[SCAN_ROWS][DIM], k[SCAN_ROWS][DIM], v[SCAN_ROWS][COLUMNS];
    __shared__ float beta[SCAN_ROWS], decay[SCAN_ROWS], kq[SCAN_ROWS];
    int head = blockIdx.x / (DIM / COLUMNS), c0 = blockIdx.x % (DIM / COLUMNS) * COLUMNS;
    int tid = threadIdx.x, part = tid % PARTS, column = tid / PARTS;
    int lane = tid % 32, warp = tid / 32;
    const cuda_slot &slot = slots[blockIdx.y];
    int64_t first = (int64_t)blockIdx.y * rows_per_slot;
    int64_t state = ((int64_t)layer * V_HEADS + head) * DIM * DIM + c0 + column;
    float s[KEYS][4]; /* keys (PARTS i + part) * 4 + j */
#pragma unroll
    for (int i = 0; i < KEYS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[i][j] = slot.state_in[state + (int64_t)((PARTS * i + part) * 4 + j) * DIM];
        }

    scan_inputs in;
    load_inputs(in, channels, norms, first, 0, rows_per_slot, head, c0, tid);
    for (int from = 0; from < rows_per_slot; from += SCAN_ROWS) {
        int n = min((int)SCAN_ROWS, rows_per_slot - from);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            int piece = tid + SCAN_THREADS * i;
            ((float4 *)q)[piece] = in.q[i];
            ((float4 *)k)[piece] = in.k[i];
        }
        if (tid < SCAN_ROWS * COLUMNS / 4) ((float4 *)v)[tid] = in.v;
        if (tid < n) {
            const float *g = gate + (first + from + tid) * 2 * V_HEADS + head;
            beta[tid] = g[0];
            decay[tid] = g[V_HEADS];
        }
        __syncthreads();
        for (int t = warp; t < n; t += SCAN_THREADS / 32) {
            float4 x = *(float4 *)&q[t][lane * 4], y = *(float4 *)&k[t][lane * 4];
            float sum = warp_sum(dot_four(x, y));
            if (lane == 0) kq[t] = sum;
        }
        if (from + SCAN_ROWS < rows_per_slot) {
            load_inputs(in, channels, norms, first, from + SCAN_ROWS, rows_per_slot, head, c0, tid);
        }
        __syncthreads();
#pragma unroll 2
        for (int t = 0; t < n; t++) {
            float e = decay[t], m, p;
            float4 kt[KEYS];
            read_column(s, q, k, t, part, kt, m, p);
            float d = beta[t] * fmaf(-e, m, v[t][column]);
            if (part == 0) {
                delta[(first + from + t) * V_DIM + head * DIM + c0 + column] =
                    fmaf(kq[t], d, e * p);
            }
#pragma unroll
            for (int i = 0; i < KEYS; i++) {
                s[i][0] = fmaf(kt[i].x, d, e * s[i][0]);
                s[i][1] = fmaf(kt[i].y, d, e * s[i][1]);
                s[i][2] = fmaf(kt[i].z, d, e * s[i][2]);
                s[i][3] = fmaf(kt[i].w, d, e * s[i][3]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < KEYS; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            slot.state_out[state + (int64_t)((PARTS * i + part) * 4 + j) * DIM] = s[i][j];
        }
}

/* mix[r][head] = delta / sqrt(mean(delta^2) + eps) * weight * silu(z), float32 and bf16 (where
 * given); z lies in proj[r] from CONV_DIM on. One warp a head of a row. Grid: rows. */
KERNEL gated_norm(const float *delta, const float *proj, int width, const float *weight, float *mix,
                  bf16 *mix_bf) {
    int64_t r = blockIdx.x;
    int lane = threadIdx.x % 32;
    float4 w = *(const float4 *)(weight + lane * 4);
    for (int h = threadIdx.x / 32; h < V_HEADS; h += blockDim.x / 32) {
        int64_t at = r * V_DIM + h * DIM + lane * 4;
        float4 x = *(const float4 *)(delta + at);
        float4 z = *(const float4 *)(proj + r * width + CONV_DIM + h * DIM + lane * 4);
        float sum = warp_sum(dot_four(x, x));
        float scale = 1.0f / sqrtf(sum / DIM + SHAPE_NORM_EPS);
        float4 y = make_float4(x.x * scale * w.x * silu(z.x), x.y * scale * w.y * silu(z.y),
                               x.z * scale * w.z * silu(z.z), x.w * scale * w.w * silu(z.w));
        if (mix) *(float4 *)(mix + at) = y;
        if (mix_bf) *(uint2 *)(mix_bf + at) = make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
    }
}
