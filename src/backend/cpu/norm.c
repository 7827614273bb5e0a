/* Rows of the residual stream, RMS-normed (docs/model.md) and quantised for the products that
 * read them. The norms inside mixers (heads, gated norm) are kernels called where those rows are
 * made. */
#include "backend/cpu/cpu.h"

void norm_own(struct worker *w, const float *weight) {
    const struct shape *s = model_shape(w->m);
    w->m->k->rms_norm(w->x->x, weight, s->hidden, s->norm_eps, w->lane->normed);
    w->m->k->quantise(w->lane->normed, s->hidden, &w->lane->normed_q, 0);
}

void norm_row(struct worker *w, const float *weight, int32_t r) {
    const struct shape *s = model_shape(w->m);
    size_t at = (size_t)r * (size_t)s->hidden;
    w->m->k->rms_norm(w->x->x + at, weight, s->hidden, s->norm_eps, w->x->normed + at);
    w->m->k->quantise(w->x->normed + at, s->hidden, &w->x->normed_q, (size_t)r);
}
