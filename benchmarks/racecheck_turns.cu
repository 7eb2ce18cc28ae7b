// What compute-sanitizer's racecheck makes of warps that exchange data over named barriers at which one side only arrives:
//
//     nvcc -arch=sm_90a -o turns racecheck_turns.cu && compute-sanitizer --tool racecheck ./turns
//
// `one_way` is the producer and consumer of PTX's own description of `bar`: what is written before an arrival is read after
// the wait that it completes, and written again after the reader's arrival has been waited for. racecheck reports all of
// it from the second exchange on; of `once` (a single exchange) and `both_wait` (nobody only arrives) it reports nothing.
#include <cstdio>

__device__ __forceinline__ void wait(int name) { asm volatile("bar.sync %0, 64;" ::"r"(name) : "memory"); }
__device__ __forceinline__ void arrive(int name) { asm volatile("bar.arrive %0, 64;" ::"r"(name) : "memory"); }

__global__ void once(int* out) {
    __shared__ int shared[32];
    if (threadIdx.x < 32) {
        shared[threadIdx.x] = threadIdx.x;
        arrive(1);
    } else {
        wait(1);
        out[threadIdx.x] = shared[threadIdx.x - 32];
    }
}

__global__ void one_way(int* out) {
    __shared__ int shared[32];
    const int writer = threadIdx.x < 32, lane = threadIdx.x % 32;
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
        if (writer) {
            if (i > 0) wait(5);
            shared[lane] = i;
            arrive(4);
        } else {
            wait(4);
            sum += shared[lane];
            if (i < 3) arrive(5);
        }
    }
    out[threadIdx.x] = sum;
}

__global__ void both_wait(int* out) {
    __shared__ int shared[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int sum = 0;
    for (int i = 0; i < 8; ++i) {
        wait(4);
        if (i % 2 == warp) {
            sum += shared[lane];
            shared[lane] = i;
        }
    }
    out[threadIdx.x] = sum;
}

int main() {
    int* out;
    cudaMalloc(&out, 64 * sizeof(int));
    once<<<1, 64>>>(out);
    printf("once: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    one_way<<<1, 64>>>(out);
    printf("one_way: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    both_wait<<<1, 64>>>(out);
    printf("both_wait: %s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
