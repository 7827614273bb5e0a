/* What a sequence remembers (docs/model.md): KV rows per position in bfloat16, 20,480 B a token
 * at the real shape, and the recurrent and convolution state in float32, whatever the length. */
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/memory.h"
#include "base/buf.h"

static size_t state_floats(const struct backend_model *m) {
    return (size_t)m->gdn_layers * (size_t)model_shape(m)->gdn_v_heads * STATE * STATE;
}

static size_t conv_floats(const struct backend_model *m) {
    return (size_t)m->gdn_layers * (CONV_TAPS - 1) * (size_t)model_shape(m)->conv_dim;
}

/* Elements of keys (or of values) for that many positions. */
static size_t kv_elements(const struct backend_model *m, size_t positions) {
    return (size_t)m->attention_layers * (size_t)model_shape(m)->kv_dim * positions;
}

/* Positions with room: whole blocks of values. */
static size_t capacity_of(int32_t context) {
    return ((size_t)context + VALUE_BLOCK - 1) / VALUE_BLOCK * VALUE_BLOCK;
}

size_t cpu_session_bytes(const struct backend_model *m, int32_t context) {
    return sizeof(struct backend_session) + cpu_state_bytes(m) +
           2 * sizeof(uint16_t) * kv_elements(m, capacity_of(context));
}

/* Places the arrays of s in its block, or only adds their sizes up. */
static void place(const struct backend_model *m, struct backend_session *s, struct carver *c) {
    size_t elements = kv_elements(m, (size_t)s->capacity);
    s->state = carve(c, state_floats(m), sizeof(float));
    s->conv = carve(c, conv_floats(m), sizeof(float));
    s->keys = carve(c, elements, sizeof(uint16_t));
    s->values = carve(c, elements, sizeof(uint16_t));
}

int cpu_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                    lily_err *err) {
    int rc = backend_check_session(&m->options, context, m->sessions, err);
    if (rc != LILY_OK) return rc;
    struct backend_session *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM(err, "session");
    struct carver c = {0};
    s->model = m;
    s->context = context;
    s->capacity = (int32_t)capacity_of(context);
    place(m, s, &c);
    s->block_bytes = c.used;
    s->block = pages_new(s->block_bytes);
    if (!s->block) {
        free(s);
        return ERR(
            err, LILY_ENOMEM,
            "session: found less free memory than the %.2f GiB a context of %d tokens needs; "
            "ask for a shorter context",
            (double)c.used / 1073741824.0, context);
    }
    c = (struct carver){.base = s->block};
    place(m, s, &c);
    m->sessions++;
    *out = s;
    return LILY_OK;
}

void cpu_session_free(struct backend_session *s) {
    if (!s) return;
    s->model->sessions--;
    pages_free(s->block, s->block_bytes);
    free(s);
}

int32_t cpu_position(const struct backend_session *s) {
    return s->position;
}

void cpu_reset(struct backend_session *s) {
    memset(s->state, 0, state_floats(s->model) * sizeof(float));
    memset(s->conv, 0, conv_floats(s->model) * sizeof(float));
    s->position = s->kv_rows = 0;
}

/* ---- saved states ---------------------------------------------------------------------------- */

size_t cpu_state_bytes(const struct backend_model *m) {
    return (state_floats(m) + conv_floats(m)) * sizeof(float);
}

int cpu_state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    struct backend_state *state = malloc(sizeof *state);
    size_t bytes = cpu_state_bytes(m);
    float *data = state ? pages_new(bytes) : NULL;
    if (!data) {
        free(state);
        return ERR_NOMEM(err, "state");
    }
    *state = (struct backend_state){bytes, data};
    *out = state;
    return LILY_OK;
}

void cpu_state_free(struct backend_state *state) {
    if (!state) return;
    pages_free(state->data, state->bytes);
    free(state);
}

int cpu_state_save(struct backend_session *s, struct backend_state *to, lily_err *err) {
    (void)err;
    memcpy(to->data, s->state, state_floats(s->model) * sizeof(float));
    memcpy(to->data + state_floats(s->model), s->conv, conv_floats(s->model) * sizeof(float));
    return LILY_OK;
}

int cpu_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                      lily_err *err) {
    int rc = backend_check_restore(pos, s->kv_rows, err);
    if (rc != LILY_OK) return rc;
    memcpy(s->state, from->data, state_floats(s->model) * sizeof(float));
    memcpy(s->conv, from->data + state_floats(s->model), conv_floats(s->model) * sizeof(float));
    s->position = pos;
    return LILY_OK;
}

int cpu_state_export(const struct backend_state *from, void *out, lily_err *err) {
    (void)err;
    memcpy(out, from->data, from->bytes);
    return LILY_OK;
}

int cpu_state_import(struct backend_state *to, const void *in, lily_err *err) {
    (void)err;
    memcpy(to->data, in, to->bytes);
    return LILY_OK;
}

/* ---- keys and values ------------------------------------------------------------------------- */

static size_t head_at(const struct backend_session *s, int32_t n, int32_t kv_head) {
    size_t heads = (size_t)model_shape(s->model)->kv_heads;
    return ((size_t)n * heads + (size_t)kv_head) * (size_t)s->capacity * HEAD;
}

uint16_t *session_keys(const struct backend_session *s, int32_t n, int32_t kv_head) {
    return s->keys + head_at(s, n, kv_head);
}

uint16_t *session_values(const struct backend_session *s, int32_t n, int32_t kv_head) {
    return s->values + head_at(s, n, kv_head);
}

/* Exported rows: bf16 [attention_layers][keys, values][n][kv_dim], whatever the blocks inside. */
size_t cpu_kv_bytes(const struct backend_model *m, int32_t n) {
    size_t bytes;
    if (n < 0 || !size_mul(2 * sizeof(uint16_t) * kv_elements(m, 1), (size_t)n, &bytes)) {
        return SIZE_MAX;
    }
    return bytes;
}

/* Copies n rows of one head between its blocks and rows[n][kv_dim], either way. */
static void copy_head(uint16_t *keys, uint16_t *values, int32_t from, int32_t n, size_t kv_dim,
                      uint16_t *key_rows, uint16_t *value_rows, bool import) {
    for (int32_t i = 0; i < n; i++, key_rows += kv_dim, value_rows += kv_dim) {
        uint16_t *key = keys + key_at(from + i), *value = values + value_at(from + i);
        for (int d = 0; d < HEAD; d++) {
            uint16_t *k = key + d * KEY_BLOCK;
            uint16_t *v = value + d / VALUE_LANE * VALUE_BLOCK * VALUE_LANE + d % VALUE_LANE;
            if (import)
                *k = key_rows[d], *v = value_rows[d];
            else
                key_rows[d] = *k, value_rows[d] = *v;
        }
    }
}

static void copy_rows(struct backend_session *s, int32_t from, int32_t n, uint16_t *rows,
                      bool import) {
    const struct shape *shape = model_shape(s->model);
    size_t kv_dim = (size_t)shape->kv_dim, part = (size_t)n * kv_dim;
    for (int32_t l = 0; l < s->model->attention_layers; l++, rows += 2 * part) {
        for (int32_t h = 0; h < shape->kv_heads; h++) {
            copy_head(session_keys(s, l, h), session_values(s, l, h), from, n, kv_dim,
                      rows + h * HEAD, rows + part + h * HEAD, import);
        }
    }
}

int cpu_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err) {
    int rc = backend_check_export(from, n, s->kv_rows, err);
    if (rc == LILY_OK) copy_rows(s, from, n, out, false);
    return rc;
}

int cpu_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                  lily_err *err) {
    int rc = backend_check_import(from, n, s->kv_rows, s->context, err);
    if (rc != LILY_OK) return rc;
    copy_rows(s, from, n, (uint16_t *)(uintptr_t)in, true); /* only read when importing */
    if (from + n > s->kv_rows) s->kv_rows = from + n;
    return LILY_OK;
}
