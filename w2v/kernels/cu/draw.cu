// The windows and noise words of a batch: see reference.py::draw. Each number comes from bits of its own, so threads need not agree.

#include "bits.cuh"

// Of `choices` numbers from 0, one.
__device__ long long chosen(unsigned long long bits, long long choices) { return (bits >> 11) % choices; }

// cdf: cumulative probabilities of so many words. pool: of how many noise words, drawn by its key, those of the batch are picked; 0 for each
// its own.
extern "C" __global__ void draw(
    unsigned long long key, long long centers, int noise, int lowest, int widest, long long pool, unsigned long long pool_key,
    const double* cdf, int words, int* windows, int* negatives) {
    const long long all = centers * (1 + noise), step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += step) {
        const unsigned long long bits = splitmix64(i, key);
        if (i < centers) {
            windows[i] = lowest + chosen(bits, widest - lowest + 1);
            continue;
        }
        double uniform = (bits >> 11) * 0x1p-53;
        if (pool) {
            const long long place = chosen(bits, pool);
            uniform = (place + (splitmix64(place, pool_key) >> 11) * 0x1p-53) / pool;
        }
        int first = 0, last = words - 1;  // the first word whose cumulative probability is above it
        while (first < last) {
            const int middle = first + (last - first) / 2;
            if (cdf[middle] > uniform)
                last = middle;
            else
                first = middle + 1;
        }
        negatives[i - centers] = first;
    }
}
