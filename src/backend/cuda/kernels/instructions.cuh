/* The instructions of sm_80 that CUDA C has no name for, and nothing else: tests run the portable
 * kernels on a processor with another file of this name (tests/cuda/emulator). */
#ifndef LILY_CUDA_INSTRUCTIONS_CUH
#define LILY_CUDA_INSTRUCTIONS_CUH

#include <stdint.h>

/* Two floats rounded to nearest even: a in the low half. */
__device__ __forceinline__ uint32_t bf16_pair(float a, float b) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}

/* a * b + c of two bf16 each, rounded once. */
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* (x & mask) | bits as one instruction. */
__device__ __forceinline__ uint32_t select_or(uint32_t x, uint32_t mask, uint32_t bits) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(x), "r"(mask), "r"(bits));
    return d;
}

/* For kernels that may begin before the one before them has ended (from sm_90 on, where the launch
 * says so): lets the next one begin; and waits until all work before is done and seen. */
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

typedef uint32_t shared_at; /* an address in shared memory */

__device__ __forceinline__ shared_at shared_address(const void *p) {
    return (shared_at)__cvta_generic_to_shared(p);
}

/* The block's dynamic shared memory as an array. */
#define DYNAMIC_SHARED(type, name) extern __shared__ __align__(128) type name[]

/* 16 bytes from device to shared memory in the background; zeros where valid is false. */
__device__ __forceinline__ void copy16(shared_at to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most n of this thread's committed groups are under way. */
template <int n> __device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

/* Four 8x8 bf16 matrices: lane l gives the address of row l % 8 of matrix l / 8. */
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], shared_at address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], shared_at address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* c[16, 8] += a[16, 16] b[16, 8], bf16 in, float32 sums. Lane l holds of c rows l / 4 and
 * 8 + l / 4, columns 2 (l % 4) and the next. */
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
