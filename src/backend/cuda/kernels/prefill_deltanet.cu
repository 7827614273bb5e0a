/* Mathematics: silu(conv x), lengths; the delta rule in pieces of 64, below; norm(O) w silu(z).
 * Layout: channels bf16 [n][C]; scratch [head][piece]; S float32 [heads][128 key][128 value].
 * Threads: pieces a block of 128 a piece and head; states a block of 256 a head and 32 columns.
 * Fused: convolution, SiLU, lengths; gates and pieces. Agrees with ref/deltanet.c to 2.2e-3.
 * Bytes: % of a bound: convolution 49, pieces 29, states 37, norm 64 (bench/cuda-prompt-h200.json).
 *
 * Gated DeltaNet of a prompt chunk, in pieces of 64 positions on the absolute grid (docs/model.md;
 * the algebra below). Only the state is passed from piece to piece, so that all else runs over all
 * pieces at once. For one value head and a piece of 64 tokens with decays g (log), c_i = g_1 + ..
 * + g_i, D_ij = exp(c_i - c_j) for i >= j:
 *   A = beta K K^T D below the diagonal;  T = (1 + A)^-1
 *   U = T (beta V);  W = T (beta exp(c) K);  P = Q K^T D with the diagonal           delta_pieces
 *   N = U - W S;  O = exp(c) (Q S) + P N;  S <- exp(c_64) S + K^T (exp(c_64 - c) N)  delta_states
 * Every exponent is at most 0. Missing tokens of a first or last piece have beta, g, q, k and v 0,
 * which changes nothing. Operands are bf16, sums, gates, T's substitution and the state float32; T
 * is multiplied as the sum of two bf16. */
#include "prefill_common.cuh"

enum { PIECE = 64, CONV_WARPS = 4 };

/* Rows [first, end) of the chunk that piece i of the grid holds, the first of them at position
 * `skipped` of the piece. */
struct piece_rows {
    int first, end, skipped;
};
__device__ __forceinline__ piece_rows rows_of_piece(int pos, int i, int rows) {
    int begin = i * PIECE - pos % PIECE;
    piece_rows p = {max(begin, 0), min(begin + PIECE, rows), 0};
    p.skipped = p.first - begin;
    return p;
}

/* channels[r][c] = silu(conv of the last four inputs), bf16, for one head of 128 channels a warp,
 * four channels a lane, `each` rows a warp; queries and keys divided by their length, queries by
 * sqrt(DIM) too. The inputs lie in proj[r][0 .. CONV_DIM). The last three go to the slot. Grid:
 * heads in x, blocks of CONV_WARPS * each rows in y. */
KERNEL __launch_bounds__(CONV_WARPS * 32)
    prompt_convolve(const fp16 *proj, int width, const float4 *taps, const cuda_slot *slot,
                    int rows, int layer, bf16 *channels, int each) {
    begin_after_previous();
    int head = blockIdx.x, lane = threadIdx.x % 32, c = head * DIM + lane * 4;
    int begin = (blockIdx.y * CONV_WARPS + threadIdx.x / 32) * each;
    int end = min(begin + each, rows);
    if (begin >= end) return;
    const float *history = slot->conv_in + (int64_t)layer * 3 * CONV_DIM;
    auto input = [&](int i) { /* row i; negative: before this chunk */
                              return i < 0 ? *(const float4 *)(history + (3 + i) * CONV_DIM + c)
                                           : four_halves(proj + (int64_t)i * width + c);
    };
    float4 w0 = taps[c], w1 = taps[c + 1], w2 = taps[c + 2], w3 = taps[c + 3]; /* of a channel */
    float4 a = input(begin - 3), b = input(begin - 2), d = input(begin - 1);
#pragma unroll 4
    for (int i = begin; i < end; i++) {
        float4 u = input(i), y;
        y.x = quick_silu(convolved(w0, a.x, b.x, d.x, u.x));
        y.y = quick_silu(convolved(w1, a.y, b.y, d.y, u.y));
        y.z = quick_silu(convolved(w2, a.z, b.z, d.z, u.z));
        y.w = quick_silu(convolved(w3, a.w, b.w, d.w, u.w));
        if (head < 2 * K_HEADS) {
            float sum = warp_sum(dot_four(y, y));
            float scale = 1.0f / sqrtf(sum + 1e-6f);
            if (head < K_HEADS) scale *= rsqrtf((float)DIM);
            y = scaled(y, scale);
        }
        *(uint2 *)(channels + (int64_t)i * CONV_DIM + c) =
            make_uint2(bf16_pair(y.x, y.y), bf16_pair(y.z, y.w));
        a = b, b = d, d = u;
    }
    if (end < rows) return;
    float *next = slot->conv_out + (int64_t)layer * 3 * CONV_DIM;
    *(float4 *)(next + c) = a;
    *(float4 *)(next + CONV_DIM + c) = b;
    *(float4 *)(next + 2 * CONV_DIM + c) = d;
}

/* ---- tiles of 64 rows ------------------------------------------------------------------------ */

/* Byte of 16-byte part p of row r in a tile with rows of BYTES. */
template <int BYTES> __device__ __forceinline__ uint32_t tile_at(int r, int p) {
    return (uint32_t)(r * BYTES + ((p ^ (r & 7)) * 16));
}

/* Channels [c0, c0 + 128) of a piece's rows into a tile of 64 x 256 bytes, zeros where missing. */
template <int THREADS>
__device__ __forceinline__ void copy_channels(shared_at to, const bf16 *channels, int c0,
                                              const piece_rows &p) {
#pragma unroll
    for (int i = 0; i < PIECE * 16 / THREADS; i++) {
        int at = (int)threadIdx.x + i * THREADS, r = at / 16, part = at % 16;
        int row = p.first + r - p.skipped;
        bool valid = r >= p.skipped && row < p.end;
        const bf16 *from = channels + (int64_t)(valid ? row : p.first) * CONV_DIM + c0 + part * 8;
        copy16(to + tile_at<256>(r, part), from, valid);
    }
}

/* Fragments from tiles (instructions.cuh): a[16, 16] at row m, part k / 8; b of 16 columns. */
template <int BYTES>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], shared_at tile, int m, int part) {
    int lane = threadIdx.x % 32;
    load_matrices(a, tile + tile_at<BYTES>(m + lane % 16, part + lane / 16));
}
/* b[k][n] from rows n, columns k. */
template <int BYTES>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], shared_at tile, int n, int part) {
    int lane = threadIdx.x % 32;
    load_matrices(b, tile + tile_at<BYTES>(n + lane / 16 * 8 + lane % 8, part + lane / 8 % 2));
}
/* b[k][n] from rows k, columns n. */
template <int BYTES>
__device__ __forceinline__ void load_b_across(uint32_t (&b)[4], shared_at tile, int k, int part) {
    int lane = threadIdx.x % 32;
    load_matrices_transposed(b, tile + tile_at<BYTES>(k + lane % 16, part + lane / 16));
}

/* ---- what a piece needs of itself alone ------------------------------------------------------ */

enum { PIECES_THREADS = 128, A_STRIDE = PIECE + 4 };
enum { Q_AT = 0, K_AT = 16384, V_AT = 32768, T_AT = 49152 }; /* A lies where T will */
enum { PIECES_SHARED = T_AT + PIECE * A_STRIDE * 4 };
static_assert((int)PIECES_SHARED == PREFILL_PIECES_SHARED, "what the host asks for");

/* c[64] and beta[64] of a piece from the parts of ba[r] = b, a: c the running sums of the
 * logarithms of the decays. 64 threads at least; barriers inside. */
__device__ __forceinline__ void piece_gates(const float *ba, int rows, const float *rate,
                                            const float *dt_bias, int head, const piece_rows &p,
                                            float *c, float *beta) {
    int i = threadIdx.x, row = p.first + i - p.skipped;
    float g = 0, b = 0;
    if (i < PIECE && i >= p.skipped && row < p.end) {
        float dt =
            softplus(decisive_sum(ba, rows, 2 * V_HEADS, row, V_HEADS + head) + dt_bias[head]);
        b = sigmoid(decisive_sum(ba, rows, 2 * V_HEADS, row, head));
        g = -rate[head] * dt;
    }
    if (i < PIECE) c[i] = g, beta[i] = b;
    for (int step = 1; step < PIECE; step *= 2) {
        __syncthreads();
        float before = i < PIECE && i >= step ? c[i - step] : 0;
        __syncthreads();
        if (i < PIECE) c[i] += before;
    }
    __syncthreads();
}

/* T in blocks of 32: both on the diagonal by substitution, a column a thread, then the one below
 * them as -T22 (A21 T11). All float32. Blocks of T have rows of T_STRIDE floats. */
enum { HALF = PIECE / 2, T_STRIDE = HALF + 4, T_BLOCK = HALF * T_STRIDE };

/* Column own of the inverse of 1 + a, a[HALF][HALF] strictly lower. */
__device__ __forceinline__ void substitute(const float *a, int own, float *t) {
    float x[HALF];
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        float s[4] = {i == own ? 1.0f : 0.0f, 0, 0, 0};
#pragma unroll
        for (int m = 0; m < i; m += 4) {
            float4 row = *(const float4 *)(a + i * A_STRIDE + m);
            s[0] = fmaf(-row.x, x[m], s[0]);
            if (m + 1 < i) s[1] = fmaf(-row.y, x[m + 1], s[1]);
            if (m + 2 < i) s[2] = fmaf(-row.z, x[m + 2], s[2]);
            if (m + 3 < i) s[3] = fmaf(-row.w, x[m + 3], s[3]);
        }
        x[i] = (s[0] + s[1]) + (s[2] + s[3]);
        t[i * T_STRIDE + own] = x[i];
    }
}

/* out[HALF][HALF] = sign * a b; a thread eight columns of a row. */
__device__ __forceinline__ void multiply_block(const float *a, int stride, const float *b,
                                               float sign, float *out) {
    int i = threadIdx.x / 4, j = threadIdx.x % 4 * 8;
    float sum[8] = {};
#pragma unroll
    for (int m = 0; m < HALF; m += 4) {
        float4 row = *(const float4 *)(a + i * stride + m);
        const float of_row[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float4 x = *(const float4 *)(b + (m + k) * T_STRIDE + j);
            float4 y = *(const float4 *)(b + (m + k) * T_STRIDE + j + 4);
            sum[0] = fmaf(of_row[k], x.x, sum[0]), sum[1] = fmaf(of_row[k], x.y, sum[1]);
            sum[2] = fmaf(of_row[k], x.z, sum[2]), sum[3] = fmaf(of_row[k], x.w, sum[3]);
            sum[4] = fmaf(of_row[k], y.x, sum[4]), sum[5] = fmaf(of_row[k], y.y, sum[5]);
            sum[6] = fmaf(of_row[k], y.z, sum[6]), sum[7] = fmaf(of_row[k], y.w, sum[7]);
        }
    }
#pragma unroll
    for (int k = 0; k < 8; k++) out[i * T_STRIDE + j + k] = sign * sum[k];
}

/* t[3] = T11, T22, T21 from a [PIECE][A_STRIDE], whose first rows are used as scratch. */
__device__ __forceinline__ void invert(float *a, float *t) {
    int tid = threadIdx.x, block = tid / HALF;
    if (tid < PIECE) {
        substitute(a + block * HALF * (A_STRIDE + 1), tid % HALF, t + block * T_BLOCK);
    }
    __syncthreads();
    multiply_block(a + HALF * A_STRIDE, A_STRIDE, t, 1, a);
    __syncthreads();
    multiply_block(t + T_BLOCK, T_STRIDE, a, -1, t + 2 * T_BLOCK);
    __syncthreads();
}

/* T with its columns scaled, as the sum of two bf16 tiles of 64 x 128 bytes: half a row a thread.
 */
__device__ __forceinline__ void store_split(const float *t, const float *scale, char *high,
                                            char *low) {
    int i = threadIdx.x / 2, right = threadIdx.x % 2;
    const float *row = t + (i < HALF ? 0 : right ? T_BLOCK : 2 * T_BLOCK) + i % HALF * T_STRIDE;
    bool zero = i < HALF && right;
#pragma unroll
    for (int part = 0; part < HALF / 8; part++) {
        uint32_t top[4], rest[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int j = part * 8 + k * 2;
            float x = zero ? 0 : row[j] * scale[right * HALF + j];
            float y = zero ? 0 : row[j + 1] * scale[right * HALF + j + 1];
            top[k] = bf16_pair(x, y);
            rest[k] = bf16_pair(x - bf16_float((bf16)top[k]), y - bf16_float((bf16)(top[k] >> 16)));
        }
        uint32_t at = tile_at<128>(i, right * 4 + part);
        *(uint4 *)(high + at) = make_uint4(top[0], top[1], top[2], top[3]);
        *(uint4 *)(low + at) = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    }
}

/* The warp's 16 rows of (high + low)[64, 64] x[64, 128]. */
__device__ __forceinline__ void multiply_split(float (&acc)[16][4], shared_at high, shared_at low,
                                               shared_at x, int m) {
#pragma unroll
    for (int n = 0; n < 16; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0;
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) {
        uint32_t a[4], a_low[4];
        load_a<128>(a, high, m, 2 * k);
        load_a<128>(a_low, low, m, 2 * k);
#pragma unroll
        for (int n = 0; n < 16; n += 2) {
            uint32_t b[4];
            load_b_across<256>(b, x, k * 16, n);
            multiply(acc[n], a_low, b[0], b[1]);
            multiply(acc[n + 1], a_low, b[2], b[3]);
            multiply(acc[n], a, b[0], b[1]);
            multiply(acc[n + 1], a, b[2], b[3]);
        }
    }
}

/* kk = K K^T and qk = Q K^T of a piece, rows m and on of a warp. */
__device__ __forceinline__ void multiply_keys(float (&kk)[8][4], float (&qk)[8][4], shared_at at,
                                              int m) {
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t of_k[4], of_q[4];
        load_a<256>(of_k, at + K_AT, m, 2 * k);
        load_a<256>(of_q, at + Q_AT, m, 2 * k);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            load_b<256>(b, at + K_AT, n * 8, 2 * k);
            multiply(kk[n], of_k, b[0], b[1]);
            multiply(kk[n + 1], of_k, b[2], b[3]);
            multiply(qk[n], of_q, b[0], b[1]);
            multiply(qk[n + 1], of_q, b[2], b[3]);
        }
    }
}

/* Calls f(row, column, value, value of the next column) for a lane's sums of 16 rows from m on. */
template <int N, class F>
__device__ __forceinline__ void each_pair(const float (&acc)[N][4], int m, int lane, const F &f) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            f(m + lane / 4 + half * 8, n * 8 + lane % 4 * 2, acc[n][2 * half],
              acc[n][2 * half + 1]);
        }
}

/* Arrays over [value head][piece]: decays float [64]; w bf16 [64][128]; p bf16 [64][64]; u float
 * [64][128]. Grid: pieces in x, value heads in y. */
KERNEL __launch_bounds__(PIECES_THREADS, 3)
    delta_pieces(const bf16 *channels, const float *ba, const float *rate, const float *dt_bias,
                 const cuda_slot *slot, int rows, float *decays, bf16 *w, bf16 *p, float *u) {
    DYNAMIC_SHARED(char, shared);
    __shared__ float c[PIECE], beta[PIECE], faded[PIECE]; /* faded: beta exp(c) */
    begin_after_previous();
    int head = blockIdx.y, key_head = head / (V_HEADS / K_HEADS), tid = threadIdx.x;
    int lane = tid % 32, m = tid / 32 * 16;
    int64_t piece = (int64_t)head * gridDim.x + blockIdx.x;
    piece_rows in = rows_of_piece(slot->pos, blockIdx.x, rows);
    shared_at at = shared_address(shared);
    copy_channels<PIECES_THREADS>(at + Q_AT, channels, key_head * DIM, in);
    copy_channels<PIECES_THREADS>(at + K_AT, channels, K_DIM + key_head * DIM, in);
    copy_commit();
    copy_channels<PIECES_THREADS>(at + V_AT, channels, 2 * K_DIM + head * DIM, in);
    copy_commit();
    piece_gates(ba, rows, rate, dt_bias, head, in, c, beta);
    if (tid < PIECE) {
        decays[piece * PIECE + tid] = c[tid];
        faded[tid] = beta[tid] * expf(c[tid]);
    }
    copy_wait<1>();
    __syncthreads();

    float kk[8][4] = {}, qk[8][4] = {};
    multiply_keys(kk, qk, at, m);
    float *a = (float *)(shared + T_AT);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = m + lane / 4 + half * 8, j = n * 8 + lane % 4 * 2;
            float d0 = i >= j ? expf(c[i] - c[j]) : 0.0f;
            float d1 = i >= j + 1 ? expf(c[i] - c[j + 1]) : 0.0f;
            a[i * A_STRIDE + j] = i > j ? beta[i] * kk[n][2 * half] * d0 : 0.0f;
            a[i * A_STRIDE + j + 1] = i > j + 1 ? beta[i] * kk[n][2 * half + 1] * d1 : 0.0f;
            *(uint32_t *)(p + (piece * PIECE + i) * PIECE + j) =
                bf16_pair(qk[n][2 * half] * d0, qk[n][2 * half + 1] * d1);
        }
    __syncthreads();

    float *t = (float *)(shared + Q_AT); /* queries have been read */
    invert(a, t);
    char *tile = shared + T_AT; /* as has A */
    enum { TILE = PIECE * PIECE * 2 };
    store_split(t, faded, tile, tile + TILE);
    copy_wait<0>();
    __syncthreads();
    float acc[16][4];
    multiply_split(acc, at + T_AT, at + T_AT + TILE, at + K_AT, m);
    each_pair(acc, m, lane, [&](int i, int j, float x, float y) {
        *(uint32_t *)(w + (piece * PIECE + i) * DIM + j) = bf16_pair(x, y);
    });
    __syncthreads();
    store_split(t, beta, tile, tile + TILE);
    __syncthreads();
    multiply_split(acc, at + T_AT, at + T_AT + TILE, at + V_AT, m);
    each_pair(acc, m, lane, [&](int i, int j, float x, float y) {
        *(float2 *)(u + (piece * PIECE + i) * DIM + j) = make_float2(x, y);
    });
}

/* ---- piece after piece ----------------------------------------------------------------------- */

/* A block owns COLUMNS columns of one value head's state, kept in registers: warp w keys
 * [16 w, 16 w + 16). The next piece is copied while one is worked on. */
enum { STATE_THREADS = 256, COLUMNS = 32, NARROW = COLUMNS * 2 + 16 };
enum { SW_AT = 0, SQ_AT = 16384, SK_AT = 32768, SP_AT = 49152, SET = 57344 };
enum { S_AT = 2 * SET, N_AT = S_AT + DIM * NARROW, F_AT = N_AT + PIECE * NARROW };
enum { STATES_SHARED = F_AT + PIECE * NARROW };
static_assert((int)STATES_SHARED == PREFILL_STATES_SHARED, "what the host asks for");

/* Fragment b of rows k, columns n of a narrow tile: rows 80 bytes apart meet no bank twice. */
__device__ __forceinline__ void load_narrow(uint32_t (&b)[4], shared_at tile, int k, int n) {
    int lane = threadIdx.x % 32;
    load_matrices_transposed(b, tile + (k + lane % 16) * NARROW + (n + lane / 16 * 8) * 2);
}

/* A piece, rows `in` of the chunk, to a set of tiles, and its decays: one group of copies. */
__device__ __forceinline__ void copy_piece(const bf16 *channels, const float *decays, const bf16 *w,
                                           const bf16 *p, shared_at set, float (&decay)[PIECE],
                                           const piece_rows &in, int64_t piece, int key_head,
                                           int tid) {
    copy_channels<STATE_THREADS>(set + SQ_AT, channels, key_head * DIM, in);
    copy_channels<STATE_THREADS>(set + SK_AT, channels, K_DIM + key_head * DIM, in);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        int at_part = tid + j * STATE_THREADS, r = at_part / 16, part = at_part % 16;
        copy16(set + SW_AT + tile_at<256>(r, part), w + (piece * PIECE + r) * DIM + part * 8, true);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        int at_part = tid + j * STATE_THREADS, r = at_part / 8, part = at_part % 8;
        copy16(set + SP_AT + tile_at<128>(r, part), p + (piece * PIECE + r) * PIECE + part * 8,
               true);
    }
    if (tid < PIECE / 4) {
        copy16(shared_address(&decay[tid * 4]), decays + piece * PIECE + tid * 4, true);
    }
    copy_commit();
}

/* The thread's part of the state, from its first float on. */
__device__ __forceinline__ void load_state(float (&s)[4][4], const float *from) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 v = *(const float2 *)(from + half * 8 * DIM + j * 8);
            s[j][2 * half] = v.x, s[j][2 * half + 1] = v.y;
        }
}

/* The state as bf16 to the narrow tile. */
__device__ __forceinline__ void publish_state(char *shared, const float (&s)[4][4], int warp,
                                              int lane) {
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            char *to = shared + S_AT + (warp * 16 + lane / 4 + half * 8) * NARROW +
                       (j * 8 + lane % 4 * 2) * 2;
            *(uint32_t *)to = bf16_pair(s[j][2 * half], s[j][2 * half + 1]);
        }
}

/* The thread's part of a piece's U, from its first float on. */
__device__ __forceinline__ void load_goal(float2 (&goal)[2][2], const float *&u) {
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            goal[j][half] = *(const float2 *)(u + half * 8 * DIM + j * 8);
        }
    u += PIECE * DIM;
}

/* What the state recalls for the rows of W and gives for those of Q, by 16 columns from n0 on. */
__device__ __forceinline__ void read_state(float (&recall)[2][4], float (&out)[2][4], shared_at set,
                                           shared_at at, int m, int n0) {
#pragma unroll
    for (int k = 0; k < DIM / 16; k++) {
        uint32_t of_w[4], of_q[4], b[4];
        load_a<256>(of_w, set + SW_AT, m, 2 * k);
        load_a<256>(of_q, set + SQ_AT, m, 2 * k);
        load_narrow(b, at + S_AT, k * 16, n0);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            multiply(recall[j], of_w, b[2 * j], b[2 * j + 1]);
            multiply(out[j], of_q, b[2 * j], b[2 * j + 1]);
        }
    }
}

/* N = U - W S to its tile and, faded to the piece's end, to another; out = exp(c) (Q S). */
__device__ __forceinline__ void store_change(char *shared, const float *c, float last,
                                             const float2 (&goal)[2][2],
                                             const float (&recall)[2][4], float (&out)[2][4], int m,
                                             int n0, int lane) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = m + lane / 4 + half * 8;
        float faded = expf(c[r]), left = expf(last - c[r]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float x = goal[j][half].x - recall[j][2 * half];
            float y = goal[j][half].y - recall[j][2 * half + 1];
            char *to = shared + r * NARROW + (n0 + j * 8 + lane % 4 * 2) * 2;
            *(uint32_t *)(to + N_AT) = bf16_pair(x, y);
            *(uint32_t *)(to + F_AT) = bf16_pair(x * left, y * left);
            out[j][2 * half] *= faded;
            out[j][2 * half + 1] *= faded;
        }
    }
}

/* out += P N, of the warp's 16 rows and columns. */
__device__ __forceinline__ void add_changes(float (&out)[2][4], shared_at set, shared_at at, int m,
                                            int n0) {
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) {
        uint32_t a[4], b[4];
        load_a<128>(a, set + SP_AT, m, 2 * k);
        load_narrow(b, at + N_AT, k * 16, n0);
        multiply(out[0], a, b[0], b[1]);
        multiply(out[1], a, b[2], b[3]);
    }
}

/* S += K^T (faded N), of 16 keys a warp. */
__device__ __forceinline__ void add_keys(float (&s)[4][4], shared_at set, shared_at at, int warp,
                                         int lane) {
#pragma unroll
    for (int k = 0; k < PIECE / 16; k++) {
        uint32_t a[4], b[4]; /* a[key][token] from rows of tokens */
        int token = k * 16 + lane / 16 * 8 + lane % 8;
        load_matrices_transposed(a, set + SK_AT + tile_at<256>(token, warp * 2 + lane / 8 % 2));
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            load_narrow(b, at + F_AT, k * 16, j * 8);
            multiply(s[j], a, b[0], b[1]);
            multiply(s[j + 1], a, b[2], b[3]);
        }
    }
}

/* Of two lanes that have two columns each of the same two pieces of 8 columns, the even one gets
 * four columns of the first piece and the odd one of the second. */
__device__ __forceinline__ uint2 four_columns(uint32_t first, uint32_t second) {
    bool odd = threadIdx.x % 2;
    uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? first : second, 1);
    return odd ? make_uint2(other, second) : make_uint2(first, other);
}

/* The warp's 16 rows and columns of the result, of rows that the chunk has. */
__device__ __forceinline__ void store_delta(fp16 *delta, const float (&out)[2][4],
                                            const piece_rows &in, int head, int c0, int lane, int m,
                                            int n0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = m + lane / 4 + half * 8, row = in.first + r - in.skipped;
        uint2 four = four_columns(half_pair(out[0][2 * half], out[0][2 * half + 1]),
                                  half_pair(out[1][2 * half], out[1][2 * half + 1]));
        if (r < in.skipped || row >= in.end) continue;
        *(uint2 *)(delta + (int64_t)row * V_DIM + head * DIM + c0 + n0 + lane % 2 * 8 +
                   lane % 4 / 2 * 4) = four;
    }
}

/* delta[r][V_DIM] and the slot's next state. Grid: value heads * (DIM / COLUMNS). */
KERNEL __launch_bounds__(STATE_THREADS, 1)
    delta_states(const bf16 *channels, const float *decays, const bf16 *w, const bf16 *p,
                 const float *u, const cuda_slot *slot, int rows, int pieces, int layer,
                 fp16 *delta) {
    DYNAMIC_SHARED(char, shared);
    __shared__ float decay[2][PIECE];
    begin_after_previous();
    int head = blockIdx.x / (DIM / COLUMNS), c0 = blockIdx.x % (DIM / COLUMNS) * COLUMNS;
    int key_head = head / (V_HEADS / K_HEADS), tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    int m = warp % 4 * 16, n0 = warp / 4 * 16; /* of the first two products */
    const int pos = slot->pos;
    shared_at at = shared_address(shared);

    auto copy = [&](int i) {
        copy_piece(channels, decays, w, p, at + i % 2 * SET, decay[i % 2],
                   rows_of_piece(pos, i, rows), (int64_t)head * pieces + i, key_head, tid);
    };

    float s[4][4]; /* keys 16 warp + lane / 4 and 8 further; columns 8 j + 2 (lane % 4) and next */
    int64_t state =
        (((int64_t)layer * V_HEADS + head) * DIM + warp * 16 + lane / 4) * DIM + c0 + lane % 4 * 2;
    copy(0);
    load_state(s, slot->state_in + state);
    publish_state(shared, s, warp, lane);

    float2 goal[2][2]; /* of U: 8-column piece, half */
    const float *own_u =
        u + ((int64_t)head * pieces * PIECE + m + lane / 4) * DIM + c0 + n0 + lane % 4 * 2;
    load_goal(goal, own_u);

    for (int i = 0; i < pieces; i++) {
        piece_rows in = rows_of_piece(pos, i, rows);
        const float *c = decay[i % 2];
        shared_at set = at + i % 2 * SET;
        copy_wait<0>();
        __syncthreads(); /* the piece and S are here, the other set has been read */
        if (i + 1 < pieces) copy(i + 1);

        float recall[2][4] = {}, out[2][4] = {};
        read_state(recall, out, set, at, m, n0);
        float last = c[PIECE - 1];
        store_change(shared, c, last, goal, recall, out, m, n0, lane);
        if (i + 1 < pieces) load_goal(goal, own_u);
        __syncthreads(); /* N is here, S has been read */
        add_changes(out, set, at, m, n0);
        float fade = expf(last);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int v = 0; v < 4; v++) s[j][v] *= fade;
        add_keys(s, set, at, warp, lane);
        publish_state(shared, s, warp, lane);
        store_delta(delta, out, in, head, c0, lane, m, n0);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            *(float2 *)(slot->state_out + state + half * 8 * DIM + j * 8) =
                make_float2(s[j][2 * half], s[j][2 * half + 1]);
        }
}

/* mix[r][head] = delta / sqrt(mean(delta^2) + eps) * weight * silu(z), bf16 reordered; z lies in
 * proj[r] from CONV_DIM on. One warp a head of a row. Grid: rows, block: up to 8 warps. */
KERNEL __launch_bounds__(256) prompt_gated_norm(const fp16 *delta, const fp16 *proj, int width,
                                                const float *weight, bf16 *mix) {
    __shared__ __align__(16) float values[8][DIM];
    static_assert((int)DIM == (int)ORDERED, "a head is a block");
    begin_after_previous();
    int64_t r = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float4 w = *(const float4 *)(weight + lane * 4);
    for (int h = warp; h < V_HEADS; h += blockDim.x / 32) {
        float4 x = four_halves(delta + r * V_DIM + h * DIM + lane * 4);
        float4 z = four_halves(proj + r * width + CONV_DIM + h * DIM + lane * 4);
        float sum = warp_sum(dot_four(x, x));
        float scale = 1.0f / sqrtf(sum / DIM + SHAPE_NORM_EPS);
        *(float4 *)(values[warp] + lane * 4) =
            make_float4(x.x * scale * w.x * quick_silu(z.x), x.y * scale * w.y * quick_silu(z.y),
                        x.z * scale * w.z * quick_silu(z.z), x.w * scale * w.w * quick_silu(z.w));
        __syncwarp();
        if (lane < 16) {
            *(uint4 *)(mix + r * V_DIM + h * DIM + lane * 8) =
                reordered_part(lane, [&](int k) { return values[warp][k]; });
        }
        __syncwarp();
    }
}
