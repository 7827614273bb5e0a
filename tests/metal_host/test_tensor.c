/* Tensor operations: used where device and system have them and the start-up check agrees, with
 * results like those of the other kernels; else off, with the reason said: for all, or only for
 * attention. A fault of the check's second command buffer, which is theirs, is such a reason. */
#include "backend/metal/metal.h"
#include "backend/metal/source.h"
#include "harness.h"

enum { PROMPT = 70 }; /* more than a block of attention */

/* ---- faults ---------------------------------------------------------------------------------- */

/* Replaces a text that the file's library holds once; file NULL: none. */
static const struct fault { const char *file, *right, *wrong; } * fault;

int __real_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err);
int __wrap_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err);

/* Linked in the place of metal_source_library (--wrap). */
int __wrap_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err) {
    int rc = __real_metal_source_library(file, shape, out, err);
    if (rc == LILY_OK && fault && strcmp(fault->file, file) == 0) {
        put_fault(out, fault->right, fault->wrong);
    }
    return rc;
}

/* ---- the choice ------------------------------------------------------------------------------ */

static void on_device(const char *name, bool checked) {
    struct metal_emu_options o = metal_emu_defaults();
    const struct metal_emu_profile *profile = metal_emu_profile(name);
    assert_non_null(profile);
    o.profile = *profile;
    o.checked = checked;
    o.seed = 3;
    o.working_set = o.max_buffer = 0;
    metal_emu_configure(&o);
}

static void expect_off(const char *device, const char *reason) {
    on_device(device, false);
    struct bench x = bench_open(&backend_metal, ckpt_weights(stand_in()), NULL);
    struct backend_stats stats;
    x.b->stats(x.m, &stats);
    printf("%s\n", stats.device);
    assert_false(x.m->tensor);
    if (!strstr(x.m->tensor_reason, reason)) fail_msg("%s", x.m->tensor_reason);
    assert_non_null(strstr(stats.device, "tensor operations: off, because"));
    assert_non_null(strstr(stats.kernels, "simdgroup"));
    bench_close(&x);
}

static void off_where_they_are_not(void **state) {
    (void)state;
    expect_off("M1 8 GB", "no Metal 4");
    expect_off("M4 Pro 48 GB", "older than M5");
    expect_off("M5 24 GB, macOS 26.0", "prefill_tensor.metal");
    nothing_found();
}

static void on_and_right_where_they_are(void **state) {
    (void)state;
    const struct weights *w = ckpt_weights(stand_in());
    size_t vocab = (size_t)w->shape->vocab;
    float *a = calloc(vocab, sizeof *a), *b = calloc(vocab, sizeof *b);
    int32_t ids[PROMPT];
    for (int32_t i = 0; i < PROMPT; i++) ids[i] = 11 + i * 71 % 3000;
    on_device("M5 32 GB", false);
    struct bench x = bench_open(&backend_metal, w, NULL);
    struct backend_stats stats;
    x.b->stats(x.m, &stats);
    printf("%s\n", stats.device);
    assert_true(x.m->tensor && x.m->tensor_attention);
    assert_non_null(strstr(stats.kernels, "tensor operations"));
    bench_prefill(&x, ids, PROMPT, a);
    /* Any cut gives the same here too. */
    x.b->reset(x.s);
    bench_prefill(&x, ids, 17, NULL);
    bench_prefill(&x, ids + 17, PROMPT - 17, b);
    assert_memory_equal(a, b, vocab * sizeof *a);
    bench_close(&x);
    x = bench_open(&backend_ref, w, NULL);
    bench_prefill(&x, ids, PROMPT, b);
    bench_close(&x);
    struct gap g = logits_gap(b, a, w->shape->vocab);
    printf("against ref: KL %.2e, largest difference %.2e\n", g.kl, g.worst);
    assert_true(g.kl < 1e-2);
    free(a);
    free(b);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

static void off_where_they_fault(void **state) {
    (void)state;
    static const int32_t ids[] = {5, 6, 700, 8};
    const struct weights *w = ckpt_weights(stand_in());
    on_device("M5 32 GB", false);
    metal_emu_inject(1, MTLCommandBufferErrorPageFault, 1, true);
    struct bench x = bench_open(&backend_metal, w, NULL);
    printf("%s\n", x.m->tensor_reason);
    assert_false(x.m->tensor || x.m->tensor_attention);
    assert_non_null(strstr(x.m->tensor_reason, "off, because Metal: found error 3"));
    bench_prefill(&x, ids, 4, NULL);
    bench_close(&x);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

/* Products by tensor operations, attention without, and the reason. */
static void expect_without_attention(const struct fault *with, const char *reason) {
    static const int32_t ids[] = {5, 6, 700, 8};
    static const struct backend_options deep = {
        .threads = 1, .max_sessions = 1, .max_context = 2 * PREFILL_ATTN_SPAN};
    fault = with;
    struct bench x = bench_open(&backend_metal, ckpt_weights(stand_in()), &deep);
    fault = NULL;
    printf("%s\n", x.m->tensor_reason);
    assert_true(x.m->tensor && !x.m->tensor_attention);
    if (!strstr(x.m->tensor_reason, reason)) fail_msg("%s", x.m->tensor_reason);
    bench_prefill(&x, ids, 4, NULL);
    bench_close(&x);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

static void attention_apart(void **state) {
    (void)state;
    static const struct fault refused = {"prefill_attn_tensor.metal", "attn_mix mix;", "attn_mix;"},
                              wrong = {"prefill_attn_tensor.metal", "at + 2 <= position",
                                       "at + 1 <= position"},
                              joined = {"prefill_attn_tensor.metal",
                                        "value = attn_joined(j, t.total[at], value);", ""};
    on_device("M5 32 GB", false);
    expect_without_attention(&refused, "on, but not for attention, because prefill_attn_tensor");
    expect_without_attention(&wrong, "on, but not for attention, because the start-up check");
    expect_without_attention(&joined, "on, but not for attention, because the start-up check");
    metal_emu_inject(3, MTLCommandBufferErrorPageFault, 1, true);
    expect_without_attention(NULL, "on, but not for attention, because Metal: found error 3");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(off_where_they_are_not),
        cmocka_unit_test(on_and_right_where_they_are),
        cmocka_unit_test(off_where_they_fault),
        cmocka_unit_test(attention_apart),
    };
    return cmocka_run_group_tests_name("metal tensor", tests, NULL, NULL);
}
