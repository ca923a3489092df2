// A batch of centers, and the rows of the context words and targets of each: row 2 w is the input
// vector of word w, row 2 w + 1 the output vector of word or node w.
//
// Macros: WINDOW, the largest number of context words on either side; TARGETS that are words: the
// center and its negatives, or 0; PATHS, 1 if the nodes of the center's path in a Huffman tree are
// targets too, after those.

#include "common.cuh"

struct Path {
    long long begin;  // among all nodes
    int length;
};

struct Chunk {  // of text, as subsampling has kept it
    const int *words, *sentences;  // word and sentence id at each position of the text
    long long length;
};

struct Drawn {  // the centers words[first : first + centers], and what was drawn for them
    long long first, centers;
    const int *windows, *negatives;
};

struct Tree {  // of word2vec/batch.py; null without a tree
    OPTIONAL const long long* begin_V;
    OPTIONAL const int* nodes_P;
    OPTIONAL const unsigned char* codes_P;
    long long depth;
};

struct Batch : Chunk, Drawn, Tree {
    // Return the row at window position o (offset -WINDOW..-1, 1..WINDOW); -1 if there is none.
    __device__ int context(long long center, int o) const {
        const int offset = o < WINDOW ? o - WINDOW : o - WINDOW + 1;
        const long long at = first + center, there = at + offset;
        if (abs(offset) > windows[center] || there < 0 || there >= length ||
            sentences[there] != sentences[at])
            return -1;
        return 2 * words[there];
    }

    // Return whether the word at a position is a context word of any center. Inside the batch, and
    // next to it, a neighbour in the same sentence is such a center.
    __device__ bool is_context(long long at) const {
        for (int side = -1; side <= 1; side += 2)
            for (int distance = 1; distance <= WINDOW; distance++) {
                const long long there = at + side * distance, center = there - first;
                // Centers further on this side are none, or in another sentence.
                if (side < 0 ? center < 0 : center >= centers) break;
                if (sentences[there] != sentences[at]) break;
                if (center >= 0 && center < centers && windows[center] >= distance) return true;
            }
        return false;
    }

    // Return the path of a center; an empty one without a tree.
    __device__ Path path(long long center) const {
        if (!PATHS) return {0, 0};
        const int word = words[first + center];
        const long long begin = begin_V[word];
        return {begin, (int)(begin_V[word + 1] - begin)};
    }

    // Return the row of target t: the center, its negatives, then the nodes of its path; -1 for a
    // negative that equals the center.
    __device__ int target(long long center, int t, Path path) const {
        if (PATHS && t >= TARGETS) return 2 * nodes_P[path.begin + t - TARGETS] + 1;
        const int word = words[first + center];
        if (t == 0) return 2 * word + 1;
        const int negative = negatives[center * (TARGETS - 1) + t - 1];
        return negative == word ? -1 : 2 * negative + 1;
    }

    // Return the label of target t: 1 for the center and where a path takes branch 0. Any t.
    __device__ bool label(int t, Path path) const {
        if (!PATHS || t < TARGETS) return t == 0;
        return t < TARGETS + path.length && !codes_P[path.begin + t - TARGETS];
    }

    // Return the row of a target that always counts.
    __device__ int sure_target(long long center, Path path) const {
        return TARGETS ? 2 * words[first + center] + 1 : target(center, 0, path);
    }

    // Every window has size 1 or more, so one neighbour in the same sentence is enough.
    __device__ bool has_context(long long center) const {
        const long long at = first + center;
        return (at > 0 && sentences[at - 1] == sentences[at]) ||
               (at + 1 < length && sentences[at + 1] == sentences[at]);
    }
};
