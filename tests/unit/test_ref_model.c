/* The reference backend against the model's own laws (docs/model.md): no stored data needed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "backend/ref/ref.h"
#include "ref_tiny.h"

static struct tiny tiny;

static int setup(void **state) {
    (void)state;
    tiny_make(&tiny, &shape_mini);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    tiny_free(&tiny);
    return 0;
}

/* A model with room for two sessions and one session of it. */
struct rig {
    struct backend_model *model;
    struct backend_session *session;
    float *logits; /* [2][V] */
    lily_err err;
};

static void rig_open(struct rig *r, int32_t context) {
    struct backend_options options = {.max_sessions = 2, .max_context = context};
    *r = (struct rig){.logits = malloc(2 * (size_t)shape_mini.vocab * sizeof(float))};
    assert_non_null(r->logits);
    assert_int_equal(backend_ref.open(&tiny.w, &options, &r->model, &r->err), LILY_OK);
    assert_int_equal(backend_ref.session_new(r->model, context, &r->session, &r->err), LILY_OK);
}
static void rig_close(struct rig *r) {
    backend_ref.session_free(r->session);
    backend_ref.close(r->model);
    free(r->logits);
}

static int32_t id_at(int32_t i) {
    return (int32_t)(tiny_mix((uint32_t)i + 77) % (uint32_t)shape_mini.vocab);
}
static int32_t argmax(const float *x, int32_t n) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++) {
        if (x[i] > x[best]) best = i;
    }
    return best;
}
/* Fails unless found is within tolerance of wanted (a NaN is not). */
static void near(double found, double wanted, double tolerance) {
    if (fabs(found - wanted) <= tolerance) return;
    print_error("found %.9g, expected %.9g within %.1g\n", found, wanted, tolerance);
    fail();
}
/* A repeatable number in [-1, 1). */
static float noise(uint32_t i) {
    return (float)(int32_t)tiny_mix(i) / 2147483648.0f;
}

static void rms_norm_divides_by_the_root_mean_square(void **state) {
    (void)state;
    const float x[4] = {3, -3, 3, -3}, w[4] = {1, 2, 0.5f, 0};
    float y[4];
    ref_rms_norm(x, w, y, 4, 0);
    near(y[0], 1, 1e-6);
    near(y[1], -2, 1e-6);
    near(y[2], 0.5, 1e-6);
    near(y[3], 0, 0);
    float z[2] = {3, 4};
    ref_l2_norm(z, 2, 10);
    near(z[0], 6, 1e-5);
    near(z[1], 8, 1e-5);
    float zero[2] = {0, 0}; /* eps keeps it finite */
    ref_l2_norm(zero, 2, 1);
    near(zero[0], 0, 0);
}

static void rope_turns_only_the_rotary_dimensions(void **state) {
    (void)state;
    const struct shape *s = &shape_qwen36_35b_a3b;
    int32_t half = s->rotary_dim / 2;
    float inv_freq[32], cosines[32], sines[32], head[256], turned[256];
    assert_int_equal(half, 32);
    ref_rope_frequencies(s, inv_freq);
    near(inv_freq[0], 1, 0);
    near(inv_freq[16], 1 / sqrt(1e7), 1e-10);
    for (uint32_t i = 0; i < 256; i++) head[i] = noise(i);
    for (int32_t pos = 0; pos < 262144; pos = 7 * pos + 1) {
        memcpy(turned, head, sizeof head);
        ref_rope_angles(inv_freq, pos, half, cosines, sines);
        ref_rope(turned, cosines, sines, half);
        for (int32_t i = 0; i < half; i++) {
            double a = hypot((double)head[i], (double)head[i + 32]);
            near(hypot((double)turned[i], (double)turned[i + 32]), a, 1e-6);
        }
        assert_memory_equal(turned + 64, head + 64, 192 * sizeof(float));
        if (pos == 0) assert_memory_equal(turned, head, sizeof head);
        if (pos > 0) assert_true(turned[0] != head[0]);
    }
    /* One plane by hand: dimension 0 pairs with 32, not with 1. */
    float unit[256] = {1};
    ref_rope_angles(inv_freq, 1, half, cosines, sines);
    ref_rope(unit, cosines, sines, half);
    near(unit[0], cos(1), 1e-7);
    near(unit[32], sin(1), 1e-7);
    near(unit[1], 0, 0);
}

static void router_takes_the_largest_and_the_lower_index_of_equals(void **state) {
    (void)state;
    float scores[32], routing[16];
    for (int i = 0; i < 32; i++) scores[i] = 0;
    scores[9] = 2;
    scores[30] = 1;
    ref_route(scores, 32, 8, routing);
    const float ids[8] = {9, 30, 0, 1, 2, 3, 4, 5};
    float sum = 0;
    for (int i = 0; i < 8; i++) {
        near(routing[i], ids[i], 0);
        sum += routing[8 + i];
    }
    near(sum, 1, 1e-6);
    near(routing[8], exp(2) / (exp(2) + exp(1) + 6), 1e-6);
    near(routing[15], 1 / (exp(2) + exp(1) + 6), 1e-6);

    for (int i = 0; i < 32; i++) scores[i] = i % 2 ? NAN : 1; /* still eight different experts */
    ref_route(scores, 32, 8, routing);
    for (int i = 0; i < 8; i++) {
        assert_true(routing[i] >= 0 && routing[i] < 32);
        for (int j = 0; j < i; j++) assert_true(routing[i] != routing[j]);
    }
}

static void products_decode_every_storage(void **state) {
    (void)state;
    enum { ROWS = 3, COLS = 128 };
    uint8_t data[ROWS * COLS * 2];
    uint16_t scales[ROWS * 2], biases[ROWS * 2];
    float x[COLS], row[COLS], y[ROWS];
    for (uint32_t i = 0; i < COLS; i++) x[i] = noise(i);
    for (uint32_t i = 0; i < ROWS * 2; i++) {
        scales[i] = f32_to_bf16(noise(1000 + i)); /* of either sign */
        biases[i] = f32_to_bf16(noise(2000 + i));
    }
    scales[1] = f32_to_bf16(-0.25f);
    for (int bits = 4; bits <= 16; bits *= 2) {
        for (uint32_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)tiny_mix(i);
        for (uint32_t i = 0; bits == 16 && i < ROWS * COLS; i++) {
            uint16_t value = f32_to_bf16(noise(3000 + i));
            memcpy(data + 2 * i, &value, 2);
        }
        struct mat m = {.data = data, .scales = scales, .biases = biases, ROWS, COLS, bits};
        if (bits == 16) m.scales = m.biases = NULL;
        mat_vec(&m, x, y);
        for (int r = 0; r < ROWS; r++) {
            double sum = 0;
            mat_row(&m, r, row);
            for (int c = 0; c < COLS; c++) {
                int at = r * COLS + c, byte = data[at * bits / 8];
                int code = bits == 8 ? byte : at % 2 ? byte >> 4 : byte & 15;
                double value = (double)bf16_to_f32(scales[at / 64]) * code +
                               (double)bf16_to_f32(biases[at / 64]);
                if (bits == 16) value = (double)noise(3000 + (uint32_t)at);
                near(row[c], value, bits == 16 ? 0.004 : 1e-4);
                sum += (double)row[c] * (double)x[c];
            }
            near(y[r], sum, 1e-5 * (1 + fabs(sum)));
        }
    }
}

enum { DIM = 16, CHUNK = 64 };

/* The chunked form of the delta rule (docs/model.md) for one head and one chunk of n tokens, in
 * double, written only to be compared with the recurrent form. */
static void delta_chunk(double s[DIM][DIM], const float (*q)[DIM], const float (*k)[DIM],
                        const float (*v)[DIM], const float *beta, const double *g, int n,
                        double (*o)[DIM]) {
    double c[CHUNK], u[CHUNK][DIM], w[CHUNK][DIM];
    for (int i = 0; i < n; i++) c[i] = g[i] + (i ? c[i - 1] : 0);
    for (int i = 0; i < n; i++) { /* (I + A) [U | W] = beta [V | K exp(c)], row by row */
        for (int d = 0; d < DIM; d++) {
            u[i][d] = (double)(beta[i] * v[i][d]);
            w[i][d] = (double)(beta[i] * k[i][d]) * exp(c[i]);
        }
        for (int j = 0; j < i; j++) {
            double a = 0;
            for (int d = 0; d < DIM; d++) a += (double)k[i][d] * (double)k[j][d];
            a *= (double)beta[i] * exp(c[i] - c[j]);
            for (int d = 0; d < DIM; d++) {
                u[i][d] -= a * u[j][d];
                w[i][d] -= a * w[j][d];
            }
        }
    }
    for (int i = 0; i < n; i++) { /* U <- U - W S */
        for (int e = 0; e < DIM; e++) {
            for (int d = 0; d < DIM; d++) u[i][d] -= w[i][e] * s[e][d];
        }
    }
    for (int i = 0; i < n; i++) { /* O = (Q exp(c)) S + lower(Q K^T Dm) U */
        for (int d = 0; d < DIM; d++) o[i][d] = 0;
        for (int e = 0; e < DIM; e++) {
            for (int d = 0; d < DIM; d++) o[i][d] += (double)q[i][e] * exp(c[i]) * s[e][d];
        }
        for (int j = 0; j <= i; j++) {
            double a = 0;
            for (int d = 0; d < DIM; d++) a += (double)q[i][d] * (double)k[j][d];
            for (int d = 0; d < DIM; d++) o[i][d] += a * exp(c[i] - c[j]) * u[j][d];
        }
    }
    for (int e = 0; e < DIM; e++) { /* S <- exp(c_n) S + (K exp(c_n - c))^T U */
        for (int d = 0; d < DIM; d++) {
            s[e][d] *= exp(c[n - 1]);
            for (int i = 0; i < n; i++) {
                s[e][d] += (double)k[i][e] * exp(c[n - 1] - c[i]) * u[i][d];
            }
        }
    }
}

static void recurrence_equals_the_chunked_form(void **state) {
    (void)state;
    enum { TOKENS = 64 + 64 + 37 };
    static float q[TOKENS][DIM], k[TOKENS][DIM], v[TOKENS][DIM], beta[TOKENS];
    static double g[TOKENS], chunked[TOKENS][DIM], s[DIM][DIM];
    float recurrent[DIM * DIM] = {0}, out[DIM];
    for (uint32_t t = 0; t < TOKENS; t++) {
        for (uint32_t d = 0; d < DIM; d++) {
            q[t][d] = noise(3 * (t * DIM + d));
            k[t][d] = noise(3 * (t * DIM + d) + 1);
            v[t][d] = noise(3 * (t * DIM + d) + 2);
        }
        ref_l2_norm(q[t], DIM, 0.25f);
        ref_l2_norm(k[t], DIM, 1);
        beta[t] = ref_sigmoid(3 * noise(90000 + t));
        g[t] = -(double)ref_softplus(4 * noise(95000 + t)); /* down to -4: fast fading included */
    }
    for (int t = 0; t < TOKENS; t += CHUNK) {
        int n = TOKENS - t < CHUNK ? TOKENS - t : CHUNK;
        delta_chunk(s, q + t, k + t, v + t, beta + t, g + t, n, chunked + t);
    }
    for (int t = 0; t < TOKENS; t++) {
        ref_delta_rule(recurrent, q[t], k[t], v[t], beta[t], (float)exp(g[t]), out, DIM);
        for (int d = 0; d < DIM; d++) near(out[d], chunked[t][d], 2e-6);
    }
    for (int i = 0; i < DIM * DIM; i++) {
        near(recurrent[i], s[i / DIM][i % DIM], 2e-6);
    }
}

static void a_key_recalls_the_value_written_with_it(void **state) {
    (void)state;
    float s[DIM * DIM] = {0}, k[DIM] = {0}, v[DIM], out[DIM];
    k[3] = 1;
    for (uint32_t d = 0; d < DIM; d++) v[d] = noise(d);
    for (int again = 0; again < 2; again++) { /* a second write of the same changes nothing */
        ref_delta_rule(s, k, k, v, 1, 1, out, DIM);
        for (int d = 0; d < DIM; d++) near(out[d], v[d], 1e-7);
    }
}

/* A state of the model, freed by the caller. */
static struct backend_state *new_state(struct rig *r) {
    struct backend_state *state;
    assert_int_equal(backend_ref.state_new(r->model, &state, &r->err), LILY_OK);
    return state;
}

/* A copy of the session's state that a test can read and spoil; the caller frees it. */
static float *export_state(struct rig *r, struct backend_session *s) {
    struct backend_state *state = new_state(r);
    float *out = malloc(backend_ref.state_bytes(r->model));
    assert_int_equal(backend_ref.state_save(s, state, &r->err), LILY_OK);
    assert_int_equal(backend_ref.state_export(state, out, &r->err), LILY_OK);
    backend_ref.state_free(state);
    return out;
}

static void import_state(struct rig *r, struct backend_session *s, const float *in, int32_t pos) {
    struct backend_state *state = new_state(r);
    assert_int_equal(backend_ref.state_import(state, in, &r->err), LILY_OK);
    assert_int_equal(backend_ref.state_restore(s, state, pos, &r->err), LILY_OK);
    backend_ref.state_free(state);
}

/* prefill(n) and a decode leave the same bits as n + 1 decodes. */
static void prefill_then_decode_equals_single_steps(void **state) {
    (void)state;
    const int32_t lengths[] = {1, 2, 3, 4, 63, 64, 65, 200};
    size_t vocab = (size_t)shape_mini.vocab;
    struct rig steps, cut;
    int32_t ids[201];
    rig_open(&steps, 201);
    rig_open(&cut, 201);
    for (int32_t i = 0; i < 201; i++) ids[i] = id_at(i);
    for (size_t l = 0, at = 0; l < sizeof lengths / sizeof *lengths; l++) {
        for (; at <= (size_t)lengths[l]; at++) {
            assert_int_equal(
                tiny_decode(steps.model, steps.session, ids[at], steps.logits, &steps.err), 0);
        }
        backend_ref.reset(cut.session);
        assert_int_equal(tiny_prefill(cut.session, ids, lengths[l], NULL, &cut.err), 0);
        assert_int_equal(tiny_decode(cut.model, cut.session, ids[lengths[l]], cut.logits, &cut.err),
                         0);
        assert_int_equal(backend_ref.position(cut.session), lengths[l] + 1);
        assert_memory_equal(cut.logits, steps.logits, vocab * sizeof(float));
        float *a = export_state(&cut, cut.session), *b = export_state(&steps, steps.session);
        assert_memory_equal(a, b, backend_ref.state_bytes(steps.model));
        free(a);
        free(b);
    }
    rig_close(&steps);
    rig_close(&cut);
}

/* Greedy tokens after logits[V]; the session moves on. */
static void generate(struct rig *r, struct backend_session *s, float *logits, int32_t *out, int n) {
    for (int i = 0; i < n; i++) {
        out[i] = argmax(logits, shape_mini.vocab);
        assert_int_equal(tiny_decode(r->model, s, out[i], logits, &r->err), LILY_OK);
    }
}

static void restored_and_imported_sessions_continue_identically(void **state) {
    (void)state;
    enum { PROMPT = 70, MORE = 12 };
    struct rig r;
    int32_t ids[PROMPT], first[MORE], again[MORE];
    size_t vocab = (size_t)shape_mini.vocab;
    float *after = malloc(vocab * sizeof *after);
    rig_open(&r, PROMPT + MORE);
    for (int32_t i = 0; i < PROMPT; i++) ids[i] = id_at(500 + i);
    assert_int_equal(tiny_prefill(r.session, ids, PROMPT, r.logits, &r.err), LILY_OK);
    memcpy(after, r.logits, vocab * sizeof *after);
    struct backend_state *saved = new_state(&r);
    assert_int_equal(backend_ref.state_save(r.session, saved, &r.err), LILY_OK);
    generate(&r, r.session, r.logits, first, MORE);

    assert_int_equal(backend_ref.state_restore(r.session, saved, PROMPT, &r.err), LILY_OK);
    assert_int_equal(backend_ref.position(r.session), PROMPT);
    memcpy(r.logits, after, vocab * sizeof *after);
    generate(&r, r.session, r.logits, again, MORE);
    assert_memory_equal(first, again, sizeof first);

    /* Rows of an abandoned continuation are not held any more. */
    assert_int_equal(backend_ref.state_restore(r.session, saved, PROMPT, &r.err), LILY_OK);
    assert_int_equal(tiny_decode(r.model, r.session, 1, NULL, &r.err), LILY_OK);
    assert_int_equal(backend_ref.state_restore(r.session, saved, PROMPT + 2, &r.err), LILY_EINVAL);

    /* Another session, whose rows come in two parts. */
    struct backend_session *other;
    assert_int_equal(backend_ref.session_new(r.model, PROMPT + MORE, &other, &r.err), LILY_OK);
    int32_t cuts[] = {0, 33, PROMPT};
    for (int i = 0; i < 2; i++) {
        int32_t n = cuts[i + 1] - cuts[i];
        void *rows = malloc(backend_ref.kv_bytes(r.model, n));
        assert_int_equal(backend_ref.kv_export(r.session, cuts[i], n, rows, &r.err), LILY_OK);
        assert_int_equal(backend_ref.kv_import(other, cuts[i], n, rows, &r.err), LILY_OK);
        free(rows);
    }
    assert_int_equal(backend_ref.state_restore(other, saved, PROMPT, &r.err), LILY_OK);
    memcpy(r.logits, after, vocab * sizeof *after);
    generate(&r, other, r.logits, again, MORE);
    assert_memory_equal(first, again, sizeof first);

    /* A state cannot be put where there are no keys and values; nor rows beyond a gap. */
    backend_ref.reset(other);
    assert_int_equal(backend_ref.state_restore(other, saved, PROMPT, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.kv_import(other, 1, 1, ids, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.kv_import(other, 0, PROMPT + MORE + 1, ids, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.kv_export(other, 0, 1, ids, &r.err), LILY_EINVAL);
    backend_ref.session_free(other);
    backend_ref.state_free(saved);
    free(after);
    rig_close(&r);
}

/* A NaN in a state is reported by the next step, and gone after reset. */
static void non_finite_state_is_reported_and_reset_heals(void **state) {
    (void)state;
    struct rig r;
    size_t vocab = (size_t)shape_mini.vocab;
    const int32_t ids[] = {5, 6, 7};
    rig_open(&r, 16);
    float *good = malloc(vocab * sizeof *good);
    assert_int_equal(tiny_prefill(r.session, ids, 3, good, &r.err), LILY_OK);
    const float bad[] = {NAN, INFINITY};
    for (size_t i = 0; i < 2; i++) {
        float *poison = export_state(&r, r.session);
        poison[12345] = bad[i];
        import_state(&r, r.session, poison, 3);
        free(poison);
        struct decode_slot slot = {.session = r.session, .token = 8, .logits = r.logits};
        struct decode_result result;
        assert_int_equal(backend_ref.decode_submit(r.model, &slot, 1, &r.err), LILY_OK);
        assert_int_equal(backend_ref.decode_wait(r.model, &result, 1, &r.err), LILY_OK);
        assert_false(result.finite);
        assert_int_equal(tiny_prefill(r.session, ids, 1, r.logits, &r.err), LILY_ENUMERIC);
        assert_non_null(strstr(r.err.msg, "position 4: found non-finite values in the logits"));
        /* also when nobody reads the logits */
        assert_int_equal(tiny_prefill(r.session, ids, 1, NULL, &r.err), LILY_ENUMERIC);

        backend_ref.reset(r.session);
        assert_int_equal(backend_ref.position(r.session), 0);
        assert_int_equal(tiny_prefill(r.session, ids, 3, r.logits, &r.err), LILY_OK);
        assert_memory_equal(r.logits, good, vocab * sizeof *good);
    }
    free(good);
    rig_close(&r);
}

/* Greedy tokens after the token first, with two steps in flight; the session has read all but the
 * last of them. */
static void run_ahead(struct rig *r, int32_t first, int32_t *out, int n) {
    const struct backend_sampling greedy = {.repetition = 1, .top_p = 1};
    struct decode_slot slot = {.session = r->session, .token = first, .sampling = &greedy};
    struct decode_result result;
    assert_int_equal(backend_ref.sample_begin(r->session, NULL, 0, &r->err), LILY_OK);
    assert_int_equal(backend_ref.decode_submit(r->model, &slot, 1, &r->err), LILY_OK);
    slot.token = -1;
    for (int i = 0; i < n; i++) {
        if (i + 1 < n) {
            assert_int_equal(backend_ref.decode_submit(r->model, &slot, 1, &r->err), LILY_OK);
            assert_int_equal(backend_ref.decode_submit(r->model, &slot, 1, &r->err), LILY_EBUSY);
        }
        assert_int_equal(backend_ref.decode_wait(r->model, &result, 1, &r->err), LILY_OK);
        assert_true(result.finite);
        out[i] = result.token;
    }
}

/* Sampled on the device or by the host from its logits: the same tokens and the same state; and one
 * token taken back leaves what was there before it. */
static void two_steps_in_flight_and_one_back(void **state) {
    (void)state;
    enum { PROMPT = 70, MORE = 9 };
    struct rig r;
    int32_t ids[PROMPT], host[MORE], device[MORE];
    rig_open(&r, PROMPT + MORE);
    for (int32_t i = 0; i < PROMPT; i++) ids[i] = id_at(900 + i);
    struct decode_slot unknown = {.session = r.session, .token = -1};
    assert_int_equal(backend_ref.decode_submit(r.model, &unknown, 1, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.rewind(r.session, &r.err), LILY_EINVAL);
    assert_int_equal(tiny_prefill(r.session, ids, PROMPT, r.logits, &r.err), LILY_OK);
    assert_int_equal(backend_ref.rewind(r.session, &r.err), LILY_EINVAL); /* not a decoded token */
    generate(&r, r.session, r.logits, host, MORE);
    assert_int_equal(backend_ref.rewind(r.session, &r.err), LILY_OK);
    assert_int_equal(backend_ref.rewind(r.session, &r.err), LILY_EINVAL); /* once */
    float *expected = export_state(&r, r.session);

    backend_ref.reset(r.session);
    assert_int_equal(tiny_prefill(r.session, ids, PROMPT, r.logits, &r.err), LILY_OK);
    run_ahead(&r, host[0], device, MORE - 1);
    assert_memory_equal(device, host + 1, (MORE - 1) * sizeof *host);
    assert_int_equal(backend_ref.position(r.session), PROMPT + MORE - 1);
    float *found = export_state(&r, r.session);
    assert_memory_equal(found, expected, backend_ref.state_bytes(r.model));
    free(found);

    struct decode_slot last = {.session = r.session, .token = host[MORE - 1], .logits = r.logits};
    struct decode_result result;
    for (int i = 0; i < 2; i++) { /* forth and back again changes nothing */
        assert_int_equal(backend_ref.decode_submit(r.model, &last, 1, &r.err), LILY_OK);
        assert_int_equal(backend_ref.decode_wait(r.model, &result, 1, &r.err), LILY_OK);
        assert_int_equal(backend_ref.rewind(r.session, &r.err), LILY_OK);
        found = export_state(&r, r.session);
        assert_memory_equal(found, expected, backend_ref.state_bytes(r.model));
        free(found);
        assert_int_equal(backend_ref.position(r.session), PROMPT + MORE - 1);
    }
    free(expected);
    rig_close(&r);
}

/* Each step counts the token it appends, the prompt counts for the repetition penalty alone, and a
 * new sequence forgets both. */
static void penalties_count_what_was_appended(void **state) {
    (void)state;
    struct rig r;
    rig_open(&r, 64);
    const int32_t prompt[] = {5, 6, 5};
    const struct backend_sampling p = {
        .repetition = 1.2f, .frequency = 0.5f, .presence = 0.25f, .top_p = 1};
    struct decode_slot slot = {.session = r.session, .sampling = &p};
    struct decode_result result;
    assert_int_equal(tiny_prefill(r.session, prompt, 3, NULL, &r.err), LILY_OK);
    assert_int_equal(backend_ref.sample_begin(r.session, prompt, 3, &r.err), LILY_OK);
    const int32_t read[] = {7, 7, 6};
    for (int i = 0; i < 3; i++) {
        slot.token = read[i];
        assert_int_equal(backend_ref.decode_submit(r.model, &slot, 1, &r.err), LILY_OK);
        assert_int_equal(backend_ref.decode_wait(r.model, &result, 1, &r.err), LILY_OK);
    }
    const int32_t *counts = r.session->counts;
    assert_int_equal(counts[5], 1); /* prompt only */
    assert_int_equal(counts[6], 2); /* and once in the output */
    assert_int_equal(counts[7], 3); /* twice */
    int32_t others = 0;
    for (int32_t i = 8; i < shape_mini.vocab; i++) others += counts[i];
    assert_int_equal(others, 0);
    const int32_t bad[] = {1, 4096};
    assert_int_equal(backend_ref.sample_begin(r.session, bad, 2, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.sample_begin(r.session, NULL, 0, &r.err), LILY_OK);
    for (int32_t i = 0; i < shape_mini.vocab; i++) assert_int_equal(counts[i], 0);
    rig_close(&r);
}

static void sessions_of_one_step_do_not_meet(void **state) {
    (void)state;
    struct rig r;
    size_t vocab = (size_t)shape_mini.vocab;
    struct backend_session *other;
    float *alone = malloc(vocab * sizeof *alone);
    rig_open(&r, 16);
    assert_int_equal(tiny_decode(r.model, r.session, 1, NULL, &r.err), LILY_OK);
    assert_int_equal(tiny_decode(r.model, r.session, 2, alone, &r.err), LILY_OK);
    backend_ref.reset(r.session);

    assert_int_equal(backend_ref.session_new(r.model, 8, &other, &r.err), LILY_OK);
    const int32_t tokens[2][2] = {{1, 9}, {2, 9}};
    struct decode_result results[2];
    for (int i = 0; i < 2; i++) {
        struct decode_slot slots[2] = {
            {.session = r.session, .token = tokens[i][0], .logits = r.logits},
            {.session = other, .token = tokens[i][1], .logits = r.logits + vocab}};
        assert_int_equal(backend_ref.decode_submit(r.model, slots, 2, &r.err), LILY_OK);
        assert_int_equal(backend_ref.decode_wait(r.model, results, 1, &r.err), LILY_EINVAL);
        assert_int_equal(backend_ref.decode_wait(r.model, results, 2, &r.err), LILY_OK);
        assert_int_equal(backend_ref.decode_wait(r.model, results, 2, &r.err), LILY_EINVAL);
        assert_int_equal(results[0].token, -1);
        assert_true(results[0].finite && results[1].finite);
    }
    assert_memory_equal(r.logits, alone, vocab * sizeof *alone);

    /* One session's NaN leaves the other's logits good. */
    float *poison = export_state(&r, other);
    poison[0] = NAN;
    import_state(&r, other, poison, 2);
    free(poison);
    backend_ref.reset(r.session);
    struct decode_slot slots[2] = {{.session = other, .token = 3, .logits = r.logits + vocab},
                                   {.session = r.session, .token = 1}};
    assert_int_equal(backend_ref.decode_submit(r.model, slots, 2, &r.err), LILY_OK);
    assert_int_equal(backend_ref.decode_wait(r.model, results, 2, &r.err), LILY_OK);
    assert_true(!results[0].finite && results[1].finite);
    assert_int_equal(tiny_decode(r.model, r.session, 2, r.logits, &r.err), LILY_OK);
    assert_memory_equal(r.logits, alone, vocab * sizeof *alone);
    free(alone);
    backend_ref.session_free(other);
    rig_close(&r);
}

static void wrong_calls_are_refused_and_harmless(void **state) {
    (void)state;
    struct rig r;
    struct backend_session *other, *third;
    const int32_t ids[] = {1, 2, 3};
    rig_open(&r, 2);
    assert_int_equal(backend_ref.session_new(r.model, 3, &other, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.session_new(r.model, 0, &other, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.session_new(r.model, 1, &other, &r.err), LILY_OK);
    assert_int_equal(backend_ref.session_new(r.model, 1, &third, &r.err), LILY_EBUSY);
    backend_ref.session_free(other);

    assert_int_equal(tiny_decode(r.model, r.session, -1, NULL, &r.err), LILY_EINVAL);
    assert_int_equal(tiny_decode(r.model, r.session, shape_mini.vocab, NULL, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.position(r.session), 0);
    struct prefill_step step = {.ids = ids, .n = 3};
    assert_int_equal(backend_ref.prefill(r.session, &step, &r.err), LILY_ECONTEXT);
    assert_int_equal(step.done, 2);
    step.n = 0;
    assert_int_equal(backend_ref.prefill(r.session, &step, &r.err), LILY_EINVAL);
    struct decode_result result;
    assert_int_equal(backend_ref.decode_wait(r.model, &result, 1, &r.err), LILY_EINVAL);
    assert_int_equal(backend_ref.decode_submit(r.model, NULL, 0, &r.err), LILY_EINVAL);
    rig_close(&r);
}

/* Sizes follow from the shape alone; the reference keeps everything in float32 (docs/model.md). */
static void real_shape_has_the_published_sizes(void **state) {
    (void)state;
    struct weights w = {.shape = &shape_qwen36_35b_a3b, .layers = 40};
    struct backend_options options = {.max_sessions = 1, .max_context = 1024};
    struct backend_model *m;
    lily_err err;
    assert_int_equal(backend_ref.open(&w, &options, &m, &err), LILY_OK);
    assert_int_equal(backend_ref.state_bytes(m), 62914560 + 2949120);
    assert_int_equal(backend_ref.kv_bytes(m, 1), 2 * 20480);
    backend_ref.close(m);

    options.max_sessions = 1 << 20; /* 2^20 sessions of 2^18 tokens: refused, not attempted */
    options.max_context = 262144;
    assert_int_equal(backend_ref.open(&w, &options, &m, &err), LILY_ENOMEM);
    assert_non_null(strstr(err.msg, "GiB"));
    options.max_context = 262145;
    assert_int_equal(backend_ref.open(&w, &options, &m, &err), LILY_EINVAL);
}

static void statistics_count_what_a_token_reads(void **state) {
    (void)state;
    struct rig r;
    struct backend_stats stats;
    rig_open(&r, 16);
    backend_ref.stats(r.model, &stats);
    /* All bytes but 24 of 32 experts and all but one embedding row; small tensors are not counted.
     */
    uint64_t expert = 3 * 64 * 256 * 2, row = 256 * 2;
    uint64_t small = 0;
    for (size_t i = 0; i < tiny.n; i++) {
        const struct tiny_tensor *t = &tiny.tensors[i];
        if (t->rank == 1 || strstr(t->name, "conv1d")) small += 2 * t->n;
    }
    uint64_t matrices = tiny.w.bytes - small - 4 * 24 * expert - 4095 * row;
    assert_int_equal(stats.bytes_per_token, matrices + backend_ref.state_bytes(r.model));
    assert_int_equal(stats.weight_bytes, tiny.w.bytes);
    assert_int_equal(stats.kv_bytes_per_depth, 2 * 256 * sizeof(float));
    assert_int_equal(stats.session_bytes, 2 * backend_ref.state_bytes(r.model) +
                                              16 * stats.kv_bytes_per_depth +
                                              (size_t)shape_mini.vocab * sizeof(int32_t));
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rms_norm_divides_by_the_root_mean_square),
        cmocka_unit_test(rope_turns_only_the_rotary_dimensions),
        cmocka_unit_test(router_takes_the_largest_and_the_lower_index_of_equals),
        cmocka_unit_test(products_decode_every_storage),
        cmocka_unit_test(recurrence_equals_the_chunked_form),
        cmocka_unit_test(a_key_recalls_the_value_written_with_it),
        cmocka_unit_test(prefill_then_decode_equals_single_steps),
        cmocka_unit_test(restored_and_imported_sessions_continue_identically),
        cmocka_unit_test(non_finite_state_is_reported_and_reset_heals),
        cmocka_unit_test(two_steps_in_flight_and_one_back),
        cmocka_unit_test(penalties_count_what_was_appended),
        cmocka_unit_test(sessions_of_one_step_do_not_meet),
        cmocka_unit_test(wrong_calls_are_refused_and_harmless),
        cmocka_unit_test(real_shape_has_the_published_sizes),
        cmocka_unit_test(statistics_count_what_a_token_reads),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
