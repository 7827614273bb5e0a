#include "backend/backend.h"

int backend_check_session(const struct backend_options *options, int32_t context, int32_t sessions,
                          lily_err *err) {
    if (context < 1 || context > options->max_context) {
        return ERR(err, LILY_EINVAL,
                   "session: found a context of %d tokens, expected 1 to %d; open the model with a "
                   "larger context or ask for less",
                   context, options->max_context);
    }
    if (sessions < options->max_sessions) return LILY_OK;
    return ERR(err, LILY_EBUSY,
               "session: found %d open, expected fewer than %d; close one or open the model for "
               "more",
               sessions, options->max_sessions);
}

int backend_check_token(const struct shape *shape, int32_t token, lily_err *err) {
    if (token >= 0 && token < shape->vocab) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "token: found id %d, expected 0 to %d; tokenize with this checkpoint's tokenizer",
               token, shape->vocab - 1);
}

int backend_check_room(int32_t position, int32_t context, lily_err *err) {
    if (position < context) return LILY_OK;
    return ERR(err, LILY_ECONTEXT,
               "session: found %d tokens, expected fewer than its context of %d; start a session "
               "with a larger context",
               position, context);
}

int backend_check_restore(int32_t pos, int32_t kv_rows, lily_err *err) {
    if (pos >= 0 && pos <= kv_rows) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "state: found position %d, expected 0 to %d, the tokens whose keys and values the "
               "session holds; import those first",
               pos, kv_rows);
}

static int check_rows(const char *what, int32_t from, int32_t n, int32_t limit, lily_err *err) {
    if (from >= 0 && n >= 0 && n <= limit && from <= limit - n) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "%s: found %d rows from position %d, expected rows within the first %d; ask for "
               "fewer",
               what, n, from, limit);
}

void backend_sampled(const struct weights *w, const struct backend_options *options,
                     uint32_t *out) {
    for (int32_t i = 0; i < (w->shape->vocab + 31) / 32; i++) {
        int32_t below = w->vocab_used - 32 * i; /* ids of this word that exist */
        uint32_t all = below >= 32 ? UINT32_MAX : below > 0 ? (1u << below) - 1 : 0;
        out[i] = options->sampled ? options->sampled[i] & all : all;
    }
}

int backend_check_sampling(const struct backend_sampling *p, lily_err *err) {
    bool fits =
        p->temperature == 0 || (p->temperature > 0 && p->top_k >= 1 && p->top_k <= BACKEND_TOP_K);
    if (fits) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "sampling: found temperature %g and top_k %d, expected temperature 0, or above it "
               "with top_k 1 to %d; let the host sample",
               (double)p->temperature, p->top_k, BACKEND_TOP_K);
}

int backend_check_export(int32_t from, int32_t n, int32_t kv_rows, lily_err *err) {
    return check_rows("KV export", from, n, kv_rows, err);
}

int backend_check_import(int32_t from, int32_t n, int32_t kv_rows, int32_t context, lily_err *err) {
    int rc = check_rows("KV import", from, n, context, err);
    if (rc != LILY_OK || from <= kv_rows) return rc;
    return ERR(err, LILY_EINVAL,
               "KV import: found a first row at position %d, expected at most %d; import the rows "
               "before it first",
               from, kv_rows);
}
