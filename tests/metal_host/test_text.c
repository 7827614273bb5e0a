/* The stand-in end to end through the whole engine on the emulated device: greedy text of held-out
 * prompts against ref, single questions and conversations of up to eleven. Where the texts part,
 * the test shows by how little ref preferred its own token, and accepts only a near-tie. Prompts of
 * one session share prefixes, so that resuming from saved states is part of it. */
#include <jansson.h>

#include "harness.h"
#include "lily.h"

enum { PROMPTS = 52, MANY = 104, EARLIER = 10, TOKENS = 10, CONTEXT = 1024 };
static bool full;                    /* MANY prompts, and again with contraction */
static const double NEAR_TIE = 0.15; /* logits */

struct run {
    lily_engine *engine;
    lily_session *session;
};

static struct run start(const char *backend) {
    lily_engine_options o = {.backend = backend, .context = CONTEXT, .threads = 1};
    struct run r;
    lily_err err;
    ok(lily_engine_open(&o, &r.engine, &err), &err);
    ok(lily_session_new(r.engine, 0, &r.session, &err), &err);
    return r;
}

static void stop(struct run *r) {
    lily_session_free(r->session);
    lily_engine_close(r->engine);
}

struct answer {
    int32_t ids[TOKENS];
    int32_t n;
};

static int take(void *arg, int32_t id) {
    struct answer *a = arg;
    a->ids[a->n++] = id;
    return 0;
}

/* Reads the prompt and picks the first token on the host, the others by the engine's own loop. */
static struct answer greedy(struct run *r, const lily_tokens *prompt) {
    struct answer a = {0};
    lily_engine_info info;
    lily_err err;
    lily_engine_get_info(r->engine, &info);
    ok(lily_session_sync(r->session, prompt->ids, prompt->n, &err), &err);
    const float *logits = lily_session_logits(r->session);
    take(&a, argmax(logits, info.vocab));
    ok(lily_session_greedy(r->session, a.ids[0], TOKENS - 1, take, &a, &err), &err);
    assert_int_equal(a.n, TOKENS);
    return a;
}

/* How much more ref likes its own token than the other one after prompt and ids[n]. */
static double margin(struct run *ref, const lily_tokens *prompt, const struct answer *right,
                     int32_t n, int32_t other) {
    int32_t *ids = malloc((prompt->n + TOKENS) * sizeof *ids);
    lily_err err;
    memcpy(ids, prompt->ids, prompt->n * sizeof *ids);
    memcpy(ids + prompt->n, right->ids, (size_t)n * sizeof *ids);
    ok(lily_session_sync(ref->session, ids, prompt->n + (size_t)n, &err), &err);
    const float *logits = lily_session_logits(ref->session);
    double m = (double)logits[right->ids[n]] - (double)logits[other];
    free(ids);
    return m;
}

struct tally {
    int32_t asked, parted, longest;
};

static void ask(struct run *metal, struct run *ref, const lily_tokens *prompt, struct tally *t) {
    struct answer mine = greedy(metal, prompt), right = greedy(ref, prompt);
    int32_t same = 0;
    while (same < TOKENS && mine.ids[same] == right.ids[same]) same++;
    if (same < TOKENS) {
        double m = margin(ref, prompt, &right, same, mine.ids[same]);
        printf("prompt %d of %zu tokens: texts part at token %d, where ref prefers its own by "
               "%.3f\n",
               t->asked, prompt->n, same, m);
        figure("text near-tie", m);
        assert_true(m < NEAR_TIE);
        t->parted++;
    }
    if ((int32_t)prompt->n > t->longest) t->longest = (int32_t)prompt->n;
    t->asked++;
}

/* The task's question behind some of the earlier ones with their answers, oldest first. */
static char *conversation(const json_t *task, const json_t *earlier, size_t turns) {
    json_t *messages = json_array();
    size_t n = json_array_size(earlier);
    for (size_t i = turns < n ? n - turns : 0; i < n; i++) {
        const json_t *turn = json_array_get(earlier, i);
        json_array_extend(messages, json_object_get(turn, "messages"));
        json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "assistant", "content",
                                                  json_object_get(turn, "content")));
    }
    json_array_extend(messages, json_object_get(task, "messages"));
    char *text = json_dumps(messages, 0);
    json_decref(messages);
    return text;
}

/* One in thirteen prompts is a long conversation, one a shorter one. */
static size_t turns_before(int32_t asked) {
    return asked % 13 == 12 ? EARLIER : asked % 13 == 6 ? EARLIER / 3 : 0;
}

/* So many of the held-out prompts, spread over all kinds. */
static struct tally compare(int32_t prompts) {
    FILE *f = fopen(HELDOUT, "r");
    char line[8192];
    struct tally t = {0};
    json_t *earlier = json_array();
    assert_non_null(f);
    struct run metal = start("metal"), ref = start("ref");
    for (int32_t number = 0; t.asked < prompts && fgets(line, sizeof line, f); number++) {
        if (number % (prompts == MANY ? 4 : 9) != 0) continue;
        json_t *task = json_loads(line, 0, NULL);
        char *messages = conversation(task, earlier, turns_before(t.asked));
        lily_chat_options chat = {.no_thinking = t.asked % 2 == 0};
        lily_tokens prompt = {0};
        lily_err err;
        ok(lily_chat_prompt(ref.engine, messages, NULL, &chat, &prompt, &err), &err);
        if (prompt.n + TOKENS <= CONTEXT) ask(&metal, &ref, &prompt, &t);
        lily_tokens_free(&prompt);
        free(messages);
        json_array_append_new(earlier, task);
    }
    fclose(f);
    json_decref(earlier);
    printf("%d prompts of at most %d tokens, %d texts part at a near-tie\n", t.asked, t.longest,
           t.parted);
    assert_true(t.asked >= 50 && t.longest >= 300 && t.parted * 10 <= t.asked);
    stop(&metal);
    stop(&ref);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
    return t;
}

static void text_is_that_of_ref(void **state) {
    (void)state;
    emulate(false, 0);
    struct tally t = compare(full ? MANY : PROMPTS);
    figure("text prompts", t.asked);
    figure("text parted", t.parted);
    figure("text longest", t.longest);
}

static void also_with_contraction(void **state) {
    (void)state;
    struct metal_emu_options o = metal_emu_defaults();
    o.checked = false;
    o.contract = true;
    metal_emu_configure(&o);
    struct tally t = compare(PROMPTS);
    figure("text prompts contracted", t.asked);
    figure("text parted contracted", t.parted);
}

int main(int argc, char **argv) {
    full = harness_begin(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_that_of_ref),
        cmocka_unit_test(also_with_contraction),
    };
    return _cmocka_run_group_tests("metal text", tests, full ? 2 : 1, NULL, NULL);
}
