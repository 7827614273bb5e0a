/* The prompt kernels of sm_90a on the emulated card, by the names that prompt.c asks for. */
#define SHAPE_HEADER "emulator/prefill_shape.h"
#include "emulator.h"

#include "prefill_wgmma.cuh"

#include "backend/cuda/kernels/prefill_attention.cu"
#include "backend/cuda/kernels/prefill_deltanet.cu"
#include "backend/cuda/kernels/prefill_gemm.cu"
#include "backend/cuda/kernels/prefill_norm.cu"
#include "backend/cuda/kernels/prefill_route.cu"
#include "backend/cuda/kernels/prefill_small.cu"

#define ADD(file, kernel) emulator::add("prefill/" file, #kernel, kernel);
struct Adder {
    Adder() {
        ADD("prefill_norm", prompt_norm)
        ADD("prefill_norm", prompt_combine)
        ADD("prefill_route", prompt_route)
        ADD("prefill_route", prompt_group)
        ADD("prefill_deltanet", prompt_convolve)
        ADD("prefill_deltanet", delta_pieces)
        ADD("prefill_deltanet", delta_states)
        ADD("prefill_deltanet", prompt_gated_norm)
        ADD("prefill_gemm", dense_wide)
        ADD("prefill_attention", prompt_attention_rows)
        ADD("prefill_attention", prompt_flash)
        ADD("prefill_attention", prompt_join)
#define ADD_DENSE(wgs, n, ...) ADD("prefill_gemm", dense_##wgs##_##n)
#define ADD_EXPERTS(n, ...)    ADD("prefill_gemm", prompt_up_##n) ADD("prefill_gemm", prompt_down_##n)
#define ADD_DECISIVE(n, ...)   ADD("prefill_small", prompt_decisive_##n)
        PREFILL_DENSE_TILES(ADD_DENSE)
        PREFILL_EXPERT_TILES(ADD_EXPERTS)
        PREFILL_DECISIVE_TILES(ADD_DECISIVE)
    }
} adder;
