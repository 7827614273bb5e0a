/* The memory preflight on machines of several sizes: the model of 40 layers fits, or the message
 * holds the command that makes room, with the number that does, or says that none would. */
#include "backend/metal/metal.h"
#include "harness.h"

enum { FITS, RAISE, SHORTEN, NEVER };

static const struct machine {
    const char *name;
    int32_t context;
    int verdict;
} machines[] = {
    {"M1 8 GB", 4096, NEVER},
    {"M1 16 GB", 4096, NEVER},
    {"M2 24 GB", 4096, RAISE},
    {"M2 24 GB", 32768, RAISE},
    {"M2 24 GB", 131072, RAISE},
    {"M2 24 GB", 262144, SHORTEN},
    {"M1 Pro 32 GB, macOS 14", 32768, FITS},
    {"M5 32 GB", 131072, FITS},
    {"M5 32 GB", 262144, RAISE},
    {"M4 Pro 48 GB", 262144, FITS},
    {"M1 Max 64 GB", 262144, FITS},
    {"M5 Max 128 GB", 262144, FITS},
};
enum { MACHINES = sizeof machines / sizeof *machines };

static int check(const struct machine *k, uint64_t working_set, const struct metal_layout *l,
                 lily_err *err) {
    struct metal_emu_options o = metal_emu_defaults();
    struct metal_device d;
    o.profile = *metal_emu_profile(k->name);
    o.working_set = working_set;
    metal_emu_configure(&o);
    void *pool = objc_autoreleasePoolPush();
    ok(metal_device_open(&d, err), err);
    int rc = buffers_preflight(&d, l, err);
    metal_device_close(&d);
    objc_autoreleasePoolPop(pool);
    return rc;
}

static void make_layout(int32_t context, struct metal_layout *out) {
    lily_err err;
    ok(layout_make(&shape_qwen36_35b_a3b, 40, NULL, false, 512, context, 1, UINT64_MAX, out, &err),
       &err);
}

/* The context that is offered can be had, with the limit raised; one of a thousand more cannot. */
static void fits_when_shortened(const struct machine *k, int32_t context) {
    const char *raise = "iogpu.wired_limit_mb";
    for (int32_t more = 0; more <= 1024; more += 1024) {
        struct metal_layout l;
        lily_err err;
        make_layout(context + more, &l);
        int rc = check(k, 0, &l, &err);
        assert_int_equal(rc, LILY_ENOMEM);
        assert_true((strstr(err.msg, raise) != NULL) == (more == 0));
        layout_free(&l);
    }
}

static void expect(const struct machine *k, int rc, const lily_err *err,
                   const struct metal_layout *l) {
    static const char command[] = "sudo sysctl iogpu.wired_limit_mb=";
    const uint64_t memory = (uint64_t)metal_emu_profile(k->name)->memory_gib << 30;
    lily_err other;
    printf("%s, %d tokens: %s\n", k->name, k->context, rc == LILY_OK ? "fits" : err->msg);
    assert_int_equal(rc, k->verdict == FITS ? LILY_OK : LILY_ENOMEM);
    if (k->verdict == FITS) return;
    const char *at = strstr(err->msg, command);
    if (k->verdict != RAISE) {
        assert_null(at);
        assert_true(buffers_need(l) + ((uint64_t)2 << 30) > memory);
        at = strstr(err->msg, k->verdict == NEVER ? "cannot hold this model" : "at most ");
        assert_non_null(at);
        if (k->verdict == SHORTEN) fits_when_shortened(k, atoi(at + strlen("at most ")));
        return;
    }
    assert_non_null(at);
    uint64_t mib = strtoull(at + strlen(command), NULL, 10);
    assert_true(mib << 20 <= memory - ((uint64_t)2 << 30)); /* what macOS needs stays */
    assert_int_equal(check(k, mib << 20, l, &other), LILY_OK);
    assert_int_equal(check(k, (mib - 300) << 20, l, &other), LILY_ENOMEM); /* nor far too much */
}

static void every_size_of_machine(void **state) {
    (void)state;
    for (size_t i = 0; i < MACHINES; i++) {
        const struct machine *k = &machines[i];
        struct metal_layout l;
        lily_err err;
        make_layout(k->context, &l);
        expect(k, check(k, 0, &l, &err), &err, &l);
        layout_free(&l);
    }
    assert_int_equal(metal_emu_live_objects(), 0);
    nothing_found();
}

/* The stand-in, opened for real: what is needed shrinks with the prompt chunk before it is refused,
 * and with the limit that the message names it opens. */
static void the_chunk_shrinks_first(void **state) {
    (void)state;
    const struct weights *w = ckpt_weights(stand_in());
    struct backend_options o = {.max_sessions = 1, .max_context = 8192};
    struct metal_emu_options e = metal_emu_defaults();
    struct backend_model *m;
    lily_err err;
    e.checked = false;
    metal_emu_configure(&e);
    ok(backend_metal.open(w, &o, &m, &err), &err);
    int32_t most = m->layout.rows;
    uint64_t need = buffers_need(&m->layout);
    backend_metal.close(m);
    e.working_set = need - (1 << 20);
    metal_emu_configure(&e);
    ok(backend_metal.open(w, &o, &m, &err), &err);
    assert_int_equal(most, 2048);
    assert_true(m->layout.rows < most && m->layout.rows >= 256);
    assert_true(buffers_need(&m->layout) <= e.working_set);
    backend_metal.close(m);
    emulate(false, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_size_of_machine),
        cmocka_unit_test(the_chunk_shrinks_first),
    };
    return cmocka_run_group_tests_name("metal preflight", tests, NULL, NULL);
}
