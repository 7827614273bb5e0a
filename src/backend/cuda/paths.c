#include "backend/cuda/cuda.h"

const struct cuda_path *const cuda_paths[] = {&cuda_path_decode, &cuda_path_batch,
                                              &cuda_path_portable, NULL};
