// Warpgroup matrix instructions (wgmma): the four warps of a warpgroup multiply tiles in shared memory (see `tiles.cuh`),
// asynchronously.
#ifndef TAMIS_WARPGROUPS
#define TAMIS_WARPGROUPS
#include "instructions.cuh"
#include "tiles.cuh"

// The address of dynamic shared memory, a multiple of 1024 bytes, which tiles need.
__device__ __forceinline__ u32 tile_memory() {
    extern __shared__ __align__(1024) unsigned char tiles[];
    return static_cast<u32>(__cvta_generic_to_shared(tiles));
}

// ---- Order

// A fence is needed before the first wgmma, and after other instructions have accessed the registers of a wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Makes the wgmma since the last commit a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are in flight. The operands of the others may then be overwritten.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Waits as well, and keeps the compiler from reading these accumulators before.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&accumulators)[N]) {
    wgmma_wait<PENDING>();
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(accumulators[i])::"memory");
}

// ---- Products of M = 64 rows and N columns, K = 16, or 32 of e4m3 numbers
//
// `ss` has both operands in shared memory, `rs` has a in registers, as a fragment. a is K-major. A thread has N / 2
// accumulators d, whose number selects the instruction. If `accumulate` is 0, d is overwritten.

#define D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES16 NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES32 NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                                        \
    NAMES32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                       \
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FRAGMENT "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
// The instruction for fp16 or bf16 operands. FIRST sets the predicate p, if the instruction has one.
#define WGMMA(FIRST, SHAPE, OPERANDS, D, ...)                                                                          \
    if constexpr (TYPE == FP16) {                                                                                      \
        asm volatile(FIRST "wgmma.mma_async.sync.aligned." SHAPE ".f32.f16.f16 {" OPERANDS : D : __VA_ARGS__);         \
    } else {                                                                                                           \
        asm volatile(FIRST "wgmma.mma_async.sync.aligned." SHAPE ".f32.bf16.bf16 {" OPERANDS : D : __VA_ARGS__);       \
    }
#define IF(NAME) "{\n.reg .pred p;\nsetp.ne.b32 p, " NAME ", 0;\n"

// d[64, 16] (+)= a[64, 16] b[16, 16]^T, b K-major; with 32 columns below.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss(float (&d)[8], unsigned long long a, unsigned long long b, int accumulate) {
    WGMMA(IF("%10"), "m64n16k16", NAMES8 "}, %8, %9, p, 1, 1, 0, 0;\n}", D8(0), "l"(a), "l"(b), "r"(accumulate))
}

template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss(float (&d)[16], unsigned long long a, unsigned long long b, int accumulate) {
    WGMMA(IF("%18"), "m64n32k16", NAMES16 "}, %16, %17, p, 1, 1, 0, 0;\n}", D16(0), "l"(a), "l"(b), "r"(accumulate))
}

// d[64, 64] (+)= a[64, 16] b[64, 16]^T, b K-major.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    WGMMA(IF("%34"), "m64n64k16", NAMES32 "}, %32, %33, p, 1, 1, 0, 0;\n}", D32(0), "l"(a), "l"(b), "r"(accumulate))
}

// d[64, 16] (+)= a[64, 16] b[16, 16]^T, b K-major.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_rs(float (&d)[8], const u32 (&a)[4], unsigned long long b, int accumulate) {
    WGMMA(IF("%13"), "m64n16k16", NAMES8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}", D8(0), FRAGMENT, "l"(b), "r"(accumulate))
}

// d[64, 32] (+)= a[64, 16] b[32, 16]^T, b K-major.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_rs(float (&d)[16], const u32 (&a)[4], unsigned long long b, int accumulate) {
    WGMMA(IF("%21"), "m64n32k16", NAMES16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}", D16(0), FRAGMENT, "l"(b), "r"(accumulate))
}

// d[64, 64] (+)= a[64, 16] b[64, 16]^T, b K-major.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_rs(float (&d)[32], const u32 (&a)[4], unsigned long long b, int accumulate) {
    WGMMA(IF("%37"), "m64n64k16", NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}", D32(0), FRAGMENT, "l"(b), "r"(accumulate))
}

// d[64, 128] += a[64, 16] b[16, 128], b MN-major. 256 columns would need more registers than a CTA of 512 threads has.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss(float (&d)[64], unsigned long long a, unsigned long long b) {
    WGMMA("", "m64n128k16", NAMES64 "}, %64, %65, 1, 1, 1, 0, 1;", D64(0), "l"(a), "l"(b))
}

// d[64, 64] (+)= a[64, 16] b[16, 64], a K-major, b MN-major; with 32 columns first.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss_k_mn(float (&d)[16], unsigned long long a, unsigned long long b, int accumulate) {
    WGMMA(IF("%18"), "m64n32k16", NAMES16 "}, %16, %17, p, 1, 1, 0, 1;\n}", D16(0), "l"(a), "l"(b), "r"(accumulate))
}

template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss_k_mn(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    WGMMA(IF("%34"), "m64n64k16", NAMES32 "}, %32, %33, p, 1, 1, 0, 1;\n}", D32(0), "l"(a), "l"(b), "r"(accumulate))
}

// d[64, 32] += a[16, 64]^T b[16, 32], both MN-major; with 128 columns below.
template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss_mn_mn(float (&d)[16], unsigned long long a, unsigned long long b) {
    WGMMA("", "m64n32k16", NAMES16 "}, %16, %17, 1, 1, 1, 1, 1;", D16(0), "l"(a), "l"(b))
}

template <Operand TYPE>
__device__ __forceinline__ void wgmma_ss_mn_mn(float (&d)[64], unsigned long long a, unsigned long long b) {
    WGMMA("", "m64n128k16", NAMES64 "}, %64, %65, 1, 1, 1, 1, 1;", D64(0), "l"(a), "l"(b))
}

template <Operand TYPE>
__device__ __forceinline__ void wgmma_rs(float (&d)[64], const u32 (&a)[4], unsigned long long b) {
    WGMMA("", "m64n128k16", NAMES64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;", D64(0), FRAGMENT, "l"(b))
}

// d[64, 64] (+)= a[64, 32] b[64, 32]^T of e4m3 numbers, both K-major; with 128 columns below.
__device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(IF("%34") "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NAMES32 "}, %32, %33, p, 1, 1;\n}"
                 : D32(0) : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void wgmma_ss_e4m3(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(IF("%66") "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NAMES64 "}, %64, %65, p, 1, 1;\n}"
                 : D64(0) : "l"(a), "l"(b), "r"(accumulate));
}

#undef D8
#undef D16
#undef D32
#undef D64
#undef NAMES8
#undef NAMES16
#undef NAMES32
#undef NAMES64
#undef FRAGMENT
#undef WGMMA
#undef IF

#endif
