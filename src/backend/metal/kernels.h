/* Every kernel of the Metal backend: the number it has in graphs, its function and file, and the
 * threads of its threadgroups. Kernels of one file follow each other. */
#ifndef LILY_METAL_KERNELS_H
#define LILY_METAL_KERNELS_H

#include "backend/metal/kernels/decode_args.h"
#include "backend/metal/kernels/prefill_gemm_args.h"
#include "backend/metal/kernels/prefill_mix_args.h"
#include "model/shape.h"

/* Kernel, its .metal file, threads of a threadgroup (0: by the shape, see metal_kernel_threads). */
#define PREFILL_KERNEL_MAP(XX)                                                                     \
    XX(PREFILL_EMBED, prefill_embed, "prefill_embed.metal", 0)                                     \
    XX(PREFILL_NORM, prefill_norm, "prefill_norm.metal", 0)                                        \
    XX(PREFILL_GEMM, prefill_gemm, "prefill_gemm.metal", PREFILL_GEMM_THREADS)                     \
    XX(PREFILL_GEMM_MULTI, prefill_gemm_multi, "prefill_gemm.metal", PREFILL_GEMM_THREADS)         \
    XX(PREFILL_GEMM_SILU, prefill_gemm_silu, "prefill_gemm.metal", PREFILL_GEMM_THREADS)           \
    XX(PREFILL_GDN_CONV, prefill_gdn_conv, "prefill_gdn_conv.metal", PREFILL_GDN_CONV_THREADS)     \
    XX(PREFILL_GDN_SCAN, prefill_gdn_scan, "prefill_gdn_scan.metal", PREFILL_GDN_SCAN_THREADS)     \
    XX(PREFILL_GDN_NORM, prefill_gdn_norm, "prefill_gdn_norm.metal", PREFILL_GDN_NORM_THREADS)     \
    XX(PREFILL_ATTN_PREP, prefill_attn_prep, "prefill_attn_prep.metal", PREFILL_ATTN_PREP_THREADS) \
    XX(PREFILL_ATTN, prefill_attn, "prefill_attn.metal", PREFILL_ATTN_THREADS)                     \
    XX(PREFILL_ATTN_SPLIT, prefill_attn_split, "prefill_attn.metal", PREFILL_ATTN_THREADS)         \
    XX(PREFILL_ATTN_MERGE, prefill_attn_merge, "prefill_attn.metal", PREFILL_ATTN_MERGE_THREADS)   \
    XX(PREFILL_ROUTER, prefill_router, "prefill_router.metal", 0)                                  \
    XX(PREFILL_ROUTE, prefill_route, "prefill_route.metal", PREFILL_ROUTE_THREADS)                 \
    XX(PREFILL_EXPERTS_UP, prefill_experts_up, "prefill_experts.metal", PREFILL_GEMM_THREADS)      \
    XX(PREFILL_EXPERTS_DOWN, prefill_experts_down, "prefill_experts.metal", PREFILL_GEMM_THREADS)  \
    XX(PREFILL_COMBINE, prefill_combine, "prefill_combine.metal", 0)                               \
    XX(PREFILL_COMBINE_NORM, prefill_combine_norm, "prefill_combine.metal", 0)

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
