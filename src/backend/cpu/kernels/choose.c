#include "backend/cpu/kernels/kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1ul << 20)
#endif
#endif

#if defined(__x86_64__)
static bool has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
static bool has_dot_product(void) {
#ifdef __linux__
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return true; /* every Apple core that runs 64-bit macOS */
#endif
}
#endif

/* Fills list once; calling it again writes the same values. */
const struct kernels *const *kernels_usable(void) {
    static const struct kernels *list[4];
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (has_avx512()) list[n++] = &kernels_avx512;
    if (has_avx2()) list[n++] = &kernels_avx2;
#elif defined(__aarch64__)
    if (has_dot_product()) list[n++] = &kernels_neon;
#endif
    list[n] = &kernels_portable;
    return list;
}
