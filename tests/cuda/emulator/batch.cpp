/* The batched kernels at the large shape on a processor, against sums in double: the stand-in,
 * which the backend's own checks run, splits its narrower matrices over the warps in other ways. */
#define SHAPE_HEADER "model/shapes/qwen36_35b_a3b.h"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "emulator.h"

#include "prefill_device.h"

#include "backend/cuda/kernels/batch_experts.cuh"
#include "backend/cuda/kernels/routing.cuh"

namespace planar {
#include "backend/cuda/kernels/portable_batch.cu"
}
namespace tiled {
#include "backend/cuda/kernels/batch_tiles.cu"
}
#include "backend/cuda/kernels/portable_batch_mix.cu"
using namespace planar;
using namespace tiled;

static int failures;

static void expect(const char *what, int rows, double found, double limit) {
    bool good = found <= limit; /* false for NaN */
    printf("  %-44s %3d slots %10.3g  (at most %g)%s\n", what, rows, found, limit,
           good ? "" : "  FAILED");
    failures += !good;
}

static uint64_t state = 1;
static double uniform() { /* in [-1, 1) */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)state / 9223372036854775808.0;
}

static float widened(bf16 x) {
    return bf16_float(x);
}

static bf16 *random_rows(size_t n, double size) {
    bf16 *x = take<bf16>(n);
    for (size_t i = 0; i < n; i++) x[i] = to_bf16((float)(uniform() * size));
    return x;
}

static float *random_floats(size_t n, double size) {
    float *x = take<float>(n);
    for (size_t i = 0; i < n; i++) x[i] = (float)(uniform() * size);
    return x;
}

static cuda_mat random_mat(int rows, int cols, int bits) {
    size_t bytes = (size_t)rows * (size_t)cols * (size_t)bits / 8,
           groups = (size_t)rows * cols / 64;
    uint8_t *codes = take<uint8_t>(bytes);
    for (size_t i = 0; i < bytes; i++) codes[i] = (uint8_t)(int)(uniform() * 128 + 128);
    double span = bits == 4 ? 15 : 255;
    uint16_t *scales = take<uint16_t>(groups), *biases = take<uint16_t>(groups);
    for (size_t i = 0; i < groups; i++) {
        double scale = (1.5 + uniform()) / span;
        scales[i] = to_bf16((float)scale);
        biases[i] = to_bf16((float)(-scale * span / 2));
    }
    cuda_mat m = {};
    m.codes = codes, m.scales = scales, m.biases = biases;
    m.rows = rows, m.cols = cols, m.bits = bits;
    m.layout = CUDA_PLANAR, m.row_tiles = 0;
    m.code_pair = 16 * bits, m.code_group = 8 * bits, m.factor_pair = 2, m.factor_group = 1;
    return m;
}

/* The same as tiles (cuda_tiles_mat in pack.c): every value random where it lies. `doubled`: rows
 * that another matrix shares, see second_of. down: rows are those of several experts of H each. */
static cuda_mat random_tiles(cuda_layout layout, int rows, int cols, bool slices, bool doubled) {
    bool down = layout == CUDA_DOWN, byte = layout == CUDA_BYTE;
    int bytes = down ? TILE_DOWN_BYTES : byte ? TILE_BYTE_BYTES : TILE_WIDE_BYTES;
    int across = cols / (down ? 32 : 128), height = down ? 128 : byte ? 16 : 32;
    int row_tiles = ((rows << doubled) + height - 1) / height;
    uint8_t *at = take<uint8_t>((size_t)row_tiles * across * bytes);
    for (int t = 0; t < row_tiles * across; t++) {
        uint8_t *tile = at + (size_t)t * bytes;
        for (int i = 0; i < TILE_CODES; i++) tile[i] = (uint8_t)(int)(uniform() * 128 + 128);
        uint16_t *factors = (uint16_t *)(tile + TILE_CODES);
        for (int i = 0; i < (bytes - TILE_CODES) / 4; i++) {
            double span = byte ? 255 : 15, scale = (1.5 + uniform()) / span;
            factors[2 * i] = to_bf16((float)scale);
            factors[2 * i + 1] = to_bf16((float)(-scale * span / 2));
        }
    }
    cuda_mat m = {};
    int next_rows = slices ? bytes : bytes * across;
    int next = slices ? bytes * (down ? H / 128 : row_tiles) : bytes;
    m.codes = at, m.scales = (uint16_t *)(at + TILE_CODES), m.biases = m.scales + 1;
    m.rows = rows, m.cols = cols, m.bits = byte ? 8 : 4, m.layout = layout;
    m.row_tiles = next_rows, m.doubled = doubled;
    m.code_pair = down ? 4 * next : next, m.code_group = down ? 2 * next : 32;
    m.factor_pair = down ? 2 * next : next / 2, m.factor_group = down ? next : 4;
    return m;
}

/* The matrix whose rows take turns with those of m. */
static cuda_mat second_of(cuda_mat m) {
    int further = (tile_wide_scale(1, 0) - tile_wide_scale(0, 0)) / 2;
    m.codes += tile_wide_codes(1, 0), m.scales += further, m.biases += further;
    return m;
}

static bool tiles; /* what is checked now */

static cuda_mat random_wide(int rows, int cols, bool slices) {
    return tiles ? random_tiles(CUDA_WIDE, rows, cols, slices, false) : random_mat(rows, cols, 4);
}
static void random_pair(int rows, int cols, cuda_mat &gate, cuda_mat &up) {
    gate = tiles ? random_tiles(CUDA_WIDE, rows, cols, false, true) : random_mat(rows, cols, 4);
    up = tiles ? second_of(gate) : random_mat(rows, cols, 4);
}
static cuda_mat random_down(int rows, int cols) {
    return tiles ? random_tiles(CUDA_DOWN, rows, cols, true, false) : random_mat(rows, cols, 4);
}

template <class T, class F> static double product(const cuda_mat &m, int64_t row, const T *x, F f) {
    double sum = 0;
    for (int c = 0; c < m.cols; c++) sum += (double)mat_value(m, row, c) * (double)f(x[c]);
    return sum;
}

/* Root of the mean square of the difference over that of the truth. */
struct distance {
    double d = 0, s = 0;
    void add(double truth, double found) {
        d += (truth - found) * (truth - found);
        s += truth * truth;
    }
    double value() const { return sqrt(d / s); }
};

static const size_t SUMS = 2 * BATCH_WARPS * sizeof(batch_sums), TILE_SUMS = SUMS / 2;
template <int NT>
static const size_t PRODUCT = product_shape<NT>::RING + product_shape<NT>::INPUTS +
                              BATCH_WARPS *KEPT * sizeof(float);

static void check_dense(int rows) {
    cuda_mat w = random_wide(352, H, false), small = random_wide(2 * V_HEADS, H, false);
    cuda_mat deep_w = random_wide(tiles ? H : 64, V_DIM, true);
    bf16 *a = random_rows((size_t)rows * H, 1), *wide = random_rows((size_t)rows * V_DIM, 1);
    float *exact = random_floats((size_t)rows * H, 1);
    int ldo = w.rows + 8, tile = rows > 16 && tiles ? 2 : rows > 8;
    int groups = (rows + (8 << tile) - 1) / (8 << tile), blocks = 3 * groups;
    int smalls = 2 * ((rows + (8 << (tile > 0)) - 1) / (8 << (tile > 0))); /* of 64 rows */
    float *out = take<float>((size_t)rows * ldo), *gates = take<float>((size_t)rows * small.rows);
    float *deep_out = take<float>((size_t)rows * deep_w.rows);
    if (tiles) {
        auto project = tile == 2 ? tiles_project_32 : tile ? tiles_project_16 : tiles_project_8;
        auto out_of = tile == 2 ? tiles_out_32 : tile ? tiles_out_16 : tiles_out_8;
        size_t shared = tile == 2 ? PRODUCT<4> : tile ? PRODUCT<2> : PRODUCT<1>;
        RUN(project, blocks + smalls, 1, 512, shared, a, exact, w, out, ldo, small, gates, rows,
            blocks, rows == 9 ? 1 : 4);
        RUN(out_of, H / 16 * groups, 1, 512, TILE_SUMS << tile, wide, deep_w, deep_out, rows);
    } else if (tile) {
        RUN(batch_project_16, blocks + 4, 1, 512, 2 * SUMS, a, exact, w, out, ldo, small, gates,
            rows, blocks);
        RUN(batch_out_16, 4 * groups, 1, 512, 2 * SUMS, wide, deep_w, deep_out, rows);
    } else {
        RUN(batch_project_8, blocks + 4, 1, 512, SUMS, a, exact, w, out, ldo, small, gates, rows,
            blocks);
        RUN(batch_out_8, 4 * groups, 1, 512, SUMS, wide, deep_w, deep_out, rows);
    }
    distance all, precise, deep_all;
    auto same = [](float x) { return x; };
    for (int r = 0; r < rows; r++) {
        for (int n = 0; n < w.rows; n++) {
            all.add(product(w, n, a + (size_t)r * H, widened), out[(size_t)r * ldo + n]);
        }
        for (int n = 0; n < small.rows; n++) {
            precise.add(product(small, n, exact + (size_t)r * H, same),
                        gates[(size_t)r * small.rows + n]);
        }
        for (int n = r % 3; n < deep_w.rows; n += tiles ? 17 : 1) {
            deep_all.add(product(deep_w, n, wide + (size_t)r * V_DIM, widened),
                         deep_out[(size_t)r * deep_w.rows + n]);
        }
    }
    expect("projections", rows, all.value(), 1e-5);
    expect("a small matrix beside them", rows, precise.value(), 2e-5);
    expect("output projection", rows, deep_all.value(), 1e-5);
    release();
}

/* What batch_route leaves: every pair once, under its expert, in blocks of at most eight. */
struct routed {
    float *routing;
    int32_t *begin, *count, *list, *pairs, *places;
};

static void check_sort(const routed &x, int rows) {
    int bad = x.begin[0] != 0 || x.begin[EXPERTS] != rows * TOP_K, blocks = 0;
    std::vector<int> seen((size_t)(rows * TOP_K));
    for (int e = 0; e < EXPERTS; e++) {
        int n = x.begin[e + 1] - x.begin[e];
        bad += n < 0;
        for (int p = x.begin[e]; p < x.begin[e + 1]; p++) {
            int pair = x.pairs[p];
            bad += seen[(size_t)pair]++ != 0 || x.places[pair] != p;
            bad += x.routing[pair / TOP_K * 2 * TOP_K + pair % TOP_K] != (float)e;
        }
        for (int b = 0; b < (n + 7) / 8; b++) bad += x.list[blocks++] != (e << 16 | b);
    }
    bad += blocks != *x.count;
    expect("sort by expert: mistakes", rows, bad, 0);
}

/* Router, choice and both halves of the experts; only the first `used` experts have weights, and so
 * the others' scores are made too small to be chosen. */
static void check_experts(int rows, int used) {
    cuda_mat router = tiles ? random_tiles(CUDA_BYTE, EXPERTS + 1, H, false, false)
                            : random_mat(EXPERTS + 1, H, 8);
    cuda_mat gate, up, sg, su, down = random_down(used * H, INNER), sd = random_down(H, SHARED);
    random_pair(used * INNER, H, gate, up);
    random_pair(SHARED, H, sg, su);
    bf16 *a = random_rows((size_t)rows * H, 0.1);
    float *exact = random_floats((size_t)rows * H, 0.1), *x = random_floats((size_t)rows * H, 1);
    std::vector<float> before(x, x + (size_t)rows * H);
    float *scores = take<float>((size_t)rows * (EXPERTS + 1));
    bf16 *hidden = take<bf16>((size_t)rows * TOP_K * INNER);
    bf16 *own = take<bf16>((size_t)rows * SHARED);
    float *out = take<float>((size_t)rows * TOP_K * H), *always = take<float>((size_t)rows * H);
    float *weight = random_floats(H, 1), *normed = take<float>((size_t)rows * H);
    bf16 *normed_bf = take<bf16>((size_t)rows * H);
    routed k = {take<float>((size_t)rows * 2 * TOP_K),
                take<int32_t>(EXPERTS + 1),
                take<int32_t>(1),
                take<int32_t>(MAX_BLOCKS),
                take<int32_t>((size_t)rows * TOP_K),
                take<int32_t>((size_t)rows * TOP_K)};
    int groups = (rows + 7) / 8, blocks = (EXPERTS + 1 + 15) / 16;
    RUN(batch_gate, blocks + SHARED / 16, groups, 512, SUMS, a, exact, router, scores, sg, su, own,
        rows, blocks);
    distance d;
    for (int r = 0; r < rows; r++) {
        for (int e = 0; e <= EXPERTS; e += e + 1 < used ? 1 : 7) {
            d.add(product(router, e, exact + (size_t)r * H, [](float v) { return v; }),
                  scores[(size_t)r * (EXPERTS + 1) + (size_t)e]);
        }
        for (int e = used; e < EXPERTS; e++) scores[(size_t)r * (EXPERTS + 1) + e] = -1e6f;
    }
    expect("router", rows, d.value(), 2e-5);
    RUN(batch_route, 1 + H / 128, groups, 512, SUMS, scores, k.routing, rows, k.begin, k.list,
        k.count, k.pairs, k.places, own, sd, always);
    check_sort(k, rows);
    cuda_groups of = {};
    of.begin = k.begin, of.blocks = k.list, of.n_blocks = k.count, of.pairs = k.pairs;
    RUN(batch_up, 5, 1, 512, SUMS, a, gate, up, of, hidden);
    RUN(batch_down, 7, 1, 512, SUMS, hidden, down, of, out);
    RUN(batch_combine, rows, 1, 512, 0, out, k.places, k.routing, scores, always, x, weight, normed,
        normed_bf);
    /* Some hidden values and outputs of every pair; the sum and the norm of every row. */
    distance first, second, shared, sum, norms;
    for (int pair = 0; pair < rows * TOP_K; pair++) {
        int e = (int)k.routing[pair / TOP_K * 2 * TOP_K + pair % TOP_K], place = k.places[pair];
        const bf16 *in = a + (size_t)(pair / TOP_K) * H;
        for (int i = pair % 5; i < INNER; i += 37) {
            double g = product(gate, (int64_t)e * INNER + i, in, widened);
            double u = product(up, (int64_t)e * INNER + i, in, widened);
            first.add(g / (1 + exp(-g)) * u, widened(hidden[(size_t)place * INNER + (size_t)i]));
        }
        for (int i = pair % 7; i < H; i += 97) {
            second.add(product(down, (int64_t)e * H + i, hidden + (size_t)place * INNER, widened),
                       out[(size_t)place * H + (size_t)i]);
        }
    }
    for (int r = 0; r < rows; r++) {
        double squares = 0,
               share = 1 / (1 + exp(-(double)scores[(size_t)(r + 1) * (EXPERTS + 1) - 1]));
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            double truth = before[at] + share * always[at];
            for (int j = 0; j < TOP_K; j++) {
                truth += (double)k.routing[(r * 2 + 1) * TOP_K + j] *
                         out[(size_t)k.places[r * TOP_K + j] * H + (size_t)i];
            }
            sum.add(truth, x[at]);
            squares += truth * truth;
        }
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            norms.add((double)x[at] / sqrt(squares / H + SHAPE_NORM_EPS) * weight[i], normed[at]);
            if (normed_bf[at] != to_bf16(normed[at])) norms.add(1, 2);
        }
        for (int i = r % 5; i < H; i += 61) {
            shared.add(product(sd, i, own + (size_t)r * SHARED, widened),
                       always[(size_t)r * H + i]);
        }
    }
    expect("experts, first half (rounded to bf16)", rows, first.value(), 3e-3);
    expect("experts, second half", rows, second.value(), 1e-5);
    expect("shared expert's second half", rows, shared.value(), 1e-5);
    expect("weighted sum", rows, sum.value(), 1e-6);
    expect("norm", rows, norms.value(), 1e-6);
    release();
}

/* The same with the kernels for tiles. */
static void check_tiled_experts(int rows, int used) {
    cuda_mat router = random_tiles(CUDA_BYTE, EXPERTS + 1, H, false, false), gate, up, sg, su;
    cuda_mat down = random_down(used * H, INNER), sd = random_down(H, SHARED);
    random_pair(used * INNER, H, gate, up);
    random_pair(SHARED, H, sg, su);
    size_t n = (size_t)rows;
    float *x = random_floats(n * H, 1), *add = random_floats(n * H, 1);
    float *first_weight = random_floats(H, 1), *weight = random_floats(H, 1);
    std::vector<float> before(x, x + n * H);
    float *scores = take<float>(n * (EXPERTS + 1)), *weights = take<float>(n * TOP_K);
    bf16 *a = take<bf16>(n * H), *hidden = take<bf16>(n * (TOP_K + 1) * INNER);
    float *out = take<float>(n * TOP_K * H), *own = take<float>(n * H);
    float *normed = take<float>(n * H);
    bf16 *normed_bf = take<bf16>(n * H);
    expert_list *list = take<expert_list>(1);
    int groups = (rows + 7) / 8;
    RUN(tiles_router, (EXPERTS + 1 + 15) / 16, groups, ROUTER_THREADS, 0, x, add, first_weight,
        router, scores, a, rows);
    distance d, first_norm;
    std::vector<double> y(n * H);
    for (int r = 0; r < rows; r++) {
        double squares = 0;
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            y[at] = (double)x[at] + add[at];
            squares += y[at] * y[at];
        }
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            y[at] *= first_weight[i] / sqrt(squares / H + SHAPE_NORM_EPS);
            first_norm.add(y[at], widened(a[at]));
        }
        for (int e = 0; e <= EXPERTS; e += e + 1 < used ? 1 : 7) {
            d.add(product(router, e, &y[(size_t)r * H], [](double v) { return v; }),
                  scores[(size_t)r * (EXPERTS + 1) + (size_t)e]);
        }
        for (int e = used; e < EXPERTS; e++) scores[(size_t)r * (EXPERTS + 1) + e] = -1e6f;
    }
    expect("norm before the router (rounded to bf16)", rows, first_norm.value(), 3e-3);
    expect("router", rows, d.value(), 2e-5);
    RUN(tiles_up, 5, 1, 512, UP_RING + WINDOW * SLICES * sizeof(staged_slice), a, scores, rows,
        gate, sg, list, weights, hidden);
    RUN(tiles_down, 7, 1, 512, DOWN_RING + WINDOW * DOWN_GROUPS * sizeof(staged_group), hidden,
        list, rows, down, sd, out, own);
    RUN(tiles_combine, rows, 1, 512, 0, out, weights, scores, own, add, x, weight, normed,
        normed_bf);
    /* The choice: the largest scores, each pair once in the list. */
    std::vector<int> chosen(n * TOP_K, -1);
    int bad = 0;
    for (int e = 0; e < list->n; e++) {
        int count = (int)(list->entry[e] >> 16), expert = (int)(list->entry[e] & 0xffff);
        bad += count < 1 || count > 8;
        for (int i = 0; i < count; i++) {
            int pair = list->pairs[e][i];
            if (expert == EXPERTS) {
                bad += pair < rows * TOP_K || pair >= rows * (TOP_K + 1);
            } else {
                bad += pair >= rows * TOP_K || chosen[(size_t)pair]++ != -1;
                if (pair < rows * TOP_K) chosen[(size_t)pair] = expert;
            }
        }
    }
    distance shares;
    for (int r = 0; r < rows; r++) {
        const float *of = scores + (size_t)r * (EXPERTS + 1);
        std::vector<int> order(EXPERTS);
        for (int e = 0; e < EXPERTS; e++) order[(size_t)e] = e;
        std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return of[i] > of[j]; });
        double sum = 0;
        for (int j = 0; j < TOP_K; j++) sum += exp((double)of[order[(size_t)j]] - of[order[0]]);
        for (int j = 0; j < TOP_K; j++) {
            bad += chosen[(size_t)(r * TOP_K + j)] != order[(size_t)j];
            shares.add(exp((double)of[order[(size_t)j]] - of[order[0]]) / sum,
                       weights[r * TOP_K + j]);
        }
    }
    expect("choice of experts: mistakes", rows, bad, 0);
    expect("their shares", rows, shares.value(), 1e-5);
    distance first, second, sum, norms;
    for (int pair = 0; pair < rows * (TOP_K + 1); pair++) {
        bool shared = pair >= rows * TOP_K;
        int e = shared ? 0 : chosen[(size_t)pair];
        const bf16 *in = a + (size_t)(shared ? pair - rows * TOP_K : pair / TOP_K) * H;
        const float *to = shared ? own + (size_t)(pair - rows * TOP_K) * H : out + (size_t)pair * H;
        for (int i = pair % 5; i < INNER; i += 37) {
            double g = product(shared ? sg : gate, (int64_t)e * INNER + i, in, widened);
            double u = product(shared ? su : up, (int64_t)e * INNER + i, in, widened);
            first.add(g / (1 + exp(-g)) * u, widened(hidden[(size_t)pair * INNER + (size_t)i]));
        }
        for (int i = pair % 7; i < H; i += 97) {
            second.add(product(shared ? sd : down, (int64_t)e * H + i,
                               hidden + (size_t)pair * INNER, widened),
                       to[i]);
        }
    }
    for (int r = 0; r < rows; r++) {
        double squares = 0,
               share = 1 / (1 + exp(-(double)scores[(size_t)(r + 1) * (EXPERTS + 1) - 1]));
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            double truth = (double)before[at] + add[at] + share * own[at];
            for (int j = 0; j < TOP_K; j++) {
                truth +=
                    (double)weights[r * TOP_K + j] * out[(size_t)(r * TOP_K + j) * H + (size_t)i];
            }
            sum.add(truth, x[at]);
            squares += truth * truth;
        }
        for (int i = 0; i < H; i++) {
            size_t at = (size_t)r * H + (size_t)i;
            norms.add((double)x[at] / sqrt(squares / H + SHAPE_NORM_EPS) * weight[i], normed[at]);
            if (normed_bf[at] != to_bf16(normed[at])) norms.add(1, 2);
        }
    }
    expect("experts, first half (rounded to bf16)", rows, first.value(), 3e-3);
    expect("experts, second half", rows, second.value(), 1e-5);
    expect("weighted sum", rows, sum.value(), 1e-6);
    expect("norm", rows, norms.value(), 1e-6);
    release();
}

/* Two slots of one layer, the second of two, against the rule in double. */
static void check_mix(int rows) {
    int width = CONV_DIM + V_DIM, layer = 1;
    float *proj = random_floats((size_t)rows * width, 1), *ba = random_floats((size_t)rows * 64, 2);
    float *taps = random_floats(4 * CONV_DIM, 0.5), *rate = random_floats(V_HEADS, 1);
    float *bias = random_floats(V_HEADS, 1), *weight = random_floats(DIM, 1);
    for (int h = 0; h < V_HEADS; h++) rate[h] = fabsf(rate[h]);
    size_t states = (size_t)2 * V_HEADS * DIM * DIM, convs = (size_t)2 * 3 * CONV_DIM;
    std::vector<cuda_slot> slots((size_t)rows);
    for (cuda_slot &s : slots) {
        s = {};
        s.state_in = random_floats(states, 1), s.state_out = take<float>(states);
        s.conv_in = random_floats(convs, 1), s.conv_out = take<float>(convs);
    }
    bf16 *mix = take<bf16>((size_t)rows * V_DIM);
    RUN(batch_mix, V_HEADS, rows, 256, 0, proj, width, (const float4 *)taps, ba, rate, bias, weight,
        slots.data(), layer, mix);
    distance y, states_d;
    double conv_bad = 0;
    for (int r = 0; r < rows; r++) {
        const cuda_slot &s = slots[(size_t)r];
        const float *u = proj + (size_t)r * width, *past = s.conv_in + (size_t)layer * 3 * CONV_DIM;
        const float *kept = s.conv_out + (size_t)layer * 3 * CONV_DIM;
        std::vector<double> c(CONV_DIM);
        for (int i = 0; i < CONV_DIM; i++) {
            double v =
                (double)taps[4 * i] * past[i] + (double)taps[4 * i + 1] * past[CONV_DIM + i] +
                (double)taps[4 * i + 2] * past[2 * CONV_DIM + i] + (double)taps[4 * i + 3] * u[i];
            c[(size_t)i] = v / (1 + exp(-v));
            conv_bad +=
                kept[i] != past[CONV_DIM + i] || kept[CONV_DIM + i] != past[2 * CONV_DIM + i];
            conv_bad += kept[2 * CONV_DIM + i] != u[i];
        }
        for (int h = 0; h < V_HEADS; h++) {
            const double *q = &c[(size_t)(h / 2 * DIM)], *k = q + K_DIM,
                         *v = &c[(size_t)(2 * K_DIM + h * DIM)];
            double qq = 1e-6, kk = 1e-6, squares = 0, o[DIM];
            for (int i = 0; i < DIM; i++) qq += q[i] * q[i], kk += k[i] * k[i];
            double a = (double)ba[r * 64 + 32 + h] + bias[h];
            double e = exp(-(double)rate[h] * log1p(exp(a))),
                   b = 1 / (1 + exp(-(double)ba[r * 64 + h]));
            size_t at = ((size_t)layer * V_HEADS + (size_t)h) * DIM * DIM;
            for (int j = 0; j < DIM; j++) {
                double m = 0, sum = 0;
                for (int i = 0; i < DIM; i++) {
                    m += e * s.state_in[at + (size_t)(i * DIM + j)] * k[i] / sqrt(kk);
                }
                double d = b * (v[j] - m);
                for (int i = 0; i < DIM; i++) {
                    double next = e * s.state_in[at + (size_t)(i * DIM + j)] + k[i] / sqrt(kk) * d;
                    states_d.add(next, s.state_out[at + (size_t)(i * DIM + j)]);
                    sum += next * q[i] / sqrt(qq * DIM);
                }
                o[j] = sum, squares += sum * sum;
            }
            for (int j = 0; j < DIM; j++) {
                double z = u[CONV_DIM + h * DIM + j];
                y.add(o[j] / sqrt(squares / DIM + SHAPE_NORM_EPS) * weight[j] * z / (1 + exp(-z)),
                      widened(mix[(size_t)r * V_DIM + (size_t)(h * DIM + j)]));
            }
        }
    }
    expect("convolution state: values that differ", rows, conv_bad, 0);
    expect("recurrent state", rows, states_d.value(), 1e-6);
    expect("gated norm (rounded to bf16)", rows, y.value(), 3e-3);
    release();
}

int main() {
    static const int slots[] = {2, 9, 33};
    start();
    printf("batched kernels at the large shape\n");
    for (int layout = 0; layout < 2; layout++) {
        tiles = layout == 1;
        printf(tiles ? "weights as tiles\n" : "planar weights\n");
        for (int rows : slots) check_dense(rows);
        if (tiles) {
            check_tiled_experts(3, 9);
            check_tiled_experts(17, 12);
            check_tiled_experts(40, 10);
        } else {
            check_experts(3, 9);
            check_experts(17, 12);
        }
    }
    check_mix(2);
    printf("%d failed\n", failures);
    return failures != 0;
}
