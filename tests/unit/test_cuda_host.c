/* What the CUDA backend does without a GPU: a missing or foreign driver is answered in words, and a
 * step's plan is counted by the code that would run it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "backend/backend.h"

#ifdef LILY_CUDA
#include "backend/cuda/driver.h"

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

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(no_driver),
                                       cmocka_unit_test(foreign_driver), cmocka_unit_test(plans)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
int main(void) {
    print_message("skipped: the CUDA backend is part of builds for Linux\n");
    return 0;
}
#endif
