// Words of a text that are kept, as in cpu_loops.py, and windows and negatives of batches, as in
// reference.py. Each number has random bits of its own, so threads share no state.

#include "common.cuh"

// Return a number of [0, 1) from random bits.
__device__ double unit(unsigned long long bits) { return (bits >> 11) * 0x1p-53; }

// Return one of the integers [0, choices).
__device__ long long chosen(unsigned long long bits, long long choices) {
    return (bits >> 11) % choices;
}

struct Text {
    const int* words;
    long long length;
    const long long* edges;  // where each sentence begins
    int sentences;

    // Return the sentence of word i.
    __device__ int sentence_of(long long i) const {
        return find_first(sentences, [&](int s) { return edges[s + 1] <= i; });
    }
};

// Draw which words of a text are kept: a bit for each.
//
// key: 64 random bits of the text. keep: probability that an occurrence of a word is kept. trained:
// whether any word of a sentence is kept; null if of all. counts: prefix sums over the stretches,
// with the number of words kept behind them. done: 0 before and after.
extern "C" __global__ void choose_kept(
    unsigned long long key, Text text, const float* keep, OPTIONAL const bool* trained,
    unsigned* kept, int* counts, int stretches, unsigned* done) {
    if (warp_id() < stretches) {
        const long long first = 32 * warp_id();
        unsigned bits = 0;
#pragma unroll 8
        for (int w = 0; w < 32; w++) {
            const long long i = 32 * (first + w) + lane_id();
            bool is_kept = i < text.length && unit(splitmix64(i, key)) < keep[text.words[i]];
            if (is_kept && trained) is_kept = trained[text.sentence_of(i)];
            const unsigned ballot = __ballot_sync(ALL, is_kept);
            if (w == lane_id()) bits = ballot;
        }
        kept[first + lane_id()] = bits;
        const int of_stretch = warp_sum(__popc(bits));
        if (lane_id() == 0) counts[warp_id()] = of_stretch;
    }
    if (!is_last_block(done)) return;
    exclusive_sums(counts, stretches);
    if (threadIdx.x == 0) *done = 0;
}

// List the kept words and their sentences, in the order of `reference.interleave`. block_words: 0
// if batches are consecutive text.
extern "C" __global__ void list_kept(
    Text text, const unsigned* kept, const int* counts, int stretches, int block_words, int batches,
    int* kept_words, int* kept_sentences) {
    if (warp_id() >= stretches) return;
    const long long word = 32 * warp_id() + lane_id();
    const int blocks = block_words ? counts[stretches] / block_words : 0;
    each_bit(kept[word], word, counts[warp_id()], [&](int n, long long i) {
        int sentence = text.sentence_of(i);
        if (block_words) {
            const int block = n / block_words, batch = block % batches;
            if (block < blocks) {  // of a batch's blocks, those of the batches before come first
                const int before = batch * (blocks / batches) + min(batch, blocks % batches);
                n += (before + block / batches - block) * block_words;
            }
            sentence = 2 * sentence + n / block_words % 2;
        }
        kept_words[n] = text.words[i];
        kept_sentences[n] = sentence;
    });
}

struct Pool {  // of batch.py
    long long size, own;
    bool fresh;
    int part, parts;
};

// Draw the window size of each center of some batches, and its negatives.
//
// edges: where the centers of each batch begin, and their number. keys: seed of each batch, and
// then of its pool. count: negatives per center. lowest, widest: range of window sizes. cdf:
// cumulative probabilities of the words, in parts.
extern "C" __global__ void draw(
    const long long* edges, const unsigned long long* keys, int batches, int count, int lowest,
    int widest, Pool pool, const double* cdf, int entries, int* windows, int* negatives) {
    const long long centers = edges[batches];
    each_thread(centers * (1 + count), [&](long long i) {
        const int center = i < centers ? i : (unsigned)(i - centers) / count;
        const int batch = find_first(batches, [&](int b) { return edges[b + 1] <= center; });
        const long long begin = edges[batch], size = edges[batch + 1] - begin;
        // Numbers of a batch are counted through its windows, then its negatives.
        const long long number =
            i < centers ? i - begin : size + (i - centers) - begin * count;
        const unsigned long long bits = splitmix64(number, keys[batch]);
        if (i < centers) {
            windows[i] = lowest + chosen(bits, widest - lowest + 1);
            return;
        }
        double uniform = unit(bits);
        if (pool.size) {
            // Word `place` of the pool is drawn from a stretch of the distribution, or of the part.
            const long long place = chosen(bits, pool.size);
            const double pooled = place + unit(splitmix64(place, keys[batches + batch]));
            if (place >= pool.own)
                uniform = (pooled - pool.own) / (pool.size - pool.own);
            else
                uniform = (pool.part + (pool.fresh ? uniform : pooled / pool.own)) / pool.parts;
        }
        // The first entry whose cumulative probability is greater.
        const int entry = find_first(entries, [&](int e) { return cdf[e] <= uniform; });
        const int parts = pool.parts, length = entries / parts;
        negatives[i - centers] = entry % length * parts + (parts - 1 - entry / length);
    });
}
