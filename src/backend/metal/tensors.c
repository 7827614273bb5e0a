#include "backend/metal/tensors.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { PART = 64, EXPERT_ALIGN = 4096 }; /* as in a packed file */

static const double GIB = 1024.0 * 1024.0 * 1024.0;

struct placer {
    struct metal_tensors *t;
    bool in_place;
    uint64_t at; /* next free byte when tensors are to be copied */
};

static uint64_t align_up(uint64_t n, uint64_t to) {
    return (n + to - 1) / to * to;
}

static uint64_t smaller(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

static uint64_t larger(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

/* ---- matrices -------------------------------------------------------------------------------- */

static void take_place(struct placer *p, struct metal_mat *m) {
    if (p->in_place) {
        m->codes = (uint64_t)(uintptr_t)m->source->data;
        m->scales = (uint64_t)(uintptr_t)m->source->scales;
        m->biases = (uint64_t)(uintptr_t)m->source->biases;
        return;
    }
    m->codes = align_up(p->at, PART);
    m->scales = align_up(m->codes + mat_code_bytes(m), PART);
    m->biases = align_up(m->scales + mat_scale_bytes(m), PART);
    p->at = m->biases + mat_scale_bytes(m);
}

static void describe(struct placer *p, struct metal_mat *m, int32_t rows, int32_t cols,
                     int32_t bits, const struct mat *source, int32_t items) {
    *m = (struct metal_mat){
        .rows = rows, .cols = cols, .bits = source ? source->bits : bits, .items = items};
    m->source = source;
    p->t->mat_bytes += (uint64_t)items * (mat_code_bytes(m) + 2 * mat_scale_bytes(m));
}

static void add_unit(struct placer *p, struct metal_mat *const *mats, int32_t n) {
    struct metal_unit *u = &p->t->unit[p->t->units++];
    *u = (struct metal_unit){.mats = n, .begin = UINT64_MAX};
    for (int32_t i = 0; i < n; i++) {
        const struct metal_mat *m = u->mat[i] = mats[i];
        uint64_t last = (uint64_t)(m->items - 1) * m->stride;
        u->begin = smaller(u->begin, smaller(m->codes, smaller(m->scales, m->biases)));
        u->end = larger(u->end, last + larger(m->codes + mat_code_bytes(m),
                                              larger(m->scales, m->biases) + mat_scale_bytes(m)));
    }
}

static void place(struct placer *p, struct metal_mat *m, int32_t rows, int32_t cols, int32_t bits,
                  const struct mat *source) {
    describe(p, m, rows, cols, bits, source, 1);
    take_place(p, m);
    add_unit(p, &m, 1);
}

/* Kernels take the stride as 32 bits (args of experts), a multiple of 16; the real shape's is
 * 1,769,472. bytes: of one expert, or less. */
static int check_stride(uint64_t stride, uint64_t bytes, lily_err *err) {
    if (stride >= bytes && stride <= UINT32_MAX && stride % 16 == 0) return LILY_OK;
    return ERR(err, LILY_EMODEL,
               "packed file: found experts %" PRId64 " bytes apart, expected a multiple of 16 from "
               "%" PRIu64 " to %" PRIu64 "; pack the checkpoint again (lily pack)",
               (int64_t)stride, bytes, (uint64_t)UINT32_MAX);
}

/* Whether expert e lies at e strides from the first, for all of them. */
static bool evenly_spaced(const struct metal_mat *m, uint64_t stride) {
    for (int32_t e = 1; e < m->items; e++) {
        const struct mat *first = &m->source[0], *x = &m->source[e];
        uintptr_t ahead = (uintptr_t)((uint64_t)e * stride);
        if ((uintptr_t)x->data != (uintptr_t)first->data + ahead ||
            (uintptr_t)x->scales != (uintptr_t)first->scales + ahead ||
            (uintptr_t)x->biases != (uintptr_t)first->biases + ahead) {
            return false;
        }
    }
    return true;
}

/* Gate, up and down of one expert together, experts at one distance. */
static int place_experts(struct placer *p, struct metal_layer_tensors *l,
                         const struct moe_weights *w, lily_err *err) {
    const struct shape *s = p->t->shape;
    struct metal_mat *mats[] = {&l->gate, &l->up, &l->down};
    describe(p, &l->gate, s->expert_width, s->hidden, 4, w ? w->gate : NULL, s->experts);
    describe(p, &l->up, s->expert_width, s->hidden, 4, w ? w->up : NULL, s->experts);
    describe(p, &l->down, s->hidden, s->expert_width, 4, w ? w->down : NULL, s->experts);
    p->at = align_up(p->at, EXPERT_ALIGN);
    uint64_t begin = p->at;
    for (int i = 0; i < 3; i++) take_place(p, mats[i]);
    uint64_t stride = align_up(p->at - begin, EXPERT_ALIGN);
    if (p->in_place && s->experts > 1) {
        stride = (uint64_t)((uintptr_t)w->gate[1].data - (uintptr_t)w->gate[0].data);
    }
    int rc = check_stride(stride, mat_code_bytes(&l->gate), err);
    if (rc != LILY_OK) return rc;
    for (int i = 0; i < 3; i++) {
        mats[i]->stride = stride;
        if (!p->in_place || evenly_spaced(mats[i], stride)) continue;
        return ERR(err, LILY_EMODEL,
                   "packed file: found experts at uneven distances, expected one stride; pack the "
                   "checkpoint again (lily pack)");
    }
    p->at = begin + (uint64_t)s->experts * stride;
    add_unit(p, mats, 3);
    return LILY_OK;
}

/* ---- layers ---------------------------------------------------------------------------------- */

static void place_mixer(struct placer *p, int32_t index, const struct layer_weights *w) {
    const struct shape *s = p->t->shape;
    struct metal_layer_tensors *l = &p->t->layer[index];
    int32_t h = s->hidden;
    if (shape_is_attention(s, index)) {
        const struct attention_weights *a = w ? &w->attention : NULL;
        place(p, &l->attention.q, 2 * s->q_dim, h, 4, a ? &a->q_proj : NULL);
        place(p, &l->attention.k, s->kv_dim, h, 4, a ? &a->k_proj : NULL);
        place(p, &l->attention.v, s->kv_dim, h, 4, a ? &a->v_proj : NULL);
        place(p, &l->attention.o, h, s->q_dim, 4, a ? &a->o_proj : NULL);
        l->attention.q_norm.source = a ? a->q_norm : NULL;
        l->attention.k_norm.source = a ? a->k_norm : NULL;
        return;
    }
    const struct deltanet_weights *d = w ? &w->deltanet : NULL;
    place(p, &l->deltanet.qkv, s->conv_dim, h, 4, d ? &d->in_proj_qkv : NULL);
    place(p, &l->deltanet.z, s->gdn_v_dim, h, 4, d ? &d->in_proj_z : NULL);
    place(p, &l->deltanet.b, s->gdn_v_heads, h, 4, d ? &d->in_proj_b : NULL);
    place(p, &l->deltanet.a, s->gdn_v_heads, h, 4, d ? &d->in_proj_a : NULL);
    place(p, &l->deltanet.out, h, s->gdn_v_dim, 4, d ? &d->out_proj : NULL);
    l->deltanet.conv.source = d ? d->conv : NULL;
    l->deltanet.a_log.source = d ? d->a_log : NULL;
    l->deltanet.dt_bias.source = d ? d->dt_bias : NULL;
    l->deltanet.norm.source = d ? d->norm : NULL;
}

static int place_layer(struct placer *p, int32_t index, const struct layer_weights *w,
                       lily_err *err) {
    const struct shape *s = p->t->shape;
    struct metal_layer_tensors *l = &p->t->layer[index];
    const struct moe_weights *moe = w ? &w->moe : NULL;
    int32_t h = s->hidden, wide = s->shared_width;
    l->input_norm.source = w ? w->input_norm : NULL;
    l->post_norm.source = w ? w->post_norm : NULL;
    place_mixer(p, index, w);
    place(p, &l->router, s->experts, h, 8, w ? &moe->router : NULL);
    place(p, &l->shared_gate_proj, wide, h, 4, w ? &moe->shared_gate_proj : NULL);
    place(p, &l->shared_up_proj, wide, h, 4, w ? &moe->shared_up_proj : NULL);
    place(p, &l->shared_down_proj, h, wide, 4, w ? &moe->shared_down_proj : NULL);
    place(p, &l->shared_gate, 1, h, 8, w ? &moe->shared_gate : NULL);
    return place_experts(p, l, moe, err);
}

/* ---- vectors --------------------------------------------------------------------------------- */

static void vector_sizes(struct metal_tensors *t) {
    const struct shape *s = t->shape;
    t->final_norm.n = s->hidden;
    t->inv_freq.n = s->rotary_dim / 2;
    for (int32_t i = 0; i < t->layers; i++) {
        struct metal_layer_tensors *l = &t->layer[i];
        l->input_norm.n = l->post_norm.n = s->hidden;
        if (shape_is_attention(s, i)) {
            l->attention.q_norm.n = l->attention.k_norm.n = s->head_dim;
        } else {
            l->deltanet.conv.n = s->conv_dim * s->conv_taps;
            l->deltanet.a_log.n = l->deltanet.dt_bias.n = s->gdn_v_heads;
            l->deltanet.norm.n = s->gdn_head_dim;
        }
    }
}

void tensors_each_vector(struct metal_tensors *t,
                         void (*visit)(void *arg, struct metal_vector *vector), void *arg) {
    visit(arg, &t->inv_freq);
    for (int32_t i = 0; i < t->layers; i++) {
        struct metal_layer_tensors *l = &t->layer[i];
        struct metal_vector *const all[] = {
            &l->input_norm,    &l->post_norm,      &l->attention.q_norm, &l->attention.k_norm,
            &l->deltanet.conv, &l->deltanet.a_log, &l->deltanet.dt_bias, &l->deltanet.norm};
        for (size_t j = 0; j < sizeof all / sizeof *all; j++) {
            if (all[j]->n > 0) visit(arg, all[j]);
        }
    }
    visit(arg, &t->final_norm);
}

static void place_vector(void *arg, struct metal_vector *v) {
    struct metal_tensors *t = arg;
    v->at = t->small_bytes;
    t->small_bytes = align_up(v->at + 4 * (uint64_t)v->n, PART);
}

/* ---- windows --------------------------------------------------------------------------------- */

static int by_begin(const void *a, const void *b) {
    const struct metal_unit *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* From lowest to highest address, each window as long as it may be. */
static int cut_windows(struct metal_tensors *t, uint64_t max_window, int32_t first_buffer,
                       lily_err *err) {
    qsort(t->unit, (size_t)t->units, sizeof *t->unit, by_begin);
    max_window = max_window / METAL_PAGE * METAL_PAGE;
    for (int32_t i = 0; i < t->units; i++) {
        struct metal_unit *u = &t->unit[i];
        struct metal_window *w = t->windows ? &t->window[t->windows - 1] : NULL;
        uint64_t end = align_up(u->end, METAL_PAGE);
        if (!w || end - w->begin > max_window) {
            w = &t->window[t->windows++];
            *w = (struct metal_window){.begin = u->begin / METAL_PAGE * METAL_PAGE};
        }
        w->end = larger(w->end, end);
        if (end - w->begin > max_window) {
            return ERR(err, LILY_ENOMEM,
                       "Metal: found a tensor of %.2f GiB, expected at most the device's buffer "
                       "length of %.2f GiB; this device cannot hold the model",
                       (double)(u->end - u->begin) / GIB, (double)max_window / GIB);
        }
        for (int32_t j = 0; j < u->mats; j++) {
            struct metal_mat *m = u->mat[j];
            m->buffer = first_buffer + t->windows - 1;
            m->codes -= w->begin;
            m->scales -= w->begin;
            m->biases -= w->begin;
        }
    }
    return LILY_OK;
}

int tensors_place(const struct shape *shape, int32_t layers, const struct weights *w, bool in_place,
                  uint64_t max_window, int32_t first_buffer, struct metal_tensors *out,
                  lily_err *err) {
    enum { UNITS_A_LAYER = 11 };
    size_t units = 2 + (size_t)layers * UNITS_A_LAYER;
    *out = (struct metal_tensors){.shape = shape, .layers = layers, .in_place = in_place};
    out->layer = calloc((size_t)layers, sizeof *out->layer);
    out->unit = calloc(units, sizeof *out->unit);
    out->window = calloc(units, sizeof *out->window);
    struct placer p = {.t = out, .in_place = in_place};
    int rc = LILY_OK;
    if (!out->layer || !out->unit || !out->window) {
        rc = ERR_NOMEM(err, "Metal tensors");
        goto out;
    }
    place(&p, &out->embed, shape->vocab, shape->hidden, 4, w ? &w->embed : NULL);
    for (int32_t l = 0; l < layers && rc == LILY_OK; l++) {
        rc = place_layer(&p, l, w ? &w->layer[l] : NULL, err);
    }
    place(&p, &out->lm_head, shape->vocab, shape->hidden, 4, w ? &w->lm_head : NULL);
    out->final_norm.source = w ? w->final_norm : NULL;
    vector_sizes(out);
    tensors_each_vector(out, place_vector, out);
    if (rc == LILY_OK) rc = cut_windows(out, max_window, first_buffer, err);
out:
    if (rc != LILY_OK) tensors_free(out);
    return rc;
}

void tensors_free(struct metal_tensors *t) {
    free(t->layer);
    free(t->unit);
    free(t->window);
    *t = (struct metal_tensors){0};
}
