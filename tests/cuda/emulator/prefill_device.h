/* Memory and launches of tests/cuda/prefill_bench.cu on the emulated card: included in the place of
 * the file of the same name there. */
#ifndef LILY_CUDA_PREFILL_DEVICE_H
#define LILY_CUDA_PREFILL_DEVICE_H

#include "backend/cuda/driver.h"
#include "watch.h"

extern "C" int cuLaunchKernelEx(const CUlaunchConfig *c, void *function, void **args, void **);
extern "C" int cuModuleGetFunction(void **out, void *module, const char *name);

enum { EMULATED = 1 }; /* fewer cases */

static std::vector<void *> held;

static void start() {
    emulator::most_shared = 227 << 10;
}
static void release() {
    for (void *p : held) free(p);
    held.clear();
}
template <class T> static T *take(size_t n) {
    size_t bytes = (n * sizeof(T) + 4095) / 4096 * 4096;
    void *p = aligned_alloc(4096, bytes);
    memset(p, 0xff, bytes); /* NaN: nothing may be read before it is written */
    emulator::watch_memory(p, bytes, false);
    held.push_back(p);
    return (T *)p;
}
static void send(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}
static void copy(void *to, const void *from, size_t bytes) {
    memcpy(to, from, bytes);
}
static void poison(void *at, size_t bytes) {
    memset(at, 0xff, bytes);
}
template <class T> static std::vector<T> fetch(const T *from, size_t n) {
    return std::vector<T>(from, from + n);
}

/* Kernels make themselves known when they are first launched, by their address: one behind a
 * pointer has no name. */
template <class... P, class... A>
static void launch(const char *text, void (*kernel)(P...), unsigned gx, unsigned gy,
                   unsigned threads, size_t shared, A... given) {
    static char file[] = "bench";
    char name[96];
    snprintf(name, sizeof name, "%.60s at %p", text, (void *)kernel);
    void *function;
    if (cuModuleGetFunction(&function, file, name)) {
        emulator::add(file, strdup(name), kernel);
        cuModuleGetFunction(&function, file, name);
    }
    std::tuple<P...> arguments((P)given...);
    std::apply(
        [&](auto &...each) {
            void *list[] = {(void *)&each...};
            /* As prompt.c launches its own: each must wait for the one before it. */
            CUlaunchAttribute early = {};
            early.id = CU_LAUNCH_PROGRAMMATIC;
            early.value.number = strncmp(text, "plain_", 6) != 0 && strncmp(text, "fill_", 5) != 0;
            CUlaunchConfig c = {gx, gy, 1, threads, 1, 1, (unsigned)shared, nullptr, &early, 1};
            if (cuLaunchKernelEx(&c, function, list, nullptr)) {
                printf("FAIL launch of %s\n", name);
                exit(1);
            }
        },
        arguments);
}
#define RUN(kernel, gx, gy, threads, shared, ...)                                                  \
    launch(#kernel, kernel, (unsigned)(gx), (unsigned)(gy), (unsigned)(threads), (size_t)(shared), \
           __VA_ARGS__)

/* Nothing is timed here. */
template <class F> static double microseconds(int, F) {
    return NAN;
}

#endif
