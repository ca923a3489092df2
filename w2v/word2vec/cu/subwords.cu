// Rows of subwords: list those of a batch's words, compose vectors of words, and add the gradients
// of words to their rows. See subwords.py.
//
// Macros: DIM and ELEMENT, see row.cuh.

#include "row.cuh"
#include "unique.cuh"

struct Subwords {
    const long long* begin;  // where the rows of each word begin, and their number
    const int* rows;
    long long words;

    // Return whether a row is the input vector of a word.
    __device__ bool has_word(int row) const { return row % 2 == 0 && row < 2 * words; }

    __device__ long long count(int word) const { return begin[word + 1] - begin[word]; }

    // Call visit(row) for the rows of the word whose input vector a row is, by one lane each.
    template <class Visit>
    __device__ void each_row(int row, Visit visit) const {
        if (!has_word(row)) return;
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

// Call visit(place) for the rows of a word, by all lanes; place_of(row) is looked up by one lane.
template <class Place, class Visit>
__device__ void each_place(
    const Subwords& subwords, int word, Place place_of, Visit visit) {
    const long long begin = subwords.begin[word], end = subwords.begin[word + 1];
    for (long long first = begin; first < end; first += 32) {
        const long long mine = first + lane_id();
        const long long place = mine < end ? place_of(subwords.rows[mine]) : 0;
        const int count = min(32ll, end - first);
#pragma unroll 4
        for (int i = 0; i < count; i++) visit(__shfl_sync(ALL, place, i));
    }
}

// Write the mean of each word's rows to its input row.
extern "C" __global__ void compose(
    View view, RowGrads rows, int row_width, Subwords subwords) {
    const auto slot_of = [&](int row) { return view.slot(row); };
    each_warp(*rows.row_count, [&](long long u) {
        const int row = rows.rows_U[u], lane = lane_id();
        if (!subwords.has_word(row)) return;
        Row mean = {};
        each_place(subwords, row / 2, slot_of, [&](long long slot) {
            Row part;
            part.load(view.records_SR + slot * row_width, lane);
            mean.add_scaled(part, 1);
        });
        mean.scale(1.0f / subwords.count(row / 2));
        // Half of a unit of the 16 bits that are cut off, so that bfloat16 is rounded.
        mean.store(view.record(row, row_width), lane, 0x8000800080008000);
    });
}

// Add the gradient of each word, and how many pairs it sums, to each of its rows; its own become
// zero.
extern "C" __global__ void spread(RowGrads rows, Subwords subwords) {
    const auto index_of = [&](int row) { return (long long)rows.index_A[row]; };
    each_warp(*rows.row_count, [&](long long u) {
        const int row = rows.rows_U[u], lane = lane_id();
        if (!subwords.has_word(row)) return;
        FloatRow* own = (FloatRow*)rows.grad_UD + u;
        Row grad = {};
        grad.add(*own, lane);
        Row{}.store(*own, lane);
        each_place(subwords, row / 2, index_of, [&](long long index) {
            grad.add_to(rows.grad_UD + index * DIM, lane);
        });
        if (!rows.pairs_U) return;
        const int pairs = rows.pairs_U[u];
        __syncwarp();
        if (lane == 0) rows.pairs_U[u] = 0;
        subwords.each_row(row, [&](int of) { atomicAdd(rows.pairs_U + rows.index_A[of], pairs); });
    });
}
