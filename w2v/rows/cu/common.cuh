#pragma once

// Threads and warps of a launch, and how they share out work.

// Marks of pointers among a kernel's parameters, for launch.py: the pointer may be null; parameters
// give the strides of its tensor; its memory may be pinned CPU memory.
#define OPTIONAL
#define STRIDED
#define HOST

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

// Return the first n in [0, count) for which `is_past` is false, or the last one.
template <class Test>
__device__ int find_first(int count, Test is_past) {
    int first = 0;
    for (int last = count - 1; first < last;) {
        const int middle = first + (last - first) / 2;
        if (is_past(middle)) first = middle + 1;
        else last = middle;
    }
    return first;
}

// Return the sum of a number of each lane, on GPUs without __reduce_add_sync too.
template <class Number>
__device__ Number warp_sum(Number number) {
    for (int distance = 16; distance; distance /= 2)
        number += __shfl_xor_sync(ALL, number, distance);
    return number;
}

// N adjacent floats, read and written together.
template <int N>
struct alignas(4 * N) Floats {
    float at[N];
};

// Add to floats in memory, atomically, as other warps may add to them too.
template <int N>
__device__ void atomic_add(Floats<N>* sums, const Floats<N>& added) {
#if __CUDA_ARCH__ >= 900
    if constexpr (N == 4)
        atomicAdd((float4*)sums, make_float4(added.at[0], added.at[1], added.at[2], added.at[3]));
    else
#endif
        for (int n = 0; n < N; n++) atomicAdd(sums->at + n, added.at[n]);
}

// Random bits by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as in w2v/system/random.py.
__device__ unsigned long long splitmix64(
    unsigned long long counter, unsigned long long mixed_seed) {
    unsigned long long bits = counter * 0x9E3779B97F4A7C15ull + mixed_seed;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9ull;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBull;
    return bits ^ (bits >> 31);
}

// Lists of the bits that are set, in order: a warp handles a stretch of 32 words of 32 bits, one
// word per lane, and the last block to finish sums the counts of all stretches.

// Return the inclusive prefix sum of the lanes' numbers.
__device__ int prefix_sum(int number) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, number, distance);
        if (lane_id() >= distance) number += other;
    }
    return number;
}

// Return the sum of the numbers of the block's warps before this one, and that of all in `total`.
// All threads of the block call this; the lanes of a warp give the same number.
__device__ int sum_before(int number, int* total) {
    __shared__ int numbers[32];
    if (lane_id() == 0) numbers[threadIdx.x / 32] = number;
    __syncthreads();
    int before = 0;
    *total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) {
        if (warp == threadIdx.x / 32) before = *total;
        *total += numbers[warp];
    }
    return before;
}

// Replace n counts by their exclusive prefix sums, with the total at counts[n], and return the
// total. One block calls this; other blocks wrote the counts, so they are read past the L1 cache.
__device__ int exclusive_sums(int* counts, int n) {
    __shared__ int sums[32];  // of each warp
    const int each = (n + blockDim.x - 1) / blockDim.x;  // counts per thread
    const int begin = min(n, (int)threadIdx.x * each), end = min(n, begin + each);
    constexpr int LOADS = 8;  // under way at once: one after the other they took most of the time
    int mine = 0;
#pragma unroll LOADS
    for (int i = begin; i < end; i++) mine += __ldcg(counts + i);
    const int sum = prefix_sum(mine);
    if (lane_id() == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    int total = 0, before = sum - mine;
    for (int w = 0; w < blockDim.x / 32; w++) {
        if (w < threadIdx.x / 32) before += sums[w];
        total += sums[w];
    }
    __syncthreads();
    for (int first = begin; first < end; first += LOADS) {
        int loaded[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; l++)
            loaded[l] = first + l < end ? __ldcg(counts + first + l) : 0;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            if (first + l < end) counts[first + l] = before;
            before += loaded[l];
        }
    }
    if (threadIdx.x == 0) counts[n] = total;
    return total;
}

// Return whether this block is the last to finish, so that all counts are written. done: number of
// blocks that have finished, 0 before.
__device__ bool is_last_block(unsigned* done) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

// Return the bits below a bit.
__device__ unsigned below(int bit) { return (1u << bit) - 1; }

// Call visit(n, position) for each bit of the lane's word; n counts the warp's bits from `before`.
template <class Visit>
__device__ void each_bit(unsigned bits, long long word, int before, Visit visit) {
    int n = before + prefix_sum(__popc(bits)) - __popc(bits);
    for (; bits; bits &= bits - 1) visit(n++, 32 * word + __ffs(bits) - 1);
}
