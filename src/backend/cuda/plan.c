/* What a step costs, without a device: the layers are run against a driver that only counts, so
 * that the numbers of launches are those of the code that runs; bytes follow from shape and rows,
 * with every 4-bit matrix 4 bits and every router 8 bits wide, as in the published checkpoint. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/cuda.h"

/* ---- a driver that counts -------------------------------------------------------------------- */

static _Thread_local struct backend_plan *counting;

static CUresult count_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned shared, CUstream stream,
                             void **parameters, void **extra) {
    (void)f, (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    (void)shared, (void)stream, (void)parameters, (void)extra;
    counting->kernels++;
    return 0;
}

static struct cuda_mat matrix(int32_t rows, int32_t cols, int32_t bits) {
    return (struct cuda_mat){.rows = rows, .cols = cols, .bits = bits};
}

static struct cuda_layer layer_of(const struct shape *s, int32_t l) {
    int32_t h = s->hidden, inner = s->expert_width, shared = s->shared_width, e = s->experts;
    struct cuda_layer out = {.router = matrix(e + 1, h, 8),
                             .gate = matrix(e * inner, h, 4),
                             .up = matrix(e * inner, h, 4),
                             .down = matrix(e * h, inner, 4),
                             .shared_gate = matrix(shared, h, 4),
                             .shared_up = matrix(shared, h, 4),
                             .shared_down = matrix(h, shared, 4)};
    if (shape_is_attention(s, l)) {
        out.qkv = matrix(2 * s->q_dim + 2 * s->kv_dim, h, 4);
        out.o = matrix(h, s->q_dim, 4);
    } else {
        out.qkvz = matrix(s->conv_dim + s->gdn_v_dim, h, 4);
        out.ba = matrix(2 * s->gdn_v_heads, h, 4);
        out.out = matrix(h, s->gdn_v_dim, 4);
    }
    return out;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint64_t mat_bytes(struct cuda_mat m) {
    uint64_t values = (uint64_t)m.rows * (uint64_t)m.cols;
    return values * (uint64_t)m.bits / 8 + values / 64 * 4;
}

/* Experts that n tokens are expected to choose when the router has no favourites. */
static double distinct_experts(const struct shape *s, int32_t n) {
    double miss = 1.0 - (double)s->top_k / (double)s->experts;
    return n == 1 ? s->top_k : (double)s->experts * (1.0 - pow(miss, n));
}

/* Unique bytes of weights of a layer, and of what its kernels hand to each other for n rows. */
static void add_layer(const struct shape *s, int32_t l, int32_t n, struct backend_plan *p) {
    struct cuda_layer w = layer_of(s, l);
    uint64_t all = mat_bytes(w.gate) + mat_bytes(w.up) + mat_bytes(w.down), f = sizeof(float);
    double share = distinct_experts(s, n) / (double)s->experts;
    bool full = shape_is_attention(s, l);
    uint64_t weights = mat_bytes(w.router) + mat_bytes(w.shared_gate) + mat_bytes(w.shared_up) +
                       mat_bytes(w.shared_down) + (uint64_t)((double)all * share);
    weights += full ? mat_bytes(w.qkv) + mat_bytes(w.o)
                    : mat_bytes(w.qkvz) + mat_bytes(w.ba) + mat_bytes(w.out);
    /* Norms, and the convolution, decay and gate of the recurrent layers, in float32. */
    weights += f * (uint64_t)(2 * s->hidden + (full ? 2 * s->head_dim
                                                    : s->conv_taps * s->conv_dim +
                                                          2 * s->gdn_v_heads + s->gdn_head_dim));
    uint64_t h = (uint64_t)s->hidden;
    uint64_t width = (uint64_t)(full ? w.qkv.rows : w.qkvz.rows + w.ba.rows);
    uint64_t mix = (uint64_t)(full ? 2 * s->q_dim : s->conv_dim + 2 * s->gdn_v_dim);
    uint64_t inner =
        (uint64_t)(s->top_k + 1) * (uint64_t)(s->expert_width) + (uint64_t)(s->top_k + 1) * h;
    /* Each value is written by one kernel and read by the next; the residual stream by both norms.
     */
    uint64_t values = (uint64_t)n * (width + mix + inner + 5 * h + (uint64_t)s->experts);
    p->weight_bytes += weights;
    p->read_bytes += weights + values * f;
    p->written_bytes += values * f;
    uint64_t row = 4 * (uint64_t)s->kv_dim;
    if (full) p->written_bytes += (uint64_t)n * row;
}

static void add_bytes(const struct shape *s, const struct plan_query *q, struct backend_plan *p) {
    uint64_t n = (uint64_t)q->tokens, h = (uint64_t)s->hidden, f = sizeof(float);
    int32_t attention = shape_attention_layers(s, q->layers), gdn = q->layers - attention;
    for (int32_t l = 0; l < q->layers; l++) add_layer(s, l, q->tokens, p);
    uint64_t head = mat_bytes(matrix(s->vocab, s->hidden, 4));
    uint64_t embed = mat_bytes(matrix(1, s->hidden, 4)) * n;
    head += f * h; /* the final norm */
    p->weight_bytes += head + embed;
    uint64_t square = (uint64_t)s->gdn_head_dim * (uint64_t)s->gdn_head_dim;
    p->state_bytes =
        (uint64_t)gdn * f *
        ((uint64_t)s->gdn_v_heads * square + (uint64_t)(s->conv_taps - 1) * (uint64_t)s->conv_dim);
    p->kv_bytes = (uint64_t)attention * 4 * (uint64_t)s->kv_dim * ((uint64_t)q->depth + n);
    /* A prompt's rows read the context once per eight rows of a key head. */
    uint64_t passes = q->tokens == 1 ? 1 : (n + 7) / 8;
    p->read_bytes += head + embed + p->state_bytes + p->kv_bytes * passes + n * h * f;
    p->written_bytes += p->state_bytes + (uint64_t)s->vocab * f + n * h * f;
}

/* ---- the table's function -------------------------------------------------------------------- */

/* Launches of the portable kernels for this step. */
static int count(const struct shape *shape, const struct plan_query *q, struct backend_plan *out,
                 lily_err *err) {
    struct cuda_driver d = {.launch = count_launch};
    struct weights w = {.shape = shape, .layers = q->layers};
    struct backend_model m = {.w = &w, .d = &d, .processors = 132};
    struct cuda_slot slot = {.pos = q->depth, .sample = 1};
    struct cuda_run run = {
        .slots = &slot, .n_slots = 1, .rows_per_slot = q->tokens, .prompt = q->tokens > 1};
    m.dw.layer = calloc((size_t)q->layers + 1, sizeof *m.dw.layer);
    if (!m.dw.layer) return ERR_NOMEM(err, "plan");
    for (int32_t l = 0; l < q->layers; l++) m.dw.layer[l] = layer_of(shape, l);
    m.dw.embed = m.dw.lm_head = matrix(shape->vocab, shape->hidden, 4);
    int rc = cuda_portable_none(&m, err);
    counting = out;
    if (rc == LILY_OK) rc = cuda_run_layers(&m, &run, err);
    if (rc == LILY_OK) {
        rc = cuda_check_rows(&m, 0, q->tokens, shape->hidden, q->tokens, 0, err);
    }
    if (rc == LILY_OK) rc = cuda_run_head(&m, &run, q->tokens - 1, 1, err);
    if (rc == LILY_OK && !run.prompt) rc = cuda_run_sampling(&m, 0, 1, true, 0, err);
    counting = NULL;
    cuda_portable_close(&m);
    free(m.dw.layer);
    return rc;
}

int cuda_plan(const struct shape *shape, const struct plan_query *query, struct backend_plan *out,
              lily_err *err) {
    struct plan_query q = *query;
    if (q.layers == 0) q.layers = shape->layers;
    *out = (struct backend_plan){0};
    int rc = count(shape, &q, out, err);
    if (rc != LILY_OK) return rc;
    out->stages = out->kernels; /* one stream: each launch follows the one before */
    out->command_buffers = out->kernels;
    /* The host waits at a chunk's end; a decode step's results are waited for behind the next. */
    out->host_syncs = q.tokens > 1 ? 1 : 0;
    if (q.tokens == 1 && cuda_paths[0]->plan) {
        cuda_paths[0]->plan(shape, &q, out);
        out->command_buffers = out->kernels;
    }
    add_bytes(shape, &q, out);
    return LILY_OK;
}
