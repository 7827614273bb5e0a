/* Opening: checkpoint, backend, tokenizer, defaults; and what the engine says about itself. */
#include "engine/engine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/buf.h"
#include "base/clock.h"

enum {
    DEFAULT_CONTEXT = 32768,
    LEAST_CONTEXT = 2048 /* a default is not lowered further: a chat needs as much */
};
static const uint64_t DEFAULT_STATE_BYTES = (uint64_t)384 << 20; /* six of the real model's */

void engine_log(const lily_engine *e, const char *fmt, ...) {
    char line[1024];
    va_list args;
    if (!e->log) return;
    va_start(args, fmt);
    vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    e->log(e->log_arg, line);
}

/* ---- choosing a backend ---------------------------------------------------------------------- */

static bool is_ref(const struct backend *b) {
    return strcmp(b->name, "ref") == 0;
}

static int choose_named(const struct backend *const *all, const char *name, bool weights_16_bit,
                        const struct backend **out, char *reason, size_t n, lily_err *err) {
    struct buf names = {0};
    struct backend_probe probe = {0};
    int rc;
    for (size_t i = 0; all[i]; i++) {
        if (strcmp(all[i]->name, name) != 0) {
            buf_printf(&names, "%s%s", names.len ? ", " : "", all[i]->name);
            continue;
        }
        buf_free(&names);
        if (weights_16_bit && !is_ref(all[i])) {
            return ERR(err, LILY_EINVAL,
                       "backend %s: found unquantised weights, which only ref runs; use ref, or "
                       "let them be quantised at load",
                       name);
        }
        all[i]->probe(&probe);
        if (!probe.usable) {
            return ERR(err, LILY_EBACKEND, "backend %s: not usable here: %s; see lily doctor", name,
                       probe.reason);
        }
        snprintf(reason, n, "asked for; %s", probe.reason);
        *out = all[i];
        return 0;
    }
    const char *absent = engine_why_absent(name);
    rc = absent ? ERR(err, LILY_EBACKEND, "backend %s: %s; see lily doctor", name, absent)
                : ERR(err, LILY_EINVAL, "backend: found \"%s\", expected auto, %s", name,
                      names.data ? names.data : "");
    buf_free(&names);
    return rc;
}

static bool is_auto(const char *name) {
    return !name || strcmp(name, "auto") == 0;
}

static bool has_16_bits(const struct weights *w) {
    return w->lm_head.bits == 16;
}

int engine_choose(const struct backend *const *all, const char *name, bool weights_16_bit,
                  const struct backend **out, char *reason, size_t n, lily_err *err) {
    struct buf why_not = {0};
    if (!is_auto(name)) {
        return choose_named(all, name, weights_16_bit, out, reason, n, err);
    }
    for (size_t i = 0; all[i]; i++) {
        struct backend_probe probe = {0};
        if (is_ref(all[i]) != weights_16_bit) continue;
        all[i]->probe(&probe);
        if (!probe.usable) {
            buf_printf(&why_not, "; not %s: %s", all[i]->name, probe.reason);
            continue;
        }
        if (weights_16_bit) {
            snprintf(reason, n, "the weights are unquantised, which only ref runs");
        } else {
            snprintf(reason, n, "the best usable one: %s%s", probe.reason,
                     why_not.len ? why_not.data : "");
        }
        buf_free(&why_not);
        *out = all[i];
        return 0;
    }
    int rc = ERR(err, LILY_EBACKEND,
                 "backend: none is usable here%s; the slow reference, ref, runs everywhere",
                 why_not.len ? why_not.data : "");
    buf_free(&why_not);
    return rc;
}

/* ---- assembling ------------------------------------------------------------------------------ */

static int check_options(const lily_engine_options *o, const struct shape *shape, lily_err *err) {
    const struct {
        const char *name;
        int32_t value, most;
    } fields[] = {{"threads", o->threads, 1024},
                  {"context", o->context, shape->max_context},
                  {"max_sessions", o->max_sessions, 1024}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (fields[i].value >= 0 && fields[i].value <= fields[i].most) continue;
        return ERR(err, LILY_EINVAL, "%s: found %d, expected 1 to %d, or 0 for the default",
                   fields[i].name, fields[i].value, fields[i].most);
    }
    return 0;
}

static int load_text(lily_engine *e, const struct engine_parts *parts, lily_err *err) {
    int32_t used = e->weights->vocab_used, rows = e->weights->shape->vocab;
    int rc;
    e->im_start = e->think_begin = e->think_end = -1;
    if (parts->tokenizer.text) {
        rc = tokenizer_load(parts->tokenizer.text, parts->tokenizer.size, &e->tokenizer, err);
        if (rc) return err_prefix(err, rc, "tokenizer.json");
        int32_t ids = tokenizer_vocab(e->tokenizer);
        if (ids > rows) {
            return ERR(err, LILY_EMODEL,
                       "tokenizer.json: found ids up to %d, expected below the model's vocabulary "
                       "of %d; it belongs to another checkpoint",
                       ids - 1, rows);
        }
        if (ids < used) used = ids;
        e->im_start = tokenizer_find(e->tokenizer, "<|im_start|>");
        e->think_begin = tokenizer_find(e->tokenizer, "<think>");
        e->think_end = tokenizer_find(e->tokenizer, "</think>");
    } else {
        engine_log(e, "tokenizer.json: absent; token ids only, no text");
    }
    int32_t *holes = malloc((size_t)used * sizeof *holes);
    if (!holes) return ERR_NOMEM(err, "engine");
    e->vocab = (struct sampler_vocab){.used = used, .holes = holes};
    for (int32_t id = 0; e->tokenizer && id < used; id++) {
        size_t n;
        if (!tokenizer_bytes(e->tokenizer, id, &n)) holes[e->vocab.n_holes++] = id;
    }
    return defaults_read(e->weights->shape->name, &parts->generation_config, &parts->config,
                         e->tokenizer, used, &e->defaults, err);
}

/* The ids that a device may sample, the caller's to free; NULL: out of memory. */
static uint32_t *sampled_ids(const lily_engine *e) {
    uint32_t *bits = calloc(((size_t)e->weights->shape->vocab + 31) / 32, sizeof *bits);
    if (!bits) return NULL;
    for (int32_t id = 0; id < e->vocab.used; id++) bits[id / 32] |= 1u << id % 32;
    for (int32_t i = 0; i < e->vocab.n_holes; i++) {
        bits[e->vocab.holes[i] / 32] &= ~(1u << e->vocab.holes[i] % 32);
    }
    return bits;
}

/* Weights on their way to a device. */
static int forward_upload(void *arg, uint64_t done, uint64_t total) {
    const lily_engine_options *o = arg;
    return o->progress(o->arg, "upload", "B", done, total);
}

/* Opens the model on the backend. A context that was not asked for is halved until it fits. */
static int open_fitting(lily_engine *e, const lily_engine_options *o, const uint32_t *sampled,
                        lily_err *err) {
    struct backend_options options = {
        .threads = o->threads,
        .max_sessions = e->max_sessions,
        .sampled = sampled,
        .progress = o->progress ? forward_upload : NULL,
        .progress_arg = (void *)o,
    };
    int32_t most = e->weights->shape->max_context;
    int32_t wish = o->context ? o->context : DEFAULT_CONTEXT < most ? DEFAULT_CONTEXT : most;
    int rc;
    for (e->context = wish;; e->context /= 2) {
        options.max_context = e->context;
        rc = e->backend->open(e->weights, &options, &e->model, err);
        if (rc != LILY_ENOMEM) break;
        if (o->context || e->context / 2 < LEAST_CONTEXT) {
            return err_prefix(err, rc, "context of %d tokens", e->context);
        }
    }
    if (rc) return rc;
    if (e->context < wish) {
        engine_log(e, "context: %d tokens; the memory does not hold %d", e->context, wish);
    }
    return 0;
}

/* Goes on to the next usable backend behind the one that failed to open with what err says, which
 * is added to failures; false: there is none. */
static bool next_backend(lily_engine *e, const struct backend *const *all, const lily_err *err,
                         struct buf *failures) {
    char reason[sizeof e->reason];
    const struct backend *failed = e->backend;
    lily_err none;
    while (*all && *all != failed) all++;
    if (!*all || engine_choose(all + 1, NULL, has_16_bits(e->weights), &e->backend, reason,
                               sizeof reason, &none)) {
        return false;
    }
    engine_log(e, "%s failed to open: %s; going on with %s", failed->name, err->msg,
               e->backend->name);
    buf_printf(failures, "; %s failed to open: %s", failed->name, err->msg);
    snprintf(e->reason, sizeof e->reason, "%s%s", reason, failures->data ? failures->data : "");
    err_clean(e->reason); /* it may end inside a character */
    return true;
}

static int open_model(lily_engine *e, const lily_engine_options *o,
                      const struct backend *const *all, lily_err *err) {
    uint32_t *sampled = sampled_ids(e);
    struct buf failures = {0};
    int rc;
    if (!sampled) return ERR_NOMEM(err, "engine");
    do {
        rc = open_fitting(e, o, sampled, err);
    } while (rc && rc != LILY_ECANCELED && all && next_backend(e, all, err, &failures));
    buf_free(&failures);
    free(sampled);
    return rc;
}

int engine_assemble(const lily_engine_options *options, const struct engine_parts *parts,
                    lily_engine **out, lily_err *err) {
    *out = NULL;
    int rc = check_options(options, parts->weights->shape, err);
    if (rc) return rc;
    lily_engine *e = calloc(1, sizeof *e);
    if (!e) return ERR_NOMEM(err, "engine");
    e->weights = parts->weights;
    e->backend = parts->backend;
    e->log = options->log;
    e->log_arg = options->arg;
    e->max_sessions = options->max_sessions ? options->max_sessions : 1;
    e->state_bytes = options->state_bytes ? options->state_bytes : DEFAULT_STATE_BYTES;
    snprintf(e->reason, sizeof e->reason, "%s", parts->reason ? parts->reason : "");
    if ((rc = load_text(e, parts, err)) || (rc = open_model(e, options, parts->all, err))) {
        lily_engine_close(e);
        return rc;
    }
    e->ckpt = parts->ckpt;
    struct backend_probe probe = {0};
    e->backend->probe(&probe);
    snprintf(e->device, sizeof e->device, "%s", probe.device);
    struct backend_stats stats = {0};
    e->backend->stats(e->model, &stats);
    if (stats.device[0]) snprintf(e->device, sizeof e->device, "%s", stats.device);
    snprintf(e->kernels, sizeof e->kernels, "%s", stats.kernels);
    bool told = strstr(e->device, e->kernels) != NULL; /* the CPU's are part of its name */
    engine_log(e, "backend: %s on %s%s%s, context of %d tokens: %s", e->backend->name, e->device,
               told ? "" : ", kernels: ", told ? "" : e->kernels, e->context, e->reason);
    *out = e;
    return 0;
}

void lily_engine_close(lily_engine *e) {
    if (!e) return;
    if (e->model) e->backend->close(e->model);
    tokenizer_free(e->tokenizer);
    free((int32_t *)e->vocab.holes);
    ckpt_free(e->ckpt); /* last: the others may look into its mapping */
    free(e);
}

/* ---- opening --------------------------------------------------------------------------------- */

static int forward_progress(void *arg, uint64_t done, uint64_t total) {
    const lily_engine_options *o = arg;
    return o->progress(o->arg, "load", "B", done, total);
}

static void forward_warning(void *arg, const char *line) {
    const lily_engine_options *o = arg;
    o->log(o->arg, line);
}

static struct text_file text_of(const struct ckpt *c, const char *name) {
    struct text_file file = {0};
    file.text = ckpt_text(c, name, &file.size);
    return file;
}

static struct engine_parts parts_of(const struct ckpt *c) {
    return (struct engine_parts){.weights = ckpt_weights(c),
                                 .tokenizer = text_of(c, "tokenizer.json"),
                                 .generation_config = text_of(c, "generation_config.json"),
                                 .config = text_of(c, "config.json")};
}

int engine_check_texts(const struct ckpt *c, lily_err *err) {
    const struct engine_parts parts = parts_of(c);
    lily_engine e = {.weights = parts.weights};
    int rc = load_text(&e, &parts, err);
    tokenizer_free(e.tokenizer);
    free((int32_t *)e.vocab.holes);
    return rc;
}

int lily_engine_open(const lily_engine_options *options, lily_engine **out, lily_err *err) {
    double start = clock_seconds();
    struct ckpt *c = NULL;
    char reason[sizeof((lily_engine *)0)->reason];
    *out = NULL;
    const struct ckpt_options load = {
        .keep_bf16 = options->keep_bf16,
        .progress = options->progress ? forward_progress : NULL,
        .progress_arg = (void *)options,
        .warn = options->log ? forward_warning : NULL,
        .warn_arg = (void *)options,
    };
    int rc = ckpt_load(options->model, &load, &c, err);
    if (rc) return rc;
    struct engine_parts parts = parts_of(c);
    parts.ckpt = c;
    parts.all = is_auto(options->backend) ? backend_all : NULL;
    parts.reason = reason;
    if ((rc = engine_choose(backend_all, options->backend, has_16_bits(parts.weights),
                            &parts.backend, reason, sizeof reason, err)) ||
        (rc = engine_assemble(options, &parts, out, err))) {
        ckpt_free(c);
        return rc;
    }
    (*out)->load_seconds = clock_seconds() - start;
    return 0;
}

void lily_engine_get_info(const lily_engine *e, lily_engine_info *out) {
    struct backend_stats stats = {0};
    e->backend->stats(e->model, &stats);
    *out = (lily_engine_info){
        .model_name = e->weights->shape->name,
        .model_path = e->ckpt ? ckpt_path(e->ckpt) : "",
        .model_kind = e->ckpt ? ckpt_kind(e->ckpt) : "",
        .checkpoint = e->ckpt ? ckpt_identity(e->ckpt) : "",
        .backend = e->backend->name,
        .device = e->device,
        .reason = e->reason,
        .kernels = e->kernels,
        .layers = e->weights->layers,
        .vocab = e->weights->shape->vocab,
        .context = e->context,
        .weight_bytes = stats.weight_bytes,
        .session_bytes = stats.session_bytes,
        .scratch_bytes = stats.scratch_bytes,
        .bytes_per_token = stats.bytes_per_token,
        .kv_bytes_per_depth = stats.kv_bytes_per_depth,
        .bandwidth = stats.bandwidth,
        .load_seconds = e->load_seconds,
    };
}

void lily_sampling_defaults(const lily_engine *e, bool thinking, lily_sampling *out) {
    *out = thinking ? e->defaults.thinking : e->defaults.no_thinking;
}

int lily_sampling_check(const lily_engine *e, const lily_sampling *sampling, lily_err *err) {
    return sampler_check(sampling, e->vocab.used, err);
}
