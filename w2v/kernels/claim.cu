// Which rows a batch touches, found without sorting: each row that is named for the first time gets the next number.

#include "batch.cuh"

// The number of a row is number[row], -1 before it has one; rows[number[row]] is the row.
__device__ void claim_row(int row, int* number, int* rows, int* count) {
    if (row < 0 || number[row] != -1 || atomicCAS(number + row, -1, -2) != -1) return;
    const int next = atomicAdd(count, 1);
    rows[next] = row;
    number[row] = next;
}

// Claims the rows of both tables that take part in a pair. counts: of input rows and of output rows so far.
extern "C" __global__ void claim(BATCH, int* number_in, int* rows_in, int* number_out, int* rows_out, int* counts) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    constexpr int ITEMS = 2 * WINDOW + TARGETS;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < centers * ITEMS; i += step) {
        const long long center = i / ITEMS;
        const int item = i - center * ITEMS;
        if (item < 2 * WINDOW)
            claim_row(batch.context(center, item), number_in, rows_in, counts);
        else if (batch.has_context(center))
            claim_row(batch.target(center, item - 2 * WINDOW), number_out, rows_out, counts + 1);
    }
}
