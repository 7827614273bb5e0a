#include "backend/cuda/cuda.h"

extern const struct cuda_path cuda_path_decode; /* decode.c */
extern const struct cuda_path cuda_path_batch;  /* batch.c */

const struct cuda_path *const cuda_paths[] = {&cuda_path_decode, &cuda_path_batch,
                                              &cuda_path_portable, NULL};
