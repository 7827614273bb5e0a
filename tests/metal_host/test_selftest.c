/* The self-test of `lily doctor` on the emulated device: a good build passes with every kernel
 * tested; faults put into kernels, and a barrier taken out, are named. */
#include <jansson.h>
#include <unistd.h>

#include "backend/metal/encode.h"
#include "backend/metal/source.h"
#include "cli/command.h"
#include "cli/options.h"
#include "harness.h"

/* ---- faults ---------------------------------------------------------------------------------- */

/* Each replaces text that the files hold once. */
static const struct fault {
    const char *file, *right, *wrong;
} faults[] = {
    {"decode_moe.metal", "(size_t)chosen[from + j] * args.expert_stride",
     "(size_t)chosen[from] * args.expert_stride"},
    {"decode_attn.metal", "for (uint block = step; block < args.blocks;",
     "for (uint block = step; block + 1 < args.blocks;"},
    {"decode_sample.metal", "args.pick_low", "(args.pick_low + 1)"},
    {"prefill_gdn_scan.metal", "s1[i] *= decay;", ""},
};
enum { FAULTS = sizeof faults / sizeof *faults };
static bool faulty_kernels, no_barrier, real_shape, contracted;

int __real_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err);
int __wrap_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err);

/* Linked in the place of metal_source_library (--wrap). */
int __wrap_metal_source_library(const char *file, const struct shape *shape, struct buf *out,
                                lily_err *err) {
    int rc = __real_metal_source_library(file, shape, out, err);
    for (size_t i = 0; i < FAULTS && faulty_kernels && rc == LILY_OK; i++) {
        if (strcmp(faults[i].file, file) == 0) put_fault(out, faults[i].right, faults[i].wrong);
    }
    return rc;
}

int __real_metal_encode(const struct metal_device *d, const struct graph *g, int32_t from,
                        int32_t to, const id *buffers, id command_buffer, lily_err *err);
int __wrap_metal_encode(const struct metal_device *d, const struct graph *g, int32_t from,
                        int32_t to, const id *buffers, id command_buffer, lily_err *err);

int __wrap_metal_encode(const struct metal_device *d, const struct graph *g, int32_t from,
                        int32_t to, const id *buffers, id command_buffer, lily_err *err) {
    for (int32_t i = 0; i < g->dispatches && no_barrier; i++) {
        struct graph_dispatch *dispatch = &((struct graph *)(uintptr_t)g)->dispatch[i];
        if (dispatch->kernel == DECODE_HEAD) dispatch->barrier = 0;
    }
    return __real_metal_encode(d, g, from, to, buffers, command_buffer, err);
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* `lily doctor --json` as a person runs it; returns the document and the exit status. */
static json_t *run_doctor(int *status) {
    char *words[] = {"doctor", "--backend", "metal", "--json", "--model-shape", "mini", NULL};
    FILE *file = tmpfile();
    int terminal = dup(STDOUT_FILENO);
    assert_non_null(file);
    fflush(stdout);
    assert_true(dup2(fileno(file), STDOUT_FILENO) >= 0);
    *status = cmd_doctor(real_shape ? 4 : 6, words);
    fflush(stdout);
    assert_true(dup2(terminal, STDOUT_FILENO) >= 0);
    close(terminal);
    rewind(file);
    json_t *doc = json_loadf(file, 0, NULL);
    fclose(file);
    assert_int_equal(json_array_size(json_object_get(doc, "selftest")), 1);
    return doc;
}

static const json_t *entry_of(const json_t *doc) {
    return json_array_get(json_object_get(doc, "selftest"), 0);
}

static const char *text_of(const json_t *o, const char *key) {
    const char *text = json_string_value(json_object_get(o, key));
    return text ? text : "";
}

static void print_items(const json_t *entry) {
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(entry, "items"), i, item) {
        printf("%-22s %-8s %9.2g of %-7.2g %s\n", text_of(item, "name"), text_of(item, "result"),
               json_real_value(json_object_get(item, "error")),
               json_real_value(json_object_get(item, "limit")), text_of(item, "note"));
    }
}

/* Kernels that passed, and the worst difference from the reference in parts of what is allowed. */
static void note_figures(const json_t *entry) {
    const char *shape = real_shape ? "real shape" : "stand-in";
    char name[64];
    double worst = 0;
    int passed = 0;
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(entry, "items"), i, item) {
        double limit = json_real_value(json_object_get(item, "limit"));
        double error = json_real_value(json_object_get(item, "error"));
        passed += strcmp(text_of(item, "result"), "passed") == 0;
        if (limit > 0 && error / limit > worst) worst = error / limit;
    }
    snprintf(name, sizeof name, "selftest passed, %s", shape);
    figure(name, passed);
    snprintf(name, sizeof name, "selftest worst of its limit, %s", shape);
    figure(name, worst);
}

static const char *result_of(const json_t *entry, const char *name) {
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(entry, "items"), i, item) {
        if (strcmp(text_of(item, "name"), name) == 0) return text_of(item, "result");
    }
    return "absent";
}

/* On a device with and on one without Metal 4. */
static void good_kernels_pass(void **state) {
    struct metal_emu_options o = metal_emu_defaults();
    int status;
    o.checked = false;
    o.contract = contracted;
    if (*state) o.profile = *metal_emu_profile(*state);
    metal_emu_configure(&o);
    json_t *doc = run_doctor(&status);
    const json_t *entry = entry_of(doc);
    print_items(entry);
    assert_int_equal(status, EXIT_OK);
    assert_string_equal(text_of(entry, "error"), "");
    assert_true(json_is_true(json_object_get(entry, "passed")));
    assert_int_equal(json_integer_value(json_object_get(entry, "untested_items")), 0);
    assert_string_equal(result_of(entry, "prefill_attn_split_tensor"),
                        *state && strstr(*state, "M5") ? "passed" : "absent");
    note_figures(entry);
    json_decref(doc);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

/* Four at once: each is found, and hides nothing of what does not depend on it. */
static void faulty_kernels_are_named(void **state) {
    (void)state;
    static const char *const failed[] = {"decode_experts_down", "decode_attn_merge",
                                         "decode_sample", "prefill_gdn_scan"};
    static const char *const passed[] = {
        "decode_gdn_delta",     "decode_attn_short", "decode_attn_long",   "decode_router",
        "decode_head",          "prefill_gdn_conv",  "prefill_attn",       "prefill_router",
        "prefill_experts_down", "prefill_combine",   "prefill_attn_split", "command buffers"};
    int status;
    emulate(false, 0);
    faulty_kernels = true;
    json_t *doc = run_doctor(&status);
    faulty_kernels = false;
    const json_t *entry = entry_of(doc);
    print_items(entry);
    assert_int_equal(status, EXIT_FAILED);
    assert_true(json_is_false(json_object_get(entry, "passed")));
    for (size_t i = 0; i < sizeof failed / sizeof *failed; i++) {
        assert_string_equal(result_of(entry, failed[i]), "failed");
    }
    for (size_t i = 0; i < sizeof passed / sizeof *passed; i++) {
        assert_string_equal(result_of(entry, passed[i]), "passed");
    }
    assert_string_equal(result_of(entry, "prefill_gdn_norm"), "untested");
    json_decref(doc);
}

/* The head no longer waits for the last layer. Pieces end in a wait and stay right; whole command
 * buffers in another order do not. */
static void missing_barrier_is_found(void **state) {
    (void)state;
    int status;
    emulate(false, 3);
    no_barrier = true;
    json_t *doc = run_doctor(&status);
    no_barrier = false;
    const json_t *entry = entry_of(doc);
    assert_int_equal(status, EXIT_FAILED);
    assert_true(json_is_false(json_object_get(entry, "passed")));
    assert_string_equal(result_of(entry, "command buffers"), "failed");
    json_decref(doc);
    metal_emu_reset();
}

/* As a Mac runs it: 2.4 GB of weights. `make full` only. */
static void real_shape_passes(void **state) {
    real_shape = true;
    good_kernels_pass(state);
    real_shape = false;
}

/* The other end of what a compiler may do with a * b + c. */
static void real_shape_passes_with_contraction(void **state) {
    contracted = true;
    real_shape_passes(state);
    contracted = false;
}

int main(int argc, char **argv) {
    static char newest[] = "M5 Max 128 GB", older[] = "M3 Max 128 GB";
    bool all = harness_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_kernels_pass),
        cmocka_unit_test_prestate(good_kernels_pass, newest),
        cmocka_unit_test(faulty_kernels_are_named),
        cmocka_unit_test(missing_barrier_is_found),
    };
    const struct CMUnitTest full[] = {
        cmocka_unit_test_prestate(real_shape_passes, older),
        cmocka_unit_test_prestate(real_shape_passes, newest),
        cmocka_unit_test_prestate(real_shape_passes_with_contraction, older),
    };
    int rc = cmocka_run_group_tests_name("metal self-test", tests, NULL, NULL);
    if (all) {
        rc += cmocka_run_group_tests_name("metal self-test, real shape", full, NULL, NULL);
    }
    return rc;
}
