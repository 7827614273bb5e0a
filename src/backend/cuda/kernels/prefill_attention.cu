/* Mathematics: softmax(q k^T / 16) v * sigmoid(gate), 8 query heads a key head; RoPE of 64 of 256.
 * Layout: queries bf16 [n][Q_DIM]; cache bf16 [kv][capacity][256]; mix bf16 reordered [n][Q_DIM].
 * Threads: 16 rows of 8 heads a block, two warpgroups of 64 query rows; 64 positions a turn.
 * Fused: norm, RoPE, cache; scores, softmax, mix, gate. Agrees with ref/attention.c, q, k, v bf16.
 * Bytes: 4,096 rows: 63 % of 790 TFLOP/s, 68 to 70 % deeper (bench/cuda-prompt-h200.json).
 *
 * Full attention of a prompt chunk on Hopper's tensor cores: queries and keys normed and turned,
 * keys and values stored, then softmax over all positions before. */
#include "prefill_common.cuh"

/* proj[r]: per query head its query and its gate, then keys, then values. Writes queries bf16
 * [r][Q_DIM] and this layer's rows of keys and values. One warp a head; lane l holds dimensions 2 l
 * and the next, and so of each further 64: those that are turned are its first two, their partners
 * 32 further those of the lane 16 further. Grid: rows, block: any number of warps. */
KERNEL prompt_attention_rows(const fp16 *proj, int width, const float *q_norm, const float *k_norm,
                             const float *inv_freq, const cuda_slot *slot, int layer,
                             bf16 *queries) {
    enum { EACH = HEAD / 64, HALF = SHAPE_ROTARY_DIM / 2 };
    static_assert(HALF == 32, "partners are 16 lanes apart");
    begin_after_previous();
    int r = blockIdx.x, lane = threadIdx.x % 32, pos = slot->pos + r;
    const fp16 *row = proj + (int64_t)r * width;
    float2 sine, cosine;
    sincosf((float)pos * inv_freq[lane % 16 * 2], &sine.x, &cosine.x);
    sincosf((float)pos * inv_freq[lane % 16 * 2 + 1], &sine.y, &cosine.y);
    if (lane < 16) sine.x = -sine.x, sine.y = -sine.y;
    for (int h = threadIdx.x / 32; h < Q_HEADS + 2 * KV_HEADS; h += blockDim.x / 32) {
        bool query = h < Q_HEADS, value = h >= Q_HEADS + KV_HEADS;
        int kv = (h - Q_HEADS) % KV_HEADS;
        const fp16 *from =
            query ? row + 2 * h * HEAD : row + 2 * Q_DIM + (value ? KV_DIM : 0) + kv * HEAD;
        float2 v[EACH];
        float sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            v[j] = half_floats(*(const uint32_t *)(from + 2 * lane + 64 * j));
            sum = fmaf(v[j].x, v[j].x, fmaf(v[j].y, v[j].y, sum));
        }
        sum = warp_sum(sum);
        if (!value) {
            const float *weight = (query ? q_norm : k_norm) + 2 * lane;
            float scale = 1.0f / sqrtf(sum / HEAD + SHAPE_NORM_EPS);
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                float2 w = *(const float2 *)(weight + 64 * j);
                v[j].x *= scale * w.x, v[j].y *= scale * w.y;
            }
            float x = __shfl_xor_sync(ALL_LANES, v[0].x, 16);
            float y = __shfl_xor_sync(ALL_LANES, v[0].y, 16);
            v[0].x = v[0].x * cosine.x + x * sine.x;
            v[0].y = v[0].y * cosine.y + y * sine.y;
        }
        bf16 *to = queries + (int64_t)r * Q_DIM + h * HEAD;
        if (!query) {
            to = (value ? slot->values : slot->keys) +
                 (((int64_t)layer * KV_HEADS + kv) * slot->capacity + pos) * HEAD;
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            *(uint32_t *)(to + 2 * lane + 64 * j) = bf16_pair(v[j].x, v[j].y);
        }
    }
}

/* ---- softmax over the context ---------------------------------------------------------------- */

/* A block takes TOKENS consecutive rows of one key head, ROWS query rows, 64 of them a warpgroup,
 * and runs over the keys in tiles of SPAN positions on the absolute grid, so that a row's sums
 * depend on its own position alone. While the values of one tile are multiplied, the scores of the
 * next one become weights; the tiles after that are on their way.
 *
 * The context is summed in segments of PREFILL_SEGMENT positions, each from nothing, which are then
 * joined in order (join). A block runs over all of them and keeps the sum of those before in
 * memory; or, where rows are few, it takes one segment and prompt_join joins them: the same
 * operations on the same values. */
enum { FLASH_THREADS = 256, ROWS = 128, TOKENS = ROWS / KV_GROUP, SPAN = 64, DEPTH = HEAD / 64 };
enum { SEGMENT_SPANS = PREFILL_SEGMENT / SPAN };
enum { Q_SIZE = ROWS * HEAD * 2, SPAN_SIZE = SPAN * HEAD * 2 };
enum { FLASH_SHARED = Q_SIZE + 4 * SPAN_SIZE + FLASH_THREADS * 4 + SHARED_SLACK };
static_assert((int)FLASH_SHARED == PREFILL_FLASH_SHARED, "what the host asks for");

/* Positions [first, first + SPAN) of a head, in DEPTH columns of 64 dimensions. */
__device__ __forceinline__ void copy_span(shared_at to, const bf16 *from, int first, int end) {
    int r = (int)threadIdx.x / (HEAD / 8), p = (int)threadIdx.x % (HEAD / 8);
    const bf16 *own = from + (int64_t)(first + r) * HEAD + p * 8;
    to += (uint32_t)(p / 8 * SPAN * 128) + part_at(r, p % 8);
    int left = end - first - r;
#pragma unroll
    for (int i = 0; i < SPAN;
         i += FLASH_THREADS / (HEAD / 8)) { /* rows 8 apart: same permutation */
        copy16(to + (uint32_t)(i * 128), i < left ? own + i * HEAD : from, i < left);
    }
}

/* What a thread keeps of its two rows, 8 further down the second. */
struct softmax_rows {
    float top[2], total[2], fade[2];
    int last[2]; /* position that the row sees last */
};

/* Scores of a tile to weights, in place; masked: some positions may lie behind a row. */
__device__ __forceinline__ void to_weights(float (&s)[SPAN / 2], softmax_rows &rows, int first,
                                           bool masked) {
    const float scale = 0.0625f * 1.44269504f; /* exponentials are powers of two */
    static_assert(HEAD == 256, "1 / sqrt(HEAD)");
    int lane = threadIdx.x % 32;
    if (masked) {
#pragma unroll
        for (int i = 0; i < SPAN / 2; i++) {
            int pos = first + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (pos > rows.last[i / 2 % 2]) s[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int j = 1; j < SPAN / 8; j++) {
            most = fmaxf(most, fmaxf(s[4 * j + 2 * half], s[4 * j + 2 * half + 1]));
        }
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 2));
        most = fmaxf(rows.top[half], most * scale);
        float sunk = most;
        if (masked && most == -INFINITY) sunk = 0; /* nothing of this segment is before the row */
        rows.fade[half] = power_of_two(rows.top[half] - sunk);
        rows.top[half] = most;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < SPAN / 8; j++) {
            float &a = s[4 * j + 2 * half], &b = s[4 * j + 2 * half + 1];
            a = power_of_two(fmaf(a, scale, -sunk));
            b = power_of_two(fmaf(b, scale, -sunk));
            sum += a + b;
        }
        rows.total[half] = rows.total[half] * rows.fade[half] + sum;
    }
}

/* Weights as operand registers, once those of the tile before have been read. */
__device__ __forceinline__ void pack_weights(const float (&s)[SPAN / 2],
                                             uint32_t (&weights)[SPAN / 16][4]) {
#pragma unroll
    for (int i = 0; i < SPAN / 4; i++) {
        weights[i / 4][i % 4] = bf16_pair(s[2 * i], s[2 * i + 1]);
    }
}

/* s = queries . keys of a tile, queued. */
__device__ __forceinline__ void score(float (&s)[SPAN / 2], shared_at q, shared_at k) {
#pragma unroll
    for (int i = 0; i < HEAD / 16; i++) {
        operand a = operand_rows(q + (uint32_t)(i / 4 * ROWS * 128));
        operand b = operand_rows(k + (uint32_t)(i / 4 * SPAN * 128));
        product(s, operand_at(a, i % 4 * 32), operand_at(b, i % 4 * 32), i > 0);
    }
    products_commit();
}

/* out += weights times the values of a tile, queued. */
__device__ __forceinline__ void mix_values(float (&out)[HEAD / 2],
                                           const uint32_t (&weights)[SPAN / 16][4], shared_at v) {
    operand b = operand_columns(v, SPAN * 128);
#pragma unroll
    for (int i = 0; i < SPAN / 16; i++) {
        product_columns(out, weights[i], operand_at(b, i * 16 * 128));
    }
    products_commit();
}

/* ---- segments -------------------------------------------------------------------------------- */

/* How the sums of segments before weigh against those of the next one. */
struct join {
    float top, before, next;
    __device__ __forceinline__ join(float top_before, float top_next) {
        top = fmaxf(top_before, top_next);
        float sunk = top == -INFINITY ? 0 : top; /* both are empty */
        before = power_of_two(top_before - sunk);
        next = power_of_two(top_next - sunk);
    }
    __device__ __forceinline__ float operator()(float x_before, float x_next) const {
        return fmaf(x_before, before, x_next * next);
    }
};

/* Where sums lie between segments: rows of a chunk times query heads. */
struct flash_parts {
    float *out;   /* [row][Q_HEADS][HEAD] */
    float2 *sums; /* [row][Q_HEADS] largest score and sum of weights */
};

/* Four lanes' sums of weights of a row. */
__device__ __forceinline__ float sum_of_four(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

/* A segment's sums of one of a thread's two rows, joined with those before (where there are), to
 * memory, or, where `last`, back to the registers. line: row times Q_HEADS plus head. */
__device__ __forceinline__ void join_segment(const flash_parts &parts, int64_t line, bool valid,
                                             bool first, bool last, float top, float &total,
                                             float (&out)[HEAD / 2], int half) {
    int lane = threadIdx.x % 32;
    total = sum_of_four(total);
    float2 sums = first || !valid ? make_float2(-INFINITY, 0) : parts.sums[line];
    __syncwarp(); /* all four have read them */
    if (!valid) return;
    float2 *to = (float2 *)(parts.out + line * HEAD + lane % 4 * 2);
    join both(sums.x, top);
    total = both(sums.y, total);
#pragma unroll
    for (int j = 0; j < HEAD / 8; j++) {
        float &x = out[4 * j + 2 * half], &y = out[4 * j + 2 * half + 1];
        if (!first) {
            float2 before = to[j * 4];
            x = both(before.x, x);
            y = both(before.y, y);
        }
        if (!last) to[j * 4] = make_float2(x, y);
    }
    if (!last && lane % 4 == 0) parts.sums[line] = make_float2(both.top, total);
}

/* Query row i of the tile: token i / KV_GROUP of n from r0 on, head i % KV_GROUP of key head kv. */
__device__ __forceinline__ void copy_queries(shared_at q, const bf16 *queries, int r0, int n,
                                             int kv) {
    int tid = threadIdx.x;
#pragma unroll
    for (int i = 0; i < ROWS * HEAD / 8 / FLASH_THREADS; i++) {
        int at = tid + i * FLASH_THREADS, row = at / (HEAD / 8), p = at % (HEAD / 8);
        int t = row / KV_GROUP;
        bool valid = t < n;
        const bf16 *from = queries + (int64_t)(r0 + (valid ? t : 0)) * Q_DIM +
                           (kv * KV_GROUP + row % KV_GROUP) * HEAD + p * 8;
        copy16(q + (uint32_t)(p / 8 * ROWS * 128) + part_at(row, p % 8), from, valid);
    }
}

/* join_segment of both rows of a thread; the second's line lies SECOND further. */
__device__ __forceinline__ void join_rows(const flash_parts &parts, int64_t lines,
                                          const bool (&valid)[2], bool first, bool last,
                                          const float (&top)[2], float (&total)[2],
                                          float (&out)[HEAD / 2]) {
    static_assert(8 % KV_GROUP == 0, "the second row is a later token's, of the same head");
    enum { SECOND = 8 / KV_GROUP * Q_HEADS };
#pragma unroll
    for (int half = 0; half < 2; half++) {
        join_segment(parts, lines + half * SECOND, valid[half], first, last, top[half], total[half],
                     out, half);
    }
}

/* The first tile's scores and weights. */
__device__ __forceinline__ void first_weights(float (&s)[SPAN / 2], softmax_rows &row,
                                              uint32_t (&weights)[SPAN / 16][4], shared_at q,
                                              shared_at k, int first, bool masked) {
    products_begin();
    score(s, q, k);
    products_wait<0>();
    hold(s);
    to_weights(s, row, first, masked);
    pack_weights(s, weights);
}

/* mix[r][h] = softmax(query . keys / sqrt(HEAD)) values * sigmoid(gate), bf16 reordered; proj[r]
 * holds the gates. Grid: blocks of TOKENS rows in x, key heads in y; with split, key heads times
 * segments in y, and segment s leaves its sums in rows s * rows and on of parts. */
KERNEL __launch_bounds__(FLASH_THREADS, 1)
    prompt_flash(const bf16 *queries, const fp16 *proj, int width, const cuda_slot *slot, int rows,
                 int layer, bf16 *mix, float *parts_out, float2 *parts_sums, int split) {
    SHARED_PIECES(memory);
    begin_after_previous();
    int tid = threadIdx.x, lane = tid % 32, kv = blockIdx.y % KV_HEADS;
    int segment = blockIdx.y / KV_HEADS;
    flash_parts parts = {parts_out + (int64_t)segment * rows * Q_DIM,
                         parts_sums + (int64_t)segment * rows * Q_HEADS};
    int r0 = ((int)gridDim.x - 1 - (int)blockIdx.x) * TOKENS; /* long ones first */
    int pos0 = slot->pos + r0, n = min((int)TOKENS, rows - r0);
    int end = pos0 + n; /* positions that any row here sees */
    int first = segment * SEGMENT_SPANS, spans = (end + SPAN - 1) / SPAN;
    if (first >= spans) return;
    if (split) spans = min(spans, first + SEGMENT_SPANS);
    int64_t head = ((int64_t)layer * KV_HEADS + kv) * slot->capacity * HEAD;
    const bf16 *keys = slot->keys + head, *values = slot->values + head;
    shared_at q = shared_address(memory), k = q + Q_SIZE, v = k + 2 * SPAN_SIZE;

    copy_queries(q, queries, r0, n, kv);
    copy_span(k, keys, first * SPAN, end);
    copy_commit();
    copy_span(v, values, first * SPAN, end);
    if (spans > first + 1) copy_span(k + SPAN_SIZE, keys, (first + 1) * SPAN, end);
    copy_commit();

    int own = tid / 32 * 16 + lane / 4;
    softmax_rows row = {{-INFINITY, -INFINITY},
                        {0, 0},
                        {1, 1},
                        {pos0 + own / KV_GROUP, pos0 + (own + 8) / KV_GROUP}};
    float out[HEAD / 2], s[SPAN / 2];
    uint32_t weights[SPAN / 16][4];
#pragma unroll
    for (int i = 0; i < HEAD / 2; i++) out[i] = 0;
    shared_at own_q = q + (uint32_t)(tid / 128 * 64 * 128);

    copy_wait<1>();
    publish_shared();
    __syncthreads();
    first_weights(s, row, weights, own_q, k, first * SPAN, (first + 1) * SPAN > pos0 + 1);

    /* Lines of parts of this thread's two rows. */
    int64_t lines = (int64_t)(r0 + own / KV_GROUP) * Q_HEADS + kv * KV_GROUP + own % KV_GROUP;
    bool valid[2] = {own / KV_GROUP < n, (own + 8) / KV_GROUP < n};
    static_assert(SEGMENT_SPANS % 2 == 0, "tiles take turns, the first of a segment first");

    for (int span = first; span + 1 < spans; span++) {
        bool edge = (span + 1) % SEGMENT_SPANS == 0; /* the next tile begins a segment */
        copy_wait<0>();
        publish_shared();
        __syncthreads(); /* these values and the next keys are here, the other tiles are free */
        products_begin();
        score(s, own_q, k + (uint32_t)((span + 1) % 2 * SPAN_SIZE));
        mix_values(out, weights, v + (uint32_t)(span % 2 * SPAN_SIZE));
        copy_span(v + (uint32_t)((span + 1) % 2 * SPAN_SIZE), values, (span + 1) * SPAN, end);
        copy_span(k + (uint32_t)(span % 2 * SPAN_SIZE), keys, (span + 2) * SPAN, end);
        copy_commit();
        products_wait<1>();
        hold(s);
        float top[2] = {row.top[0], row.top[1]}, total[2] = {row.total[0], row.total[1]};
        if (edge) row.top[0] = row.top[1] = -INFINITY, row.total[0] = row.total[1] = 0;
        to_weights(s, row, (span + 1) * SPAN, (span + 2) * SPAN > pos0 + 1);
        settle(v + 2 * SPAN_SIZE + tid * 4, row.total[0] + row.total[1]); /* during the products */
        products_wait<0>();
        hold(out);
        if (edge) {
            join_rows(parts, lines, valid, span < SEGMENT_SPANS, false, top, total, out);
        }
#pragma unroll
        for (int i = 0; i < HEAD / 2; i++) out[i] *= row.fade[i / 2 % 2];
        pack_weights(s, weights);
    }
    copy_wait<0>();
    publish_shared();
    __syncthreads();
    products_begin();
    mix_values(out, weights, v + (uint32_t)((spans - 1) % 2 * SPAN_SIZE));
    products_wait<0>();
    hold(out);

    bool alone = split || spans <= SEGMENT_SPANS;
    join_rows(parts, lines, valid, alone, !split, row.top, row.total, out);
    if (split) return;

    __syncthreads(); /* all queries have been read: their place takes the result */
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float sum = row.total[half];
        int line = own + half * 8, t = line / KV_GROUP, h = kv * KV_GROUP + line % KV_GROUP;
        if (t >= n) continue;
        const fp16 *gate = proj + (int64_t)(r0 + t) * width + (2 * h + 1) * HEAD + lane % 4 * 2;
        float scale = 1.0f / sum;
        /* place_of_input(8 j + 2 (lane % 4) + i) of a block: its 16 bytes, its place in them. */
        char *to = memory + line * HEAD * 2 + lane % 4 / 2 * 2;
        int part = (lane % 2 * 2) ^ (line & 7);
#pragma unroll
        for (int j = 0; j < HEAD / 8; j++) {
            float2 g = half_floats(*(const uint32_t *)(gate + j * 8));
            float x = out[4 * j + 2 * half] * scale * quick_sigmoid(g.x);
            float y = out[4 * j + 2 * half + 1] * scale * quick_sigmoid(g.y);
            char *at = to + j / 16 * 256 + j % 16 / 4 * 4;
            *(bf16 *)(at + (part ^ j % 4 * 4) * 16) = to_bf16(x);
            *(bf16 *)(at + (part ^ j % 4 * 4 ^ 1) * 16) = to_bf16(y);
        }
    }
    __syncthreads();
    for (int i = tid; i < n * KV_GROUP * HEAD / 8; i += FLASH_THREADS) {
        int line = i / (HEAD / 8), p = i % (HEAD / 8);
        *(uint4 *)(mix + (int64_t)(r0 + line / KV_GROUP) * Q_DIM +
                   (kv * KV_GROUP + line % KV_GROUP) * HEAD + p * 8) =
            *(const uint4 *)(memory + line * HEAD * 2 + p / 16 * 256 +
                             ((p % 16 ^ (line & 7)) * 16));
    }
}

/* The segments of prompt_flash with split, joined. Grid: rows. */
KERNEL __launch_bounds__(256)
    prompt_join(const float *parts_out, const float2 *parts_sums, const fp16 *proj, int width,
                const cuda_slot *slot, int rows, bf16 *mix) {
    enum { EACH = 16 }; /* dimensions a thread and turn */
    __shared__ __align__(16) float values[256 / (HEAD / EACH)][HEAD / ORDERED][ORDERED + 4];
    begin_after_previous();
    int r = blockIdx.x, of_head = threadIdx.x / (HEAD / EACH),
        d = threadIdx.x % (HEAD / EACH) * EACH;
    int end = slot->pos + min(r / TOKENS * TOKENS + (int)TOKENS, rows);
    int segments = (end + PREFILL_SEGMENT - 1) / PREFILL_SEGMENT;
    for (int h0 = 0; h0 < Q_HEADS; h0 += 256 / (HEAD / EACH)) {
        int h = h0 + of_head;
        if (h < Q_HEADS) {
            float top = -INFINITY, total = 0, out[EACH];
            for (int s = 0; s < segments; s++) {
                int64_t line = ((int64_t)s * rows + r) * Q_HEADS + h;
                float2 sums = parts_sums[line];
                join both(top, sums.x);
                top = both.top;
                total = both(total, sums.y);
#pragma unroll
                for (int i = 0; i < EACH; i += 4) {
                    float4 x = *(const float4 *)(parts_out + line * HEAD + d + i);
                    const float next[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        out[i + k] = s ? both(out[i + k], next[k]) : next[k];
                    }
                }
            }
            const fp16 *gates = proj + (int64_t)r * width + (2 * h + 1) * HEAD + d;
            float scale = 1.0f / total, *to = &values[of_head][d / ORDERED][d % ORDERED];
#pragma unroll
            for (int i = 0; i < EACH; i += 2) {
                float2 gate = half_floats(*(const uint32_t *)(gates + i));
                to[i] = out[i] * scale * quick_sigmoid(gate.x);
                to[i + 1] = out[i + 1] * scale * quick_sigmoid(gate.y);
            }
        }
        __syncthreads();
        if (h < Q_HEADS) {
            int64_t to = (int64_t)r * Q_DIM + h * HEAD + d;
#pragma unroll
            for (int i = 0; i < EACH; i += 8) {
                const float *block = values[of_head][d / ORDERED];
                *(uint4 *)(mix + to + i) =
                    reordered_part((d % ORDERED + i) / 8, [&](int k) { return block[k]; });
            }
        }
        __syncthreads();
    }
}
