// Windows and negatives of a batch, as in reference.py::draw. Each number has random bits of its
// own, so threads share no state. And the answers of analogies, as each run loads this file.

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

// Find the row with the greatest cosine to each target, without rows of three groups, and the
// greatest cosine of the others. Words are split: block b compares TILE targets with every
// splits-th TILE of words, and writes its best to [b % splits].
//
// targets: of length 1. scale: 1 by the length of each vector; its rows are `stride` floats apart.
constexpr int TILE = 128, DEPTH = 8, SIDE = 8;  // a thread computes SIDE x SIDE cosines
extern "C" __global__ void nearest(
    const float* targets, const int* excluded, long long questions, const float* vectors,
    long long stride, const float* scale, const int* groups, long long words, int dim, int splits,
    float* best_out, int* row_out, float* second_out) {
    __shared__ float left[DEPTH][TILE + 4], right[DEPTH][TILE + 4];  // 4 against bank conflicts
    const long long first = blockIdx.x / splits * (long long)TILE;
    const int split = blockIdx.x % splits, x = threadIdx.x % 16, y = threadIdx.x / 16;
    float best[SIDE], second[SIDE];
    int row[SIDE] = {};
    for (int i = 0; i < SIDE; i++) best[i] = second[i] = -2;  // below all cosines
    for (long long begin = split * TILE; begin < words; begin += splits * TILE) {
        float dots[SIDE][SIDE] = {};
        for (int d = 0; d < dim; d += DEPTH) {
            for (int i = threadIdx.x; i < TILE * DEPTH; i += blockDim.x) {
                const int n = i / DEPTH, k = i % DEPTH;
                const bool in = d + k < dim;
                left[k][n] = in && first + n < questions ? targets[(first + n) * dim + d + k] : 0;
                right[k][n] = in && begin + n < words ? vectors[(begin + n) * stride + d + k] : 0;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEPTH; k++)
#pragma unroll
                for (int i = 0; i < SIDE; i++)
#pragma unroll
                    for (int j = 0; j < SIDE; j++)
                        dots[i][j] += left[k][y * SIDE + i] * right[k][x + 16 * j];
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < SIDE; j++) {
            const long long word = begin + x + 16 * j;
            if (word >= words) continue;
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
                const float cosine = dots[i][j] * scale[word];
                if (!(cosine > second[i])) continue;  // nor where it is NaN, of a zero vector
                const int* not_of = excluded + 3 * min(first + y * SIDE + i, questions - 1);
                const int group = groups[word];
                if (group == not_of[0] || group == not_of[1] || group == not_of[2]) continue;
                if (cosine > best[i]) row[i] = word;
                second[i] = fminf(cosine, best[i]);
                best[i] = fmaxf(cosine, best[i]);
            }
        }
    }
    // The 16 threads of the same targets are neighbours in a warp.
    for (int i = 0; i < SIDE; i++) {
        for (int lane = 8; lane; lane /= 2) {
            const float other = __shfl_xor_sync(ALL, best[i], lane);
            const int other_row = __shfl_xor_sync(ALL, row[i], lane);
            second[i] = fmaxf(second[i], __shfl_xor_sync(ALL, second[i], lane));
            second[i] = fmaxf(second[i], fminf(best[i], other));
            if (other > best[i]) row[i] = other_row;
            best[i] = fmaxf(best[i], other);
        }
        const long long question = first + y * SIDE + i;
        if (x || question >= questions) continue;
        best_out[split * questions + question] = best[i];
        row_out[split * questions + question] = row[i];
        second_out[split * questions + question] = second[i];
    }
}
