/* Opening a model: checks, preflight, buffers, pipelines; statistics and the backend's table. */
#include "backend/metal/metal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/metal/plan.h"
#include "backend/metal/selftest.h"
#include "backend/metal/tensor.h"

enum { LEAST_ROWS = 256 };

/* Seconds of GPU time that a prompt chunk aims at: far below what the display's watchdog allows,
 * and about as long as a person waits for a cancelled request without noticing. */
static const double CHUNK_SECONDS = 0.4;

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* ---- checks ---------------------------------------------------------------------------------- */

static int check_shape(const struct shape *s, lily_err *err) {
    bool fits = s->group == 64 && s->head_dim == PREFILL_ATTN_DIM &&
                s->gdn_head_dim == PREFILL_GDN_STATE && s->conv_taps == 4 && s->top_k == 8 &&
                s->q_heads == PREFILL_ATTN_GROUP * s->kv_heads &&
                s->gdn_v_heads == 2 * s->gdn_k_heads && s->hidden % 256 == 0 &&
                s->vocab % DECODE_HEAD_ROWS == 0 && s->experts % 8 == 0;
    if (fits) return LILY_OK;
    return ERR(err, LILY_EMODEL,
               "shape %s: found sizes the Metal kernels are not made for; use the cpu backend, or "
               "extend src/backend/metal/kernels",
               s->name);
}

static int check_bits(const struct mat *m, const char *name, int32_t layer, int32_t bits,
                      lily_err *err) {
    char where[24] = "";
    if (m->bits == bits) return LILY_OK;
    if (layer >= 0) snprintf(where, sizeof where, "layer %d ", layer);
    return ERR(err, LILY_EMODEL,
               "%s%s: found %d-bit weights, expected %d; let the loader quantise the "
               "checkpoint (lily pack), or use the reference backend",
               where, name, m->bits, bits);
}

static int check_layer(const struct weights *w, int32_t l, lily_err *err) {
    const struct attention_weights *a = &w->layer[l].attention;
    const struct deltanet_weights *d = &w->layer[l].deltanet;
    const struct moe_weights *e = &w->layer[l].moe;
    bool attention = shape_is_attention(w->shape, l);
    const struct {
        const struct mat *mat;
        const char *name;
        int32_t bits;
    } mats[] = {{attention ? &a->q_proj : &d->in_proj_qkv, "q_proj or in_proj_qkv", 4},
                {attention ? &a->k_proj : &d->in_proj_z, "k_proj or in_proj_z", 4},
                {attention ? &a->v_proj : &d->in_proj_b, "v_proj or in_proj_b", 4},
                {attention ? &a->o_proj : &d->out_proj, "o_proj or out_proj", 4},
                {attention ? &a->o_proj : &d->in_proj_a, "o_proj or in_proj_a", 4},
                {&e->router, "router", 8},
                {&e->shared_gate, "shared expert gate", 8},
                {&e->shared_gate_proj, "shared gate_proj", 4},
                {&e->shared_up_proj, "shared up_proj", 4},
                {&e->shared_down_proj, "shared down_proj", 4}};
    int rc = LILY_OK;
    for (size_t i = 0; i < sizeof mats / sizeof *mats && rc == LILY_OK; i++) {
        rc = check_bits(mats[i].mat, mats[i].name, l, mats[i].bits, err);
    }
    for (int32_t i = 0; i < w->shape->experts && rc == LILY_OK; i++) {
        rc = check_bits(&e->gate[i], "expert gate_proj", l, 4, err);
        if (rc == LILY_OK) rc = check_bits(&e->up[i], "expert up_proj", l, 4, err);
        if (rc == LILY_OK) rc = check_bits(&e->down[i], "expert down_proj", l, 4, err);
    }
    return rc;
}

static int check_model(const struct weights *w, const struct backend_options *o, lily_err *err) {
    if (o->max_sessions < 1 || o->max_context < 1 || o->max_context > w->shape->max_context) {
        return ERR(err, LILY_EINVAL,
                   "Metal backend: found %d session(s) of %d tokens, expected at least 1 of 1 to "
                   "%d",
                   o->max_sessions, o->max_context, w->shape->max_context);
    }
    int rc = check_shape(w->shape, err);
    if (rc == LILY_OK) rc = check_bits(&w->embed, "embed_tokens", -1, 4, err);
    if (rc == LILY_OK) rc = check_bits(&w->lm_head, "lm_head", -1, 4, err);
    for (int32_t l = 0; l < w->layers && rc == LILY_OK; l++) rc = check_layer(w, l, err);
    return rc;
}

/* ---- opening --------------------------------------------------------------------------------- */

/* Weights of a packed file lie in one mapping, whose pages the GPU takes as they are. */
static bool in_place(const struct weights *w) {
    return w->map && (uintptr_t)w->map % METAL_PAGE == 0;
}

/* The largest prompt chunk for which there is memory: its scratch grows with it. */
static int choose_layout(struct backend_model *m, lily_err *err) {
    const struct backend_options *o = &m->options;
    int32_t grid = BACKEND_GRID, rows = (o->max_context + grid - 1) / grid * grid;
    if (rows > PREFILL_MAX_ROWS) rows = PREFILL_MAX_ROWS;
    for (;; rows = rows / 2 / grid * grid) {
        int rc = layout_make(m->w->shape, m->w->layers, m->w, in_place(m->w), rows, o->max_context,
                             o->max_sessions, m->device.max_buffer, &m->layout, err);
        if (rc != LILY_OK) return rc;
        rc = buffers_preflight(&m->device, &m->layout, err);
        if (rc == LILY_OK || rows / 2 < LEAST_ROWS) return rc;
        layout_free(&m->layout);
    }
}

static int new_flights(struct backend_model *m, lily_err *err) {
    size_t n = (size_t)m->options.max_sessions, commands = (n + METAL_SLOTS - 1) / METAL_SLOTS;
    m->taken = calloc(n, sizeof *m->taken);
    for (int32_t i = 0; i < METAL_FLIGHTS; i++) {
        struct metal_flight *f = &m->flight[i];
        f->slot = calloc(n, sizeof *f->slot);
        f->command = calloc(commands, sizeof *f->command);
        if (!f->slot || !f->command) return ERR_NOMEM(err, "Metal backend");
    }
    return m->taken ? LILY_OK : ERR_NOMEM(err, "Metal backend");
}

/* Weights and state that a token reads, from its recording. */
static int count_token(struct backend_model *m, lily_err *err) {
    struct graph_counts c;
    const struct decode_record r = {
        .session = {.first = m->layout.first_session, .context = m->options.max_context},
        .token = -1,
        .sampling = decode_no_sampling};
    decode_record(m->graph, &m->layout, &r);
    int rc = graph_check(m->graph, err);
    if (rc == LILY_OK) rc = graph_count(m->graph, &c, err);
    if (rc == LILY_OK) m->token_bytes = c.unique_read[GRAPH_WEIGHTS] + c.unique_read[GRAPH_STATE];
    return rc;
}

static int open_parts(struct backend_model *m, lily_err *err) {
    int32_t layers = m->w->layers;
    int rc = metal_device_open(&m->device, err);
    if (rc == LILY_OK) rc = metal_pressure_begin(&m->pressure, err);
    if (rc == LILY_OK) rc = choose_layout(m, err);
    if (rc == LILY_OK) rc = new_flights(m, err);
    if (rc == LILY_OK) metal_pace_new(&m->pace, &m->layout, CHUNK_SECONDS);
    if (rc == LILY_OK) {
        rc = layout_graph(&m->layout, prefill_most_dispatches(layers) + 2, &m->graph, err);
    }
    if (rc == LILY_OK) rc = count_token(m, err);
    if (rc == LILY_OK) rc = metal_device_compile(&m->device, m->w->shape, err);
    if (rc == LILY_OK) {
        rc = buffers_new(&m->device, &m->layout, m->w, &m->options, &m->buffers, err);
    }
    if (rc == LILY_OK) rc = metal_tensor_choose(m, err);
    if (rc == LILY_OK && m->options.trace) rc = metal_trace_new(m, err);
    return rc;
}

static void metal_close(struct backend_model *m) {
    if (!m) return;
    void *pool = objc_autoreleasePoolPush();
    if (m->device.device) metal_drain(m);
    metal_trace_free(m);
    buffers_free(&m->buffers);
    graph_free(m->graph);
    layout_free(&m->layout);
    for (int32_t i = 0; i < METAL_FLIGHTS; i++) {
        free(m->flight[i].slot);
        free(m->flight[i].command);
    }
    free(m->taken);
    metal_device_close(&m->device);
    metal_pressure_end(m->pressure);
    objc_autoreleasePoolPop(pool);
    free(m);
}

static void describe(struct backend_model *m) {
    snprintf(m->name, sizeof m->name, "%.30s, weights %s, tensor operations: %.60s", m->device.name,
             m->layout.tensors.in_place ? "mapped" : "copied", m->tensor_reason);
}

static int metal_open(const struct weights *w, const struct backend_options *options,
                      struct backend_model **out, lily_err *err) {
    int rc = check_model(w, options, err);
    if (rc != LILY_OK) return rc;
    struct backend_model *m = calloc(1, sizeof *m);
    if (!m) return ERR_NOMEM(err, "Metal backend");
    m->w = w;
    m->options = *options;
    void *pool = objc_autoreleasePoolPush();
    rc = open_parts(m, err);
    objc_autoreleasePoolPop(pool);
    if (rc != LILY_OK) {
        metal_close(m);
        return rc;
    }
    describe(m);
    *out = m;
    return LILY_OK;
}

/* ---- the table ------------------------------------------------------------------------------- */

static void metal_probe(struct backend_probe *out) {
    struct metal_device d;
    lily_err err;
    void *pool = objc_autoreleasePoolPush();
    *out = (struct backend_probe){0};
    out->usable = metal_device_open(&d, &err) == LILY_OK;
    if (out->usable) {
        snprintf(out->device, sizeof out->device, "%s", d.name);
        snprintf(out->reason, sizeof out->reason,
                 "Apple GPU family %d, %.1f GiB for the GPU, buffers of at most %.1f GiB%s",
                 d.family, (double)d.working_set / GIB, (double)d.max_buffer / GIB,
                 d.metal4 ? ", Metal 4" : "");
        metal_device_close(&d);
    } else {
        snprintf(out->reason, sizeof out->reason, "%.250s", err.msg);
    }
    objc_autoreleasePoolPop(pool);
}

static void metal_stats(const struct backend_model *m, struct backend_stats *out) {
    *out = (struct backend_stats){
        .weight_bytes = m->w->bytes,
        .session_bytes = layout_session_bytes(&m->layout, m->options.max_context),
        .scratch_bytes = layout_scratch_bytes(&m->layout),
        .bytes_per_token = m->token_bytes,
        .kv_bytes_per_depth = metal_kv_bytes(m, 1),
    };
    snprintf(out->kernels, sizeof out->kernels, "%s",
             m->tensor ? "Metal 4, tensor operations" : "Metal 3.1, simdgroup matrices");
    snprintf(out->device, sizeof out->device, "%s", m->name);
}

static enum backend_pressure pressure_now(const struct backend_model *m) {
    return metal_pressure_level(m->pressure);
}

const struct backend backend_metal = {
    .name = "metal",
    .probe = metal_probe,
    .open = metal_open,
    .close = metal_close,
    .session_new = metal_session_new,
    .session_free = metal_session_free,
    .position = metal_position,
    .reset = metal_reset,
    .prefill = metal_prefill,
    .decode_submit = metal_decode_submit,
    .decode_wait = metal_decode_wait,
    .sample_begin = metal_sample_begin,
    .rewind = metal_rewind,
    .state_bytes = metal_state_bytes,
    .state_new = metal_state_new,
    .state_free = metal_state_free,
    .state_save = metal_state_save,
    .state_restore = metal_state_restore,
    .state_export = metal_state_export,
    .state_import = metal_state_import,
    .kv_bytes = metal_kv_bytes,
    .kv_export = metal_kv_export,
    .kv_import = metal_kv_import,
    .stats = metal_stats,
    .pressure = pressure_now,
    .plan = metal_plan,
    .selftest = metal_selftest,
};
