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

/* Appends one token. logits is NULL, or [V]: the head is computed only when someone reads it.
 * Returns whether all values are finite; if not, the session's state is spoilt until reset or
 * state_restore. */
static bool step(struct backend_session *s, int32_t token, float *logits) {
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
    s->kv_rows = ++s->position; /* later rows, if any, belonged to another continuation */
    return finite;
}

static int check_token(const struct backend_session *s, int32_t token, lily_err *err) {
    int rc = backend_check_token(s->model->w->shape, token, err);
    return rc ? rc : backend_check_room(s->position, s->context, err);
}

/* Prefill is the loop over decode. A call ends at the next grid point, so that the caller can
 * cancel there and save the state of every grid point it wants. */
static int prefill(struct backend_session *s, struct prefill_step *p, lily_err *err) {
    int32_t room = BACKEND_GRID - s->position % BACKEND_GRID;
    int32_t n = p->n < room ? p->n : room;
    p->done = 0;
    if (n < 1) return ERR(err, LILY_EINVAL, "prefill: found %d tokens, expected at least 1", p->n);
    size_t vocab = (size_t)s->model->w->shape->vocab;
    s->can_rewind = false;
    s->sampled = -1;
    for (int32_t i = 0; i < n; i++) {
        float *last = i == p->n - 1 ? p->logits : NULL;
        float *row = p->all_logits ? p->all_logits + (size_t)i * vocab : last;
        int rc = check_token(s, p->ids[i], err);
        if (rc != LILY_OK) return rc;
        if (!step(s, p->ids[i], row)) {
            return ERR(err, LILY_ENUMERIC,
                       "position %d: found non-finite values in the %s, expected finite numbers; "
                       "reset the session, and check the checkpoint if this repeats",
                       s->position - 1, row ? "logits" : "hidden state");
        }
        p->done = i + 1;
        if (last && last != row) memcpy(last, row, vocab * sizeof *last);
    }
    return LILY_OK;
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* The token a slot appends. */
static int32_t slot_token(const struct decode_slot *slot) {
    return slot->token == -1 ? slot->session->sampled : slot->token;
}

static int check_slot(const struct decode_slot *slot, lily_err *err) {
    if (slot->token == -1 && slot->session->sampled < 0) {
        return ERR(err, LILY_EINVAL,
                   "decode: found no token sampled by the step before, expected one; pass a token");
    }
    int rc = check_token(slot->session, slot_token(slot), err);
    return rc != LILY_OK || !slot->sampling ? rc : backend_check_sampling(slot->sampling, err);
}

/* One slot's step: the state before it is kept, and the next token picked where that is asked. */
static struct decode_result decode_one(struct backend_model *m, const struct decode_slot *slot) {
    struct backend_session *s = slot->session;
    int32_t token = slot_token(slot);
    float *logits = slot->logits ? slot->logits : slot->sampling ? m->x.logits : NULL;
    struct decode_result result = {.token = -1};

    memcpy(s->before, s->state, ref_state_bytes(m));
    result.finite = step(s, token, logits);
    if (slot->sampling) {
        int32_t *count = &s->counts[token];
        *count += *count ? 1 : 2;
        result.token = result.finite ? ref_sample(slot->sampling, slot->pick, logits, s->counts,
                                                  m->sampled, m->w->shape->vocab, m->x.penalised)
                                     : 0;
    }
    s->sampled = result.token;
    s->can_rewind = true;
    return result;
}

/* A step runs here; wait hands its results over. All slots advance: when values of one are not
 * finite, the others are still good. */
static int decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                         lily_err *err) {
    if (m->flights == REF_FLIGHTS) {
        return ERR(err, LILY_EBUSY,
                   "decode: found %d steps in flight, expected fewer; wait for one", REF_FLIGHTS);
    }
    if (n < 1 || n > m->options.max_sessions) {
        return ERR(err, LILY_EINVAL, "decode: found %d slots, expected 1 to %d", n,
                   m->options.max_sessions);
    }
    for (int32_t i = 0; i < n; i++) {
        int rc = check_slot(&slots[i], err);
        if (rc != LILY_OK) return rc;
    }
    struct ref_flight *flight = &m->flight[m->flights++];
    flight->n = n;
    for (int32_t i = 0; i < n; i++) flight->results[i] = decode_one(m, &slots[i]);
    return LILY_OK;
}

static int decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                       lily_err *err) {
    struct ref_flight oldest = m->flight[0];
    if (m->flights == 0 || n != oldest.n) {
        return ERR(err, LILY_EINVAL, "decode: found a wait for %d slots, expected %d as submitted",
                   n, m->flights ? oldest.n : 0);
    }
    memcpy(results, oldest.results, (size_t)n * sizeof *results);
    m->flight[0] = m->flight[1];
    m->flight[1] = oldest;
    m->flights--;
    return LILY_OK;
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
    .sample_begin = ref_sample_begin,
    .rewind = ref_rewind,
    .state_bytes = ref_state_bytes,
    .state_new = ref_state_new,
    .state_free = ref_state_free,
    .state_save = ref_state_save,
    .state_restore = ref_state_restore,
    .state_export = ref_state_export,
    .state_import = ref_state_import,
    .kv_bytes = ref_kv_bytes,
    .kv_export = ref_kv_export,
    .kv_import = ref_kv_import,
    .stats = ref_stats,
};
