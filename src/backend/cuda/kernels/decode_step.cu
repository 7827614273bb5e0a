/* A decode step as one persistent kernel: all layers and the head for one token of one sequence,
 * one block on every multiprocessor. docs/cuda-decode.md explains the split and what limits it. */
#include "decode_attn.cuh"
#include "decode_moe.cuh"
#include "decode_producer.cuh"

namespace decode {

__device__ __forceinline__ void consume(Worker &w, int token) {
    const decode_args &a = w.a;
    const Context &c = w.s.context;
    Stream st;
    unsigned early = 0, rest = (unsigned)early_chunks(w.s, 0, a.n_layers);
    for (int layer = 0; layer < a.n_layers; layer++) {
        const decode_layer &l = a.layers[layer];
        rest = plan_layer(w.s, st, layer, a.n_layers, early, rest);
        early = st.next_early;
        stage_project(w, st, layer, l, token);
        if (is_attention(layer)) {
            stage_attend(w, st, layer, l, c);
            stage_attn_out(w, st, layer, c);
        } else {
            stage_gdn(w, st, layer, l);
        }
        Slice x;
        stage_route(w, st, l, x);
        stage_experts(w, st, x);
    }
    plan_layer(w.s, st, a.n_layers, a.n_layers, early, rest);
    stage_head(w, st);
}

} /* namespace decode */

#define DECODE_JOIN_(a, b) a##b
#define DECODE_JOIN(a, b) DECODE_JOIN_(a, b)
#define DECODE_KERNEL DECODE_JOIN(decode_step_, SHAPE_SUFFIX)

extern "C" __global__ void __launch_bounds__(DECODE_THREADS, 1)
    DECODE_KERNEL(const __grid_constant__ decode_args a) {
    using namespace decode;
    extern __shared__ __align__(128) unsigned char memory[];
    Shared &s = *reinterpret_cast<Shared *>(memory);
    const cuda_slot &slot = s.slot;
    int tid = threadIdx.x;
    if (tid < (int)(sizeof(cuda_slot) / 4)) {
        reinterpret_cast<uint32_t *>(&s.slot)[tid] = reinterpret_cast<const uint32_t *>(a.slot)[tid];
    }
    if (tid == 0) {
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    if (tid == 32) plan_block(s, a.slot->pos);
    if (tid < SHAPE_ROTARY_DIM / 2) {
        float angle = (float)a.slot->pos * __ldg(a.inv_freq + tid);
        s.cosine[tid] = cosf(angle);
        s.sine[tid] = sinf(angle);
    }
    if (tid < HEAD * 2 / 4) reinterpret_cast<uint32_t *>(s.zeros)[tid] = 0;
    __syncthreads();
    /* The producer's warp comes in a group of four, whose registers go to the consumers. */
    if (tid >= THREADS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
        if (tid < THREADS + 32) produce(a, s);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
        int token = slot.input >= 0 ? slot.input : *static_cast<const volatile int *>(slot.token);
        Worker w = {s, a, slot, tid, tid & 31, tid >> 5,
                    reinterpret_cast<uint32_t *>(s.scratch + (tid >> 5) * WARP_SCRATCH), a.barrier,
                    0};
        consume(w, token);
    }
}
