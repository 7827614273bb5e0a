/* What a step costs, without a device or a checkpoint: a model of the published widths (4 bits,
 * router and shared gate 8) is opened on a driver that only counts (record.c), and takes the step.
 * Launches, barriers and waits are therefore those of the code that runs on a 9.0 with 132
 * multiprocessors; bytes of weights follow from how the matrices lie there. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/kernels/tile.h"

/* ---- a model without values ------------------------------------------------------------------ */

static struct mat sized(int32_t rows, int32_t cols, int32_t bits) {
    return (struct mat){.rows = rows, .cols = cols, .bits = bits};
}

/* experts: [2 E], the first half those that read the residual stream. */
static void size_layer(const struct shape *s, struct layer_weights *l, const struct mat *experts) {
    int32_t h = s->hidden, e = s->experts;
    l->attention = (struct attention_weights){.q_proj = sized(2 * s->q_dim, h, 4),
                                              .k_proj = sized(s->kv_dim, h, 4),
                                              .v_proj = sized(s->kv_dim, h, 4),
                                              .o_proj = sized(h, s->q_dim, 4)};
    l->deltanet = (struct deltanet_weights){.in_proj_qkv = sized(s->conv_dim, h, 4),
                                            .in_proj_z = sized(s->gdn_v_dim, h, 4),
                                            .in_proj_b = sized(s->gdn_v_heads, h, 4),
                                            .in_proj_a = sized(s->gdn_v_heads, h, 4),
                                            .out_proj = sized(h, s->gdn_v_dim, 4)};
    l->moe = (struct moe_weights){.router = sized(e, h, 8),
                                  .gate = experts,
                                  .up = experts,
                                  .down = experts + e,
                                  .shared_gate_proj = sized(s->shared_width, h, 4),
                                  .shared_up_proj = sized(s->shared_width, h, 4),
                                  .shared_down_proj = sized(h, s->shared_width, 4),
                                  .shared_gate = sized(1, h, 8)};
}

int cuda_sized_weights(const struct shape *s, int32_t layers, struct weights *out, lily_err *err) {
    size_t e = (size_t)s->experts;
    struct mat *experts = calloc(2 * e, sizeof *experts);
    struct layer_weights *layer = calloc((size_t)layers, sizeof *layer);
    if (!experts || !layer) {
        free(experts);
        free(layer);
        return ERR_NOMEM(err, "plan");
    }
    for (size_t i = 0; i < e; i++) {
        experts[i] = sized(s->expert_width, s->hidden, 4);
        experts[e + i] = sized(s->hidden, s->expert_width, 4);
    }
    for (int32_t l = 0; l < layers; l++) size_layer(s, &layer[l], experts);
    *out = (struct weights){.shape = s,
                            .layers = layers,
                            .embed = sized(s->vocab, s->hidden, 4),
                            .lm_head = sized(s->vocab, s->hidden, 4),
                            .vocab_used = s->vocab,
                            .layer = layer};
    return LILY_OK;
}

void cuda_sized_weights_free(struct weights *w) {
    if (w->layer) free((struct mat *)w->layer[0].moe.gate);
    free(w->layer);
}

/* Everything but the upload, as cuda_open does it on an H200. */
int cuda_open_recorded(const struct weights *w, const struct backend_options *options,
                       const struct cuda_driver *d, struct backend_model **out, lily_err *err) {
    struct backend_model *m = calloc(1, sizeof *m);
    *out = m;
    if (!m) return ERR_NOMEM(err, "plan");
    m->w = w;
    m->d = d;
    m->options = *options;
    m->capability = 90;
    m->processors = 132;
    m->shared_limit = 227 * 1024;
    cuda_set_sizes(m);
    int rc = cuda_check(d, d->context_retain(&m->context, 0), "plan", err);
    if (rc == LILY_OK) rc = cuda_weights_plan(m, err);
    if (rc == LILY_OK) rc = cuda_modules_any(&m->modules, err);
    if (rc == LILY_OK) rc = cuda_portable_open(m, err);
    if (rc == LILY_OK) rc = cuda_open_prompts(m, err);
    if (rc == LILY_OK) rc = cuda_allocate(m, err);
    return rc == LILY_OK ? cuda_open_paths(m, err) : rc;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

/* As it lies in device memory, rows missing in a last tile included. */
static uint64_t mat_bytes(struct cuda_mat m) {
    uint64_t rows = (uint64_t)m.rows, cols = (uint64_t)m.cols;
    switch ((enum cuda_layout)m.layout) {
    case CUDA_WIDE:
        return (rows + TILE_WIDE_ROWS - 1) / TILE_WIDE_ROWS * (cols / TILE_WIDE_COLS) *
               TILE_WIDE_BYTES;
    case CUDA_DOWN:
        return (rows + TILE_DOWN_ROWS - 1) / TILE_DOWN_ROWS * (cols / TILE_DOWN_COLS) *
               TILE_DOWN_BYTES;
    case CUDA_BYTE:
        return (rows + TILE_BYTE_ROWS - 1) / TILE_BYTE_ROWS * (cols / TILE_BYTE_COLS) *
               TILE_BYTE_BYTES;
    case CUDA_PLANAR:
        break;
    }
    return rows * cols * (uint64_t)m.bits / 8 + rows * cols / 64 * 4;
}

/* Experts that n tokens are expected to choose when the router has no favourites. */
static double distinct_experts(const struct shape *s, int32_t n) {
    double miss = 1.0 - (double)s->top_k / (double)s->experts;
    return n == 1 ? s->top_k : (double)s->experts * (1.0 - pow(miss, n));
}

/* Unique bytes of weights of a layer, and what its stages hand to each other for n rows. */
static void add_layer(const struct backend_model *m, int32_t l, int32_t n, struct backend_plan *p) {
    const struct shape *s = model_shape(m);
    const struct cuda_layer *w = &m->dw.layer[l];
    uint64_t all = mat_bytes(w->gate) + mat_bytes(w->up) + mat_bytes(w->down), f = sizeof(float);
    double share = distinct_experts(s, n) / (double)s->experts;
    bool full = shape_is_attention(s, l);
    uint64_t weights = mat_bytes(w->router) + mat_bytes(w->shared_gate) + mat_bytes(w->shared_up) +
                       mat_bytes(w->shared_down) + (uint64_t)((double)all * share);
    weights += full ? mat_bytes(w->qkv) + mat_bytes(w->o)
                    : mat_bytes(w->qkvz) + mat_bytes(w->ba) + mat_bytes(w->out);
    /* Norms, and the convolution, decay and gate of the recurrent layers, in float32. */
    weights += f * (uint64_t)(2 * s->hidden + (full ? 2 * s->head_dim
                                                    : s->conv_taps * s->conv_dim +
                                                          2 * s->gdn_v_heads + s->gdn_head_dim));
    uint64_t h = (uint64_t)s->hidden;
    uint64_t width = (uint64_t)(full ? w->qkv.rows : w->qkvz.rows + w->ba.rows);
    uint64_t mix = (uint64_t)(full ? 2 * s->q_dim : s->conv_dim + 2 * s->gdn_v_dim);
    uint64_t inner =
        (uint64_t)(s->top_k + 1) * (uint64_t)(s->expert_width) + (uint64_t)(s->top_k + 1) * h;
    /* Each value is written by one stage and read by the next; the residual stream by both norms.
     */
    uint64_t values = (uint64_t)n * (width + mix + inner + 5 * h + (uint64_t)s->experts);
    p->weight_bytes += weights;
    p->read_bytes += weights + values * f;
    p->written_bytes += values * f;
    if (full) p->written_bytes += (uint64_t)n * 4 * (uint64_t)s->kv_dim;
}

/* Of the head, with the final norm. */
static uint64_t head_bytes(const struct backend_model *m) {
    return mat_bytes(m->dw.lm_head) + sizeof(float) * (uint64_t)model_shape(m)->hidden;
}

void cuda_step_bytes(const struct backend_model *m, const struct plan_query *q, int32_t passes,
                     struct backend_plan *p) {
    const struct shape *s = model_shape(m);
    int32_t sessions = q->sessions > 1 ? q->sessions : 1, rows = q->tokens * sessions;
    uint64_t n = (uint64_t)rows, h = (uint64_t)s->hidden, f = sizeof(float);
    for (int32_t l = 0; l < m->w->layers; l++) {
        add_layer(m, l, rows, p);
        /* Made of weights when the model was opened; one token reads it beside them. */
        if (rows == 1 && m->decode) p->read_bytes += cuda_decode_score_bytes(m, l);
    }
    struct cuda_mat row = m->dw.embed;
    row.rows = 1;
    uint64_t embed = mat_bytes(row) * n, head = head_bytes(m);
    p->weight_bytes += head + embed;
    p->state_bytes = (uint64_t)sessions * cuda_state_bytes(m);
    p->kv_bytes = (uint64_t)sessions * cuda_kv_bytes(m, 1) * (uint64_t)(q->depth + q->tokens);
    p->read_bytes += head + embed + p->state_bytes + p->kv_bytes * (uint64_t)passes + n * h * f;
    uint64_t logits = (uint64_t)sessions * (uint64_t)s->vocab;
    p->written_bytes += p->state_bytes + logits * f + n * h * f;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* A token in the middle of an answer, the likeliest one: twice, since a step's barriers show in
 * where the next one begins. */
static int record_token(struct backend_model *m, struct backend_session **s, int32_t n,
                        struct cuda_record *r, lily_err *err) {
    static const struct backend_sampling greedy = {.top_p = 1, .repetition = 1};
    struct decode_slot slots[CUDA_MOST_SESSIONS];
    struct decode_result results[CUDA_MOST_SESSIONS];
    int rc = LILY_OK;
    for (int32_t i = 0; i < n; i++) {
        slots[i] = (struct decode_slot){.session = s[i], .sampling = &greedy};
    }
    for (int time = 0; time < 2 && rc == LILY_OK; time++) {
        r->launches = r->waits = r->steps = 0;
        rc = cuda_decode_submit(m, slots, n, err);
        int32_t waits = r->waits; /* for the results the host waits behind the next step */
        if (rc == LILY_OK) rc = cuda_decode_wait(m, results, n, err);
        for (int32_t i = 0; i < n && rc == LILY_OK; i++) rc = cuda_rewind(s[i], err);
        r->waits = waits;
    }
    return rc;
}

/* A prompt's last chunk, with its logits. A token was decoded before: some of its tokens may go
 * through such steps. */
static int record_chunk(struct backend_model *m, struct backend_session *s, int32_t n,
                        struct cuda_record *r, lily_err *err) {
    int32_t *ids = calloc((size_t)n, sizeof *ids);
    float *logits = malloc((size_t)model_shape(m)->vocab * sizeof *logits);
    struct prefill_step step = {.ids = ids, .n = n, .logits = logits};
    r->launches = r->waits = r->steps = 0;
    int rc = ids && logits ? cuda_prefill(s, &step, err) : ERR_NOMEM(err, "plan");
    free(ids);
    free(logits);
    if (rc != LILY_OK || step.done == n) return rc;
    return ERR(err, LILY_EINVAL,
               "plan: found %d tokens, expected at most %d, which one chunk reads from there; ask "
               "for fewer",
               n, step.done);
}

/* What a prompt reads and writes whose last n tokens go through decode steps one by one: a chunk
 * before them needs no logits. */
static void add_tail(const struct backend_model *m, const struct plan_query *q, int32_t n,
                     int32_t passes, struct backend_plan *p) {
    struct backend_plan all = {0};
    struct plan_query part = *q;
    part.tokens -= n;
    if (part.tokens > 0) {
        cuda_step_bytes(m, &part, passes, &all);
        all.read_bytes -= head_bytes(m);
        all.written_bytes -= sizeof(float) * (uint64_t)model_shape(m)->vocab;
    }
    for (int32_t i = q->tokens - n; i < q->tokens; i++) {
        struct plan_query token = {.layers = q->layers, .depth = q->depth + i, .tokens = 1};
        cuda_step_bytes(m, &token, 1, &all);
    }
    p->read_bytes = all.read_bytes;
    p->written_bytes = all.written_bytes;
}

/* Launches of one stream follow each other. */
static void fill_plan(const struct backend_model *m, const struct plan_query *q,
                      const struct cuda_record *r, struct backend_plan *p) {
    int32_t barriers = (int32_t)r->arrivals / m->processors;
    int32_t passes = r->attention_blocks > 1 ? r->attention_blocks : 1;
    *p = (struct backend_plan){.kernels = r->launches,
                               .stages = r->launches - r->steps,
                               .barriers = r->steps * barriers,
                               .command_buffers = r->launches,
                               .host_syncs = r->waits};
    if (r->steps) p->stages += r->steps * cuda_decode_stages(m);
    cuda_step_bytes(m, q, passes, p);
    if (q->tokens > 1 && r->steps) add_tail(m, q, r->steps, passes, p);
}

static int record_step(const struct weights *w, const struct plan_query *q, struct backend_plan *p,
                       lily_err *err) {
    struct cuda_record r = {0};
    struct cuda_driver d;
    struct backend_session *s[CUDA_MOST_SESSIONS] = {NULL};
    struct backend_model *m = NULL;
    int32_t n = q->sessions > 1 ? q->sessions : 1;
    const struct backend_options options = {.max_sessions = n,
                                            .max_context = w->shape->max_context};
    cuda_record_begin(&r, &d);
    int rc = cuda_open_recorded(w, &options, &d, &m, err);
    for (int32_t i = 0; i < n && rc == LILY_OK; i++) {
        rc = cuda_session_new(m, w->shape->max_context, &s[i], err);
        if (rc == LILY_OK) s[i]->position = s[i]->kv_rows = q->depth;
    }
    if (rc == LILY_OK) rc = record_token(m, s, n, &r, err);
    if (rc == LILY_OK && q->tokens > 1) rc = record_chunk(m, s[0], q->tokens, &r, err);
    if (rc == LILY_OK) fill_plan(m, q, &r, p);
    for (int32_t i = 0; i < n; i++) cuda_session_free(s[i]);
    cuda_close(m);
    cuda_record_end();
    return rc;
}

static int check_query(const struct shape *s, const struct plan_query *q, lily_err *err) {
    bool layers = q->layers >= s->attention_every && q->layers <= s->layers &&
                  q->layers % s->attention_every == 0;
    bool tokens = q->tokens >= 1 && q->tokens <= CUDA_CHUNK && q->depth >= 0 &&
                  q->depth <= s->max_context - q->tokens;
    bool sessions = q->sessions >= 0 && q->sessions <= (q->tokens == 1 ? CUDA_MOST_SESSIONS : 1);
    if (layers && tokens && sessions) return LILY_OK;
    return ERR(err, LILY_EINVAL,
               "plan: found %d tokens at depth %d of %d layers, %d session(s), expected 1 to %d "
               "tokens within a context of %d, a multiple of %d layers up to %d, and one session, "
               "or up to %d of one token each",
               q->tokens, q->depth, q->layers, q->sessions, CUDA_CHUNK, s->max_context,
               s->attention_every, s->layers, CUDA_MOST_SESSIONS);
}

int cuda_plan(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
              lily_err *err) {
    struct weights w;
    *out = (struct backend_plan){0};
    int rc = check_query(shape, query, err);
    if (rc == LILY_OK) rc = cuda_sized_weights(shape, query->layers, &w, err);
    if (rc != LILY_OK) return rc;
    rc = record_step(&w, query, out, err);
    cuda_sized_weights_free(&w);
    return rc;
}
