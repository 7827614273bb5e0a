/* Memory, launches and clocks of prefill_bench.cu. Memory is taken from one arena and given back
 * all at once. */
#ifndef LILY_CUDA_PREFILL_DEVICE_H
#define LILY_CUDA_PREFILL_DEVICE_H

#ifdef FEWER_CASES
enum { EMULATED = 1 }; /* fewer cases, for tools that are slow */
#else
enum { EMULATED = 0 };
#endif

static char *arena, *arena_at, *arena_end;

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            printf("FAIL %s: %s (%s:%d)\n", #call, cudaGetErrorString(e_), __FILE__, __LINE__);    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static void start() {
    size_t bytes = (size_t)8 << 30;
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    CHECK(cudaMalloc(&arena, bytes));
    arena_at = arena;
    arena_end = arena + bytes;
}
static void release() {
    CHECK(cudaDeviceSynchronize());
    arena_at = arena;
}
template <class T> static T *take(size_t n) {
    T *at = (T *)arena_at;
    arena_at += (n * sizeof(T) + 255) / 256 * 256;
    if (arena_at > arena_end) {
        printf("FAIL the arena is too small\n");
        exit(1);
    }
    return at;
}
static void send(void *to, const void *from, size_t bytes) {
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
}
static void copy(void *to, const void *from, size_t bytes) {
    CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToDevice));
}
static void poison(void *at, size_t bytes) {
    CHECK(cudaMemset(at, 0xff, bytes));
}
template <class T> static std::vector<T> fetch(const T *from, size_t n) {
    std::vector<T> out(n);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(out.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
}

/* Arguments are converted to the kernel's own types before their addresses are taken. */
template <class... P, class... A>
static void launch(void (*kernel)(P...), unsigned gx, unsigned gy, unsigned threads, size_t shared,
                   A... given) {
    if (shared > 48 << 10) {
        CHECK(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared));
    }
    kernel<<<dim3(gx, gy), threads, shared>>>((P)given...);
    CHECK(cudaGetLastError());
}
#define RUN(kernel, gx, gy, threads, shared, ...)                                                  \
    launch(kernel, (unsigned)(gx), (unsigned)(gy), (unsigned)(threads), (size_t)(shared),          \
           __VA_ARGS__)

/* Microseconds of one call, the median of several rounds. */
template <class F> static double microseconds(int calls, F call) {
    std::vector<float> all;
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    for (int round = 0; round < 6; round++) {
        CHECK(cudaEventRecord(a));
        for (int i = 0; i < calls; i++) call(i);
        CHECK(cudaEventRecord(b));
        CHECK(cudaEventSynchronize(b));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, a, b));
        if (round) all.push_back(ms / (float)calls);
    }
    CHECK(cudaEventDestroy(a));
    CHECK(cudaEventDestroy(b));
    std::sort(all.begin(), all.end());
    return 1000.0 * (double)all[all.size() / 2];
}

#endif
