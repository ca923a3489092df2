// A batch as the sampler leaves it: which context words and which targets its centers have.
//
// Compiled for: WINDOW positions to either side, TARGETS of a center.

struct Batch {
    const int *words, *sentences;  // of the whole text
    long long length, first, centers;
    const int *windows, *negatives;

    // The word at offset number o of a center's window, of -WINDOW..-1, 1..WINDOW; -1 where it is no context word.
    __device__ int context(long long center, int o) const {
        const int offset = o < WINDOW ? o - WINDOW : o - WINDOW + 1;
        const long long at = first + center, there = at + offset;
        if (abs(offset) > windows[center] || there < 0 || there >= length || sentences[there] != sentences[at]) return -1;
        return words[there];
    }

    // Target number t: the center itself, then its noise words; -1 for a noise word that is the center.
    __device__ int target(long long center, int t) const {
        const int word = words[first + center];
        if (t == 0) return word;
        const int noise = negatives[center * (TARGETS - 1) + t - 1];
        return noise == word ? -1 : noise;
    }

    // Windows reach 1 at least, so a center has a context word if a neighbour is in its sentence.
    __device__ bool has_context(long long center) const {
        const long long at = first + center;
        return (at > 0 && sentences[at - 1] == sentences[at]) || (at + 1 < length && sentences[at + 1] == sentences[at]);
    }
};
#define BATCH const int *words, const int *sentences, long long length, long long first, long long centers, const int *windows, \
              const int *negatives
