/* Where each weight lies for the GPU: a buffer and an offset. Pure C without a device.
 *
 * Weights are bytes of one address range: the mapping of a packed file, whose tensors are used
 * where they are, or a block that is filled by copying (a folder, the embedded stand-in), with the
 * packed file's own order and alignment. The range is cut into windows of at most the device's
 * maxBufferLength, one MTLBuffer each, so that a tensor, and all experts of one layer, lie within
 * one window. Windows begin and end at pages and may overlap in one: nothing writes to them. */
#ifndef LILY_METAL_TENSORS_H
#define LILY_METAL_TENSORS_H

#include "base/err.h"
#include "model/weights.h"

enum { METAL_PAGE = 16384 }; /* of Apple silicon: what a buffer over existing memory begins at */

/* A matrix, or the same matrix of all experts of a layer. Offsets are bytes in the buffer; item i
 * has its codes at codes + i * stride, scales and biases alike. */
struct metal_mat {
    int32_t buffer; /* of layout.h */
    int32_t rows, cols, bits;
    int32_t items; /* 1, or the number of experts */
    uint64_t codes, scales, biases;
    uint64_t stride;
    const struct mat *source; /* [items] what is to be copied; NULL in a plan */
};

/* float32 values in METAL_SMALL, `at` in bytes. */
struct metal_vector {
    uint64_t at;
    int32_t n;
    const float *source; /* NULL in a plan, and where the host computes them */
};

struct metal_layer_tensors {
    struct metal_vector input_norm, post_norm;
    struct { /* attention layers */
        struct metal_mat q, k, v, o;
        struct metal_vector q_norm, k_norm;
    } attention;
    struct { /* the others */
        struct metal_mat qkv, z, b, a, out;
        struct metal_vector conv, a_log, dt_bias, norm;
    } deltanet;
    struct metal_mat router, gate, up, down, shared_gate_proj, shared_up_proj, shared_down_proj,
        shared_gate;
};

struct metal_window { /* addresses [begin, end) of the range, whole pages */
    uint64_t begin, end;
};

/* Matrices that must share a window. */
struct metal_unit {
    struct metal_mat *mat[3];
    int32_t mats;
    uint64_t begin, end;
};

struct metal_tensors {
    const struct shape *shape;
    int32_t layers;
    bool in_place; /* addresses are those of the caller's mapping; else offsets in a block */
    struct metal_mat embed, lm_head;
    struct metal_vector final_norm, inv_freq;
    struct metal_layer_tensors *layer; /* [layers] */
    struct metal_window *window;       /* [windows] ascending */
    int32_t windows;
    struct metal_unit *unit; /* [units] by address */
    int32_t units;
    uint64_t small_bytes; /* of all vectors */
    uint64_t mat_bytes;   /* of all matrices, without padding */
};

/* Places the weights of w, or of a 4-bit checkpoint of that shape and depth when w is NULL, in
 * windows of at most max_window bytes with buffer numbers from first_buffer on. The caller ends
 * *out with tensors_free. in_place: w's matrices all lie in one mapping of whole pages. */
int tensors_place(const struct shape *shape, int32_t layers, const struct weights *w, bool in_place,
                  uint64_t max_window, int32_t first_buffer, struct metal_tensors *out,
                  lily_err *err);
void tensors_free(struct metal_tensors *t);

/* Bytes of codes, and of scales (as many of biases), of one item. */
static inline uint64_t mat_code_bytes(const struct metal_mat *m) {
    return (uint64_t)m->rows * (uint64_t)m->cols * (uint64_t)m->bits / 8;
}
static inline uint64_t mat_scale_bytes(const struct metal_mat *m) {
    return (uint64_t)m->rows * (uint64_t)(m->cols / 64) * 2;
}

/* Calls visit for every vector, in order. */
void tensors_each_vector(struct metal_tensors *t,
                         void (*visit)(void *arg, struct metal_vector *vector), void *arg);

#endif
