/* What compute-sanitizer's racecheck can see. It reports the persistent decode kernel, which is
 * built of two ways of waiting that are no races; these are the two alone, and a race:
 *   racecheck_control bulk     a ring filled by bulk copies, with barriers "landed" and "left"
 *   racecheck_control named    a barrier of 512 of a block's 640 threads (bar.sync 1, 512)
 *   racecheck_control race     the same without the barrier: the tool must report it
 * tests/cuda/run.sh runs all three under the tool. Each prints whether its sums are right. */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

static constexpr int WORKERS = 512, THREADS = 640, ROUNDS = 16, SLOTS = 2;

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

/* Warp 16 copies rounds into slots; 16 warps add them up and leave. */
__global__ void bulk(const int *in, int *out) {
    __shared__ __align__(128) int slot[SLOTS][WORKERS];
    __shared__ uint64_t landed[SLOTS], left[SLOTS];
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; s++) {
            asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&landed[s])));
            asm volatile("mbarrier.init.shared.b64 [%0], 16;" ::"r"(address(&left[s])));
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x == WORKERS) {
        for (int r = 0; r < ROUNDS; r++) {
            int s = r % SLOTS, bytes = WORKERS * (int)sizeof(int);
            if (r >= SLOTS) wait(&left[s], (r / SLOTS - 1) & 1);
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                             address(&landed[s])),
                         "r"(bytes)
                         : "memory");
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                         "[%0], [%1], %2, [%3];" ::"r"(address(slot[s])),
                         "l"(in + r * WORKERS), "r"(bytes), "r"(address(&landed[s]))
                         : "memory");
        }
    }
    if (threadIdx.x >= WORKERS) return;
    int sum = 0;
    for (int r = 0; r < ROUNDS; r++) {
        int s = r % SLOTS;
        wait(&landed[s], r / SLOTS & 1);
        sum += slot[s][WORKERS - 1 - threadIdx.x];
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(&left[s])) : "memory");
        }
    }
    out[threadIdx.x] = sum;
}

int main(int argc, char **argv) {
    static int in[ROUNDS * WORKERS], out[WORKERS];
    int *from, *to, wrong = 0;
    const char *what = argc > 1 ? argv[1] : "named";
    for (int i = 0; i < ROUNDS * WORKERS; i++) in[i] = i * 7919 % 1000;
    if (cudaMalloc(&from, sizeof in) || cudaMalloc(&to, sizeof out)) return 2;
    cudaMemcpy(from, in, sizeof in, cudaMemcpyHostToDevice);
    if (strcmp(what, "bulk") == 0) bulk<<<1, THREADS>>>(from, to);
    else named<<<1, THREADS>>>(from, to, strcmp(what, "named") == 0);
    if (cudaMemcpy(out, to, sizeof out, cudaMemcpyDeviceToHost)) return 2;
    for (int i = 0; i < WORKERS; i++) {
        int sum = 0;
        for (int r = 0; r < ROUNDS; r++) sum += in[r * WORKERS + WORKERS - 1 - i];
        wrong += sum != out[i];
    }
    printf("%s: %d sums are wrong\n", what, wrong);
    return strcmp(what, "race") != 0 && wrong;
}
