/* Mathematics: softmax(q k^T / 16) v * sigmoid(gate), 8 query heads a key head; RoPE of 64 of 256.
 * Layout: proj float32 [n][2 Q_DIM + 2 KV_DIM]; cache bf16 [kv][capacity][256]; q float32.
 * Threads: prompts 64 query rows a block, 16 a warp; decode a block a slot, key head and part.
 * Fused: norm, RoPE, cache; scores, softmax, mix; join, gate. Agrees with ref/attention.c.
 * Bytes: 1,024 a position; 4,096 rows: 20 % of 790 TFLOP/s (bench/cuda-portable-h200.json).
 *
 * Full attention: queries and keys normed and turned, keys and values stored, then softmax over the
 * positions before: for a prompt with tensor cores, for decode steps over parts of the context. */
#include "common.cuh"

/* Positions (of the row's session) that row r of a step holds: slot r / rows_per_slot. */
struct row_place {
    const cuda_slot *slot;
    int pos;
};
__device__ __forceinline__ row_place place_of(const cuda_slot *slots, int rows_per_slot, int r) {
    row_place p = {slots + r / rows_per_slot, 0};
    p.pos = p.slot->pos + r % rows_per_slot;
    return p;
}

/* proj[r]: per query head its query and its gate, then keys, then values. Writes queries [r][Q_DIM]
 * (float32) and this layer's rows of keys and values; the keys of proj are replaced by what is
 * stored, before rounding. One warp a head; lane l holds dimensions l, l + 32, ...: both halves of
 * a rotary pair. Grid: rows, block: any number of warps. */
KERNEL attention_rows(float *proj, int width, const float *q_norm, const float *k_norm,
                      const float *inv_freq, const cuda_slot *slots, int rows_per_slot, int layer,
                      float *queries) {
    enum { EACH = HEAD / 32, HALF = SHAPE_ROTARY_DIM / 2 };
    static_assert(HALF == 32, "a lane holds both halves of a rotary pair");
    int r = blockIdx.x, lane = threadIdx.x % 32;
    let_next_begin();
    wait_for_previous();
    row_place at = place_of(slots, rows_per_slot, r);
    float *row = proj + (int64_t)r * width, sine, cosine;
    sincosf((float)at.pos * inv_freq[lane], &sine, &cosine);
    for (int h = threadIdx.x / 32; h < Q_HEADS + 2 * KV_HEADS; h += blockDim.x / 32) {
        bool query = h < Q_HEADS, value = h >= Q_HEADS + KV_HEADS;
        int kv = (h - Q_HEADS) % KV_HEADS;
        float *from =
            query ? row + 2 * h * HEAD : row + 2 * Q_DIM + (value ? KV_DIM : 0) + kv * HEAD;
        float v[EACH], sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            v[j] = from[lane + 32 * j];
            sum = fmaf(v[j], v[j], sum);
        }
        sum = warp_sum(sum);
        if (!value) {
            const float *weight = query ? q_norm : k_norm;
            float scale = 1.0f / sqrtf(sum / HEAD + SHAPE_NORM_EPS);
#pragma unroll
            for (int j = 0; j < EACH; j++) v[j] *= scale * weight[lane + 32 * j];
            float a = v[0], b = v[1];
            v[0] = a * cosine - b * sine;
            v[1] = b * cosine + a * sine;
        }
        if (query) {
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                queries[(int64_t)r * Q_DIM + h * HEAD + lane + 32 * j] = v[j];
            }
            continue;
        }
        int64_t first = (((int64_t)layer * KV_HEADS + kv) * at.slot->capacity + at.pos) * HEAD;
        uint16_t *to = (value ? at.slot->values : at.slot->keys) + first;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            to[lane + 32 * j] = to_bf16(v[j]);
            from[lane + 32 * j] = v[j];
        }
    }
}

/* ---- prompts --------------------------------------------------------------------------------- */

/* A block takes TOKENS consecutive rows of one key head: TOKENS * KV_GROUP = 64 query rows, 16 of
 * them a warp, and runs over the keys in tiles of SPAN positions on the absolute grid, so that a
 * row's sums depend on its own position alone. The next tile is copied while one is multiplied. */
enum { FLASH_THREADS = 128, QUERIES = 64, TOKENS = QUERIES / KV_GROUP, SPAN = 32 };
enum { Q_BYTES = QUERIES * HEAD * 2, KV_BYTES = SPAN * HEAD * 2 };

/* Byte of 16-byte piece p of row r in a tile of rows of 256 bf16. */
__device__ __forceinline__ uint32_t wide_place(int r, int p) {
    return (uint32_t)(r * HEAD * 2 + ((p ^ (r & 7)) * 16));
}

__device__ __forceinline__ void copy_span(shared_at to, const bf16 *from, int first, int end) {
    for (int i = threadIdx.x; i < SPAN * HEAD / 8; i += FLASH_THREADS) {
        int r = i / (HEAD / 8), p = i % (HEAD / 8);
        bool valid = first + r < end;
        copy16(to + wide_place(r, p), from + (int64_t)(valid ? first + r : first) * HEAD + p * 8,
               valid);
    }
}

/* From scores of positions `first` and on, of which a row sees those up to last, to weights as bf16
 * pairs; what was summed before fades where the largest score rises. */
__device__ __forceinline__ void soften(float (&s)[SPAN / 8][4], int first, const int (&last)[2],
                                       float scale, float (&top)[2], float (&total)[2],
                                       float (&out)[HEAD / 8][4],
                                       uint32_t (&weights)[SPAN / 8][2]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = top[half];
#pragma unroll
        for (int j = 0; j < SPAN / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[j][2 * half + c];
                int pos = first + j * 8 + lane % 4 * 2 + c;
                x = pos <= last[half] ? x * scale : -INFINITY;
                most = fmaxf(most, x);
            }
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        float fade = exp2f(top[half] - most), sum = 0; /* position 0 is seen by every row */
        top[half] = most;
#pragma unroll
        for (int j = 0; j < SPAN / 8; j++) {
            float a = exp2f(s[j][2 * half] - most), b = exp2f(s[j][2 * half + 1] - most);
            sum += a + b;
            weights[j][half] = bf16_pair(a, b);
        }
        total[half] = total[half] * fade + sum;
        if (fade != 1.0f) { /* of the whole quad at once */
#pragma unroll
            for (int i = 0; i < HEAD / 8; i++) {
                out[i][2 * half] *= fade;
                out[i][2 * half + 1] *= fade;
            }
        }
    }
}

/* Query row i of the tile: token i / KV_GROUP of n from r0 on, head i % KV_GROUP of key head kv. */
__device__ __forceinline__ void copy_queries(char *to, const float *queries, int r0, int n,
                                             int kv) {
    for (int i = threadIdx.x; i < QUERIES * HEAD / 8; i += FLASH_THREADS) {
        int row = i / (HEAD / 8), p = i % (HEAD / 8), t = row / KV_GROUP;
        uint4 packed = make_uint4(0, 0, 0, 0);
        if (t < n) {
            const float4 *from = (const float4 *)(queries + (int64_t)(r0 + t) * Q_DIM +
                                                  (kv * KV_GROUP + row % KV_GROUP) * HEAD + p * 8);
            float4 a = from[0], b = from[1];
            packed = make_uint4(bf16_pair(a.x, a.y), bf16_pair(a.z, a.w), bf16_pair(b.x, b.y),
                                bf16_pair(b.z, b.w));
        }
        *(uint4 *)(to + wide_place(row, p)) = packed;
    }
}

/* s = the warp's 16 queries . keys of a tile. */
__device__ __forceinline__ void score(float (&s)[SPAN / 8][4], shared_at q, shared_at k, int warp,
                                      int lane) {
#pragma unroll
    for (int d = 0; d < HEAD / 16; d++) {
        uint32_t a[4];
        load_matrices(a, q + wide_place(warp * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
        for (int j = 0; j < SPAN / 8; j += 2) {
            uint32_t b[4];
            load_matrices(b,
                          k + wide_place(j * 8 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
            multiply(s[j], a, b[0], b[1]);
            multiply(s[j + 1], a, b[2], b[3]);
        }
    }
}

/* out += weights times the values of a tile. */
__device__ __forceinline__ void mix_values(float (&out)[HEAD / 8][4],
                                           const uint32_t (&weights)[SPAN / 8][2], shared_at v,
                                           int lane) {
#pragma unroll
    for (int t = 0; t < SPAN / 16; t++) {
        uint32_t a[4] = {weights[2 * t][0], weights[2 * t][1], weights[2 * t + 1][0],
                         weights[2 * t + 1][1]};
#pragma unroll
        for (int d = 0; d < HEAD / 8; d += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, v + wide_place(t * 16 + lane % 16, d + lane / 16));
            multiply(out[d], a, b[0], b[1]);
            multiply(out[d + 1], a, b[2], b[3]);
        }
    }
}

/* mix[r][h] = softmax(query . keys / sqrt(HEAD)) values * sigmoid(gate), float32 and bf16 (where
 * given). proj[r] holds the gates. Grid: blocks of TOKENS rows in x, key heads in y. */
KERNEL __launch_bounds__(FLASH_THREADS)
    flash(const float *queries, const float *proj, int width, const cuda_slot *slots, int rows,
          int layer, float *mix, bf16 *mix_bf) {
    DYNAMIC_SHARED(char, shared);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int kv = blockIdx.y, r0 = ((int)gridDim.x - 1 - (int)blockIdx.x) * TOKENS; /* long ones first */
    int pos0 = slots->pos + r0;
    int64_t head = ((int64_t)layer * KV_HEADS + kv) * slots->capacity * HEAD;
    const bf16 *keys = slots->keys + head, *values = slots->values + head;
    shared_at q = shared_address(shared), k = q + Q_BYTES, v = k + 2 * KV_BYTES;
    int n = min(TOKENS, rows - r0), end = pos0 + n; /* positions that any row here sees */

    copy_queries(shared, queries, r0, n, kv);
    copy_span(k, keys, 0, end);
    copy_span(v, values, 0, end);
    copy_commit();

    float out[HEAD / 8][4], top[2], total[2] = {};
#pragma unroll
    for (int i = 0; i < HEAD / 8; i++) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0;
    top[0] = top[1] = -INFINITY;
    int own = warp * 16 + lane / 4;                                     /* and 8 further down */
    int last[2] = {pos0 + own / KV_GROUP, pos0 + (own + 8) / KV_GROUP}; /* position a row sees */
    int spans = (end + SPAN - 1) / SPAN;
    const float scale = rsqrtf((float)HEAD) * 1.44269504f; /* exponentials are powers of two */

    for (int span = 0; span < spans; span++) {
        shared_at kt = k + span % 2 * KV_BYTES, vt = v + span % 2 * KV_BYTES;
        copy_wait<0>();
        __syncthreads(); /* this tile is here, the other one has been read */
        if (span + 1 < spans) {
            copy_span(k + (span + 1) % 2 * KV_BYTES, keys, (span + 1) * SPAN, end);
            copy_span(v + (span + 1) % 2 * KV_BYTES, values, (span + 1) * SPAN, end);
            copy_commit();
        }
        float s[SPAN / 8][4] = {};
        score(s, q, kt, warp, lane);
        uint32_t weights[SPAN / 8][2];
        soften(s, span * SPAN, last, scale, top, total, out, weights);
        mix_values(out, weights, vt, lane);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = total[half];
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        int row = own + half * 8, t = row / KV_GROUP, h = kv * KV_GROUP + row % KV_GROUP;
        if (t >= n) continue;
        const float *gate = proj + (int64_t)(r0 + t) * width + (2 * h + 1) * HEAD;
#pragma unroll
        for (int i = 0; i < HEAD / 8; i++) {
            int d = i * 8 + lane % 4 * 2;
            float a = out[i][2 * half] / sum * sigmoid(gate[d]);
            float b = out[i][2 * half + 1] / sum * sigmoid(gate[d + 1]);
            int64_t at = (int64_t)(r0 + t) * Q_DIM + h * HEAD + d;
            if (mix) *(float2 *)(mix + at) = make_float2(a, b);
            if (mix_bf) *(uint32_t *)(mix_bf + at) = bf16_pair(a, b);
        }
    }
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* A block takes one slot, one key head and one part of the context, 64 positions at a time: scores
 * (a warp a position), then each thread one dimension of the values for all eight query heads. What
 * a part holds depends on the position alone. */
enum { PART_THREADS = 256 };
static_assert((int)PART_THREADS == (int)HEAD, "a thread a dimension");
static_assert((int)PART_THREADS == 32 * (int)KV_GROUP, "a warp a query head");

/* Positions of one part. */
__device__ __forceinline__ int part_length(int positions) {
    int blocks = (positions + CUDA_PART - 1) / CUDA_PART;
    return (blocks + CUDA_PARTS - 1) / CUDA_PARTS * CUDA_PART;
}

/* The sums over the warp of eight values: in lanes 4 h to 4 h + 3 that of x[h]. */
__device__ __forceinline__ float sum_of_heads(const float (&x)[KV_GROUP]) {
    static_assert(KV_GROUP == 8, "halved three times");
    int lane = threadIdx.x % 32;
    float y[4], z[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float mine = lane & 16 ? x[i + 4] : x[i], other = lane & 16 ? x[i] : x[i + 4];
        y[i] = mine + __shfl_xor_sync(ALL_LANES, other, 16);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float mine = lane & 8 ? y[i + 2] : y[i], other = lane & 8 ? y[i] : y[i + 2];
        z[i] = mine + __shfl_xor_sync(ALL_LANES, other, 8);
    }
    float sum = (lane & 4 ? z[1] : z[0]) + __shfl_xor_sync(ALL_LANES, lane & 4 ? z[0] : z[1], 4);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 1);
}

/* Eight dimensions of a query, a then b, times those of a key. */
__device__ __forceinline__ float dot_eight(float4 a, float4 b, const uint4 &k) {
    float sum = a.x * __uint_as_float(k.x << 16);
    sum = fmaf(a.y, __uint_as_float(k.x & 0xffff0000u), sum);
    sum = fmaf(a.z, __uint_as_float(k.y << 16), sum);
    sum = fmaf(a.w, __uint_as_float(k.y & 0xffff0000u), sum);
    sum = fmaf(b.x, __uint_as_float(k.z << 16), sum);
    sum = fmaf(b.y, __uint_as_float(k.z & 0xffff0000u), sum);
    sum = fmaf(b.z, __uint_as_float(k.w << 16), sum);
    return fmaf(b.w, __uint_as_float(k.w & 0xffff0000u), sum);
}

/* Scores of positions from .. from + n - 1 with all heads: eight positions a warp, four on their
 * way at once. */
__device__ __forceinline__ void score_block(const float (&q)[KV_GROUP][HEAD], const bf16 *keys,
                                            int from, int n, float (&score)[KV_GROUP][CUDA_PART], int warp, int lane) {
#pragma unroll 1
    for (int t0 = warp * 8; t0 < min(warp * 8 + 8, n); t0 += 4) {
        uint4 packed[4];
        float dot[4][KV_GROUP];
#pragma unroll
        for (int u = 0; u < 4; u++) {
            int t = min(t0 + u, n - 1);
            packed[u] = __ldg((const uint4 *)(keys + (int64_t)(from + t) * HEAD) + lane);
        }
#pragma unroll
        for (int h = 0; h < KV_GROUP; h++) {
            const float4 *row = (const float4 *)&q[h][lane * 8];
            float4 a = row[0], b = row[1];
#pragma unroll
            for (int u = 0; u < 4; u++) dot[u][h] = dot_eight(a, b, packed[u]);
        }
#pragma unroll
        for (int u = 0; u < 4; u++) {
            float sum = sum_of_heads(dot[u]);
            if (lane % 4 == 0) score[lane / 4][t0 + u] = sum;
        }
    }
}

/* partial [slot][KV_HEADS][CUDA_PARTS][KV_GROUP][HEAD + 2]: weighted values, largest score, sum.
 * Grid: CUDA_PARTS (or as many as the longest slot has) in x, key heads in y, slots in z. */
KERNEL __launch_bounds__(PART_THREADS)
    attention_part(const float *queries, const cuda_slot *slots, int layer, float *partial) {
    __shared__ __align__(16) float q[KV_GROUP][HEAD], score[KV_GROUP][CUDA_PART];
    __shared__ float fade[KV_GROUP];
    int part = blockIdx.x, kv = blockIdx.y, slot = blockIdx.z, tid = threadIdx.x;
    int lane = tid % 32, warp = tid / 32;
    let_next_begin();
    wait_for_previous();
    const cuda_slot &s = slots[slot];
    int positions = s.pos + 1, length = part_length(positions);
    int first = part * length, end = min(first + length, positions);
    if (first >= positions) return;
    int64_t head = ((int64_t)layer * KV_HEADS + kv) * s.capacity * HEAD;
    const bf16 *keys = s.keys + head, *values = s.values + head;
    for (int i = tid; i < KV_GROUP * HEAD; i += PART_THREADS) {
        q[i / HEAD][i % HEAD] =
            queries[(int64_t)slot * Q_DIM + kv * KV_GROUP * HEAD + i] * (1.0f / 16.0f);
    }
    static_assert(HEAD == 256, "1 / sqrt(HEAD)");
    __syncthreads();
    /* Warp h looks after query head h: its largest score, and the sum of its weights. */
    float out[KV_GROUP] = {}, top = -INFINITY, total = 0;
    for (int from = first; from < end; from += CUDA_PART) {
        int n = min(CUDA_PART, end - from);
        score_block(q, keys, from, n, score, warp, lane);
        __syncthreads();
        float x = lane < n ? score[warp][lane] : -INFINITY;
        float y = lane + 32 < n ? score[warp][lane + 32] : -INFINITY, most = fmaxf(x, y);
#pragma unroll
        for (int step = 16; step; step /= 2) {
            most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
        }
        most = fmaxf(top, most);
        x = expf(x - most), y = expf(y - most);
        float faded = expf(top - most);
        total = fmaf(total, faded, warp_sum(x + y));
        top = most;
        score[warp][lane] = x, score[warp][lane + 32] = y;
        if (lane == 0) fade[warp] = faded;
        __syncthreads();
#pragma unroll
        for (int h = 0; h < KV_GROUP; h++) out[h] *= fade[h];
#pragma unroll 1
        for (int t0 = 0; t0 < n; t0 += 16) {
            float v[16];
#pragma unroll
            for (int u = 0; u < 16; u++) {
                int t = min(t0 + u, n - 1); /* of no weight where there is none */
                v[u] = bf16_float(__ldg(values + (int64_t)(from + t) * HEAD + tid));
            }
#pragma unroll
            for (int u = 0; u < 16; u += 4) {
#pragma unroll
                for (int h = 0; h < KV_GROUP; h++) {
                    float4 weight = *(const float4 *)&score[h][t0 + u];
                    out[h] = fmaf(weight.x, v[u], out[h]);
                    out[h] = fmaf(weight.y, v[u + 1], out[h]);
                    out[h] = fmaf(weight.z, v[u + 2], out[h]);
                    out[h] = fmaf(weight.w, v[u + 3], out[h]);
                }
            }
        }
        __syncthreads();
    }
    float *to =
        partial + (((int64_t)slot * KV_HEADS + kv) * CUDA_PARTS + part) * KV_GROUP * (HEAD + 2);
#pragma unroll
    for (int h = 0; h < KV_GROUP; h++) {
        to[h * (HEAD + 2) + tid] = out[h];
    }
    if (lane == 0) {
        to[warp * (HEAD + 2) + HEAD] = top;
        to[warp * (HEAD + 2) + HEAD + 1] = total;
    }
}

/* mix[slot][h] from the parts, times sigmoid(gate), float32 and bf16 (where given). Grid: query
 * heads in x, slots in y. */
KERNEL __launch_bounds__(PART_THREADS)
    attention_join(const float *partial, const float *proj, int width, const cuda_slot *slots,
                   float *mix, bf16 *mix_bf) {
    int h = blockIdx.x, slot = blockIdx.y, d = threadIdx.x;
    let_next_begin();
    wait_for_previous();
    int positions = slots[slot].pos + 1, length = part_length(positions);
    int parts = (positions + length - 1) / length;
    int64_t stride = KV_GROUP * (HEAD + 2);
    const float *from = partial + ((int64_t)slot * KV_HEADS + h / KV_GROUP) * CUDA_PARTS * stride +
                        h % KV_GROUP * (HEAD + 2);
    float top = -INFINITY, sum = 0, out = 0;
    for (int p = 0; p < parts; p++) top = fmaxf(top, from[p * stride + HEAD]);
    for (int p = 0; p < parts; p++) {
        float weight = expf(from[p * stride + HEAD] - top);
        sum = fmaf(weight, from[p * stride + HEAD + 1], sum);
        out = fmaf(weight, from[p * stride + d], out);
    }
    float gate = proj[(int64_t)slot * width + (2 * h + 1) * HEAD + d];
    float value = out / sum * sigmoid(gate);
    int64_t at = (int64_t)slot * Q_DIM + h * HEAD + d;
    if (mix) mix[at] = value;
    if (mix_bf) mix_bf[at] = to_bf16(value);
}
