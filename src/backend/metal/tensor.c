#include "backend/metal/tensor.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/encode.h"
#include "base/bf16.h"

/* A full tile and a rest. */
enum { CHECK_ROWS = 45, KERNELS = 5, OUTPUTS = 9, SAMPLES = 32 };

static const struct {
    int32_t kernel;
    const char *name;
} replaced[KERNELS] = {{METAL_PREFILL_GEMM, "prefill_gemm_tensor"},
                       {METAL_PREFILL_GEMM_MULTI, "prefill_gemm_multi_tensor"},
                       {METAL_PREFILL_GEMM_SILU, "prefill_gemm_silu_tensor"},
                       {METAL_PREFILL_EXPERTS_UP, "prefill_experts_up_tensor"},
                       {METAL_PREFILL_EXPERTS_DOWN, "prefill_experts_down_tensor"}};

/* What the products write: values of each row, float32 or bfloat16. */
struct output {
    int32_t buffer;
    size_t values;
    bool half;
};

static void list_outputs(const struct shape *s, struct output out[OUTPUTS]) {
    size_t n = CHECK_ROWS, k = (size_t)s->top_k;
    const struct output all[OUTPUTS] = {
        {METAL_P_QKV, n * (size_t)s->conv_dim, false},
        {METAL_P_Z, n * (size_t)s->gdn_v_dim, false},
        {METAL_P_B, n * (size_t)s->gdn_v_heads, false},
        {METAL_P_A, n * (size_t)s->gdn_v_heads, false},
        {METAL_P_H, n * (size_t)s->hidden, false},
        {METAL_P_SHARED_ACT, n * (size_t)s->shared_width, true},
        {METAL_P_SHARED, n * (size_t)s->hidden, true},
        {METAL_P_ACT, n * k * (size_t)s->expert_width, true},
        {METAL_P_PAIRS, n * k * (size_t)s->hidden, true},
    };
    memcpy(out, all, sizeof all);
}

static float value_at(const struct backend_model *m, const struct output *o, size_t i) {
    const void *data = buffers_contents(&m->buffers, o->buffer);
    return o->half ? bf16_to_f32(((const uint16_t *)data)[i]) : ((const float *)data)[i];
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* A fixed sequence in [-1, 1) that bfloat16 holds exactly. */
static float next_value(uint32_t *state) {
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 24) / 128.0f - 1.0f;
}

static void fill_rows(const struct backend_model *m, int32_t buffer, size_t n, uint32_t *state) {
    uint16_t *out = buffers_contents(&m->buffers, buffer);
    for (size_t i = 0; i < n; i++) out[i] = f32_to_bf16(next_value(state));
}

/* Experts drawn without repetition, so that some get many rows and some few. */
static void fill_inputs(const struct backend_model *m) {
    const struct shape *s = m->layout.shape;
    uint32_t state = 1;
    uint16_t *ids = buffers_contents(&m->buffers, METAL_P_EXPERT_IDS);
    float *weights = buffers_contents(&m->buffers, METAL_P_WEIGHTS);
    fill_rows(m, METAL_P_X, CHECK_ROWS * (size_t)s->hidden, &state);
    fill_rows(m, METAL_P_MIX, CHECK_ROWS * (size_t)s->gdn_v_dim, &state);
    memset(buffers_contents(&m->buffers, METAL_P_H), 0, 4 * CHECK_ROWS * (size_t)s->hidden);
    for (int32_t i = 0; i < CHECK_ROWS * s->top_k; i++) {
        int32_t rank = i % s->top_k, row = i / s->top_k;
        ids[i] = (uint16_t)((rank * rank + (row % 3) * rank + row % 2) % s->experts);
        for (int32_t j = i - rank; j < i; j++) {
            if (ids[j] != ids[i]) continue;
            ids[i] = (uint16_t)((ids[i] + 1) % s->experts);
            j = i - rank - 1;
        }
        weights[i] = 1.0f / (float)s->top_k;
    }
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* Root of the squared difference over the squared size; NaN counts as infinite. */
static double gap(const struct backend_model *m, const struct output *o, const float *right) {
    double error = 0, size = 0;
    for (size_t i = 0; i < o->values; i++) {
        double x = (double)right[i], y = (double)value_at(m, o, i);
        error += (x - y) * (x - y);
        size += x * x;
    }
    double g = sqrt(error / (size > 0 ? size : 1));
    return g == g ? g : INFINITY;
}

/* The largest difference of sampled outputs of in_proj_qkv from the reference product, over the
 * size of their rows. */
static double reference_gap(const struct backend_model *m, float *row) {
    const struct mat *qkv = &m->w->layer[0].deltanet.in_proj_qkv;
    const struct output o = {METAL_P_QKV, 0, false};
    const uint16_t *x = buffers_contents(&m->buffers, METAL_P_X);
    double error = 0, size = 0;
    for (int32_t i = 0; i < SAMPLES; i++) {
        int32_t out = (int32_t)((int64_t)i * (qkv->rows - 1) / (SAMPLES - 1));
        int32_t from = i * (CHECK_ROWS - 1) / (SAMPLES - 1);
        double sum = 0;
        mat_row(qkv, out, row);
        for (int32_t c = 0; c < qkv->cols; c++) {
            sum += (double)row[c] * (double)bf16_to_f32(x[from * qkv->cols + c]);
        }
        double mine = (double)value_at(m, &o, (size_t)from * (size_t)qkv->rows + (size_t)out);
        error += (mine - sum) * (mine - sum);
        size += sum * sum;
    }
    double g = sqrt(error / (size > 0 ? size : 1));
    return g == g ? g : INFINITY;
}

static int run_products(struct backend_model *m, lily_err *err) {
    double seconds;
    fill_inputs(m);
    return metal_run(&m->device, "tensor check", m->graph, 0, m->graph->dispatches,
                     m->buffers.buffer, &seconds, err);
}

/* ---- the choice ------------------------------------------------------------------------------ */

static void exchange(struct backend_model *m, id pipelines[KERNELS]) {
    for (int32_t i = 0; i < KERNELS; i++) {
        id other = m->device.pipeline[replaced[i].kernel];
        m->device.pipeline[replaced[i].kernel] = pipelines[i];
        pipelines[i] = other;
    }
}

/* Attention follows where products agree, to `worst`. */
static int choose_attention(struct backend_model *m, double worst, lily_err *err) {
    lily_err why = {0};
    double gap_there;
    int rc = metal_tensor_choose_attention(m, &gap_there, &why, err);
    if (m->tensor_attention) {
        snprintf(m->tensor_reason, sizeof m->tensor_reason, "on, the start-up check agrees to %.1e",
                 fmax(worst, gap_there));
    } else {
        snprintf(m->tensor_reason, sizeof m->tensor_reason,
                 "on, but not for attention, because %.140s", why.msg);
    }
    return rc;
}

/* Runs the products by both kinds of kernels; the tensor kernels stay where they agree. A fault of
 * theirs is a reason to do without them. right: room for all outputs. */
static int check(struct backend_model *m, id pipelines[KERNELS], float *right, lily_err *err) {
    struct output o[OUTPUTS];
    double worst = 0;
    list_outputs(m->layout.shape, o);
    graph_clear(m->graph);
    prefill_record_products(m->graph, &m->layout, CHECK_ROWS);
    int rc = graph_check(m->graph, err);
    if (rc == LILY_OK) rc = run_products(m, err);
    if (rc != LILY_OK) return rc;
    float *at = right;
    for (int32_t i = 0; i < OUTPUTS; i++) {
        for (size_t j = 0; j < o[i].values; j++) *at++ = value_at(m, &o[i], j);
    }
    lily_err why;
    exchange(m, pipelines);
    if (run_products(m, &why) != LILY_OK) {
        exchange(m, pipelines);
        snprintf(m->tensor_reason, sizeof m->tensor_reason, "off, because %.160s", why.msg);
        return metal_device_new_queue(&m->device, err);
    }
    at = right;
    for (int32_t i = 0; i < OUTPUTS; i++) {
        worst = fmax(worst, gap(m, &o[i], at));
        at += o[i].values;
    }
    worst = fmax(worst, reference_gap(m, right));
    m->tensor = worst <= METAL_TENSOR_GAP;
    if (!m->tensor) exchange(m, pipelines);
    if (m->tensor) return choose_attention(m, worst, err);
    snprintf(m->tensor_reason, sizeof m->tensor_reason,
             "off, because the start-up check differs by %.1e", worst);
    return LILY_OK;
}

static size_t all_values(const struct shape *s) {
    struct output o[OUTPUTS];
    size_t n = (size_t)s->hidden; /* for a row of a matrix */
    list_outputs(s, o);
    for (int32_t i = 0; i < OUTPUTS; i++) n += o[i].values;
    return n;
}

/* Compiles the tensor kernels; a refusal is a reason, not an error. */
static bool compile(struct backend_model *m, id pipelines[KERNELS]) {
    id library = NULL;
    lily_err why;
    int rc = metal_device_library(&m->device, "prefill_tensor.metal", MTLLanguageVersion4_0,
                                  m->layout.shape, &library, &why);
    for (int32_t i = 0; i < KERNELS && rc == LILY_OK; i++) {
        rc = metal_device_pipeline(&m->device, library, replaced[i].name, PREFILL_GEMM_THREADS,
                                   &pipelines[i], &why);
    }
    objc_release(library);
    if (rc != LILY_OK) {
        snprintf(m->tensor_reason, sizeof m->tensor_reason, "off, because %.160s", why.msg);
    }
    return rc == LILY_OK;
}

int metal_tensor_choose(struct backend_model *m, lily_err *err) {
    id pipelines[KERNELS] = {0};
    int rc = LILY_OK;
    if (!m->device.metal4 || m->device.family < 10) {
        snprintf(m->tensor_reason, sizeof m->tensor_reason, "off, because the %s",
                 m->device.metal4 ? "GPU is older than M5" : "system or the GPU has no Metal 4");
    } else if (m->layout.rows < CHECK_ROWS) {
        snprintf(m->tensor_reason, sizeof m->tensor_reason,
                 "off, because prompts of at most %d tokens gain nothing", m->layout.rows);
    } else if (compile(m, pipelines)) {
        float *right = malloc(all_values(m->layout.shape) * sizeof *right);
        rc = right ? check(m, pipelines, right, err) : ERR_NOMEM(err, "tensor check");
        free(right);
    }
    for (int32_t i = 0; i < KERNELS; i++) objc_release(pipelines[i]);
    return rc;
}

const char *metal_tensor_name(const struct backend_model *m, int32_t kernel) {
    const char *attention = metal_tensor_attention_name(m, kernel);
    for (int32_t i = 0; i < KERNELS && m->tensor; i++) {
        if (replaced[i].kernel == kernel) return replaced[i].name;
    }
    return attention ? attention : metal_kernels[kernel].name;
}
