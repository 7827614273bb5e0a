/* Opening a model: memory for one token's activations, and what the backend says about itself. The
 * weights stay where the checkpoint mapped them. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "backend/ref/ref.h"

/* Carves every array of the scratch memory out of one block. */
static int scratch_new(struct backend_model *m, lily_err *err) {
    const struct shape *s = m->w->shape;
    struct ref_scratch *x = &m->x;
    int32_t half = s->rotary_dim / 2;
    int32_t width = s->expert_width > s->shared_width ? s->expert_width : s->shared_width;
    const struct {
        float **array;
        int32_t n;
    } parts[] = {
        {&m->inv_freq, half},
        {&x->h, s->hidden},
        {&x->normed, s->hidden},
        {&x->mixed, s->hidden},
        {&x->rope_cos, half},
        {&x->rope_sin, half},
        {&x->query_gate, 2 * s->q_dim},
        {&x->query, s->q_dim},
        {&x->mix, s->q_dim},
        {&x->scores, m->options.max_context},
        {&x->channels, s->conv_dim},
        {&x->gates, 2 * s->gdn_v_heads},
        {&x->z, s->gdn_v_dim},
        {&x->delta, s->gdn_v_dim},
        {&x->probs, s->experts},
        {&x->routing, 2 * s->top_k},
        {&x->inner, 2 * width},
        {&x->expert, s->hidden},
        {&x->shared, s->hidden},
        {&x->logits, s->vocab},
        {&x->penalised, s->vocab},
    };
    size_t count = sizeof parts / sizeof parts[0], floats = 0;
    for (size_t i = 0; i < count; i++) floats += (size_t)parts[i].n;
    m->block_bytes = floats * sizeof(float);
    m->block = malloc(m->block_bytes);
    if (!m->block) return ERR_NOMEM(err, "reference backend");
    float *next = m->block;
    for (size_t i = 0; i < count; i++) {
        *parts[i].array = next;
        next += parts[i].n;
    }
    return LILY_OK;
}

static uint64_t session_bytes(const struct backend_model *m) {
    return (uint64_t)ref_kv_bytes(m, m->options.max_context) + 2 * ref_state_bytes(m) +
           (uint64_t)m->w->shape->vocab * sizeof(int32_t);
}

/* Refuses what the machine's memory cannot hold. Weights are counted too: they are mapped, but a
 * step reads nearly all of them. */
static int preflight(const struct backend_model *m, lily_err *err) {
    double gib = 1024.0 * 1024.0 * 1024.0;
    double need = (double)m->w->bytes + (double)m->block_bytes +
                  (double)session_bytes(m) * m->options.max_sessions;
    double have = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    if (need <= have) return LILY_OK;
    return ERR(err, LILY_ENOMEM,
               "reference backend: found %.1f GiB of memory, expected %.1f GiB for the weights and "
               "%d session(s) of %d tokens; ask for a shorter context or fewer sessions",
               have / gib, need / gib, m->options.max_sessions, m->options.max_context);
}

int ref_open(const struct weights *w, const struct backend_options *options,
             struct backend_model **out, lily_err *err) {
    if (options->max_sessions < 1 || options->max_context < 1 ||
        options->max_context > w->shape->max_context) {
        return ERR(err, LILY_EINVAL,
                   "reference backend: found %d session(s) of %d tokens, expected at least 1 of 1 "
                   "to %d",
                   options->max_sessions, options->max_context, w->shape->max_context);
    }
    struct backend_model *m = calloc(1, sizeof *m);
    if (!m) return ERR_NOMEM(err, "reference backend");
    m->w = w;
    m->options = *options;
    m->attention_layers = shape_attention_layers(w->shape, w->layers);
    m->gdn_layers = w->layers - m->attention_layers;
    int rc = scratch_new(m, err);
    m->sampled = malloc(((size_t)w->shape->vocab + 31) / 32 * sizeof *m->sampled);
    if (rc == LILY_OK && !m->sampled) rc = ERR_NOMEM(err, "reference backend");
    for (int i = 0; i < REF_FLIGHTS && rc == LILY_OK; i++) {
        m->flight[i].results = calloc((size_t)options->max_sessions, sizeof(struct decode_result));
        if (!m->flight[i].results) rc = ERR_NOMEM(err, "reference backend");
    }
    if (rc == LILY_OK) rc = preflight(m, err);
    if (rc != LILY_OK) {
        ref_close(m);
        return rc;
    }
    ref_rope_frequencies(w->shape, m->inv_freq);
    backend_sampled(w, options, m->sampled);
    *out = m;
    return LILY_OK;
}

void ref_close(struct backend_model *m) {
    if (!m) return;
    for (int i = 0; i < REF_FLIGHTS; i++) free(m->flight[i].results);
    free(m->sampled);
    free(m->block);
    free(m);
}

void ref_probe(struct backend_probe *out) {
    out->usable = true;
    snprintf(out->device, sizeof out->device, "portable C, 1 thread");
    snprintf(out->reason, sizeof out->reason,
             "runs everywhere; it is the readable reference and slow");
}

static uint64_t mat_bytes(const struct mat *m) {
    uint64_t values = (uint64_t)m->rows * mat_row_bytes(m);
    uint64_t groups = (uint64_t)m->rows * (uint64_t)(m->cols / 64);
    return values + (m->scales ? 4 * groups : 0);
}

/* Bytes of the matrices one token reads in a layer: top_k of the experts. */
static uint64_t layer_bytes(const struct weights *w, int32_t l) {
    const struct layer_weights *layer = &w->layer[l];
    const struct attention_weights *a = &layer->attention;
    const struct deltanet_weights *d = &layer->deltanet;
    const struct moe_weights *e = &layer->moe;
    uint64_t routed = mat_bytes(&e->gate[0]) + mat_bytes(&e->up[0]) + mat_bytes(&e->down[0]);
    uint64_t shared = mat_bytes(&e->shared_gate_proj) + mat_bytes(&e->shared_up_proj) +
                      mat_bytes(&e->shared_down_proj) + mat_bytes(&e->shared_gate);
    uint64_t mixer = shape_is_attention(w->shape, l)
                         ? mat_bytes(&a->q_proj) + mat_bytes(&a->k_proj) + mat_bytes(&a->v_proj) +
                               mat_bytes(&a->o_proj)
                         : mat_bytes(&d->in_proj_qkv) + mat_bytes(&d->in_proj_z) +
                               mat_bytes(&d->in_proj_b) + mat_bytes(&d->in_proj_a) +
                               mat_bytes(&d->out_proj);
    return mixer + mat_bytes(&e->router) + (uint64_t)w->shape->top_k * routed + shared;
}

/* bytes_per_token leaves out norms, convolution taps and decay: 0.2 % of it. */
void ref_stats(const struct backend_model *m, struct backend_stats *out) {
    const struct weights *w = m->w;
    uint64_t read = mat_bytes(&w->lm_head) + mat_bytes(&w->embed) / (uint64_t)w->embed.rows;
    for (int32_t l = 0; l < w->layers; l++) read += layer_bytes(w, l);
    *out = (struct backend_stats){
        .weight_bytes = w->bytes,
        .session_bytes = session_bytes(m),
        .scratch_bytes = m->block_bytes,
        .bytes_per_token = read + ref_state_bytes(m),
        .kv_bytes_per_depth = ref_kv_bytes(m, 1),
    };
    snprintf(out->kernels, sizeof out->kernels, "portable C");
}
