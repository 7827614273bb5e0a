/* The shapes as run-time tables, made from the same headers the kernels are compiled with, so that
 * loaders, ref, engine and hosts are ordinary C compiled once. */
#ifndef LILY_MODEL_SHAPE_H
#define LILY_MODEL_SHAPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct shape {
    const char *name;
    int32_t hidden;  /* H: residual stream width */
    int32_t layers;  /* the full model; a checkpoint may hold fewer, a multiple of 4 */
    int32_t vocab;   /* V: rows of embedding and head, padding rows included */
    int32_t q_heads; /* 8 per key/value head */
    int32_t kv_heads;
    int32_t head_dim;   /* of queries, keys and values in full attention */
    int32_t rotary_dim; /* leading dimensions of a head that RoPE turns */
    double rope_theta;
    int32_t gdn_k_heads;  /* Gated DeltaNet query/key heads */
    int32_t gdn_v_heads;  /* 2 per key head */
    int32_t gdn_head_dim; /* 128 */
    int32_t conv_taps;    /* 4 */
    int32_t experts;      /* E */
    int32_t top_k;        /* 8 */
    int32_t expert_width; /* I */
    int32_t shared_width;
    int32_t attention_every; /* 4 */
    int32_t group;           /* 64 */
    int32_t max_context;
    float norm_eps;
    /* derived */
    int32_t q_dim;     /* q_heads * head_dim */
    int32_t kv_dim;    /* kv_heads * head_dim */
    int32_t gdn_k_dim; /* gdn_k_heads * gdn_head_dim */
    int32_t gdn_v_dim; /* gdn_v_heads * gdn_head_dim */
    int32_t conv_dim;  /* 2 * gdn_k_dim + gdn_v_dim */
};

extern const struct shape shape_qwen36_35b_a3b;
extern const struct shape shape_mini;

/* Every shape built in, ended by NULL. */
extern const struct shape *const shape_all[];

/* The shape of that name, or NULL. */
const struct shape *shape_find(const char *name);

/* Layers 3, 7, 11, ... (0-based) are full attention, the others Gated DeltaNet. */
static inline bool shape_is_attention(const struct shape *s, int32_t layer) {
    return (layer + 1) % s->attention_every == 0;
}

/* Index of a layer among those of its kind: attention layer 7 is 1, DeltaNet layer 4 is 3. */
static inline int32_t shape_kind_index(const struct shape *s, int32_t layer) {
    return shape_is_attention(s, layer) ? layer / s->attention_every
                                        : layer - layer / s->attention_every;
}

static inline int32_t shape_attention_layers(const struct shape *s, int32_t layers) {
    return layers / s->attention_every;
}

#endif
