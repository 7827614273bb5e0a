#include "backend/backend.h"
#include "backend/metal/plan.h"

const struct backend *const backend_all[] = {
#ifdef LILY_METAL
    &backend_metal,
#endif
#ifdef LILY_CUDA
    &backend_cuda,
#endif
    &backend_cpu, &backend_ref, NULL};

const struct backend_planner backend_plans[] = {{"metal", metal_plan}, {NULL, NULL}};
