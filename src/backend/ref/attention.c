/* Gated full attention (docs/model.md), every fourth layer. Eight query heads share one key and
 * value head; keys and values of all earlier tokens are kept. */
#include "backend/ref/ref.h"

static float dot(const float *a, const float *b, int32_t n) {
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)a[i] * (double)b[i];
    return (float)sum;
}

/* One head: query[head_dim] over keys and values [rows] that are stride floats apart.
 * mix = softmax(query . keys / sqrt(head_dim)) values */
static void attend(const float *query, const float *keys, const float *values, int32_t rows,
                   size_t stride, int32_t head_dim, float *scores, float *mix) {
    float scale = 1.0f / sqrtf((float)head_dim);
    for (int32_t t = 0; t < rows; t++) {
        scores[t] = dot(query, keys + (size_t)t * stride, head_dim) * scale;
    }
    ref_softmax(scores, rows);
    for (int32_t d = 0; d < head_dim; d++) mix[d] = 0;
    for (int32_t t = 0; t < rows; t++) {
        const float *value = values + (size_t)t * stride;
        for (int32_t d = 0; d < head_dim; d++) mix[d] += scores[t] * value[d];
    }
}

/* Queries, keys and values of this token. query_gate is [q_heads][2][head_dim]: each head's gate
 * follows its query. Keys are stored after norm and RoPE, values as they come. */
static void project(struct backend_session *s, int32_t layer, const float *in, float *key,
                    float *value) {
    const struct shape *sh = s->model->w->shape;
    const struct attention_weights *w = &s->model->w->layer[layer].attention;
    struct ref_scratch *x = &s->model->x;
    int32_t dim = sh->head_dim, half = sh->rotary_dim / 2;

    mat_vec(&w->q_proj, in, x->query_gate);
    mat_vec(&w->k_proj, in, key);
    mat_vec(&w->v_proj, in, value);
    for (int32_t h = 0; h < sh->q_heads; h++) {
        float *query = x->query + (size_t)h * (size_t)dim;
        ref_rms_norm(x->query_gate + 2 * (size_t)h * (size_t)dim, w->q_norm, query, dim,
                     sh->norm_eps);
        ref_rope(query, x->rope_cos, x->rope_sin, half);
    }
    for (int32_t h = 0; h < sh->kv_heads; h++) {
        float *k = key + (size_t)h * (size_t)dim;
        ref_rms_norm(k, w->k_norm, k, dim, sh->norm_eps);
        ref_rope(k, x->rope_cos, x->rope_sin, half);
    }
    ref_trace(s, STAGE_ATTN_Q, layer, x->query, sh->q_dim);
    ref_trace(s, STAGE_ATTN_K, layer, key, sh->kv_dim);
    ref_trace(s, STAGE_ATTN_V, layer, value, sh->kv_dim);
}

void ref_attention(struct backend_session *s, int32_t layer, const float *in, float *out) {
    const struct shape *sh = s->model->w->shape;
    struct ref_scratch *x = &s->model->x;
    size_t dim = (size_t)sh->head_dim, stride = (size_t)sh->kv_dim;
    size_t first = (size_t)shape_kind_index(sh, layer) * (size_t)s->context * stride;
    float *keys = s->keys + first, *values = s->values + first; /* [context][kv_dim] */
    size_t row = (size_t)s->position * stride;

    project(s, layer, in, keys + row, values + row);

    for (int32_t h = 0; h < sh->q_heads; h++) {
        size_t kv_head = (size_t)(h / (sh->q_heads / sh->kv_heads));
        const float *gate = x->query_gate + (2 * (size_t)h + 1) * dim;
        float *mix = x->mix + (size_t)h * dim;
        attend(x->query + (size_t)h * dim, keys + kv_head * dim, values + kv_head * dim,
               s->position + 1, stride, sh->head_dim, x->scores, mix);
        for (size_t d = 0; d < dim; d++) mix[d] *= ref_sigmoid(gate[d]);
    }
    ref_trace(s, STAGE_ATTN_MIX, layer, x->mix, sh->q_dim);
    mat_vec(&s->model->w->layer[layer].attention.o_proj, x->mix, out);
}
