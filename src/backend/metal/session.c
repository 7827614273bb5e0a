/* What a sequence remembers (docs/model.md): KV rows per position in bfloat16, and two of each kind
 * of state. A step reads the state of one parity and writes the other, so that going back one token
 * moves no bytes. Memory is the machine's own, shared with the GPU: the CPU reads and writes it
 * whenever no step of the session is in flight. */
#include <stdlib.h>
#include <string.h>

#include "backend/metal/metal.h"

static size_t recurrent_bytes(const struct metal_layout *l) {
    return (size_t)layout_session_buffer(l, SESSION_STATE_0, 0);
}

static size_t conv_bytes(const struct metal_layout *l) {
    return (size_t)layout_session_buffer(l, SESSION_CONV_0, 0);
}

static int32_t free_slot(const struct backend_model *m) {
    int32_t slot = 0;
    while (m->taken[slot]) slot++;
    return slot;
}

int metal_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                      lily_err *err) {
    int rc = backend_check_session(&m->options, context, m->sessions, err);
    if (rc != LILY_OK) return rc;
    struct backend_session *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM(err, "session");
    *s = (struct backend_session){.model = m, .slot = free_slot(m), .context = context};
    void *pool = objc_autoreleasePoolPush();
    rc = buffers_new_session(&m->buffers, &m->device, s->slot, context, err);
    objc_autoreleasePoolPop(pool);
    if (rc != LILY_OK) {
        free(s);
        return rc;
    }
    m->taken[s->slot] = true;
    m->sessions++;
    metal_reset(s);
    memset(session_bytes(s, SESSION_COUNTS), 0,
           (size_t)layout_session_buffer(&m->layout, SESSION_COUNTS, 0));
    *out = s;
    return LILY_OK;
}

static bool in_flight(const struct backend_session *s) {
    const struct backend_model *m = s->model;
    for (int32_t i = 0; i < m->flights; i++) {
        for (int32_t j = 0; j < m->flight[i].n; j++) {
            if (m->flight[i].slot[j].session == s) return true;
        }
    }
    return false;
}

void metal_session_free(struct backend_session *s) {
    if (!s) return;
    struct backend_model *m = s->model;
    if (in_flight(s)) metal_drain(m);
    buffers_free_session(&m->buffers, s->slot);
    m->taken[s->slot] = false;
    m->sessions--;
    free(s);
}

int32_t metal_position(const struct backend_session *s) {
    return s->position;
}

/* The last step's token and the way back are gone. */
static void forget_step(struct backend_session *s) {
    s->has_token = s->can_rewind = false;
}

void metal_reset(struct backend_session *s) {
    const struct metal_layout *l = &s->model->layout;
    memset(session_bytes(s, SESSION_STATE_0 + s->parity), 0, recurrent_bytes(l));
    memset(session_bytes(s, SESSION_CONV_0 + s->parity), 0, conv_bytes(l));
    s->position = s->kv_rows = 0;
    forget_step(s);
}

int metal_rewind(struct backend_session *s, lily_err *err) {
    if (!s->can_rewind) {
        return ERR(err, LILY_EINVAL,
                   "rewind: found no decoded token just before it, expected one; restore a state "
                   "to go back further");
    }
    s->parity = 1 - s->parity;
    s->kv_rows = --s->position;
    forget_step(s);
    return LILY_OK;
}

int metal_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err) {
    int32_t vocab = s->model->layout.shape->vocab;
    uint32_t *counts = session_bytes(s, SESSION_COUNTS);
    for (int32_t i = 0; i < n; i++) {
        if (prompt[i] >= 0 && prompt[i] < vocab) continue;
        return ERR(err, LILY_EINVAL, "prompt: found token id %d at %d, expected 0 to %d", prompt[i],
                   i, vocab - 1);
    }
    memset(counts, 0, (size_t)vocab * sizeof *counts);
    for (int32_t i = 0; i < n; i++) counts[prompt[i]] = 1;
    return LILY_OK;
}

/* ---- saved states ---------------------------------------------------------------------------- */

size_t metal_state_bytes(const struct backend_model *m) {
    return recurrent_bytes(&m->layout) + conv_bytes(&m->layout);
}

int metal_state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    size_t bytes = metal_state_bytes(m);
    *out = malloc(sizeof **out + bytes);
    if (!*out) return ERR_NOMEM(err, "state");
    (*out)->bytes = bytes;
    return LILY_OK;
}

void metal_state_free(struct backend_state *state) {
    free(state);
}

int metal_state_save(struct backend_session *s, struct backend_state *to, lily_err *err) {
    (void)err;
    size_t first = recurrent_bytes(&s->model->layout);
    memcpy(to->data, session_bytes(s, SESSION_STATE_0 + s->parity), first);
    memcpy(to->data + first, session_bytes(s, SESSION_CONV_0 + s->parity), to->bytes - first);
    return LILY_OK;
}

int metal_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                        lily_err *err) {
    int rc = backend_check_restore(pos, s->kv_rows, err);
    if (rc != LILY_OK) return rc;
    size_t first = recurrent_bytes(&s->model->layout);
    memcpy(session_bytes(s, SESSION_STATE_0 + s->parity), from->data, first);
    memcpy(session_bytes(s, SESSION_CONV_0 + s->parity), from->data + first, from->bytes - first);
    s->position = pos;
    forget_step(s);
    return LILY_OK;
}

int metal_state_export(const struct backend_state *from, void *out, lily_err *err) {
    (void)err;
    memcpy(out, from->data, from->bytes);
    return LILY_OK;
}

int metal_state_import(struct backend_state *to, const void *in, lily_err *err) {
    (void)err;
    memcpy(to->data, in, to->bytes);
    return LILY_OK;
}

/* ---- keys and values ------------------------------------------------------------------------- */

static size_t row_bytes(const struct backend_model *m) {
    return 2 * (size_t)m->layout.shape->kv_dim;
}

/* Exported rows: bf16 [attention_layers][keys, values][n][kv_dim]. */
size_t metal_kv_bytes(const struct backend_model *m, int32_t n) {
    size_t bytes, all = 2 * (size_t)m->layout.attention_layers * row_bytes(m);
    if (n < 0 || !size_mul(all, (size_t)n, &bytes)) return SIZE_MAX;
    return bytes;
}

/* Rows [from, from + n) of keys (part 0) or values (1) of the n-th attention layer. */
static uint8_t *kv_rows(const struct backend_session *s, int32_t layer, size_t part, int32_t from) {
    uint8_t *base = session_bytes(s, SESSION_KV + layer);
    return base + (part * (size_t)s->context + (size_t)from) * row_bytes(s->model);
}

int metal_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err) {
    int rc = backend_check_export(from, n, s->kv_rows, err);
    if (rc != LILY_OK) return rc;
    size_t bytes = (size_t)n * row_bytes(s->model);
    uint8_t *to = out;
    for (int32_t l = 0; l < s->model->layout.attention_layers; l++) {
        for (size_t part = 0; part < 2; part++, to += bytes) {
            memcpy(to, kv_rows(s, l, part, from), bytes);
        }
    }
    return LILY_OK;
}

int metal_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                    lily_err *err) {
    int rc = backend_check_import(from, n, s->kv_rows, s->context, err);
    if (rc != LILY_OK) return rc;
    size_t bytes = (size_t)n * row_bytes(s->model);
    const uint8_t *rows = in;
    for (int32_t l = 0; l < s->model->layout.attention_layers; l++) {
        for (size_t part = 0; part < 2; part++, rows += bytes) {
            memcpy(kv_rows(s, l, part, from), rows, bytes);
        }
    }
    if (from + n > s->kv_rows) s->kv_rows = from + n;
    return LILY_OK;
}
