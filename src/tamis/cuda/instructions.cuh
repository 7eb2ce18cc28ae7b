// What CUDA C++ has no word for: clusters, addresses in shared memory, and dependent launches.
//
// Kernels include this and nothing else, and keep assembly out of their own files. The tests put another file in its
// place, with which a kernel runs on the host.

typedef unsigned int u32;

constexpr u32 EVERY_LANE = 0xFFFFFFFFu;

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
