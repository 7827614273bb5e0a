/* lily bench: prompt and decode speed over a grid of lengths and depths. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/measure.h"
#include "cli/model_options.h"
#include "cli/output.h"
#include "cli/report.h"

struct bench_options {
    struct model_options model;
    struct int_list prompts, decodes, depths;
    int32_t repeats;
};

struct bench_row {
    bool prefill;
    int32_t n, depth;
    double tok_s, spread;
    double gb_s, fraction; /* NaN: not meaningful for this row */
    uint64_t digest;       /* of the logits after the last token and, in decode, of all tokens */
    bool repeated;         /* every repeat had the same digest */
};

struct bench_work {
    lily_engine *engine;
    lily_session *session;
    lily_engine_info info;
    int32_t *ids;              /* [longest] the measured prompt */
    double *rates;             /* [repeats] tok/s of the running row */
    double bound;              /* bytes per second that can be read; 0: unknown for this backend */
    bool stated;               /* it is the driver's of a GPU, not measured */
    bool differed;             /* a run did not repeat the digest of its row */
    json_t *rows;              /* --json */
    uint64_t runs, total_runs; /* for the bar */
    struct work_bar bar;
};

/* ---- one run --------------------------------------------------------------------------------- */

/* Untimed. A backend that can go back to depth does; one that cannot reads it all again. */
static int to_depth(struct bench_work *w, int32_t depth, lily_err *err) {
    if (depth == 0) {
        lily_session_reset(w->session);
        return LILY_OK;
    }
    return lily_session_sync(w->session, w->ids, (size_t)depth, err);
}

/* Two builds that agree here computed bit-identical logits. A device that samples leaves none. */
static uint64_t logits_digest(const struct bench_work *w, uint64_t digest) {
    const float *logits = lily_session_logits(w->session);
    return logits ? digest_add(digest, logits, (size_t)w->info.vocab * sizeof *logits) : digest;
}

/* Timed: the session already holds depth tokens, so sync reads only the n that follow. */
static int run_prefill(struct bench_work *w, const struct bench_row *row, double *seconds,
                       uint64_t *digest, lily_err *err) {
    double started = clock_seconds();
    int rc = lily_session_sync(w->session, w->ids, (size_t)row->depth + (size_t)row->n, err);
    *seconds = clock_seconds() - started;
    if (!rc) *digest = logits_digest(w, DIGEST_START);
    return rc;
}

static int add_token(void *arg, int32_t id) {
    uint64_t *digest = arg;
    *digest = digest_add(*digest, &id, sizeof id);
    return interrupted();
}

/* The first token comes from the measured prompt, every other is the likeliest one. */
static int run_decode(struct bench_work *w, const struct bench_row *row, double *seconds,
                      uint64_t *digest, lily_err *err) {
    *digest = DIGEST_START;
    double started = clock_seconds();
    int rc = lily_session_greedy(w->session, w->ids[row->depth], row->n, add_token, digest, err);
    *seconds = clock_seconds() - started;
    if (!rc) *digest = logits_digest(w, *digest);
    return rc;
}

/* One run of a row, from an untouched state at its depth. */
static int run_once(struct bench_work *w, const struct bench_row *row, double *rate,
                    uint64_t *digest, lily_err *err) {
    double seconds = 0;
    int rc = to_depth(w, row->depth, err);
    if (!rc && interrupted()) rc = ERR(err, LILY_ECANCELED, "interrupted");
    if (!rc) rc = (row->prefill ? run_prefill : run_decode)(w, row, &seconds, digest, err);
    if (rc) return rc;
    *rate = row->n / seconds;
    work_bar_update(&w->bar, "bench", "runs", ++w->runs, w->total_runs);
    return LILY_OK;
}

/* ---- one row --------------------------------------------------------------------------------- */

/* Medians resist the one slow run that a shared machine always has. */
static void settle_row(const struct bench_options *o, struct bench_work *w, struct bench_row *row) {
    row->spread = spread(w->rates, (size_t)o->repeats);
    row->tok_s = median(w->rates, (size_t)o->repeats);
    row->gb_s = row->fraction = NAN;
    if (row->prefill) return; /* bounded by arithmetic, not by reading */
    double depth = row->depth + row->n / 2.0;
    double bytes = (double)w->info.bytes_per_token + (double)w->info.kv_bytes_per_depth * depth;
    row->gb_s = row->tok_s * bytes * 1e-9;
    if (w->bound > 0) row->fraction = row->gb_s * 1e9 / w->bound;
}

/* JSON has no NaN: what is not meaningful is null. */
static json_t *real_or_null(double v) {
    return isnan(v) ? json_null() : json_real(v);
}

/* Every row names model, backend and machine, so that rows of many runs can be put in one list. */
static int add_json_row(const struct bench_options *o, struct bench_work *w,
                        const struct bench_row *row, lily_err *err) {
    char digest[24];
    snprintf(digest, sizeof digest, "%016llx", (unsigned long long)row->digest);
    json_t *runs = json_array();
    for (int32_t i = 0; i < o->repeats; i++) json_array_append_new(runs, json_real(w->rates[i]));
    json_t *item =
        json_pack("{s:s, s:i, s:i, s:f, s:f, s:o, s:o, s:o, s:s, s:b, s:o, s:s, s:i, s:s, s:s, "
                  "s:s, s:s, s:I, s:s?, s:s}",
                  "test", row->prefill ? "prefill" : "decode", "n", (int)row->n, "depth",
                  (int)row->depth, "tok_s", row->tok_s, "spread", row->spread, "gb_s",
                  real_or_null(row->gb_s), "fraction_of_bound", real_or_null(row->fraction),
                  "bound_gb_s", real_or_null(w->bound > 0 ? w->bound * 1e-9 : NAN), "digest",
                  digest, "digest_repeats", (int)row->repeated, "runs_tok_s", runs, "model",
                  w->info.model_name, "layers", (int)w->info.layers, "backend", w->info.backend,
                  "device", w->info.device, "checkpoint", w->info.checkpoint, "checkpoint_kind",
                  w->info.model_kind, "weight_bytes", (json_int_t)w->info.weight_bytes, "bound",
                  w->bound <= 0 ? NULL
                  : w->stated   ? "stated by the driver"
                                : "measured by this process",
                  "kernels", w->info.kernels);
    return json_array_append_new(w->rows, item) ? ERR_NOMEM(err, "bench rows") : LILY_OK;
}

/* Printed as soon as it is measured: a grid over long depths takes minutes. */
static void print_row(struct bench_work *w, const struct bench_row *row) {
    char gb_s[16] = "-", fraction[16] = "-";
    if (!isnan(row->gb_s)) snprintf(gb_s, sizeof gb_s, "%.2f", row->gb_s);
    if (!isnan(row->fraction)) snprintf(fraction, sizeof fraction, "%.1f %%", row->fraction * 100);
    work_bar_end(&w->bar);
    printf("%-8s %7d %7d %10.2f %7.1f %% %8s %9s  %016llx%s\n", row->prefill ? "prefill" : "decode",
           (int)row->n, (int)row->depth, row->tok_s, row->spread * 100, gb_s, fraction,
           (unsigned long long)row->digest, row->repeated ? "" : " differs between runs");
    output_flush();
}

/* One warm-up of the exact shape, then the repeats. */
static int measure_row(const struct bench_options *o, struct bench_work *w, struct bench_row *row,
                       lily_err *err) {
    double rate;
    /* The warm-up's digest is the one that the others must repeat. */
    int rc = run_once(w, row, &rate, &row->digest, err);
    row->repeated = true;
    for (int32_t i = 0; !rc && i < o->repeats; i++) {
        uint64_t digest = 0;
        rc = run_once(w, row, &w->rates[i], &digest, err);
        row->repeated &= digest == row->digest;
    }
    if (rc) return rc;
    w->differed |= !row->repeated;
    settle_row(o, w, row);
    if (o->model.json) return add_json_row(o, w, row, err);
    print_row(w, row);
    return LILY_OK;
}

/* ---- the grid -------------------------------------------------------------------------------- */

/* The session must hold the deepest row, and the ids the longest one. */
static int32_t longest(const struct int_list *list) {
    int32_t most = 0;
    for (size_t i = 0; i < list->n; i++)
        if (list->items[i] > most) most = list->items[i];
    return most;
}

/* Bandwidth first: the buffer it needs is gone before the weights are mapped. */
static int prepare(const struct bench_options *o, struct bench_work *w, lily_err *err) {
    const int32_t p = longest(&o->prompts), n = longest(&o->decodes);
    const int32_t room = longest(&o->depths) + (p > n ? p : n) + 1;
    int rc = read_bandwidth(o->model.threads, &w->bound, err);
    if (!rc) rc = model_open(&o->model, room, &w->engine, err);
    if (rc) return rc;
    lily_engine_get_info(w->engine, &w->info);
    /* What the processor reads bounds only the backends that run on it. */
    w->stated = strcmp(w->info.backend, "cpu") != 0 && strcmp(w->info.backend, "ref") != 0;
    if (w->stated) w->bound = w->info.bandwidth;
    rc = lily_session_new(w->engine, 0, &w->session, err);
    if (rc) return rc;
    w->ids = malloc((size_t)room * sizeof *w->ids);
    w->rates = malloc((size_t)o->repeats * sizeof *w->rates);
    w->rows = json_array();
    if (!w->ids || !w->rates || !w->rows) return ERR_NOMEM(err, "bench");
    for (int32_t i = 0; i < room; i++) w->ids[i] = measured_token((uint32_t)i, w->info.vocab);
    w->total_runs =
        (o->prompts.n + o->decodes.n) * o->depths.n * (1 + (uint64_t)(uint32_t)o->repeats);
    interrupt_session(w->session);
    return LILY_OK;
}

/* What a reader of a pasted table needs to know, above the columns. */
static void print_head(const struct bench_options *o, const struct bench_work *w) {
    printf("%s, %d layers, backend %s, %s\n", w->info.model_name, (int)w->info.layers,
           w->info.backend, w->info.device);
    if (!strstr(w->info.device, w->info.kernels)) printf("kernels: %s\n", w->info.kernels);
    if (w->bound > 0)
        printf("bound: %.1f GB/s, %s\n", w->bound * 1e-9,
               w->stated ? "the memory's clock and width by its driver"
                         : "the read bandwidth measured just now");
    printf("median of %d runs after a warm-up; spread: (largest - smallest) / median\n\n",
           (int)o->repeats);
    printf("%-8s %7s %7s %10s %9s %8s %9s  %s\n", "test", "n", "depth", "tok/s", "spread", "GB/s",
           "of bound", "digest");
}

/* Depth by depth, so that a session already there reads as little as possible between rows. */
static int bench(const struct bench_options *o, struct bench_work *w, lily_err *err) {
    int rc = prepare(o, w, err);
    if (rc) return rc;
    if (!o->model.json) print_head(o, w);
    for (size_t d = 0; !rc && d < o->depths.n; d++) {
        struct bench_row row = {.depth = o->depths.items[d], .prefill = true};
        for (size_t i = 0; !rc && i < o->prompts.n; i++) {
            row.n = o->prompts.items[i];
            rc = measure_row(o, w, &row, err);
        }
        row.prefill = false;
        for (size_t i = 0; !rc && i < o->decodes.n; i++) {
            row.n = o->decodes.items[i];
            rc = measure_row(o, w, &row, err);
        }
    }
    return rc;
}

/* ---- the command ----------------------------------------------------------------------------- */

/* What the command line said beside the grid. */
struct bench_words {
    bool prompts, decodes, depths, repeats; /* given */
    const char *report, *note;
    bool quick;
    int32_t minutes;
    float bandwidth;
    bool minutes_given, bandwidth_given;
};

static void drop_zeros(struct int_list *list) {
    size_t n = 0;
    for (size_t i = 0; i < list->n; i++) {
        if (list->items[i]) list->items[n++] = list->items[i];
    }
    list->n = n;
}

/* Ascending, each once. */
static void merge_sizes(struct int_list *into, const struct int_list *from) {
    for (size_t i = 0; i < from->n && into->n < OPTION_LIST_MAX; i++) {
        size_t at = 0;
        while (at < into->n && into->items[at] < from->items[i]) at++;
        if (at < into->n && into->items[at] == from->items[i]) continue;
        memmove(&into->items[at + 1], &into->items[at], (into->n - at) * sizeof into->items[0]);
        into->items[at] = from->items[i];
        into->n++;
    }
}

/* The grid of a report: its own, or what was asked for. */
static int report(const struct bench_options *o, const struct bench_words *w) {
    static const struct int_list all = {
        .items = {256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072}, .n = 10};
    static const struct int_list few = {.items = {512, 4096}, .n = 2};
    struct report_options r = {.model = &o->model,
                               .path = w->report,
                               .tokens = o->decodes.n ? o->decodes.items[0] : 0,
                               .repeats = w->repeats ? o->repeats
                                          : w->quick ? 1
                                                     : 3,
                               .minutes = w->minutes,
                               .bandwidth = w->bandwidth,
                               .note = w->note};
    if (o->model.context || o->model.json)
        return usage_error("bench", "--report: found --%s beside it, which it chooses itself",
                           o->model.json ? "json" : "ctx");
    if (o->decodes.n != 1 || !r.tokens)
        return usage_error("bench", "--report: found %d numbers of tokens to decode, expected one",
                           (int)o->decodes.n);
    if (w->prompts) merge_sizes(&r.sizes, &o->prompts);
    if (w->depths) merge_sizes(&r.sizes, &o->depths);
    if (!w->prompts && !w->depths) r.sizes = w->quick ? few : all;
    if (!r.sizes.n) return usage_error("bench", "--report: found no length, expected some");
    interrupt_catch();
    return bench_report(&r);
}

static int grid(struct bench_options *o) {
    struct bench_work w = {0};
    lily_err err = {0};
    if (!o->prompts.n && !o->decodes.n)
        return usage_error("bench", "found neither a prompt nor tokens to decode");
    interrupt_catch();
    int rc = bench(o, &w, &err);
    work_bar_end(&w.bar);
    int status = rc ? fail(&err) : EXIT_OK;
    if (!rc && o->model.json) status = print_json(json_incref(w.rows));
    if (status == EXIT_OK && w.differed) status = fail_text(DIGESTS_DIFFER);
    interrupt_session(NULL);
    json_decref(w.rows);
    free(w.rates);
    free(w.ids);
    lily_session_free(w.session);
    lily_engine_close(w.engine);
    return status;
}

int cmd_bench(int argc, char **argv) {
    struct bench_options o = {.model = MODEL_DEFAULTS,
                              .prompts = {.items = {512, 2048}, .n = 2},
                              .decodes = {.items = {64}, .n = 1},
                              .depths = {.items = {0, 4096}, .n = 2},
                              .repeats = 5};
    struct bench_words w = {.minutes = 30};
    const struct option options[] = {
        OPT_GROUP("what is measured"),
        {OPTION_INTS, "prompt", 'p', &o.prompts, "N,...",
         "prompt lengths to read, 0: none (default: 512,2048; a report: 256 to 131072)", 0, 1 << 20,
         &w.prompts},
        {OPTION_INTS, "decode", 'n', &o.decodes, "N,...",
         "numbers of tokens to decode, 0: none (default: 64)", 0, 1 << 20, &w.decodes},
        {OPTION_INTS, "depth", 'd', &o.depths, "N,...",
         "tokens already in the context (default: 0,4096; a report: 256 to 131072)", 0, 1 << 20,
         &w.depths},
        {OPTION_INT, "repeat", 'r', &o.repeats, "N",
         "runs per row, after one warm-up (default: 5; a report: 3)", 1, 1000, &w.repeats},
        OPT_GROUP("report"),
        OPT(NAME, "report", 0, &w.report, "FILE",
            "measure all lengths, each in a process of its own, and write one file with machine, "
            "method and figures: JSON, or with the ending .md a table and the JSON"),
        OPT_FLAG("quick", 0, &w.quick, "a report of 512 and 4096 tokens, one run each"),
        OPT_GIVEN(INT, "minutes", &w.minutes, "N", 1, 10000, &w.minutes_given,
                  "leave out rows of a report that would end later (default: 30)"),
        OPT_GIVEN(REAL, "bandwidth", &w.bandwidth, "GB/S", 1, 100000, &w.bandwidth_given,
                  "memory bandwidth of the machine as its maker states it, where none is measured"),
        OPT(NAME, "note", 0, &w.note, "TEXT",
            "put into the report: GPU cores, power, what ran beside"),
        MODEL_OPTIONS(&o.model),
        JSON_OPTION(&o.model.json),
    };
    const struct usage usage = {
        .command = "bench",
        .summary = "measure prompt and decode speed",
        .about = "Every row is measured alone, with tokenising outside the timer: prefill reads n "
                 "tokens on top of depth, decode appends n tokens one by one, each the likeliest "
                 "after the one before. The digest names the tokens and logits that came out: the "
                 "same build on the same machine repeats it, or exit status 1 says that it did "
                 "not. GB/s counts the weights and state "
                 "that a decoded token reads.",
        .example = "lily bench -p 512,2048 -n 64 -d 0,4096 -r 5 --json\n"
                   "  lily bench -m model.lily --report mac.md",
        USAGE_OPTIONS(options),
    };
    int status = options_parse(&usage, argc, argv, NULL, NULL);
    if (status != OPTIONS_GO_ON) return status;
    if (!w.report && (w.quick || w.note || w.minutes_given || w.bandwidth_given))
        return usage_error("bench", "--%s: has no effect without --report",
                           w.quick           ? "quick"
                           : w.note          ? "note"
                           : w.minutes_given ? "minutes"
                                             : "bandwidth");
    drop_zeros(&o.prompts);
    drop_zeros(&o.decodes);
    return w.report ? report(&o, &w) : grid(&o);
}
