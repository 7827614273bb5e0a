/* Gated DeltaNet (docs/model.md). A row of scratch.proj holds
 *     [conv_dim] q, k, v   [gdn_v_dim] z   [gdn_v_heads] b -> beta   [gdn_v_heads] a -> exp(g)
 * The convolution and the delta rule work in place, key head by key head, each with its two value
 * heads: a thread owns whole key heads, so nothing is shared until the output projection. The delta
 * rule is the recurrent form in decode and prefill alike; half a head's state (32 KiB) stays in the
 * first-level cache while the rows of a chunk pass. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <string.h>

enum { VALUES_PER_KEY = 2, SEGMENTS = 3 };

/* Channels of a key head: its queries, its keys, the values of its two value heads. */
struct segment {
    int32_t at, n;
};
static void head_segments(const struct shape *s, int32_t head, struct segment out[SEGMENTS]) {
    out[0] = (struct segment){head * STATE, STATE};
    out[1] = (struct segment){s->gdn_k_dim + head * STATE, STATE};
    out[2] =
        (struct segment){2 * s->gdn_k_dim + VALUES_PER_KEY * head * STATE, VALUES_PER_KEY * STATE};
}

/* Convolution of one stretch of channels over a run's rows, in place from the last row back: row t
 * needs the inputs t - 3 .. t, and those before the run are the session's. */
static void conv_segment(struct worker *w, int32_t gdn, const struct run *run, struct segment c) {
    const struct backend_model *m = w->m;
    size_t dim = (size_t)model_shape(m)->conv_dim, ld = (size_t)m->proj_width;
    float *past = run->session->conv + (size_t)gdn * (CONV_TAPS - 1) * dim + c.at;
    float *rows = w->x->proj + (size_t)run->first * ld + c.at;
    const float *taps = m->taps + (size_t)gdn * CONV_TAPS * dim + c.at;
    size_t bytes = (size_t)c.n * sizeof(float);
    for (int32_t j = 0; j < CONV_TAPS - 1; j++) { /* the inputs the next step will need */
        int32_t t = run->n - (CONV_TAPS - 1) + j;
        const float *u = t >= 0 ? rows + (size_t)t * ld : past + (size_t)(t + CONV_TAPS - 1) * dim;
        memcpy(w->lane->tail + j * c.n, u, bytes);
    }
    for (int32_t t = run->n - 1; t >= 0; t--) {
        const float *u[CONV_TAPS];
        for (int32_t j = 0; j < CONV_TAPS; j++) {
            int32_t at = t - (CONV_TAPS - 1) + j;
            u[j] = at >= 0 ? rows + (size_t)at * ld : past + (size_t)(at + CONV_TAPS - 1) * dim;
        }
        m->k->conv_silu(u, taps, dim, c.n, rows + (size_t)t * ld);
    }
    for (size_t j = 0; j < CONV_TAPS - 1; j++) {
        memcpy(past + j * dim, w->lane->tail + j * (size_t)c.n, bytes);
    }
}

/* log(1 + e^x); equal to x in float32 from 20 on, where e^x need not be computed. */
static float softplus(float x) {
    return x > 20.0f ? x : log1pf(expf(x));
}

/* beta and exp(g) of the value heads of a key head, and its q and k of unit length, in place. */
static void head_inputs(struct worker *w, int32_t gdn, int32_t layer, int32_t head) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const float *rate = m->decay_rate + (size_t)gdn * (size_t)s->gdn_v_heads;
    const float *dt_bias = m->w->layer[layer].deltanet.dt_bias;
    for (int32_t r = 0; r < w->x->rows; r++) {
        float *row = w->x->proj + (size_t)r * (size_t)m->proj_width;
        m->k->l2_norm(row + head * STATE, STATE, 1e-6f, 0.0883883476483184f); /* 1/sqrt(128) */
        m->k->l2_norm(row + s->gdn_k_dim + head * STATE, STATE, 1e-6f, 1.0f);
        float *b = row + s->conv_dim + s->gdn_v_dim, *a = b + s->gdn_v_heads;
        for (int32_t h = VALUES_PER_KEY * head; h < VALUES_PER_KEY * (head + 1); h++) {
            b[h] = 1.0f / (1.0f + expf(-b[h]));
            a[h] = expf(-rate[h] * softplus(a[h] + dt_bias[h]));
        }
    }
}

/* The delta rule of one value head over a run's rows: half the state at a time. */
static void delta_run(struct worker *w, int32_t gdn, const struct run *run, int32_t value_head) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    int32_t key = value_head / VALUES_PER_KEY * STATE;
    size_t state_at = ((size_t)gdn * (size_t)s->gdn_v_heads + (size_t)value_head) * STATE * STATE;
    for (int32_t half = 0; half < STATE / STATE_HALF; half++) {
        float *state = run->session->state + state_at + (size_t)half * STATE * STATE_HALF;
        int32_t column = value_head * STATE + half * STATE_HALF;
        for (int32_t t = 0; t < run->n; t++) {
            size_t r = (size_t)(run->first + t);
            const float *row = w->x->proj + r * (size_t)m->proj_width;
            const float *q = row + key, *k = row + s->gdn_k_dim + key;
            const float *beta = row + s->conv_dim + s->gdn_v_dim + value_head;
            m->k->delta(state, q, k, row + 2 * s->gdn_k_dim + column, m->k->dot(q, k, STATE),
                        beta[0], beta[s->gdn_v_heads],
                        w->x->mix + r * (size_t)m->mix_width + column);
        }
    }
}

/* Gated norm of a value head in every row, and its two groups quantised for the projection. */
static void gate_head(struct worker *w, int32_t layer, int32_t value_head) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct deltanet_weights *d = &m->w->layer[layer].deltanet;
    size_t group = (size_t)value_head * STATE / GROUP * w->x->mix_q.rows;
    struct qrows q = {w->x->mix_q.q + group * GROUP_BYTES, w->x->mix_q.s + group * 2,
                      w->x->mix_q.rows};
    for (int32_t r = 0; r < w->x->rows; r++) {
        float *o = w->x->mix + (size_t)r * (size_t)m->mix_width + value_head * STATE;
        const float *z =
            w->x->proj + (size_t)r * (size_t)m->proj_width + s->conv_dim + value_head * STATE;
        m->k->gated_norm(o, d->norm, z, STATE, s->norm_eps, o);
        m->k->quantise(o, STATE, &q, (size_t)r);
    }
}

void deltanet(struct worker *w, int32_t layer, const float *in, size_t ldx,
              const struct qrows *in_q) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct deltanet_weights *d = &m->w->layer[layer].deltanet;
    struct scratch *x = w->x;
    size_t ld = (size_t)m->proj_width;
    int32_t gdn = shape_kind_index(s, layer), gates = s->conv_dim + s->gdn_v_dim, begin, end;
    project(w,
            (struct product[]){{&d->in_proj_qkv, x->proj}, {&d->in_proj_z, x->proj + s->conv_dim}},
            2, in_q, x->rows, ld);
    project_float(w,
                  (struct product[]){{&d->in_proj_b, x->proj + gates},
                                     {&d->in_proj_a, x->proj + gates + s->gdn_v_heads}},
                  2, in, ldx, x->rows, ld);
    cpu_pool_barrier(m->pool);

    cpu_pool_part(s->gdn_k_heads, w->thread, w->threads, &begin, &end);
    for (int32_t head = begin; head < end; head++) {
        struct segment segment[SEGMENTS];
        head_segments(s, head, segment);
        for (int32_t i = 0; i < x->n_runs; i++) {
            for (int j = 0; j < SEGMENTS; j++) conv_segment(w, gdn, &x->runs[i], segment[j]);
        }
    }
    trace_rows(w, STAGE_GDN_CONV, layer, x->proj, ld, s->conv_dim);
    for (int32_t head = begin; head < end; head++) {
        head_inputs(w, gdn, layer, head);
        for (int32_t v = VALUES_PER_KEY * head; v < VALUES_PER_KEY * (head + 1); v++) {
            for (int32_t i = 0; i < x->n_runs; i++) delta_run(w, gdn, &x->runs[i], v);
        }
    }
    trace_rows(w, STAGE_GDN_GATES, layer, x->proj + gates, ld, 2 * s->gdn_v_heads);
    trace_rows(w, STAGE_GDN_DELTA, layer, x->mix, (size_t)m->mix_width, s->gdn_v_dim);
    for (int32_t v = VALUES_PER_KEY * begin; v < VALUES_PER_KEY * end; v++) gate_head(w, layer, v);
    trace_rows(w, STAGE_GDN_NORM, layer, x->mix, (size_t)m->mix_width, s->gdn_v_dim);
    if (x->rows == 1) project_fetch(w, (const struct mat *[]){&d->out_proj}, 1);
    cpu_pool_barrier(m->pool);
    project(w, (struct product[]){{&d->out_proj, x->out}}, 1, &x->mix_q, x->rows,
            (size_t)s->hidden);
}
