/* Decoding on the emulated device through the true host, against ref. */
#include "harness.h"

enum { TOKENS = 8 };
static const int32_t ids[TOKENS] = {17, 950, 3, 2048, 77, 1500, 9, 420};

static void logits_are_those_of_ref(void **state) {
    (void)state;
    const struct weights *w = ckpt_weights(stand_in());
    int32_t vocab = w->shape->vocab;
    float *mine = calloc((size_t)vocab, sizeof *mine),
          *right = calloc((size_t)vocab, sizeof *right);
    emulate(false, 0);
    struct bench metal = bench_open(&backend_metal, w, NULL),
                 ref = bench_open(&backend_ref, w, NULL);
    for (int32_t i = 0; i < TOKENS; i++) {
        struct decode_result r = bench_step(&metal, ids[i], NULL, 0, mine);
        assert_true(r.finite);
        assert_int_equal(r.token, -1);
        bench_step(&ref, ids[i], NULL, 0, right);
        struct gap g = logits_gap(right, mine, vocab);
        printf("token %d: KL %.2e, largest difference %.2e\n", i, g.kl, g.worst);
        assert_true(g.kl < 1e-3);
    }
    bench_close(&metal);
    bench_close(&ref);
    free(mine);
    free(right);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_ref),
    };
    return cmocka_run_group_tests_name("metal decode", tests, NULL, NULL);
}
