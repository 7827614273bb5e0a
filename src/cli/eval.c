/* lily eval: teacher-forced perplexity and top-1 accuracy. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/measure.h"
#include "cli/model_options.h"
#include "cli/npy.h"
#include "cli/output.h"

enum { DEFAULT_WINDOW = 2048 };

struct eval_options {
    struct model_options model;
    const char *text, *ids, *logits_out;
    int32_t window;
};

struct eval_work {
    lily_engine *engine;
    lily_session *session;
    lily_tokens tokens;
    struct npy_writer *npy;
    int32_t vocab;
    size_t window;                       /* tokens */
    size_t base, length;                 /* of the window being scored */
    size_t windows, done, scored, right; /* so far */
    double nll;                          /* sum over scored positions */
    uint64_t digest;                     /* of every logit */
    struct work_bar bar;
    lily_err row_err; /* why a row callback stopped the scoring */
};

struct eval_score {
    double nll, perplexity, top1, seconds;
};

/* ---- ids ------------------------------------------------------------------------------------- */

/* Doubling: a book's ids come from a text, whose length says little about their number. */
static bool push_id(lily_tokens *t, size_t *cap, int32_t id) {
    if (t->n == *cap) {
        size_t want = *cap ? *cap * 2 : 1024;
        int32_t *grown = realloc(t->ids, want * sizeof *grown);
        if (!grown) return false;
        t->ids = grown, *cap = want;
    }
    t->ids[t->n++] = id;
    return true;
}

/* A byte offset, since such files are often one line. */
static int ids_error(const char *path, size_t at, lily_err *err) {
    return ERR(err, LILY_EFORMAT,
               "%s: found no token id at byte %zu, expected a JSON array of ids or ids divided by "
               "whitespace",
               path, at);
}

/* A JSON array of integers is a list with commas in brackets: one reader takes both forms. */
static int parse_ids(const char *path, const char *text, lily_tokens *out, lily_err *err) {
    const char *p = text + strspn(text, " \t\r\n");
    const bool array = *p == '[';
    const char *between = array ? ", \t\r\n" : " \t\r\n";
    size_t cap = 0;
    if (array) p++;
    p += strspn(p, " \t\r\n");
    while (*p && *p != ']') {
        char *end;
        long long id = strtoll(p, &end, 10);
        if (end == p || id < 0 || id > INT32_MAX) return ids_error(path, (size_t)(p - text), err);
        if (!push_id(out, &cap, (int32_t)id)) return ERR_NOMEM(err, path);
        p = end + strspn(end, between);
        if (p == end && *p && *p != ']') return ids_error(path, (size_t)(p - text), err);
    }
    if (array != (*p == ']')) return ids_error(path, (size_t)(p - text), err);
    return LILY_OK;
}

/* The engine would refuse these too, but it does not know which file they came from. */
static int check_ids(const char *path, const lily_tokens *t, int32_t vocab, lily_err *err) {
    if (t->n < 2)
        return ERR(err, LILY_EINVAL, "%s: found %zu tokens, expected at least 2", path, t->n);
    for (size_t i = 0; i < t->n; i++)
        if (t->ids[i] < 0 || t->ids[i] >= vocab)
            return ERR(err, LILY_EINVAL, "%s: found token id %d at place %zu, expected 0 to %d",
                       path, (int)t->ids[i], i, (int)vocab - 1);
    return LILY_OK;
}

/* ---- scoring --------------------------------------------------------------------------------- */

/* Row i of a window: the logits after its token i, which predict token i + 1. */
static int score_row(void *arg, size_t i, const float *logits) {
    struct eval_work *w = arg;
    if (w->npy && npy_row(w->npy, logits, &w->row_err)) return 1;
    w->digest = digest_add(w->digest, logits, (size_t)w->vocab * sizeof *logits);
    if (i + 1 < w->length) {
        int32_t target = w->tokens.ids[w->base + i + 1];
        double logp = log_probability(logits, w->vocab, target);
        if (isnan(logp))
            return ERR(&w->row_err, LILY_ENUMERIC, "token %zu: found logits that are not numbers",
                       w->base + i);
        w->nll -= logp;
        w->right += argmax(logits, w->vocab) == target;
        w->scored++;
    }
    w->done++;
    return work_bar_update(&w->bar, "eval", "tok", w->done, w->tokens.n);
}

/* Windows share nothing: each starts from an empty session. */
static int score_windows(struct eval_work *w, lily_err *err) {
    for (w->base = 0; w->base < w->tokens.n; w->base += w->length, w->windows++) {
        size_t left = w->tokens.n - w->base;
        w->length = left < w->window ? left : w->window;
        lily_session_reset(w->session);
        int rc =
            lily_session_score(w->session, w->tokens.ids + w->base, w->length, score_row, w, err);
        if (w->row_err.code) {
            *err = w->row_err;
            return err->code;
        }
        if (!rc && interrupted()) rc = ERR(err, LILY_ECANCELED, "interrupted");
        if (rc) return rc;
    }
    return LILY_OK;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* Text is tokenised as plain text: a control token spelled in it stays text. */
static int load_tokens(const struct eval_options *o, struct eval_work *w, lily_err *err) {
    struct buf text = {0};
    const char *path = o->text ? o->text : o->ids;
    int rc = read_input(path, INPUT_LIMIT, &text, err);
    if (!rc && text.len == 0)
        rc = ERR(err, LILY_EINVAL, "%s: found nothing, expected text or ids", path);
    if (!rc && o->text) rc = lily_tokenize(w->engine, text.data, text.len, false, &w->tokens, err);
    if (!rc && o->ids) rc = parse_ids(path, text.data, &w->tokens, err);
    buf_free(&text);
    return rc ? rc : check_ids(path, &w->tokens, w->vocab, err);
}

static int eval(const struct eval_options *o, struct eval_work *w, struct eval_score *score,
                lily_err *err) {
    lily_engine_info info;
    int rc = model_open(&o->model, o->window, &w->engine, err);
    if (rc) return rc;
    lily_engine_get_info(w->engine, &info);
    w->vocab = info.vocab;
    rc = load_tokens(o, w, err);
    if (rc) return rc;
    /* The engine may hold less than asked for: less memory, or a smaller --ctx. */
    w->window = (size_t)(o->window < info.context ? o->window : info.context);
    rc = lily_session_new(w->engine, (int32_t)w->window, &w->session, err);
    if (!rc && o->logits_out)
        rc = npy_open(o->logits_out, w->tokens.n, (size_t)w->vocab, &w->npy, err);
    if (rc) return rc;
    /* Tokenising and opening the output are not the model's time. */
    double started = clock_seconds();
    rc = score_windows(w, err);
    if (rc) return rc;
    score->seconds = clock_seconds() - started;
    if (w->npy) {
        rc = npy_commit(w->npy, err);
        w->npy = NULL;
    }
    if (!rc && w->scored == 0)
        rc = ERR(err, LILY_EINVAL,
                 "window: found 1 token, expected at least 2, or nothing is "
                 "predicted; give a larger --ctx");
    score->nll = w->scored ? w->nll / (double)w->scored : 0;
    score->perplexity = exp(score->nll);
    score->top1 = w->scored ? (double)w->right / (double)w->scored : 0;
    return rc;
}

/* The digest covers every logit: equal digests mean bit-identical logits. */
static int print_score(const struct eval_options *o, const struct eval_work *w,
                       const struct eval_score *s) {
    char digest[24];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)w->digest);
    if (o->model.json)
        return print_json(json_pack(
            "{s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:f, s:f, s:s, s:o?, s:o}", "perplexity",
            s->perplexity, "nll", s->nll, "top1", s->top1, "positions", (json_int_t)w->scored,
            "tokens", (json_int_t)w->tokens.n, "windows", (json_int_t)w->windows, "window",
            (json_int_t)w->window, "seconds", s->seconds, "tok_s", (double)w->tokens.n / s->seconds,
            "logits_digest", digest, "logits_out", o->logits_out ? words_json(o->logits_out) : NULL,
            "engine", engine_json(w->engine)));
    printf("perplexity  %.4f (mean NLL %.6f)\n", s->perplexity, s->nll);
    printf("top-1       %.2f %% of %zu positions\n", s->top1 * 100, w->scored);
    printf("tokens      %zu in %zu windows of up to %zu\n", w->tokens.n, w->windows, w->window);
    printf("speed       %.1f tok/s, %.2f s\n", (double)w->tokens.n / s->seconds, s->seconds);
    printf("logits      digest %s%s%s\n", digest, o->logits_out ? ", written to " : "",
           o->logits_out ? o->logits_out : "");
    return EXIT_OK;
}

int cmd_eval(int argc, char **argv) {
    struct eval_options o = {.model = MODEL_DEFAULTS, .window = DEFAULT_WINDOW};
    const struct option options[] = {
        OPT(NAME, "text", 0, &o.text, "FILE", "plain text to score; -: standard input"),
        OPT(NAME, "ids", 0, &o.ids, "FILE",
            "token ids to score: a JSON array, or divided by whitespace"),
        OPT_RANGE(INT, "window", &o.window, "N", 2, 1 << 20,
                  "tokens per window; every window begins with an empty context"),
        OPT(NAME, "logits-out", 0, &o.logits_out, "FILE",
            "write every token's logits as float32 .npy [tokens, vocabulary]"),
        MODEL_OPTIONS(&o.model),
        JSON_OPTION(&o.model.json),
    };
    const struct usage usage = {
        .command = "eval",
        .summary = "perplexity and top-1 accuracy over a text",
        .about = "Reads the text in windows and compares the model's prediction after each token "
                 "with the token that follows. The last token of a window predicts nothing: a "
                 "window of N tokens has N - 1 scored positions. Row i of --logits-out holds the "
                 "logits after token i.",
        .example = "lily eval --text book.txt --window 512 --json",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if (!o.text == !o.ids) return usage_error("eval", "give one of --text and --ids");
    struct eval_work w = {.digest = DIGEST_START};
    struct eval_score score = {0};
    lily_err err = {0};
    interrupt_catch();
    int rc = eval(&o, &w, &score, &err);
    work_bar_end(&w.bar);
    status = rc ? fail(&err) : print_score(&o, &w, &score);
    npy_abort(w.npy);
    lily_tokens_free(&w.tokens);
    lily_session_free(w.session);
    lily_engine_close(w.engine);
    return status;
}
