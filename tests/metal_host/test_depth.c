/* Long contexts without reading them: random keys and values are imported as if the tokens had been
 * read, into ref too, and a token and a few prompt rows behind them are compared. Each depth has
 * kernels or layouts of its own: partial results merged by themselves (300), spans of a prompt's
 * attention side by side and one after another (2,100), fixed blocks (33,000). A prompt's attention
 * by tensor operations too. */
#include "backend/metal/metal.h"
#include "base/bf16.h"
#include "harness.h"

enum { MOST_ROWS = 80 };

static uint32_t drawn = 1;
static float draw(void) {
    drawn = drawn * 1664525u + 1013904223u;
    return (float)(int32_t)(drawn >> 8) / (float)(1 << 23) - 1;
}

/* The same rows into both, at the size that keys after their norm have; and zero states there. */
static void go_to(struct bench *metal, struct bench *ref, int32_t depth) {
    size_t n = metal->b->kv_bytes(metal->m, depth) / 2;
    uint16_t *rows = malloc(n * sizeof *rows);
    float *wide = malloc(n * sizeof *wide);
    struct bench *both[] = {metal, ref};
    lily_err err;
    assert_int_equal(ref->b->kv_bytes(ref->m, depth), n * sizeof *wide);
    for (size_t i = 0; i < n; i++) {
        rows[i] = f32_to_bf16(2 * draw());
        wide[i] = bf16_to_f32(rows[i]);
    }
    for (int i = 0; i < 2; i++) {
        const void *in = i == 0 ? (const void *)rows : wide;
        struct backend_state *zero;
        both[i]->b->reset(both[i]->s);
        ok(both[i]->b->state_new(both[i]->m, &zero, &err), &err);
        ok(both[i]->b->state_save(both[i]->s, zero, &err), &err);
        ok(both[i]->b->kv_import(both[i]->s, 0, depth, in, &err), &err);
        ok(both[i]->b->state_restore(both[i]->s, zero, depth, &err), &err);
        both[i]->b->state_free(zero);
    }
    free(rows);
    free(wide);
}

static bool ran(const struct bench *x, int32_t kernel) {
    for (int32_t i = 0; i < x->m->graph->dispatches; i++) {
        if (x->m->graph->dispatch[i].kernel == kernel) return true;
    }
    return false;
}

static void close_to(const float *right, const float *mine, int32_t vocab, const char *what) {
    struct gap g = logits_gap(right, mine, vocab);
    printf("%s: KL %.2e, largest difference %.2e\n", what, g.kl, g.worst);
    figure("kl at depth", g.kl);
    assert_true(g.kl < 5e-3);
}

/* On that device, or the usual one. */
static void on_device(const char *name, bool checked) {
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = checked;
    if (name) o.profile = *metal_emu_profile(name), o.seed = 2; /* another layout of registers */
    metal_emu_configure(&o);
}

/* expected: a kernel of the decoded token, and one of the prompt rows. */
static void at_depth(const char *device, int32_t depth, int32_t rows, int32_t decode_kernel,
                     int32_t prompt_kernel, bool checked) {
    const struct weights *w = ckpt_weights(stand_in());
    struct backend_options o = {
        .threads = 1, .max_sessions = 1, .max_context = depth + MOST_ROWS + 1};
    int32_t vocab = w->shape->vocab, ids[MOST_ROWS];
    float *mine = calloc((size_t)vocab, sizeof *mine);
    float *right = calloc((size_t)vocab, sizeof *right);
    for (int32_t i = 0; i < MOST_ROWS; i++) ids[i] = 31 + i * 97 % 3000;
    on_device(device, checked);
    struct bench metal = bench_open(&backend_metal, w, &o);
    assert_int_equal(metal.m->tensor_attention, device != NULL);
    struct bench ref = bench_open(&backend_ref, w, &o);
    if (rows > MOST_ROWS / 2) metal.m->layout.rows = MOST_ROWS; /* as with little memory */
    go_to(&metal, &ref, depth);
    bench_step(&metal, 40, NULL, 0, mine);
    assert_true(ran(&metal, decode_kernel));
    bench_step(&ref, 40, NULL, 0, right);
    close_to(right, mine, vocab, "a token");
    bench_prefill(&metal, ids, rows, mine);
    assert_true(ran(&metal, prompt_kernel));
    bench_prefill(&ref, ids, rows, right);
    close_to(right, mine, vocab, "a prompt chunk");
    bench_close(&metal);
    bench_close(&ref);
    free(mine);
    free(right);
    nothing_found();
    metal_emu_reset();
}

static void merged_by_themselves(void **state) {
    (void)state;
    at_depth(NULL, 300, 9, DECODE_ATTN_MERGE, METAL_PREFILL_ATTN, true);
}
static void spans_side_by_side(void **state) {
    (void)state;
    at_depth(NULL, 2100, 5, DECODE_ATTN_MERGE, METAL_PREFILL_ATTN_SPLIT, true);
}
/* More rows than scratch for spans beside each other. */
static void spans_one_after_another(void **state) {
    (void)state;
    at_depth(NULL, 2040, MOST_ROWS - 1, DECODE_ATTN_SHORT, METAL_PREFILL_ATTN, false);
}
static void fixed_blocks(void **state) {
    (void)state;
    at_depth(NULL, 33000, 3, DECODE_ATTN_LONG, METAL_PREFILL_ATTN_SPLIT, false);
}
static void by_tensor_operations(void **state) {
    (void)state;
    at_depth("M5 32 GB", 2100, 5, DECODE_ATTN_MERGE, METAL_PREFILL_ATTN_SPLIT, true);
    at_depth("M5 32 GB", 2040, MOST_ROWS - 1, DECODE_ATTN_SHORT, METAL_PREFILL_ATTN, false);
}

int main(int argc, char **argv) {
    harness_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merged_by_themselves),    cmocka_unit_test(spans_side_by_side),
        cmocka_unit_test(spans_one_after_another), cmocka_unit_test(fixed_blocks),
        cmocka_unit_test(by_tensor_operations),
    };
    return cmocka_run_group_tests_name("metal depth", tests, NULL, NULL);
}
