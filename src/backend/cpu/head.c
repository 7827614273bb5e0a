/* Both ends of the model: embedding rows, and the final norm with the head's logits. */
#include "backend/cpu/cpu.h"

#include <string.h>

void embed_row(const struct backend_model *m, int32_t token, float *x) {
    mat_row(&m->w->embed, token, x);
}

/* The row whose logits are wanted, alone: every thread norms it for itself. */
static void head_row(struct worker *w, int32_t row) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    float *logits = w->x->logits[row];
    int32_t begin, end;
    m->k->rms_norm(w->x->x + (size_t)row * (size_t)s->hidden, m->w->final_norm, s->hidden,
                   s->norm_eps, w->lane->normed);
    m->k->quantise(w->lane->normed, s->hidden, &w->lane->normed_q, 0);
    cpu_pool_part(s->vocab / TILE, w->thread, w->threads, &begin, &end);
    begin *= TILE, end *= TILE;
    m->k->matvec4(&m->w->lm_head, begin, end, &w->lane->normed_q, logits + begin,
                  (struct ahead){0});
    if (!m->k->all_finite(logits + begin, end - begin)) w->lane->finite = false;
}

/* Several wanted rows: the head's rows in tiles, each times all wanted rows. */
static void head_rows(struct worker *w) {
    const struct backend_model *m = w->m;
    const struct shape *s = model_shape(m);
    struct scratch *x = w->x;
    int32_t begin, end;
    cpu_pool_part(x->n_wanted, w->thread, w->threads, &begin, &end);
    for (int32_t i = begin; i < end; i++) {
        size_t row = (size_t)x->wanted[i], at = row * (size_t)s->hidden;
        m->k->rms_norm(x->x + at, m->w->final_norm, s->hidden, s->norm_eps, x->normed + at);
        m->k->quantise(x->normed + at, s->hidden, &x->normed_q, row);
    }
    cpu_pool_barrier(m->pool);
    cpu_pool_part(s->vocab / TILE, w->thread, w->threads, &begin, &end);
    float *tile = w->lane->gate;
    for (int32_t first = 0; first < x->n_wanted; first += TOKEN_BLOCK) {
        int32_t n = x->n_wanted - first < TOKEN_BLOCK ? x->n_wanted - first : TOKEN_BLOCK;
        const int32_t *rows = x->wanted + first;
        for (int32_t v = begin * TILE; v < end * TILE; v += TILE) {
            m->k->matmul4(&m->w->lm_head, v, v + TILE, &x->normed_q, rows, n, tile, TILE);
            if (!m->k->all_finite(tile, n * TILE)) w->lane->finite = false;
            for (int32_t i = 0; i < n; i++) {
                memcpy(x->logits[rows[i]] + v, tile + (size_t)i * TILE, TILE * sizeof *tile);
            }
        }
    }
}

static void trace_head(struct worker *w, const float *normed) {
    const struct backend_options *o = &w->m->options;
    const struct shape *s = model_shape(w->m);
    if (!o->trace) return;
    cpu_pool_barrier(w->m->pool);
    for (int32_t i = 0; i < w->x->n_wanted && w->thread == 0; i++) {
        int32_t row = w->x->wanted[i];
        const float *n = w->x->n_wanted == 1 ? normed : w->x->normed + (size_t)row * s->hidden;
        o->trace(o->trace_arg, STAGE_FINAL_NORM, -1, w->x->pos[row], n, s->hidden);
        o->trace(o->trace_arg, STAGE_LOGITS, -1, w->x->pos[row], w->x->logits[row], s->vocab);
    }
}

void head(struct worker *w) {
    const struct shape *s = model_shape(w->m);
    int32_t begin, end;
    cpu_pool_part(w->x->rows, w->thread, w->threads, &begin, &end);
    for (int32_t r = begin; r < end; r++) {
        const float *row = w->x->x + (size_t)r * (size_t)s->hidden;
        if (!w->m->k->all_finite(row, s->hidden)) w->lane->finite = false;
    }
    if (w->x->n_wanted == 0) return;
    if (w->x->n_wanted == 1)
        head_row(w, w->x->wanted[0]);
    else
        head_rows(w);
    trace_head(w, w->lane->normed);
}
