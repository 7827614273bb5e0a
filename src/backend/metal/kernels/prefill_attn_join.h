/* What both forms of a prompt's attention share (prefill_attn.h, prefill_attn_tensor.metal): sizes,
 * the running maximum, and how spans of positions join, with the same bits whoever does it. MSL
 * only, after metal_stdlib and the shape macros. */
#ifndef LILY_METAL_PREFILL_ATTN_JOIN_H
#define LILY_METAL_PREFILL_ATTN_JOIN_H

#include "common.h"
#include "prefill_mix_args.h"

enum {
    ATTN_DIM = PREFILL_ATTN_DIM,
    ATTN_HEADS = PREFILL_ATTN_GROUP, /* query heads of a KV head */
    ATTN_TOKENS = PREFILL_ATTN_TOKENS,
    ATTN_BLOCK = PREFILL_ATTN_BLOCK,
    ATTN_SPAN_BLOCKS = PREFILL_ATTN_SPAN / ATTN_BLOCK
};

/* Positions that the threadgroup's tokens [first, ...) see. */
inline uint attn_seen_by(constant prefill_attn_args &args, uint first) {
    return args.position + min(first + ATTN_TOKENS, args.rows);
}

/* ---- the maximum that a row's weights refer to: lifted only when a block exceeds it by
 * ATTN_SLACK. Floats have the same accuracy at any size, and sums need no rescaling in nearly all
 * blocks. Whether they do depends on the row alone. */
constant float ATTN_SLACK = 8.0f;
constant float ATTN_NONE = -3.4028235e38f; /* below all scores: weights of none are 0 with it */

/* The factor of a row's sums so far, for a block whose largest score is `high`. */
inline float attn_lift(thread float &top, float high) {
    if (!(high > top + ATTN_SLACK)) return 1.0f;
    const float keep = precise::exp(top - high);
    top = high;
    return keep;
}

/* ---- joining spans */

struct attn_join {
    float top;
    float keep; /* factor of what came before */
    float add;  /* factor of the new span */
};

inline attn_join attn_join_of(float top_before, float top_span) {
    attn_join j;
    j.top = max(top_before, top_span);
    j.keep = precise::exp(top_before - j.top);
    j.add = precise::exp(top_span - j.top);
    return j;
}
inline float attn_joined(attn_join j, float before, float span) {
    return fma(before, j.keep, span * j.add);
}

/* Divides by the softmax's sum and applies the output gate. */
inline float attn_gated(float out, float sum, float gate) {
    return out / sum * sigmoid(gate);
}

#endif
