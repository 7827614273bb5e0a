/* What compute-sanitizer's racecheck can see of the two ways in which the persistent decode kernel
 * waits: those ways alone, and races.
 *   racecheck_control named         a barrier of 512 of a block's 640 threads (bar.sync 1, 512)
 *   racecheck_control named-race    the same without the barrier
 *   racecheck_control bulk          the kernel's ring (decode_ring.cuh)
 *   racecheck_control bulk-each     the same, but every thread leaves a slot for itself
 *   racecheck_control plain         the ring of plain_ring.cuh, but a lane leaves for its warp
 *   racecheck_control plain-each    the ring of plain_ring.cuh
 *   racecheck_control plain-warp    the same, but one lane waits and arrives for one that copies,
 *                                   with __syncwarp between
 *   racecheck_control plain-meet    that with a barrier of 32 threads in the place of __syncwarp
 *   racecheck_control plain-race    the same, but threads leave a slot before they have read it
 * The tool must report the two races. tests/cuda/run.sh runs all under the tool. Each prints
 * whether its sums are right. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static constexpr int WORKERS = 512, THREADS = 640, ROUNDS = 16, SLOTS = 2;
static constexpr int BYTES = WORKERS * (int)sizeof(int);

__device__ static uint32_t address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ static void wait(uint64_t *barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done) {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(address(barrier)), "r"(parity)
                     : "memory");
    }
}
__device__ static void init(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(count));
}
__device__ static void arrive(uint64_t *barrier, uint32_t count) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0], %1;" ::"r"(address(barrier)), "r"(count)
                 : "memory");
}

/* Each worker reads what another wrote, with a barrier of the workers between. The other threads
 * stay until the end, as those of the decode kernel do. */
__global__ void named(const int *in, int *out, bool barrier) {
    __shared__ int row[WORKERS];
    int sum = 0;
    for (int r = 0; r < ROUNDS && threadIdx.x < WORKERS; r++) {
        row[threadIdx.x] = in[r * WORKERS + threadIdx.x];
        if (barrier) asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
        sum += row[WORKERS - 1 - threadIdx.x];
        if (barrier) asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");
    }
    __syncthreads();
    if (threadIdx.x < WORKERS) out[threadIdx.x] = sum;
}

enum Copier { BULK, PLAIN, PLAIN_WARP, PLAIN_MEET };

__device__ static void meet(Copier copier) {
    if (copier == PLAIN_MEET) {
        asm volatile("bar.sync 2, 32;" ::: "memory");
    } else {
        __syncwarp();
    }
}

/* Warp 16 copies rounds into slots; 16 warps add them up and leave. EACH: every thread leaves, not
 * one for its warp; EARLY: before it has read. */
template <Copier COPIER, bool EACH, bool EARLY> __global__ void ring(const int *in, int *out) {
    constexpr uint32_t FULL = COPIER == BULK ? 1 : 1 << 16;
    constexpr bool TWO =
        COPIER == PLAIN_WARP || COPIER == PLAIN_MEET; /* lane 1 copies for lane 0 */
    __shared__ __align__(128) int slot[SLOTS][WORKERS];
    __shared__ uint64_t landed[SLOTS], left[SLOTS];
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; s++) {
            init(&landed[s], FULL);
            init(&left[s], EACH ? WORKERS : WORKERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    int lane = (int)threadIdx.x - WORKERS;
    if (lane >= 0 && lane < (TWO ? 32 : 1)) {
#pragma unroll 1
        for (int r = 0; r < ROUNDS; r++) {
            int s = r % SLOTS;
            if (lane == 0 && r >= SLOTS) wait(&left[s], (r / SLOTS - 1) & 1);
            if (TWO) meet(COPIER);
            if (COPIER == BULK) {
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                                 address(&landed[s])),
                             "r"(BYTES)
                             : "memory");
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                             "[%0], [%1], %2, [%3];" ::"r"(address(slot[s])),
                             "l"(in + r * WORKERS), "r"(BYTES), "r"(address(&landed[s]))
                             : "memory");
                continue;
            }
            if (lane == 0) arrive(&landed[s], FULL - BYTES / 16);
#pragma unroll 1
            for (int i = 0; i < WORKERS && lane == (TWO ? 1 : 0); i++) {
                slot[s][i] = in[r * WORKERS + i];
            }
            if (TWO) meet(COPIER);
            if (lane == 0) arrive(&landed[s], BYTES / 16);
        }
    }
    if (lane >= 0) return;
    int sum = 0;
#pragma unroll 1
    for (int r = 0; r < ROUNDS; r++) {
        int s = r % SLOTS;
        wait(&landed[s], r / SLOTS & 1);
        if (EARLY) arrive(&left[s], 1);
        sum += slot[s][WORKERS - 1 - threadIdx.x];
        if (!EACH) __syncwarp();
        if (!EARLY && (EACH || threadIdx.x % 32 == 0)) arrive(&left[s], 1);
    }
    out[threadIdx.x] = sum;
}

int main(int argc, char **argv) {
    static int in[ROUNDS * WORKERS], out[WORKERS];
    int *from, *to, wrong = 0;
    const char *what = argc > 1 ? argv[1] : "named";
    auto is = [what](const char *name) { return strcmp(what, name) == 0; };
    for (int i = 0; i < ROUNDS * WORKERS; i++) in[i] = i * 7919 % 1000;
    if (cudaMalloc(&from, sizeof in) || cudaMalloc(&to, sizeof out)) return 2;
    cudaMemcpy(from, in, sizeof in, cudaMemcpyHostToDevice);
    if (is("bulk"))
        ring<BULK, false, false><<<1, THREADS>>>(from, to);
    else if (is("bulk-each"))
        ring<BULK, true, false><<<1, THREADS>>>(from, to);
    else if (is("plain"))
        ring<PLAIN, false, false><<<1, THREADS>>>(from, to);
    else if (is("plain-each"))
        ring<PLAIN, true, false><<<1, THREADS>>>(from, to);
    else if (is("plain-warp"))
        ring<PLAIN_WARP, true, false><<<1, THREADS>>>(from, to);
    else if (is("plain-meet"))
        ring<PLAIN_MEET, true, false><<<1, THREADS>>>(from, to);
    else if (is("plain-race"))
        ring<PLAIN, true, true><<<1, THREADS>>>(from, to);
    else
        named<<<1, THREADS>>>(from, to, is("named"));
    if (cudaMemcpy(out, to, sizeof out, cudaMemcpyDeviceToHost)) return 2;
    for (int i = 0; i < WORKERS; i++) {
        int sum = 0;
        for (int r = 0; r < ROUNDS; r++) sum += in[r * WORKERS + WORKERS - 1 - i];
        wrong += sum != out[i];
    }
    printf("%s: %d sums are wrong\n", what, wrong);
    return !is("named-race") && !is("plain-race") && wrong;
}
