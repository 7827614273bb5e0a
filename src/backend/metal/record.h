/* What the recorders of decode and prefill share: arguments that are weights, and where a session's
 * arrays lie. */
#ifndef LILY_METAL_RECORD_H
#define LILY_METAL_RECORD_H

#include "backend/metal/graph.h"
#include "backend/metal/kernels.h"
#include "backend/metal/layout.h"

/* A session as a graph sees it. */
struct metal_view {
    int32_t first;    /* its first buffer */
    int32_t slot;     /* its number among the model's sessions */
    int32_t context;  /* tokens it has room for */
    int32_t position; /* tokens consumed */
    int32_t parity;   /* of the state buffers that hold its state now; a step writes the others */
    int32_t token_parity; /* of the token slots that hold what its last step sampled */
};

/* What has been computed once the dispatches with that mark have run (graph_mark). */
enum metal_trace {
    TRACE_NOTHING,
    TRACE_EMBED,    /* h */
    TRACE_IN_NORM,  /* prefill: x */
    TRACE_GDN_CONV, /* prefill: channels, gates */
    TRACE_GDN_DELTA,
    TRACE_GDN_NORM,
    TRACE_ATTN_PREP, /* prefill: queries; keys and values of these rows */
    TRACE_ATTN,      /* attention times gate; decode: keys and values of this row too */
    TRACE_MIXER,     /* h */
    TRACE_POST_NORM, /* prefill: x */
    TRACE_ROUTER,    /* expert ids and weights; decode: x too */
    TRACE_EXPERTS,   /* prefill: pairs and shared expert, before they are added */
    TRACE_LAYER,     /* h */
    TRACE_LOGITS
};
static inline void record_mark(struct graph *g, enum metal_trace what, int32_t layer) {
    graph_mark(g, (layer + 1) * 256 + (int32_t)what);
}
static inline enum metal_trace trace_what(int32_t mark) {
    return (enum metal_trace)(mark % 256);
}
static inline int32_t trace_layer(int32_t mark) {
    return mark / 256 - 1;
}

/* A dispatch over x threadgroups of one dimension. */
void record_begin(struct graph *g, int32_t kernel, const struct shape *s, uint32_t x);
void record_begin_3d(struct graph *g, int32_t kernel, const struct shape *s, uint32_t x, uint32_t y,
                     uint32_t z);

/* Binds bytes [begin, begin + bytes) of a buffer, all of which are read, written, or both. */
void record_in(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes);
void record_out(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes);
void record_in_out(struct graph *g, int32_t index, int32_t buffer, uint64_t begin, uint64_t bytes);

void record_vector(struct graph *g, int32_t index, const struct metal_vector *v);

/* Codes, scales and biases at index, index + 1, index + 2. record_mat reads the matrix whole;
 * record_rows so many rows of it that data decide; record_experts so many of its items. */
void record_mat(struct graph *g, int32_t index, const struct metal_mat *m);
void record_rows(struct graph *g, int32_t index, const struct metal_mat *m, uint64_t rows);
void record_experts(struct graph *g, int32_t index, const struct metal_mat *m, uint64_t items);

static inline int32_t view_kv(const struct metal_view *v, const struct shape *s, int32_t layer) {
    return v->first + SESSION_KV + shape_kind_index(s, layer);
}
static inline int32_t view_state(const struct metal_view *v, int32_t parity) {
    return v->first + SESSION_STATE_0 + parity;
}
static inline int32_t view_conv(const struct metal_view *v, int32_t parity) {
    return v->first + SESSION_CONV_0 + parity;
}
static inline int32_t view_counts(const struct metal_view *v) {
    return v->first + SESSION_COUNTS;
}

#endif
