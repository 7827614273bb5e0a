/* Routing (docs/model.md): the eight largest scores, weighted by their softmax. Scores come
 * from float inputs, so that the choice is as exact as the row it is made from. */
#include "backend/cpu/cpu.h"

#include <math.h>
#include <string.h>

/* Softmax over all experts renormalised over the chosen ones is softmax over the chosen scores.
 * Ties go to the lower index: a later equal score never displaces an earlier one. */
void router_choose(const float *scores, int32_t experts, int32_t top_k, float *routing) {
    int32_t id[16] = {0}, n = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (n == top_k && !(scores[e] > scores[id[n - 1]])) continue;
        int32_t i = n < top_k ? n++ : n - 1;
        for (; i > 0 && scores[e] > scores[id[i - 1]]; i--) id[i] = id[i - 1];
        id[i] = e;
    }
    float sum = 0;
    for (int32_t i = 0; i < top_k; i++) {
        routing[i] = (float)id[i];
        routing[top_k + i] = expf(scores[id[i]] - scores[id[0]]);
        sum += routing[top_k + i];
    }
    for (int32_t i = 0; i < top_k; i++) routing[top_k + i] /= sum;
}

/* A counting sort: pairs of (row, expert) by expert, rows ascending within one. The shared expert
 * is number E and has every row. */
void router_group(struct backend_model *m) {
    struct scratch *x = &m->x;
    int32_t experts = model_shape(m)->experts, top_k = model_shape(m)->top_k;
    int32_t *begin = x->expert_begin;
    memset(begin, 0, ((size_t)experts + 2) * sizeof *begin);
    for (int32_t r = 0; r < x->rows; r++) {
        const float *routing = x->routing + (size_t)r * 2 * (size_t)top_k;
        for (int32_t i = 0; i < top_k; i++) begin[(int32_t)routing[i] + 1]++;
    }
    for (int32_t e = 0; e < experts; e++) begin[e + 1] += begin[e];
    begin[experts + 1] = begin[experts] + x->rows;
    /* Placing moves begin[e] to the end of e, which is the begin of e + 1: shift back after. */
    for (int32_t r = 0; r < x->rows; r++) {
        const float *routing = x->routing + (size_t)r * 2 * (size_t)top_k;
        for (int32_t i = 0; i < top_k; i++) {
            int32_t at = begin[(int32_t)routing[i]]++;
            x->pair_row[at] = r;
            x->pair_weight[at] = routing[top_k + i];
        }
        int32_t at = x->rows * top_k + r;
        float gate = x->scores[(size_t)r * (size_t)(experts + 1) + (size_t)experts];
        x->pair_row[at] = r;
        x->pair_weight[at] = 1.0f / (1.0f + expf(-gate));
    }
    memmove(begin + 1, begin, (size_t)experts * sizeof *begin);
    begin[0] = 0;
}
