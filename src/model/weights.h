/* The model's weights as every backend sees them: views into a mapped checkpoint, never copies.
 * Filled and validated by ckpt/ (ckpt_load); owned by struct ckpt, valid until ckpt_free.
 *
 * Matrices are [rows, cols] in row-major order and act as y[rows] = M x[cols]. Three storages:
 *   4 or 8 bits   affine groups of 64 inputs of one row: value = scale * code + bias. Codes are
 *                 unsigned, packed least significant first (4-bit: element 2j in the low nibble of
 *                 byte j, 2j+1 in the high one). scales and biases are bfloat16 [rows, cols/64];
 *                 a scale may be negative. This is MLX's "affine" mode.
 *   16 bits       bfloat16 values [rows, cols], scales and biases NULL. Only the reference backend
 *                 runs these; they come from an unquantised Hugging Face folder.
 * Small tensors (norms, convolution, decay) are float32, converted at load; norm weights are the
 * factor itself: the "1 +" of zero-centred norms is already added. */
#ifndef LILY_MODEL_WEIGHTS_H
#define LILY_MODEL_WEIGHTS_H

#include <stddef.h>
#include <stdint.h>

#include "model/shape.h"

struct mat {
    const uint8_t *data;    /* [rows, cols * bits / 8] bytes */
    const uint16_t *scales; /* bf16 [rows, cols / 64], NULL for 16 bits */
    const uint16_t *biases; /* bf16 [rows, cols / 64], NULL for 16 bits */
    int32_t rows;
    int32_t cols;
    int32_t bits; /* 4, 8 or 16 */
};

/* Full attention (spec: gated, grouped-query, partial RoPE). */
struct attention_weights {
    struct mat q_proj; /* [2 * q_dim, H]: head h owns rows 2*256*h .. : 256 query, then 256 gate */
    struct mat k_proj; /* [kv_dim, H] */
    struct mat v_proj; /* [kv_dim, H] */
    struct mat o_proj; /* [H, q_dim] */
    const float *q_norm; /* [head_dim] */
    const float *k_norm; /* [head_dim] */
};

/* Gated DeltaNet. */
struct deltanet_weights {
    struct mat in_proj_qkv; /* [conv_dim, H]: q, k [gdn_k_dim each], v [gdn_v_dim] */
    struct mat in_proj_z;   /* [gdn_v_dim, H] */
    struct mat in_proj_b;   /* [gdn_v_heads, H] */
    struct mat in_proj_a;   /* [gdn_v_heads, H] */
    struct mat out_proj;    /* [H, gdn_v_dim] */
    const float *conv;      /* [conv_dim, 4]; tap 3 multiplies the current token */
    const float *a_log;   /* [gdn_v_heads]; the decay is exp(-exp(a_log) * softplus(a + dt_bias)) */
    const float *dt_bias; /* [gdn_v_heads] */
    const float *norm;    /* [gdn_head_dim], of the gated norm: a plain factor in every format */
};

/* Mixture of experts, in every layer. */
struct moe_weights {
    struct mat router;           /* [E, H] */
    const struct mat *gate;      /* [E] of [I, H] */
    const struct mat *up;        /* [E] of [I, H] */
    const struct mat *down;      /* [E] of [H, I] */
    struct mat shared_gate_proj; /* [shared_width, H] */
    struct mat shared_up_proj;   /* [shared_width, H] */
    struct mat shared_down_proj; /* [H, shared_width] */
    struct mat shared_gate;      /* [1, H]: the scalar gate of the shared expert */
};

struct layer_weights {
    const float *input_norm;            /* [H] */
    const float *post_norm;             /* [H], before the experts */
    struct attention_weights attention; /* when shape_is_attention(shape, layer) */
    struct deltanet_weights deltanet;   /* otherwise */
    struct moe_weights moe;
};

struct weights {
    const struct shape *shape;
    int32_t layers;              /* a multiple of 4, at most shape->layers */
    struct mat embed;            /* [V, H] */
    struct mat lm_head;          /* [V, H] */
    const float *final_norm;     /* [H] */
    struct layer_weights *layer; /* [layers] */
    int32_t vocab_used; /* ids below this have a token; the rows above are padding, never sampled */
    uint64_t bytes;     /* of all tensors, as stored */
    /* The mapping of a packed file that all matrices lie in, so that a device can use its pages as
     * they are; NULL for other sources. */
    const uint8_t *map;
};

/* Bytes of one row of codes (or values). */
static inline size_t mat_row_bytes(const struct mat *m) {
    return (size_t)m->cols * (size_t)m->bits / 8;
}

/* Dequantises row r into out[cols]. The one definition every backend's kernels are held against. */
void mat_row(const struct mat *m, int32_t r, float *out);

/* y[rows] = M x[cols]: float32 within a group of 64, double across groups, in a fixed order. cols
 * is a multiple of 64. The readable reference product. */
void mat_vec(const struct mat *m, const float *x, float *y);

#endif
