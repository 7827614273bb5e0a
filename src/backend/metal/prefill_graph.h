/* Records a chunk of a prompt: one command buffer, in which routing stays on the GPU. */
#ifndef LILY_METAL_PREFILL_GRAPH_H
#define LILY_METAL_PREFILL_GRAPH_H

#include "backend/metal/record.h"

struct prefill_record {
    struct metal_view session;
    int32_t n; /* rows: tokens in METAL_P_IDS, at most layout.rows */
};

/* Appends to g; the last layer leaves the chunk's residual stream in METAL_P_H. */
void prefill_record(struct graph *g, const struct metal_layout *l, const struct prefill_record *r);

/* The matrix products of layer 0, on n rows of METAL_P_X and METAL_P_MIX and with the experts of
 * METAL_P_EXPERT_IDS and METAL_P_WEIGHTS: what a start-up check compares. */
void prefill_record_products(struct graph *g, const struct metal_layout *l, int32_t n);

/* Attention of one layer, without its products, on n rows of METAL_P_QKV, METAL_P_B and METAL_P_A
 * at that position of a cache in METAL_P_CHANNELS: keys of position + n rows, then values. split:
 * span by span. Another start-up check. */
void prefill_record_attention(struct graph *g, const struct metal_layout *l, int32_t layer,
                              int32_t n, int32_t position, bool split);

/* Dispatches of a chunk at most, without heads. */
static inline int32_t prefill_most_dispatches(int32_t layers) {
    return 2 + 13 * layers;
}

#endif
