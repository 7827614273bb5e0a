/* The persistent decode kernel alone: random weights of the compiled shape, one token checked
 * against a plain implementation that shares nothing with it but the tiles' index functions, then
 * speed at several depths. Built with nvcc alone (docs/cuda-decode.md):
 *   decode_bench check   values, determinism      decode_bench time [runs]   speed
 *   decode_bench few     a few steps of four layers, for tools that are slow
 * With -DDECODE_PROFILE the time of each stage too, as block 0 sees it. */
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backend/cuda/kernels/decode_fuse.cu"
#include "backend/cuda/kernels/decode_step.cu"

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            printf("FAIL %s: %s (line %d)\n", #call, cudaGetErrorString(e_), __LINE__);            \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

using namespace decode;
static int blocks;

/* ---- random contents --------------------------------------------------------------------------
 */

__device__ uint32_t hash(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)(x >> 32);
}
__device__ float uniform(uint64_t x) {
    return (float)(hash(x) >> 8) * (1.0f / 16777216);
}
__device__ uint32_t bf(float x) {
    return to_bf16(x);
}

/* scale: of a code; bias centres the codes. Every fourth scale is negative. */
__global__ void fill_tiles(uint8_t *tiles, size_t bytes, int tile, float scale, float centre,
                           uint64_t seed) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes / 4; i += step) {
        uint32_t word = hash(seed + i);
        if (4 * i % (size_t)tile >= TILE_CODES) {
            float s = scale * (0.5f + uniform(~(seed + i)));
            if ((word & 3) == 0) s = -s;
            word = bf(s) | bf(-centre * s) << 16;
        }
        reinterpret_cast<uint32_t *>(tiles)[i] = word;
    }
}
__global__ void fill_floats(float *x, size_t n, float low, float high, uint64_t seed) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        x[i] = low + (high - low) * uniform(seed + i);
    }
}
__global__ void fill_bf16(uint16_t *x, size_t n, float low, float high, uint64_t seed) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += step) {
        x[i] = to_bf16(low + (high - low) * uniform(seed + i));
    }
}

static char *arena, *arena_end;
static uint64_t seed = 1;
template <typename T> static T *take(size_t n) {
    T *at = reinterpret_cast<T *>(arena);
    arena += (n * sizeof(T) + 255) / 256 * 256;
    if (arena > arena_end) {
        printf("FAIL arena too small\n");
        exit(1);
    }
    return at;
}
static uint8_t *tiles_of(size_t n, int bytes, float scale, float centre) {
    uint8_t *at = take<uint8_t>(n * (size_t)bytes);
    fill_tiles<<<1056, 512>>>(at, n * (size_t)bytes, bytes, scale, centre, seed << 40);
    seed++;
    return at;
}
static float *floats_of(size_t n, float low, float high) {
    float *at = take<float>(n);
    fill_floats<<<264, 512>>>(at, n, low, high, seed++ << 40);
    return at;
}

struct Model {
    std::vector<decode_layer> layers;
    decode_layer *table;
    decode_args a;
    int n_layers;
};

static const int GDN_TILES = row_tiles(GDN_ROWS), ATTN_TILES = row_tiles(ATTN_ROWS);

static Model make_model(int n_layers) {
    Model m = {};
    m.n_layers = n_layers;
    size_t layer_bytes =
        ((size_t)EXPERTS + 1) * ((size_t)SHARED_TILES * SLICES * TILE_WIDE_BYTES +
                                 (size_t)SHARED_SLICES * DOWN_TILES * TILE_DOWN_BYTES) +
        (size_t)std::max(GDN_TILES, ATTN_TILES) * SLICES * TILE_WIDE_BYTES +
        (size_t)(H / 32) * (QDIM / 128 + VDIM / 128) * TILE_WIDE_BYTES +
        (size_t)(ROUTER_TILES + 1) * SLICES * TILE_BYTE_BYTES +
        (size_t)OUT_PARTS * std::max(GDN_SLICES, ATTN_SLICES) * SCORE_BYTES + (size_t)CONV * 16 +
        (1 << 17);
    size_t bytes = layer_bytes * (size_t)n_layers +
                   (size_t)row_tiles(SHAPE_VOCAB) * SLICES * TILE_WIDE_BYTES +
                   (size_t)SHAPE_VOCAB * (H / 2 + H / 16) + (1 << 20);
    CHECK(cudaMalloc(&arena, bytes));
    arena_end = arena + bytes;
    float unit = 1.0f / sqrtf((float)H) / 4.6f;
    for (int l = 0; l < n_layers; l++) {
        decode_layer d = {};
        bool attention = (l + 1) % SHAPE_ATTENTION_EVERY == 0;
        d.in = tiles_of((size_t)(attention ? ATTN_TILES : GDN_TILES) * SLICES, TILE_WIDE_BYTES,
                        unit, 7.5f);
        int slices = attention ? QDIM / 128 : VHEADS;
        d.out = tiles_of((size_t)slices * (H / 32), TILE_WIDE_BYTES,
                         1.0f / sqrtf(128.0f * (float)slices) / 4.6f, 7.5f);
        d.gate_up = tiles_of((size_t)EXPERTS * (SHAPE_EXPERT_WIDTH / 16) * SLICES, TILE_WIDE_BYTES,
                             unit, 7.5f);
        d.down = tiles_of((size_t)EXPERTS * EXPERT_JOBS * DOWN_TILES, TILE_DOWN_BYTES,
                          2.0f / sqrtf((float)SHAPE_EXPERT_WIDTH) / 4.6f, 7.5f);
        d.shared_in = tiles_of((size_t)SHARED_TILES * SLICES, TILE_WIDE_BYTES, unit, 7.5f);
        d.shared_out = tiles_of((size_t)SHARED_SLICES * DOWN_TILES, TILE_DOWN_BYTES,
                                2.0f / sqrtf((float)SHAPE_SHARED_WIDTH) / 4.6f, 7.5f);
        d.router = tiles_of((size_t)(ROUTER_TILES + 1) * SLICES, TILE_BYTE_BYTES,
                            2.0f / sqrtf((float)H) / 74.0f, 127.5f);
        d.input_norm = floats_of(H, 0.5f, 1.5f);
        d.post_norm = floats_of(H, 0.5f, 1.5f);
        if (attention) {
            d.q_norm = floats_of(HEAD, 0.5f, 1.5f);
            d.k_norm = floats_of(HEAD, 0.5f, 1.5f);
        } else {
            d.conv = floats_of((size_t)CONV * 4, -0.6f, 0.6f);
            d.decay_rate = floats_of(VHEADS, 0.05f, 1.0f);
            d.dt_bias = floats_of(VHEADS, -1.0f, 1.0f);
            d.gdn_norm = floats_of(128, 0.5f, 1.5f);
        }
        uint8_t *scores = take<uint8_t>((size_t)slices * OUT_PARTS * SCORE_BYTES);
        decode_fuse<<<dim3(OUT_PARTS * SCORE_TILES, (unsigned)slices), FUSE_THREADS>>>(
            d.router, d.post_norm, d.out, scores);
        d.out_scores = scores;
        m.layers.push_back(d);
    }
    m.a.lm_head =
        tiles_of((size_t)row_tiles(SHAPE_VOCAB) * SLICES, TILE_WIDE_BYTES, 2 * unit, 7.5f);
    m.a.final_norm = floats_of(H, 0.5f, 1.5f);
    uint8_t *codes = take<uint8_t>((size_t)SHAPE_VOCAB * H / 2);
    fill_tiles<<<1056, 512>>>(codes, (size_t)SHAPE_VOCAB * H / 2, TILE_CODES, 0, 0, 77);
    uint16_t *scales = take<uint16_t>((size_t)SHAPE_VOCAB * H / 64);
    uint16_t *biases = take<uint16_t>((size_t)SHAPE_VOCAB * H / 64);
    fill_bf16<<<264, 512>>>(scales, (size_t)SHAPE_VOCAB * H / 64, 0.002f, 0.006f, 79);
    fill_bf16<<<264, 512>>>(biases, (size_t)SHAPE_VOCAB * H / 64, -0.035f, -0.025f, 80);
    m.a.embed = {codes, scales, biases, SHAPE_VOCAB, H, 4, 0};
    std::vector<float> inv;
    for (int i = 0; i < SHAPE_ROTARY_DIM / 2; i++) {
        inv.push_back(1.0f / (float)pow(SHAPE_ROPE_THETA, 2.0 * i / SHAPE_ROTARY_DIM));
    }
    float *f;
    CHECK(cudaMalloc(&f, inv.size() * 4));
    CHECK(cudaMemcpy(f, inv.data(), inv.size() * 4, cudaMemcpyHostToDevice));
    m.a.inv_freq = f;
    CHECK(cudaMalloc(&m.table, m.layers.size() * sizeof(decode_layer)));
    CHECK(cudaMemcpy(m.table, m.layers.data(), m.layers.size() * sizeof(decode_layer),
                     cudaMemcpyHostToDevice));
    m.a.layers = m.table;
    decode_scratch &x = m.a.x;
    CHECK(cudaMalloc(&x.sums, 2 * STEP_SUMS * 8));
    CHECK(cudaMemset(x.sums, 0, 2 * STEP_SUMS * 8));
    CHECK(cudaMalloc(&x.kept, (size_t)blocks * DECODE_KEPT * 4));
    CHECK(cudaMalloc(&x.proj, (size_t)std::max(GDN_TILES, ATTN_TILES) * 32 * 8));
    CHECK(cudaMalloc(&x.gate, 8));
    CHECK(cudaMalloc(&x.shared, SHAPE_SHARED_WIDTH * 8));
    CHECK(cudaMalloc(&x.parts, (size_t)blocks * QPK * HEAD * 4));
    CHECK(cudaMalloc(&x.parts_ml, (size_t)blocks * QPK * 2 * 4));
    CHECK(cudaMalloc(&x.best, 8));
    CHECK(cudaMalloc(&x.counter, 256));
    CHECK(cudaMemset(x.proj, 0, (size_t)std::max(GDN_TILES, ATTN_TILES) * 32 * 8));
    CHECK(cudaMemset(x.gate, 0, 8));
    CHECK(cudaMemset(x.shared, 0, SHAPE_SHARED_WIDTH * 8));
    CHECK(cudaMalloc(&x.inner, TOP_K * SHAPE_EXPERT_WIDTH * 8));
    CHECK(cudaMemset(x.inner, 0, TOP_K * SHAPE_EXPERT_WIDTH * 8));
    CHECK(cudaMemset(x.best, 0, 8));
    CHECK(cudaMemset(x.counter, 0, 256));
    CHECK(cudaMalloc(&m.a.logits, (size_t)SHAPE_VOCAB * 4));
    CHECK(cudaMalloc(&m.a.result, sizeof(cuda_result)));
    CHECK(cudaMalloc(&m.a.finite, 4));
    m.a.vocab_used = SHAPE_VOCAB;
    CHECK(cudaDeviceSynchronize());
    return m;
}

struct Sequence {
    size_t state_n, conv_n, kv_n;
    float *state[2], *conv[2];
    uint16_t *keys, *values;
    int32_t *token;
    cuda_slot slot[2];
    int capacity;
};

static Sequence make_sequence(int n_layers, int capacity) {
    Sequence q = {};
    size_t attention = (size_t)n_layers / SHAPE_ATTENTION_EVERY, gdn = (size_t)n_layers - attention;
    q.capacity = capacity;
    q.state_n = gdn * VHEADS * 128 * 128;
    q.conv_n = gdn * 3 * CONV;
    q.kv_n = std::max<size_t>(attention, 1) * KV_HEADS * (size_t)capacity * HEAD;
    for (int i = 0; i < 2; i++) {
        CHECK(cudaMalloc(&q.state[i], q.state_n * 4));
        CHECK(cudaMalloc(&q.conv[i], q.conv_n * 4));
        fill_floats<<<264, 512>>>(q.state[i], q.state_n, -0.2f, 0.2f, 900 + (uint64_t)i);
        fill_floats<<<264, 512>>>(q.conv[i], q.conv_n, -1.0f, 1.0f, 910 + (uint64_t)i);
    }
    CHECK(cudaMalloc(&q.keys, q.kv_n * 2));
    CHECK(cudaMalloc(&q.values, q.kv_n * 2));
    fill_bf16<<<1056, 512>>>(q.keys, q.kv_n, -2, 2, 920ull << 40);
    fill_bf16<<<1056, 512>>>(q.values, q.kv_n, -1, 1, 921ull << 40);
    CHECK(cudaMalloc(&q.token, 4));
    CHECK(cudaDeviceSynchronize());
    return q;
}

/* Slot for a step at pos from state buffer `from`. */
static cuda_slot slot_for(const Sequence &q, int from, int input, int pos) {
    cuda_slot s = {};
    s.state_in = q.state[from], s.state_out = q.state[from ^ 1];
    s.conv_in = q.conv[from], s.conv_out = q.conv[from ^ 1];
    s.keys = q.keys, s.values = q.values, s.token = q.token;
    s.input = input, s.pos = pos, s.capacity = q.capacity, s.sample = 1;
    return s;
}

static uint32_t barrier_count, step_count;
static void launch(Model &m, const cuda_slot &slot, int n_layers) {
    decode_args a = m.a;
    a.slot = slot;
    a.n_layers = n_layers;
    a.pick = 1;
    a.barrier = barrier_count;
    a.step = step_count++;
    barrier_count += (uint32_t)(n_layers / SHAPE_ATTENTION_EVERY * blocks);
    void *arguments[] = {&a};
    CHECK(cudaLaunchCooperativeKernel(decode_step, blocks, DECODE_THREADS, arguments,
                                      sizeof(Shared), NULL));
}

/* ---- the plain implementation -----------------------------------------------------------------
 */

enum Layout { WIDE, WIDE_SLICES, DOWN, BYTES };

__device__ float weight_of(const uint8_t *m, Layout kind, int rows, int cols, int r, int k) {
    const uint8_t *t;
    uint32_t pair;
    int code;
    if (kind == DOWN) {
        t = m + ((size_t)(k / 32) * (rows / 128) + r / 128) * TILE_DOWN_BYTES;
        code = t[tile_down_codes(r % 128, k % 32)];
        pair = *reinterpret_cast<const uint32_t *>(t + tile_down_scale(r % 128));
    } else if (kind == BYTES) {
        t = m + ((size_t)(r / 16) * (cols / 128) + k / 128) * TILE_BYTE_BYTES;
        pair = *reinterpret_cast<const uint32_t *>(t + tile_byte_scale(r % 16, k % 128 / 64));
        return fmaf(bf16_low(pair), (float)t[tile_byte_codes(r % 16, k % 128)], bf16_high(pair));
    } else {
        size_t tile = kind == WIDE ? (size_t)(r / 32) * (cols / 128) + k / 128
                                   : (size_t)(k / 128) * (rows / 32) + r / 32;
        t = m + tile * TILE_WIDE_BYTES;
        code = t[tile_wide_codes(r % 32, k % 128)];
        pair = *reinterpret_cast<const uint32_t *>(t + tile_wide_scale(r % 32, k % 128 / 64));
    }
    code = k % 2 ? code >> 4 : code & 15;
    return fmaf(bf16_low(pair), (float)code, bf16_high(pair));
}

/* y[r] (+)= factor * sum_k M[row(r)][k] x[k], a warp a row; row(r) = first + r * stride */
__global__ void product(const uint8_t *m, Layout kind, int rows, int cols, int first, int stride,
                        int n, const float *x, float *y, const float *factor, int add) {
    int r = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= n) return;
    double sum = 0;
    for (int k = lane; k < cols; k += 32) {
        sum += (double)weight_of(m, kind, rows, cols, first + r * stride, k) * (double)x[k];
    }
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) y[r] = (float)(sum * (factor ? (double)*factor : 1.0)) + (add ? y[r] : 0.0f);
}
static void multiply(const uint8_t *m, Layout kind, int rows, int cols, const float *x, float *y,
                     int n, int first = 0, int stride = 1, const float *factor = NULL,
                     int add = 0) {
    product<<<(n + 7) / 8, 256>>>(m, kind, rows, cols, first, stride, n, x, y, factor, add);
}

__global__ void ref_embed(cuda_mat e, int token, float *h) {
    for (int k = threadIdx.x; k < H; k += blockDim.x) {
        int code = e.codes[(size_t)token * (H / 2) + k / 2];
        code = k % 2 ? code >> 4 : code & 15;
        h[k] = bf16_low(e.scales[(size_t)token * (H / 64) + k / 64]) * (float)code +
               bf16_low(e.biases[(size_t)token * (H / 64) + k / 64]);
    }
}
__global__ void ref_norm(const float *x, const float *weight, float *y, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += (double)x[i] * x[i];
    float r = (float)(1.0 / sqrt(sum / n + 1e-6));
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = x[i] * r * weight[i];
}
__global__ void ref_gdn(const float *proj, decode_layer l, const float *conv_in, float *conv_out,
                        const float *state_in, float *state_out, float *mix) {
    __shared__ float q[128], k[128], v[128], o[128];
    int head = blockIdx.x, i = threadIdx.x;
    float c[3];
    for (int p = 0; p < 3; p++) {
        int ch = p == 0   ? head / 2 * 128 + i
                 : p == 1 ? KDIM + head / 2 * 128 + i
                          : 2 * KDIM + head * 128 + i;
        const float *w = l.conv + 4 * ch;
        float h0 = conv_in[ch], h1 = conv_in[CONV + ch], h2 = conv_in[2 * CONV + ch], u = proj[ch];
        float x = w[0] * h0 + w[1] * h1 + w[2] * h2 + w[3] * u;
        c[p] = x / (1 + expf(-x));
        conv_out[ch] = h1, conv_out[CONV + ch] = h2, conv_out[2 * CONV + ch] = u;
    }
    q[i] = c[0], k[i] = c[1], v[i] = c[2];
    __syncthreads();
    double qq = 0, kk = 0;
    for (int j = 0; j < 128; j++) qq += (double)q[j] * q[j], kk += (double)k[j] * k[j];
    float qn = (float)(1 / sqrt(qq + 1e-6) / sqrt(128.0)), kn = (float)(1 / sqrt(kk + 1e-6));
    float b = proj[CONV + VDIM + head], a = proj[CONV + VDIM + VHEADS + head];
    float beta = 1 / (1 + expf(-b));
    float decay = expf(-l.decay_rate[head] * log1pf(expf(a + l.dt_bias[head])));
    const float *s = state_in + (size_t)head * 128 * 128 + i;
    double m = 0, out = 0;
    for (int j = 0; j < 128; j++) m += (double)decay * s[128 * j] * (k[j] * kn);
    float d = beta * (v[i] - (float)m);
    for (int j = 0; j < 128; j++) {
        float x = decay * s[128 * j] + k[j] * kn * d;
        state_out[(size_t)head * 128 * 128 + 128 * j + i] = x;
        out += (double)x * (q[j] * qn);
    }
    o[i] = (float)out;
    __syncthreads();
    double oo = 0;
    for (int j = 0; j < 128; j++) oo += (double)o[j] * o[j];
    float z = proj[CONV + head * 128 + i];
    mix[head * 128 + i] =
        o[i] * (float)(1 / sqrt(oo / 128 + 1e-6)) * l.gdn_norm[i] * z / (1 + expf(-z));
}
__device__ void ref_turn(float *x, int i, int pos, const float *inv_freq) {
    if (i >= SHAPE_ROTARY_DIM / 2) return;
    float angle = (float)pos * inv_freq[i], c = cosf(angle), s = sinf(angle);
    float p = x[i], q = x[i + SHAPE_ROTARY_DIM / 2];
    x[i] = p * c - q * s;
    x[i + SHAPE_ROTARY_DIM / 2] = q * c + p * s;
}
__global__ void ref_rows(const float *proj, decode_layer l, int pos, const float *inv_freq,
                         uint16_t *keys, uint16_t *values, int capacity) {
    __shared__ float x[HEAD];
    int kv = blockIdx.x, i = threadIdx.x;
    float v = proj[2 * QDIM + kv * HEAD + i];
    x[i] = v;
    __syncthreads();
    double sum = 0;
    for (int j = 0; j < HEAD; j++) sum += (double)x[j] * x[j];
    __syncthreads();
    x[i] = v * (float)(1 / sqrt(sum / HEAD + 1e-6)) * l.k_norm[i];
    __syncthreads();
    ref_turn(x, i, pos, inv_freq);
    __syncthreads();
    size_t at = ((size_t)kv * capacity + pos) * HEAD + i;
    keys[at] = to_bf16(x[i]);
    values[at] = to_bf16(proj[2 * QDIM + KVDIM + kv * HEAD + i]);
}
__global__ void ref_attend(const float *proj, decode_layer l, int pos, const float *inv_freq,
                           const uint16_t *keys, const uint16_t *values, int capacity,
                           double *scores, float *mix) {
    __shared__ float x[HEAD];
    int head = blockIdx.x, i = threadIdx.x, kv = head / QPK;
    double *s = scores + (size_t)head * capacity;
    float v = proj[(size_t)head * 2 * HEAD + i];
    x[i] = v;
    __syncthreads();
    double sum = 0;
    for (int j = 0; j < HEAD; j++) sum += (double)x[j] * x[j];
    __syncthreads();
    x[i] = v * (float)(1 / sqrt(sum / HEAD + 1e-6)) * l.q_norm[i];
    __syncthreads();
    ref_turn(x, i, pos, inv_freq);
    __syncthreads();
    for (int t = i; t <= pos; t += HEAD) {
        double dot = 0;
        const uint16_t *k = keys + ((size_t)kv * capacity + t) * HEAD;
        for (int j = 0; j < HEAD; j++) dot += (double)x[j] * from_bf16(k[j]);
        s[t] = dot / 16;
    }
    __syncthreads();
    double top = -1e300, total = 0, out = 0;
    for (int t = 0; t <= pos; t++) top = max(top, s[t]);
    for (int t = 0; t <= pos; t++) {
        double p = exp(s[t] - top);
        total += p;
        out += p * from_bf16(values[((size_t)kv * capacity + t) * HEAD + i]);
    }
    float gate = proj[((size_t)head * 2 + 1) * HEAD + i];
    mix[head * HEAD + i] = (float)(out / total) / (1 + expf(-gate));
}
__global__ void ref_choose(const float *scores, int *ids, float *weights, float *gap) {
    double sum = 0;
    for (int k = 0; k < TOP_K + 1; k++) {
        int best = -1;
        for (int e = 0; e < EXPERTS; e++) {
            bool taken = false;
            for (int j = 0; j < k; j++) taken |= ids[j] == e;
            if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
        }
        if (k == TOP_K) {
            *gap = fminf(*gap, scores[ids[k - 1]] - scores[best]);
            break;
        }
        ids[k] = best;
        sum += exp((double)scores[best] - scores[ids[0]]);
    }
    for (int k = 0; k < TOP_K; k++) {
        weights[k] = (float)(exp((double)scores[ids[k]] - scores[ids[0]]) / sum);
    }
    weights[TOP_K] = 1 / (1 + expf(-scores[EXPERTS]));
}
__global__ void ref_inner(const float *gate_up, float *inner, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) inner[i] = gate_up[2 * i] / (1 + expf(-gate_up[2 * i])) * gate_up[2 * i + 1];
}

struct Plain {
    float *h, *x, *proj, *mix, *scores, *weights, *gate_up, *inner, *logits, *gap;
    int *ids;
    double *attention;
    float *state, *conv;
    uint16_t *keys, *values;
};

static Plain make_plain(const Sequence &q) {
    Plain p;
    CHECK(cudaMalloc(&p.h, H * 4));
    CHECK(cudaMalloc(&p.x, H * 4));
    CHECK(cudaMalloc(&p.proj, (size_t)std::max(GDN_TILES, ATTN_TILES) * 32 * 4));
    CHECK(cudaMalloc(&p.mix, (size_t)std::max(QDIM, VDIM) * 4));
    CHECK(cudaMalloc(&p.scores, (EXPERTS + 1) * 4));
    CHECK(cudaMalloc(&p.weights, 64));
    CHECK(cudaMalloc(&p.gate_up, SHAPE_EXPERT_WIDTH * 8));
    CHECK(cudaMalloc(&p.inner, SHAPE_EXPERT_WIDTH * 4));
    CHECK(cudaMalloc(&p.logits, (size_t)SHAPE_VOCAB * 4));
    CHECK(cudaMalloc(&p.gap, 4));
    CHECK(cudaMalloc(&p.ids, 64));
    CHECK(cudaMalloc(&p.attention, (size_t)SHAPE_Q_HEADS * (size_t)q.capacity * 8));
    CHECK(cudaMalloc(&p.state, q.state_n * 4));
    CHECK(cudaMalloc(&p.conv, q.conv_n * 4));
    CHECK(cudaMalloc(&p.keys, q.kv_n * 2));
    CHECK(cudaMalloc(&p.values, q.kv_n * 2));
    CHECK(cudaMemcpy(p.keys, q.keys, q.kv_n * 2, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemcpy(p.values, q.values, q.kv_n * 2, cudaMemcpyDeviceToDevice));
    return p;
}

static void plain_step(const Model &m, const Sequence &q, Plain &p, int from, int token, int pos,
                       int n_layers) {
    float far = 1e9f;
    CHECK(cudaMemcpy(p.gap, &far, 4, cudaMemcpyHostToDevice));
    ref_embed<<<1, 256>>>(m.a.embed, token, p.h);
    for (int l = 0; l < n_layers; l++) {
        decode_layer d = m.layers[(size_t)l];
        bool attention = (l + 1) % SHAPE_ATTENTION_EVERY == 0;
        size_t kind = attention ? (size_t)l / 4 : (size_t)(l - l / 4);
        ref_norm<<<1, 256>>>(p.h, d.input_norm, p.x, H);
        int rows = attention ? ATTN_ROWS : GDN_ROWS, wide = attention ? QDIM : VDIM;
        multiply(d.in, WIDE, rows, H, p.x, p.proj, rows);
        if (attention) {
            size_t at = kind * KV_HEADS * (size_t)q.capacity * HEAD;
            ref_rows<<<KV_HEADS, HEAD>>>(p.proj, d, pos, m.a.inv_freq, p.keys + at, p.values + at,
                                         q.capacity);
            ref_attend<<<SHAPE_Q_HEADS, HEAD>>>(p.proj, d, pos, m.a.inv_freq, p.keys + at,
                                                p.values + at, q.capacity, p.attention, p.mix);
        } else {
            ref_gdn<<<VHEADS, 128>>>(
                p.proj, d, q.conv[from] + kind * 3 * CONV, p.conv + kind * 3 * CONV,
                q.state[from] + kind * VHEADS * 16384, p.state + kind * VHEADS * 16384, p.mix);
        }
        multiply(d.out, WIDE_SLICES, H, wide, p.mix, p.h, H, 0, 1, NULL, 1);
        ref_norm<<<1, 256>>>(p.h, d.post_norm, p.x, H);
        multiply(d.router, BYTES, EXPERTS + 1, H, p.x, p.scores, EXPERTS + 1);
        ref_choose<<<1, 1>>>(p.scores, p.ids, p.weights, p.gap);
        int ids[TOP_K];
        CHECK(cudaMemcpy(ids, p.ids, sizeof ids, cudaMemcpyDeviceToHost));
        for (int k = 0; k <= TOP_K; k++) {
            int width = k < TOP_K ? SHAPE_EXPERT_WIDTH : SHAPE_SHARED_WIDTH;
            size_t e = k < TOP_K ? (size_t)ids[k] : 0;
            const uint8_t *in = k < TOP_K ? d.gate_up : d.shared_in;
            const uint8_t *out = k < TOP_K ? d.down : d.shared_out;
            in += e * (size_t)(width / 16) * SLICES * TILE_WIDE_BYTES;
            out += e * (size_t)(width / 32) * DOWN_TILES * TILE_DOWN_BYTES;
            multiply(in, WIDE, 2 * width, H, p.x, p.gate_up, 2 * width);
            ref_inner<<<(width + 127) / 128, 128>>>(p.gate_up, p.inner, width);
            multiply(out, DOWN, H, width, p.inner, p.h, H, 0, 1, p.weights + k, 1);
        }
    }
    ref_norm<<<1, 256>>>(p.h, m.a.final_norm, p.x, H);
    multiply(m.a.lm_head, WIDE, SHAPE_VOCAB, H, p.x, p.logits, SHAPE_VOCAB);
    CHECK(cudaDeviceSynchronize());
}

/* ---- checks -----------------------------------------------------------------------------------
 */

template <typename T> static std::vector<T> fetch_array(const T *from, size_t n) {
    std::vector<T> v(n);
    CHECK(cudaMemcpy(v.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
static std::vector<float> fetch_words(const decode_word *from, size_t n) {
    std::vector<float> v;
    for (decode_word w : fetch_array(from, n)) v.push_back(w.value);
    return v;
}
static double distance(const std::vector<float> &a, const std::vector<float> &b) {
    double d = 0, n = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!std::isfinite(a[i])) return INFINITY;
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        n += (double)b[i] * b[i];
    }
    return std::sqrt(d / (n > 0 ? n : 1));
}
/* a times the positive factor that brings it closest to b. */
static std::vector<float> alike(std::vector<float> a, const std::vector<float> &b) {
    double ab = 0, aa = 0;
    for (size_t i = 0; i < a.size(); i++) ab += (double)a[i] * b[i], aa += (double)a[i] * a[i];
    for (float &x : a) x = (float)(x * std::max(ab / aa, 0.0));
    return a;
}
/* Where the TOP_K largest are. */
static std::vector<int> largest(const std::vector<float> &x) {
    std::vector<int> at(x.size());
    for (size_t i = 0; i < x.size(); i++) at[i] = (int)i;
    std::stable_sort(at.begin(), at.end(),
                     [&](int a, int b) { return x[(size_t)a] > x[(size_t)b]; });
    at.resize(TOP_K);
    std::sort(at.begin(), at.end());
    return at;
}
static std::vector<float> widen(const std::vector<uint16_t> &x) {
    std::vector<float> y;
    for (uint16_t v : x) {
        uint32_t bits = (uint32_t)v << 16;
        float f;
        memcpy(&f, &bits, 4);
        y.push_back(f);
    }
    return y;
}

static int failures;
static void verdict(bool good, const char *what, int layers, int pos, double value) {
    if (!good) failures++;
    printf("%s layers %d pos %d %s %.3g\n", good ? "ok  " : "FAIL", layers, pos, what, value);
}

static void check(Model &m, int n_layers, int pos, int capacity, int repeats = 10) {
    Sequence q = make_sequence(n_layers, capacity);
    Plain p = make_plain(q);
    int token = 1234 % SHAPE_VOCAB;
    q.slot[0] = slot_for(q, 0, token, pos);
    CHECK(cudaMemset(m.a.logits, 0xff, (size_t)SHAPE_VOCAB * 4));
    CHECK(cudaMemset(m.a.x.proj, 0xff, (size_t)std::max(GDN_TILES, ATTN_TILES) * 32 * 8));
    CHECK(cudaMemset(q.state[1], 0xff, q.state_n * 4));
    CHECK(cudaMemset(q.conv[1], 0xff, q.conv_n * 4));
    launch(m, q.slot[0], n_layers);
    CHECK(cudaDeviceSynchronize());
    plain_step(m, q, p, 0, token, pos, n_layers);
    float gap;
    CHECK(cudaMemcpy(&gap, p.gap, 4, cudaMemcpyDeviceToHost));
    std::vector<long long> fixed =
        fetch_array(m.a.x.sums + (step_count - 1) % 2 * STEP_SUMS, STEP_SUMS);
    std::vector<float> h, scores;
    for (int i = 0; i < EXPERTS; i++) {
        long long sum = fixed[(size_t)(2 * SUM + (n_layers - 1) * EXPERTS + i)];
        scores.push_back((float)(sum >> DECODE_COUNT_BITS) / ONE);
    }
    for (int i = 0; i < H; i++) {
        long long sum = 0;
        for (int of = 0; of < 2; of++) {
            sum += fixed[(size_t)(of * SUM + residual_at(i))] >> DECODE_COUNT_BITS;
        }
        h.push_back((float)sum / ONE);
    }
    bool attention = n_layers % SHAPE_ATTENTION_EVERY == 0;
    int rows = attention ? ATTN_ROWS : GDN_ROWS;
    double e;
    e = distance(fetch_words(m.a.x.proj, (size_t)rows), fetch_array(p.proj, (size_t)rows));
    verdict(e < 1.5e-4 * n_layers, "projection", n_layers, pos, e);
    std::vector<float> expected_scores = fetch_array(p.scores, EXPERTS);
    e = distance(alike(scores, expected_scores), expected_scores);
    verdict(e < 1.5e-4 * n_layers, "router", n_layers, pos, e);
    verdict(largest(scores) == largest(expected_scores) || gap < 1e-3, "chosen experts", n_layers,
            pos, gap);
    e = std::fabs(fetch_words(m.a.x.gate, 1)[0] - fetch_array(p.scores + EXPERTS, 1)[0]);
    verdict(e < 1e-3 * n_layers, "shared gate", n_layers, pos, e);
    e = distance(h, fetch_array(p.h, H));
    verdict(e < 1.5e-4 * n_layers, "residual", n_layers, pos, e);
    e = distance(fetch_array(q.state[1], q.state_n), fetch_array(p.state, q.state_n));
    verdict(e < 3e-4, "state", n_layers, pos, e);
    e = distance(fetch_array(q.conv[1], q.conv_n), fetch_array(p.conv, q.conv_n));
    verdict(e < 3e-4, "history", n_layers, pos, e);
    e = distance(widen(fetch_array(q.keys, q.kv_n)), widen(fetch_array(p.keys, q.kv_n)));
    verdict(e < 1e-3, "keys", n_layers, pos, e);
    e = distance(widen(fetch_array(q.values, q.kv_n)), widen(fetch_array(p.values, q.kv_n)));
    verdict(e < 1e-3, "values", n_layers, pos, e);
    std::vector<float> logits = fetch_array(m.a.logits, SHAPE_VOCAB);
    std::vector<float> expected = fetch_array(p.logits, SHAPE_VOCAB);
    e = distance(logits, expected);
    verdict(e < 1.5e-4 * n_layers, "logits", n_layers, pos, e);
    cuda_result r = fetch_array(m.a.result, 1)[0];
    int best = (int)(std::max_element(logits.begin(), logits.end()) - logits.begin());
    int plain = (int)(std::max_element(expected.begin(), expected.end()) - expected.begin());
    verdict(r.token == best && r.finite == 1, "token is the largest logit", n_layers, pos, r.token);
    verdict(best == plain, "same token as plain", n_layers, pos, plain);
    for (int i = 0; i < repeats; i++) launch(m, q.slot[0], n_layers);
    CHECK(cudaDeviceSynchronize());
    std::vector<float> again = fetch_array(m.a.logits, SHAPE_VOCAB);
    verdict(memcmp(again.data(), logits.data(), (size_t)SHAPE_VOCAB * 4) == 0, "same bits again",
            n_layers, pos, 0);
    for (int i = 0; i < 2; i++) {
        cudaFree(q.state[i]), cudaFree(q.conv[i]);
    }
    cudaFree(q.keys), cudaFree(q.values), cudaFree(q.token);
    cudaFree(p.h), cudaFree(p.x), cudaFree(p.proj), cudaFree(p.mix), cudaFree(p.scores);
    cudaFree(p.weights), cudaFree(p.gate_up), cudaFree(p.inner), cudaFree(p.logits);
    cudaFree(p.gap), cudaFree(p.ids), cudaFree(p.attention), cudaFree(p.state), cudaFree(p.conv);
    cudaFree(p.keys), cudaFree(p.values);
}

/* ---- time -------------------------------------------------------------------------------------
 */

static double bytes_per_token(int n_layers, int depth) {
    double attention = n_layers / 4, gdn = n_layers - attention, wide = TILE_WIDE_BYTES;
    double b = (double)row_tiles(SHAPE_VOCAB) * SLICES * wide;
    b += gdn * ((double)GDN_TILES * SLICES * wide + VHEADS * (H / 32) * wide + VHEADS * 65536.0);
    b += attention * ((double)ATTN_TILES * SLICES * wide + (QDIM / 128) * (H / 32) * wide);
    b += attention * KV_HEADS * HEAD * 4.0 * depth;
    b += n_layers *
         (9.0 * SHAPE_EXPERT_WIDTH * (H * 1.125 + (double)TILE_DOWN_BYTES * DOWN_TILES / 32) +
          (double)(ROUTER_TILES + 1) * SLICES * TILE_BYTE_BYTES +
          (double)ATTN_SLICES * OUT_PARTS * SCORE_BYTES);
    return b;
}

#ifdef DECODE_PROFILE
static void profile(Model &m, const cuda_slot &slot, int n_layers) {
    static const char *names[2][5] = {{"project", "delta", "shared", "experts", ""},
                                      {"project", "attend", "out", "shared", "experts"}};
    size_t n_stages = 1;
    for (int l = 0; l < n_layers; l++) n_stages += (l + 1) % 4 == 0 ? 5 : 4;
    size_t n = n_stages * (size_t)blocks * DECODE_MARKS;
    CHECK(cudaMalloc(&m.a.clocks, n * 8));
    CHECK(cudaMemset(m.a.clocks, 0, n * 8));
    launch(m, slot, n_layers);
    launch(m, slot, n_layers);
    CHECK(cudaDeviceSynchronize());
    std::vector<long long> t = fetch_array(m.a.clocks, n);
    auto at = [&](size_t stage, int block, int mark) {
        return t[(stage * (size_t)blocks + (size_t)block) * DECODE_MARKS + (size_t)mark];
    };
    /* Cycles from the layer's beginning in a block (its part of the residual stream has arrived) to
     * each mark, averaged over blocks and layers: nothing else is the same time everywhere. */
    for (int kind = 0; kind < 2; kind++) {
        const int stages = kind ? 5 : 4;
        double sum[5][DECODE_MARKS] = {}, count[5][DECODE_MARKS] = {}, total = 0, layers = 0;
        size_t first = 0;
        for (int l = 0; l < n_layers; first += (l + 1) % 4 == 0 ? 5 : 4, l++) {
            if (((l + 1) % 4 == 0) != (kind == 1) || l == 0) continue;
            layers++;
            for (int b = 0; b < blocks; b++) {
                total += (double)(at(first + (size_t)stages, b, 0) - at(first, b, 0)) / blocks;
                for (int i = 0; i < stages; i++) {
                    for (int k = 0; k < DECODE_MARKS; k++) {
                        long long when = at(first + (size_t)i, b, k);
                        if (!when) continue;
                        sum[i][k] += (double)(when - at(first, b, 0));
                        count[i][k]++;
                    }
                }
            }
        }
        for (int i = 0; i < stages; i++) {
            printf("  %-9s %-8s", kind ? "attention" : "delta", names[kind][i]);
            for (int k = 0; k < DECODE_MARKS; k++) {
                if (count[i][k] > 0) printf("  %d: %.0f", k, sum[i][k] / count[i][k]);
            }
            printf("\n");
        }
        printf("  %-9s layer    %.0f\n", kind ? "attention" : "delta", total / layers);
    }
    double head = 0;
    for (int b = 0; b < blocks; b++) {
        head += (double)(at(n_stages - 1, b, 7) - at(n_stages - 1, b, 0)) / blocks;
    }
    printf("  head %.0f cycles, from the first stage's beginning to the end %.0f\n", head,
           (double)(at(n_stages - 1, 0, 7) - at(0, 0, 0)));
    CHECK(cudaFree(m.a.clocks));
    m.a.clocks = NULL;
}
#endif

static void measure(Model &m, int n_layers, int depth, int runs) {
    Sequence q = make_sequence(n_layers, depth + 64);
    for (int i = 0; i < 2; i++) q.slot[i] = slot_for(q, i, -1, depth);
    CHECK(cudaMemset(q.token, 0, 4));
    std::vector<float> ms;
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int r = 0; r < 6; r++) {
        CHECK(cudaEventRecord(a));
        for (int i = 0; i < runs; i++) launch(m, q.slot[i & 1], n_layers);
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float t;
        CHECK(cudaEventElapsedTime(&t, a, b));
        if (r) ms.push_back(t / (float)runs);
    }
    std::sort(ms.begin(), ms.end());
    double t = ms[ms.size() / 2], bytes = bytes_per_token(n_layers, depth);
    printf("depth %6d: %.4f ms a token (%.4f to %.4f) = %.0f tok/s, %.0f GB/s\n", depth, t, ms[0],
           ms.back(), 1000 / t, bytes / t / 1e6);
#ifdef DECODE_PROFILE
    profile(m, q.slot[0], n_layers);
#endif
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        cudaFree(q.state[i]), cudaFree(q.conv[i]);
    }
    cudaFree(q.keys), cudaFree(q.values), cudaFree(q.token);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    bool timing = argc > 1 && strcmp(argv[1], "time") == 0;
    bool few = argc > 1 && strcmp(argv[1], "few") == 0;
    int runs = argc > 2 ? atoi(argv[2]) : 50;
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    blocks = device.multiProcessorCount;
    CHECK(cudaFuncSetAttribute(decode_step, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               (int)sizeof(Shared)));
    int n_layers = timing ? SHAPE_LAYERS : few ? 4 : 8;
    if (argc > 3) n_layers = atoi(argv[3]);
    printf("%s, %s, %d blocks, %zu bytes of shared memory, %d layers\n", device.name, SHAPE_NAME,
           blocks, sizeof(Shared), n_layers);
    Model m = make_model(n_layers);
    if (timing) {
        const int depths[] = {0, 4096, 32768};
        for (int depth : depths) measure(m, n_layers, depth, runs);
        return 0;
    }
    if (few) {
        for (int pos : {5, 300}) check(m, 4, pos, (pos + 64) / 64 * 64, 1);
        printf("%d failures\n", failures);
        return failures != 0;
    }
    check(m, 1, 5, 64);
    const int positions[] = {0, 37, 63, 64, 200, 1000, 5000};
    for (int pos : positions) check(m, 4, pos, (pos + 64) / 64 * 64);
    if (n_layers >= 8) check(m, 8, 700, 1024);
    printf("%d failures\n", failures);
    return failures != 0;
}
