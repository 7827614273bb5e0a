/* What a consumer thread carries through a step, and how it takes part in ring and grid. */
#ifndef LILY_CUDA_DECODE_WORKER_CUH
#define LILY_CUDA_DECODE_WORKER_CUH

#include "decode_plan.cuh"

namespace decode {

struct Worker {
    Shared &s;
    const decode_args &a;
    int tid, lane, warp;
    unsigned target; /* grid barrier passed last */
    unsigned phases; /* bit i: parity of the present use of slot i */
    Run run;         /* next chunk of this block's stream */
    int stage;

    __device__ __forceinline__ float *work() { return reinterpret_cast<float *>(s.work); }
    __device__ __forceinline__ Quantised &scratch() { /* of the warp */
        return *reinterpret_cast<Quantised *>(s.scratch + warp * WARP_SCRATCH);
    }

    /* Where the time goes, when built to tell: mark m of the stage. */
    __device__ __forceinline__ void mark(int m) {
#ifdef DECODE_PROFILE
        if (a.clocks && tid == 0)
            a.clocks[(stage * gridDim.x + blockIdx.x) * DECODE_MARKS + m] = clock64();
#endif
    }

    /* Ends a stage at the grid's barrier. */
    __device__ __forceinline__ void arrive() {
        mark(6);
        sync_consumers();
        grid_arrive(a.x.counter);
        target += gridDim.x;
        pass();
    }
    /* Begins the one behind it. */
    __device__ __forceinline__ void wait() {
        grid_wait(a.x.counter, target);
        mark(0);
    }
    /* Ends a stage. */
    __device__ __forceinline__ void pass() {
        mark(7);
        stage++;
    }

    /* This lane's part of the residual stream to which the next stage adds nothing. */
    __device__ __forceinline__ float4 &kept() {
        return reinterpret_cast<float4 *>(a.x.kept)[blockIdx.x * (DECODE_KEPT / 4) + tid];
    }

    /* Of words in this layer. */
    __device__ __forceinline__ uint32_t tag(int layer) const {
        return a.step * SHAPE_LAYERS + (unsigned)layer + 1;
    }
    /* The sums of this step, or of the next; of the mixers or of the experts; a layer's scores. */
    __device__ __forceinline__ long long *sums(bool next = false) const {
        return step_sums(a, a.step + next);
    }
    __device__ __forceinline__ long long *sum(bool experts) const {
        return sums() + (experts ? SUM : 0);
    }
    __device__ __forceinline__ long long *scores(int layer) const {
        return sums() + 2 * SUM + layer * EXPERTS;
    }
    __device__ __forceinline__ void add(long long *to, float x) const {
        sum_add(to, x, a.x.counter + 2);
    }
    /* Of the residual stream that was read last: 1 / rms. */
    __device__ __forceinline__ float norm_factor() const {
        float squares[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < SLICES; i++) squares[i & 3] += s.squares[i];
        float all = (squares[0] + squares[1]) + (squares[2] + squares[3]);
        return rsqrtf(all * (1.0f / H) + SHAPE_NORM_EPS);
    }

    /* The i-th chunk from here, i < run.mod, once it has landed. */
    __device__ __forceinline__ const unsigned char *chunk(int i) {
        int slot = step_slot(run, run.slot, i);
        barrier_wait(&s.full[slot], phases >> slot & 1);
        return s.ring + slot * SLOT;
    }
    /* This warp is done with n chunks from `slot` on. Every warp leaves every chunk once, whether
     * it read it or not; between two barriers of the block no slot is left twice. */
    __device__ __forceinline__ void leave_from(int slot, int n) {
        leave_slots(s.empty, run, slot, n, lane);
        unsigned bits = ((1u << n) - 1) << (slot - run.base);
        bits = (bits | bits >> run.mod) & ((1u << run.mod) - 1);
        phases ^= bits << run.base;
    }
    __device__ __forceinline__ void leave(int n) {
        leave_from(run.slot, n);
        run.slot = step_slot(run, run.slot, n);
    }
};

/* Barrier of the first four warps. */
__device__ __forceinline__ void sync_four() {
    asm volatile("bar.sync 2, 128;" ::: "memory");
}

} /* namespace decode */

#endif
