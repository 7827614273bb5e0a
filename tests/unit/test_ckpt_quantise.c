/* The quantiser against the published formula written out plainly, in double where that is exact,
 * on random, constant, tiny, huge, one-sided and tied rows. tests/e2e/test_checkpoints.py compares
 * it with numpy, and with MLX itself where that is installed. */
#include "ckpt_fixture.h"

#include <math.h>

#include "base/bf16.h"
#include "ckpt/quantise.h"

static uint64_t seed = 1;

static double uniform(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(seed >> 11) * 0x1p-53;
}

static double normal(void) {
    return sqrt(-2 * log(1 - uniform())) * cos(6.283185307179586 * uniform());
}

/* One group, one step after the other. */
static void plain(const uint16_t *w, int bits, uint8_t *codes, uint16_t *scale_out,
                  uint16_t *bias_out) {
    float n = bits == 8 ? 255.0f : 15.0f;
    float min = bf16_to_f32(w[0]), max = 0;
    for (int i = 0; i < 64; i++) {
        min = fminf(min, bf16_to_f32(w[i]));
        max = fmaxf(max, bf16_to_f32(w[i]));
    }
    bool side = fabsf(min) > fabsf(max);
    float scale = fmaxf((max - min) / n, 1e-7f);
    scale = side ? scale : -scale;
    float edge = side ? min : max;
    float q0 = roundf(edge / scale), bias = 0;
    if (q0 != 0) {
        scale = edge / q0;
        bias = edge;
    }
    for (int i = 0; i < 64; i++) {
        float q = fminf(roundf((bf16_to_f32(w[i]) - bias) / scale), n);
        uint8_t code = (uint8_t)(q < 0 ? 0 : q);
        if (bits == 8) {
            codes[i] = code;
        } else if (i % 2 == 0) {
            codes[i / 2] = code;
        } else {
            codes[i / 2] |= (uint8_t)(code << 4);
        }
    }
    *scale_out = f32_to_bf16(scale);
    *bias_out = f32_to_bf16(bias);
}

static void compare(const uint16_t *w, size_t groups) {
    for (int bits = 4; bits <= 8; bits += 4) {
        size_t bytes = (size_t)(64 * bits / 8);
        uint8_t *codes = malloc(groups * bytes), want[64];
        uint16_t *scales = malloc(2 * groups), *biases = malloc(2 * groups), scale, bias;
        assert_int_equal(quantise_groups((const uint8_t *)w, groups, bits, codes, scales, biases),
                         SIZE_MAX);
        for (size_t g = 0; g < groups; g++) {
            plain(w + 64 * g, bits, want, &scale, &bias);
            assert_int_equal(scales[g], scale);
            assert_int_equal(biases[g], bias);
            assert_memory_equal(codes + g * bytes, want, bytes);
        }
        free(codes);
        free(scales);
        free(biases);
    }
}

enum { GROUPS = 4000 };

static void test_random(void **state) {
    (void)state;
    uint16_t *w = malloc(2 * 64 * GROUPS);
    const double spreads[] = {1e-30, 1e-9, 1e-4, 0.02, 1, 3e4, 1e30};
    for (size_t s = 0; s < sizeof spreads / sizeof *spreads; s++) {
        for (int offset = -1; offset <= 1; offset++) { /* both sides of zero, and one only */
            for (size_t i = 0; i < 64 * GROUPS; i++) {
                w[i] = f32_to_bf16((float)(spreads[s] * (normal() + 4 * offset)));
            }
            compare(w, GROUPS);
        }
    }
    free(w);
}

/* Few distinct values: ties of the rounding everywhere. */
static void test_ties(void **state) {
    (void)state;
    uint16_t *w = malloc(2 * 64 * GROUPS);
    for (size_t i = 0; i < 64 * GROUPS; i++) {
        w[i] = f32_to_bf16((float)(floor(uniform() * 31) - 15) / 8);
    }
    compare(w, GROUPS);
    free(w);
}

static void fill(uint16_t *w, float even, float odd) {
    for (int i = 0; i < 64; i++) w[i] = f32_to_bf16(i % 2 ? odd : even);
}

static void test_special_groups(void **state) {
    (void)state;
    const float pairs[][2] = {{0, 0},          {-0.0f, 0},     {-0.0f, -0.0f}, {1, 1},
                              {-1, -1},        {1, -1},        {0, 1},         {0, -1},
                              {1e-8f, -1e-8f}, {5e-8f, 0},     {-5e-8f, 0},    {1e-40f, -1e-40f},
                              {3e38f, 3e38f},  {3e38f, 2e38f}, {-3e38f, 0},    {0.5f, 100}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        uint16_t w[64];
        fill(w, pairs[i][0], pairs[i][1]);
        compare(w, 1);
    }
}

/* The edge of larger magnitude is exact, and a scale's sign tells its side. */
static void test_edges(void **state) {
    (void)state;
    uint16_t w[64], scale, bias;
    uint8_t codes[32];
    fill(w, -2, 1);
    quantise_groups((const uint8_t *)w, 1, 4, codes, &scale, &bias);
    assert_true(bf16_to_f32(scale) > 0);
    assert_true(bf16_to_f32(bias) == -2);
    assert_int_equal(codes[0] & 15, 0);
    fill(w, -1, 2);
    quantise_groups((const uint8_t *)w, 1, 4, codes, &scale, &bias);
    assert_true(bf16_to_f32(scale) < 0);
    assert_true(bf16_to_f32(bias) == 2);
    assert_int_equal(codes[0] >> 4, 0);
}

static void test_not_finite(void **state) {
    (void)state;
    uint16_t w[256];
    uint8_t codes[256];
    uint16_t scales[4], biases[4];
    const uint16_t bad[] = {0x7f80, 0xff80, 0x7fc0, 0xffff};
    for (int k = 0; k < 4; k++) {
        for (size_t at = 0; at < 256; at += 85) {
            for (int g = 0; g < 4; g++) fill(w + 64 * g, 1, -1);
            w[at] = bad[k];
            assert_int_equal(quantise_groups((const uint8_t *)w, 4, 4, codes, scales, biases), at);
        }
    }
    /* A range that float32 cannot hold. */
    fill(w, 3e38f, -3e38f);
    assert_int_equal(quantise_groups((const uint8_t *)w, 1, 4, codes, scales, biases), 0);
}

/* Any alignment. */
static void test_odd_address(void **state) {
    (void)state;
    uint8_t bytes[129];
    uint16_t w[64], scale[2], bias[2];
    uint8_t codes[2][32];
    for (int i = 0; i < 64; i++) w[i] = f32_to_bf16((float)normal());
    memcpy(bytes + 1, w, 128);
    quantise_groups((const uint8_t *)w, 1, 4, codes[0], &scale[0], &bias[0]);
    quantise_groups(bytes + 1, 1, 4, codes[1], &scale[1], &bias[1]);
    assert_memory_equal(codes[0], codes[1], 32);
    assert_int_equal(scale[0], scale[1]);
    assert_int_equal(bias[0], bias[1]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),         cmocka_unit_test(test_ties),
        cmocka_unit_test(test_special_groups), cmocka_unit_test(test_edges),
        cmocka_unit_test(test_not_finite),     cmocka_unit_test(test_odd_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
