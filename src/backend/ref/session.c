/* What a sequence remembers (docs/model.md): KV rows per position, recurrent and convolution
 * state of a fixed size. All of it is float32. */
#include <stdlib.h>
#include <string.h>

#include "backend/ref/ref.h"
#include "base/buf.h"

static size_t state_floats(const struct backend_model *m) {
    const struct shape *s = m->w->shape;
    size_t per_head = (size_t)s->gdn_head_dim * (size_t)s->gdn_head_dim;
    return (size_t)m->gdn_layers * (size_t)s->gdn_v_heads * per_head;
}

static size_t conv_floats(const struct backend_model *m) {
    const struct shape *s = m->w->shape;
    return (size_t)m->gdn_layers * (size_t)(s->conv_taps - 1) * (size_t)s->conv_dim;
}

/* Bytes of a saved state: state[gdn_layers][gdn_v_heads][128][128], then
 * conv[gdn_layers][3][conv_dim]. */
size_t ref_state_bytes(const struct backend_model *m) {
    return (state_floats(m) + conv_floats(m)) * sizeof(float);
}

/* Bytes of n exported rows: [attention_layers][keys, values][n][kv_dim]. */
size_t ref_kv_bytes(const struct backend_model *m, int32_t n) {
    size_t row = 2 * (size_t)m->attention_layers * (size_t)m->w->shape->kv_dim * sizeof(float);
    size_t bytes;
    return size_mul(row, (size_t)n, &bytes) ? bytes : SIZE_MAX;
}

int ref_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                    lily_err *err) {
    int rc = backend_check_session(&m->options, context, m->sessions, err);
    if (rc != LILY_OK) return rc;
    struct backend_session *s = calloc(1, sizeof *s);
    size_t kv = ref_kv_bytes(m, context);
    if (!s) return ERR_NOMEM(err, "session");
    s->model = m;
    m->sessions++;
    s->state = calloc(1, ref_state_bytes(m));
    s->before = malloc(ref_state_bytes(m));
    s->counts = calloc((size_t)m->w->shape->vocab, sizeof *s->counts);
    s->keys = kv == SIZE_MAX ? NULL : malloc(kv);
    if (!s->state || !s->before || !s->counts || !s->keys) {
        ref_session_free(s);
        return ERR_NOMEM(err, "session");
    }
    s->sampled = -1;
    s->context = context;
    s->values = s->keys + kv / sizeof(float) / 2;
    s->conv = s->state + state_floats(m);
    *out = s;
    return LILY_OK;
}

void ref_session_free(struct backend_session *s) {
    if (!s) return;
    s->model->sessions--;
    free(s->state);
    free(s->before);
    free(s->counts);
    free(s->keys);
    free(s);
}

int32_t ref_position(const struct backend_session *s) {
    return s->position;
}

void ref_reset(struct backend_session *s) {
    memset(s->state, 0, ref_state_bytes(s->model));
    s->position = s->kv_rows = 0;
    s->can_rewind = false;
    s->sampled = -1;
}

/* ---- saved states ---------------------------------------------------------------------------- */

int ref_state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    size_t bytes = ref_state_bytes(m);
    *out = malloc(sizeof **out + bytes);
    if (!*out) return ERR_NOMEM(err, "state");
    (*out)->bytes = bytes;
    return LILY_OK;
}

void ref_state_free(struct backend_state *state) {
    free(state);
}

int ref_state_save(struct backend_session *s, struct backend_state *to, lily_err *err) {
    (void)err;
    memcpy(to->data, s->state, to->bytes);
    return LILY_OK;
}

int ref_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                      lily_err *err) {
    int rc = backend_check_restore(pos, s->kv_rows, err);
    if (rc != LILY_OK) return rc;
    memcpy(s->state, from->data, from->bytes);
    s->position = pos;
    s->can_rewind = false;
    s->sampled = -1;
    return LILY_OK;
}

int ref_state_export(const struct backend_state *from, void *out, lily_err *err) {
    (void)err;
    memcpy(out, from->data, from->bytes);
    return LILY_OK;
}

int ref_state_import(struct backend_state *to, const void *in, lily_err *err) {
    (void)err;
    memcpy(to->data, in, to->bytes);
    return LILY_OK;
}

int ref_rewind(struct backend_session *s, lily_err *err) {
    if (!s->can_rewind) {
        return ERR(err, LILY_EINVAL,
                   "rewind: found no decoded token just before it, expected one; restore a state "
                   "to go back further");
    }
    memcpy(s->state, s->before, ref_state_bytes(s->model));
    s->kv_rows = --s->position;
    s->can_rewind = false;
    s->sampled = -1;
    return LILY_OK;
}

/* ---- what penalties count -------------------------------------------------------------------- */

int ref_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err) {
    int32_t vocab = s->model->w->shape->vocab;
    for (int32_t i = 0; i < n; i++) {
        if (prompt[i] >= 0 && prompt[i] < vocab) continue;
        return ERR(err, LILY_EINVAL, "prompt: found token id %d at %d, expected 0 to %d", prompt[i],
                   i, vocab - 1);
    }
    memset(s->counts, 0, (size_t)vocab * sizeof *s->counts);
    for (int32_t i = 0; i < n; i++) s->counts[prompt[i]] = 1;
    return LILY_OK;
}

/* ---- keys and values ------------------------------------------------------------------------- */

/* Copies rows [from, from + n) of every layer between a session and a packed block; out is NULL for
 * an import, in for an export. */
static void copy_rows(struct backend_session *s, int32_t from, int32_t n, char *out,
                      const char *in) {
    size_t row = (size_t)s->model->w->shape->kv_dim, bytes = (size_t)n * row * sizeof(float);
    for (int32_t l = 0; l < s->model->attention_layers; l++) {
        size_t first = ((size_t)l * (size_t)s->context + (size_t)from) * row;
        float *parts[] = {s->keys + first, s->values + first};
        for (size_t i = 0; i < 2; i++) {
            size_t at = (2 * (size_t)l + i) * bytes;
            if (out) memcpy(out + at, parts[i], bytes);
            if (in) memcpy(parts[i], in + at, bytes);
        }
    }
}

int ref_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err) {
    int rc = backend_check_export(from, n, s->kv_rows, err);
    if (rc == LILY_OK) copy_rows(s, from, n, out, NULL);
    return rc;
}

int ref_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                  lily_err *err) {
    int rc = backend_check_import(from, n, s->kv_rows, s->context, err);
    if (rc != LILY_OK) return rc;
    copy_rows(s, from, n, NULL, in);
    if (from + n > s->kv_rows) s->kv_rows = from + n;
    return LILY_OK;
}
