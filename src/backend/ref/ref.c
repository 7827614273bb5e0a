/* The step: one token in, one row of logits out (docs/model.md). Read this file first. */
#include "backend/ref/ref.h"

#include <string.h>

static void add(float *h, const float *x, int32_t n) {
    for (int32_t i = 0; i < n; i++) h[i] += x[i];
}

/* One layer on the residual stream: h += mixer(norm(h)); h += experts(norm(h)). */
static void layer_step(struct backend_session *s, int32_t l) {
    const struct shape *sh = s->model->w->shape;
    const struct layer_weights *w = &s->model->w->layer[l];
    struct ref_scratch *x = &s->model->x;

    ref_rms_norm(x->h, w->input_norm, x->normed, sh->hidden, sh->norm_eps);
    ref_trace(s, STAGE_INPUT_NORM, l, x->normed, sh->hidden);
    if (shape_is_attention(sh, l)) {
        ref_attention(s, l, x->normed, x->mixed);
    } else {
        ref_deltanet(s, l, x->normed, x->mixed);
    }
    ref_trace(s, STAGE_MIXER_OUT, l, x->mixed, sh->hidden);
    add(x->h, x->mixed, sh->hidden);

    ref_rms_norm(x->h, w->post_norm, x->normed, sh->hidden, sh->norm_eps);
    ref_trace(s, STAGE_POST_NORM, l, x->normed, sh->hidden);
    ref_moe(s, l, x->normed, x->mixed);
    add(x->h, x->mixed, sh->hidden);
    ref_trace(s, STAGE_LAYER_OUT, l, x->h, sh->hidden);
}

/* Appends one token. logits is NULL, or [V]: the head is computed only when someone reads it. After
 * LILY_ENUMERIC the session's state is spoilt until reset or state_restore. */
static int step(struct backend_session *s, int32_t token, float *logits, lily_err *err) {
    const struct weights *w = s->model->w;
    const struct shape *sh = w->shape;
    struct ref_scratch *x = &s->model->x;

    ref_rope_angles(s->model->inv_freq, s->position, sh->rotary_dim / 2, x->rope_cos, x->rope_sin);
    ref_embed(w, token, x->h);
    ref_trace(s, STAGE_EMBED, -1, x->h, sh->hidden);
    for (int32_t l = 0; l < w->layers; l++) layer_step(s, l);

    bool finite = ref_finite(x->h, sh->hidden);
    if (logits) {
        ref_rms_norm(x->h, w->final_norm, x->normed, sh->hidden, sh->norm_eps);
        ref_trace(s, STAGE_FINAL_NORM, -1, x->normed, sh->hidden);
        ref_logits(w, x->normed, logits);
        ref_trace(s, STAGE_LOGITS, -1, logits, sh->vocab);
        finite = finite && ref_finite(logits, sh->vocab);
    }
    int32_t position = s->position++;
    s->kv_rows = s->position; /* later rows, if any, belonged to another continuation */
    if (finite) return LILY_OK;
    return ERR(err, LILY_ENUMERIC,
               "position %d: found non-finite values in the %s, expected finite numbers; reset the "
               "session, and check the checkpoint if this repeats",
               position, logits ? "logits" : "hidden state");
}

static int check_token(const struct backend_session *s, int32_t token, lily_err *err) {
    int32_t vocab = s->model->w->shape->vocab;
    if (token < 0 || token >= vocab) {
        return ERR(err, LILY_EINVAL,
                   "token: found id %d, expected 0 to %d; tokenize with this "
                   "checkpoint's tokenizer",
                   token, vocab - 1);
    }
    if (s->position >= s->context) {
        return ERR(err, LILY_ECONTEXT,
                   "session: found %d tokens, expected fewer than its context of %d; start a "
                   "session with a larger context",
                   s->position, s->context);
    }
    return LILY_OK;
}

/* Prefill is the loop over decode. A call ends at the next grid point, so that the caller can
 * cancel there and save the state of every grid point it wants. */
static int prefill(struct backend_session *s, struct prefill_step *p, lily_err *err) {
    int32_t room = BACKEND_GRID - s->position % BACKEND_GRID;
    int32_t n = p->n < room ? p->n : room;
    p->done = 0;
    if (n < 1) return ERR(err, LILY_EINVAL, "prefill: found %d tokens, expected at least 1", p->n);
    size_t vocab = (size_t)s->model->w->shape->vocab;
    for (int32_t i = 0; i < n; i++) {
        float *last = i == p->n - 1 ? p->logits : NULL;
        float *row = p->all_logits ? p->all_logits + (size_t)i * vocab : last;
        int rc = check_token(s, p->ids[i], err);
        if (rc == LILY_OK) rc = step(s, p->ids[i], row, err);
        if (rc != LILY_OK) return rc;
        p->done = i + 1;
        if (last && last != row) memcpy(last, row, vocab * sizeof *last);
    }
    return LILY_OK;
}

/* A submitted step is noted and runs in wait: one step in flight, and the host samples. */
static int decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                         lily_err *err) {
    if (m->pending_n) {
        return ERR(err, LILY_EBUSY, "decode: found a step in flight, expected none; wait for it");
    }
    if (n < 1 || n > m->options.max_sessions) {
        return ERR(err, LILY_EINVAL, "decode: found %d slots, expected 1 to %d", n,
                   m->options.max_sessions);
    }
    for (int32_t i = 0; i < n; i++) {
        int rc = check_token(slots[i].session, slots[i].token, err);
        if (rc != LILY_OK) return rc;
        m->pending[i] = slots[i];
    }
    m->pending_n = n;
    return LILY_OK;
}

/* All slots advance; when values of one are not finite, the others are still good. */
static int decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                       lily_err *err) {
    if (n != m->pending_n || n < 1) {
        return ERR(err, LILY_EINVAL, "decode: found a wait for %d slots, expected %d as submitted",
                   n, m->pending_n);
    }
    int rc = LILY_OK;
    m->pending_n = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct decode_slot *slot = &m->pending[i];
        int one = step(slot->session, slot->token, slot->logits, rc == LILY_OK ? err : NULL);
        if (rc == LILY_OK && one != LILY_OK) rc = err_prefix(err, one, "slot %d", i);
        results[i].token = -1;
    }
    return rc;
}

const struct backend backend_ref = {
    .name = "ref",
    .probe = ref_probe,
    .open = ref_open,
    .close = ref_close,
    .session_new = ref_session_new,
    .session_free = ref_session_free,
    .position = ref_position,
    .reset = ref_reset,
    .prefill = prefill,
    .decode_submit = decode_submit,
    .decode_wait = decode_wait,
    .state_bytes = ref_state_bytes,
    .state_save = ref_state_save,
    .state_restore = ref_state_restore,
    .kv_bytes = ref_kv_bytes,
    .kv_export = ref_kv_export,
    .kv_import = ref_kv_import,
    .stats = ref_stats,
};
