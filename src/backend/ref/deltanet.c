/* Gated DeltaNet (docs/model.md), three layers of four: linear attention whose memory is one
 * 128 x 128 matrix S per value head, however long the text. A token first lets S fade, then
 * corrects it so that its key recalls its value, then reads it with its query. */
#include <string.h>

#include "backend/ref/ref.h"

/* Causal depthwise convolution over time, four taps, then SiLU, for every channel:
 *   c_t = silu(w0 u_(t-3) + w1 u_(t-2) + w2 u_(t-1) + w3 u_t)
 * history[3][channels] holds the last three inputs u (zeros before the start), oldest first;
 * u[channels] is replaced by c. */
static void convolve(const float *taps, float *history, float *u, int32_t channels) {
    size_t n = (size_t)channels;
    for (size_t c = 0; c < n; c++) {
        const float *w = taps + 4 * c;
        float now = u[c];
        u[c] = ref_silu(w[0] * history[c] + w[1] * history[n + c] + w[2] * history[2 * n + c] +
                        w[3] * now);
        history[c] = history[n + c];
        history[n + c] = history[2 * n + c];
        history[2 * n + c] = now;
    }
}

/* beta = sigmoid(b): how strongly this token writes. decay = exp(g) in (0, 1]: what S keeps, with
 * g = -exp(a_log) softplus(a + dt_bias). gates: [heads] b and [heads] a in, beta and decay out. */
static void make_gates(const struct deltanet_weights *w, float *gates, int32_t heads) {
    float *beta = gates, *decay = gates + heads;
    for (int32_t h = 0; h < heads; h++) {
        beta[h] = ref_sigmoid(beta[h]);
        decay[h] = expf(-expf(w->a_log[h]) * ref_softplus(decay[h] + w->dt_bias[h]));
    }
}

/* The delta rule for one value head, state S[n key][n value]:
 *   S <- decay S;  m = S^T k;  d = beta (v - m);  S <- S + k d^T;  out = S^T q
 * m is what the faded memory recalls for k; out reads the corrected memory. */
void ref_delta_rule(float *state, const float *q, const float *k, const float *v, float beta,
                    float decay, float *out, int32_t n) {
    size_t width = (size_t)n;
    memset(out, 0, width * sizeof *out); /* holds m, then d, before the result */
    for (size_t i = 0; i < width; i++) {
        float *row = state + i * width;
        for (size_t j = 0; j < width; j++) {
            row[j] *= decay;
            out[j] += row[j] * k[i];
        }
    }
    for (size_t j = 0; j < width; j++) out[j] = beta * (v[j] - out[j]);
    for (size_t i = 0; i < width; i++) {
        float *row = state + i * width;
        for (size_t j = 0; j < width; j++) row[j] += k[i] * out[j];
    }
    memset(out, 0, width * sizeof *out);
    for (size_t i = 0; i < width; i++) {
        const float *row = state + i * width;
        for (size_t j = 0; j < width; j++) out[j] += row[j] * q[i];
    }
}

/* channels[conv_dim] = q[gdn_k_heads][128], k[gdn_k_heads][128], v[gdn_v_heads][128]. Two
 * neighbouring value heads share a query and a key. */
static void recur(struct backend_session *s, int32_t layer) {
    const struct shape *sh = s->model->w->shape;
    struct ref_scratch *x = &s->model->x;
    int32_t dim = sh->gdn_head_dim, heads = sh->gdn_v_heads;
    size_t n = (size_t)dim, square = n * n;
    float *state = s->state + (size_t)shape_kind_index(sh, layer) * (size_t)heads * square;
    float *q = x->channels, *k = q + sh->gdn_k_dim, *v = k + sh->gdn_k_dim;

    for (int32_t h = 0; h < sh->gdn_k_heads; h++) {
        ref_l2_norm(q + (size_t)h * n, dim, 1.0f / sqrtf((float)dim));
        ref_l2_norm(k + (size_t)h * n, dim, 1.0f);
    }
    for (int32_t h = 0; h < heads; h++) {
        size_t key_head = (size_t)(h / (heads / sh->gdn_k_heads));
        ref_delta_rule(state + (size_t)h * square, q + key_head * n, k + key_head * n,
                       v + (size_t)h * n, x->gates[h], x->gates[heads + h],
                       x->delta + (size_t)h * n, dim);
    }
}

void ref_deltanet(struct backend_session *s, int32_t layer, const float *in, float *out) {
    const struct shape *sh = s->model->w->shape;
    const struct deltanet_weights *w = &s->model->w->layer[layer].deltanet;
    struct ref_scratch *x = &s->model->x;
    int32_t dim = sh->gdn_head_dim;
    size_t history = (size_t)(sh->conv_taps - 1) * (size_t)sh->conv_dim;
    float *conv = s->conv + (size_t)shape_kind_index(sh, layer) * history;

    mat_vec(&w->in_proj_qkv, in, x->channels);
    mat_vec(&w->in_proj_z, in, x->z);
    mat_vec(&w->in_proj_b, in, x->gates);
    mat_vec(&w->in_proj_a, in, x->gates + sh->gdn_v_heads);

    convolve(w->conv, conv, x->channels, sh->conv_dim);
    ref_trace(s, STAGE_GDN_CONV, layer, x->channels, sh->conv_dim);
    make_gates(w, x->gates, sh->gdn_v_heads);
    ref_trace(s, STAGE_GDN_GATES, layer, x->gates, 2 * sh->gdn_v_heads);
    recur(s, layer);
    ref_trace(s, STAGE_GDN_DELTA, layer, x->delta, sh->gdn_v_dim);

    /* Gated norm per value head: norm first, gate after. */
    for (int32_t h = 0; h < sh->gdn_v_heads; h++) {
        float *head = x->delta + (size_t)h * (size_t)dim;
        const float *z = x->z + (size_t)h * (size_t)dim;
        ref_rms_norm(head, w->norm, head, dim, sh->norm_eps);
        for (int32_t i = 0; i < dim; i++) head[i] *= ref_silu(z[i]);
    }
    ref_trace(s, STAGE_GDN_NORM, layer, x->delta, sh->gdn_v_dim);
    mat_vec(&w->out_proj, x->delta, out);
}
