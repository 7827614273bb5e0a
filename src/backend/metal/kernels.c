#include "backend/metal/kernels.h"

const struct metal_kernel metal_kernels[METAL_KERNELS] = {
#define METAL_KERNEL_ROW(name, function, file, threads) {#function, file, threads},
    DECODE_KERNEL_MAP(METAL_KERNEL_ROW) PREFILL_KERNEL_MAP(METAL_KERNEL_ROW)
#undef METAL_KERNEL_ROW
};

uint32_t metal_kernel_threads(int32_t kernel, const struct shape *s) {
    if (kernel == METAL_PREFILL_ROUTER) {
        return prefill_router_grid(1, (uint32_t)s->experts).threads;
    }
    int32_t threads = metal_kernels[kernel].threads;
    return threads ? (uint32_t)threads : prefill_row_grid(1, (uint32_t)s->hidden).threads;
}
