/* bfloat16 -> affine groups of 64 inputs with 4 or 8 bits, bit for bit as MLX's GPU kernels convert
 * (mlx/backend/metal/kernels/quantized.h, affine_quantize; CUDA's is the same), which made the
 * published checkpoint. For a group with smallest value min and largest max, where max counts as at
 * least 0, and n = 15 or 255:
 *
 *     scale = max((max - min) / n, 1e-7), negated unless |min| > |max|
 *     edge  = |min| > |max| ? min : max            the end that is represented exactly
 *     q0    = round(edge / scale)
 *     q0 = 0: bias = 0;   else: scale = edge / q0, bias = edge
 *     code  = min(round((w - bias) / scale), n)
 *
 * in float32, halves rounded away from zero; scale and bias are then stored as bfloat16. MLX's CPU
 * backend differs in two points (halves to even, the true max of an all-negative group); the tests
 * compare with both. */
#ifndef LILY_CKPT_QUANTISE_H
#define LILY_CKPT_QUANTISE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "ckpt/pool.h"
#include "ckpt/work.h"
#include "model/weights.h"

enum { QUANTISE_GROUP = 64 };

/* Quantises n groups of 64 values (bfloat16, little endian, any alignment) to 4 or 8 bits: codes
 * [n * 64 * bits / 8], scales and biases [n]. Returns SIZE_MAX, or the index of the first value
 * that is not finite or whose group's range overflows. */
size_t quantise_groups(const uint8_t *values, size_t n, int32_t bits, uint8_t *codes,
                       uint16_t *scales, uint16_t *biases);

/* Replaces every 16-bit matrix of w by its quantised form in p's memory, on all cores: 8 bits for
 * router and shared expert gate, 4 for all others, as MLX's recipe for this model has it. A value
 * that cannot be quantised is LILY_ENUMERIC with its address in *bad, for the caller to name. */
int quantise_weights(struct weights *w, struct pool *p, struct work *work, const uint8_t **bad,
                     lily_err *err);

#endif
