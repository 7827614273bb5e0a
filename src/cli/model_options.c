#include "cli/model_options.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cli/interrupt.h"
#include "cli/output.h"

/* Stages follow one another under one callback: a new label closes the old stage's bar. */
int work_bar_update(void *arg, const char *label, const char *unit, uint64_t done, uint64_t total) {
    struct work_bar *w = arg;
    if (!w->label || strcmp(w->label, label) != 0) {
        work_bar_end(w);
        progress_start(&w->bar, label, unit);
        w->label = label;
    }
    progress_update(&w->bar, done, total);
    return interrupted();
}

void work_bar_end(struct work_bar *w) {
    if (w->label) progress_end(&w->bar);
    w->label = NULL;
}

struct opening {
    struct work_bar bar;
    bool verbose;
};

static int opening_progress(void *arg, const char *label, const char *unit, uint64_t done,
                            uint64_t total) {
    struct opening *o = arg;
    return work_bar_update(&o->bar, label, unit, done, total);
}

static struct {
    bool on, overwritten;
} prompt; /* that the user sees while a line of the log comes */

/* The engine's lines: the choice of a backend is for those who ask, all others are warnings. */
static void opening_log(void *arg, const char *line) {
    struct opening *o = arg;
    if (!o->verbose && strncmp(line, "backend: ", 9) == 0) return;
    work_bar_end(&o->bar); /* a line must not be drawn into a running bar */
    if (prompt.on) fputs("\r\033[K", stderr);
    prompt.overwritten |= prompt.on;
    fprintf(stderr, "lily: %s\n", line);
}

bool model_log_at_prompt(bool on) {
    bool overwritten = prompt.overwritten;
    prompt.on = on && isatty(STDERR_FILENO);
    prompt.overwritten = false;
    return overwritten;
}

/* A command that knows how much it needs asks for that; the user's --ctx wins. */
int model_open(const struct model_options *o, int32_t context, lily_engine **out, lily_err *err) {
    static struct opening opening; /* the engine goes on logging after it was opened */
    opening = (struct opening){.verbose = o->verbose};
    const lily_engine_options options = {
        .model = o->model,
        .backend = o->backend,
        .threads = o->threads,
        .context = o->context ? o->context : context,
        .keep_bf16 = o->keep_bf16,
        .progress = opening_progress,
        .log = opening_log,
        .arg = &opening,
    };
    int rc = lily_engine_open(&options, out, err);
    work_bar_end(&opening.bar);
    return rc;
}

json_t *engine_json(const lily_engine *e) {
    lily_engine_info info;
    lily_engine_get_info(e, &info);
    return json_pack("{s:s, s:o, s:s, s:s, s:s, s:i, s:i, s:I, s:I, s:f}", "model", info.model_name,
                     "path", words_json(info.model_path), "kind", info.model_kind, "backend",
                     info.backend, "device", info.device, "layers", (int)info.layers, "context",
                     (int)info.context, "weight_bytes", (json_int_t)info.weight_bytes,
                     "memory_bytes", (json_int_t)peak_memory(), "load_seconds", info.load_seconds);
}
