/* Stage outputs for tests: the recorded graph runs in pieces, cut where the recorders put a mark,
 * and after each piece what it computed is read back and reported row by row. Where the GPU keeps a
 * stage in another form (unmerged partial results, a norm not yet applied) the last step is taken
 * here. Stages that exist only in registers are not reported, nor is the convolution, whose result
 * is stored with queries and keys already of unit length. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/encode.h"
#include "backend/metal/metal.h"
#include "base/bf16.h"

struct metal_trace_state {
    float *before; /* [rows][H] the residual stream before the mixer */
    float *row;    /* [largest row but logits] */
};

struct reader { /* of the piece that has just run */
    struct backend_model *m;
    const struct shape *s;
    const struct metal_view *v;
    int32_t rows;
    bool prefill;
    int32_t layer;
};

int metal_trace_new(struct backend_model *m, lily_err *err) {
    const struct shape *s = m->layout.shape;
    size_t hidden = (size_t)s->hidden, widest = (size_t)(s->conv_dim + 2 * s->q_dim) + hidden;
    m->trace = calloc(1, sizeof *m->trace);
    if (m->trace) {
        m->trace->before = calloc((size_t)m->layout.rows * hidden, sizeof(float));
        m->trace->row = calloc(widest, sizeof(float));
    }
    if (m->trace && m->trace->before && m->trace->row) return LILY_OK;
    metal_trace_free(m);
    return ERR_NOMEM(err, "Metal trace");
}

void metal_trace_free(struct backend_model *m) {
    if (!m->trace) return;
    free(m->trace->before);
    free(m->trace->row);
    free(m->trace);
    m->trace = NULL;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void report(const struct reader *r, enum stage stage, int32_t row, const float *data,
                   int32_t n) {
    const struct backend_options *o = &r->m->options;
    o->trace(o->trace_arg, stage, r->layer, r->v->position + row, data, n);
}

static const void *bytes_of(const struct reader *r, int32_t buffer) {
    return buffers_contents(&r->m->buffers, buffer);
}

/* [rows][n] float32 as they lie. */
static void floats(const struct reader *r, enum stage stage, int32_t buffer, int32_t n) {
    const float *data = bytes_of(r, buffer);
    for (int32_t i = 0; i < r->rows; i++) report(r, stage, i, data + (size_t)i * (size_t)n, n);
}

static void widen(const uint16_t *from, int32_t n, float scale, float *to) {
    for (int32_t i = 0; i < n; i++) to[i] = bf16_to_f32(from[i]) * scale;
}

/* [rows][n] bfloat16. */
static void halves(const struct reader *r, enum stage stage, int32_t buffer, int32_t n) {
    const uint16_t *data = bytes_of(r, buffer);
    for (int32_t i = 0; i < r->rows; i++) {
        widen(data + (size_t)i * (size_t)n, n, 1, r->m->trace->row);
        report(r, stage, i, r->m->trace->row, n);
    }
}

static const float *residual(const struct reader *r) {
    return bytes_of(r, r->prefill ? METAL_P_H : METAL_H);
}

static void remember_residual(const struct reader *r) {
    memcpy(r->m->trace->before, residual(r),
           (size_t)r->rows * (size_t)r->s->hidden * sizeof(float));
}

static void mixer_out(const struct reader *r) {
    int32_t n = r->s->hidden;
    const float *h = residual(r), *before = r->m->trace->before;
    for (int32_t i = 0; i < r->rows; i++, h += n, before += n) {
        for (int32_t j = 0; j < n; j++) r->m->trace->row[j] = h[j] - before[j];
        report(r, STAGE_MIXER_OUT, i, r->m->trace->row, n);
    }
}

/* The rows' keys and values from the cache of the layer. */
static void cache_rows(const struct reader *r) {
    const struct shape *s = r->s;
    const uint16_t *keys = bytes_of(r, view_kv(r->v, s, r->layer));
    const uint16_t *values = keys + (size_t)r->v->context * (size_t)s->kv_dim;
    for (int32_t i = 0; i < r->rows; i++) {
        size_t at = (size_t)(r->v->position + i) * (size_t)s->kv_dim;
        widen(keys + at, s->kv_dim, 1, r->m->trace->row);
        report(r, STAGE_ATTN_K, i, r->m->trace->row, s->kv_dim);
        widen(values + at, s->kv_dim, 1, r->m->trace->row);
        report(r, STAGE_ATTN_V, i, r->m->trace->row, s->kv_dim);
    }
}

/* ---- decode: one row ------------------------------------------------------------------------- */

static void decode_gdn_norm(const struct reader *r) {
    const struct shape *s = r->s;
    const float *gated = bytes_of(r, METAL_GATED), *squares = bytes_of(r, METAL_SQUARES);
    int32_t n = s->gdn_head_dim;
    for (int32_t h = 0; h < s->gdn_v_heads; h++) {
        const float *q = squares + 4 * h;
        float mean = (q[0] + q[1] + q[2] + q[3]) / (float)n;
        float scale = 1.0f / sqrtf(mean + s->norm_eps);
        for (int32_t d = 0; d < n; d++) r->m->trace->row[h * n + d] = gated[h * n + d] * scale;
    }
    report(r, STAGE_GDN_NORM, 0, r->m->trace->row, s->gdn_v_dim);
}

static void decode_attention(const struct reader *r) {
    const struct shape *s = r->s;
    const float *partial = bytes_of(r, METAL_PARTIAL), *stats = bytes_of(r, METAL_STATS);
    struct decode_attn_args args;
    decode_attn_layout((uint32_t)r->v->position, &args);
    for (int32_t i = 0; i < s->q_dim; i++) {
        int32_t head = i / s->head_dim;
        float top = -INFINITY, sum = 0, total = 0;
        for (uint32_t b = 0; b < args.blocks; b++) {
            top = fmaxf(top, stats[(b * (uint32_t)s->q_heads + (uint32_t)head) * 2]);
        }
        for (uint32_t b = 0; b < args.blocks; b++) {
            const float *stat = &stats[(b * (uint32_t)s->q_heads + (uint32_t)head) * 2];
            float weight = expf(stat[0] - top);
            sum += stat[1] * weight;
            total += partial[(size_t)b * (size_t)s->q_dim + (size_t)i] * weight;
        }
        r->m->trace->row[i] = total / sum;
    }
    report(r, STAGE_ATTN_MIX, 0, r->m->trace->row, s->q_dim);
}

/* The eight largest logits by descending value, ties to the lower id, and their softmax. */
static void decode_router(const struct reader *r) {
    const struct shape *s = r->s;
    const float *logits = bytes_of(r, METAL_ROUTER_LOGITS);
    float *row = r->m->trace->row, sum = 0;
    floats(r, STAGE_POST_NORM, METAL_X, s->hidden);
    for (int32_t k = 0; k < s->top_k; k++) {
        int32_t best = -1;
        for (int32_t e = 0; e < s->experts; e++) {
            bool taken = false;
            for (int32_t j = 0; j < k; j++) taken = taken || (int32_t)row[j] == e;
            if (!taken && (best < 0 || logits[e] > logits[best])) best = e;
        }
        row[k] = (float)best;
        row[s->top_k + k] = expf(logits[best] - logits[(int32_t)row[0]]);
        sum += row[s->top_k + k];
    }
    for (int32_t k = 0; k < s->top_k; k++) row[s->top_k + k] /= sum;
    report(r, STAGE_ROUTER, 0, row, 2 * s->top_k);
}

static void read_decode(const struct reader *r, enum metal_trace what) {
    switch (what) {
    case TRACE_EMBED:
        floats(r, STAGE_EMBED, METAL_H, r->s->hidden);
        break;
    case TRACE_GDN_NORM:
        decode_gdn_norm(r);
        break;
    case TRACE_ATTN:
        cache_rows(r);
        decode_attention(r);
        break;
    case TRACE_MIXER:
        mixer_out(r);
        break;
    case TRACE_ROUTER:
        decode_router(r);
        break;
    case TRACE_LAYER:
        floats(r, STAGE_LAYER_OUT, METAL_H, r->s->hidden);
        break;
    default:
        break;
    }
}

/* ---- prefill: many rows ---------------------------------------------------------------------- */

/* bf16 [rows][kv_heads][256][8 heads], or for tensor operations [kv_heads][rows][8 heads][256],
 * divided by 16. */
static void prefill_queries(const struct reader *r) {
    const struct shape *s = r->s;
    const uint16_t *query = bytes_of(r, METAL_P_QUERY);
    for (int32_t i = 0; i < r->rows; i++) {
        for (int32_t j = 0; j < s->q_dim; j++) {
            int32_t head = j / s->head_dim, d = j % s->head_dim;
            int32_t at = r->m->tensor_attention
                             ? ((head / 8 * r->rows + i) * 8 + head % 8) * s->head_dim + d
                             : i * s->q_dim + (head / 8 * s->head_dim + d) * 8 + head % 8;
            r->m->trace->row[j] = bf16_to_f32(query[at]) * 16;
        }
        report(r, STAGE_ATTN_Q, i, r->m->trace->row, s->q_dim);
    }
}

static void prefill_router(const struct reader *r) {
    int32_t k = r->s->top_k;
    const uint16_t *ids = bytes_of(r, METAL_P_EXPERT_IDS);
    const float *weights = bytes_of(r, METAL_P_WEIGHTS);
    for (int32_t i = 0; i < r->rows; i++) {
        for (int32_t j = 0; j < k; j++) {
            r->m->trace->row[j] = (float)ids[i * k + j];
            r->m->trace->row[k + j] = weights[i * k + j];
        }
        report(r, STAGE_ROUTER, i, r->m->trace->row, 2 * k);
    }
}

static void prefill_experts(const struct reader *r) {
    int32_t k = r->s->top_k, h = r->s->hidden;
    const uint16_t *pairs = bytes_of(r, METAL_P_PAIRS), *shared = bytes_of(r, METAL_P_SHARED);
    const float *gate = bytes_of(r, METAL_P_GATE);
    float *row = r->m->trace->row;
    for (int32_t i = 0; i < r->rows; i++, shared += h) {
        memset(row, 0, (size_t)h * sizeof *row);
        for (int32_t j = 0; j < k; j++, pairs += h) {
            for (int32_t d = 0; d < h; d++) row[d] += bf16_to_f32(pairs[d]);
        }
        report(r, STAGE_EXPERTS, i, row, h);
        widen(shared, h, gate[i], row);
        report(r, STAGE_SHARED, i, row, h);
    }
}

static void prefill_layer(struct reader *r) {
    floats(r, STAGE_LAYER_OUT, METAL_P_H, r->s->hidden);
    r->layer++;
    if (r->layer < r->m->layout.layers) halves(r, STAGE_INPUT_NORM, METAL_P_X, r->s->hidden);
}

static void read_prefill(struct reader *r, enum metal_trace what) {
    const struct shape *s = r->s;
    switch (what) {
    case TRACE_EMBED:
        floats(r, STAGE_EMBED, METAL_P_H, s->hidden);
        break;
    case TRACE_IN_NORM:
        halves(r, STAGE_INPUT_NORM, METAL_P_X, s->hidden);
        break;
    case TRACE_GDN_CONV:
        floats(r, STAGE_GDN_GATES, METAL_P_GATES, 2 * s->gdn_v_heads);
        break;
    case TRACE_GDN_DELTA:
        floats(r, STAGE_GDN_DELTA, METAL_P_DELTA, s->gdn_v_dim);
        break;
    case TRACE_GDN_NORM:
        halves(r, STAGE_GDN_NORM, METAL_P_MIX, s->gdn_v_dim);
        break;
    case TRACE_ATTN_PREP:
        prefill_queries(r);
        cache_rows(r);
        break;
    case TRACE_ATTN:
        halves(r, STAGE_ATTN_MIX, METAL_P_MIX, s->q_dim);
        break;
    case TRACE_MIXER:
        mixer_out(r);
        break;
    case TRACE_POST_NORM:
        halves(r, STAGE_POST_NORM, METAL_P_X, s->hidden);
        break;
    case TRACE_ROUTER:
        prefill_router(r);
        break;
    case TRACE_EXPERTS:
        prefill_experts(r);
        break;
    case TRACE_LAYER:
        prefill_layer(r);
        break;
    default:
        break;
    }
}

/* ---- running --------------------------------------------------------------------------------- */

static void logits_out(const struct reader *r, int32_t set) {
    const float *logits = bytes_of(r, METAL_LOGITS_0 + set);
    size_t vocab = (size_t)r->s->vocab;
    report(r, STAGE_LOGITS, r->rows - 1, logits + (size_t)r->v->slot * vocab, r->s->vocab);
}

int metal_trace_run(struct backend_model *m, const struct metal_view *view, int32_t rows,
                    bool prefill, int32_t result_set, lily_err *err) {
    const struct graph *g = m->graph;
    double seconds;
    int rc = LILY_OK;
    for (int32_t from = 0, to; from < g->dispatches && rc == LILY_OK; from = to) {
        int32_t mark = g->dispatch[from].mark;
        for (to = from; to < g->dispatches && g->dispatch[to].mark == mark;) to++;
        struct reader r = {m, m->layout.shape, view, rows, prefill, trace_layer(mark)};
        m->trace_mark = mark;
        rc = metal_run(&m->device, "traced piece", g, from, to, m->buffers.buffer, &seconds, err);
        if (rc != LILY_OK) break;
        if (trace_what(mark) == TRACE_LOGITS) {
            logits_out(&r, result_set);
        } else if (prefill) {
            read_prefill(&r, trace_what(mark));
        } else {
            read_decode(&r, trace_what(mark));
        }
        if (trace_what(mark) == TRACE_EMBED || trace_what(mark) == TRACE_LAYER) {
            remember_residual(&r);
        }
    }
    return rc;
}
