/* What decode_head and decode_sample must agree on: a logit as the sampler sees it. The steps and
 * their order are those of adjust() in engine/sampler.c, one rounding each. */
#ifndef LILY_METAL_DECODE_PICK_H
#define LILY_METAL_DECODE_PICK_H

#include "decode_rows.h"

/* count: 0 not seen, 1 in the prompt only, 1 + n: n times in the output. */
inline float pick_penalised(float x, uint count, constant decode_sampling_args &args) {
    if (count == 0) return x;
    if (args.repetition != 1.0f) {
        const float y = x > 0.0f ? x / args.repetition : x * args.repetition;
        x = min(max(y, -FLT_MAX), FLT_MAX); /* infinity is for tokens that do not exist */
    }
    const float often = args.frequency * (float)(count - 1);
    x = x - often;
    if (count > 1) x = x - args.presence;
    return x;
}

/* The logit of a token, or -infinity if it may not be sampled. */
inline float pick_logit(float x, uint token, device const uint *counts, device const uint *mask,
                        constant decode_sampling_args &args) {
    if (((mask[token / 32] >> (token % 32)) & 1) == 0) return -INFINITY;
    if (args.penalties == 0) return x;
    return pick_penalised(x, counts[token], args);
}

#endif
