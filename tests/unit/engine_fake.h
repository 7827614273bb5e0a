/* An engine on a scripted backend, for tests of the engine layer alone. The fake model's recurrent
 * state is a hash of every token read, its KV cache the tokens themselves, and its logits a
 * function of both: whatever a session resumes wrongly shows in the logits. A script may dictate
 * them. It comes in two: one leaves sampling to the host, the other samples itself with two steps
 * in flight and fails the test when it is called in a way that backend.h does not allow. */
#ifndef TESTS_ENGINE_FAKE_H
#define TESTS_ENGINE_FAKE_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/buf.h"
#include "base/random.h"
#include "engine/engine.h"

/* The fake tokenizer: byte b is token b, then these. */
enum {
    FAKE_ENDOFTEXT = 256,
    FAKE_IM_START,
    FAKE_IM_END,
    FAKE_THINK,
    FAKE_THINK_END,
    FAKE_TOOL_CALL,
    FAKE_TOOL_CALL_END,
    FAKE_USED /* ids below have a token */
};
static const char *const fake_added[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>",  "<think>",
                                         "</think>",      "<tool_call>",  "</tool_call>"};

/* Which of the two the engines opened from now on are on. */
static bool fake_on_device;

static struct fake {
    /* what it shall do; 0 is harmless everywhere */
    int32_t chunk;         /* tokens of one prefill call; 0: 512 */
    const int32_t *script; /* [n_script] tokens that win from position script_at on */
    int32_t n_script, script_at;
    int32_t nan_at;       /* reading token number nan_at spoils the state, once */
    int32_t fail_at;      /* reading token number fail_at fails, once */
    int32_t refuse_at;    /* a decode step that reads it is not even started, once */
    int32_t most_context; /* models of more are out of memory */
    bool save_fails, export_fails, import_fails, restore_fails, no_sessions, begin_fails;
    bool rewind_fails, no_states;
    enum backend_pressure pressure;
    /* what it did */
    int32_t prefilled, decoded, rewound, saved, restored, models, sessions, states;
    int32_t begun, begun_with; /* sequences of picks, and prompt tokens handed over for the last */
    int32_t two_in_flight;     /* submits behind another step */
    lily_session *cancels;     /* by an export or import of keys and values, once */
    int32_t rested;            /* position of the last whole session that was put on disk */
} fake;

struct backend_model {
    struct backend_options options;
    int32_t flights; /* submitted and not waited for, */
    struct {
        struct decode_result result;
        int rc;
        lily_err err;
    } flight[2]; /* oldest first */
};

struct fake_state {
    uint64_t hash;
    bool spoilt;
};

/* Numbers of a session's next pick before the first one, and where no sequence was begun. */
static const uint64_t FAKE_ANY_PICK = UINT64_MAX, FAKE_NO_PICK = UINT64_MAX - 1;

struct backend_state {
    struct fake_state state;
    int32_t pos; /* where it was saved */
};

struct backend_session {
    struct backend_model *model;
    int32_t context, pos, kv_rows;
    uint64_t *kv; /* [context] */
    struct fake_state state, before;
    bool can_rewind;
    int32_t sampled; /* by the last step; -1: nothing */
    uint64_t next_pick;
};

static inline uint64_t fake_mix(uint64_t z) {
    return random_mix(z);
}

/* Most functions may not be called while a step is in flight. */
static void fake_idle(const struct backend_model *m) {
    assert_int_equal(m->flights, 0);
}

static void fake_probe(struct backend_probe *out) {
    *out = (struct backend_probe){.usable = true};
    snprintf(out->device, sizeof out->device, "a script");
    snprintf(out->reason, sizeof out->reason, "tests only");
}

static int fake_open(const struct weights *w, const struct backend_options *options,
                     struct backend_model **out, lily_err *err) {
    (void)w;
    if (fake.most_context && options->max_context > fake.most_context) {
        return ERR(err, LILY_ENOMEM, "fake: room for %d tokens", fake.most_context);
    }
    if (options->progress && options->progress(options->progress_arg, 3, 4)) {
        return ERR(err, LILY_ECANCELED, "fake: cancelled");
    }
    *out = calloc(1, sizeof **out);
    (*out)->options = *options;
    fake.models++;
    return 0;
}

static void fake_close(struct backend_model *m) {
    fake_idle(m);
    fake.models--;
    free(m);
}

static int fake_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                            lily_err *err) {
    if (fake.no_sessions) return ERR_NOMEM(err, "fake");
    *out = calloc(1, sizeof **out);
    (*out)->model = m;
    (*out)->context = context;
    (*out)->sampled = -1;
    (*out)->next_pick = FAKE_NO_PICK;
    (*out)->kv = calloc((size_t)context, sizeof *(*out)->kv);
    fake.sessions++;
    return 0;
}

static void fake_session_free(struct backend_session *s) {
    fake_idle(s->model);
    fake.sessions--;
    free(s->kv);
    free(s);
}

static int32_t fake_position(const struct backend_session *s) {
    return s->pos;
}

static void fake_reset(struct backend_session *s) {
    fake_idle(s->model);
    s->pos = s->kv_rows = 0;
    s->state = (struct fake_state){0};
    s->can_rewind = false;
    s->sampled = -1;
}

static int fake_read(struct backend_session *s, int32_t token, lily_err *err) {
    assert_in_range(s->pos, 0, s->context - 1);
    if (fake.fail_at && s->pos + 1 == fake.fail_at) {
        fake.fail_at = 0;
        return ERR(err, LILY_EBACKEND, "fake: told to fail");
    }
    if (fake.nan_at && s->pos + 1 == fake.nan_at) {
        fake.nan_at = 0;
        s->state.spoilt = true;
    }
    s->state.hash = fake_mix(s->state.hash * 31 + (uint64_t)token + 1);
    s->kv[s->pos++] = s->state.hash;
    s->kv_rows = s->pos; /* what follows belonged to another continuation */
    return 0;
}

static void fake_logits(const struct backend_session *s, float *out) {
    uint64_t h = s->state.hash;
    for (int32_t i = 0; i < s->pos; i++) h = fake_mix(h ^ s->kv[i]);
    for (int32_t i = 0; i < shape_mini.vocab; i++) {
        out[i] = (float)(fake_mix(h ^ (uint64_t)i << 32) >> 40) * 0x1p-21f - 4;
    }
    int32_t at = s->pos - fake.script_at;
    if (fake.script && at >= 0 && at < fake.n_script) out[fake.script[at]] = 1000;
    if (s->state.spoilt) out[7] = NAN;
}

static int fake_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err) {
    int32_t chunk = fake.chunk ? fake.chunk : 512;
    fake_idle(s->model);
    step->done = 0;
    s->can_rewind = false;
    s->sampled = -1;
    while (step->done < step->n && step->done < chunk) {
        int rc = fake_read(s, step->ids[step->done], err);
        if (rc) return rc;
        fake.prefilled++;
        if (step->all_logits) {
            fake_logits(s, step->all_logits + (size_t)step->done * (size_t)shape_mini.vocab);
        }
        step->done++;
    }
    if (step->logits && step->done == step->n) fake_logits(s, step->logits);
    return 0;
}

/* The best of logits[FAKE_USED]; a temperature adds noise that depends on the pick alone. */
static int32_t fake_sample(const struct backend_sampling *p, uint64_t pick, const float *logits) {
    float best = 0;
    int32_t token = -1;
    for (int32_t i = 0; i < FAKE_USED; i++) {
        uint64_t noise = fake_mix(random_at(p->stream, pick) ^ (uint64_t)i);
        float x = logits[i] + (p->temperature > 0 ? (float)(noise >> 40) * 0x1p-22f : 0);
        if (token < 0 || x > best) best = x, token = i;
    }
    return token;
}

/* One step, with its result. */
static int fake_step(struct backend_session *s, const struct decode_slot *slot,
                     struct decode_result *result, lily_err *err) {
    static float logits[4096];
    int32_t token = slot->token == -1 ? s->sampled : slot->token;
    assert_true(token >= 0);
    if (slot->sampling) {
        if (s->next_pick == FAKE_ANY_PICK) s->next_pick = slot->pick;
        assert_int_equal(slot->pick, s->next_pick++);
    }
    s->before = s->state;
    int rc = fake_read(s, token, err);
    if (rc) return rc;
    s->can_rewind = true;
    fake.decoded++;
    fake_logits(s, logits);
    if (slot->logits) memcpy(slot->logits, logits, sizeof logits);
    *result = (struct decode_result){.token = -1, .finite = !s->state.spoilt};
    if (slot->sampling) {
        result->token = result->finite ? fake_sample(slot->sampling, slot->pick, logits) : 0;
    }
    s->sampled = result->token;
    return 0;
}

static int fake_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                       lily_err *err) {
    const struct decode_slot *slot = slots;
    assert_int_equal(n, 1);
    assert_in_range(m->flights, 0, slot->sampling ? 1 : 0);
    if (slot->sampling) {
        assert_true(slot->session->next_pick != FAKE_NO_PICK);
        assert_int_equal(backend_check_sampling(slot->sampling, err), 0);
    }
    if (fake.refuse_at && slot->session->pos + 1 == fake.refuse_at) {
        fake.refuse_at = 0;
        return ERR(err, LILY_EBACKEND, "fake: told to refuse");
    }
    fake.two_in_flight += m->flights;
    int32_t i = m->flights++;
    m->flight[i].rc = fake_step(slot->session, slot, &m->flight[i].result, &m->flight[i].err);
    return 0;
}

static int fake_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                     lily_err *err) {
    assert_int_equal(n, 1);
    assert_in_range(m->flights, 1, 2);
    int rc = m->flight[0].rc;
    *err = m->flight[0].err;
    results[0] = m->flight[0].result;
    m->flight[0] = m->flight[1];
    m->flights--;
    return rc;
}

static int fake_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n,
                             lily_err *err) {
    fake_idle(s->model);
    if (fake.begin_fails) return ERR(err, LILY_EBACKEND, "fake: told not to begin");
    assert_true(prompt || n == 0);
    fake.begun++;
    fake.begun_with = n;
    s->next_pick = FAKE_ANY_PICK; /* the host may have made picks */
    return 0;
}

static int fake_rewind(struct backend_session *s, lily_err *err) {
    fake_idle(s->model);
    assert_true(s->can_rewind);
    if (fake.rewind_fails) return ERR(err, LILY_EBACKEND, "fake: told not to go back");
    s->state = s->before;
    s->kv_rows = --s->pos;
    s->can_rewind = false;
    s->sampled = -1;
    s->next_pick = FAKE_NO_PICK;
    fake.rewound++;
    return 0;
}

static size_t fake_state_bytes(const struct backend_model *m) {
    (void)m;
    return sizeof(struct backend_state);
}

static int fake_state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    (void)m;
    if (fake.no_states) return ERR_NOMEM(err, "fake");
    *out = calloc(1, sizeof **out);
    fake.states++;
    return 0;
}

static void fake_state_free(struct backend_state *state) {
    if (state) fake.states--;
    free(state);
}

static int fake_export(const struct backend_state *from, void *out, lily_err *err) {
    (void)err;
    memcpy(out, from, sizeof *from);
    return fake.export_fails ? ERR(err, LILY_EBACKEND, "fake: told not to export") : 0;
}

static int fake_import(struct backend_state *to, const void *in, lily_err *err) {
    (void)err;
    memcpy(to, in, sizeof *to);
    return 0;
}

static int fake_save(struct backend_session *s, struct backend_state *to, lily_err *err) {
    fake_idle(s->model);
    if (fake.save_fails) return ERR(err, LILY_EBACKEND, "fake: told not to save");
    to->state = s->state;
    to->pos = s->pos;
    fake.saved++;
    return 0;
}

static int fake_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                        lily_err *err) {
    fake_idle(s->model);
    if (fake.restore_fails) return ERR(err, LILY_EBACKEND, "fake: told not to restore");
    assert_in_range(pos, 0, s->kv_rows);
    assert_true(pos % BACKEND_GRID == 0 || pos == fake.rested);
    assert_int_equal(from->pos, pos); /* it was taken exactly where it is resumed */
    s->state = from->state;
    s->pos = pos;
    s->can_rewind = false;
    s->sampled = -1;
    fake.restored++;
    return 0;
}

static size_t fake_kv_bytes(const struct backend_model *m, int32_t n) {
    (void)m;
    return (size_t)n * sizeof(uint64_t);
}

static int fake_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out,
                          lily_err *err) {
    fake_idle(s->model);
    if (fake.export_fails) return ERR(err, LILY_EBACKEND, "fake: told not to export");
    memcpy(out, s->kv + from, (size_t)n * sizeof *s->kv);
    if (fake.cancels) lily_cancel(fake.cancels);
    fake.cancels = NULL;
    fake.rested = s->pos;
    return backend_check_export(from, n, s->kv_rows, err);
}

static int fake_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                          lily_err *err) {
    fake_idle(s->model);
    if (fake.import_fails) return ERR(err, LILY_EBACKEND, "fake: told not to import");
    int rc = backend_check_import(from, n, s->kv_rows, s->context, err);
    if (rc) return rc;
    memcpy(s->kv + from, in, (size_t)n * sizeof *s->kv);
    if (fake.cancels) lily_cancel(fake.cancels);
    fake.cancels = NULL;
    if (from + n > s->kv_rows) s->kv_rows = from + n;
    return 0;
}

static void fake_stats(const struct backend_model *m, struct backend_stats *out) {
    (void)m;
    *out = (struct backend_stats){.weight_bytes = 1, .session_bytes = 2, .scratch_bytes = 3};
}

static enum backend_pressure fake_pressure(const struct backend_model *m) {
    (void)m;
    return fake.pressure;
}

#define FAKE_BACKEND                                                                               \
    .name = "fake", .probe = fake_probe, .open = fake_open, .close = fake_close,                   \
    .session_new = fake_session_new, .session_free = fake_session_free, .position = fake_position, \
    .reset = fake_reset, .prefill = fake_prefill, .decode_submit = fake_submit,                    \
    .decode_wait = fake_wait, .state_bytes = fake_state_bytes, .state_new = fake_state_new,        \
    .state_free = fake_state_free, .state_save = fake_save, .state_restore = fake_restore,         \
    .state_export = fake_export, .state_import = fake_import, .kv_bytes = fake_kv_bytes,           \
    .kv_export = fake_kv_export, .kv_import = fake_kv_import, .stats = fake_stats,                 \
    .pressure = fake_pressure
static const struct backend backend_fake = {FAKE_BACKEND};
static const struct backend backend_fake_device = {FAKE_BACKEND, .sample_begin = fake_sample_begin,
                                                   .rewind = fake_rewind};

/* A tokenizer.json without merges. */
static inline void fake_tokenizer(struct buf *out) {
    buf_puts(out, "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        bool printable = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        buf_printf(out, "%s\"\\u%04x\":%d", b ? "," : "", printable ? b : next++, b);
    }
    buf_puts(out,
             "}},\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
             "\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{L}+|\\\\s+\"},"
             "\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","
             "\"add_prefix_space\":false,\"use_regex\":false}]},\"added_tokens\":[");
    for (int i = 0; i < FAKE_USED - 256; i++) {
        buf_printf(out, "%s{\"id\":%d,\"content\":\"%s\",\"special\":%s}", i ? "," : "", 256 + i,
                   fake_added[i], i < 3 ? "true" : "false");
    }
    buf_puts(out, "]}");
}

static const struct weights fake_weights = {
    .shape = &shape_mini, .layers = 8, .vocab_used = FAKE_USED};

/* A log that keeps its last line in arg[500]. */
static inline void fake_keep_line(void *arg, const char *line) {
    snprintf(arg, 500, "%s", line);
}

/* An engine on the fake backend; generation_config may be NULL. Resets the fake's script. */
static inline int fake_try_engine(const lily_engine_options *options, const char *generation_config,
                                  lily_engine **out, lily_err *err) {
    struct buf tokenizer = {0};
    fake_tokenizer(&tokenizer);
    const struct engine_parts parts = {
        .weights = &fake_weights,
        .backend = fake_on_device ? &backend_fake_device : &backend_fake,
        .tokenizer = {tokenizer.data, tokenizer.len},
        .generation_config = {generation_config, generation_config ? strlen(generation_config) : 0},
        .reason = "tests",
    };
    int rc = engine_assemble(options, &parts, out, err);
    buf_free(&tokenizer);
    return rc;
}

static inline lily_engine *fake_engine(lily_engine_options options) {
    lily_engine *e;
    lily_err err = {0};
    fake = (struct fake){0};
    if (!options.max_sessions) options.max_sessions = 4;
    if (fake_try_engine(&options, NULL, &e, &err)) fail_msg("%s", err.msg);
    return e;
}

static inline lily_session *fake_session(lily_engine *e) {
    lily_session *s;
    lily_err err = {0};
    if (lily_session_new(e, 0, &s, &err)) fail_msg("%s", err.msg);
    return s;
}

/* Closes both; nothing may be left in the backend. */
static inline void fake_close_all(lily_engine *e, lily_session *s) {
    lily_session_free(s);
    lily_engine_close(e);
    assert_int_equal(fake.models, 0);
    assert_int_equal(fake.sessions, 0);
    assert_int_equal(fake.states, 0);
}

#endif
