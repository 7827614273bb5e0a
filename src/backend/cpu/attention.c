/* Gated full attention (docs/model.md). A row of scratch.proj holds
 *     [q_heads][query HEAD, gate HEAD]   [kv_dim] keys   [kv_dim] values
 * Queries go, normed and turned, to scratch.mix, where attention's result replaces them head by
 * head. Keys and values are kept as bfloat16.
 *
 * The softmax over the past is made of partial results over spans of 512 positions on the absolute
 * grid, joined in ascending order, in decode and prefill alike: decode gives the spans of a row to
 * different threads, prefill gives them tiles of rows. The eight query heads of a key/value head
 * share every row of it they load. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <string.h>

#include "base/bf16.h"

/* Norms and turns the heads of one row and stores its keys and values. */
static void prepare_row(struct worker *w, int32_t layer, struct backend_session *session,
                        int32_t pos, int32_t row) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct attention_weights *a = &m->w->layer[layer].attention;
    float *proj = w->x->proj + (size_t)row * (size_t)m->proj_width;
    float *query = w->x->mix + (size_t)row * (size_t)m->mix_width;
    const float *angles = w->x->rope + (size_t)row * (size_t)s->rotary_dim;
    int32_t half = s->rotary_dim / 2, n = layer / s->attention_every;
    for (int32_t h = 0; h < s->q_heads; h++) {
        m->k->rms_norm(proj + 2 * HEAD * h, a->q_norm, HEAD, s->norm_eps, query + HEAD * h);
        rope_turn(query + HEAD * h, angles, half);
    }
    for (int32_t h = 0; h < s->kv_heads; h++) {
        float *key = proj + 2 * s->q_dim + HEAD * h;
        const float *value = proj + 2 * s->q_dim + s->kv_dim + HEAD * h;
        m->k->rms_norm(key, a->k_norm, HEAD, s->norm_eps, key);
        rope_turn(key, angles, half);
        uint16_t *keys = session_keys(session, n, h) + key_at(pos);
        uint16_t *values = session_values(session, n, h) + value_at(pos);
        for (int d = 0; d < HEAD; d++) {
            keys[d * KEY_BLOCK] = f32_to_bf16(key[d]);
            values[d / VALUE_LANE * VALUE_BLOCK * VALUE_LANE + d % VALUE_LANE] =
                f32_to_bf16(value[d]);
        }
    }
}

/* Joins the result of the next span to the running one. */
static void join(struct attend *all, const struct attend *span) {
    for (int h = 0; h < KV_GROUP; h++) {
        float top = all->max[h] > span->max[h] ? all->max[h] : span->max[h];
        float keep = expf(all->max[h] - top), add = expf(span->max[h] - top);
        all->max[h] = top;
        all->sum[h] = all->sum[h] * keep + span->sum[h] * add;
        for (int d = 0; d < HEAD; d++) {
            all->out[h][d] = all->out[h][d] * keep + span->out[h][d] * add;
        }
    }
}

static void start(struct attend *all) {
    memset(all, 0, sizeof *all);
    for (int h = 0; h < KV_GROUP; h++) all->max[h] = -INFINITY;
}

/* Partial result of one row over the positions it sees in span number `span`. */
static void attend_span(struct worker *w, int32_t layer, const struct backend_session *session,
                        int32_t pos, int32_t row, int32_t kv_head, int32_t span,
                        struct attend *out) {
    const struct backend_model *m = w->m;
    const float *query = w->x->mix + (size_t)row * (size_t)m->mix_width + kv_head * KV_GROUP * HEAD;
    for (int i = 0; i < KV_GROUP * HEAD; i++) w->lane->queries[i] = query[i] * 0.0625f;
    int32_t n = layer / model_shape(m)->attention_every, seen = pos + 1 - span * SPAN;
    size_t at = (size_t)span * SPAN * HEAD;
    m->k->attend(w->lane->queries, session_keys(session, n, kv_head) + at,
                 session_values(session, n, kv_head) + at, seen < SPAN ? seen : SPAN,
                 w->lane->scores, out);
}

/* Divides by the softmax's sum, applies the output gate, quantises the four groups of each head. */
static void finish_head(struct worker *w, const struct attend *all, int32_t row, int32_t kv_head) {
    const struct backend_model *m = w->m;
    const float *proj = w->x->proj + (size_t)row * (size_t)m->proj_width;
    for (int h = 0; h < KV_GROUP; h++) {
        int32_t head = kv_head * KV_GROUP + h;
        float *out = w->x->mix + (size_t)row * (size_t)m->mix_width + head * HEAD;
        for (int d = 0; d < HEAD; d++) out[d] = all->out[h][d] / all->sum[h];
        m->k->sigmoid_mul(out, proj + 2 * HEAD * head + HEAD, HEAD, out);
        size_t group = (size_t)head * HEAD / GROUP * w->x->mix_q.rows;
        struct qrows q = {w->x->mix_q.q + group * GROUP_BYTES, w->x->mix_q.s + group * 2,
                          w->x->mix_q.rows};
        m->k->quantise(out, HEAD, &q, (size_t)row);
    }
}

/* One row: the spans of each key/value head over the threads, then the heads. */
static void attend_row(struct worker *w, int32_t layer) {
    const struct backend_model *m = w->m;
    const struct run *run = w->x->runs;
    int32_t kv_heads = model_shape(m)->kv_heads, spans = run->pos / SPAN + 1, begin, end;
    cpu_pool_part(kv_heads * spans, w->thread, w->threads, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        struct attend *out = w->x->spans + (size_t)(i / spans) * (size_t)m->spans + i % spans;
        attend_span(w, layer, run->session, run->pos, 0, i / spans, i % spans, out);
    }
    cpu_pool_barrier(m->pool);
    cpu_pool_part(kv_heads, w->thread, w->threads, &begin, &end);
    for (int32_t h = begin; h < end; h++) {
        struct attend *all = w->lane->running;
        start(all);
        for (int32_t i = 0; i < spans; i++) {
            join(all, w->x->spans + (size_t)h * (size_t)m->spans + i);
        }
        finish_head(w, all, 0, h);
    }
}

/* Rows [first, first + n) of a run for one key/value head: every span is read once per tile. */
static void attend_tile(struct worker *w, int32_t layer, const struct run *run, int32_t first,
                        int32_t n, int32_t kv_head) {
    struct attend *running = w->lane->running;
    for (int32_t i = 0; i < n; i++) start(&running[i]);
    int32_t last = run->pos + first + n - 1;
    for (int32_t span = 0; span * SPAN <= last; span++) {
        for (int32_t i = 0; i < n; i++) {
            int32_t pos = run->pos + first + i;
            if (pos < span * SPAN) continue;
            attend_span(w, layer, run->session, pos, run->first + first + i, kv_head, span,
                        w->lane->partial);
            join(&running[i], w->lane->partial);
        }
    }
    for (int32_t i = 0; i < n; i++) finish_head(w, &running[i], run->first + first + i, kv_head);
}

/* Tiles are dealt out in turn, because later rows see more. */
static void attend_rows(struct worker *w, int32_t layer) {
    int32_t task = 0;
    for (int32_t i = 0; i < w->x->n_runs; i++) {
        const struct run *run = &w->x->runs[i];
        for (int32_t first = 0; first < run->n; first += QUERY_TILE) {
            int32_t n = run->n - first < QUERY_TILE ? run->n - first : QUERY_TILE;
            for (int32_t h = 0; h < model_shape(w->m)->kv_heads; h++, task++) {
                if (task % w->threads == w->thread) attend_tile(w, layer, run, first, n, h);
            }
        }
    }
}

/* This thread's rows of the step, each with its session and position. */
static void prepare_rows(struct worker *w, int32_t layer) {
    int32_t begin, end;
    cpu_pool_part(w->x->rows, w->thread, w->threads, &begin, &end);
    for (int32_t i = 0; i < w->x->n_runs; i++) {
        const struct run *run = &w->x->runs[i];
        for (int32_t t = 0; t < run->n; t++) {
            int32_t row = run->first + t;
            if (row >= begin && row < end) {
                prepare_row(w, layer, run->session, run->pos + t, row);
            }
        }
    }
}

void attention(struct worker *w, int32_t layer, const struct qrows *in) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct attention_weights *a = &m->w->layer[layer].attention;
    struct scratch *x = w->x;
    size_t ld = (size_t)m->proj_width;
    float *keys = x->proj + 2 * s->q_dim, *values = keys + s->kv_dim;
    project(w, (struct product[]){{&a->q_proj, x->proj}, {&a->k_proj, keys}, {&a->v_proj, values}},
            3, in, x->rows, ld);
    cpu_pool_barrier(m->pool);
    prepare_rows(w, layer);
    trace_rows(w, STAGE_ATTN_Q, layer, x->mix, (size_t)m->mix_width, s->q_dim);
    trace_rows(w, STAGE_ATTN_K, layer, keys, ld, s->kv_dim);
    trace_rows(w, STAGE_ATTN_V, layer, values, ld, s->kv_dim);
    cpu_pool_barrier(m->pool);
    if (x->rows == 1)
        attend_row(w, layer);
    else
        attend_rows(w, layer);
    trace_rows(w, STAGE_ATTN_MIX, layer, x->mix, (size_t)m->mix_width, s->q_dim);
    if (x->rows == 1) project_fetch(w, (const struct mat *[]){&a->o_proj}, 1);
    cpu_pool_barrier(m->pool);
    project(w, (struct product[]){{&a->o_proj, x->out}}, 1, &x->mix_q, x->rows, (size_t)s->hidden);
}
