/* The fewest bytes a step must read: the bound that every backend's own count is compared with.
 * From the shape alone, for 4-bit weights (docs/numbers.md). */
#ifndef LILY_MODEL_LEAST_H
#define LILY_MODEL_LEAST_H

#include "model/shape.h"

struct least {
    uint64_t weight_bytes;   /* each weight that the step needs, once */
    uint64_t state_bytes;    /* recurrent state, float32 */
    uint64_t conv_bytes;     /* convolution state, float32 */
    uint64_t kv_bytes_token; /* keys and values of one token of depth, bfloat16 */
};

/* Of a step over tokens tokens of one sequence: 1 for a decoded one. A chunk of a prompt is taken
 * to reach as many experts as its tokens can choose, and the head for its last token. */
struct least shape_least(const struct shape *s, int32_t layers, int32_t tokens);

#endif
