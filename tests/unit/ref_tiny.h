/* The tiny random checkpoints of tests/golden: 4 layers, bf16, of mini's shape and of one with
 * other counts. Their values are a hash of each tensor's name and an element's index;
 * tools/golden.py makes the same bits. Here they are bound in memory; mini's can be written as a
 * Hugging Face folder. */
#ifndef TESTS_REF_TINY_H
#define TESTS_REF_TINY_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"
#include "base/bf16.h"
#include "base/buf.h"
#include "model/weights.h"

enum { TINY_LAYERS = 4, TINY_TENSORS = 96 };

struct tiny_tensor {
    char name[128];
    size_t dims[3];
    int rank;
    size_t n;     /* elements */
    size_t first; /* element of tiny.bits */
};

struct tiny {
    struct weights w;
    struct tiny_tensor tensors[TINY_TENSORS];
    size_t n;
    uint16_t *bits; /* [elements] all tensors end to end */
    size_t elements;
    float **floats; /* the float32 copies of small tensors */
    size_t n_floats;
    struct mat *experts[TINY_LAYERS];
};

/* Every count another one: two key/value heads as in the real model, unequal widths. */
static const struct shape shape_odd = {.name = "odd",
                                       .hidden = 128,
                                       .layers = TINY_LAYERS,
                                       .vocab = 512,
                                       .q_heads = 16,
                                       .kv_heads = 2,
                                       .head_dim = 256,
                                       .rotary_dim = 64,
                                       .rope_theta = 1e7,
                                       .gdn_k_heads = 3,
                                       .gdn_v_heads = 6,
                                       .gdn_head_dim = 128,
                                       .conv_taps = 4,
                                       .experts = 24,
                                       .top_k = 8,
                                       .expert_width = 64,
                                       .shared_width = 192,
                                       .attention_every = 4,
                                       .group = 64,
                                       .max_context = 262144,
                                       .norm_eps = 1e-6f,
                                       .q_dim = 16 * 256,
                                       .kv_dim = 2 * 256,
                                       .gdn_k_dim = 3 * 128,
                                       .gdn_v_dim = 6 * 128,
                                       .conv_dim = 12 * 128};

static inline uint32_t tiny_mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

/* Appends a tensor of values offset + scale * u, u in [-1, 1) with 24 bits. scale is a power of
 * two: only the addition and the conversion to bf16 round. dims end with 0. */
static inline void tiny_add(struct tiny *t, float scale, float offset, const size_t *dims,
                            const char *prefix, const char *name) {
    struct tiny_tensor *x = &t->tensors[t->n++];
    if (t->n > TINY_TENSORS) abort();
    snprintf(x->name, sizeof x->name, "%s%s", prefix, name);
    x->n = 1;
    for (x->rank = 0; dims[x->rank]; x->rank++) {
        x->dims[x->rank] = dims[x->rank];
        x->n *= dims[x->rank];
    }
    x->first = t->elements;
    t->elements += x->n;
    t->bits = realloc(t->bits, t->elements * sizeof *t->bits);
    if (!t->bits) abort();
    uint32_t seed = 2166136261u;
    for (const char *c = x->name; *c; c++) seed = (seed ^ (uint8_t)*c) * 16777619u;
    for (size_t i = 0; i < x->n; i++) {
        uint32_t h = tiny_mix(tiny_mix((uint32_t)i + seed));
        float u = (float)((int32_t)(h >> 8) - 8388608) * (1.0f / 8388608.0f);
        t->bits[x->first + i] = f32_to_bf16(scale * u + offset);
    }
}
#define TINY_DIMS(...) ((const size_t[]){__VA_ARGS__, 0})

static inline void tiny_add_layer(struct tiny *t, const struct shape *s, int32_t layer) {
    char p[64], a[80], m[80];
    size_t h = (size_t)s->hidden, q = (size_t)s->q_dim, kv = (size_t)s->kv_dim;
    size_t heads = (size_t)s->gdn_v_heads, conv = (size_t)s->conv_dim, v = (size_t)s->gdn_v_dim;
    size_t e = (size_t)s->experts, i = (size_t)s->expert_width, w = (size_t)s->shared_width;
    snprintf(p, sizeof p, "model.language_model.layers.%d.", layer);
    snprintf(m, sizeof m, "%smlp.", p);
    tiny_add(t, 0.25f, 0, TINY_DIMS(h), p, "input_layernorm.weight");
    tiny_add(t, 0.25f, 0, TINY_DIMS(h), p, "post_attention_layernorm.weight");
    if (shape_is_attention(s, layer)) {
        snprintf(a, sizeof a, "%sself_attn.", p);
        tiny_add(t, 0.125f, 0, TINY_DIMS(2 * q, h), a, "q_proj.weight");
        tiny_add(t, 0.125f, 0, TINY_DIMS(kv, h), a, "k_proj.weight");
        tiny_add(t, 0.125f, 0, TINY_DIMS(kv, h), a, "v_proj.weight");
        tiny_add(t, 0.03125f, 0, TINY_DIMS(h, q), a, "o_proj.weight");
        tiny_add(t, 0.25f, 0, TINY_DIMS((size_t)s->head_dim), a, "q_norm.weight");
        tiny_add(t, 0.25f, 0, TINY_DIMS((size_t)s->head_dim), a, "k_norm.weight");
    } else {
        snprintf(a, sizeof a, "%slinear_attn.", p);
        tiny_add(t, 0.125f, 0, TINY_DIMS(conv, h), a, "in_proj_qkv.weight");
        tiny_add(t, 0.125f, 0, TINY_DIMS(v, h), a, "in_proj_z.weight");
        tiny_add(t, 0.125f, 0, TINY_DIMS(heads, h), a, "in_proj_b.weight");
        tiny_add(t, 0.125f, 0, TINY_DIMS(heads, h), a, "in_proj_a.weight");
        tiny_add(t, 0.5f, 0, TINY_DIMS(conv, 1, 4), a, "conv1d.weight");
        tiny_add(t, 2, 0.5f, TINY_DIMS(heads), a, "A_log");
        tiny_add(t, 1, -2, TINY_DIMS(heads), a, "dt_bias");
        tiny_add(t, 0.25f, 1, TINY_DIMS((size_t)s->gdn_head_dim), a, "norm.weight");
        tiny_add(t, 0.0625f, 0, TINY_DIMS(h, v), a, "out_proj.weight");
    }
    tiny_add(t, 0.5f, 0, TINY_DIMS(e, h), m, "gate.weight");
    tiny_add(t, 0.125f, 0, TINY_DIMS(e, 2 * i, h), m, "experts.gate_up_proj");
    tiny_add(t, 0.25f, 0, TINY_DIMS(e, h, i), m, "experts.down_proj");
    tiny_add(t, 0.125f, 0, TINY_DIMS(w, h), m, "shared_expert.gate_proj.weight");
    tiny_add(t, 0.125f, 0, TINY_DIMS(w, h), m, "shared_expert.up_proj.weight");
    tiny_add(t, 0.25f, 0, TINY_DIMS(h, w), m, "shared_expert.down_proj.weight");
    tiny_add(t, 0.125f, 0, TINY_DIMS(1, h), m, "shared_expert_gate.weight");
}

static inline const struct tiny_tensor *tiny_find(const struct tiny *t, const char *prefix,
                                                  const char *name) {
    char full[128];
    snprintf(full, sizeof full, "%s%s", prefix, name);
    for (size_t i = 0; i < t->n; i++) {
        if (strcmp(t->tensors[i].name, full) == 0) return &t->tensors[i];
    }
    fprintf(stderr, "%s is not a tensor of the tiny checkpoint\n", full);
    abort();
}

/* Rows [row, row + rows) of a tensor seen as [.., cols]. */
static inline struct mat tiny_mat(const struct tiny *t, const char *prefix, const char *name,
                                  size_t row, size_t rows) {
    const struct tiny_tensor *x = tiny_find(t, prefix, name);
    size_t cols = x->dims[x->rank - 1];
    return (struct mat){.data = (const uint8_t *)(t->bits + x->first + row * cols),
                        .rows = (int32_t)(rows ? rows : x->n / cols),
                        .cols = (int32_t)cols,
                        .bits = 16};
}

/* A float32 copy plus add (1 for zero-centred norms). */
static inline const float *tiny_floats(struct tiny *t, const char *prefix, const char *name,
                                       float add) {
    const struct tiny_tensor *x = tiny_find(t, prefix, name);
    float *out = malloc(x->n * sizeof *out);
    t->floats = realloc(t->floats, (t->n_floats + 1) * sizeof *t->floats);
    if (!out || !t->floats) abort();
    for (size_t i = 0; i < x->n; i++) out[i] = bf16_to_f32(t->bits[x->first + i]) + add;
    return t->floats[t->n_floats++] = out;
}

static inline void tiny_bind_layer(struct tiny *t, const struct shape *s, int32_t l) {
    struct layer_weights *w = &t->w.layer[l];
    size_t experts = (size_t)s->experts, h = (size_t)s->hidden, width = (size_t)s->expert_width;
    char p[64], a[80], m[80];
    snprintf(p, sizeof p, "model.language_model.layers.%d.", l);
    snprintf(m, sizeof m, "%smlp.", p);
    w->input_norm = tiny_floats(t, p, "input_layernorm.weight", 1);
    w->post_norm = tiny_floats(t, p, "post_attention_layernorm.weight", 1);
    if (shape_is_attention(s, l)) {
        snprintf(a, sizeof a, "%sself_attn.", p);
        w->attention = (struct attention_weights){.q_proj = tiny_mat(t, a, "q_proj.weight", 0, 0),
                                                  .k_proj = tiny_mat(t, a, "k_proj.weight", 0, 0),
                                                  .v_proj = tiny_mat(t, a, "v_proj.weight", 0, 0),
                                                  .o_proj = tiny_mat(t, a, "o_proj.weight", 0, 0),
                                                  .q_norm = tiny_floats(t, a, "q_norm.weight", 1),
                                                  .k_norm = tiny_floats(t, a, "k_norm.weight", 1)};
    } else {
        snprintf(a, sizeof a, "%slinear_attn.", p);
        w->deltanet =
            (struct deltanet_weights){.in_proj_qkv = tiny_mat(t, a, "in_proj_qkv.weight", 0, 0),
                                      .in_proj_z = tiny_mat(t, a, "in_proj_z.weight", 0, 0),
                                      .in_proj_b = tiny_mat(t, a, "in_proj_b.weight", 0, 0),
                                      .in_proj_a = tiny_mat(t, a, "in_proj_a.weight", 0, 0),
                                      .out_proj = tiny_mat(t, a, "out_proj.weight", 0, 0),
                                      .conv = tiny_floats(t, a, "conv1d.weight", 0),
                                      .a_log = tiny_floats(t, a, "A_log", 0),
                                      .dt_bias = tiny_floats(t, a, "dt_bias", 0),
                                      .norm = tiny_floats(t, a, "norm.weight", 0)};
    }
    struct mat *e = t->experts[l] = malloc(3 * experts * sizeof *e);
    if (!e) abort();
    for (size_t i = 0; i < experts; i++) {
        e[i] = tiny_mat(t, m, "experts.gate_up_proj", 2 * i * width, width);
        e[experts + i] = tiny_mat(t, m, "experts.gate_up_proj", (2 * i + 1) * width, width);
        e[2 * experts + i] = tiny_mat(t, m, "experts.down_proj", i * h, h);
    }
    w->moe = (struct moe_weights){
        .router = tiny_mat(t, m, "gate.weight", 0, 0),
        .gate = e,
        .up = e + experts,
        .down = e + 2 * experts,
        .shared_gate_proj = tiny_mat(t, m, "shared_expert.gate_proj.weight", 0, 0),
        .shared_up_proj = tiny_mat(t, m, "shared_expert.up_proj.weight", 0, 0),
        .shared_down_proj = tiny_mat(t, m, "shared_expert.down_proj.weight", 0, 0),
        .shared_gate = tiny_mat(t, m, "shared_expert_gate.weight", 0, 0)};
}

/* Makes and binds all of it; tiny_free releases it. Aborts when memory runs out. */
static inline void tiny_make(struct tiny *t, const struct shape *s) {
    const char *p = "model.language_model.";
    size_t v = (size_t)s->vocab, h = (size_t)s->hidden;
    *t = (struct tiny){0};
    tiny_add(t, 0.125f, 0, TINY_DIMS(v, h), "", "lm_head.weight");
    tiny_add(t, 1, 0, TINY_DIMS(v, h), p, "embed_tokens.weight");
    tiny_add(t, 0.25f, 0, TINY_DIMS(h), p, "norm.weight");
    for (int32_t l = 0; l < TINY_LAYERS; l++) tiny_add_layer(t, s, l);

    t->w = (struct weights){.shape = s,
                            .layers = TINY_LAYERS,
                            .embed = tiny_mat(t, p, "embed_tokens.weight", 0, 0),
                            .lm_head = tiny_mat(t, "", "lm_head.weight", 0, 0),
                            .final_norm = tiny_floats(t, p, "norm.weight", 1),
                            .layer = calloc(TINY_LAYERS, sizeof(struct layer_weights)),
                            .vocab_used = s->vocab,
                            .bytes = 2 * t->elements};
    if (!t->w.layer) abort();
    for (int32_t l = 0; l < TINY_LAYERS; l++) tiny_bind_layer(t, s, l);
}

static inline void tiny_free(struct tiny *t) {
    for (size_t i = 0; i < t->n_floats; i++) free(t->floats[i]);
    for (int i = 0; i < TINY_LAYERS; i++) free(t->experts[i]);
    free(t->floats);
    free(t->w.layer);
    free(t->bits);
}

/* Sum of (i + 1) * word[i] modulo 2^64, as tools/golden.py computes it. */
static inline uint64_t tiny_sum(const struct tiny *t) {
    uint64_t sum = 0;
    for (size_t i = 0; i < t->elements; i++) sum += (i + 1) * (uint64_t)t->bits[i];
    return sum;
}

/* What config.json says of it. */
#define TINY_CONFIG                                                                                \
    "{\"architectures\": [\"Qwen3_5MoeForConditionalGeneration\"], \"model_type\": "               \
    "\"qwen3_5_moe\", \"tie_word_embeddings\": false, \"text_config\": {\"model_type\": "          \
    "\"qwen3_5_moe_text\", \"vocab_size\": 4096, \"hidden_size\": 256, \"num_hidden_layers\": 4, " \
    "\"full_attention_interval\": 4, \"num_attention_heads\": 8, \"num_key_value_heads\": 1, "     \
    "\"head_dim\": 256, \"attention_bias\": false, \"attn_output_gate\": true, "                   \
    "\"linear_num_key_heads\": 2, \"linear_num_value_heads\": 4, \"linear_key_head_dim\": 128, "   \
    "\"linear_value_head_dim\": 128, \"linear_conv_kernel_dim\": 4, \"num_experts\": 32, "         \
    "\"num_experts_per_tok\": 8, \"moe_intermediate_size\": 64, "                                  \
    "\"shared_expert_intermediate_size\": 64, \"rms_norm_eps\": 1e-06, \"hidden_act\": \"silu\", " \
    "\"max_position_embeddings\": 262144, \"tie_word_embeddings\": false, "                        \
    "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 10000000, "                 \
    "\"partial_rotary_factor\": 0.25, \"mrope_section\": [11, 11, 10], "                           \
    "\"mrope_interleaved\": true}}}\n"

/* Writes model.safetensors and config.json into an existing folder; false when that fails. */
static inline bool tiny_write(const struct tiny *t, const char *folder) {
    struct buf header = {0};
    char path[512];
    buf_puts(&header, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < t->n; i++) {
        const struct tiny_tensor *x = &t->tensors[i];
        buf_printf(&header, ",\"%s\":{\"dtype\":\"BF16\",\"shape\":[", x->name);
        for (int d = 0; d < x->rank; d++) buf_printf(&header, d ? ",%zu" : "%zu", x->dims[d]);
        buf_printf(&header, "],\"data_offsets\":[%zu,%zu]}", 2 * x->first, 2 * (x->first + x->n));
    }
    buf_puts(&header, "}");
    while (header.len % 8) buf_puts(&header, " ");
    uint64_t length = header.len;

    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *f = fopen(path, "wb");
    bool ok = f && fwrite(&length, sizeof length, 1, f) == 1 &&
              fwrite(header.data, 1, header.len, f) == header.len &&
              fwrite(t->bits, 2, t->elements, f) == t->elements;
    if (f && fclose(f)) ok = false;
    buf_free(&header);
    snprintf(path, sizeof path, "%s/config.json", folder);
    f = ok ? fopen(path, "wb") : NULL;
    ok = f && fputs(TINY_CONFIG, f) >= 0;
    if (f && fclose(f)) ok = false;
    return ok;
}

/* Feeds n tokens, call by call; logits is NULL, or [V] for those after the last token. */
static inline int tiny_prefill(struct backend_session *s, const int32_t *ids, int32_t n,
                               float *logits, lily_err *err) {
    int rc = LILY_OK;
    for (int32_t at = 0; rc == LILY_OK && at < n;) {
        struct prefill_step step = {.ids = ids + at, .n = n - at, .logits = logits};
        rc = backend_ref.prefill(s, &step, err);
        at += step.done;
    }
    return rc;
}

static inline int tiny_decode(struct backend_model *m, struct backend_session *s, int32_t token,
                              float *logits, lily_err *err) {
    struct decode_slot slot = {.session = s, .token = token, .logits = logits};
    struct decode_result result;
    int rc = backend_ref.decode_submit(m, &slot, 1, err);
    return rc == LILY_OK ? backend_ref.decode_wait(m, &result, 1, err) : rc;
}

#endif
