/* Metal 4 tensor operations for the prompt's matrix products, where device and system have them and
 * a check at start-up, at the model's own shapes and with its own weights, agrees with the kernels
 * that every chip runs and with the reference product. */
#ifndef LILY_METAL_TENSOR_H
#define LILY_METAL_TENSOR_H

#include "backend/metal/metal.h"

/* Puts the tensor kernels in the place of the others, or leaves those; m->tensor_reason says why.
 * The model is otherwise open. A fault of the kernels that every chip runs is an error. */
int metal_tensor_choose(struct backend_model *m, lily_err *err);

#endif
