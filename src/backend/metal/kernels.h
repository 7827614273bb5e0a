/* Every kernel of the Metal backend: the number it has in graphs, its function and file, and the
 * threads of its threadgroups. Kernels of one file follow each other. */
#ifndef LILY_METAL_KERNELS_H
#define LILY_METAL_KERNELS_H

#include "backend/metal/kernels/decode_args.h"
#include "backend/metal/kernels/prefill_gemm_args.h"
#include "backend/metal/kernels/prefill_mix_args.h"
#include "model/shape.h"

/* Kernel, its .metal file, threads of a threadgroup (0: a row of the residual stream, 8 values for
 * each thread; PREFILL_ROUTER: by the number of experts). */
#define PREFILL_KERNEL_MAP(XX)                                                                     \
    XX(PREFILL_EMBED, prefill_embed, "prefill_rows.metal", 0)                                      \
    XX(PREFILL_NORM, prefill_norm, "prefill_rows.metal", 0)                                        \
    XX(PREFILL_COMBINE, prefill_combine, "prefill_rows.metal", 0)                                  \
    XX(PREFILL_COMBINE_NORM, prefill_combine_norm, "prefill_rows.metal", 0)

enum {
    METAL_FIRST_PREFILL = DECODE_KERNELS - 1,
#define METAL_KERNEL_ENUM(name, function, file, threads) METAL_##name,
    PREFILL_KERNEL_MAP(METAL_KERNEL_ENUM)
#undef METAL_KERNEL_ENUM
    /* Numbers below DECODE_KERNELS are those of enum decode_kernel. */
    METAL_KERNELS
};

struct metal_kernel {
    const char *name; /* of the function */
    const char *file;
    int32_t threads; /* as in the tables */
};
extern const struct metal_kernel metal_kernels[METAL_KERNELS];

/* Threads of a threadgroup for that shape. */
uint32_t metal_kernel_threads(int32_t kernel, const struct shape *s);

#endif
