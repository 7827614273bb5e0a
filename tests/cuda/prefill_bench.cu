/* The prompt kernels of sm_90a alone, on random weights of the compiled shape: values against plain
 * float kernels, then the time of each at several lengths beside what the hardware would need
 * (docs/cuda-prefill.md). Build with nvcc only:
 *   nvcc -O3 -std=c++17 -Isrc -Isrc/backend/cuda -gencode=arch=compute_90a,code=sm_90a \
 *        -DSHAPE_HEADER='"model/shapes/qwen36_35b_a3b.h"' tests/cuda/prefill_bench.cu
 * prefill_bench check|time [gemm|decisive|experts|delta|attention|small|rows]... A number times
 * that length alone. Each part is better run in a process of its own: after a fault on the card
 * nothing else runs in the same one. */
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cuda/kernels/prefill_gemm.cu"

#include "backend/cuda/kernels/prefill_attention.cu"
#include "backend/cuda/kernels/prefill_deltanet.cu"
#include "backend/cuda/kernels/prefill_norm.cu"
#include "backend/cuda/kernels/prefill_route.cu"
#include "backend/cuda/kernels/prefill_small.cu"

#include "prefill_device.h" /* memory, launches and clocks, of a card or of the emulated one */

static int failures;
static bool timing;
static int only; /* rows that are timed; 0: all lengths */
static uint64_t seed = 1;

static unsigned blocks(int64_t n, int64_t each) {
    return (unsigned)((n + each - 1) / each);
}

/* ---- random contents ------------------------------------------------------------------------- */

__device__ uint32_t hash(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)(x >> 32);
}
__device__ float uniform(uint64_t x) {
    return (float)(hash(x) >> 8) * (1.0f / 16777216);
}
__device__ size_t first_index() {
    return blockIdx.x * (size_t)blockDim.x + threadIdx.x;
}
__device__ size_t index_step() {
    return (size_t)gridDim.x * blockDim.x;
}
KERNEL fill_words(uint32_t *x, size_t n, uint64_t from) {
    for (size_t i = first_index(); i < n; i += index_step()) x[i] = hash(from + i);
}
KERNEL fill_floats(float *x, size_t n, float low, float high, uint64_t from) {
    for (size_t i = first_index(); i < n; i += index_step()) {
        x[i] = low + (high - low) * uniform(from + i);
    }
}
KERNEL fill_bf16(bf16 *x, size_t n, float low, float high, uint64_t from) {
    for (size_t i = first_index(); i < n; i += index_step()) {
        x[i] = to_bf16(low + (high - low) * uniform(from + i));
    }
}
KERNEL fill_halves(fp16 *x, size_t n, float low, float high, uint64_t from) {
    for (size_t i = first_index(); i < n; i += index_step()) {
        x[i] = (fp16)half_pair(low + (high - low) * uniform(from + i), 0);
    }
}
static float *floats(size_t n, float low, float high) {
    float *x = take<float>(n);
    RUN(fill_floats, 264, 1, 256, 0, x, n, low, high, seed++ << 40);
    return x;
}
static bf16 *bf16s(size_t n, float low, float high) {
    bf16 *x = take<bf16>(n);
    RUN(fill_bf16, 264, 1, 256, 0, x, n, low, high, seed++ << 40);
    return x;
}
static fp16 *halves(size_t n, float low, float high) {
    fp16 *x = take<fp16>(n);
    RUN(fill_halves, 264, 1, 256, 0, x, n, low, high, seed++ << 40);
    return x;
}
/* Scales of both signs, biases that centre the codes, of tiles; those of a group of `down`, which
 * `twin` tiles lie between, are alike in both of its tiles. */
KERNEL fill_tile_scales(uint32_t *tiles, size_t n, int bytes, int twin, float scale, float centre,
                        uint64_t from) {
    for (size_t i = first_index(); i < n; i += index_step()) {
        if (4 * i % bytes < TILE_CODES) continue;
        bool second = twin && 4 * i / bytes / twin % 2;
        size_t at = second ? i - (size_t)twin * bytes / 4 : i;
        float s = scale * (0.5f + uniform(from + at));
        if (hash(~(from + at)) % 4 == 0) s = -s;
        tiles[i] = bf16_pair(s, centre * s);
    }
}

/* Values of about 1 / sqrt(cols), times gain, as tiles. rows of `down`: a multiple of H. */
static cuda_mat matrix(int64_t rows, int cols, cuda_layout layout, float gain) {
    bool down = layout == CUDA_DOWN, byte = layout == CUDA_BYTE;
    int bytes = down ? TILE_DOWN_BYTES : byte ? TILE_BYTE_BYTES : TILE_WIDE_BYTES;
    int twin = down ? H / TILE_DOWN_ROWS : 0, height = byte ? TILE_BYTE_ROWS : TILE_WIDE_ROWS;
    size_t n = down ? (size_t)rows * cols / 4096 : blocks(rows, height) * (size_t)(cols / 128);
    size_t words = n * bytes / 4;
    uint32_t *tiles = take<uint32_t>(words);
    RUN(fill_words, 264, 1, 256, 0, tiles, words, seed++ << 40);
    RUN(fill_tile_scales, 264, 1, 256, 0, tiles, words, bytes, twin,
        gain / sqrtf((float)cols) / (byte ? 74.0f : 4.6f), byte ? -127.5f : -7.5f, seed++ << 40);
    const uint16_t *factors = (const uint16_t *)tiles + TILE_CODES / 2;
    cuda_mat m = {};
    m.codes = (const uint8_t *)tiles, m.scales = factors, m.biases = factors + 1;
    m.rows = (int32_t)rows, m.cols = cols, m.bits = byte ? 8 : 4, m.layout = layout;
    m.row_tiles = down ? bytes : cols / 128 * bytes;
    m.code_pair = down ? 4 * twin * bytes : bytes;
    m.code_group = down ? 2 * twin * bytes : 32; /* also of bytes: 64 inputs are two runs of 16 */
    m.factor_pair = m.code_pair / 2;
    m.factor_group = down ? twin * bytes : 4;
    return m;
}
/* Slices of 128 inputs one after the other instead of rows. */
static cuda_mat in_slices(cuda_mat m) {
    m.row_tiles = TILE_WIDE_BYTES;
    m.code_pair = m.rows / 32 * TILE_WIDE_BYTES;
    m.factor_pair = m.code_pair / 2;
    return m;
}
/* Rows 0, 2, 4, ... of a matrix, and rows 1, 3, 5, ... */
static cuda_mat every_second(cuda_mat m, int first) {
    m.rows /= 2;
    m.doubled = 1;
    m.codes += first * tile_wide_codes(1, 0);
    m.scales += first * 2;
    m.biases += first * 2;
    return m;
}

/* ---- plain kernels --------------------------------------------------------------------------- */

__device__ float reordered(const bf16 *row, int k) {
    return bf16_float(row[k / ORDERED * ORDERED + place_of_input(k % ORDERED)]);
}
/* out[r][f] = x[index(r)] . w[first(r) + f], x reordered where said. Grid: outputs / 128, rows. */
KERNEL plain_product(const bf16 *x, cuda_mat w, const int32_t *experts, int expert_rows,
                     const int32_t *source, float *out, int outputs) {
    int f = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    if (f >= outputs) return;
    const bf16 *row = x + (int64_t)(source ? source[r] : r) * w.cols;
    int64_t at = f + (experts ? (int64_t)experts[r] * expert_rows : 0);
    float sum = 0;
    for (int k = 0; k < w.cols; k++) sum = fmaf(reordered(row, k), mat_value(w, at, k), sum);
    out[(int64_t)r * outputs + f] = sum;
}
KERNEL plain_swiglu(const float *gate, const float *up, float *out, int n) {
    for (size_t i = first_index(); i < (size_t)n; i += index_step()) out[i] = silu(gate[i]) * up[i];
}
KERNEL plain_reorder(const float *x, bf16 *out, int cols) {
    for (int k = threadIdx.x; k < cols; k += blockDim.x) {
        out[(int64_t)blockIdx.x * cols + k / ORDERED * ORDERED + place_of_input(k % ORDERED)] =
            to_bf16(x[(int64_t)blockIdx.x * cols + k]);
    }
}
KERNEL plain_restore(const bf16 *x, float *out, int cols) {
    for (int k = threadIdx.x; k < cols; k += blockDim.x) {
        out[(int64_t)blockIdx.x * cols + k] = reordered(x + (int64_t)blockIdx.x * cols, k);
    }
}
/* What products that decide read, in natural order; NaN where a group's sum is wrong. */
KERNEL plain_join(const bf16 *high, const bf16 *low, float *out, const float *sums) {
    int64_t row = (int64_t)blockIdx.x * H;
    for (int g = threadIdx.x; g < H / 64; g += blockDim.x) {
        float sum = 0;
        for (int p = 0; p < 64; p++) {
            float v = bf16_float(high[row + g * 64 + p]) + bf16_float(low[row + g * 64 + p]);
            out[row + g * 64 + decisive_input(p)] = v;
            sum += v;
        }
        if (fabsf(sum - sums[blockIdx.x * (H / 64) + g]) > 1e-3f) out[row + g * 64] = NAN;
    }
}
KERNEL plain_split(const float *x, bf16 *high, bf16 *low, float *sums, int cols) {
    int64_t row = (int64_t)blockIdx.x * cols;
    for (int g = threadIdx.x; g < cols / 64; g += blockDim.x) {
        float sum = 0;
        for (int p = 0; p < 64; p++) {
            float v = x[row + g * 64 + decisive_input(p)];
            high[row + g * 64 + p] = to_bf16(v);
            low[row + g * 64 + p] = to_bf16(v - bf16_float(to_bf16(v)));
            sum += v;
        }
        sums[blockIdx.x * (cols / 64) + g] = sum;
    }
}
/* out[r][f] = x[r] . w[f] with float x; and the sum of two parts. */
KERNEL plain_decisive(const float *x, cuda_mat w, float *out) {
    for (int f = threadIdx.x; f < w.rows; f += blockDim.x) {
        double sum = 0;
        for (int k = 0; k < w.cols; k++) {
            sum += (double)x[(int64_t)blockIdx.x * w.cols + k] * (double)mat_value(w, f, k);
        }
        out[(int64_t)blockIdx.x * w.rows + f] = (float)sum;
    }
}
KERNEL plain_add(const float *parts, float *out, size_t n) {
    for (size_t i = first_index(); i < n; i += index_step()) out[i] = parts[i] + parts[n + i];
}
KERNEL plain_widen(const bf16 *x, float *out, size_t n) {
    for (size_t i = first_index(); i < n; i += index_step()) out[i] = bf16_float(x[i]);
}
KERNEL plain_float(const fp16 *x, float *out, size_t n, float unit) {
    for (size_t i = first_index(); i < n; i += index_step()) out[i] = half_floats(x[i]).x * unit;
}
KERNEL plain_norm(const float *x, const float *add, const float *weight, float *out) {
    int64_t row = (int64_t)blockIdx.x * H;
    float sum = 0;
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        float v = x[row + i] + add[row + i];
        sum = fmaf(v, v, sum);
    }
    float scale = 1.0f / sqrtf(block_sum(sum) / H + SHAPE_NORM_EPS);
    for (int i = threadIdx.x; i < H; i += blockDim.x) {
        out[row + i] = (x[row + i] + add[row + i]) * scale * weight[i];
    }
}
/* Convolution and lengths, a head a block of DIM threads. Grid: heads, rows. */
KERNEL plain_convolve(const float *proj, int width, const float *taps, const float *history,
                      float *out) {
    int head = blockIdx.x, c = head * DIM + threadIdx.x, r = blockIdx.y;
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        int at = r - 3 + i;
        float u = at < 0 ? history[(3 + at) * CONV_DIM + c] : proj[(int64_t)at * width + c];
        sum = fmaf(taps[4 * c + i], u, sum);
    }
    float y = silu(sum), length = sqrtf(block_sum(y * y) + 1e-6f);
    if (head < 2 * K_HEADS) y /= length;
    if (head < K_HEADS) y *= rsqrtf((float)DIM);
    out[(int64_t)r * CONV_DIM + c] = y;
}
/* The delta rule token by token, in place on state[head][key][value]. Grid: value heads, DIM
 * threads, a column each. */
KERNEL plain_delta(const float *channels, const float *ba, const float *rate, const float *dt_bias,
                   float *state, int rows, float *out) {
    int head = blockIdx.x, j = threadIdx.x;
    float *s = state + (int64_t)head * DIM * DIM + j;
    for (int r = 0; r < rows; r++) {
        const float *row = channels + (int64_t)r * CONV_DIM, *q = row + head / 2 * DIM;
        const float *k = q + K_DIM;
        float v = row[2 * K_DIM + head * DIM + j], b = ba[(int64_t)r * 2 * V_HEADS + head];
        float x = ba[(int64_t)r * 2 * V_HEADS + V_HEADS + head] + dt_bias[head];
        float e = expf(-rate[head] * (x > 20 ? x : log1pf(expf(x)))), m = 0, sum = 0;
        for (int i = 0; i < DIM; i++) m = fmaf(s[i * DIM] *= e, k[i], m);
        float d = sigmoid(b) * (v - m);
        for (int i = 0; i < DIM; i++) {
            float now = fmaf(k[i], d, s[i * DIM]);
            s[i * DIM] = now;
            sum = fmaf(now, q[i], sum);
        }
        out[(int64_t)r * V_DIM + head * DIM + j] = sum;
    }
}
/* Grid: value heads, rows; DIM threads. */
KERNEL plain_gated_norm(const float *delta, const float *proj, int width, const float *weight,
                        float *out) {
    int j = threadIdx.x, h = blockIdx.x;
    int64_t r = blockIdx.y;
    float x = delta[r * V_DIM + h * DIM + j], z = proj[r * width + CONV_DIM + h * DIM + j];
    float scale = 1.0f / sqrtf(block_sum(x * x) / DIM + SHAPE_NORM_EPS);
    out[r * V_DIM + h * DIM + j] = x * scale * weight[j] * silu(z);
}
/* Softmax of one query head and row, HEAD threads. scores: [rows][Q_HEADS][positions]. */
KERNEL plain_attention(const bf16 *queries, const float *proj, int width, const cuda_slot *slot,
                       int layer, float *scores, int most, float *out) {
    int h = blockIdx.x, r = blockIdx.y, d = threadIdx.x, n = slot->pos + r + 1;
    int64_t head = ((int64_t)layer * KV_HEADS + h / KV_GROUP) * slot->capacity * HEAD;
    const bf16 *keys = slot->keys + head, *values = slot->values + head;
    const bf16 *q = queries + (int64_t)r * Q_DIM + h * HEAD;
    float *own = scores + ((int64_t)r * Q_HEADS + h) * most, top = -INFINITY, sum = 0, mix = 0;
    for (int t = d; t < n; t += HEAD) {
        float s = 0;
        for (int i = 0; i < HEAD; i++) {
            s = fmaf(bf16_float(q[i]), bf16_float(keys[(int64_t)t * HEAD + i]), s);
        }
        own[t] = s / 16;
    }
    __syncthreads();
    for (int t = 0; t < n; t++) top = fmaxf(top, own[t]);
    for (int t = 0; t < n; t++) {
        float e = expf(own[t] - top);
        sum += e;
        mix = fmaf(e, bf16_float(values[(int64_t)t * HEAD + d]), mix);
    }
    float gate = proj[(int64_t)r * width + (2 * h + 1) * HEAD + d];
    out[(int64_t)r * Q_DIM + h * HEAD + d] = mix / sum * sigmoid(gate);
}
/* Queries, keys and values as attention_rows leaves them, in float, HEAD threads. Grid: heads,
 * rows. */
KERNEL plain_rows(const float *proj, int width, const float *q_norm, const float *k_norm,
                  const float *inv_freq, int pos0, float *out) {
    __shared__ float turned[HEAD];
    int h = blockIdx.x, r = blockIdx.y, d = threadIdx.x;
    bool query = h < Q_HEADS, value = h >= Q_HEADS + KV_HEADS;
    const float *from =
        proj + (int64_t)r * width + (query ? 2 * h * HEAD : 2 * Q_DIM + (h - Q_HEADS) * HEAD);
    float x = from[d], sum = block_sum(x * x);
    if (!value) x = x / sqrtf(sum / HEAD + SHAPE_NORM_EPS) * (query ? q_norm : k_norm)[d];
    turned[d] = x;
    __syncthreads();
    if (!value && d < SHAPE_ROTARY_DIM) {
        int half = SHAPE_ROTARY_DIM / 2;
        float angle = (float)(pos0 + r) * inv_freq[d % half];
        x = d < half ? x * cosf(angle) - turned[d + half] * sinf(angle)
                     : x * cosf(angle) + turned[d - half] * sinf(angle);
    }
    out[((int64_t)r * (Q_HEADS + 2 * KV_HEADS) + h) * HEAD + d] = x;
}

/* ---- comparing ------------------------------------------------------------------------------- */

/* |a - b| / |b| over n values against a limit, NaN never passes. */
static void compare(const char *what, const float *got, const float *expected, size_t n,
                    double limit) {
    std::vector<float> a = fetch(got, n), b = fetch(expected, n);
    double error = 0, size = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i];
        error += d * d;
        size += (double)b[i] * (double)b[i];
        if (!(fabs(d) <= most)) most = fabs(d);
    }
    double relative = sqrt(error / size);
    bool good = relative <= limit && size > 0;
    failures += !good;
    printf("%-4s %-44s error %.2e (limit %.0e), largest %.2e of rms %.2e\n", good ? "ok" : "FAIL",
           what, relative, limit, most, sqrt(size / (double)n));
}
static void same_bits(const char *what, const void *a, const void *b, size_t bytes) {
    std::vector<char> x = fetch((const char *)a, bytes), y = fetch((const char *)b, bytes);
    bool good = x == y;
    failures += !good;
    printf("%-4s %-44s bit for bit\n", good ? "ok" : "FAIL", what);
}
static float *restored(const bf16 *x, int rows, int cols) {
    float *out = take<float>((size_t)rows * (size_t)cols);
    RUN(plain_restore, rows, 1, 256, 0, x, out, cols);
    return out;
}
static float *widened(const bf16 *x, size_t n) {
    float *out = take<float>(n);
    RUN(plain_widen, 264, 1, 256, 0, x, out, n);
    return out;
}

static float *floated(const fp16 *x, size_t n, float unit = 1) {
    float *out = take<float>(n);
    RUN(plain_float, 264, 1, 256, 0, x, out, n, unit);
    return out;
}

/* ---- the kernels by tile --------------------------------------------------------------------- */

struct dense_tile {
    int wgs, n, stages;
    void (*kernel)(const bf16 *, cuda_mat, fp16 *, int, int);
    const char *name;
};
static const dense_tile DENSE_TILES[] = {{1, 16, 10, dense_1_16, "64x16"},
                                         {1, 32, 8, dense_1_32, "64x32"},
                                         {1, 64, 8, dense_1_64, "64x64"},
                                         {2, 64, 6, dense_2_64, "128x64"},
                                         {2, 128, 5, dense_2_128, "128x128"},
                                         {2, 256, 0, dense_wide, "128x256"}};
static void run_dense(const dense_tile &t, const bf16 *x, const cuda_mat &w, fp16 *out, int rows) {
    if (!t.stages) {
        RUN(t.kernel, std::min(132u, blocks(w.rows, 128) * blocks(rows, t.n)), 1, WIDE_THREADS,
            PREFILL_WIDE_SHARED, x, w, out, w.rows, rows);
        return;
    }
    RUN(t.kernel, blocks(w.rows, 64 * t.wgs), blocks(rows, t.n), t.wgs * 128,
        PREFILL_TILE_SHARED(t.wgs, t.n, t.stages), x, w, out, w.rows, rows);
}
struct expert_tile {
    int n, stages;
    void (*up)(const bf16 *, cuda_mat, cuda_groups, bf16 *, cuda_mat, int);
    void (*down)(const bf16 *, cuda_mat, cuda_groups, fp16 *, cuda_mat, fp16 *, int);
};
static const expert_tile EXPERT_TILES[] = {
#define TILE(n, stages, at_least) {n, stages, prompt_up_##n, prompt_down_##n},
    PREFILL_EXPERT_TILES(TILE)
#undef TILE
};
struct moe {
    cuda_mat gate, up, down, shared_gate, shared_up, shared_down;
    float *scores, *routing;
    int32_t *begin, *blocks, *n_blocks, *pairs, *places, *counts;
    float *row; /* for a norm, which clears the counts */
    bf16 *ordered;
};
/* n blocks of rows, the shared expert's, for `rows` rows, included. */
static void run_up(const expert_tile &t, unsigned n, const bf16 *x, const moe &m,
                   const cuda_groups &g, bf16 *hidden, int rows) {
    RUN(t.up, std::max((int)INNER, (int)SHARED) / 64, n + blocks(rows, t.n), 256,
        PREFILL_TILE_SHARED(2, t.n, t.stages), x, m.gate, g, hidden, m.shared_gate, rows);
}
static void run_down(const expert_tile &t, unsigned n, const bf16 *hidden, const moe &m,
                     const cuda_groups &g, fp16 *out, fp16 *own, int rows) {
    RUN(t.down, H / 128, n + blocks(rows, t.n), 256, PREFILL_TILE_SHARED(2, t.n, t.stages), hidden,
        m.down, g, out, m.shared_down, own, rows);
}

/* ---- checks ---------------------------------------------------------------------------------- */

static void check_gemm() {
    int cols = H, outputs = 512;
    cuda_mat by_rows = matrix(outputs, cols, CUDA_WIDE, 1);
    const int lengths[] = {1, 7, 64, 129, 300};
    fp16 *first = nullptr;
    for (int rows : lengths) {
        cuda_mat w = rows == 129 ? in_slices(by_rows) : by_rows;
        bf16 *x = bf16s((size_t)rows * cols, -1, 1);
        float *expected = take<float>((size_t)rows * outputs);
        const int32_t *none = nullptr;
        RUN(plain_product, blocks(outputs, 128), rows, 128, 0, x, w, none, 0, none, expected,
            outputs);
        for (const dense_tile &t : DENSE_TILES) {
            fp16 *out = take<fp16>((size_t)rows * outputs);
            poison(out, (size_t)rows * outputs * 2);
            run_dense(t, x, w, out, rows);
            char what[80];
            snprintf(what, sizeof what, "dense %s, %d rows", t.name, rows);
            compare(what, floated(out, (size_t)rows * outputs), expected, (size_t)rows * outputs,
                    4e-3);
            if (rows != 300) continue;
            if (first) {
                snprintf(what, sizeof what, "dense %s equals 64x16", t.name);
                same_bits(what, out, first, (size_t)rows * outputs * 2);
            } else {
                first = out;
            }
        }
    }
    bf16 *x = bf16s((size_t)100 * H, -1, 1);
    float *residual = floats((size_t)100 * H, -1, 1);
    fp16 *add = halves((size_t)100 * H, -1, 1);
    float *weight = floats(H, 0.5f, 1.5f);
    float *expected = take<float>((size_t)100 * H);
    RUN(plain_norm, 100, 1, 256, 0, residual, floated(add, (size_t)100 * H), weight, expected);
    bf16 *high = bf16s((size_t)100 * H, -1, 1), *low = bf16s((size_t)100 * H, -1, 1);
    float *sums = take<float>((size_t)100 * H / 64);
    int32_t *none = nullptr;
    RUN(prompt_norm, 100, 1, 256, 0, residual, add, weight, x, high, low, sums, none);
    compare("norm, bf16 reordered", restored(x, 100, H), expected, (size_t)100 * H, 4e-3);
    float *joined = take<float>((size_t)100 * H);
    RUN(plain_join, 100, 1, 256, 0, high, low, joined, sums);
    compare("norm, two halves", joined, expected, (size_t)100 * H, 1e-5);
}

struct decisive_tile {
    int n, stages;
    void (*kernel)(const bf16 *, const bf16 *, const float *, cuda_mat, float *, int);
};
static const decisive_tile DECISIVE_TILES[] = {
#define TILE(n, stages) {n, stages, prompt_decisive_##n},
    PREFILL_DECISIVE_TILES(TILE)
#undef TILE
};
struct decisive_input_rows {
    bf16 *high, *low;
    float *sums;
};
static decisive_input_rows split_rows(const float *x, int rows, int cols) {
    size_t n = (size_t)rows * (size_t)cols;
    decisive_input_rows r = {take<bf16>(n), take<bf16>(n), take<float>(n / 64)};
    RUN(plain_split, rows, 1, 64, 0, x, r.high, r.low, r.sums, cols);
    return r;
}
static void run_decisive(const decisive_tile &t, const decisive_input_rows &x, const cuda_mat &w,
                         float *out, int rows) {
    unsigned threads = blocks(w.rows, 64) * 128;
    RUN(t.kernel, blocks(rows, t.n), PREFILL_DECISIVE_PARTS, threads,
        PREFILL_DECISIVE_SHARED(t.n, t.stages, w.cols / 64 / PREFILL_DECISIVE_PARTS), x.high, x.low,
        x.sums, w, out, rows);
}

static void check_decisive() {
    const int lengths[] = {1, 40, 150};
    cuda_mat router = matrix(EXPERTS + 1, H, CUDA_BYTE, 1),
             ba = matrix(2 * V_HEADS, H, CUDA_WIDE, 1);
    for (int rows : lengths) {
        float *x = floats((size_t)rows * H, -2, 2);
        decisive_input_rows r = split_rows(x, rows, H);
        for (const cuda_mat &w : {router, ba}) {
            size_t n = (size_t)rows * w.rows;
            float *expected = take<float>(n), *parts = take<float>(2 * n), *out = take<float>(n);
            float *first = nullptr;
            RUN(plain_decisive, rows, 1, 128, 0, x, w, expected);
            for (const decisive_tile &t : DECISIVE_TILES) {
                poison(parts, 2 * n * 4);
                run_decisive(t, r, w, parts, rows);
                RUN(plain_add, 264, 1, 256, 0, parts, out, n);
                char what[80];
                snprintf(what, sizeof what, "decisive, %d bits, tile %d, %d rows", w.bits, t.n,
                         rows);
                compare(what, out, expected, n, 1e-5);
                if (first) {
                    same_bits("  equals tile 16", parts, first, 2 * n * 4);
                } else {
                    first = take<float>(2 * n);
                    copy(first, parts, 2 * n * 4);
                }
            }
        }
    }
}

static moe make_moe(int rows, int used) {
    moe m = {};
    cuda_mat both = matrix((int64_t)2 * EXPERTS * INNER, H, CUDA_WIDE, 1);
    m.gate = every_second(both, 0);
    m.up = every_second(both, 1);
    m.down = matrix((int64_t)EXPERTS * H, INNER, CUDA_DOWN, 2);
    both = matrix(2 * SHARED, H, CUDA_WIDE, 1);
    m.shared_gate = every_second(both, 0);
    m.shared_up = every_second(both, 1);
    m.shared_down = matrix(H, SHARED, CUDA_DOWN, 2);
    m.scores = take<float>((size_t)rows * (EXPERTS + 1) * 2);
    m.counts = take<int32_t>(EXPERTS);
    m.row = floats(H, -1, 1);
    m.ordered = take<bf16>(H);
    std::vector<float> s((size_t)rows * (EXPERTS + 1) * 2); /* in two parts */
    for (size_t i = 0; i < s.size(); i++) {                 /* the used ones win */
        s[i] = (float)rand() / (float)RAND_MAX + ((int)(i % (EXPERTS + 1)) < used ? 4.0f : 0.0f);
    }
    send(m.scores, s.data(), s.size() * 4);
    m.routing = take<float>((size_t)rows * 2 * TOP_K);
    m.begin = take<int32_t>(EXPERTS + 1);
    m.blocks = take<int32_t>((size_t)rows * TOP_K / 16 + EXPERTS);
    m.n_blocks = take<int32_t>(1);
    m.pairs = take<int32_t>((size_t)rows * TOP_K);
    m.places = take<int32_t>((size_t)rows * TOP_K);
    return m;
}
static cuda_groups run_routing(const moe &m, int rows, int height) {
    float *no_floats = nullptr;
    fp16 *no_halves = nullptr;
    bf16 *no_bf16 = nullptr;
    RUN(prompt_norm, 1, 1, 256, 0, m.row, no_halves, m.row, m.ordered, no_bf16, no_bf16, no_floats,
        m.counts);
    RUN(prompt_route, blocks(rows, 4), 1, 128, 0, m.scores, m.routing, rows, m.counts, m.places);
    RUN(prompt_group, blocks(rows, GROUP_ROWS), 1, GROUP_THREADS, 0, m.counts, rows, height,
        m.begin, m.blocks, m.n_blocks, m.pairs, m.places);
    cuda_groups g = {m.begin, m.blocks, m.n_blocks, m.pairs, 0, 0};
    return g;
}

/* The sum behind experts whose outputs are given, and the norm behind that. */
static void check_combine(const moe &m, int rows, const fp16 *out) {
    size_t n = (size_t)rows * H;
    fp16 *shared = halves(n, -0.1f, 0.1f);
    float *x = floats(n, -1, 1), *weight = floats(H, 0.5f, 1.5f);
    float *before = take<float>(n), *zero = floats(n, 0, 0), *normed = take<float>(n);
    bf16 *ordered = take<bf16>(n), *high = take<bf16>(n), *low = take<bf16>(n);
    float *sums = take<float>(n / 64);
    copy(before, x, n * 4);
    RUN(prompt_combine, rows, 1, 256, 0, out, m.places, m.routing, m.scores, shared, x, weight,
        ordered, high, low, sums);
    std::vector<float> o = fetch(floated(out, n * TOP_K, EXPERT_UNIT), n * TOP_K);
    std::vector<float> b = fetch(before, n), own = fetch(floated(shared, n, EXPERT_UNIT), n);
    std::vector<float> r = fetch(m.routing, (size_t)rows * 2 * TOP_K);
    std::vector<float> s = fetch(m.scores, (size_t)rows * (EXPERTS + 1) * 2), expected(n);
    std::vector<int32_t> places = fetch(m.places, (size_t)rows * TOP_K);
    for (int row = 0; row < rows; row++) {
        size_t at = (size_t)row * (EXPERTS + 1) + EXPERTS;
        double gate = 1 / (1 + exp(-(double)s[at] - (double)s[at + (size_t)rows * (EXPERTS + 1)]));
        for (int i = 0; i < H; i++) {
            double sum = (double)b[(size_t)row * H + i] + gate * (double)own[(size_t)row * H + i];
            for (int j = 0; j < TOP_K; j++) {
                sum += (double)r[(size_t)row * 2 * TOP_K + TOP_K + j] *
                       (double)o[(size_t)places[(size_t)row * TOP_K + j] * H + i];
            }
            expected[(size_t)row * H + i] = (float)sum;
        }
    }
    float *plain = take<float>(n);
    send(plain, expected.data(), n * 4);
    compare("sum of experts", x, plain, n, 1e-5);
    RUN(plain_norm, rows, 1, 256, 0, x, zero, weight, normed);
    compare("  its norm", restored(ordered, rows, H), normed, n, 4e-3);
    float *joined = take<float>(n);
    RUN(plain_join, rows, 1, 256, 0, high, low, joined, sums);
    compare("  in two halves", joined, normed, n, 1e-5);
}

static void check_experts() {
    const int cases[][2] = {{3, EXPERTS}, {70, 12}, {150, 9}, {150, 8}, {190, 12}};
    for (int i = 0; i < (EMULATED ? 3 : 5); i++) {
        const int *c = cases[i];
        int rows = c[0], pairs = rows * TOP_K;
        moe m = make_moe(rows, c[1]);
        bf16 *x = bf16s((size_t)rows * H, -2, 2);
        size_t hidden_n = (size_t)pairs * INNER, out_n = (size_t)pairs * H;
        size_t own_n = (size_t)rows * SHARED; /* of the shared expert, behind the others */
        bf16 *hidden = take<bf16>(hidden_n + own_n), *hidden_bf = take<bf16>(hidden_n + own_n);
        float *own_hidden = take<float>(own_n), *own_up = take<float>(own_n);
        fp16 *own = take<fp16>((size_t)rows * H);
        float *expected_own = take<float>((size_t)rows * H);
        const int32_t *no_list = nullptr;
        RUN(plain_product, blocks(SHARED, 128), rows, 128, 0, x, m.shared_gate, no_list, 0, no_list,
            own_hidden, (int)SHARED);
        RUN(plain_product, blocks(SHARED, 128), rows, 128, 0, x, m.shared_up, no_list, 0, no_list,
            own_up, (int)SHARED);
        RUN(plain_swiglu, 264, 1, 256, 0, own_hidden, own_up, own_hidden, rows * (int)SHARED);
        RUN(plain_reorder, rows, 1, 128, 0, own_hidden, hidden_bf + hidden_n, (int)SHARED);
        RUN(plain_product, blocks(H, 128), rows, 128, 0, hidden_bf + hidden_n, m.shared_down,
            no_list, 0, no_list, expected_own, (int)H);
        float *gate = take<float>(hidden_n), *up = take<float>(hidden_n);
        fp16 *out = take<fp16>(out_n);
        float *expected = take<float>(hidden_n);
        float *expected_out = take<float>(out_n);
        for (const expert_tile &t : EXPERT_TILES) {
            cuda_groups g = run_routing(m, rows, t.n);
            std::vector<int32_t> begin = fetch(m.begin, EXPERTS + 1), order = fetch(m.pairs, pairs);
            std::vector<int32_t> expert(pairs), row(pairs);
            for (int e = 0; e < EXPERTS; e++) {
                for (int p = begin[e]; p < begin[e + 1]; p++) expert[p] = e;
            }
            for (int p = 0; p < pairs; p++) row[p] = order[p] / TOP_K;
            int32_t *of_pair = take<int32_t>(pairs), *row_of = take<int32_t>(pairs);
            send(of_pair, expert.data(), expert.size() * 4);
            send(row_of, row.data(), row.size() * 4);
            const int32_t *none = nullptr;
            unsigned n = (unsigned)(pairs / t.n + std::min(pairs, (int)EXPERTS));
            RUN(plain_product, blocks(INNER, 128), pairs, 128, 0, x, m.gate, of_pair, (int)INNER,
                row_of, gate, (int)INNER);
            RUN(plain_product, blocks(INNER, 128), pairs, 128, 0, x, m.up, of_pair, (int)INNER,
                row_of, up, (int)INNER);
            RUN(plain_swiglu, 264, 1, 256, 0, gate, up, expected, (int)hidden_n);
            poison(hidden, (hidden_n + own_n) * 2);
            run_up(t, n, x, m, g, hidden, rows);
            char what[80];
            snprintf(what, sizeof what, "experts up, tile %d, %d rows of %d", t.n, rows, c[1]);
            compare(what, restored(hidden, pairs, INNER), expected, hidden_n, 8e-3);
            compare("  shared expert", restored(hidden + hidden_n, rows, SHARED), own_hidden, own_n,
                    8e-3);
            RUN(plain_reorder, pairs, 1, 128, 0, expected, hidden_bf, (int)INNER);
            RUN(plain_product, blocks(H, 128), pairs, 128, 0, hidden_bf, m.down, of_pair, (int)H,
                none, expected_out, (int)H);
            poison(out, out_n * 2);
            poison(own, (size_t)rows * H * 2);
            run_down(t, n, hidden_bf, m, g, out, own, rows);
            snprintf(what, sizeof what, "experts down, tile %d, %d rows of %d", t.n, rows, c[1]);
            compare(what, floated(out, out_n, EXPERT_UNIT), expected_out, out_n, 4e-3);
            compare("  shared expert", floated(own, (size_t)rows * H, EXPERT_UNIT), expected_own,
                    (size_t)rows * H, 4e-3);
        }
        check_combine(m, rows, out);
        release();
    }
}

/* What one DeltaNet layer of a chunk reads and leaves. */
struct delta_layer {
    int rows, pieces, width;
    fp16 *proj, *delta;
    float *taps, *parts, *ba, *rate, *dt_bias, *norm, *decays, *u;
    bf16 *channels, *w, *p, *mix;
    cuda_slot slot, *slot_device;
};
static delta_layer make_delta(int rows, int pos) {
    delta_layer d = {};
    size_t state = (size_t)V_HEADS * DIM * DIM;
    d.rows = rows;
    d.pieces = (pos % 64 + rows + 63) / 64;
    d.width = CONV_DIM + V_DIM;
    d.proj = halves((size_t)rows * d.width, -2, 2);
    d.taps = floats((size_t)CONV_DIM * 4, -0.6f, 0.6f);
    size_t gates = (size_t)rows * 2 * V_HEADS;
    d.parts = floats(2 * gates, -1.5f, 1.5f);
    d.ba = take<float>(gates);
    RUN(plain_add, 264, 1, 256, 0, d.parts, d.ba, gates);
    d.rate = floats(V_HEADS, 0.02f, 1.5f);
    d.dt_bias = floats(V_HEADS, -3, 0);
    d.norm = floats(DIM, 0.5f, 1.5f);
    d.delta = take<fp16>((size_t)rows * V_DIM);
    d.channels = take<bf16>((size_t)rows * CONV_DIM);
    size_t n = (size_t)V_HEADS * (size_t)d.pieces;
    d.decays = take<float>(n * 64);
    d.w = take<bf16>(n * 64 * DIM);
    d.p = take<bf16>(n * 64 * 64);
    d.u = take<float>(n * 64 * DIM);
    d.mix = take<bf16>((size_t)rows * V_DIM);
    d.slot.state_in = floats(state, -0.3f, 0.3f);
    d.slot.state_out = take<float>(state);
    d.slot.conv_in = floats((size_t)3 * CONV_DIM, -2, 2);
    d.slot.conv_out = take<float>((size_t)3 * CONV_DIM);
    d.slot.pos = pos;
    d.slot_device = take<cuda_slot>(1);
    send(d.slot_device, &d.slot, sizeof d.slot);
    return d;
}
static void run_convolve(const delta_layer &d) {
    int each = prefill_convolve_each(d.rows);
    RUN(prompt_convolve, 2 * K_HEADS + V_HEADS, blocks(d.rows, CONV_WARPS * each), CONV_WARPS * 32,
        0, d.proj, d.width, (const float4 *)d.taps, d.slot_device, d.rows, 0, d.channels, each);
}
static void run_pieces(const delta_layer &d) {
    RUN(delta_pieces, d.pieces, V_HEADS, PIECES_THREADS, PIECES_SHARED, d.channels, d.parts, d.rate,
        d.dt_bias, d.slot_device, d.rows, d.decays, d.w, d.p, d.u);
}
static void run_states(const delta_layer &d) {
    RUN(delta_states, V_HEADS * (DIM / COLUMNS), 1, STATE_THREADS, STATES_SHARED, d.channels,
        d.decays, d.w, d.p, d.u, d.slot_device, d.rows, d.pieces, 0, d.delta);
}
static void run_gated_norm(const delta_layer &d) {
    RUN(prompt_gated_norm, d.rows, 1, 256, 0, d.delta, d.proj, d.width, d.norm, d.mix);
}

static void check_delta() {
    const int cases[][2] = {{1, 0}, {64, 0}, {70, 0}, {200, 37}, {30, 10}, {300, 64}};
    for (const int *c : cases) {
        int rows = c[0];
        delta_layer d = make_delta(rows, c[1]);
        char what[80];
        size_t n = (size_t)rows * CONV_DIM, state = (size_t)V_HEADS * DIM * DIM;
        float *expected = take<float>(n), *out = take<float>((size_t)rows * V_DIM);
        poison(d.channels, n * 2);
        float *proj = floated(d.proj, (size_t)rows * d.width);
        RUN(plain_convolve, 2 * K_HEADS + V_HEADS, rows, DIM, 0, proj, d.width, d.taps,
            d.slot.conv_in, expected);
        run_convolve(d);
        snprintf(what, sizeof what, "convolution, %d rows at %d", rows, c[1]);
        compare(what, widened(d.channels, n), expected, n, 4e-3);

        /* From the same rounded channels, and from exact ones. */
        float *rounded = widened(d.channels, n), *work = take<float>(state);
        float *exact = take<float>((size_t)rows * V_DIM), *exact_state = take<float>(state);
        copy(work, d.slot.state_in, state * 4);
        RUN(plain_delta, V_HEADS, 1, DIM, 0, rounded, d.ba, d.rate, d.dt_bias, work, rows, out);
        copy(exact_state, d.slot.state_in, state * 4);
        RUN(plain_delta, V_HEADS, 1, DIM, 0, expected, d.ba, d.rate, d.dt_bias, exact_state, rows,
            exact);
        poison(d.delta, (size_t)rows * V_DIM * 2);
        run_pieces(d);
        run_states(d);
        snprintf(what, sizeof what, "delta rule, %d rows at %d", rows, c[1]);
        float *delta = floated(d.delta, (size_t)rows * V_DIM);
        compare(what, delta, out, (size_t)rows * V_DIM, 6e-3);
        compare("  its state", d.slot.state_out, work, state, 6e-3);
        compare("  against unrounded channels", delta, exact, (size_t)rows * V_DIM, 8e-3);

        float *normed = take<float>((size_t)rows * V_DIM);
        RUN(plain_gated_norm, V_HEADS, rows, DIM, 0, delta, proj, d.width, d.norm, normed);
        run_gated_norm(d);
        compare("  gated norm", restored(d.mix, rows, V_DIM), normed, (size_t)rows * V_DIM, 4e-3);
        release();
    }
}

struct attention_layer {
    int rows, width, segments;
    fp16 *proj;
    float *q_norm, *k_norm, *inv_freq, *parts;
    float2 *sums;
    bf16 *queries, *mix;
    cuda_slot slot, *slot_device;
};
static attention_layer make_attention(int rows, int pos) {
    attention_layer a = {};
    a.rows = rows;
    a.width = 2 * Q_DIM + 2 * KV_DIM;
    a.proj = halves((size_t)rows * a.width, -2, 2);
    a.q_norm = floats(HEAD, 0.5f, 2.5f);
    a.k_norm = floats(HEAD, 0.5f, 2.5f);
    std::vector<float> f(32);
    for (int i = 0; i < 32; i++) f[i] = (float)pow(SHAPE_ROPE_THETA, -2.0 * i / 64);
    a.inv_freq = take<float>(32);
    send(a.inv_freq, f.data(), 128);
    a.queries = take<bf16>((size_t)rows * Q_DIM);
    a.mix = take<bf16>((size_t)rows * Q_DIM);
    a.slot.pos = pos;
    a.slot.capacity = pos + rows + 5;
    size_t kv = (size_t)KV_HEADS * (size_t)a.slot.capacity * HEAD;
    a.slot.keys = bf16s(kv, -2, 2);
    a.slot.values = bf16s(kv, -1, 1);
    a.slot_device = take<cuda_slot>(1);
    send(a.slot_device, &a.slot, sizeof a.slot);
    a.segments = (pos + rows + PREFILL_SEGMENT - 1) / PREFILL_SEGMENT;
    size_t lines = (size_t)rows * Q_HEADS * (size_t)(rows > 512 ? 1 : a.segments);
    a.parts = take<float>(lines * HEAD);
    a.sums = take<float2>(lines);
    return a;
}
static void run_rows(const attention_layer &a) {
    RUN(prompt_attention_rows, a.rows, 1, 256, 0, a.proj, a.width, a.q_norm, a.k_norm, a.inv_freq,
        a.slot_device, 0, a.queries);
}
/* split: by segments, then joined. */
static void run_flash(const attention_layer &a, int rows, bool split) {
    RUN(prompt_flash, blocks(rows, TOKENS), KV_HEADS * (split ? a.segments : 1), FLASH_THREADS,
        FLASH_SHARED, a.queries, a.proj, a.width, a.slot_device, rows, 0, a.mix, a.parts, a.sums,
        (int)split);
    if (split) {
        RUN(prompt_join, rows, 1, 256, 0, a.parts, a.sums, a.proj, a.width, a.slot_device, rows,
            a.mix);
    }
}

static void check_attention() {
    const int cases[][2] = {{1, 0},
                            {5, 62},
                            {64, 0},
                            {130, 0},
                            {33, 1000},
                            {50, PREFILL_SEGMENT - 20},
                            {45, 2 * PREFILL_SEGMENT + 100}};
    for (const int *c : cases) {
        int rows = c[0], heads = Q_HEADS + 2 * KV_HEADS, most = c[1] + rows;
        attention_layer a = make_attention(rows, c[1]);
        char what[80];
        float *expected = take<float>((size_t)rows * heads * HEAD);
        float *proj = floated(a.proj, (size_t)rows * a.width);
        RUN(plain_rows, heads, rows, HEAD, 0, proj, a.width, a.q_norm, a.k_norm, a.inv_freq, c[1],
            expected);
        run_rows(a);
        float *queries = widened(a.queries, (size_t)rows * Q_DIM);
        std::vector<float> all = fetch(expected, (size_t)rows * heads * HEAD), q;
        for (int r = 0; r < rows; r++) {
            q.insert(q.end(), &all[(size_t)r * heads * HEAD],
                     &all[(size_t)r * heads * HEAD] + Q_DIM);
        }
        float *expected_q = take<float>(q.size());
        send(expected_q, q.data(), q.size() * 4);
        snprintf(what, sizeof what, "queries, %d rows at %d", rows, c[1]);
        compare(what, queries, expected_q, q.size(), 4e-3);
        for (int kind = 0; kind < 2; kind++) {
            const bf16 *from = (kind ? a.slot.values : a.slot.keys) + (size_t)c[1] * HEAD;
            std::vector<float> kv;
            for (int r = 0; r < rows; r++) {
                const float *row = &all[((size_t)r * heads + Q_HEADS + kind * KV_HEADS) * HEAD];
                kv.insert(kv.end(), row, row + HEAD);
            }
            float *expected_kv = take<float>(kv.size());
            send(expected_kv, kv.data(), kv.size() * 4);
            compare(kind ? "  values of head 0" : "  keys of head 0",
                    widened(from, (size_t)rows * HEAD), expected_kv, kv.size(), 4e-3);
        }
        float *scores = take<float>((size_t)rows * Q_HEADS * most);
        float *mix = take<float>((size_t)rows * Q_DIM);
        RUN(plain_attention, Q_HEADS, rows, HEAD, 0, a.queries, proj, a.width, a.slot_device, 0,
            scores, most, mix);
        poison(a.mix, (size_t)rows * Q_DIM * 2);
        poison(a.parts, (size_t)rows * Q_DIM * 4 * (size_t)a.segments);
        run_flash(a, rows, false);
        snprintf(what, sizeof what, "attention, %d rows at %d", rows, c[1]);
        compare(what, restored(a.mix, rows, Q_DIM), mix, (size_t)rows * Q_DIM, 6e-3);
        if (rows > 40) { /* the first rows alone give the same bits */
            bf16 *whole = take<bf16>((size_t)rows * Q_DIM);
            copy(whole, a.mix, (size_t)rows * Q_DIM * 2);
            poison(a.mix, (size_t)rows * Q_DIM * 2);
            run_flash(a, rows, true);
            same_bits("  by segments", a.mix, whole, (size_t)rows * Q_DIM * 2);
            run_flash(a, 37, false);
            same_bits("  its first 37 rows alone", a.mix, whole, (size_t)37 * Q_DIM * 2);
        }
        release();
    }
}

#include "prefill_times.h"

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    timing = argc > 1 && strcmp(argv[1], "time") == 0;
    for (int i = 2; i < argc; i++) only = std::max(only, atoi(argv[i]));
    start();
    struct part {
        const char *name;
        void (*check)(), (*time)();
    } parts[] = {{"gemm", check_gemm, time_gemm},
                 {"decisive", check_decisive, time_decisive},
                 {"experts", check_experts, time_experts},
                 {"delta", check_delta, time_delta},
                 {"attention", check_attention, time_attention},
                 {"small", nullptr, time_small}};
    for (const part &p : parts) {
        bool wanted = argc < (only ? 4 : 3);
        for (int i = 2; i < argc; i++) wanted |= strcmp(argv[i], p.name) == 0;
        void (*run)() = timing ? p.time : p.check;
        if (wanted && run) run();
        release();
    }
    if (!timing) printf("%d failures\n", failures);
    return failures != 0;
}
