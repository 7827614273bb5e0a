/* The instructions of sm_90a that the prompt kernels use and CUDA C has no name for, and nothing
 * else. Products of a warpgroup (four warps): d[64, N] += a[64, 16] b[16, N], bf16 in, float32
 * sums.
 *
 * Lane l of warp w holds of d rows 16 w + l / 4 and 8 further down: d[4 j] and d[4 j + 1] are
 * columns 8 j + 2 (l % 4) and the next of the first, d[4 j + 2] and d[4 j + 3] of the second. Of a
 * it holds, in two registers each, columns 2 (l % 4) and the next of both rows, then columns 8
 * further.
 *
 * Operands in shared memory lie in pieces of 8 x 128 bytes that begin at multiples of 1,024, their
 * 16-byte parts permuted by row (part ^ row % 8). */
#ifndef LILY_CUDA_PREFILL_WGMMA_CUH
#define LILY_CUDA_PREFILL_WGMMA_CUH

#include "instructions.cuh"

__device__ __forceinline__ uint2 load_shared8(shared_at at) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}
__device__ __forceinline__ uint32_t load_shared4(shared_at at) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

/* a & b | c with the constants in registers: one instruction. */
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* 2^x within 2 units in the last place; results below 2^-126 are 0. */
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* 1 / x within 1 unit in the last place. */
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats rounded to fp16, at most 65,504 in size: a in the low half. NaN stays NaN. */
__device__ __forceinline__ uint32_t half_pair(float a, float b) {
    uint32_t pair;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}
__device__ __forceinline__ float2 half_floats(uint32_t pair) {
    float2 v;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(v.x), "=f"(v.y)
        : "r"(pair));
    return v;
}

/* Shared memory that this thread has written is read by later products: then a barrier. */
__device__ __forceinline__ void publish_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Where an operand lies, for the hardware: address, strides between pieces, 128-byte swizzle. */
typedef uint64_t operand;

/* Rows of 64 bf16 with the summed index along the row; 8 rows a piece, pieces one after another. */
__device__ __forceinline__ operand operand_rows(shared_at at) {
    return (uint64_t)(at >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
/* Rows of 64 bf16 with the summed index across rows; the next 64 columns lie `stride` further. */
__device__ __forceinline__ operand operand_columns(shared_at at, int stride) {
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(stride >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ operand operand_at(operand o, int bytes) {
    return o + (uint64_t)(bytes >> 4);
}

/* Registers written before are visible to the products that follow. */
__device__ __forceinline__ void products_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most n committed groups of products are under way. */
template <int n> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory");
}
/* The registers are not moved across this point. */
template <int n> __device__ __forceinline__ void hold(float (&d)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* What x follows from is done before the waits behind this: the compiler orders these with a store
 * that it may not leave out, but not with arithmetic. */
__device__ __forceinline__ void settle(shared_at at, float x) {
    asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

/* ---- signals: counts in shared memory that threads wait for ---------------------------------- */

__device__ __forceinline__ void signal_init(shared_at at, int count) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void signal_arrive(shared_at at) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
}
/* Arrives once all copies that this thread has begun are done. */
__device__ __forceinline__ void signal_when_copied(shared_at at) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
}
/* Until the signal has been given in the turn of that parity. */
__device__ __forceinline__ void signal_wait(shared_at at, uint32_t turn) {
    asm volatile("{\n.reg .pred p;\nagain:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;\n}" ::"r"(at),
                 "r"(turn)
                 : "memory");
}
__device__ __forceinline__ void copy_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Registers of a thread from here on, of all of a warpgroup; others give up or take theirs. */
template <int n> __device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n> __device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

#define REGS_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define REGS_1 REGS_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define REGS_2 REGS_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define REGS_3 REGS_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define REGS_4 REGS_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define REGS_5 REGS_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define REGS_6 REGS_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define REGS_7 REGS_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define REGS_8 REGS_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define REGS_9                                                                                     \
    REGS_7 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define REGS_11                                                                                    \
    REGS_9 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGS_13                                                                                    \
    REGS_11 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
            "%110, %111"
#define REGS_15                                                                                    \
    REGS_13 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "     \
            "%125, %126, %127"
#define SUMS_8(i)                                                                                  \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)

/* a from registers, b [N rows][16] along rows (trans 0) or [16 rows][N] across them (trans 1). */
#define PRODUCT_OF_REGISTERS(name, n, trans, regs, a0, a1, a2, a3, at, ...)                        \
    __device__ __forceinline__ void name(float(&d)[n / 2], const uint32_t(&a)[4], operand b) {     \
        asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 1, 1;\n"                                    \
                     "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, {%" #a0 \
                     ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #at ", p, 1, 1, " #trans ";\n}"          \
                     : __VA_ARGS__                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                        \
    }
PRODUCT_OF_REGISTERS(product, 16, 0, REGS_0, 8, 9, 10, 11, 12, SUMS_8(0))
PRODUCT_OF_REGISTERS(product, 32, 0, REGS_1, 16, 17, 18, 19, 20, SUMS_16(0))
PRODUCT_OF_REGISTERS(product, 48, 0, REGS_2, 24, 25, 26, 27, 28, SUMS_16(0), SUMS_8(16))
PRODUCT_OF_REGISTERS(product, 64, 0, REGS_3, 32, 33, 34, 35, 36, SUMS_32(0))
PRODUCT_OF_REGISTERS(product, 80, 0, REGS_4, 40, 41, 42, 43, 44, SUMS_32(0), SUMS_8(32))
PRODUCT_OF_REGISTERS(product, 96, 0, REGS_5, 48, 49, 50, 51, 52, SUMS_32(0), SUMS_16(32))
PRODUCT_OF_REGISTERS(product, 112, 0, REGS_6, 56, 57, 58, 59, 60, SUMS_32(0), SUMS_16(32),
                     SUMS_8(48))
PRODUCT_OF_REGISTERS(product, 128, 0, REGS_7, 64, 65, 66, 67, 68, SUMS_64(0))
PRODUCT_OF_REGISTERS(product, 144, 0, REGS_8, 72, 73, 74, 75, 76, SUMS_64(0), SUMS_8(64))
PRODUCT_OF_REGISTERS(product, 160, 0, REGS_9, 80, 81, 82, 83, 84, SUMS_64(0), SUMS_16(64))
PRODUCT_OF_REGISTERS(product, 256, 0, REGS_15, 128, 129, 130, 131, 132, SUMS_64(0), SUMS_64(64))
PRODUCT_OF_REGISTERS(product_columns, 256, 1, REGS_15, 128, 129, 130, 131, 132, SUMS_64(0),
                     SUMS_64(64))

/* Both from shared memory, along rows; add false: d is replaced. */
__device__ __forceinline__ void product(float (&d)[32], operand a, operand b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" REGS_3
                 "}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : SUMS_32(0)
                 : "l"(a), "l"(b), "r"((int)add));
}

#endif
