// Moves records between rows of tables in pinned CPU memory and slots in GPU memory. A record is a multiple of 16 bytes; rows are sorted
// and unique, so that what is in flight falls on few pages of the address translation and no two writes meet.

constexpr int UNROLL = 4;  // 16-byte loads that each thread has in flight

// The vectors of a record that a thread of a warp copies at a time.
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

// One warp copies a record, of `width` 16-byte vectors, and perhaps another, which may lie where the first goes; null leaves it out.
__device__ void copy_records(const float4* from, float4* to, const float4* other_from, float4* other_to, int width) {
    for (int first = threadIdx.x % 32; first < width; first += 32 * UNROLL) {
        Part part, other;
        part.load(from, first, width);
        other.load(other_from, first, width);
        other.store(other_to, first, width);
        part.store(to, first, width);
    }
}

// Each warp takes every so-manyth record; visit(n) copies number n.
template <class Visit>
__device__ void each_record(long long begin, long long end, Visit visit) {
    const long long warps = (long long)gridDim.x * blockDim.x / 32;
    for (long long n = begin + ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < end; n += warps) visit(n);
}

// The record of rows[n] to or from slots[n], or slot n where `slots` is null. Records are of `width` vectors, and rows of a table `stride`
// apart, since another table's may lie between.
#define ROWS float4 *table, long long stride, const long long *rows, float4 *records, const long long *slots, long long count, int width

extern "C" __global__ void gather_records(ROWS) {
    each_record(0, count, [&](long long n) { copy_records(table + rows[n] * stride, records + (slots ? slots[n] : n) * width, nullptr, nullptr, width); });
}

extern "C" __global__ void scatter_records(ROWS) {
    each_record(0, count, [&](long long n) { copy_records(records + (slots ? slots[n] : n) * width, table + rows[n] * stride, nullptr, nullptr, width); });
}

// Row number `row` of tables of `rows` each, counted through all of them.
__device__ float4* record_of(float4* const* tables, long long rows, long long stride, long long row) {
    return tables[row / rows] + row % rows * stride;
}

// Row coming[n] goes to slots[n], for n up to numbers[0]; from n = numbers[1] on, after the row leaving[n - numbers[1]] that is there has
// gone to its table. A warp has both records in hand, and so reads and writes keep pace, which gets more of the link than a kernel each.
// slot_of, unless null: the slot of each row, which is `none` for one that is gone.
extern "C" __global__ void exchange(
    float4* const* tables, long long rows, long long stride, float4* records, int width, const int* coming, const int* leaving,
    const int* slots, const long long* numbers, int* slot_of, int none) {
    const long long at_once = numbers[1];
    each_record(0, numbers[0], [&](long long n) {
        float4* slot = records + (long long)slots[n] * width;
        float4* old = n < at_once ? nullptr : record_of(tables, rows, stride, leaving[n - at_once]);
        copy_records(record_of(tables, rows, stride, coming[n]), slot, old ? slot : nullptr, old, width);
        if (slot_of && threadIdx.x % 32 == 0) {
            if (old) slot_of[leaving[n - at_once]] = none;
            slot_of[coming[n]] = slots[n];
        }
    });
}
