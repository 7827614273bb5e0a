/* The device's sampler, as ref specifies it, against the host's: the same tokens from the same
 * logits, seeds and histories. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "backend/ref/ref.h"
#include "base/random.h"
#include "engine/sampler.h"

enum { USED = 500, ROWS = 512, PROMPT = 40, PICKS = 60, HOLE = 90, HOLE_END = 300 };

/* Published outputs of SplitMix64 from the states 0 and 1234567: what every kernel must draw. */
static void test_random_stream(void **state) {
    (void)state;
    assert_true(random_at(0, 0) == 0xe220a8397b1dcdafu);
    assert_true(random_at(0, 1) == 0x6e789e6aa1b965f4u);
    assert_true(random_at(1234567, 0) == 6457827717110365317u);
    assert_true(random_at(1234567, 1) == 3203168211198807973u);
    assert_true(random_at(1234567, 2) == 9817491932198370423u);
}

/* Logits of pick i: smooth, or from a few values so that most are equal to others. */
static void fill(float *logits, uint64_t seed, uint64_t i, bool ties) {
    for (uint64_t v = 0; v < ROWS; v++) {
        uint64_t z = random_at(seed * 1000 + i, v);
        logits[v] = ties ? (float)(z % 5) : (float)(z >> 40) * 0x1p-21f - 4;
        if (v >= USED) logits[v] = 1000; /* padding, never sampled */
    }
}

/* One sequence on both; returns the picks that differ. allowed: bits of the ids that have a token,
 * or NULL. */
static int differing(struct sampler *host, const lily_sampling *p, uint64_t seed, bool ties,
                     const uint32_t *allowed) {
    static float logits[ROWS], scratch[ROWS];
    static int32_t counts[ROWS];
    int32_t prompt[PROMPT];
    struct backend_sampling device;
    lily_err err = {0};
    int different = 0;
    for (uint64_t i = 0; i < PROMPT; i++) prompt[i] = (int32_t)(random_at(seed, i) % USED);
    const struct shape shape = {.vocab = ROWS};
    const struct weights w = {.shape = &shape, .vocab_used = USED};
    uint32_t sampled[ROWS / 32];
    backend_sampled(&w, &(struct backend_options){.sampled = allowed}, sampled);
    memset(counts, 0, sizeof counts);
    for (int i = 0; i < PROMPT; i++) counts[prompt[i]] = 1;
    if (sampler_begin(host, p, prompt, PROMPT, &err)) fail_msg("%s", err.msg);
    for (uint64_t i = 0; i < PICKS; i++) {
        uint64_t pick;
        assert_true(sampler_for_device(host, &device, &pick));
        assert_int_equal(pick, i);
        assert_int_equal(backend_check_sampling(&device, &err), 0);
        fill(logits, seed, i % 7, ties); /* again and again, so that penalties matter */
        int32_t a = ref_sample(&device, pick, logits, counts, sampled, ROWS, scratch);
        int32_t b = sampler_pick(host, logits);
        assert_in_range(a, 0, USED - 1);
        if (allowed) assert_true(a < HOLE || a >= HOLE_END);
        different += a != b;
        counts[b] += counts[b] ? 1 : 2;
    }
    return different;
}

static void test_same_picks(void **state) {
    (void)state;
    const lily_sampling cases[] = {
        {.temperature = 0, .top_p = 1, .repetition_penalty = 1},
        {.temperature = 0, .top_p = 1, .repetition_penalty = 1.3f, .presence_penalty = 0.5f},
        {.temperature = 1, .top_k = 1, .top_p = 1, .repetition_penalty = 1},
        {.temperature = 1, .top_k = 20, .top_p = 0.95f, .repetition_penalty = 1},
        {.temperature = 0.7f,
         .top_k = 20,
         .top_p = 0.83f,
         .presence_penalty = 1.5f,
         .repetition_penalty = 1},
        {.temperature = 2,
         .top_k = 64,
         .top_p = 1,
         .frequency_penalty = 0.4f,
         .repetition_penalty = 1.1f},
        {.temperature = 1, .top_k = 64, .top_p = 0.51f, .min_p = 0.1f, .repetition_penalty = 1},
        {.temperature = 1, .top_k = 50, .top_p = 1, .min_p = 1, .repetition_penalty = 0.8f},
        {.temperature = 1,
         .top_k = 50,
         .top_p = 0,
         .repetition_penalty = 1,
         .presence_penalty = -1},
        {.temperature = 0.01f, .top_k = 7, .top_p = 0.99f, .repetition_penalty = 1},
    };
    int32_t holes[HOLE_END - HOLE];
    uint32_t allowed[ROWS / 32];
    memset(allowed, 0xff, sizeof allowed);
    for (int32_t id = HOLE; id < HOLE_END; id++) {
        holes[id - HOLE] = id;
        allowed[id / 32] &= ~(1u << id % 32);
    }
    int different = 0, total = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (uint64_t seed = 0; seed < 40; seed++) {
            bool gaps = seed / 2 % 2;
            const struct sampler_vocab vocab = {USED, holes, gaps ? HOLE_END - HOLE : 0};
            struct sampler *host;
            lily_err err;
            lily_sampling p = cases[i];
            p.seed = seed;
            assert_int_equal(sampler_new(&vocab, &host, &err), 0);
            different += differing(host, &p, seed, seed % 2, gaps ? allowed : NULL);
            total += PICKS;
            sampler_free(host);
        }
    }
    /* Rounding alone may part them: float32 sums against double, 24 bits against 53. */
    print_message("%d of %d picks differ\n", different, total);
    assert_true(different <= total / 10000);
}

/* How often each token is drawn is as its weight says, whatever the host does. */
static void test_frequencies(void **state) {
    (void)state;
    enum { DRAWS = 40000 };
    const float logits[] = {0, logf(2), logf(3), -INFINITY, logf(4)};
    const int32_t counts[5] = {0};
    const double share[] = {0.1, 0.2, 0.3, 0, 0.4};
    const uint32_t sampled = 0x1f;
    int seen[5] = {0};
    float scratch[5];
    struct backend_sampling p = {
        .temperature = 1, .top_p = 1, .repetition = 1, .top_k = 64, .stream = 99};
    for (uint64_t i = 0; i < DRAWS; i++)
        seen[ref_sample(&p, i, logits, counts, &sampled, 5, scratch)]++;
    for (int i = 0; i < 5; i++) assert_true(fabs(seen[i] / (double)DRAWS - share[i]) < 0.01);
}

static void test_what_a_device_cannot(void **state) {
    (void)state;
    struct sampler *s;
    struct backend_sampling out;
    uint64_t pick;
    lily_err err;
    lily_sampling p = {.temperature = 1, .top_k = 65, .top_p = 1, .repetition_penalty = 1};
    assert_int_equal(sampler_new(&(struct sampler_vocab){.used = USED}, &s, &err), 0);
    assert_int_equal(sampler_begin(s, &p, NULL, 0, &err), 0);
    assert_false(sampler_for_device(s, &out, &pick));
    p.top_k = 0;
    assert_int_equal(sampler_begin(s, &p, NULL, 0, &err), 0);
    assert_false(sampler_for_device(s, &out, &pick));
    p.temperature = 9e-6f; /* argmax, whatever top_k is */
    assert_int_equal(sampler_begin(s, &p, NULL, 0, &err), 0);
    assert_true(sampler_for_device(s, &out, &pick));
    assert_true(out.temperature == 0);
    const int32_t id = 1;
    const float bias = 0;
    p.bias_ids = &id, p.bias = &bias, p.n_bias = 1;
    assert_int_equal(sampler_begin(s, &p, NULL, 0, &err), 0);
    assert_false(sampler_for_device(s, &out, &pick));
    sampler_free(s);

    const struct backend_sampling bad[] = {{.temperature = 1, .top_k = 0},
                                           {.temperature = 1, .top_k = BACKEND_TOP_K + 1},
                                           {.temperature = -1, .top_k = 1},
                                           {.temperature = NAN, .top_k = 1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(backend_check_sampling(&bad[i], &err), LILY_EINVAL);
        assert_non_null(strstr(err.msg, "sampling: found temperature"));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_stream),
        cmocka_unit_test(test_same_picks),
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_what_a_device_cannot),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
