/* Attention at depth: the kernels for long contexts over a cache of random rows, against
 * softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate) computed here from the same cache. */
#include <math.h>
#include <stdlib.h>

#include "backend/metal/selftest.h"
#include "base/bf16.h"
#include "base/random.h"

enum { DEPTH = DECODE_LONG_FROM + 500, PROMPT = 4, LAYER = 3 };
/* A prompt's queries and results are bfloat16; in decode the new row of the cache is. */
static const double PROMPT_LIMIT = 0.2, DECODE_LIMIT = 2e-3;

struct cache { /* bf16 rows of kv_dim */
    const uint16_t *keys, *values;
};

static struct cache cache_of(const struct selftest *t) {
    const uint16_t *keys =
        session_bytes(t->session, SESSION_KV + shape_kind_index(t->text.s, LAYER));
    return (struct cache){keys, keys + (size_t)t->session->context * (size_t)t->text.s->kv_dim};
}

/* Keys up to 4 and values up to 1: a few hundred rows share most of the weight of a softmax. */
static void fill_cache(struct selftest *t) {
    size_t half = (size_t)t->session->context * (size_t)t->text.s->kv_dim;
    uint16_t *rows = session_bytes(t->session, SESSION_KV + shape_kind_index(t->text.s, LAYER));
    for (size_t i = 0; i < 2 * half; i++) {
        float x = (float)(random_at(7, i) >> 40) * 0x1p-23f - 1;
        rows[i] = f32_to_bf16(i < half ? 4 * x : x);
    }
}

/* The query of one head as the model defines it: norm, then the first rotary_dim dimensions turn.
 */
static void make_query(const struct selftest *t, const float *raw, int32_t pos, float *q) {
    const float *weight = t->text.w.layer[LAYER].attention.q_norm;
    int32_t n = t->text.s->head_dim, half = t->text.s->rotary_dim / 2;
    double squares = 0;
    for (int32_t d = 0; d < n; d++) squares += (double)raw[d] * (double)raw[d];
    float scale = (float)(1 / sqrt(squares / n + (double)t->text.s->norm_eps));
    for (int32_t d = 0; d < n; d++) q[d] = raw[d] * scale * weight[d];
    for (int32_t i = 0; i < half; i++) {
        float angle = (float)pos * (1.0f / (float)pow(t->text.s->rope_theta, 2.0 * i / (2 * half)));
        float a = q[i], b = q[i + half];
        q[i] = a * cosf(angle) - b * sinf(angle);
        q[i + half] = b * cosf(angle) + a * sinf(angle);
    }
}

/* One head over rows 0 .. pos; scores [pos + 1]. */
static void attend(const struct selftest *t, const float *q, const struct cache *c, int32_t kv_head,
                   int32_t pos, float *scores, float *out) {
    int32_t n = t->text.s->head_dim;
    size_t stride = (size_t)t->text.s->kv_dim, first = (size_t)kv_head * (size_t)n;
    float top = -INFINITY;
    double sum = 0, mix[PREFILL_ATTN_DIM] = {0};
    for (int32_t r = 0; r <= pos; r++) {
        const uint16_t *key = c->keys + (size_t)r * stride + first;
        float dot = 0;
        for (int32_t d = 0; d < n; d++) dot += q[d] * bf16_to_f32(key[d]);
        scores[r] = dot / sqrtf((float)n);
        top = fmaxf(top, scores[r]);
    }
    for (int32_t r = 0; r <= pos; r++) {
        const uint16_t *value = c->values + (size_t)r * stride + first;
        double weight = exp((double)scores[r] - (double)top);
        sum += weight;
        for (int32_t d = 0; d < n; d++) mix[d] += weight * (double)bf16_to_f32(value[d]);
    }
    for (int32_t d = 0; d < n; d++) out[d] = (float)(mix[d] / sum);
}

/* qg: float [q_heads][query, gate][head_dim] of the token at pos. out [q_dim]. */
static bool right_mix(const struct selftest *t, const float *qg, int32_t pos, float *out) {
    int32_t n = t->text.s->head_dim, group = t->text.s->q_heads / t->text.s->kv_heads;
    struct cache c = cache_of(t);
    float q[PREFILL_ATTN_DIM], *scores = malloc(((size_t)pos + 1) * sizeof *scores);
    for (int32_t h = 0; scores && h < t->text.s->q_heads; h++, qg += 2 * n, out += n) {
        make_query(t, qg, pos, q);
        attend(t, q, &c, h / group, pos, scores, out);
        for (int32_t d = 0; d < n; d++) out[d] /= 1 + expf(-qg[n + d]);
    }
    free(scores);
    return scores != NULL;
}

static void judge(struct selftest *t, int32_t kernel, int32_t pos, const float *row,
                  const float *right) {
    double error = selftest_error(row, right, t->text.s->q_dim);
    selftest_credit(t, kernel, STAGE_ATTN_MIX, LAYER, pos, error,
                    t->prefill ? PROMPT_LIMIT : DECODE_LIMIT);
}

/* Without room for the partial results of spans beside each other, one kernel goes through them. */
static bool in_one_kernel(const struct selftest *t) {
    return t->m->layout.rows == PROMPT;
}

void selftest_attention_row(struct selftest *t, enum stage stage, int32_t layer, int32_t pos,
                            const float *row, int32_t n) {
    if (stage != STAGE_ATTN_MIX || layer != LAYER) return;
    const float *qg = buffers_contents(&t->m->buffers, t->prefill ? METAL_P_QKV : METAL_QKV);
    float *right = malloc((size_t)n * sizeof *right);
    if (t->prefill) qg += (size_t)(pos - DEPTH) * 2 * (size_t)n;
    bool made = right && right_mix(t, qg, pos, right);
    if (made && t->prefill && in_one_kernel(t)) {
        judge(t, METAL_PREFILL_ATTN, pos, row, right);
    } else if (made) {
        judge(t, t->prefill ? METAL_PREFILL_ATTN_SPLIT : DECODE_ATTN_LONG, pos, row, right);
        judge(t, t->prefill ? METAL_PREFILL_ATTN_MERGE : DECODE_ATTN_MERGE, pos,
              t->prefill ? row : buffers_contents(&t->m->buffers, METAL_MERGED), right);
    }
    free(right);
}

static int prefill_deep(struct selftest *t, lily_err *err) {
    struct prefill_step step = {.ids = t->text.ids, .n = PROMPT};
    metal_reset(t->session);
    t->session->position = t->session->kv_rows = DEPTH;
    return metal_prefill(t->session, &step, err);
}

int selftest_attention(struct selftest *t, lily_err *err) {
    const int32_t rows = t->m->layout.rows;
    struct decode_result result;
    struct decode_slot slot = {.session = t->session, .token = t->text.ids[0]};
    t->mode = SELFTEST_DEEP;
    t->prefill = false;
    fill_cache(t);
    metal_reset(t->session);
    t->session->position = t->session->kv_rows = DEPTH;
    int rc = metal_decode_submit(t->m, &slot, 1, err);
    if (rc == LILY_OK) rc = metal_decode_wait(t->m, &result, 1, err);
    if (rc != LILY_OK) return rc;
    t->prefill = true;
    rc = prefill_deep(t, err);
    t->m->layout.rows = PROMPT; /* see in_one_kernel */
    if (rc == LILY_OK) rc = prefill_deep(t, err);
    t->m->layout.rows = rows;
    return rc;
}
