// What CUDA C++ has no word for: clusters, addresses in shared memory, dependent launches, counted copies, matrices.
//
// Kernels include this and nothing else, and keep assembly out of their own files. The tests put another file in its
// place, with which a kernel runs on the host.

typedef unsigned int u32;

constexpr u32 EVERY_LANE = 0xFFFFFFFFu;

// What follows from a number is worked out where it is written, and not before a loop, all along which it takes registers.
__device__ __forceinline__ u32 worked_out_here(u32 number) {
    asm volatile("" : "+r"(number));
    return number;
}

// Dynamic shared memory, aligned to 16 bytes.
__device__ __forceinline__ uint4* shared_memory() {
    extern __shared__ uint4 memory[];
    return memory;
}

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// What a thread wrote before it arrives is visible to every thread of the cluster that has waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

// Orders nothing: for a thread that has only read from the others, and tells them so.
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Addresses in shared memory as numbers: of a pointer, the compiler works out the window's base again at every use.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(pointer));
    asm volatile("" : "+r"(address));
    return address;
}

// Adding one is a single step for all lanes that meet at an address, as they do on a plateau of equal scores.
__device__ __forceinline__ void shared_increment(u32 address) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address) : "memory");
}

__device__ __forceinline__ u32 shared_load(u32 address) {
    u32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ uint4 shared_load4(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ uint2 shared_load2(u32 address) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
    return v;
}

__device__ __forceinline__ void shared_store(u32 address, u32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void shared_store4(u32 address, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// The place in another block of the cluster that corresponds to one of ours.
__device__ __forceinline__ u32 peer_address(u32 ours, u32 rank) {
    u32 theirs;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(ours), "r"(rank));
    return theirs;
}

__device__ __forceinline__ u32 peer_load(u32 theirs) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(theirs) : "memory");
    return value;
}

__device__ __forceinline__ void peer_add(u32 theirs, u32 value) {
    asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(theirs), "r"(value) : "memory");
}

// With programmatic dependent launch, the kernel before may still run up to here; otherwise these do nothing.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- Copies that a barrier in shared memory counts

// A barrier whose phase ends when `count` threads have arrived and the bytes that they announced are there.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// After it, copies see the barriers that this thread has set up.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Returns when the phase of this parity has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 ended;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    } while (!ended);
}

// Copies a multiple of 16 bytes, both ends aligned to 16, and tells the barrier when they are there.
__device__ __forceinline__ void copy_to_shared(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(destination), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Between a thread's own accesses to shared memory and those of such copies.
__device__ __forceinline__ void fence_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Asks for a line that will be read soon.
__device__ __forceinline__ void prefetch(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- Copies that a thread waits for by itself, in the order in which it started them

// Of 16 or 8 bytes, aligned to as many; `there` false: zeros, and the source is not touched.
template <int BYTES>
__device__ __forceinline__ void copy_or_clear(u32 destination, const void* source, bool there) {
    const int bytes = there ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     ::"r"(destination), "l"(source), "n"(BYTES), "r"(bytes) : "memory");
    }
}

// Ends a group of copies, which may be empty.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most this many groups are under way.
template <int PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// In place of waiting: a barrier that counts this thread gets its arrival when all copies it has started are there.
__device__ __forceinline__ void copies_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- Barriers among some of a block's warps, by number: 0 is that of __syncthreads

__device__ __forceinline__ void named_sync(u32 name, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// For a thread that only tells the others something.
__device__ __forceinline__ void named_arrive(u32 name, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- Registers per thread, which four warps in a row change together: those that need few leave the others more

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- Matrices, shared by the lanes of a warp as PTX describes for m16n8k16

// Four matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&m)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address));
}

// sum += a * b in fp16, or in bf16
__device__ __forceinline__ void multiply_half(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_bf16(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- Numbers; of two that share a word, the first has the lower half

// Four e4m3 codes as fp16, which holds them exactly.
__device__ __forceinline__ void e4m3_to_half(u32 codes, u32& first, u32& second) {
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(first), "=r"(second) : "r"(codes));
}

// Two products.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 multiply_bfloats(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// The larger magnitudes of two and two; NaN counts for nothing.
__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
    u32 larger;
    asm("{\n.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.f16x2 %0, x, y;\n}" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

__device__ __forceinline__ u32 pack_half(float first, float second) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

__device__ __forceinline__ u32 pack_bf16(float first, float second) {
    u32 packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(second), "f"(first));
    return packed;
}

__device__ __forceinline__ float2 unpack_half(u32 packed) {
    float2 wide;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(wide.x), "=f"(wide.y) : "r"(packed));
    return wide;
}

// To base 2, about 22 bits right; subnormal numbers are zero.
__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
