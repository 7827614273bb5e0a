/* Records one decoded token of one session: six kernels a layer, one more where a long context
 * leaves many partial results of attention, one before and two after the layers. */
#ifndef LILY_METAL_DECODE_GRAPH_H
#define LILY_METAL_DECODE_GRAPH_H

#include "backend/metal/record.h"

struct decode_record {
    struct metal_view session;
    int32_t token;      /* -1: the one in the session's token slot */
    bool count;         /* count the token as output */
    int32_t result_set; /* 0 or 1: which results and logits the step writes */
    struct decode_sampling_args sampling;
};

/* Appends to g. */
void decode_record(struct graph *g, const struct metal_layout *l, const struct decode_record *r);

/* The final norm, logits and a pick from row `row` of an h buffer, as the last two kernels of a
 * token: prefill ends with it too. */
void decode_record_head(struct graph *g, const struct metal_layout *l,
                        const struct decode_record *r, int32_t h, uint64_t row);

/* Dispatches of one token at most. */
static inline int32_t decode_most_dispatches(int32_t layers) {
    return 3 + 7 * layers;
}

/* No penalties, argmax: what a step does when the host samples from its logits. */
extern const struct decode_sampling_args decode_no_sampling;

#endif
