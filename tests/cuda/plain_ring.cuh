/* The ring of src/backend/cuda/kernels/decode_ring.cuh for compute-sanitizer's racecheck, which
 * does not follow that one's barriers (racecheck_control.cu shows where): copies are loads and
 * stores by the thread that would have begun them, which then arrives for the bytes it stored, and
 * every thread of a warp that leaves a slot arrives for itself; lanes of the producer's warp meet
 * at a barrier of 32 threads in the place of __syncwarp. Who waits for what, and where in the
 * kernel, is the same. Included before the kernel, in the other file's place. */
#ifndef LILY_CUDA_DECODE_RING_CUH
#define LILY_CUDA_DECODE_RING_CUH

#include <stdint.h>

namespace decode {

constexpr unsigned SPIN_LIMIT = 1u << 30; /* the tool is slow */
constexpr unsigned FULL = 1 << 16;        /* arrivals at `full`: one for 16 bytes, and the rest */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(unsigned long long *b, unsigned count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
__device__ __forceinline__ void barrier_arrive(unsigned long long *b, unsigned count) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(count)
                 : "memory");
}

__device__ __forceinline__ void ring_init(unsigned long long *full, unsigned long long *empty,
                                          int n, int warps) {
    for (int i = 0; i < n; i++) {
        barrier_init(&full[i], FULL);
        barrier_init(&empty[i], 32 * (unsigned)warps);
    }
}

__device__ __forceinline__ void barrier_wait(const unsigned long long *b, unsigned phase) {
    uint32_t at = shared_address(b), done;
#pragma unroll 1
    for (unsigned spin = 0; spin < SPIN_LIMIT; spin++) {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(at), "r"(phase)
                     : "memory");
        if (done) return;
    }
    __trap();
}

__device__ __forceinline__ void announce(unsigned long long *full, unsigned bytes) {
    barrier_arrive(full, FULL - bytes / 16);
}
__device__ __forceinline__ void bulk_copy(void *to, const void *from, unsigned bytes,
                                          unsigned long long *full) {
#pragma unroll 1
    for (unsigned i = 0; i < bytes / 16; i++) {
        static_cast<uint4 *>(to)[i] = static_cast<const uint4 *>(from)[i];
    }
    barrier_arrive(full, bytes / 16);
}

struct Run {
    int base, mod, slot;
};

__device__ __forceinline__ int step_slot(const Run &r, int slot, int n) {
    slot += n;
    return slot >= r.base + r.mod ? slot - r.mod : slot;
}

__device__ __forceinline__ void leave_slots(unsigned long long *empty, const Run &run, int slot,
                                            int n, int lane) {
    (void)lane;
#pragma unroll 1
    for (int i = 0; i < n; i++) barrier_arrive(&empty[step_slot(run, slot, i)], 1);
}

__device__ __forceinline__ void warp_meets() {
    if (threadIdx.x / 32 == 16) { /* the producer's: of barriers there are too few for all */
        asm volatile("bar.sync 3, 32;" ::: "memory");
    } else {
        __syncwarp();
    }
}
#define __syncwarp() decode::warp_meets()

} /* namespace decode */

#endif
