// The unique rows that a batch touches.

#include "batch.cuh"
#include "common.cuh"
#include "unique.cuh"

// Call visit(row) for each row that takes part in a pair; rows may repeat. It returns whether the
// row is new.
template <class Visit>
__device__ void each_row(const Batch& batch, Visit visit) {
    // Of a center: its targets that are words, then its path.
    constexpr int ITEMS = TARGETS + PATHS;
    const long long begin = max(0ll, batch.first - WINDOW);
    const long long end = min(batch.length, batch.first + batch.centers + WINDOW);
    each_thread(end - begin + batch.centers * ITEMS, [&](long long i) {
        if (i < end - begin) {
            if (batch.is_context(begin + i)) visit(2 * batch.words[begin + i]);
            return;
        }
        i -= end - begin;
        const long long center = i / ITEMS;
        const int item = i - center * ITEMS;
        if (!batch.has_context(center)) return;
        const Path path = batch.path(center);
        if (item < TARGETS) {
            const int row = batch.target(center, item, path);
            if (row >= 0) visit(row);
            return;
        }
        // From the word up to the root. The thread that came to a node before goes on from there;
        // but where words are targets too, a node's row may have been listed as that of a word.
        for (int t = TARGETS + path.length - 1; t >= TARGETS; t--)
            if (!visit(batch.target(center, t, path)) && TARGETS == 0) break;
    });
}

// List the unique rows that take part in a pair.
extern "C" __global__ void unique_rows(RowGrads rows, Chunk chunk, Drawn drawn, Tree tree) {
    each_row({chunk, drawn, tree}, [&](int row) { return rows.add(row); });
}

// Mark those rows. Reading first avoids most writes, which would repeat for frequent words.
extern "C" __global__ void mark(Chunk chunk, Drawn drawn, Tree tree, bool* marks) {
    each_row({chunk, drawn, tree}, [&](int row) {
        if (marks[row]) return false;
        return marks[row] = true;
    });
}
