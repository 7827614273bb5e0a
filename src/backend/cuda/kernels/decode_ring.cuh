/* The ring of the persistent decode kernel: slots in shared memory that a producer fills by bulk
 * copies and the consumer warps read, behind two memory barriers each. A slot's `full` completes
 * when what was announced has landed, its `empty` when every consumer warp has left it.
 * Tests compile the kernel with another file of this name (tests/cuda/plain_ring.cuh). */
#ifndef LILY_CUDA_DECODE_RING_CUH
#define LILY_CUDA_DECODE_RING_CUH

#include <stdint.h>

namespace decode {

constexpr unsigned SPIN_LIMIT = 1u << 24; /* a wait this long is a fault: the kernel traps */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

__device__ __forceinline__ void barrier_init(unsigned long long *b, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count));
}
/* One thread makes the barriers of n slots that so many warps will leave. */
__device__ __forceinline__ void ring_init(unsigned long long *full, unsigned long long *empty,
                                          int n, int warps) {
    for (int i = 0; i < n; i++) {
        barrier_init(&full[i], 1);
        barrier_init(&empty[i], warps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
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

/* One thread announces what will be copied into a slot, of which it has waited for `empty`. */
__device__ __forceinline__ void announce(unsigned long long *full, unsigned bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)),
        "r"(bytes)
        : "memory");
}
__device__ __forceinline__ void bulk_copy(void *to, const void *from, unsigned bytes,
                                          unsigned long long *full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

/* Slots are handed out in runs: `mod` slots from `base` on, used in turn. */
struct Run {
    int base, mod, slot;
};

__device__ __forceinline__ int step_slot(const Run &r, int slot, int n) { /* n <= mod */
    slot += n;
    return slot >= r.base + r.mod ? slot - r.mod : slot;
}

/* This warp is done with n slots from `slot` on. */
__device__ __forceinline__ void leave_slots(unsigned long long *empty, const Run &run, int slot,
                                            int n, int lane) {
    __syncwarp();
    if (lane < n) {
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(
                         shared_address(&empty[step_slot(run, slot, lane)]))
                     : "memory");
    }
}

} /* namespace decode */

#endif
