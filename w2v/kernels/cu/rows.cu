// Copy records between tables in pinned CPU memory and slots in GPU memory.
//
// A record is a multiple of 16 bytes. Rows are sorted and unique: neighbouring copies share pages
// of the address translation, and no two writes meet.

#ifndef ELEMENT
#define ELEMENT 0  // most kernels copy bytes
#endif

#include "element.cuh"

constexpr int UNROLL = 4;  // 16-byte loads in flight per thread

// The vectors of a record that one thread copies in a pass. A null pointer is skipped.
struct Part {
    float4 value[UNROLL];

    __device__ void load(const float4* from, int first, int width) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (from && first + 32 * u < width) value[u] = from[first + 32 * u];
    }

    __device__ void store(float4* to, int first, int width) const {
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (to && first + 32 * u < width) to[first + 32 * u] = value[u];
    }
};

// Copy the record `evicted` to `back`, then `from` to `to`, by one warp; `to` may be `evicted`.
// Both are read before either is written. width: 16-byte vectors of a record.
__device__ void copy_records(
    const float4* from, float4* to, const float4* evicted, float4* back, int width) {
    for (int first = lane_id(); first < width; first += 32 * UNROLL) {
        Part part, other;
        part.load(from, first, width);
        other.load(evicted, first, width);
        other.store(back, first, width);
        part.store(to, first, width);
    }
}

// Parameters of a copy between table row rows[n] and record slots[n], or record n if slots is null.
// Records have `width` vectors; the rows of a table are `stride` vectors apart.
#define ROWS                                                                                  \
    float4 *table, long long stride, const long long *rows, float4 *records,                  \
        const long long *slots, long long count, int width

// Negative rows are skipped.
extern "C" __global__ void gather_records(ROWS) {
    each_warp(count, [&](long long n) {
        if (rows[n] < 0) return;
        const float4* from = table + rows[n] * stride;
        copy_records(from, records + (slots ? slots[n] : n) * width, nullptr, nullptr, width);
    });
}

// Negative rows are skipped.
extern "C" __global__ void scatter_records(ROWS) {
    each_warp(count, [&](long long n) {
        if (rows[n] < 0) return;
        const float4* from = records + (slots ? slots[n] : n) * width;
        copy_records(from, table + rows[n] * stride, nullptr, nullptr, width);
    });
}

// Return the record of a row, counted through all tables of `rows` rows each.
__device__ float4* record_of(
    float4* const* tables, long long rows, long long stride, long long row) {
    return tables[row / rows] + row % rows * stride;
}

// Load row loaded[n] into slots[n] for each n < numbers[0]. From n = into_empty = numbers[1] on,
// first write the row evicted[n - into_empty] back from that slot. One kernel does both, so that
// reads and writes keep pace, which gets more of the link than one kernel for each.
// slot_of: the slot of each row, `none` if it is not cached; may be null.
extern "C" __global__ void exchange(
    float4* const* tables, long long rows, long long stride, float4* records, int width,
    const int* loaded, const int* evicted, const int* slots, const long long* numbers,
    int* slot_of, int none) {
    const long long into_empty = numbers[1];
    each_warp(numbers[0], [&](long long n) {
        float4* slot = records + (long long)slots[n] * width;
        float4* back =
            n < into_empty ? nullptr : record_of(tables, rows, stride, evicted[n - into_empty]);
        float4* from = record_of(tables, rows, stride, loaded[n]);
        copy_records(from, slot, back ? slot : nullptr, back, width);
        if (slot_of && lane_id() == 0) {
            if (back) slot_of[evicted[n - into_empty]] = none;
            slot_of[loaded[n]] = slots[n];
        }
    });
}

// Add gradient i to row places[i] of the sums, in no fixed order.
extern "C" __global__ void add_gradients(
    const float* grads, const long long* places, long long count, int dim, float* sums) {
    each_warp(count, [&](long long i) {
        for (int d = lane_id(); d < dim; d += 32)
            atomicAdd(sums + places[i] * dim + d, grads[i * dim + d]);
    });
}

// Gather the weights of rows[places[n]], or rows[n] if places is null, as floats. records, slot:
// see VIEW.
extern "C" __global__ void gather_weights(
    VIEW(from), long long row_width, const int* rows, const long long* places, long long count,
    int dim, float* weights) {
    each_warp(count, [&](long long n) {
        const int row = rows[places ? places[n] : n];
        const long long slot = slot_from ? slot_from[row] : row;
        for (int d = lane_id(); d < dim; d += 32)
            weights[n * dim + d] = to_float(records_from[slot * row_width + d]);
    });
}
