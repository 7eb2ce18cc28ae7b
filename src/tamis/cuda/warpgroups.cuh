// Matrix products of four warps at a time, on tiles in shared memory. Comes after `instructions.cuh`.

// Where dynamic shared memory starts: a multiple of 1024, as tiles need it.
__device__ __forceinline__ u32 tiles_start() {
    extern __shared__ __align__(1024) unsigned char tiles[];
    return static_cast<u32>(__cvta_generic_to_shared(tiles));
}

// Between a thread's own accesses to shared memory and those of bulk copies and matrix products.
__device__ __forceinline__ void fence_for_copies_and_products() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Four matrices of 8x8 halves from fragments; lane 8i + j holds the address of row j of matrix i.
__device__ __forceinline__ void store_matrices(u32 address, const u32 (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]) : "memory");
}

// The same with the matrices transposed.
__device__ __forceinline__ void store_matrices_transposed(u32 address, const u32 (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]) : "memory");
}

// ---- Matrix products, fp16 in unless the kernel defines PRODUCT_OPERANDS, and float32 out, asynchronous
//
// Operands in shared memory are tiles of rows of 128 bytes (64 halves), whose eight 16-byte units are exchanged: unit u
// of row r lies at u ^ (r % 8). A tile starts at a multiple of 1024 bytes. Where the product's inner axis runs along
// the rows, 16 of it are 32 bytes further; where it runs down the rows, 2048 bytes, and `tile_bytes` leads from 64
// columns to the next.

#ifndef PRODUCT_OPERANDS
#define PRODUCT_OPERANDS "f16.f16"
#endif

// What is the same in all lanes. A reduction over the warp leaves the compiler no choice but a uniform register, for it
// and for what follows from it; otherwise they take up those of the lanes.
__device__ __forceinline__ u32 uniform(u32 same) {
    asm volatile("redux.sync.or.b32 %0, %0, 0xFFFFFFFF;" : "+r"(same));
    return same;
}

// Descriptors differ in their lower words alone, and there are dozens of them.
__device__ __forceinline__ unsigned long long descriptor(u32 address, u32 tile_bytes) {
    const u32 lower = uniform((address & 0x3FFFF) >> 4 | tile_bytes >> 4 << 16);
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | lower;
}

// Of the tile whose inner axis runs along its rows.
__device__ __forceinline__ unsigned long long along_rows(u32 address) { return descriptor(address, 16); }

// Of tiles whose inner axis runs down their rows.
__device__ __forceinline__ unsigned long long down_rows(u32 address, u32 tile_bytes) {
    return descriptor(address, tile_bytes);
}

// Further along by some bytes.
__device__ __forceinline__ unsigned long long advance(unsigned long long start, u32 bytes) {
    return start & ~0xFFFFFFFFull | (static_cast<u32>(start) + (bytes >> 4));
}

// Before the first product, and after registers of a product were touched.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most this many of the committed groups are under way.
template <int PENDING, int N>
__device__ __forceinline__ void products_wait(float (&result)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(result[i])::"memory");
}

// Where only operands matter.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// d[64, 64] (+)= a[64, 16] b[64, 16]^T, both along rows.
#define MULTIPLY_64(NAME, OPERANDS)                                                                                    \
    __device__ __forceinline__ void NAME(float (&d)[32], unsigned long long a, unsigned long long b, int add) {        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                     \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." OPERANDS " {"                                       \
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                          \
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                  \
                     "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                                  \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),             \
                       "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),         \
                       "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),      \
                       "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),      \
                       "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                                              \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }
MULTIPLY_64(multiply_64, PRODUCT_OPERANDS)
MULTIPLY_64(multiply_64_bf16, "bf16.bf16")

// d[64, 16 or 32] (+)= a[64, 16] b[16 or 32, 16]^T, a in registers, as a fragment, b along rows; in fp16 or in bf16.
__device__ __forceinline__ void multiply_narrow_half(float (&d)[8], const u32 (&a)[4], unsigned long long b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply_narrow_bf16(float (&d)[8], const u32 (&a)[4], unsigned long long b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7"
                 "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply_narrow_half(float (&d)[16], const u32 (&a)[4], unsigned long long b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

__device__ __forceinline__ void multiply_narrow_bf16(float (&d)[16], const u32 (&a)[4], unsigned long long b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
                 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d[64, 128] += a[64, 16] b[16, 128], a along rows, b down rows. Wider products would need more registers than the
// compiler grants a block of 512 threads.
__device__ __forceinline__ void multiply_128(float (&d)[64], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." PRODUCT_OPERANDS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, 1, 1, 1, 0, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b));
}

// The same with a in registers, as a fragment.
__device__ __forceinline__ void multiply_128(float (&d)[64], const u32 (&a)[4], unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." PRODUCT_OPERANDS " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                   "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                   "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                   "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                   "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                   "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
