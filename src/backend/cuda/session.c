/* What a sequence remembers (docs/model.md), in one allocation on the device: KV rows per position
 * in bfloat16, 20,480 B a token at the real shape, and twice the recurrent and convolution state in
 * float32: a step reads one and writes the other, so that the step before can be taken back. */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "base/buf.h"

enum {
    KV_BLOCK = 64,          /* rows of keys and values are whole blocks of so many */
    LATER_BYTES = 64 << 20, /* for the driver, once a model is open */
    MIB = 1 << 20
};

static size_t state_floats(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    size_t per_head = (size_t)s->gdn_head_dim * (size_t)s->gdn_head_dim;
    return (size_t)m->gdn_layers * (size_t)s->gdn_v_heads * per_head;
}

static size_t conv_floats(const struct backend_model *m) {
    const struct shape *s = model_shape(m);
    return (size_t)m->gdn_layers * (size_t)(s->conv_taps - 1) * (size_t)s->conv_dim;
}

size_t cuda_state_bytes(const struct backend_model *m) {
    return (state_floats(m) + conv_floats(m)) * sizeof(float);
}

static int32_t capacity_of(int32_t context) {
    return (context + KV_BLOCK - 1) / KV_BLOCK * KV_BLOCK;
}

/* Hands out parts of one allocation: base 0 only adds the sizes up. */
static CUdeviceptr carve(CUdeviceptr base, size_t *used, size_t bytes) {
    size_t at = *used;
    *used += cuda_aligned(bytes);
    return base + at;
}

static void place(const struct backend_model *m, struct backend_session *s, CUdeviceptr base) {
    const struct shape *sh = model_shape(m);
    size_t kv = cuda_kv_bytes(m, s->capacity) / 2, used = 0;
    for (int i = 0; i < 2; i++) {
        s->state[i] = carve(base, &used, cuda_state_bytes(m));
        s->conv[i] = s->state[i] + state_floats(m) * sizeof(float);
    }
    s->keys = carve(base, &used, kv);
    s->values = carve(base, &used, kv);
    s->token = carve(base, &used, sizeof(int32_t));
    s->counts = carve(base, &used, (size_t)sh->vocab * sizeof(int32_t));
    s->bytes = used;
}

size_t cuda_session_bytes(const struct backend_model *m, int32_t context) {
    struct backend_session s = {.capacity = capacity_of(context)};
    place(m, &s, 0);
    return s.bytes;
}

/* Queues zeros over the present state; nothing else is read before it is written. */
static int clear(struct backend_session *s, lily_err *err) {
    const struct backend_model *m = s->model;
    CUresult r = m->d->fill8(s->state[s->parity], 0, cuda_state_bytes(m), m->stream);
    return cuda_check(m->d, r, "session", err);
}

int cuda_session_new(struct backend_model *m, int32_t context, struct backend_session **out,
                     lily_err *err) {
    int rc = backend_check_session(&m->options, context, m->sessions, err);
    if (rc == LILY_OK) rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    struct backend_session *s = calloc(1, sizeof *s);
    if (!s) return ERR_NOMEM(err, "session");
    s->model = m;
    s->context = context;
    s->capacity = capacity_of(context);
    rc = cuda_memory(m, cuda_session_bytes(m, context), "session", &s->block, err);
    if (rc == LILY_OK) {
        place(m, s, s->block);
        /* Once all of it, so that no byte of an earlier program is ever read. */
        rc = cuda_check(m->d, m->d->fill8(s->block, 0, s->bytes, m->stream), "session", err);
    }
    if (rc != LILY_OK) {
        if (s->block) m->d->memory_free(s->block);
        free(s);
        return rc;
    }
    m->sessions++;
    *out = s;
    return LILY_OK;
}

void cuda_session_free(struct backend_session *s) {
    if (!s) return;
    struct backend_model *m = s->model;
    m->sessions--;
    cuda_enter(m, NULL);
    m->d->stream_wait(m->stream);
    m->d->memory_free(s->block);
    free(s);
}

int32_t cuda_position(const struct backend_session *s) {
    return s->position;
}

/* The table has no error here: a device that fails says so in the next step. */
void cuda_reset(struct backend_session *s) {
    if (cuda_enter(s->model, NULL) == LILY_OK) clear(s, NULL);
    s->position = s->kv_rows = 0;
    s->can_rewind = s->sampled = false;
}

/* ---- saved states ---------------------------------------------------------------------------- */

/* Saved states are not in the preflight: they take what is left, and leave room for the sessions
 * that the model was opened for and that are not there yet, and for what the driver allocates
 * later. A state less costs time only, a session less a request. */
static int check_left(const struct backend_model *m, lily_err *err) {
    size_t free_now = 0, total = 0, state = cuda_state_bytes(m);
    size_t to_come = (size_t)(m->options.max_sessions - m->sessions);
    size_t kept = to_come * cuda_session_bytes(m, m->options.max_context) + LATER_BYTES;
    int rc = cuda_check(m->d, m->d->memory_info(&free_now, &total), "memory", err);
    if (rc != LILY_OK || (free_now >= kept && free_now - kept >= state)) return rc;
    return ERR(err, LILY_ENOMEM,
               "state: found %.1f MiB of free device memory, expected %.1f for it beside %.1f that "
               "are kept for %zu session(s) to come; ask for fewer sessions or a shorter context",
               (double)free_now / MIB, (double)state / MIB, (double)kept / MIB, to_come);
}

int cuda_state_new(struct backend_model *m, struct backend_state **out, lily_err *err) {
    int rc = cuda_enter(m, err);
    if (rc == LILY_OK) rc = check_left(m, err);
    if (rc != LILY_OK) return rc;
    struct backend_state *state = calloc(1, sizeof *state);
    if (!state) return ERR_NOMEM(err, "state");
    state->model = m;
    rc = cuda_memory(m, cuda_state_bytes(m), "state", &state->data, err);
    if (rc != LILY_OK) {
        free(state);
        return rc;
    }
    *out = state;
    return LILY_OK;
}

void cuda_state_free(struct backend_state *state) {
    if (!state) return;
    const struct backend_model *m = state->model;
    cuda_enter(m, NULL);
    m->d->stream_wait(m->stream);
    m->d->memory_free(state->data);
    free(state);
}

/* A copy on the device, in the stream's order: the caller need not wait. */
int cuda_state_save(struct backend_session *s, struct backend_state *to, lily_err *err) {
    const struct backend_model *m = s->model;
    int rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    CUresult r = m->d->on_device(to->data, s->state[s->parity], cuda_state_bytes(m), m->stream);
    return cuda_check(m->d, r, "state", err);
}

int cuda_state_restore(struct backend_session *s, const struct backend_state *from, int32_t pos,
                       lily_err *err) {
    const struct backend_model *m = s->model;
    int rc = backend_check_restore(pos, s->kv_rows, err);
    if (rc == LILY_OK) rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    CUresult r = m->d->on_device(s->state[s->parity], from->data, cuda_state_bytes(m), m->stream);
    rc = cuda_check(m->d, r, "state", err);
    if (rc != LILY_OK) return rc;
    s->position = pos;
    s->can_rewind = s->sampled = false;
    return LILY_OK;
}

int cuda_state_export(const struct backend_state *from, void *out, lily_err *err) {
    const struct backend_model *m = from->model;
    int rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    rc = cuda_check(m->d, m->d->to_host(out, from->data, cuda_state_bytes(m), m->stream), "state",
                    err);
    return rc == LILY_OK ? cuda_check(m->d, m->d->stream_wait(m->stream), "state", err) : rc;
}

int cuda_state_import(struct backend_state *to, const void *in, lily_err *err) {
    const struct backend_model *m = to->model;
    int rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    rc = cuda_check(m->d, m->d->to_device(to->data, in, cuda_state_bytes(m), m->stream), "state",
                    err);
    return rc == LILY_OK ? cuda_check(m->d, m->d->stream_wait(m->stream), "state", err) : rc;
}

/* The newest step wrote the other buffer and left the one before it as it was. */
int cuda_rewind(struct backend_session *s, lily_err *err) {
    if (!s->can_rewind) {
        return ERR(err, LILY_EINVAL,
                   "rewind: found no decoded token just before it, expected one; restore a state "
                   "to go back further");
    }
    s->parity ^= 1;
    s->kv_rows = --s->position;
    s->can_rewind = s->sampled = false;
    return LILY_OK;
}

/* ---- what penalties count -------------------------------------------------------------------- */

int cuda_sample_begin(struct backend_session *s, const int32_t *prompt, int32_t n, lily_err *err) {
    struct backend_model *m = s->model;
    const struct cuda_driver *d = m->d;
    int32_t vocab = model_shape(m)->vocab;
    for (int32_t i = 0; i < n; i++) {
        if (prompt[i] >= 0 && prompt[i] < vocab) continue;
        return ERR(
            err, LILY_EINVAL,
            "prompt: found token id %d at %d, expected 0 to %d; tokenize with this checkpoint's "
            "tokenizer",
            prompt[i], i, vocab - 1);
    }
    int rc = cuda_enter(m, err);
    if (rc != LILY_OK) return rc;
    size_t bytes = (size_t)vocab * sizeof(int32_t);
    rc = cuda_check(d, d->fill8(s->counts, 0, bytes, m->stream), "sampling", err);
    for (int32_t from = 0; from < n && rc == LILY_OK; from += m->rows) {
        int32_t part = n - from < m->rows ? n - from : m->rows;
        rc = cuda_mark_prompt(s, prompt + from, part, err);
    }
    return rc;
}

/* ---- keys and values ------------------------------------------------------------------------- */

/* Bytes of n exported rows: bf16 [attention_layers][keys, values][kv_heads][n][head_dim]. */
size_t cuda_kv_bytes(const struct backend_model *m, int32_t n) {
    size_t row = 2 * (size_t)m->attention_layers * (size_t)model_shape(m)->kv_dim * 2, bytes;
    return size_mul(row, (size_t)n, &bytes) ? bytes : SIZE_MAX;
}

/* Queues the copies of rows [from, from + n) of every layer and head between a session and a packed
 * block, and waits for them; out is NULL for an import, in for an export. */
static int copy_rows(struct backend_session *s, int32_t from, int32_t n, char *out, const char *in,
                     lily_err *err) {
    const struct backend_model *m = s->model;
    const struct cuda_driver *d = m->d;
    size_t row = (size_t)model_shape(m)->head_dim * 2, bytes = (size_t)n * row, at = 0;
    size_t heads = (size_t)model_shape(m)->kv_heads;
    int rc = cuda_enter(m, err);
    if (n == 0) return rc;
    for (size_t l = 0; l < (size_t)m->attention_layers; l++) {
        for (size_t i = 0; i < 2 * heads && rc == LILY_OK; i++, at += bytes) {
            size_t first = (l * heads + i % heads) * (size_t)s->capacity + (size_t)from;
            CUdeviceptr rows = (i < heads ? s->keys : s->values) + first * row;
            CUresult r = out ? d->to_host(out + at, rows, bytes, m->stream)
                             : d->to_device(rows, in + at, bytes, m->stream);
            rc = cuda_check(d, r, "keys and values", err);
        }
    }
    int waited = cuda_check(d, d->stream_wait(m->stream), "keys and values", err);
    return rc == LILY_OK ? waited : rc;
}

int cuda_kv_export(struct backend_session *s, int32_t from, int32_t n, void *out, lily_err *err) {
    int rc = backend_check_export(from, n, s->kv_rows, err);
    return rc == LILY_OK ? copy_rows(s, from, n, out, NULL, err) : rc;
}

int cuda_kv_import(struct backend_session *s, int32_t from, int32_t n, const void *in,
                   lily_err *err) {
    int rc = backend_check_import(from, n, s->kv_rows, s->context, err);
    if (rc == LILY_OK) rc = copy_rows(s, from, n, NULL, in, err);
    if (rc == LILY_OK && from + n > s->kv_rows) s->kv_rows = from + n;
    return rc;
}
