#pragma once

// Threads and warps of a launch, and how they share out work.

constexpr unsigned ALL = 0xffffffffu;  // lanes of a warp

__device__ int lane_id() { return threadIdx.x % 32; }
__device__ long long thread_id() { return (long long)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ long long threads() { return (long long)gridDim.x * blockDim.x; }
__device__ long long warp_id() { return thread_id() / 32; }
__device__ long long warps() { return threads() / 32; }

// Call visit(n) for each n in [0, count), by one thread each.
template <class Visit>
__device__ void each_thread(long long count, Visit visit) {
    const long long step = threads();
    for (long long n = thread_id(); n < count; n += step) visit(n);
}

// Call visit(n) for each n in [0, count), by all lanes of one warp each.
template <class Visit>
__device__ void each_warp(long long count, Visit visit) {
    const long long step = warps();
    for (long long n = warp_id(); n < count; n += step) visit(n);
}

// Return the sum of a number of each lane, on GPUs without __reduce_add_sync too.
__device__ int warp_sum(int number) {
    for (int distance = 16; distance; distance /= 2)
        number += __shfl_xor_sync(ALL, number, distance);
    return number;
}

// N adjacent floats, read and written together.
template <int N>
struct alignas(4 * N) Floats {
    float at[N];
};

// Random bits by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as in w2v/system/random.py.
__device__ unsigned long long splitmix64(
    unsigned long long counter, unsigned long long mixed_seed) {
    unsigned long long bits = counter * 0x9E3779B97F4A7C15ull + mixed_seed;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
}
