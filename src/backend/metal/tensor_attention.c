/* The start-up check of a prompt's attention by tensor operations. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/encode.h"
#include "backend/metal/tensor.h"
#include "base/bf16.h"

/* A full tile of tokens and a rest: at position 0, where each token sees much more than the one
 * before, and as deep as there is room: in a second span, and on both sides of a block's end. */
enum { CHECK_ROWS = 11, DEEPEST = PREFILL_ATTN_SPAN + PREFILL_ATTN_BLOCK + 4, SAMPLES = 8 };

enum { KERNELS = 3 };
static const struct {
    int32_t kernel;
    uint32_t threads;
    const char *name;
} replaced[KERNELS] = {
    {METAL_PREFILL_ATTN_PREP, PREFILL_ATTN_PREP_THREADS, "prefill_attn_prep_tensor"},
    {METAL_PREFILL_ATTN, PREFILL_ATTN_THREADS, "prefill_attn_tensor"},
    {METAL_PREFILL_ATTN_SPLIT, PREFILL_ATTN_THREADS, "prefill_attn_split_tensor"}};

/* What is checked: rows at positions [end - CHECK_ROWS, end) of a cache in METAL_P_CHANNELS. */
struct trial {
    struct backend_model *m;
    const struct shape *s;
    int32_t layer, end;
    float *right; /* [CHECK_ROWS * q_dim] of the kernels that every chip runs */
};

static int32_t first_attention_layer(const struct metal_layout *l) {
    int32_t layer = 0;
    while (layer < l->layers && !shape_is_attention(l->shape, layer)) layer++;
    return layer;
}

/* Positions that the cache has room for, and partial results for their spans. */
static int32_t deepest(const struct metal_layout *l) {
    uint64_t room = l->bytes[METAL_P_CHANNELS] / (4 * (uint64_t)l->shape->kv_dim);
    int32_t end = room < DEEPEST ? (int32_t)room : DEEPEST;
    return end > PREFILL_ATTN_SPAN && l->rows < 2 * CHECK_ROWS ? PREFILL_ATTN_SPAN : end;
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* A fixed sequence in [-1, 1) that bfloat16 holds exactly. */
static float next_value(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 24) / 128.0f - 1.0f;
}

static void fill_floats(const struct trial *t, int32_t buffer, int32_t width, uint32_t *state) {
    float *out = buffers_contents(&t->m->buffers, buffer);
    for (size_t i = 0; i < CHECK_ROWS * (size_t)width; i++) out[i] = next_value(state);
}

/* Keys up to 4: a few positions share most of the weight. */
static void fill_inputs(const struct trial *t) {
    const size_t half = (size_t)t->end * (size_t)t->s->kv_dim;
    uint16_t *cache = buffers_contents(&t->m->buffers, METAL_P_CHANNELS);
    uint32_t state = 2;
    fill_floats(t, METAL_P_QKV, 2 * t->s->q_dim, &state);
    fill_floats(t, METAL_P_B, t->s->kv_dim, &state);
    fill_floats(t, METAL_P_A, t->s->kv_dim, &state);
    for (size_t i = 0; i < 2 * half; i++) {
        cache[i] = f32_to_bf16((i < half ? 4 : 1) * next_value(&state));
    }
}

static int run(const struct trial *t, bool split, lily_err *err) {
    double seconds;
    fill_inputs(t);
    graph_clear(t->m->graph);
    prefill_record_attention(t->m->graph, &t->m->layout, t->layer, CHECK_ROWS, t->end - CHECK_ROWS,
                             split);
    int rc = graph_check(t->m->graph, err);
    if (rc != LILY_OK) return rc;
    return metal_run(&t->m->device, "tensor check", t->m->graph, 0, t->m->graph->dispatches,
                     t->m->buffers.buffer, &seconds, err);
}

/* ---- comparison ------------------------------------------------------------------------------ */

static double share(double error, double size) {
    double g = sqrt(error / (size > 0 ? size : 1));
    return g == g ? g : INFINITY;
}

static float mix_at(const struct trial *t, size_t i) {
    const uint16_t *mix = buffers_contents(&t->m->buffers, METAL_P_MIX);
    return bf16_to_f32(mix[i]);
}

/* Root of the squared difference over the squared size; NaN counts as infinite. */
static double gap(const struct trial *t) {
    double error = 0, size = 0;
    for (size_t i = 0; i < CHECK_ROWS * (size_t)t->s->q_dim; i++) {
        double x = (double)t->right[i], y = (double)mix_at(t, i);
        error += (x - y) * (x - y);
        size += x * x;
    }
    return share(error, size);
}

/* softmax(q k^T) v * sigmoid(gate) of one head of one row, from the queries, keys and values in
 * memory: bf16 [kv_heads][rows][8][head_dim] times 1 / sqrt(head_dim), and the cache. */
static void attend(const struct trial *t, int32_t row, int32_t head, double *out) {
    const size_t n = (size_t)t->s->head_dim, kv_dim = (size_t)t->s->kv_dim;
    const int32_t kv_head = head / PREFILL_ATTN_GROUP, seen = t->end - CHECK_ROWS + row + 1;
    const uint16_t *keys = buffers_contents(&t->m->buffers, METAL_P_CHANNELS);
    const uint16_t *q = buffers_contents(&t->m->buffers, METAL_P_QUERY);
    const float *gate = buffers_contents(&t->m->buffers, METAL_P_QKV);
    double top = -INFINITY, sum = 0;
    q += ((size_t)(kv_head * CHECK_ROWS + row) * PREFILL_ATTN_GROUP +
          (size_t)(head % PREFILL_ATTN_GROUP)) *
         n;
    gate += ((size_t)row * (size_t)t->s->q_heads + (size_t)head) * 2 * n + n;
    keys += (size_t)kv_head * n;
    const uint16_t *values = keys + (size_t)t->end * kv_dim;
    memset(out, 0, n * sizeof *out);
    for (int32_t p = 0; p < seen; p++, keys += kv_dim, values += kv_dim) {
        double score = 0;
        for (size_t d = 0; d < n; d++) {
            score += (double)bf16_to_f32(q[d]) * (double)bf16_to_f32(keys[d]);
        }
        double higher = fmax(top, score), keep = exp(top - higher), weight = exp(score - higher);
        for (size_t d = 0; d < n; d++)
            out[d] = out[d] * keep + weight * (double)bf16_to_f32(values[d]);
        sum = sum * keep + weight;
        top = higher;
    }
    for (size_t d = 0; d < n; d++) out[d] /= sum * (1 + exp(-(double)gate[d]));
}

/* The same measure for some heads of some rows against the formula. */
static double reference_gap(const struct trial *t) {
    double right[PREFILL_ATTN_DIM], error = 0, size = 0;
    for (int32_t i = 0; i < SAMPLES; i++) {
        int32_t row = i * (CHECK_ROWS - 1) / (SAMPLES - 1);
        int32_t head = i * (t->s->q_heads - 1) / (SAMPLES - 1);
        size_t at = (size_t)(row * t->s->q_heads + head) * PREFILL_ATTN_DIM;
        attend(t, row, head, right);
        for (size_t d = 0; d < PREFILL_ATTN_DIM; d++) {
            double x = right[d], y = (double)mix_at(t, at + d);
            error += (x - y) * (x - y);
            size += x * x;
        }
    }
    return share(error, size);
}

/* ---- the choice ------------------------------------------------------------------------------ */

static void exchange(struct backend_model *m, id pipelines[KERNELS]) {
    for (int32_t i = 0; i < KERNELS; i++) {
        id other = m->device.pipeline[replaced[i].kernel];
        m->device.pipeline[replaced[i].kernel] = pipelines[i];
        pipelines[i] = other;
    }
}

/* Both ways of the tensor kernels against the other ones, of which both ways give the same. */
static int run_tensor(const struct trial *t, double *worst, lily_err *why) {
    int rc = run(t, false, why);
    if (rc == LILY_OK) *worst = fmax(*worst, fmax(gap(t), reference_gap(t)));
    if (rc == LILY_OK) rc = run(t, true, why);
    if (rc == LILY_OK) *worst = fmax(*worst, gap(t));
    return rc;
}

/* The tensor kernels stay where they agree at both places. */
static int check(struct trial *t, id pipelines[KERNELS], double *worst, lily_err *why,
                 lily_err *err) {
    const int32_t ends[] = {CHECK_ROWS, deepest(&t->m->layout)};
    for (int32_t i = 0; i < 2; i++) {
        t->end = ends[i];
        int rc = run(t, false, err);
        if (rc != LILY_OK) return rc;
        for (size_t j = 0; j < CHECK_ROWS * (size_t)t->s->q_dim; j++) t->right[j] = mix_at(t, j);
        exchange(t->m, pipelines);
        rc = run_tensor(t, worst, why);
        exchange(t->m, pipelines);
        if (rc != LILY_OK) return metal_device_new_queue(&t->m->device, err);
    }
    t->m->tensor_attention = *worst <= METAL_TENSOR_GAP;
    if (t->m->tensor_attention) {
        exchange(t->m, pipelines);
    } else {
        ERR(why, LILY_EBACKEND, "the start-up check differs by %.1e", *worst);
    }
    return LILY_OK;
}

static int compile(struct backend_model *m, id pipelines[KERNELS], lily_err *why) {
    id library = NULL;
    int rc = metal_device_library(&m->device, "prefill_attn_tensor.metal", MTLLanguageVersion4_0,
                                  m->layout.shape, &library, why);
    for (int32_t i = 0; i < KERNELS && rc == LILY_OK; i++) {
        rc = metal_device_pipeline(&m->device, library, replaced[i].name, replaced[i].threads,
                                   &pipelines[i], why);
    }
    objc_release(library);
    return rc;
}

int metal_tensor_choose_attention(struct backend_model *m, double *worst, lily_err *why,
                                  lily_err *err) {
    id pipelines[KERNELS] = {0};
    struct trial t = {.m = m, .s = m->layout.shape, .layer = first_attention_layer(&m->layout)};
    int rc = LILY_OK;
    *worst = 0;
    if (t.layer == m->layout.layers) {
        ERR(why, LILY_EBACKEND, "there is no layer of it");
    } else if (compile(m, pipelines, why) == LILY_OK) {
        t.right = malloc(CHECK_ROWS * (size_t)t.s->q_dim * sizeof *t.right);
        rc = t.right ? check(&t, pipelines, worst, why, err) : ERR_NOMEM(err, "tensor check");
        free(t.right);
    }
    for (int32_t i = 0; i < KERNELS; i++) objc_release(pipelines[i]);
    return rc;
}

const char *metal_tensor_attention_name(const struct backend_model *m, int32_t kernel) {
    for (int32_t i = 0; i < KERNELS && m->tensor_attention; i++) {
        if (replaced[i].kernel == kernel) return replaced[i].name;
    }
    return NULL;
}
