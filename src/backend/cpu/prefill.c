/* Many rows: a chunk of a prompt, or one token of each of several sessions. Products are matrix
 * times matrix, so the time is that of the arithmetic; rows go to threads by position for norms and
 * routing, by head for mixers, by weight rows for products. */
#include "backend/cpu/cpu.h"

#include <string.h>

void trace_rows(struct worker *w, enum stage stage, int32_t layer, const float *data, size_t ld,
                int32_t n) {
    const struct backend_options *o = &w->m->options;
    if (!o->trace) return;
    cpu_pool_barrier(w->m->pool);
    for (int32_t r = 0; r < w->x->rows && w->thread == 0; r++) {
        o->trace(o->trace_arg, stage, layer, w->x->pos[r], data + (size_t)r * ld, n);
    }
    cpu_pool_barrier(w->m->pool);
}

/* ---- the step -------------------------------------------------------------------------------- */

/* This thread's rows [begin, end): scores of all experts and the shared gate, and the choice. */
static void route(struct worker *w, const struct moe_weights *moe, int32_t begin, int32_t end) {
    const struct shape *s = model_shape(w->m);
    size_t hidden = (size_t)s->hidden, ld = (size_t)s->experts + 1;
    const float *in = w->x->normed + (size_t)begin * hidden;
    float *scores = w->x->scores + (size_t)begin * ld;
    w->m->k->matmul_float(&moe->router, 0, s->experts, in, hidden, end - begin, scores, ld);
    w->m->k->matmul_float(&moe->shared_gate, 0, 1, in, hidden, end - begin, scores + s->experts,
                          ld);
    for (int32_t r = begin; r < end; r++) {
        router_choose(w->x->scores + (size_t)r * ld, s->experts, s->top_k,
                      w->x->routing + (size_t)r * 2 * (size_t)s->top_k);
    }
}

static void layer_rows(struct worker *w, int32_t layer, int32_t begin, int32_t end) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct layer_weights *l = &m->w->layer[layer];
    struct scratch *x = w->x;
    size_t h = (size_t)s->hidden;

    for (int32_t r = begin; r < end; r++) norm_row(w, l->input_norm, r);
    cpu_pool_barrier(m->pool);
    trace_rows(w, STAGE_INPUT_NORM, layer, x->normed, h, s->hidden);
    if (shape_is_attention(s, layer))
        attention(w, layer, &x->normed_q);
    else
        deltanet(w, layer, x->normed, h, &x->normed_q);
    cpu_pool_barrier(m->pool);
    trace_rows(w, STAGE_MIXER_OUT, layer, x->out, h, s->hidden);

    for (int32_t r = begin; r < end; r++) {
        float *row = x->x + (size_t)r * h, *out = x->out + (size_t)r * h;
        for (int32_t i = 0; i < s->hidden; i++) row[i] += out[i];
        norm_row(w, l->post_norm, r);
    }
    if (begin < end) route(w, &l->moe, begin, end);
    cpu_pool_barrier(m->pool);
    trace_rows(w, STAGE_POST_NORM, layer, x->normed, h, s->hidden);
    trace_rows(w, STAGE_ROUTER, layer, x->routing, 2 * (size_t)s->top_k, 2 * s->top_k);
    if (w->thread == 0) router_group(w->m);
    cpu_pool_barrier(m->pool);
    experts_rows(w, layer);
    trace_rows(w, STAGE_EXPERTS, layer, x->out, h, s->hidden);
    trace_rows(w, STAGE_SHARED, layer, x->shared, h, s->hidden);
    trace_rows(w, STAGE_LAYER_OUT, layer, x->x, h, s->hidden);
    cpu_pool_barrier(m->pool);
}

void prefill_rows(void *model, int32_t thread, int32_t threads) {
    struct backend_model *m = model;
    struct worker w = {m, &m->x, &m->x.lane[thread], thread, threads};
    const struct shape *s = model_shape(m);
    int32_t begin, end;
    w.lane->finite = true;
    cpu_pool_part(m->x.rows, thread, threads, &begin, &end);
    for (int32_t r = begin; r < end; r++) {
        embed_row(m, m->x.ids[r], m->x.x + (size_t)r * (size_t)s->hidden);
        rope_angles(m->inv_freq, m->x.pos[r], s->rotary_dim / 2,
                    m->x.rope + (size_t)r * (size_t)s->rotary_dim);
    }
    trace_rows(&w, STAGE_EMBED, -1, m->x.x, (size_t)s->hidden, s->hidden);
    for (int32_t l = 0; l < m->w->layers; l++) layer_rows(&w, l, begin, end);
    head(&w);
}

/* ---- entry points ---------------------------------------------------------------------------- */

/* Adds n tokens of a session to the step in preparation; ids are placed by the caller. */
static void add_run(struct scratch *x, struct backend_session *s, int32_t n) {
    x->runs[x->n_runs++] = (struct run){s, s->position, x->rows, n};
    for (int32_t i = 0; i < n; i++) {
        x->pos[x->rows + i] = s->position + i;
        x->logits[x->rows + i] = NULL;
    }
    x->rows += n;
}

static void want_logits(struct scratch *x, int32_t row, float *out) {
    if (!out) return;
    x->logits[row] = out;
    x->wanted[x->n_wanted++] = row;
}

static void clear_step(struct scratch *x) {
    x->rows = x->n_runs = x->n_wanted = 0;
}

/* Runs the prepared step and advances its sessions. Returns whether all values are finite. */
static bool run_step(struct backend_model *m) {
    struct scratch *x = &m->x;
    cpu_pool_run(m->pool, x->rows == 1 ? decode_row : prefill_rows, m);
    bool finite = true;
    for (int32_t t = 0; t < cpu_pool_threads(m->pool); t++) finite = finite && x->lane[t].finite;
    for (int32_t i = 0; i < x->n_runs; i++) {
        struct backend_session *s = x->runs[i].session;
        s->position += x->runs[i].n;
        s->kv_rows = s->position; /* later rows, if any, belonged to another continuation */
    }
    return finite;
}

/* Whether what a row left behind is finite: asked only after a step that had something else. */
static bool row_finite(const struct backend_model *m, int32_t row) {
    const struct shape *s = model_shape(m);
    const struct scratch *x = &m->x;
    return m->k->all_finite(x->x + (size_t)row * (size_t)s->hidden, s->hidden) &&
           (!x->logits[row] || m->k->all_finite(x->logits[row], s->vocab));
}

static int check_idle(const struct backend_model *m, lily_err *err) {
    if (!m->pending) return LILY_OK;
    return ERR(err, LILY_EBUSY, "decode: found a step in flight, expected none; wait for it");
}

static int32_t smaller(int32_t a, int32_t b) {
    return a < b ? a : b;
}

/* One chunk, ending on the grid of state checkpoints unless the prompt ends before. */
int cpu_prefill(struct backend_session *s, struct prefill_step *step, lily_err *err) {
    struct backend_model *m = s->model;
    struct scratch *x = &m->x;
    step->done = 0;
    if (step->n < 1) {
        return ERR(err, LILY_EINVAL, "prefill: found %d tokens, expected at least 1", step->n);
    }
    int rc = check_idle(m, err);
    if (rc == LILY_OK) rc = backend_check_room(s->position, s->context, err);
    int32_t n = smaller(step->n, smaller(CHUNK - s->position % BACKEND_GRID, m->rows));
    n = smaller(n, s->context - s->position);
    for (int32_t i = 0; i < n && rc == LILY_OK; i++)
        rc = backend_check_token(model_shape(m), step->ids[i], err);
    if (rc != LILY_OK) return rc;

    clear_step(x);
    add_run(x, s, n);
    memcpy(x->ids, step->ids, (size_t)n * sizeof *x->ids);
    size_t vocab = (size_t)model_shape(m)->vocab;
    float *last = n == step->n ? step->logits : NULL;
    if (step->all_logits) {
        for (int32_t i = 0; i < n; i++) want_logits(x, i, step->all_logits + (size_t)i * vocab);
    } else {
        want_logits(x, n - 1, last);
    }
    if (!run_step(m)) {
        return ERR(err, LILY_ENUMERIC,
                   "positions %d to %d: found non-finite values in the %s, expected finite "
                   "numbers; reset the session, and check the checkpoint if this repeats",
                   x->pos[0], x->pos[n - 1], x->n_wanted ? "logits" : "hidden state");
    }
    if (last && step->all_logits) memcpy(last, x->logits[n - 1], vocab * sizeof *last);
    step->done = n;
    return LILY_OK;
}

static bool distinct(const struct decode_slot *slots, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            if (slots[i].session == slots[j].session) return false;
        }
    }
    return true;
}

/* The step runs here; wait only hands over. One step in flight, and the host samples. */
int cpu_decode_submit(struct backend_model *m, const struct decode_slot *slots, int32_t n,
                      lily_err *err) {
    struct scratch *x = &m->x;
    if (n < 1 || n > m->options.max_sessions || !distinct(slots, n)) {
        return ERR(err, LILY_EINVAL, "decode: found %d slots, expected 1 to %d distinct sessions",
                   n, m->options.max_sessions);
    }
    int rc = check_idle(m, err);
    for (int32_t i = 0; i < n && rc == LILY_OK; i++) {
        rc = backend_check_token(model_shape(m), slots[i].token, err);
        if (rc == LILY_OK)
            rc = backend_check_room(slots[i].session->position, slots[i].session->context, err);
        if (rc == LILY_OK && slots[i].sampling) {
            rc = ERR(err, LILY_EINVAL,
                     "decode: found sampling, which this backend leaves to the "
                     "host; ask for logits");
        }
    }
    if (rc != LILY_OK) return rc;
    clear_step(x);
    for (int32_t i = 0; i < n; i++) {
        x->ids[i] = slots[i].token;
        add_run(x, slots[i].session, 1);
        want_logits(x, i, slots[i].logits);
    }
    bool finite = run_step(m);
    for (int32_t i = 0; i < n; i++) x->finite[i] = finite || row_finite(m, i);
    m->pending = n;
    return LILY_OK;
}

int cpu_decode_wait(struct backend_model *m, struct decode_result *results, int32_t n,
                    lily_err *err) {
    if (n < 1 || n != m->pending) {
        return ERR(err, LILY_EINVAL, "decode: found a wait for %d slots, expected %d as submitted",
                   n, m->pending);
    }
    m->pending = 0;
    for (int32_t i = 0; i < n; i++) {
        results[i] = (struct decode_result){.token = -1, .finite = m->x.finite[i]};
    }
    return LILY_OK;
}
