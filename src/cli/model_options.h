/* The options that every command with a model takes, and opening that model. */
#ifndef LILY_CLI_MODEL_OPTIONS_H
#define LILY_CLI_MODEL_OPTIONS_H

#include <jansson.h>

#include "base/progress.h"
#include "cli/options.h"
#include "lily.h"

struct model_options {
    const char *model, *backend;
    int32_t threads, context;
    bool keep_bf16, verbose, json;
};

/* Entries of a command's option table; o points to a struct model_options. A command that runs no
 * step takes the path alone. */
#define MODEL_PATH_OPTION(o)                                                                       \
    OPT_GROUP("model"),                                                                            \
        OPT(NAME, "model", 'm', &(o)->model, "PATH",                                               \
            "checkpoint folder or packed file; without it the small stand-in inside the program")
#define MODEL_OPTIONS(o)                                                                           \
    MODEL_PATH_OPTION(o),                                                                          \
        OPT(NAME, "backend", 0, &(o)->backend, "NAME",                                             \
            "auto or one that the doctor command lists"),                                          \
        OPT_RANGE(INT, "threads", &(o)->threads, "N", 0, 1024,                                     \
                  "CPU threads; 0: one per core, fewer for small models"),                         \
        OPT_RANGE(INT, "ctx", &(o)->context, "N", 0, 1 << 20,                                      \
                  "tokens of context; 0: what the command needs or the machine holds"),            \
        OPT_FLAG("keep-bf16", 0, &(o)->keep_bf16,                                                  \
                 "run an unquantised folder as it is (backend ref only)"),                         \
        OPT_FLAG("verbose", 'v', &(o)->verbose, "say which backend was chosen and why")
#define MODEL_DEFAULTS                                                                             \
    { .backend = "auto" }

/* Opens the engine with a progress bar; its warnings go to stderr. context is used when the user
 * gave none; 0: the engine's default. */
int model_open(const struct model_options *o, int32_t context, lily_engine **out, lily_err *err);

/* While on, a line of the engine's log on the terminal replaces the one that is being typed.
 * Returns whether one did since the last call: that one is to be drawn anew. */
bool model_log_at_prompt(bool on);

/* A progress bar behind a lily_progress_fn: arg is a struct work_bar, zeroed before. It cancels the
 * work once a signal was noted. */
struct work_bar {
    struct progress bar;
    const char *label; /* of the running stage; NULL: none yet */
};
int work_bar_update(void *arg, const char *label, const char *unit, uint64_t done, uint64_t total);
void work_bar_end(struct work_bar *bar);

/* {"model", "path", "kind", "backend", "device", "layers", "context", ...}; NULL: out of memory. */
json_t *engine_json(const lily_engine *e);

#endif
