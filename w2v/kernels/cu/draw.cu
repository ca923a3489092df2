// Windows and negatives of a batch, as in reference.py::draw. Each number has random bits of its
// own, so threads share no state.

#include "common.cuh"

// Return one of the integers [0, choices).
__device__ long long chosen(unsigned long long bits, long long choices) {
    return (bits >> 11) % choices;
}

// Draw the window size of each center, then its negatives.
//
// key: seed of this batch. count: negatives per center. lowest, widest: range of window sizes.
// pool, ..., parts: as in `Pool` of batch.py.
// cdf: cumulative probabilities of the words, in parts.
extern "C" __global__ void draw(
    unsigned long long key, long long centers, int count, int lowest, int widest, long long pool,
    unsigned long long pool_key, long long own, bool fresh, int part, int parts, const double* cdf,
    int entries, int* windows, int* negatives) {
    each_thread(centers * (1 + count), [&](long long i) {
        const unsigned long long bits = splitmix64(i, key);
        if (i < centers) {
            windows[i] = lowest + chosen(bits, widest - lowest + 1);
            return;
        }
        double uniform = (bits >> 11) * 0x1p-53;  // in [0, 1)
        if (pool) {
            // Word `place` of the pool is drawn from a stretch of the distribution, or of the part.
            const long long place = chosen(bits, pool);
            const double pooled = place + (splitmix64(place, pool_key) >> 11) * 0x1p-53;
            if (place >= own)
                uniform = (pooled - own) / (pool - own);
            else
                uniform = (part + (fresh ? uniform : pooled / own)) / parts;
        }
        // Binary search for the first entry whose cumulative probability is greater.
        int first = 0, last = entries - 1;
        while (first < last) {
            const int middle = first + (last - first) / 2;
            if (cdf[middle] > uniform)
                last = middle;
            else
                first = middle + 1;
        }
        const int length = entries / parts;
        negatives[i - centers] = first % length * parts + (parts - 1 - first / length);
    });
}
