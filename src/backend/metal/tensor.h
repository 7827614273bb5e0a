/* Metal 4 tensor operations for a prompt's matrix products and its attention, where device and
 * system have them and a check at start-up, at the model's own shapes and with its own weights,
 * agrees with the kernels that every chip runs and with the reference. */
#ifndef LILY_METAL_TENSOR_H
#define LILY_METAL_TENSOR_H

#include "backend/metal/metal.h"

/* Root of the squared difference over the squared size. Weights are rounded to bfloat16, those of a
 * product as those of a softmax, each by at most 1/256 of itself: about 2e-3 of a sum of many. */
#define METAL_TENSOR_GAP 1e-2

/* Puts the tensor kernels in the place of the others, or leaves those; m->tensor_reason says why.
 * The model is otherwise open. A fault of the kernels that every chip runs is an error. */
int metal_tensor_choose(struct backend_model *m, lily_err *err);

/* The part of it that is about attention: m->tensor_attention, with the largest difference seen in
 * *worst; where it stays false *why says why. A fault of the tensor kernels is such a reason. */
int metal_tensor_choose_attention(struct backend_model *m, double *worst, lily_err *why,
                                  lily_err *err);

/* The function that runs under a kernel's number: that of metal_kernels, or the tensor kernel in
 * its place. _attention: NULL where it is none of attention's. */
const char *metal_tensor_name(const struct backend_model *m, int32_t kernel);
const char *metal_tensor_attention_name(const struct backend_model *m, int32_t kernel);

#endif
