#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "check.h"
#include "side.h"

/* ---- sampling -------------------------------------------------------------------------------- */

/* Picks of a backend from a prompt of 10, two steps in flight where `ahead`. */
static void picks(const struct bench_model *t, struct side *x, const struct backend_sampling *p,
                  int32_t steps, bool ahead, int32_t *out) {
    int32_t prompt[10];
    lily_err err;
    for (int i = 0; i < 10; i++) prompt[i] = token_at(i, t->w->vocab_used);
    if (x->bad) return;
    x->b->reset(x->s[0]);
    side_feed(t, x, 0, 0, 9, 9, NULL, NULL);
    if (!x->bad) side_failed(x, x->b->sample_begin(x->s[0], prompt, 10, &err), &err);
    struct decode_slot slot = {.session = x->s[0], .token = prompt[9], .sampling = p};
    int32_t submitted = 0, waited = 0;
    while (waited < steps && !x->bad) {
        if (submitted < steps && submitted - waited < (ahead ? 2 : 1)) {
            slot.pick = (uint64_t)submitted;
            side_failed(x, x->b->decode_submit(x->m, &slot, 1, &err), &err);
            submitted++;
            slot.token = -1;
            if (ahead && submitted - waited < 2 && submitted < steps) continue;
        }
        struct decode_result result;
        side_failed(x, x->b->decode_wait(x->m, &result, 1, &err), &err);
        out[waited++] = x->bad ? -1 : result.token;
    }
}

void check_sampling(const struct bench_model *b, int32_t steps, bool against_ref) {
    static const struct backend_sampling kinds[] = {
        {.temperature = 0, .top_p = 1, .repetition = 1},
        {.temperature = 0, .top_p = 1, .repetition = 1.3f, .frequency = 0.2f, .presence = 1.5f},
        {.temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 7},
        {.temperature = 0.7f,
         .top_p = 0.8f,
         .repetition = 1,
         .presence = 1.5f,
         .top_k = 20,
         .stream = 99},
        {.temperature = 1.5f,
         .top_p = 1,
         .min_p = 0.05f,
         .repetition = 1.1f,
         .top_k = 64,
         .stream = 1234567},
        {.temperature = 2, .top_p = 1, .repetition = 1, .top_k = 1, .stream = 5}};
    struct side t = {.b = &backend_ref, .bad = true};
    if (against_ref) t = side_open(b, &backend_ref, "sampling, ref", 1, NULL);
    struct side x = side_open(b, b->cuda, "sampling", 1, NULL);
    int32_t want[256], got[256], ahead[256];
    printf("sampling on the device, %d picks each\n", steps);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        char what[96];
        int32_t same = 0, alike = 0;
        picks(b, &x, &kinds[k], steps, false, got);
        picks(b, &x, &kinds[k], steps, true, ahead);
        while (alike < steps && got[alike] == ahead[alike]) alike++;
        snprintf(what, sizeof what, "sampling %zu: picks of two in flight unlike one", k);
        note(what, x.bad ? (double)NAN : (double)(steps - alike), 0);
        if (!against_ref) continue;
        picks(b, &t, &kinds[k], steps, false, want);
        while (same < steps && want[same] == got[same]) same++;
        /* A near-tie may part the texts, and then all that follows differs. */
        snprintf(what, sizeof what, "sampling %zu: picks from the first unlike ref's on", k);
        note(what, x.bad ? (double)NAN : (double)(steps - same), steps * 0.5);
    }
    if (against_ref) side_close(&t);
    side_close(&x);
}

/* ---- many tokens ----------------------------------------------------------------------------- */

/* What a long run came to. */
struct long_run {
    int64_t bad;     /* results that are not finite */
    uint64_t digest; /* of all tokens, in order */
};

/* A turn of the long run: every slot from a prompt of its own for `room` tokens, sampled on the
 * device, two steps in flight. */
static void long_turn(const struct bench_model *b, struct side *x, int32_t slots, int32_t room,
                      int64_t from, struct long_run *run) {
    static const struct backend_sampling p = {
        .temperature = 1, .top_p = 0.95f, .repetition = 1, .top_k = 20, .stream = 3};
    struct decode_slot slot[SIDE_SESSIONS];
    struct decode_result result[SIDE_SESSIONS];
    lily_err err;
    for (int32_t i = 0; i < slots && !x->bad; i++) {
        b->cuda->reset(x->s[i]);
        side_feed(b, x, i, from + 1000 * i, 8, 8, NULL, NULL);
        if (!x->bad) side_failed(x, b->cuda->sample_begin(x->s[i], NULL, 0, &err), &err);
        slot[i] = (struct decode_slot){.session = x->s[i], .token = 1 + i, .sampling = &p};
    }
    for (int32_t k = 0; k <= room && !x->bad; k++) {
        for (int32_t i = 0; i < slots; i++) slot[i].pick = (uint64_t)(from + k);
        if (k < room) side_failed(x, b->cuda->decode_submit(x->m, slot, slots, &err), &err);
        for (int32_t i = 0; i < slots; i++) slot[i].token = -1;
        if (k == 0 || x->bad) continue;
        side_failed(x, b->cuda->decode_wait(x->m, result, slots, &err), &err);
        for (int32_t i = 0; i < slots && !x->bad; i++) {
            run->bad += !result[i].finite;
            run->digest = random_mix(run->digest ^ (uint64_t)result[i].token);
        }
    }
}

void check_long_run(const struct bench_model *b, int64_t tokens, int32_t slots) {
    struct bench_model deep = *b;
    deep.context = slots > 1 ? 4096 : 32768;
    struct side x = side_open(&deep, b->cuda, "long run", slots, NULL);
    struct long_run run = {0}, begin[2] = {{0}};
    int64_t done = 0;
    int32_t few = (int32_t)(tokens / 5 / slots); /* its beginning, twice */
    char what[96];
    printf("%lld tokens, %d at a time\n", (long long)tokens, slots);
    while (done < tokens && !x.bad) {
        int64_t left = (tokens - done + slots - 1) / slots;
        int32_t room = left < deep.context - 16 ? (int32_t)left : deep.context - 16;
        long_turn(&deep, &x, slots, room, done, &run);
        done += (int64_t)room * slots;
    }
    for (int k = 0; k < 2; k++) long_turn(&deep, &x, slots, few, 0, &begin[k]);
    snprintf(what, sizeof what, "%lld decoded tokens of %d session(s): not finite", (long long)done,
             slots);
    note(what, x.bad ? (double)NAN : (double)run.bad, 0);
    snprintf(what, sizeof what, "the first %d of each twice: digests that differ", few);
    note(what, x.bad ? (double)NAN : (double)(begin[0].digest != begin[1].digest), 0);
    side_close(&x);
}

/* A prompt of so many tokens and eight decoded ones against the truth. */
void check_depth(const struct bench_model *b, int32_t depth) {
    struct bench_model deep = *b;
    deep.context = depth + 64;
    struct side t = side_open(&deep, b->truth, "depth, truth", 1, NULL);
    struct side x = side_open(&deep, b->cuda, "depth", 1, NULL);
    float *truth = side_rows(b, 9), *own = side_rows(b, 9);
    printf("%d tokens deep\n", depth);
    side_feed(&deep, &t, 0, 0, depth, depth, NULL, truth);
    side_feed(&deep, &x, 0, 0, depth, depth, NULL, own);
    for (int32_t k = 0; k < 8; k++) {
        size_t at = (size_t)(k + 1) * (size_t)b->vocab;
        int32_t token = token_at(depth + k, b->w->vocab_used);
        side_decode(&t, 0, token, truth + at);
        side_decode(&x, 0, token, own + at);
    }
    struct likeness l = compare(truth, own, 9, b->vocab);
    char what[96];
    snprintf(what, sizeof what, "%d deep: mean KL (largest %.2g, top-1 %.2f)", depth, l.max,
             l.agree);
    note(what, l.kl, 1e-3);
    side_close(&t);
    side_close(&x);
    free(truth);
    free(own);
}
