// Rows of subwords: list those of a batch's words, compose vectors of words, and add the gradients
// of words to their rows. See subwords.py.
//
// Macros: ELEMENT of the records, see element.cuh.

#ifndef ELEMENT
#define ELEMENT 0  // most kernels read no records
#endif

#include "element.cuh"
#include "unique.cuh"

struct Subwords {
    const long long* begin;  // where the rows of each word begin, and their number
    const int* rows;
    long long words;

    // Call visit(row, word) for the rows of the word whose input vector a row is, by one lane each.
    template <class Visit>
    __device__ void each_row(int row, Visit visit) const {
        if (row % 2 || row >= 2 * words) return;
        const int word = row / 2;
        for (long long i = begin[word] + lane_id(); i < begin[word + 1]; i += 32)
            visit(rows[i]);
    }
};

// Add the rows of words to the unique rows, of which the first `listed` are those of words.
extern "C" __global__ void add_rows(
    RowGrads rows, const unsigned long long* listed, Subwords subwords) {
    each_warp(*listed, [&](long long u) {
        subwords.each_row(rows.rows_U[u], [&](int row) { rows.add(row); });
    });
}

// Mark the rows of marked words.
extern "C" __global__ void mark_rows(bool* marks, Subwords subwords) {
    each_warp(subwords.words, [&](long long word) {
        if (marks[2 * word])
            subwords.each_row(2 * word, [&](int row) { marks[row] = true; });
    });
}

// Write the mean of each word's rows to its input row.
extern "C" __global__ void compose(
    View view, RowGrads rows, int row_width, Subwords subwords, int dim) {
    const auto record = [&](int row) {
        const long long slot = view.slot_of_A ? view.slot_of_A[row] : row;
        return view.records_SR + slot * row_width;
    };
    each_warp(*rows.row_count, [&](long long u) {
        const int row = rows.rows_U[u];
        if (row % 2 || row >= 2 * subwords.words) return;
        const long long begin = subwords.begin[row / 2], end = subwords.begin[row / 2 + 1];
        for (int d = lane_id(); d < dim; d += 32) {
            float sum = 0;
#pragma unroll 4
            for (long long i = begin; i < end; i++) sum += to_float(record(subwords.rows[i])[d]);
            // Half of a unit of the 16 bits that are cut off, so that bfloat16 is rounded.
            record(row)[d] = to_element(sum / (end - begin), 0x8000);
        }
    });
}

// Add the gradient of each word, and how many pairs it sums, to each of its rows; its own become
// zero.
extern "C" __global__ void spread(RowGrads rows, Subwords subwords, int dim) {
    each_warp(*rows.row_count, [&](long long u) {
        const int row = rows.rows_U[u];
        if (row % 2 || row >= 2 * subwords.words) return;
        const long long begin = subwords.begin[row / 2], end = subwords.begin[row / 2 + 1];
        for (int d = lane_id(); d < dim; d += 32) {
            float* own = rows.grad_UD + u * dim + d;
            const float grad = *own;
            *own = 0;
#pragma unroll 4
            for (long long i = begin; i < end; i++)
                atomicAdd(rows.grad_UD + (long long)rows.index_A[subwords.rows[i]] * dim + d, grad);
        }
        if (!rows.pairs_U) return;
        const int pairs = rows.pairs_U[u];
        __syncwarp();
        if (lane_id() == 0) rows.pairs_U[u] = 0;
        subwords.each_row(row, [&](int of) { atomicAdd(rows.pairs_U + rows.index_A[of], pairs); });
    });
}
