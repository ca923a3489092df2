// A batch of centers, and the context words and targets of each.
//
// Macros: WINDOW, the largest number of context words on either side; TARGETS of a center, itself
// and its negatives.

struct Batch {
    const int *words, *sentences;  // word and sentence id at each position of the text
    long long length, first, centers;
    const int *windows, *negatives;

    // Return the word at window position o (offset -WINDOW..-1, 1..WINDOW); -1 if there is none.
    __device__ int context(long long center, int o) const {
        const int offset = o < WINDOW ? o - WINDOW : o - WINDOW + 1;
        const long long at = first + center, there = at + offset;
        if (abs(offset) > windows[center] || there < 0 || there >= length ||
            sentences[there] != sentences[at])
            return -1;
        return words[there];
    }

    // Return target t: the center, then its negatives; -1 for a negative that equals the center.
    __device__ int target(long long center, int t) const {
        const int word = words[first + center];
        if (t == 0) return word;
        const int negative = negatives[center * (TARGETS - 1) + t - 1];
        return negative == word ? -1 : negative;
    }

    // Every window has size 1 or more, so one neighbour in the same sentence is enough.
    __device__ bool has_context(long long center) const {
        const long long at = first + center;
        return (at > 0 && sentences[at - 1] == sentences[at]) ||
               (at + 1 < length && sentences[at + 1] == sentences[at]);
    }
};

// Kernel parameters that make up a batch.
#define BATCH                                                                                  \
    const int *words, const int *sentences, long long length, long long first,                 \
        long long centers, const int *windows, const int *negatives
