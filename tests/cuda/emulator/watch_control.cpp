/* What the watched card must report and what it must not: kernels with one mistake each. */
#include "backend/cuda/driver.h"
#include "emulator.h"
#include "watch.h"

#include <cstdio>

namespace {

enum { THREADS = 64, BLOCKS = 2 };
enum Mistake { NONE, NO_BARRIER, NO_MEETING, OTHER_BLOCK, EARLY_READ, EARLY_WRITE, EARLY_COPY };

/* Every thread reads what its neighbours wrote into shared memory, and what the launch before left
 * in the block's part of `in`. */
void kernel(const float *in, float *out, int mistake) {
    DYNAMIC_SHARED(float, row);
    static float warp_row[THREADS];
    int t = threadIdx.x, at = (int)blockIdx.x * THREADS + t;
    if (mistake == EARLY_READ) row[t] = in[at];
    if (mistake == EARLY_WRITE) out[at] = 0;
    if (mistake == EARLY_COPY && t % 4 == 0) copy16(shared_address(row + t), in + at, true);
    wait_for_previous();
    copy_commit();
    copy_wait<0>();
    if (mistake != EARLY_READ && mistake != EARLY_COPY) row[t] = in[at];
    if (mistake != NO_BARRIER) __syncthreads();
    float sum = row[THREADS - 1 - t];
    __syncthreads();
    warp_row[t] = sum;
    if (mistake != NO_MEETING) __syncwarp();
    sum += warp_row[t ^ 1];
    out[mistake == OTHER_BLOCK ? t : at] = sum;
}

} // namespace

extern "C" int cuMemAlloc_v2(uint64_t *out, size_t bytes);
extern "C" int cuLaunchKernelEx(const CUlaunchConfig *c, void *function, void **args, void **);
extern "C" int cuModuleGetFunction(void **out, void *module, const char *name);

int main() {
    static char file[] = "control";
    static const char *const names[] = {
        "no mistake",    "a barrier left out", "a warp not met", "two blocks write one place",
        "an early read", "an early write",     "an early copy"};
    emulator::add(file, "kernel", kernel);
    void *function;
    uint64_t memory[2];
    int failures = 0;
    cuModuleGetFunction(&function, file, "kernel");
    for (uint64_t &m : memory) {
        cuMemAlloc_v2(&m, BLOCKS * THREADS * sizeof(float));
        for (int i = 0; i < BLOCKS * THREADS; i++) ((float *)m)[i] = (float)i;
    }
    for (int mistake = NONE; mistake <= EARLY_COPY; mistake++) {
        /* The first begins when all before it has ended, the second early. */
        for (int i = 0; i < 2; i++) {
            CUlaunchAttribute early = {};
            early.id = CU_LAUNCH_PROGRAMMATIC;
            early.value.number = i;
            CUlaunchConfig c = {BLOCKS, 1, 1, THREADS, 1, 1, THREADS * 4, nullptr, &early, 1};
            int kind = i ? mistake : NONE;
            void *arguments[] = {&memory[i], &memory[1 - i], &kind};
            cuLaunchKernelEx(&c, function, arguments, nullptr);
        }
        size_t n = emulator::watch_reports();
        bool good = (n > 0) == (mistake != NONE);
        printf("%s %s: %zu reports\n", good ? "ok  " : "FAIL", names[mistake], n);
        failures += !good;
    }
    return failures != 0;
}
