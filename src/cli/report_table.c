#include "cli/report_table.h"

#include <string.h>

#include "cli/output.h"

enum { CELL = 32 };

static const char *text_of(const json_t *object, const char *key) {
    const char *text = json_string_value(json_object_get(object, key));
    return text && *text ? text : "-";
}

/* A number with so many digits behind the point, or a dash. */
static const char *real_cell(char out[CELL], const json_t *object, const char *key, double factor,
                             int digits, const char *unit) {
    const json_t *value = json_object_get(object, key);
    snprintf(out, CELL, "-");
    if (json_is_number(value))
        snprintf(out, CELL, "%.*f%s", digits, json_number_value(value) * factor, unit);
    return out;
}

struct cells {
    int n;
    char tok_s[CELL], spread[CELL], gb_s[CELL], fraction[CELL], lily[CELL], mlx[CELL];
    const char *digest;
    bool repeats;
};

static void read_row(const json_t *row, struct cells *c) {
    const json_t *n = json_object_get(row, "n"), *others = json_object_get(row, "published");
    c->n = (int)json_integer_value(n ? n : json_object_get(row, "depth"));
    real_cell(c->tok_s, row, "tok_s", 1, 1, "");
    real_cell(c->spread, row, "spread", 100, 1, " %");
    real_cell(c->gb_s, row, "gb_s", 1, 1, "");
    real_cell(c->fraction, row, "fraction_of_bandwidth", 100, 1, " %");
    real_cell(c->lily, others, "lily_tok_s", 1, 1, "");
    real_cell(c->mlx, others, "mlx_tok_s", 1, 1, "");
    c->digest = text_of(row, "digest");
    c->repeats = json_is_true(json_object_get(row, "digest_repeats"));
}

void report_print_head(FILE *to) {
    fprintf(to, "%-8s %7s %10s %8s %8s %8s %10s %10s  %s\n", "test", "tokens", "tok/s", "spread",
            "GB/s", "of bound", "Lily, pub.", "MLX, pub.", "digest");
}

void report_print_row(FILE *to, bool decode, const json_t *row) {
    struct cells c;
    read_row(row, &c);
    fprintf(to, "%-8s %7d %10s %8s %8s %8s %10s %10s  %s%s\n", decode ? "decode" : "prefill", c.n,
            c.tok_s, c.spread, c.gb_s, c.fraction, c.lily, c.mlx, c.digest,
            c.repeats ? "" : " differs between runs");
}

/* ---- Markdown -------------------------------------------------------------------------------- */

static bool add_machine(const json_t *doc, struct buf *out) {
    const json_t *m = json_object_get(doc, "machine"), *program = json_object_get(doc, "program");
    char memory[CELL];
    format_bytes(memory, sizeof memory,
                 (double)json_integer_value(json_object_get(m, "memory_total_bytes")));
    return buf_printf(out,
                      "# lily bench, %s\n\n| | |\n|---|---|\n| machine | %s, %s |\n"
                      "| cores, memory | %d, %s |\n| system | %s (%s) |\n| program | lily %s, "
                      "commit %s |\n",
                      text_of(doc, "date"), text_of(m, "model"), text_of(m, "cpu"),
                      (int)json_integer_value(json_object_get(m, "cores")), memory,
                      text_of(m, "os_version"), text_of(m, "os"), text_of(program, "version"),
                      text_of(program, "commit"));
}

static bool add_run(const json_t *doc, struct buf *out) {
    const json_t *run = json_object_get(doc, "run"), *note = json_object_get(doc, "note");
    bool ok = buf_printf(out,
                         "| backend, device | %s, %s |\n| model | %s, %d layers, %s |\n"
                         "| checkpoint | `%s` |\n",
                         text_of(run, "backend"), text_of(run, "device"), text_of(run, "model"),
                         (int)json_integer_value(json_object_get(run, "layers")),
                         text_of(run, "checkpoint_kind"), text_of(run, "checkpoint"));
    if (ok && json_is_string(note)) ok = buf_printf(out, "| note | %s |\n", text_of(doc, "note"));
    return ok;
}

static bool add_rows(const json_t *doc, bool decode, struct buf *out) {
    size_t i;
    json_t *row;
    bool ok = buf_printf(out,
                         "\n## %s\n\n| tokens | tok/s | spread | GB/s | of bandwidth | Lily, "
                         "published | MLX, published | digest |\n"
                         "|---:|---:|---:|---:|---:|---:|---:|---|\n",
                         decode ? "Decode, by depth" : "Prefill, by length");
    json_array_foreach(json_object_get(doc, decode ? "decode" : "prefill"), i, row) {
        struct cells c;
        read_row(row, &c);
        ok = ok && buf_printf(out, "| %d | %s | %s | %s | %s | %s | %s | `%s`%s |\n", c.n, c.tok_s,
                              c.spread, c.gb_s, c.fraction, c.lily, c.mlx, c.digest,
                              c.repeats ? "" : " differs between runs");
    }
    return ok;
}

static bool add_left_out(const json_t *doc, struct buf *out) {
    size_t i;
    json_t *item;
    bool ok = true;
    json_array_foreach(json_object_get(doc, "left_out"), i, item) {
        ok = ok &&
             buf_printf(out, "%s- %s %d left out: %s\n", i ? "" : "\n", text_of(item, "test"),
                        (int)json_integer_value(json_object_get(item, "n")), text_of(item, "why"));
    }
    return ok;
}

/* Where the bandwidth and the published columns come from. */
static bool add_sources(const json_t *doc, struct buf *out) {
    const json_t *p = json_object_get(doc, "published"), *method = json_object_get(doc, "method");
    const json_t *first = json_array_get(json_object_get(doc, "decode"), 0);
    const json_t *run = json_object_get(doc, "run");
    char bound[CELL];
    real_cell(bound, first, "bandwidth_gb_s", 1, 1, " GB/s");
    bool ok = buf_printf(out,
                         "\nMethod: a fresh process for each row, one warm-up of the exact shape, "
                         "median of %d runs, %d decode steps, prompt %s.\n",
                         (int)json_integer_value(json_object_get(method, "runs")),
                         (int)json_integer_value(json_object_get(method, "decode_steps")),
                         text_of(method, "prompt"));
    ok = ok && buf_printf(out, "Bandwidth: %s (%s).\n", bound, text_of(first, "bandwidth"));
    ok = ok && buf_printf(out, "Published: %s, on %s; %s.\n", text_of(p, "source"),
                          text_of(p, "machine"), text_of(p, "mlx"));
    if (!json_is_true(json_object_get(run, "comparable_with_published")))
        ok = ok && buf_puts(out, "They are of another model than this run's, and left out.\n");
    return ok;
}

bool report_table(const json_t *doc, struct buf *out) {
    return add_machine(doc, out) && add_run(doc, out) && add_rows(doc, false, out) &&
           add_rows(doc, true, out) && add_left_out(doc, out) && add_sources(doc, out);
}
