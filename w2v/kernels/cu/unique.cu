// The unique rows of both tables that a batch touches.

#include "batch.cuh"
#include "common.cuh"
#include "unique.cuh"

// Call input(row) and output(row) for each row that takes part in a pair; rows may repeat.
template <class Input, class Output>
__device__ void each_row(const Batch& batch, Input input, Output output) {
    constexpr int ITEMS = 2 * WINDOW + TARGETS;  // of a center: its context words, then its targets
    each_thread(batch.centers * ITEMS, [&](long long i) {
        const long long center = i / ITEMS;
        const int item = i - center * ITEMS;
        const int row = item < 2 * WINDOW           ? batch.context(center, item)
                        : batch.has_context(center) ? batch.target(center, item - 2 * WINDOW)
                                                    : -1;
        if (row < 0) return;
        if (item < 2 * WINDOW)
            input(row);
        else
            output(row);
    });
}

// List the unique rows of both tables that take part in a pair.
extern "C" __global__ void unique_rows(BATCH, GRADS(in), GRADS(out)) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    each_row(batch, [&](int row) { add_unique(row, index_in, rows_in, count_in); },
             [&](int row) { add_unique(row, index_out, rows_out, count_out); });
}

// Mark those rows. Reading first avoids most writes, which would repeat for frequent words.
extern "C" __global__ void mark(BATCH, bool* input_marks, bool* output_marks) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    each_row(batch, [&](int row) { if (!input_marks[row]) input_marks[row] = true; },
             [&](int row) { if (!output_marks[row]) output_marks[row] = true; });
}
