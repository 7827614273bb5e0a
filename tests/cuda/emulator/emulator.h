/* CUDA C on a processor, as much as the portable kernels use: threads of a block are fibers, the
 * lanes of a warp meet in exchanges, a block in barriers. Included before every kernel file. */
#ifndef LILY_CUDA_EMULATOR_H
#define LILY_CUDA_EMULATOR_H

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

struct float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct dim3 {
    unsigned x, y, z;
};

namespace emulator {

struct Context {
    dim3 thread, block, block_size, grid;
};
extern Context *context; /* of the running thread */

extern size_t most_shared; /* bytes a launch may ask for: by default, of the smallest card */
int lane();
char *dynamic_shared();
void copy_later(void *to, const void *from, bool valid);
void copy_commit();
void copy_wait(int most);
void wait_for_previous();
void unwatched(); /* the rest of this launch */
void barrier();
void give_way(); /* what is waited for is for other warps to do */
enum { EXCHANGE_BYTES = 32 };
/* Gives size bytes and returns those of all 32 lanes, EXCHANGE_BYTES apart, when each has given. */
const char *exchange_bytes(const void *mine, size_t size);
int *barrier_or(int value);

template <class T> struct Given {
    const char *data;
    const T &operator[](int i) const { return *(const T *)(data + i * EXCHANGE_BYTES); }
};
template <class T> Given<T> exchange(const T &mine) {
    static_assert(sizeof(T) <= EXCHANGE_BYTES, "an exchange carries 32 bytes a lane");
    return {exchange_bytes(&mine, sizeof mine)};
}

/* A kernel by "shape/file" and name; arguments as cuLaunchKernel has them. */
typedef void (*Entry)(void **arguments);
void add_kernel(const char *file, const char *name, void (*run)(void **, const void *),
                const void *kernel);

template <class... A, size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}
template <class... A> void run(void **arguments, const void *kernel) {
    call((void (*)(A...))kernel, arguments, std::index_sequence_for<A...>());
}
template <class... A> void add(const char *file, const char *name, void (*kernel)(A...)) {
    add_kernel(file, name, run<A...>, (const void *)kernel);
}

} // namespace emulator

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__   static
#define threadIdx    (emulator::context->thread)
#define blockIdx     (emulator::context->block)
#define blockDim     (emulator::context->block_size)
#define gridDim      (emulator::context->grid)

inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
inline float __uint_as_float(uint32_t x) {
    float f;
    memcpy(&f, &x, sizeof f);
    return f;
}
inline uint32_t __float_as_uint(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++)
        out |= (uint32_t)(both >> (selector >> (4 * i) & 7) * 8 & 255) << 8 * i;
    return out;
}
template <class T> T __ldg(const T *p) {
    return *p;
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
template <class T> T __shfl_xor_sync(unsigned, T x, int step) {
    return emulator::exchange(x)[emulator::lane() ^ step];
}
template <class T> T __shfl_sync(unsigned, T x, int from) {
    return emulator::exchange(x)[from];
}
template <class T> T __shfl_up_sync(unsigned, T x, int step) {
    auto all = emulator::exchange(x);
    int lane = emulator::lane();
    return all[lane >= step ? lane - step : lane];
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    auto all = emulator::exchange(x);
    unsigned most = 0;
    for (int i = 0; i < 32; i++) most = all[i] > most ? all[i] : most;
    return most;
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    auto all = emulator::exchange(x);
    unsigned least = ~0u;
    for (int i = 0; i < 32; i++) least = all[i] < least ? all[i] : least;
    return least;
}
inline void __syncwarp() {
    emulator::exchange(0);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    auto all = emulator::exchange((int)x);
    unsigned mask = 0;
    for (int i = 0; i < 32; i++) mask |= (unsigned)all[i] << i;
    return mask;
}
inline void __syncthreads() {
    emulator::barrier();
}
inline int __syncthreads_or(int x) {
    return *emulator::barrier_or(x);
}
/* What they touch is not looked at by watch.cpp. */
#define ATOMIC __attribute__((noinline, no_sanitize("thread")))
ATOMIC inline int atomicAdd(int *at, int x) {
    int old = *at;
    *at += x;
    return old;
}
ATOMIC inline unsigned atomicOr(unsigned *at, unsigned x) {
    unsigned old = *at;
    *at |= x;
    return old;
}
using std::isfinite;
using std::isnan;
inline float rsqrtf(float x) {
    return 1.0f / sqrtf(x);
}
inline int min(int a, int b) {
    return a < b ? a : b;
}
inline int max(int a, int b) {
    return a > b ? a : b;
}

#include "instructions.cuh"

#endif
