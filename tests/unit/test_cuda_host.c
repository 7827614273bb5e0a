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
#include "backend/cuda/kernels/prefill_kernels.h"
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

static struct backend_plan plan_of(struct plan_query q) {
    struct backend_plan plan;
    lily_err err;
    int rc = backend_cuda.plan(&shape_qwen36_35b_a3b, &q, &plan, &err);
    if (rc != LILY_OK) fail_msg("%s", err.msg);
    return plan;
}

/* A token is one kernel whose barriers are those that the host counts on; a prompt's chunk goes
 * through the kernels of a 9.0, several sessions through the batched ones. */
static void plans(void **state) {
    (void)state;
    struct backend_plan token = plan_of((struct plan_query){.layers = 40, .tokens = 1});
    struct backend_plan deep =
        plan_of((struct plan_query){.layers = 40, .depth = 4096, .tokens = 1});
    assert_int_equal(token.kernels, 1);
    assert_int_equal(token.host_syncs, 0);
    assert_int_equal(token.barriers, 40 / 4); /* where partial attention is handed over */
    assert_true(token.stages > 4 * 40 && token.stages < 5 * 40);
    /* 20,480 bytes a position; weights are read once, whatever the depth. */
    assert_int_equal(deep.kv_bytes - token.kv_bytes, 4096 * 20480);
    assert_int_equal(deep.weight_bytes, token.weight_bytes);
    /* The scales of second halves are there twice: 1.5 % more than the least. */
    assert_true(token.weight_bytes > 1669561728u && token.weight_bytes < 1702952960u);
    /* Half the layers, half the launches, but for embedding, first norm, head and two checks. */
    struct backend_plan prompt = plan_of((struct plan_query){.layers = 40, .tokens = 512});
    struct backend_plan half = plan_of((struct plan_query){.layers = 20, .tokens = 512});
    assert_int_equal(2 * (half.kernels - 6), prompt.kernels - 6);
    assert_int_equal(prompt.barriers, 0);
    /* A last token that is decoded reads the weights again, but for a second head. */
    struct backend_plan grid = plan_of((struct plan_query){.layers = 40, .tokens = 64});
    struct backend_plan behind = plan_of((struct plan_query){.layers = 40, .tokens = 65});
    assert_true(behind.read_bytes - grid.read_bytes > token.weight_bytes / 5 * 4);
    assert_true(behind.read_bytes - grid.read_bytes < token.weight_bytes);
    /* Few tokens are decoded one by one; behind a chunk, fewer. */
    struct backend_plan six = plan_of((struct plan_query){.layers = 40, .tokens = 6});
    struct backend_plan seven = plan_of((struct plan_query){.layers = 40, .tokens = 7});
    struct backend_plan three = plan_of((struct plan_query){.layers = 40, .tokens = 67});
    struct backend_plan four = plan_of((struct plan_query){.layers = 40, .tokens = 68});
    assert_int_equal(six.kernels, 6 * token.kernels);
    assert_true(seven.kernels > 100);
    assert_true(three.kernels > 3 + seven.kernels / 2);
    assert_true(three.read_bytes > four.read_bytes);
    struct backend_plan two =
        plan_of((struct plan_query){.layers = 40, .tokens = 1, .sessions = 2});
    struct backend_plan all =
        plan_of((struct plan_query){.layers = 40, .tokens = 1, .sessions = 32});
    assert_int_equal(two.kernels, all.kernels);
    assert_true(two.kernels < 10 * 40 && two.host_syncs == 0);
    assert_int_equal(all.state_bytes, 32 * token.state_bytes);
    assert_int_equal(all.kv_bytes, 32 * token.kv_bytes);
    /* More than the batched kernels take go through the portable ones, all at once. */
    struct backend_plan most =
        plan_of((struct plan_query){.layers = 40, .tokens = 1, .sessions = CUDA_MOST_SESSIONS});
    assert_true(most.kernels > two.kernels && most.kernels < 20 * 40);
    assert_int_equal(most.kv_bytes, CUDA_MOST_SESSIONS * token.kv_bytes);
}

static void impossible_questions_are_refused(void **state) {
    (void)state;
    static const struct plan_query wrong[] = {{40, 0, 0, 0},      {40, 0, 4097, 0}, {40, -1, 1, 0},
                                              {40, 262144, 1, 0}, {42, 0, 1, 0},    {0, 0, 1, 0},
                                              {44, 0, 1, 0},      {40, 0, 1, 1025}, {40, 0, 2, 2},
                                              {40, 0, 1, -1},     {40, 63, 4096, 0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct backend_plan p;
        lily_err err = {0};
        assert_int_equal(cuda_plan(&shape_qwen36_35b_a3b, &wrong[i], &p, &err), LILY_EINVAL);
        assert_non_null(strstr(err.msg, "plan: found "));
    }
}

/* ---- what can be done without ---------------------------------------------------------------- */

/* The large model on a card that refuses one allocation. */
static struct backend_model *recorded(struct cuda_record *r, struct cuda_driver *d,
                                      const struct weights *w, size_t refuse) {
    static const struct backend_options options = {.max_sessions = 2, .max_context = 32768};
    struct backend_model *m;
    lily_err err;
    *r = (struct cuda_record){.refuse = refuse};
    cuda_record_begin(r, d);
    int rc = cuda_open_recorded(w, &options, d, &m, &err);
    if (rc != LILY_OK) fail_msg("%s", err.msg);
    return m;
}

/* A chunk is over within about 0.4 s whatever the card and the depth, once one was timed. */
static void chunks_end_in_time(void **state) {
    (void)state;
    struct cuda_record r;
    struct cuda_driver d;
    struct weights w;
    lily_err err;
    assert_int_equal(cuda_sized_weights(&shape_qwen36_35b_a3b, 40, &w, &err), LILY_OK);
    struct backend_model *m = recorded(&r, &d, &w, 0);
    assert_int_equal(cuda_chunk_rows(m, 0), CUDA_CHUNK); /* the fast kernels' first */
    /* As an H200: 51,204 tok/s at 4,096 tokens, 0.2 s a chunk at 98,304. */
    cuda_chunk_took(m, 0, 4096, 0.08);
    assert_int_equal(cuda_chunk_rows(m, 61440), CUDA_CHUNK);
    cuda_chunk_took(m, 98304, 4096, 0.2);
    assert_int_equal(cuda_chunk_rows(m, 196608), CUDA_CHUNK);
    /* A slow card, at several depths, and one that is slower than foretold there. */
    for (int32_t depth = 0; depth < 262144; depth += 20480) {
        int32_t rows = cuda_chunk_rows(m, depth), last = 0;
        for (int i = 0; i < 12; i++) {
            double seconds = rows * (300e-6 + 5e-9 * depth); /* 3,300 tok/s at first */
            cuda_chunk_took(m, depth, rows, seconds);
            last = rows;
            rows = cuda_chunk_rows(m, depth);
            assert_int_equal(rows % BACKEND_GRID, 0);
        }
        double seconds = last * (300e-6 + 5e-9 * depth);
        assert_true(seconds < 0.5 && (seconds > 0.3 || last == CUDA_CHUNK));
    }
    /* Short chunks say nothing of long ones, unless they are slow. */
    int32_t rows = cuda_chunk_rows(m, 0);
    cuda_chunk_took(m, 0, 64, 0.013);
    assert_int_equal(cuda_chunk_rows(m, 0), rows);
    cuda_chunk_took(m, 0, 128, 60);
    assert_int_equal(cuda_chunk_rows(m, 0), 2 * BACKEND_GRID);
    cuda_chunk_took(m, 0, 128, 1e-9);
    assert_true(cuda_chunk_rows(m, 0) < 4 * BACKEND_GRID);
    cuda_close(m);
    cuda_record_end();
    cuda_sized_weights_free(&w);
}

static CUresult no_prompt_kernels(CUfunction *out, CUmodule module, const char *name) {
    (void)module;
    if (strncmp(name, "prompt_", 7) == 0) return CU_ERROR_NO_BINARY;
    *out = (CUfunction)(uintptr_t)name;
    return 0;
}

static void fast_paths_that_do_not_fit(void **state) {
    (void)state;
    struct cuda_record r;
    struct cuda_driver d;
    struct weights w;
    lily_err err;
    assert_int_equal(cuda_sized_weights(&shape_qwen36_35b_a3b, 8, &w, &err), LILY_OK);
    struct backend_model *m = recorded(&r, &d, &w, 0);
    size_t decode = cuda_decode_bytes(m);
    assert_non_null(m->prompt);
    assert_non_null(m->decode);
    assert_int_equal(m->n_paths, 3);
    cuda_close(m);
    m = recorded(&r, &d, &w, decode);
    assert_non_null(m->prompt);
    assert_null(m->decode);
    assert_int_equal(m->n_paths, 2);
    cuda_close(m);
    /* The same where kernels are missing. */
    static const struct backend_options options = {.max_sessions = 2, .max_context = 32768};
    r = (struct cuda_record){0};
    cuda_record_begin(&r, &d);
    d.module_function = no_prompt_kernels;
    assert_int_equal(cuda_open_recorded(&w, &options, &d, &m, &err), LILY_OK);
    assert_null(m->prompt);
    assert_int_equal(m->n_paths, 3);
    assert_true(!m->chunk.pieces && m->chunk.gates); /* places as the portable ones want */
    cuda_close(m);
    /* A matrix that is not of 4 bits lies as rows, which the fast kernels do not read. */
    struct mat *down = calloc((size_t)w.shape->experts, sizeof *down);
    assert_non_null(down);
    for (int32_t e = 0; e < w.shape->experts; e++) {
        down[e] = w.layer[5].moe.down[e];
        down[e].bits = 8;
    }
    w.layer[5].moe.down = down;
    m = recorded(&r, &d, &w, 0);
    assert_null(m->prompt);
    assert_int_equal(m->n_paths, 1);
    cuda_close(m);
    free(down);
    cuda_record_end();
    cuda_sized_weights_free(&w);
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

enum { DEFAULT_STATES = 6 };

/* Bytes of everything for one session of 32K tokens, saved states and driver included. */
static struct cuda_need needed(int32_t capability, uint64_t *total, size_t *placed) {
    const struct shape *s = &shape_qwen36_35b_a3b;
    struct weights w;
    lily_err err;
    assert_int_equal(cuda_sized_weights(s, s->layers, &w, &err), LILY_OK);
    struct backend_model m = {.w = &w,
                              .options = {.max_sessions = 1, .max_context = 32768},
                              .capability = capability,
                              .processors = 132,
                              .shared_limit = 227 * 1024};
    cuda_set_sizes(&m);
    assert_int_equal(m.rows, CUDA_CHUNK);
    assert_int_equal(cuda_weights_plan(&m, &err), LILY_OK);
    struct cuda_need need = cuda_need(&m);
    *placed = cuda_scratch_bytes(&m);
    *total = need.weights + need.scratch + need.sessions + need.reserve + need.context +
             DEFAULT_STATES * cuda_state_bytes(&m);
    /* The fast kernels are in use exactly where tiles are. */
    assert_int_equal(cuda_decode_bytes(&m) > 0, capability == 90);
    assert_int_equal(cuda_prompt_suits(&m), capability == 90);
    free(m.dw.layer);
    cuda_sized_weights_free(&w);
    return need;
}

/* Bytes of the largest stage of a chunk, the delta rule's: residual stream, projections, channels,
 * result, and of prompt.c what the pieces leave. */
static size_t most_at_once(bool fast) {
    const struct shape *s = &shape_qwen36_35b_a3b;
    size_t at[4], size = fast ? 2 : 4, conv = (size_t)s->conv_dim, v = (size_t)s->gdn_v_dim;
    size_t row = 4 * (size_t)s->hidden + size * (conv + v + conv + v);
    size_t pieces = prefill_delta_bytes(CUDA_CHUNK / 64 + 1, s->gdn_v_heads, at);
    return CUDA_CHUNK * row + (fast ? pieces : 0);
}

static void one_copy_fits_a_card_of_24_gb(void **state) {
    (void)state;
    static const int32_t capabilities[] = {90, 89};
    struct cuda_need need[2];
    for (int i = 0; i < 2; i++) {
        uint64_t total;
        size_t placed;
        need[i] = needed(capabilities[i], &total, &placed);
        print_message("32K context at %d: %.2f GB, weights %.2f, scratch %.3f\n", capabilities[i],
                      (double)total / 1e9, (double)need[i].weights / 1e9,
                      (double)need[i].scratch / 1e9);
        assert_true(total < 22500000000u);
        assert_true(placed < most_at_once(i == 0) / 100 * 102);
    }
    /* 128 KB of scales twice an expert: 64 KB more (tile.h); else the same bytes. */
    assert_true(need[0].weights - need[1].weights < 41u * 257u * 65536u);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_driver),
        cmocka_unit_test(foreign_driver),
        cmocka_unit_test(plans),
        cmocka_unit_test(impossible_questions_are_refused),
        cmocka_unit_test(chunks_end_in_time),
        cmocka_unit_test(fast_paths_that_do_not_fit),
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
