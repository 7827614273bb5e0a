/* The tensors of the model as data: one row per kind of tensor, with its name in every format, its
 * dimensions in terms of the shape, its class and where it goes in struct weights. Binding,
 * packing, inspecting and synthesising all walk this table. Names and shapes: Hugging Face's and
 * MLX's published checkpoints. */
#ifndef LILY_CKPT_TABLE_H
#define LILY_CKPT_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/weights.h"

/* What a tensor's bytes are counted under. */
enum tensor_class {
    CLASS_EXPERTS,
    CLASS_DELTANET,
    CLASS_ATTENTION,
    CLASS_LM_HEAD,
    CLASS_EMBED,
    CLASS_SHARED,
    CLASS_ROUTER,
    CLASS_SHARED_GATE,
    CLASS_SMALL,
    CLASS_COUNT
};
const char *tensor_class_name(enum tensor_class c);

enum tensor_place { IN_MODEL, IN_EVERY_LAYER, IN_ATTENTION, IN_DELTANET };

enum tensor_kind {
    KIND_MATRIX,  /* struct mat, rows x cols */
    KIND_EXPERTS, /* one such matrix per expert */
    KIND_VECTOR,  /* float32 [rows] */
    KIND_CONV     /* float32 [rows, cols]; stored with one more dimension of 1, see bind.c */
};

/* A dimension: times * (an int32_t of struct shape), or the constant 1. */
struct tensor_dim {
    size_t field;
    int32_t times;
};
enum { DIM_ONE = -1 };

struct tensor_role {
    const char *name;     /* after the layer's prefix, without ".weight"; MLX and packed file */
    const char *hf_fused; /* experts: the fused tensor of Hugging Face, else NULL */
    const char *hf_each;  /* experts: the module's name within one expert, else NULL */
    const char *suffix;   /* ".weight", or "" for tensors that are no module's weight */
    enum tensor_place place;
    enum tensor_kind kind;
    enum tensor_class class;
    struct tensor_dim rows, cols; /* cols of a vector: 1 */
    int32_t part, parts;          /* which of how many row blocks of hf_fused */
    int32_t bits;                 /* a matrix quantised here: 4, or 8 where MLX's recipe says so */
    bool zero_centred;            /* Hugging Face stores w of the factor 1 + w */
    size_t target;                /* in struct weights (IN_MODEL) or struct layer_weights */
};

extern const struct tensor_role tensor_roles[];
extern const int tensor_role_count;

int32_t tensor_rows(const struct tensor_role *r, const struct shape *s);
int32_t tensor_cols(const struct tensor_role *r, const struct shape *s);

/* Matrices of a row: the shape's experts, or 1. */
int32_t tensor_items(const struct tensor_role *r, const struct shape *s);

bool tensor_in_layer(const struct tensor_role *r, const struct shape *s, int32_t layer);

/* A walk over every tensor of a model of that many layers, in a fixed order: embed_tokens, then
 * layer by layer, then the final norm and lm_head. layer is -1 outside the layers. */
struct tensor_walk {
    const struct shape *shape;
    int32_t layers;
    int32_t layer; /* of the current tensor */
    int index;     /* of the current role */
    const struct tensor_role *role;
};
void tensor_walk_start(struct tensor_walk *w, const struct shape *s, int32_t layers);
bool tensor_walk_next(struct tensor_walk *w); /* false: no further tensor */

/* "layers.3.mlp.gate" or "norm", in out. */
const char *tensor_path(const struct tensor_role *r, int32_t layer, char *out, size_t size);

/* The row that a tensor of that name (of any format) belongs to, or NULL. */
const struct tensor_role *tensor_role_of_name(const char *name);

/* Where the tensor lives: its struct mat(s) for matrices and experts, NULL for small tensors. */
const struct mat *tensor_mats(const struct tensor_role *r, const struct weights *w, int32_t layer);
/* Its float32 values for small tensors, NULL for matrices. */
const float *tensor_floats(const struct tensor_role *r, const struct weights *w, int32_t layer);

void tensor_set_mats(const struct tensor_role *r, struct weights *w, int32_t layer,
                     const struct mat *m); /* copied for KIND_MATRIX, kept for KIND_EXPERTS */
void tensor_set_floats(const struct tensor_role *r, struct weights *w, int32_t layer,
                       const float *values);

#endif
