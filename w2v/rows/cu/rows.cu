// Copy records between tables in pinned CPU memory and slots in GPU memory; gather vectors of ids
// or bags from records on the GPU, and add their gradients.
//
// A record is a multiple of 16 bytes. Rows that are copied are sorted and unique: neighbouring
// copies share pages of the address translation, and no two writes meet.
//
// Macros: WIDE, numbers of a row that are read together, 1 or 4; LANES, threads of a row, a power
// of 2 up to 32; ELEMENT of the records.

#ifndef ELEMENT
#define ELEMENT 0  // most kernels copy bytes
#endif
#ifndef WIDE
#define WIDE 1
#define LANES 32
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

// Copy table row rows[n] to record slots[n], or record n if slots is null; or back, `to_table`.
// Negative rows are skipped. Records have `width` vectors; table rows are `stride` vectors apart.
extern "C" __global__ void move_records(
    HOST STRIDED float4* table, long long stride, const long long* rows, float4* records,
    OPTIONAL const long long* slots, long long count, int width, bool to_table) {
    each_warp(count, [&](long long n) {
        if (rows[n] < 0) return;
        float4* row = table + rows[n] * stride;
        float4* record = records + (slots ? slots[n] : n) * width;
        copy_records(
            to_table ? record : row, to_table ? row : record, nullptr, nullptr, width);
    });
}

struct Moves {  // of moves.py, see `list` of cache.cu
    const int *loaded, *evicted, *slots;
    const long long* plan;
};

// Load row loaded[n] into slots[n] for each n < plan[0]. From n = into_empty = plan[1] on,
// first write the row evicted[n - into_empty] back from that slot. One kernel does both, so that
// reads and writes keep pace, which gets more of the link than one kernel for each.
// slot_of: the slot of each row, `none` if it is not cached; may be null.
extern "C" __global__ void exchange(
    HOST STRIDED float4* table, long long stride, float4* records, int width, Moves moves,
    OPTIONAL int* slot_of, int none) {
    const long long into_empty = moves.plan[1];
    each_warp(moves.plan[0], [&](long long n) {
        const int loaded = moves.loaded[n], at = moves.slots[n];
        const int evicted = n < into_empty ? 0 : moves.evicted[n - into_empty];
        float4* slot = records + (long long)at * width;
        float4* back = n < into_empty ? nullptr : table + evicted * stride;
        copy_records(table + loaded * stride, slot, back ? slot : nullptr, back, width);
        if (slot_of && lane_id() == 0) {
            if (back) slot_of[evicted] = none;
            slot_of[loaded] = at;
        }
    });
}

// Bags of the ids of tables. Each table has `length` ids and `bags` bags: bag b begins at
// begins[b], or at b * size; where begins are given, the last one ends with the table's ids.
struct Bags {
    const long long* places;  // of each id among the unique rows
    long long length;
    OPTIONAL const long long* begins;
    int size;
    int bags;           // of a table
    int tables;
    long long padding;  // place of the padding row, or -1
    bool mean;
};

struct Bag {  // bag b of a table
    long long first, end;

    __device__ Bag(int table, int b, const Bags& of) {
        const long long ids_before = table * of.length;
        first = of.begins ? of.begins[b] : (long long)b * of.size;
        end = !of.begins ? first + of.size : b + 1 < of.bags ? of.begins[b + 1] : of.length;
        first = max(first, 0ll) + ids_before;
        end = min(end, of.length) + ids_before;
    }

    // Return the factor of each vector: for means, 1 by the number of ids that are not padding.
    __device__ float share(const Bags& of) const {
        if (!of.mean) return 1;
        int ids = 0;
        for (long long i = first; i < end; i++) ids += of.places[i] != of.padding;
        return 1.0f / max(1, ids);
    }
};

// Call visit(n, lane) for each n in [0, count), by LANES threads each.
template <class Visit>
__device__ void each_group(long long count, Visit visit) {
    const long long step = threads() / LANES;
    for (long long n = thread_id() / LANES; n < count; n += step) visit(n, thread_id() % LANES);
}

constexpr int IDS = 8;  // or bags, whose rows a thread has parts of; as in ops.py

// Write the weights of ids, as floats. rows: the unique rows, by default 0, 1, 2, ...
extern "C" __global__ void gather_ids(
    View view, long long row_width, OPTIONAL const int* rows, const long long* places, int count,
    int dim, float* vectors) {
    each_group((count + IDS - 1) / IDS, [&](long long group, int lane) {
        const long long first = group * IDS;
        const Element* records[IDS];
#pragma unroll
        for (int i = 0; i < IDS; i++) {
            const long long place = places[min(first + i, count - 1ll)];
            records[i] = view.record(rows ? rows[place] : place, row_width);
        }
        for (int p = lane; p < dim / WIDE; p += LANES) {
            Pack<WIDE> packs[IDS];
#pragma unroll
            for (int i = 0; i < IDS; i++) packs[i] = Pack<WIDE>::load(records[i], p);
#pragma unroll
            for (int i = 0; i < IDS; i++)
                if (first + i < count) packs[i].write(vectors + (first + i) * dim, p);
        }
    });
}

// Write the sum or mean of each bag's weights, as floats. rows: as above.
extern "C" __global__ void gather_bags(
    View view, long long row_width, OPTIONAL const int* rows, Bags bags, int dim, float* vectors) {
    each_group(bags.tables * (long long)bags.bags, [&](long long n, int lane) {
        const int table = n / bags.bags;
        const Bag bag(table, n - (long long)table * bags.bags, bags);
        const float share = bag.share(bags);
        for (int p = lane; p < dim / WIDE; p += LANES) {
            Pack<WIDE> sum = {};
#pragma unroll 4
            for (long long i = bag.first; i < bag.end; i++) {
                const long long place = bags.places[i];
                if (place == bags.padding) continue;
                const Element* record = view.record(rows ? rows[place] : place, row_width);
                const Pack<WIDE> pack = Pack<WIDE>::load(record, p);
                for (int w = 0; w < WIDE; w++) sum.at[w] += pack.at[w];
            }
            for (int w = 0; w < WIDE; w++) sum.at[w] *= share;
            sum.write(vectors + n * dim, p);
        }
    });
}

// Adds gradients to those of rows. Those of the last rows are summed first, as atomic additions to
// the most frequent rows of small tables would wait for each other.
struct Sums {
    static constexpr int KEPT = 4;
    float* sums;
    int dim, p;  // pack of a row
    int places[KEPT] = {-1, -1, -1, -1};
    Floats<WIDE> kept[KEPT];

    __device__ void add(int place, const Floats<WIDE>& grad) {
        bool is_kept = false;
#pragma unroll
        for (int k = 0; k < KEPT; k++) {
            if (places[k] != place) continue;
            is_kept = true;
            for (int w = 0; w < WIDE; w++) kept[k].at[w] += grad.at[w];
        }
        if (is_kept) return;
        write(KEPT - 1);
#pragma unroll
        for (int k = KEPT - 1; k > 0; k--) places[k] = places[k - 1], kept[k] = kept[k - 1];
        places[0] = place, kept[0] = grad;
    }

    __device__ void write(int k) const {
        float* sum_D = sums + (long long)places[k] * dim;
        if (places[k] >= 0) atomic_add((Floats<WIDE>*)sum_D + p, kept[k]);
    }

    __device__ ~Sums() {
#pragma unroll
        for (int k = 0; k < KEPT; k++) write(k);
    }
};

// Add the gradient of each id to that of its row, in no fixed order; padding gets none. Gradients
// of a table's `each` ids are `stride` apart, those of tables `table_stride`. Tables take turns, so
// that threads which run together seldom add to the same row.
extern "C" __global__ void add_ids(
    STRIDED const float* grads, long long table_stride, long long stride,
    const long long* places, int tables, int each, long long padding, int dim, float* sums) {
    const long long groups = (each + IDS - 1) / IDS;  // of a table
    each_group(groups * tables, [&](long long group, int lane) {
        const int table = group % tables, first = group / tables * IDS;
        const float* grads_ND = grads + table * table_stride;
        const long long* places_N = places + (long long)table * each;
        const float* from[IDS];
        int to[IDS];
#pragma unroll
        for (int i = 0; i < IDS; i++) {
            from[i] = grads_ND + min(first + i, each - 1) * stride;
            to[i] = first + i < each ? places_N[first + i] : padding;
        }
        for (int p = lane; p < dim / WIDE; p += LANES) {
            Sums of_rows{sums, dim, p};
            Floats<WIDE> packs[IDS];
#pragma unroll
            for (int i = 0; i < IDS; i++) packs[i] = ((const Floats<WIDE>*)from[i])[p];
#pragma unroll
            for (int i = 0; i < IDS; i++)
                if (to[i] != padding) of_rows.add(to[i], packs[i]);
        }
    });
}

// Add the gradient of each bag to those of its rows, in no fixed order; padding gets none. Strides
// are those of tables and of bags in the gradients.
extern "C" __global__ void add_bags(
    STRIDED const float* grads, long long table_stride, long long stride, Bags bags, int dim,
    float* sums) {
    const long long groups = (bags.bags + IDS - 1) / IDS;  // of a table
    each_group(groups * bags.tables, [&](long long group, int lane) {
        const int table = group % bags.tables, first = group / bags.tables * IDS;
        for (int p = lane; p < dim / WIDE; p += LANES) {
            Sums of_rows{sums, dim, p};
            for (int b = first; b < min(first + IDS, bags.bags); b++) {
                const Bag bag(table, b, bags);
                const float share = bag.share(bags);
                Floats<WIDE> grad =
                    ((const Floats<WIDE>*)(grads + table * table_stride + b * stride))[p];
                for (int w = 0; w < WIDE; w++) grad.at[w] *= share;
                for (long long i = bag.first; i < bag.end; i++)
                    if (bags.places[i] != bags.padding) of_rows.add(bags.places[i], grad);
            }
        }
    });
}
