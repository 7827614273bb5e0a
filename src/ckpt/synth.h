/* The values of a synthetic checkpoint: deterministic in the seed, whatever the number of threads
 * and the order in which pieces are made, and the same in a folder and in a packed file. */
#ifndef LILY_CKPT_SYNTH_H
#define LILY_CKPT_SYNTH_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "ckpt/table.h"

enum { SYNTH_TABLE = 1 << 20, SYNTH_BLOCK = 1 << 15 };

/* Random codes that every tensor is cut from. */
struct synth {
    const struct shape *shape;
    uint64_t seed;
    uint8_t *codes4; /* [SYNTH_TABLE] pairs of 4-bit codes */
    uint8_t *codes8; /* [SYNTH_TABLE] 8-bit codes */
};

int synth_init(struct synth *s, const struct shape *shape, uint64_t seed, lily_err *err);
void synth_free(struct synth *s);

/* Codes of one item (an expert, or 0): n bytes from byte `from`, a multiple of SYNTH_BLOCK. */
void synth_codes(const struct synth *s, const struct tensor_role *r, int32_t layer, int32_t item,
                 size_t from, size_t n, uint8_t *out);

/* Scales and biases of n groups from group `from`, a multiple of SYNTH_BLOCK; either may be NULL.
 */
void synth_scales(const struct synth *s, const struct tensor_role *r, int32_t layer, int32_t item,
                  size_t from, size_t n, uint16_t *scales, uint16_t *biases);

/* A small tensor as bfloat16 values; norms hold 1 + w already. */
void synth_small(const struct synth *s, const struct tensor_role *r, int32_t layer, size_t n,
                 uint16_t *out);

#endif
