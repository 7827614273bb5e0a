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
        figure("kl decoded", g.kl);
        assert_true(g.kl < 1e-2);
    }
    bench_close(&metal);
    bench_close(&ref);
    free(mine);
    free(right);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

/* Prefill of any cut against ref token by token. */
static void prompts_are_read_as_by_ref(void **state) {
    (void)state;
    enum { LENGTHS = 5 };
    static const int32_t lengths[LENGTHS] = {1, 2, 7, 64, 150};
    const struct weights *w = ckpt_weights(stand_in());
    int32_t vocab = w->shape->vocab, prompt[150];
    float *mine = calloc((size_t)vocab, sizeof *mine),
          *right = calloc((size_t)vocab, sizeof *right);
    for (int32_t i = 0; i < 150; i++) prompt[i] = (int32_t)((uint32_t)i * 2654435761u % 4000u);
    emulate(false, 0);
    struct bench metal = bench_open(&backend_metal, w, NULL),
                 ref = bench_open(&backend_ref, w, NULL);
    for (int32_t i = 0; i < LENGTHS; i++) {
        metal.b->reset(metal.s);
        ref.b->reset(ref.s);
        bench_prefill(&metal, prompt, lengths[i], mine);
        bench_prefill(&ref, prompt, lengths[i], right);
        struct gap g = logits_gap(right, mine, vocab);
        printf("prompt of %d: KL %.2e, largest difference %.2e\n", lengths[i], g.kl, g.worst);
        figure("kl prompt", g.kl);
        assert_true(g.kl < 1e-2);
        bench_step(&metal, 99, NULL, 0, mine);
        bench_step(&ref, 99, NULL, 0, right);
        g = logits_gap(right, mine, vocab);
        printf("  and a token: KL %.2e, largest difference %.2e\n", g.kl, g.worst);
        figure("kl decoded", g.kl);
        assert_true(g.kl < 1e-2);
    }
    bench_close(&metal);
    bench_close(&ref);
    free(mine);
    free(right);
    nothing_found();
}

int main(int argc, char **argv) {
    harness_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_are_those_of_ref),
        cmocka_unit_test(prompts_are_read_as_by_ref),
    };
    return cmocka_run_group_tests_name("metal decode", tests, NULL, NULL);
}
