/* The CPU kernels of every instruction set this machine runs: integer products bit for bit equal to
 * the portable ones and close to mat_row in double, float kernels against double formulas. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/cpu/kernels/kernels.h"
#include "base/bf16.h"

static uint64_t seed = 1;

static uint32_t draw(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

/* Roughly normal, unit spread. */
static float normal(void) {
    float s = 0;
    for (int i = 0; i < 6; i++) s += (float)(draw() & 0xffff) / 65536.0f - 0.5f;
    return s * 1.41421356f;
}

static float *normals(size_t n) {
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++) x[i] = normal();
    return x;
}

/* A random matrix, some scales negative; free_mat releases it. */
static struct mat random_mat(int32_t rows, int32_t cols, int32_t bits) {
    struct mat m = {.rows = rows, .cols = cols, .bits = bits};
    size_t bytes = (size_t)rows * (size_t)cols * (size_t)bits / 8;
    size_t groups = (size_t)rows * (size_t)cols / 64;
    uint8_t *data = malloc(bytes);
    uint16_t *scales = malloc(groups * 2), *biases = malloc(groups * 2);
    for (size_t i = 0; i < bytes; i++) data[i] = (uint8_t)draw();
    for (size_t i = 0; i < groups; i++) {
        float scale = (0.5f + fabsf(normal())) * (bits == 4 ? 0.01f : 0.001f);
        if (draw() & 1) scale = -scale;
        scales[i] = f32_to_bf16(scale);
        biases[i] = f32_to_bf16(-scale * (bits == 4 ? 7.5f : 127.5f) + 0.003f * normal());
    }
    m.data = data;
    m.scales = scales;
    m.biases = biases;
    return m;
}

static void free_mat(struct mat *m) {
    free((void *)(uintptr_t)m->data);
    free((void *)(uintptr_t)m->scales);
    free((void *)(uintptr_t)m->biases);
}

static struct qrows new_qrows(int32_t cols, size_t rows) {
    size_t groups = (size_t)cols / 64;
    return (struct qrows){.q = malloc(groups * rows * GROUP_BYTES),
                          .s = malloc(groups * rows * 2 * sizeof(float)),
                          .rows = rows};
}

static void free_qrows(struct qrows *x) {
    free(x->q);
    free(x->s);
}

/* Element i of a row as an integer. */
static int32_t code_at(const struct qrows *x, size_t row, int32_t i) {
    const int8_t *q = x->q + ((size_t)(i / 64) * x->rows + row) * GROUP_BYTES;
    int32_t at = (i & 1) * 32 + i % 64 / 2;
    return 256 * q[at] + q[64 + at];
}

static void quantise_rows(const struct kernels *k, const float *x, int32_t cols, struct qrows *q) {
    for (size_t t = 0; t < q->rows; t++) k->quantise(x + t * (size_t)cols, cols, q, t);
}

static const struct {
    int32_t rows, cols, tokens;
} sizes[] = {{16, 64, 1},     {32, 128, 3},  {48, 256, 5}, {64, 512, 17},
             {32, 2048, 130}, {16, 4096, 2}, {32, 192, 9}};

static void test_quantise(void **state) {
    (void)state;
    enum { COLS = 512 };
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        float *x = normals(COLS);
        memset(x + 64, 0, 64 * sizeof *x); /* a zero group */
        for (int i = 128; i < 192; i++) x[i] *= 1e-35f;
        struct qrows a = new_qrows(COLS, 1), b = new_qrows(COLS, 1);
        (*k)->quantise(x, COLS, &a, 0);
        kernels_portable.quantise(x, COLS, &b, 0);
        assert_memory_equal(a.q, b.q, 2 * COLS);
        assert_memory_equal(a.s, b.s, COLS / 64 * 2 * sizeof(float));
        for (int i = 0; i < COLS; i++) {
            int32_t q = code_at(&a, 0, i);
            float scale = a.s[i / 64 * 2];
            assert_true(fabsf(x[i] - scale * (float)q) <= 0.502f * scale + 1e-30f);
        }
        x[70] = NAN;
        x[200] = -INFINITY;
        (*k)->quantise(x, COLS, &a, 0);
        assert_true(isnan(a.s[1 * 2]) && isnan(a.s[3 * 2]) && !isnan(a.s[0]));
        free(x);
        free_qrows(&a);
        free_qrows(&b);
    }
}

/* One size: all sets agree with the portable bits, and those with double arithmetic on the
 * dequantised row and the dequantised input. */
static void check_products(int32_t rows, int32_t cols, int32_t tokens) {
    struct mat m = random_mat(rows, cols, 4);
    size_t nx = (size_t)tokens * (size_t)cols, ny = (size_t)tokens * (size_t)rows;
    float *x = normals(nx), *w = malloc((size_t)cols * sizeof *w);
    float *want = malloc(ny * sizeof *want), *got = malloc(ny * sizeof *got);
    int32_t *index = malloc((size_t)tokens * sizeof *index);
    struct qrows q = new_qrows(cols, (size_t)tokens);
    quantise_rows(&kernels_portable, x, cols, &q);
    kernels_portable.matmul4(&m, 0, rows, &q, NULL, tokens, want, (size_t)rows);
    for (int32_t r = 0; r < rows; r++) {
        mat_row(&m, r, w);
        for (int32_t t = 0; t < tokens; t++) {
            double sum = 0, size = 0;
            for (int32_t i = 0; i < cols; i++) {
                size_t at = (size_t)(i / 64) * q.rows + (size_t)t;
                double xi = (double)q.s[at * 2] * code_at(&q, (size_t)t, i);
                sum += (double)w[i] * xi;
                /* codes and bias are multiplied apart and may cancel */
                double scale =
                    bf16_to_f32(m.scales[(size_t)r * (size_t)(cols / 64) + (size_t)(i / 64)]);
                size += (fabs((double)w[i]) + 15 * fabs(scale)) * fabs(xi);
            }
            assert_true(fabs(sum - (double)want[(size_t)t * (size_t)rows + (size_t)r]) <=
                        1e-6 * size + 1e-12);
        }
    }
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        memset(got, 0xff, ny * sizeof *got);
        (*k)->matmul4(&m, 0, rows, &q, NULL, tokens, got, (size_t)rows);
        assert_memory_equal(got, want, ny * sizeof *got);
        for (int32_t t = 0; t < tokens; t++) index[t] = tokens - 1 - t;
        (*k)->matmul4(&m, 0, rows, &q, index, tokens, got, (size_t)rows);
        for (int32_t t = 0; t < tokens; t++) {
            assert_memory_equal(got + (size_t)t * (size_t)rows,
                                want + (size_t)index[t] * (size_t)rows, (size_t)rows * sizeof *got);
            struct qrows one = {q.q + (size_t)t * GROUP_BYTES, q.s + (size_t)t * 2, q.rows};
            float *y = got;
            (*k)->matvec4(&m, rows - 16, rows, &one, y, (struct ahead){&m, 0});
            assert_memory_equal(y, want + (size_t)t * (size_t)rows + (size_t)(rows - 16),
                                16 * sizeof *y);
            (*k)->matmul4(&m, 0, rows, &q, index, tokens, got, (size_t)rows);
        }
    }
    free_mat(&m);
    free_qrows(&q);
    free(x), free(w), free(want), free(got), free(index);
}

static void test_products(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        check_products(sizes[i].rows, sizes[i].cols, sizes[i].tokens);
    }
}

static void test_float_products(void **state) {
    (void)state;
    enum { ROWS = 9, COLS = 512, TOKENS = 3 };
    for (int32_t bits = 4; bits <= 8; bits += 4) {
        struct mat m = random_mat(ROWS, COLS, bits);
        float *x = normals(TOKENS * COLS), y[ROWS * TOKENS], one[ROWS], w[COLS];
        for (const struct kernels *const *k = kernels_usable(); *k; k++) {
            (*k)->matmul_float(&m, 0, ROWS, x, COLS, TOKENS, y, ROWS);
            for (int32_t r = 0; r < ROWS; r++) {
                mat_row(&m, r, w);
                for (int t = 0; t < TOKENS; t++) {
                    double sum = 0, size = 0;
                    for (int i = 0; i < COLS; i++) {
                        sum += (double)w[i] * (double)x[t * COLS + i];
                        size += fabs((double)w[i] * (double)x[t * COLS + i]);
                    }
                    assert_true(fabs(sum - (double)y[t * ROWS + r]) <= 1e-6 * size);
                }
            }
            (*k)->matmul_float(&m, 2, ROWS, x + COLS, COLS, 1, one, ROWS);
            assert_memory_equal(one, y + ROWS + 2, (ROWS - 2) * sizeof *y);
        }
        free_mat(&m);
        free(x);
    }
}

static double sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static void close_to(double got, double want, double tolerance) {
    if (fabs(got - want) > tolerance * (1 + fabs(want))) {
        fail_msg("found %.9g, expected %.9g", got, want);
    }
}

static void test_norms(void **state) {
    (void)state;
    enum { N = 256 };
    float *x = normals(N), *w = normals(N), *z = normals(N), y[N];
    double square = 0;
    for (int i = 0; i < N; i++) square += (double)x[i] * (double)x[i];
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        (*k)->rms_norm(x, w, N, 1e-6f, y);
        double inverse = 1 / sqrt(square / N + 1e-6);
        for (int i = 0; i < N; i++) close_to(y[i], x[i] * inverse * w[i], 1e-6);
        (*k)->gated_norm(x, w, z, N, 1e-6f, y);
        for (int i = 0; i < N; i++) {
            close_to(y[i], x[i] * inverse * w[i] * z[i] * sigmoid(z[i]), 1e-6);
        }
        memcpy(y, x, sizeof y);
        (*k)->l2_norm(y, N, 1e-6f, 0.25f);
        for (int i = 0; i < N; i++) close_to(y[i], x[i] * 0.25 / sqrt(square + 1e-6), 1e-6);
        (*k)->axpy(0.5f, x, N, y);
        for (int i = 0; i < N; i++) {
            close_to(y[i], x[i] * 0.25 / sqrt(square + 1e-6) + 0.5 * x[i], 1e-6);
        }
        close_to((*k)->dot(x, x, N), square, 1e-6);
    }
    free(x), free(w), free(z);
}

static void test_gates(void **state) {
    (void)state;
    enum { N = 64 };
    float x[N], u[N], y[N], taps[4 * N];
    for (int i = 0; i < N; i++) {
        x[i] = ((float)i - 31.5f) * 3.3f; /* far into both tails */
        u[i] = normal();
        for (int j = 0; j < 4; j++) taps[j * N + i] = normal();
    }
    const float *rows[4] = {u, x, u, x};
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        (*k)->silu_mul(x, u, N, y);
        for (int i = 0; i < N; i++) close_to(y[i], x[i] * sigmoid(x[i]) * u[i], 2e-6);
        (*k)->sigmoid_mul(u, x, N, y);
        for (int i = 0; i < N; i++) close_to(y[i], sigmoid(x[i]) * u[i], 1e-6);
        (*k)->conv_silu(rows, taps, N, N, y);
        for (int i = 0; i < N; i++) {
            double s = 0;
            for (int j = 0; j < 4; j++) s += (double)taps[j * N + i] * (double)rows[j][i];
            close_to(y[i], s * sigmoid(s), 4e-6);
        }
        assert_true((*k)->all_finite(x, N));
        x[17] = NAN;
        assert_false((*k)->all_finite(x, N));
        x[17] = INFINITY;
        assert_false((*k)->all_finite(x, N));
        x[17] = (17 - 31.5f) * 3.3f;
    }
}

static void test_delta(void **state) {
    (void)state;
    float *s = normals(STATE * STATE_HALF), *mine = malloc(STATE * STATE_HALF * sizeof *mine);
    float *q = normals(STATE), *key = normals(STATE), *v = normals(STATE_HALF), out[STATE_HALF];
    kernels_portable.l2_norm(key, STATE, 1e-6f, 1.0f);
    kernels_portable.l2_norm(q, STATE, 1e-6f, 0.0883883476f);
    float kq = kernels_portable.dot(key, q, STATE), beta = 0.7f, decay = 0.93f;
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        memcpy(mine, s, STATE * STATE_HALF * sizeof *mine);
        (*k)->delta(mine, q, key, v, kq, beta, decay, out);
        for (int c = 0; c < STATE_HALF; c++) { /* model.md 4.2 step 6 as written */
            double column[STATE], m = 0, o = 0;
            for (int i = 0; i < STATE; i++) {
                column[i] = (double)decay * (double)s[i * STATE_HALF + c];
                m += column[i] * (double)key[i];
            }
            double d = (double)beta * ((double)v[c] - m);
            for (int i = 0; i < STATE; i++) {
                column[i] += (double)key[i] * d;
                o += column[i] * (double)q[i];
                close_to(mine[i * STATE_HALF + c], column[i], 1e-6);
            }
            close_to(out[c], o, 2e-6);
        }
    }
    free(s), free(mine), free(q), free(key), free(v);
}

static void test_attend(void **state) {
    (void)state;
    static const int32_t lengths[] = {1, 15, 16, 17, 63, 64, 65, 200, SPAN};
    float *q = normals(KV_GROUP * HEAD), *kf = normals(SPAN * HEAD), *vf = normals(SPAN * HEAD);
    uint16_t *keys = malloc(SPAN * HEAD * 2), *values = malloc(SPAN * HEAD * 2);
    float *scores = malloc(KV_GROUP * SPAN * sizeof *scores);
    struct attend *got = malloc(sizeof *got);
    for (int i = 0; i < KV_GROUP * HEAD; i++) q[i] *= 0.2f;
    for (int p = 0; p < SPAN; p++) {
        for (int d = 0; d < HEAD; d++) {
            uint16_t k16 = f32_to_bf16(kf[p * HEAD + d]), v16 = f32_to_bf16(vf[p * HEAD + d]);
            kf[p * HEAD + d] = bf16_to_f32(k16);
            vf[p * HEAD + d] = bf16_to_f32(v16);
            keys[p / KEY_BLOCK * KEY_BLOCK * HEAD + d * KEY_BLOCK + p % KEY_BLOCK] = k16;
            values[p / VALUE_BLOCK * VALUE_BLOCK * HEAD +
                   d / VALUE_LANE * VALUE_BLOCK * VALUE_LANE + p % VALUE_BLOCK * VALUE_LANE +
                   d % VALUE_LANE] = v16;
        }
    }
    for (const struct kernels *const *k = kernels_usable(); *k; k++) {
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
            (*k)->attend(q, keys, values, lengths[l], scores, got);
            for (int h = 0; h < KV_GROUP; h++) {
                double score[SPAN], top = -1e30, sum = 0, o[HEAD] = {0};
                for (int p = 0; p < lengths[l]; p++) {
                    score[p] = 0;
                    for (int d = 0; d < HEAD; d++) {
                        score[p] += (double)q[h * HEAD + d] * (double)kf[p * HEAD + d];
                    }
                    top = score[p] > top ? score[p] : top;
                }
                for (int p = 0; p < lengths[l]; p++) {
                    double e = exp(score[p] - top);
                    sum += e;
                    for (int d = 0; d < HEAD; d++) o[d] += e * (double)vf[p * HEAD + d];
                }
                close_to(got->max[h], top, 2e-6);
                close_to(got->sum[h], sum, 1e-5);
                for (int d = 0; d < HEAD; d++) close_to(got->out[h][d], o[d], 2e-5);
            }
        }
    }
    free(q), free(kf), free(vf), free(keys), free(values), free(scores), free(got);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quantise),       cmocka_unit_test(test_products),
        cmocka_unit_test(test_float_products), cmocka_unit_test(test_norms),
        cmocka_unit_test(test_gates),          cmocka_unit_test(test_delta),
        cmocka_unit_test(test_attend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
