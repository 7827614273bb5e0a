/* What the CUDA backend does without a GPU: a missing or foreign driver is answered in words, and a
 * step's plan is counted by the code that would run it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"

#ifdef LILY_CUDA
#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/tile.h"

static void no_driver(void **state) {
    (void)state;
    lily_err err = {0};
    assert_null(cuda_driver_open_from("libnot-there.so.9", &err));
    assert_int_equal(err.code, LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "found no libnot-there.so.9"));
    assert_non_null(strstr(err.msg, "use the CPU backend"));
}

/* A library that is there but lacks the functions: as a driver that is too old. */
static void foreign_driver(void **state) {
    (void)state;
    lily_err err = {0};
    assert_null(cuda_driver_open_from("libm.so.6", &err));
    assert_int_equal(err.code, LILY_EBACKEND);
    assert_non_null(strstr(err.msg, "libm.so.6 without cuInit"));
    assert_non_null(strstr(err.msg, "update the NVIDIA driver"));
}

static struct backend_plan plan_of(int32_t layers, int32_t depth, int32_t tokens) {
    struct backend_plan plan;
    lily_err err;
    const struct plan_query query = {.layers = layers, .depth = depth, .tokens = tokens};
    assert_int_equal(backend_cuda.plan(&shape_qwen36_35b_a3b, &query, &plan, &err), LILY_OK);
    return plan;
}

static void plans(void **state) {
    (void)state;
    struct backend_plan token = plan_of(40, 0, 1), deep = plan_of(40, 4096, 1);
    struct backend_plan prompt = plan_of(40, 0, 512), half = plan_of(20, 0, 512);
    assert_int_equal(token.host_syncs, 0);
    assert_true(token.barriers > 0 && token.barriers < 6 * 40);
    /* 20,480 bytes a position; weights are read once, whatever the depth. */
    assert_int_equal(deep.kv_bytes - token.kv_bytes, 4096 * 20480);
    assert_int_equal(deep.weight_bytes, token.weight_bytes);
    assert_true(token.weight_bytes > 1600000000u && token.weight_bytes < 1800000000u);
    /* Half the layers, half the launches, but for embedding, head and check. */
    assert_int_equal(2 * (half.kernels - 4), prompt.kernels - 4);
    assert_int_equal(prompt.host_syncs, 1);
}

/* ---- weights as tiles ------------------------------------------------------------------------ */

enum { COLS = 256 };
static uint8_t codes[2][160 * COLS];
static uint16_t scales[2][160 * COLS / 64], biases[2][160 * COLS / 64];

static struct mat matrix(int i, int32_t rows, int32_t bits) {
    for (size_t k = 0; k < sizeof codes[i]; k++)
        codes[i][k] = (uint8_t)(k * 37 + k / 251 + (size_t)i);
    for (size_t k = 0; k < sizeof scales[i] / 2; k++) {
        scales[i][k] = (uint16_t)(7 * k + (size_t)i), biases[i][k] = (uint16_t)(9 * k + 1000);
    }
    return (struct mat){codes[i], scales[i], biases[i], rows, COLS, bits};
}

/* Code and factors of the tall matrix's row r, as the tiles have them. */
static void look(const struct cuda_tiles *t, const char *tiles, int32_t r, int32_t k, int *code,
                 uint32_t *factors) {
    int32_t height = t->layout == CUDA_DOWN ? 128 : t->layout == CUDA_BYTE ? 16 : 32;
    int32_t width = t->layout == CUDA_DOWN ? 32 : 128, in = r % height, at = k % width;
    size_t row_tiles = (size_t)((t->rows + height - 1) / height), tile;
    size_t row = (size_t)(r / height), slice = (size_t)(k / width);
    tile = t->slices ? slice * row_tiles + row : row * (size_t)(COLS / width) + slice;
    int byte, factor;
    if (t->layout == CUDA_DOWN) {
        tiles += tile * TILE_DOWN_BYTES;
        byte = tile_down_codes(in, at), factor = tile_down_scale(in);
    } else if (t->layout == CUDA_BYTE) {
        tiles += tile * TILE_BYTE_BYTES;
        byte = tile_byte_codes(in, at), factor = tile_byte_scale(in, at / 64);
    } else {
        tiles += tile * TILE_WIDE_BYTES;
        byte = tile_wide_codes(in, at), factor = tile_wide_scale(in, at / 64);
    }
    *code = (uint8_t)tiles[byte];
    if (t->layout != CUDA_BYTE) *code = *code >> (4 * (k & 1)) & 15;
    memcpy(factors, tiles + factor, sizeof *factors);
}

/* Every value of every form, and the same bytes however the filling is cut. */
static void tiles_hold_the_matrix(void **state) {
    (void)state;
    struct mat first = matrix(0, 136, 4), second = matrix(1, 8, 4), wide = matrix(1, 8, 8);
    struct mat pair = matrix(1, 136, 4), down = matrix(0, 128, 4);
    const struct cuda_tiles all[] = {
        {CUDA_WIDE, false, false, 2, 144, COLS, {&first, &second}},
        {CUDA_WIDE, true, false, 1, 136, COLS, {&first}},
        {CUDA_WIDE, false, true, 2, 272, COLS, {&first, &pair}},
        {CUDA_DOWN, true, false, 1, 128, COLS, {&down}},
        {CUDA_BYTE, false, false, 2, 144, COLS, {&first, &wide}},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const struct cuda_tiles *t = &all[i];
        size_t bytes = cuda_tiles_bytes(t);
        char *whole = malloc(bytes), *cut = malloc(bytes);
        assert_true(whole && cut);
        cuda_tiles_fill(t, 0, bytes, whole);
        for (size_t at = 0; at < bytes; at += 1000) {
            cuda_tiles_fill(t, at, at + 1000 < bytes ? at + 1000 : bytes, cut + at);
        }
        assert_memory_equal(whole, cut, bytes);
        for (int32_t r = 0; r < t->rows; r++) {
            const struct mat *m = t->from[t->in_turns ? r % 2 : r >= t->from[0]->rows];
            int32_t own = t->in_turns ? r / 2 : r % t->from[0]->rows;
            for (int32_t k = 0; k < COLS; k++) {
                size_t at = (size_t)own * COLS + (size_t)k;
                int code,
                    expected = m->bits == 8 ? m->data[at] : m->data[at / 2] >> (4 * (k & 1)) & 15;
                uint32_t factors;
                look(t, whole, r, k, &code, &factors);
                assert_int_equal(code, expected);
                assert_int_equal(factors, m->scales[at / 64] | (uint32_t)m->biases[at / 64] << 16);
            }
        }
        free(whole);
        free(cut);
    }
}

/* ---- what the large model takes -------------------------------------------------------------- */

static struct mat absent(int32_t rows, int32_t cols, int32_t bits) {
    return (struct mat){.rows = rows, .cols = cols, .bits = bits};
}

/* The published checkpoint's widths: 4 bits, router and shared gate 8. */
static void size_layer(const struct shape *s, struct layer_weights *l, struct mat *experts) {
    int32_t h = s->hidden, e = s->experts;
    l->attention = (struct attention_weights){.q_proj = absent(2 * s->q_dim, h, 4),
                                              .k_proj = absent(s->kv_dim, h, 4),
                                              .v_proj = absent(s->kv_dim, h, 4),
                                              .o_proj = absent(h, s->q_dim, 4)};
    l->deltanet = (struct deltanet_weights){.in_proj_qkv = absent(s->conv_dim, h, 4),
                                            .in_proj_z = absent(s->gdn_v_dim, h, 4),
                                            .in_proj_b = absent(s->gdn_v_heads, h, 4),
                                            .in_proj_a = absent(s->gdn_v_heads, h, 4),
                                            .out_proj = absent(h, s->gdn_v_dim, 4)};
    for (int32_t i = 0; i < e; i++) {
        experts[i] = absent(s->expert_width, h, 4);
        experts[e + i] = absent(h, s->expert_width, 4);
    }
    l->moe = (struct moe_weights){.router = absent(e, h, 8),
                                  .gate = experts,
                                  .up = experts,
                                  .down = experts + e,
                                  .shared_gate_proj = absent(s->shared_width, h, 4),
                                  .shared_up_proj = absent(s->shared_width, h, 4),
                                  .shared_down_proj = absent(h, s->shared_width, 4),
                                  .shared_gate = absent(1, h, 8)};
}

/* Bytes of weights and of everything for one session of 32K tokens. */
static uint64_t total(int32_t capability, uint64_t *of_weights) {
    const struct shape *s = &shape_qwen36_35b_a3b;
    struct weights w = {.shape = s,
                        .layers = s->layers,
                        .embed = absent(s->vocab, s->hidden, 4),
                        .lm_head = absent(s->vocab, s->hidden, 4)};
    struct mat *experts = calloc(2 * (size_t)s->experts, sizeof *experts);
    w.layer = calloc((size_t)s->layers, sizeof *w.layer);
    assert_true(experts && w.layer);
    for (int32_t l = 0; l < s->layers; l++) size_layer(s, &w.layer[l], experts);
    struct backend_model m = {.w = &w,
                              .options = {.max_sessions = 1, .max_context = 32768},
                              .capability = capability,
                              .processors = 132,
                              .shared_limit = 227 * 1024};
    lily_err err;
    cuda_set_sizes(&m);
    assert_int_equal(cuda_weights_plan(&m, &err), LILY_OK);
    struct cuda_need need = cuda_need(&m);
    *of_weights = need.weights;
    /* The fast kernels are in use exactly where tiles are. */
    assert_int_equal(cuda_decode_bytes(&m) > 0, capability == 90);
    assert_int_equal(cuda_prompt_bytes(&m) > 0, capability == 90);
    free(m.dw.layer);
    free(w.layer);
    free(experts);
    return need.weights + need.scratch + need.sessions + need.reserve;
}

static void one_copy_fits_a_card_of_24_gb(void **state) {
    (void)state;
    uint64_t tiles, planar, most = 22500000000u;
    uint64_t hopper = total(90, &tiles), ada = total(89, &planar);
    print_message("32K context: %.2f GB at 9.0 (weights %.2f), %.2f GB at 8.9 (weights %.2f)\n",
                  (double)hopper / 1e9, (double)tiles / 1e9, (double)ada / 1e9,
                  (double)planar / 1e9);
    assert_true(hopper < most && ada < most);
    /* 128 KB of scales twice an expert: 64 KB more (tile.h); else the same bytes. */
    assert_true(tiles - planar < 41u * 257u * 65536u);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_driver),
        cmocka_unit_test(foreign_driver),
        cmocka_unit_test(plans),
        cmocka_unit_test(tiles_hold_the_matrix),
        cmocka_unit_test(one_copy_fits_a_card_of_24_gb),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void) {
    print_message("skipped: the CUDA backend is part of builds for Linux\n");
    return 0;
}
#endif
