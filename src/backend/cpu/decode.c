/* One token. Every product is a matrix times one vector, so the time is that of reading the weights
 * once. Work too small to split (norms, quantisation of a row, the choice of experts) is done by
 * every thread for itself: that costs less than a barrier. Barriers per layer: 6, or 8 with
 * attention. */
#include "backend/cpu/cpu.h"

/* Adds the columns of the mixer's output that this thread computed (see project). */
static void add_own(struct worker *w) {
    int32_t begin, end;
    cpu_pool_part(model_shape(w->m)->hidden / ROW_BLOCK, w->thread, w->threads, &begin, &end);
    for (int32_t i = begin * ROW_BLOCK; i < end * ROW_BLOCK; i++) w->x->x[i] += w->x->out[i];
}

static void layer_row(struct worker *w, int32_t layer) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    const struct layer_weights *l = &m->w->layer[layer];
    struct scratch *x = w->x;
    size_t h = (size_t)s->hidden;

    norm_own(w, l->input_norm);
    trace_rows(w, STAGE_INPUT_NORM, layer, w->lane->normed, h, s->hidden);
    if (shape_is_attention(s, layer))
        attention(w, layer, &w->lane->normed_q);
    else
        deltanet(w, layer, w->lane->normed, h, &w->lane->normed_q);
    trace_rows(w, STAGE_MIXER_OUT, layer, x->out, h, s->hidden);
    add_own(w);
    cpu_pool_barrier(m->pool);

    norm_own(w, l->post_norm);
    trace_rows(w, STAGE_POST_NORM, layer, w->lane->normed, h, s->hidden);
    project_float(w,
                  (struct product[]){{&l->moe.router, x->scores},
                                     {&l->moe.shared_gate, x->scores + s->experts}},
                  2, w->lane->normed, h, 1, (size_t)s->experts + 1);
    cpu_pool_barrier(m->pool);
    router_choose(x->scores, s->experts, s->top_k, w->lane->routing);
    trace_rows(w, STAGE_ROUTER, layer, w->lane->routing, 0, 2 * s->top_k);
    experts_row(w, layer, &w->lane->normed_q);
    trace_rows(w, STAGE_EXPERTS, layer, x->out, h, s->hidden);
    trace_rows(w, STAGE_SHARED, layer, x->shared, h, s->hidden);
    trace_rows(w, STAGE_LAYER_OUT, layer, x->x, h, s->hidden);
    layer_fetch(w, layer + 1);
    cpu_pool_barrier(m->pool);
}

void decode_row(void *model, int32_t thread, int32_t threads) {
    struct backend_model *m = model;
    struct worker w = {m, &m->x, &m->x.lane[thread], thread, threads};
    const struct shape *s = model_shape(m);
    w.lane->finite = true;
    if (thread == 0) {
        embed_row(m, m->x.ids[0], m->x.x);
        rope_angles(m->inv_freq, m->x.pos[0], s->rotary_dim / 2, m->x.rope);
    }
    trace_rows(&w, STAGE_EMBED, -1, m->x.x, (size_t)s->hidden, s->hidden);
    cpu_pool_barrier(m->pool);
    for (int32_t l = 0; l < m->w->layers; l++) layer_row(&w, l);
    head(&w);
}
