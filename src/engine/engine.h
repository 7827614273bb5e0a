/* Inside the engine layer: what an engine is made of, and the seam through which tests put in a
 * scripted backend. */
#ifndef LILY_ENGINE_ENGINE_H
#define LILY_ENGINE_ENGINE_H

#include "backend/backend.h"
#include "base/err.h"
#include "ckpt/ckpt.h"
#include "engine/defaults.h"
#include "engine/sampler.h"
#include "lily.h"
#include "text/tokenizer.h"

struct lily_engine {
    struct ckpt *ckpt; /* owned; NULL when assembled from parts without one */
    const struct weights *weights;
    const struct backend *backend;
    struct backend_model *model; /* owned */
    struct tokenizer *tokenizer; /* owned; NULL: the checkpoint has none, ids only */
    struct defaults defaults;
    struct sampler_vocab vocab;               /* its holes are owned */
    int32_t im_start, think_begin, think_end; /* control tokens, -1: none */
    int32_t context;                          /* tokens of the largest session */
    int32_t sessions, max_sessions;
    bool in_call;         /* a session is at work; its callbacks may not put one to work */
    uint64_t state_bytes; /* budget of a session's state checkpoints */
    double load_seconds;
    char device[128], reason[512], kernels[64];
    lily_log_fn log;
    void *log_arg;
};

/* What lily_engine_open finds and tests make. */
struct engine_parts {
    struct ckpt *ckpt;             /* may be NULL; the engine's from success on */
    const struct weights *weights; /* outlives the engine */
    const struct backend *backend;
    /* NULL, or the list that backend was chosen from without being asked for: where opening it
     * fails the next usable one of the list is tried, and log and reason say why */
    const struct backend *const *all;
    struct text_file tokenizer, generation_config, config; /* not kept */
    const char *reason;                                    /* why this backend; copied */
};
int engine_assemble(const lily_engine_options *options, const struct engine_parts *parts,
                    lily_engine **out, lily_err *err);

/* Whether the checkpoint's text files are what an engine can open: a ckpt_check_fn. */
int engine_check_texts(const struct ckpt *c, lily_err *err);

/* Why a backend that the project knows may be absent from this program; NULL: no such name. */
const char *engine_why_absent(const char *name);

/* The backend of all[] (ended by NULL) that name asks for; NULL or "auto": the first usable one
 * that is not ref, except for 16-bit weights, which only ref runs. reason[n]: why, for people. */
int engine_choose(const struct backend *const *all, const char *name, bool weights_16_bit,
                  const struct backend **out, char *reason, size_t n, lily_err *err);

/* One line to the caller's log, if there is one. */
void engine_log(const lily_engine *e, const char *fmt, ...) PRINTF_LIKE(2, 3);

#endif
