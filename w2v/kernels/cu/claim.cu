// Which rows a batch touches, found without sorting: each row that is named for the first time gets the next number.

#include "batch.cuh"
#include "claim.cuh"

// Calls input(row) and output(row) for each row of the two tables that takes part in a pair, some of them many times.
template <class Input, class Output>
__device__ void each_row(const Batch& batch, Input input, Output output) {
    constexpr int ITEMS = 2 * WINDOW + TARGETS;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < batch.centers * ITEMS; i += step) {
        const long long center = i / ITEMS;
        const int item = i - center * ITEMS;
        const int row = item < 2 * WINDOW ? batch.context(center, item) : batch.has_context(center) ? batch.target(center, item - 2 * WINDOW) : -1;
        if (row < 0) continue;
        if (item < 2 * WINDOW)
            input(row);
        else
            output(row);
    }
}

// Claims the rows of both tables that take part in a pair. count_*: of rows so far.
extern "C" __global__ void claim(
    BATCH, int* number_in, int* rows_in, unsigned long long* count_in, int* number_out, int* rows_out, unsigned long long* count_out) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    each_row(batch, [&](int row) { claim_row(row, number_in, rows_in, count_in); },
             [&](int row) { claim_row(row, number_out, rows_out, count_out); });
}

// Sets the marks of those rows; looking first spares the many writes to those of frequent words.
extern "C" __global__ void mark(BATCH, bool* input_marks, bool* output_marks) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    each_row(batch, [&](int row) { if (!input_marks[row]) input_marks[row] = true; },
             [&](int row) { if (!output_marks[row]) output_marks[row] = true; });
}
