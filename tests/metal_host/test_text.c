/* The stand-in end to end through the whole engine on the emulated device: greedy text of held-out
 * prompts of varied length against ref. Where the texts part, the test shows by how little ref
 * preferred its own token, and accepts only a near-tie. Prompts of one session share prefixes, so
 * that resuming from saved states is part of it. */
#include <jansson.h>

#include "harness.h"
#include "lily.h"

enum { PROMPTS = 52, TOKENS = 10, CONTEXT = 512 };
static bool full;                    /* all held-out prompts */
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

static void text_is_that_of_ref(void **state) {
    (void)state;
    FILE *f = fopen(HELDOUT, "r");
    char line[8192];
    int32_t asked = 0, parted = 0, longest = 0, number = 0;
    emulate(false, 0);
    assert_non_null(f);
    struct run metal = start("metal"), ref = start("ref");
    while ((full || asked < PROMPTS) && fgets(line, sizeof line, f)) {
        if (number++ % 9 != 0 && !full) continue;
        json_t *task = json_loads(line, 0, NULL);
        char *messages = json_dumps(json_object_get(task, "messages"), 0);
        lily_chat_options chat = {.no_thinking = asked % 2 == 0};
        lily_tokens prompt = {0};
        lily_err err;
        ok(lily_chat_prompt(ref.engine, messages, NULL, &chat, &prompt, &err), &err);
        if (prompt.n + TOKENS <= CONTEXT) {
            struct answer mine = greedy(&metal, &prompt), right = greedy(&ref, &prompt);
            int32_t same = 0;
            while (same < TOKENS && mine.ids[same] == right.ids[same]) same++;
            if (same < TOKENS) {
                double m = margin(&ref, &prompt, &right, same, mine.ids[same]);
                printf("prompt %d of %zu tokens: texts part at token %d, where ref prefers its own "
                       "by %.3f\n",
                       asked, prompt.n, same, m);
                assert_true(m < NEAR_TIE);
                parted++;
            }
            if ((int32_t)prompt.n > longest) longest = (int32_t)prompt.n;
            asked++;
        }
        lily_tokens_free(&prompt);
        free(messages);
        json_decref(task);
    }
    fclose(f);
    printf("%d prompts of at most %d tokens, %d texts part at a near-tie\n", asked, longest,
           parted);
    assert_true(asked >= 50 && parted * 10 <= asked);
    stop(&metal);
    stop(&ref);
    nothing_found();
    assert_int_equal(metal_emu_live_objects(), 0);
}

int main(int argc, char **argv) {
    full = argc > 1 && strcmp(argv[1], "full") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_that_of_ref),
    };
    return cmocka_run_group_tests_name("metal text", tests, NULL, NULL);
}
