/* Mixture of experts (docs/model.md), in every layer: a router chooses a few small networks per
 * token; one shared network always runs, scaled by a gate of its own. */
#include "backend/ref/ref.h"

void ref_route(float *scores, int32_t experts, int32_t top_k, float *routing) {
    float *ids = routing, *weights = routing + top_k;
    ref_softmax(scores, experts);
    double chosen_sum = 0;
    for (int32_t i = 0; i < top_k; i++) {
        int32_t best = -1;
        for (int32_t e = 0; e < experts; e++) {
            bool taken = false;
            for (int32_t j = 0; j < i; j++) taken |= (int32_t)ids[j] == e;
            /* Strictly larger: of equals the lower index wins. The first free expert is taken even
             * when its score is NaN, so that ids are always valid. */
            if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
        }
        ids[i] = (float)best;
        weights[i] = scores[best];
        chosen_sum += (double)weights[i];
    }
    for (int32_t i = 0; i < top_k; i++) weights[i] = (float)((double)weights[i] / chosen_sum);
}

/* down (silu(gate x) * up x): gate, up [width, H], down [H, width], inner scratch [2][width] */
static void expert(const struct mat *gate, const struct mat *up, const struct mat *down,
                   const float *in, float *inner, float *out) {
    float *g = inner, *u = inner + gate->rows;
    mat_vec(gate, in, g);
    mat_vec(up, in, u);
    for (int32_t i = 0; i < gate->rows; i++) g[i] = ref_silu(g[i]) * u[i];
    mat_vec(down, g, out);
}

void ref_moe(struct backend_session *s, int32_t layer, const float *in, float *out) {
    const struct shape *sh = s->model->w->shape;
    const struct moe_weights *w = &s->model->w->layer[layer].moe;
    struct ref_scratch *x = &s->model->x;
    int32_t hidden = sh->hidden;

    mat_vec(&w->router, in, x->probs);
    ref_route(x->probs, sh->experts, sh->top_k, x->routing);
    ref_trace(s, STAGE_ROUTER, layer, x->routing, 2 * sh->top_k);

    for (int32_t i = 0; i < hidden; i++) out[i] = 0;
    for (int32_t j = 0; j < sh->top_k; j++) {
        int32_t e = (int32_t)x->routing[j];
        float weight = x->routing[sh->top_k + j];
        expert(&w->gate[e], &w->up[e], &w->down[e], in, x->inner, x->expert);
        for (int32_t i = 0; i < hidden; i++) out[i] += weight * x->expert[i];
    }
    ref_trace(s, STAGE_EXPERTS, layer, out, hidden);

    float gate; /* one number per token, outside the router's softmax */
    mat_vec(&w->shared_gate, in, &gate);
    gate = ref_sigmoid(gate);
    expert(&w->shared_gate_proj, &w->shared_up_proj, &w->shared_down_proj, in, x->inner, x->shared);
    for (int32_t i = 0; i < hidden; i++) x->shared[i] *= gate;
    ref_trace(s, STAGE_SHARED, layer, x->shared, hidden);
    for (int32_t i = 0; i < hidden; i++) out[i] += x->shared[i];
}
