#include "cli/report.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include "base/buf.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/progress.h"
#include "cli/child.h"
#include "cli/commit.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/published.h"
#include "cli/report_table.h"

/* A prompt twice as long takes 2.5 times as long or a little less: attention grows with its square.
 */
static const double GROWTH = 1.32; /* power of the length */

struct report {
    const struct report_options *o;
    json_t *doc;
    double started;
    double last[2];    /* seconds of reading and decoding of each kind's newest row */
    int32_t last_n[2]; /* its length or depth, 0: none yet */
    bool differed;     /* a run did not repeat the digest of its row */
    bool ended[2];     /* rows of that kind no longer fit memory or time */
    uint64_t done, total;
    struct work_bar bar;
};

/* ---- what a row needs ------------------------------------------------------------------------ */

static const struct published *find_published(int32_t n) {
    for (int i = 0; i < PUBLISHED_LENGTHS; i++) {
        if (published[i].n == n) return &published[i];
    }
    return NULL;
}

/* Only beside the model that they are of. */
static json_t *published_json(const struct report *r, bool decode, int32_t n) {
    const struct published *p = find_published(n);
    const json_t *run = json_object_get(r->doc, "run");
    if (!p || !json_is_true(json_object_get(run, "comparable_with_published"))) return json_null();
    return json_pack("{s:f, s:f}", "lily_tok_s", decode ? p->decode_lily : p->prefill_lily,
                     "mlx_tok_s", decode ? p->decode_mlx : p->prefill_mlx);
}

/* The command line of one row. */
static int run_row(struct report *r, bool decode, int32_t n, json_t **row, lily_err *err) {
    char prompt[16], tokens[16], depth[16], repeats[16], threads[16];
    const struct report_options *o = r->o;
    const char *words[24];
    int w = 0;
    struct buf out = {0};
    snprintf(prompt, sizeof prompt, "%d", decode ? 0 : (int)n);
    snprintf(tokens, sizeof tokens, "%d", decode ? (int)o->tokens : 0);
    snprintf(depth, sizeof depth, "%d", decode ? (int)n : 0);
    snprintf(repeats, sizeof repeats, "%d", (int)o->repeats);
    snprintf(threads, sizeof threads, "%d", (int)o->model->threads);
    const char *const all[] = {"bench",     "--json", "-p", prompt,  "-n",        tokens,
                               "-d",        depth,    "-r", repeats, "--backend", o->model->backend,
                               "--threads", threads};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) words[w++] = all[i];
    if (o->model->model) words[w++] = "--model", words[w++] = o->model->model;
    if (o->model->keep_bf16) words[w++] = "--keep-bf16";
    words[w] = NULL;
    int rc = child_run(words, &out, err);
    json_t *rows = json_loadb(out.data ? out.data : "", out.len, 0, NULL);
    *row = json_incref(json_array_get(rows, 0));
    /* Also of a process that failed because its runs differ: the row says so. */
    if (rc != LILY_ECANCELED && json_is_false(json_object_get(*row, "digest_repeats"))) rc = 0;
    if (rc) {
        json_decref(*row);
        *row = NULL;
    }
    if (!rc && !*row) rc = ERR(err, LILY_EFORMAT, "bench: found no row, expected one");
    json_decref(rows);
    buf_free(&out);
    return rc;
}

/* ---- the document ---------------------------------------------------------------------------- */

static json_t *now_json(void) {
    char text[32];
    time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &utc);
    return json_string(text);
}

static json_t *method_json(const struct report_options *o) {
    return json_pack(
        "{s:s, s:s, s:i, s:i, s:s, s:s, s:s}", "process", "a fresh one for each row", "warm_up",
        "one run of the exact shape", "runs", (int)o->repeats, "decode_steps", (int)o->tokens,
        "figure", "median of the runs; tokenising is outside the timer", "prompt",
        "token i = ((i * 2654435761) mod 2^32) mod vocabulary", "digest",
        "FNV-1a of the tokens (and of the logits where the host has them); each run must repeat "
        "that of the warm-up");
}

static int new_document(struct report *r, lily_err *err) {
    char *text;
    int rc = lily_doctor(&text, err);
    if (rc) return rc;
    json_t *doctor = take_json(text, "doctor");
    r->doc = json_pack(
        "{s:i, s:o, s:{s:s, s:s, s:s}, s:O?, s:o?, s:o, s:{s:s, s:s, s:s, s:s, s:i}, s:n, s:[], "
        "s:[], s:[]}",
        "lily_report", 1, "date", now_json(), "program", "name", program_name, "version",
        LILY_VERSION, "commit", build_commit, "machine", json_object_get(doctor, "machine"), "note",
        r->o->note ? words_json(r->o->note) : NULL, "method", method_json(r->o), "published",
        "source", PUBLISHED_SOURCE, "machine", PUBLISHED_MACHINE, "mlx", PUBLISHED_MLX, "model",
        PUBLISHED_MODEL, "layers", PUBLISHED_LAYERS, "run", "prefill", "decode", "left_out");
    json_decref(doctor);
    return r->doc ? LILY_OK : ERR_NOMEM(err, "report");
}

/* What is the same in all rows: the first one tells. */
static int add_run(struct report *r, const json_t *row) {
    static const char *const keys[] = {"model",        "layers",  "checkpoint", "checkpoint_kind",
                                       "weight_bytes", "backend", "device"};
    if (json_is_object(json_object_get(r->doc, "run"))) return 0;
    json_t *run = json_object();
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        json_object_set(run, keys[i], json_object_get(row, keys[i]));
    const char *model = json_string_value(json_object_get(row, "model"));
    bool comparable = model && strcmp(model, PUBLISHED_MODEL) == 0 &&
                      json_integer_value(json_object_get(row, "layers")) == PUBLISHED_LAYERS;
    json_object_set_new(run, "comparable_with_published", json_boolean(comparable));
    return json_object_set_new(r->doc, "run", run);
}

/* The bound of a row: measured by its process, or what the user says of the machine. */
static void add_bandwidth(const struct report *r, const json_t *row, json_t *item) {
    const json_t *known = json_object_get(row, "bound_gb_s");
    const char *source = json_string_value(json_object_get(row, "bound"));
    double bound = json_is_real(known) ? json_real_value(known) : (double)r->o->bandwidth;
    if (!source) source = "stated";
    json_object_set_new(item, "bandwidth_gb_s", bound > 0 ? json_real(bound) : json_null());
    json_object_set_new(item, "bandwidth", bound > 0 ? json_string(source) : json_null());
    const json_t *rate = json_object_get(row, "gb_s");
    json_object_set_new(item, "fraction_of_bandwidth",
                        json_is_real(rate) && bound > 0 ? json_real(json_real_value(rate) / bound)
                                                        : json_null());
}

static int add_row(struct report *r, bool decode, int32_t n, const json_t *row) {
    static const char *const keys[] = {"tok_s", "spread", "runs_tok_s",
                                       "gb_s",  "digest", "digest_repeats"};
    json_t *item = json_pack("{s:i}", decode ? "depth" : "n", (int)n);
    if (add_run(r, row)) return -1;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        json_object_set(item, keys[i], json_object_get(row, keys[i]));
    add_bandwidth(r, row, item);
    json_object_set_new(item, "published", published_json(r, decode, n));
    r->differed |= !json_is_true(json_object_get(row, "digest_repeats"));
    report_print_row(stdout, decode, item);
    output_flush();
    return json_array_append_new(json_object_get(r->doc, decode ? "decode" : "prefill"), item);
}

static int leave_out(struct report *r, bool decode, int32_t n, const char *why) {
    json_t *item = json_pack("{s:s, s:i, s:s}", "test", decode ? "decode" : "prefill", "n", (int)n,
                             "why", why);
    work_bar_end(&r->bar);
    printf("%-8s %7d  left out: %s\n", decode ? "decode" : "prefill", (int)n, why);
    output_flush();
    return json_array_append_new(json_object_get(r->doc, "left_out"), item);
}

/* ---- writing --------------------------------------------------------------------------------- */

static int write_report(const struct report *r, lily_err *err) {
    const char *dot = strrchr(r->o->path, '.');
    bool table = dot && strcmp(dot, ".md") == 0;
    char *json = json_dumps(r->doc, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    struct buf text = {0};
    struct file_writer *w = NULL;
    bool ok = json && (!table || report_table(r->doc, &text)) &&
              buf_printf(&text, table ? "\n```json\n%s\n```\n" : "%s\n", json);
    int rc = ok ? file_writer_open(r->o->path, &w, err) : ERR_NOMEM(err, "report");
    if (!rc && (rc = file_writer_write(w, text.data, text.len, err))) {
        file_writer_abort(w);
    } else if (!rc) {
        rc = file_writer_commit(w, err);
    }
    buf_free(&text);
    free(json);
    return rc;
}

/* ---- the rows -------------------------------------------------------------------------------- */

/* Whether the next row of that kind would end in time, judged by the one before it. */
static bool has_time(const struct report *r, bool decode, int32_t n) {
    double left = 60.0 * r->o->minutes - (clock_seconds() - r->started);
    if (r->last_n[decode] == 0) return left > 0;
    return r->last[decode] * pow((double)n / r->last_n[decode], GROWTH) <= left;
}

/* What the row took, start of its process and loading left aside: those do not grow. A depth is
 * read once, as long as the prompt just before took. */
static void note_time(struct report *r, bool decode, int32_t n, const json_t *row) {
    double rate = json_real_value(json_object_get(row, "tok_s")), runs = 1 + r->o->repeats;
    double own = (decode ? r->o->tokens : n) * runs / rate;
    r->last[decode] = own + (decode ? r->last[false] / runs : 0);
    r->last_n[decode] = n;
}

static int measure(struct report *r, bool decode, int32_t n, lily_err *err) {
    lily_err why = {0};
    json_t *row = NULL;
    char late[96];
    int rc = LILY_OK, failed = 0;
    snprintf(late, sizeof late, "would take until after %d minutes; --minutes allows more",
             (int)r->o->minutes);
    if (r->ended[decode]) {
        failed = leave_out(r, decode, n, "longer than the one before it, which was left out");
    } else if (!has_time(r, decode, n)) {
        failed = leave_out(r, decode, n, late);
        r->ended[decode] = true;
    } else if ((rc = run_row(r, decode, n, &row, &why)) == LILY_ECANCELED) {
        if (err) *err = why;
        return rc;
    } else if (rc) {
        failed = leave_out(r, decode, n, why.msg);
        r->ended[decode] = true;
    } else {
        note_time(r, decode, n, row);
        work_bar_end(&r->bar);
        failed = add_row(r, decode, n, row);
    }
    json_decref(row);
    work_bar_update(&r->bar, "report", "rows", ++r->done, r->total);
    return failed ? ERR_NOMEM(err, "report") : write_report(r, err);
}

static int measure_all(struct report *r, lily_err *err) {
    const struct int_list *sizes = &r->o->sizes;
    int rc = new_document(r, err);
    if (!rc) rc = write_report(r, err); /* a path that cannot be written is known at once */
    if (!rc) report_print_head(stdout);
    r->total = 2 * sizes->n;
    if (!rc) work_bar_update(&r->bar, "report", "rows", 0, r->total);
    for (size_t i = 0; i < sizes->n && !rc; i++) {
        rc = measure(r, false, sizes->items[i], err);
        if (!rc) rc = measure(r, true, sizes->items[i], err);
    }
    work_bar_end(&r->bar);
    return rc;
}

int bench_report(const struct report_options *o) {
    struct report r = {.o = o, .started = clock_seconds()};
    lily_err err = {0};
    int rc = measure_all(&r, &err);
    bool any = json_array_size(json_object_get(r.doc, "prefill")) > 0 ||
               json_array_size(json_object_get(r.doc, "decode")) > 0;
    size_t left_out = json_array_size(json_object_get(r.doc, "left_out"));
    json_decref(r.doc);
    if (rc) return fail(&err);
    if (!any) return fail_text("report: found no row that could be measured; see %s", o->path);
    printf("\nwritten to %s", o->path);
    if (left_out > 0) printf(", %zu row%s left out", left_out, left_out == 1 ? "" : "s");
    putchar('\n');
    return r.differed ? fail_text(DIGESTS_DIFFER) : EXIT_OK;
}
