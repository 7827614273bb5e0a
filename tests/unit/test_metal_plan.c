/* What the Metal backend would run, without a device: where every weight lies, that windows are
 * within a device's limit, and what one token of the real model costs against the goals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "backend/metal/decode_graph.h"
#include "backend/metal/plan.h"
#include "ckpt/ckpt.h"

static const struct shape *const real = &shape_qwen36_35b_a3b;

static void ok(int rc, const lily_err *err) {
    if (rc != LILY_OK) fail_msg("%d: %s", rc, err->msg);
}

static struct backend_plan plan(int32_t layers, int32_t depth, int32_t tokens) {
    struct plan_query q = {.layers = layers, .depth = depth, .tokens = tokens};
    struct backend_plan p;
    lily_err err;
    ok(metal_plan(real, &q, &p, &err), &err);
    return p;
}

/* ---- one token ------------------------------------------------------------------------------- */

/* The goals of a decoded token: kernels, sequential stages, and unique bytes within 3 % of weights
 * that a token needs, state, and 20,480 bytes of keys and values for each token of depth. */
static void a_token_is_within_its_budget(void **state) {
    (void)state;
    static const int32_t depths[] = {0, 4096, 32768, 131072};
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
        struct backend_plan p = plan(40, depths[i], 1);
        double bound = 1669561728.0 + 62914560.0 + 2949120.0 + 20480.0 * depths[i];
        double read = (double)(p.weight_bytes + p.state_bytes + p.kv_bytes);
        assert_true(p.kernels <= 350);
        assert_true(p.stages <= 260);
        assert_true(p.barriers < p.kernels);
        assert_true(read > 0.999 * bound && read < 1.03 * bound);
        assert_true(p.read_bytes >= p.weight_bytes + p.state_bytes + p.kv_bytes);
        assert_int_equal(p.command_buffers, 1);
        assert_int_equal(p.host_syncs, 0);
    }
}

static void layers_cost_alike(void **state) {
    (void)state;
    struct backend_plan a = plan(4, 0, 1), b = plan(8, 0, 1), c = plan(12, 0, 1);
    assert_int_equal(b.kernels - a.kernels, c.kernels - b.kernels);
    assert_true(b.weight_bytes - a.weight_bytes == c.weight_bytes - b.weight_bytes);
    assert_true(plan(40, 1000, 1).kv_bytes == 1001 * (uint64_t)20480);
}

static void impossible_questions_are_refused(void **state) {
    (void)state;
    static const struct plan_query wrong[] = {{40, 0, 0, 1},      {40, 0, 2049, 1}, {40, -1, 1, 1},
                                              {40, 262144, 1, 1}, {42, 0, 1, 1},    {0, 0, 1, 1},
                                              {44, 0, 1, 1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct backend_plan p;
        lily_err err;
        assert_int_equal(metal_plan(real, &wrong[i], &p, &err), LILY_EINVAL);
        assert_non_null(strstr(err.msg, "expected 1 to 2048 tokens"));
    }
    const struct plan_query two = {.layers = 40, .tokens = 1, .sessions = 2};
    struct backend_plan p;
    lily_err err;
    assert_int_equal(metal_plan(real, &two, &p, &err), LILY_EINVAL);
    assert_non_null(strstr(err.msg, "found 2 sessions in a step, expected one"));
}

/* ---- where weights lie ----------------------------------------------------------------------- */

static void check_units(const struct metal_tensors *t, int32_t first, uint64_t most) {
    int32_t seen = 0;
    for (int32_t i = 0; i < t->windows; i++) {
        assert_int_equal(t->window[i].begin % METAL_PAGE, 0);
        assert_int_equal(t->window[i].end % METAL_PAGE, 0);
        assert_true(t->window[i].end - t->window[i].begin <= most);
    }
    for (int32_t i = 0; i < t->units; i++) {
        for (int32_t j = 0; j < t->unit[i].mats; j++) {
            const struct metal_mat *m = t->unit[i].mat[j];
            const struct metal_window *w = &t->window[m->buffer - first];
            uint64_t size = w->end - w->begin, ahead = (uint64_t)(m->items - 1) * m->stride;
            assert_true(m->codes + ahead + mat_code_bytes(m) <= size);
            assert_true(m->scales + ahead + mat_scale_bytes(m) <= size);
            assert_true(m->biases + ahead + mat_scale_bytes(m) <= size);
            assert_int_equal(m->codes % 16, 0);
            assert_int_equal(m->buffer, t->unit[i].mat[0]->buffer);
            if (m->buffer - first > seen) seen = m->buffer - first;
        }
    }
    assert_int_equal(seen, t->windows - 1);
}

static void every_matrix_lies_in_one_window(void **state) {
    (void)state;
    static const uint64_t limits[] = {UINT64_MAX, (uint64_t)4 << 30, 500 << 20};
    static const int32_t windows[] = {1, 5, 40};
    for (size_t i = 0; i < 3; i++) {
        struct metal_tensors t;
        lily_err err;
        ok(tensors_place(real, 40, NULL, false, limits[i], 7, &t, &err), &err);
        check_units(&t, 7, limits[i]);
        assert_true(t.windows >= windows[i]);
        assert_true(t.mat_bytes > 19000000000u && t.mat_bytes < 20000000000u);
        tensors_free(&t);
    }
    struct metal_tensors t;
    lily_err err;
    assert_int_equal(tensors_place(real, 40, NULL, false, 100 << 20, 0, &t, &err), LILY_ENOMEM);
    assert_non_null(strstr(err.msg, "buffer length"));
}

/* A packed file is used where it is: each address is that of the loaded tensor. */
static void a_packed_file_is_used_in_place(void **state) {
    (void)state;
    char path[] = "/tmp/lily-metal-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct ckpt_synth_options synth = {.shape = "mini", .seed = 3, .packed = true};
    struct ckpt_options load = {0};
    struct ckpt *c;
    lily_err err;
    ok(ckpt_synth(path, &synth, &err), &err);
    ok(ckpt_load(path, &load, &c, &err), &err);
    const struct weights *w = ckpt_weights(c);
    struct metal_tensors t;
    ok(tensors_place(w->shape, w->layers, w, true, 1 << 20, 0, &t, &err), &err);
    assert_true(t.windows > 3);
    check_units(&t, 0, 1 << 20);
    for (int32_t i = 0; i < t.units; i++) {
        for (int32_t j = 0; j < t.unit[i].mats; j++) {
            const struct metal_mat *m = t.unit[i].mat[j];
            uint64_t base = t.window[m->buffer].begin;
            for (int32_t e = 0; e < m->items; e++) {
                uint64_t ahead = base + (uint64_t)e * m->stride;
                assert_true((uintptr_t)m->source[e].data == ahead + m->codes);
                assert_true((uintptr_t)m->source[e].scales == ahead + m->scales);
                assert_true((uintptr_t)m->source[e].biases == ahead + m->biases);
            }
        }
    }
    tensors_free(&t);
    ckpt_free(c);
    unlink(path);
}

/* A stride that kernels could not take as it is, or that is none, is refused. Nothing is read at
 * these addresses. */
static void experts_too_far_apart_are_refused(void **state) {
    (void)state;
    static const uint64_t strides[] = {(uint64_t)5 << 30, (uint64_t)-4096, 1769480, 4096};
    struct ckpt *c;
    struct ckpt_options options = {0};
    lily_err err;
    ok(ckpt_load(NULL, &options, &c, &err), &err);
    struct weights w = *ckpt_weights(c);
    const struct layer_weights first = w.layer[0];
    size_t experts = (size_t)w.shape->experts;
    struct mat *gate = calloc(experts, sizeof *gate);
    assert_non_null(gate);
    memcpy(gate, first.moe.gate, experts * sizeof *gate);
    struct layer_weights layer = first;
    layer.moe.gate = gate;
    w.layer = &layer;
    w.layers = 1;
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        struct metal_tensors t;
        gate[1].data = (const uint8_t *)((uintptr_t)gate[0].data + (uintptr_t)strides[i]);
        assert_int_equal(tensors_place(w.shape, w.layers, &w, true, UINT64_MAX, 0, &t, &err),
                         LILY_EMODEL);
        if (!strstr(err.msg, "bytes apart, expected a multiple of 16")) fail_msg("%s", err.msg);
    }
    free(gate);
    ckpt_free(c);
}

/* All that a session and a step take, at the real shape: nothing as large as weights in bf16. */
static void no_buffer_could_hold_dequantised_weights(void **state) {
    (void)state;
    struct metal_layout l;
    lily_err err;
    ok(layout_make(real, 40, NULL, false, 2048, 4096, 1, UINT64_MAX, &l, &err), &err);
    uint64_t smallest = 2 * (uint64_t)real->experts * (uint64_t)real->expert_width *
                        (uint64_t)real->hidden; /* one matrix of one layer's experts */
    for (int32_t i = 0; i < METAL_FIXED; i++) assert_true(l.bytes[i] < smallest);
    assert_true(layout_scratch_bytes(&l) < (uint64_t)1 << 30);
    assert_int_equal(layout_state_bytes(&l), 62914560 + 2 * 1474560);
    assert_int_equal(layout_session_buffer(&l, SESSION_KV, 1000) * 10, 1000 * 20480);
    layout_free(&l);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_token_is_within_its_budget),
        cmocka_unit_test(layers_cost_alike),
        cmocka_unit_test(impossible_questions_are_refused),
        cmocka_unit_test(every_matrix_lies_in_one_window),
        cmocka_unit_test(a_packed_file_is_used_in_place),
        cmocka_unit_test(experts_too_far_apart_are_refused),
        cmocka_unit_test(no_buffer_could_hold_dequantised_weights),
    };
    return cmocka_run_group_tests_name("metal plan", tests, NULL, NULL);
}
