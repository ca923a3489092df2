// Rows of both tables that belong to several ranks: who is asked for which, what owners lend of theirs, and gradients that come back.
//
// A row is named to its owner by an id: its place in the owner's shard, plus `stride`, which no shard is longer than, if it is a row of the
// output table. Row v belongs to rank v % RANKS, as its row v / RANKS.
//
// What a rank asks of another for a batch begins with HEADS ids, below zero, that are no row's. The first of them is ~n, n being how many
// ids, heads included, it asks that rank for of the batch a page later; and where the gradients come back, these begin with the report of
// the step there: its loss, its pairs and the fault, in the six numbers of 4 bytes for which HEADS rows have room.
//
// Compiled for: RANKS, HEADS, ELEMENT of the records, and WIDE, how many numbers of a row go together, 1 or 4.

#include "claim.cuh"
#include "element.cuh"

// Calls visit(n) for each n < count, by a thread or by all lanes of a warp.
template <class Visit>
__device__ void by_threads(long long count, Visit visit) {
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long n = (long long)blockIdx.x * blockDim.x + threadIdx.x; n < count; n += threads) visit(n);
}

template <class Visit>
__device__ void by_warps(long long count, Visit visit) {
    const long long warps = (long long)gridDim.x * blockDim.x / 32;
    for (long long n = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < count; n += warps) visit(n);
}

// Where what is asked of a rank, or by it, begins; counts: of those before it too.
__device__ long long begin_of(int rank, const int* counts) {
    long long begin = 0;
    for (int before = 0; before < rank; before++) begin += counts[before];
    return begin;
}

// The rows that claim.cu has found, those of the input table first.
struct Claimed {
    const int *rows_in, *rows_out;
    long long inputs, total;

    __device__ bool is_output(long long n) const { return n >= inputs; }
    __device__ int row(long long n) const { return is_output(n) ? rows_out[n - inputs] : rows_in[n]; }
};
#define CLAIMED const int *rows_in, const long long *count_in, const int *rows_out, const long long *count_out

// How many ids each rank is asked for: those of the claimed rows that belong to it, and heads; asked: zeros before.
extern "C" __global__ void count_owners(CLAIMED, int* asked) {
    __shared__ int here[RANKS];
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) here[rank] = blockIdx.x ? 0 : HEADS;
    __syncthreads();
    const Claimed claimed = {rows_in, rows_out, *count_in, *count_in + *count_out};
    by_threads(claimed.total, [&](long long n) { atomicAdd(here + claimed.row(n) % RANKS, 1); });
    __syncthreads();
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x)
        if (here[rank]) atomicAdd(asked + rank, here[rank]);
}

// Lists the claimed rows owner by owner and takes the claims back. rows: the row, plus `rows_all` in the output table, or -1 for a head;
// ids: as its owner knows it; dealt: zeros before; ids_before, asked_before: of the batch a page before, whose heads are told how many.
extern "C" __global__ void deal(
    CLAIMED, int* number_in, int* number_out, long long rows_all, int stride, const int* asked, int* dealt, long long* rows, int* ids,
    const int* asked_before, int* ids_before) {
    __shared__ int begin[RANKS], here[RANKS];  // where a rank's ids begin; how many this block has of them, then where these begin
    if (threadIdx.x == 0)
        for (int rank = 0, before = 0; rank < RANKS; before += asked[rank++]) begin[rank] = before;
    __syncthreads();
    if (blockIdx.x == 0)
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) {
            for (int head = 0; head < HEADS; head++) rows[begin[rank] + head] = ids[begin[rank] + head] = -1;
            ids_before[begin_of(rank, asked_before)] = ~asked[rank];
        }
    const Claimed claimed = {rows_in, rows_out, *count_in, *count_in + *count_out};
    for (long long first = (long long)blockIdx.x * blockDim.x; first < claimed.total; first += (long long)gridDim.x * blockDim.x) {
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) here[rank] = 0;
        __syncthreads();
        const long long n = first + threadIdx.x;
        const int row = n < claimed.total ? claimed.row(n) : 0, owner = row % RANKS;
        const int place = n < claimed.total ? atomicAdd(here + owner, 1) : 0;
        __syncthreads();
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x)
            if (here[rank]) here[rank] = begin[rank] + HEADS + atomicAdd(dealt + rank, here[rank]);
        __syncthreads();
        if (n < claimed.total) {
            const bool output = claimed.is_output(n);
            const int at = here[owner] + place;
            rows[at] = output ? rows_all + row : row;
            ids[at] = row / RANKS + (output ? stride : 0);
            (output ? number_out : number_in)[row] = -1;
        }
        __syncthreads();
    }
}

struct alignas(4 * WIDE) Floats {
    float at[WIDE];
};

// place_of[rows[n]] = n, but for heads; and zeros for the gradient of each row, and its pairs where they are counted.
extern "C" __global__ void place(const long long* rows, long long count, int* place_of, float* grads, int* pairs, int dim) {
    by_warps(count, [&](long long n) {
        const int lane = threadIdx.x % 32;
        for (int i = lane; i < dim / WIDE; i += 32) ((Floats*)(grads + n * dim))[i] = {};
        if (lane) return;
        if (rows[n] >= 0) place_of[rows[n]] = (int)n;
        if (pairs) pairs[n] = 0;
    });
}

// The ids that ranks ask for, which may name a row many times.
struct Lent {
    const int* ids;
    int stride;

    __device__ bool is_head(long long n) const { return ids[n] < 0; }
    __device__ bool is_output(long long n) const { return ids[n] >= stride; }
    __device__ int row(long long n) const { return is_output(n) ? ids[n] - stride : ids[n]; }
};
#define LENT const int *ids, long long count, int stride

// How many ids each rank will ask for of the batch a page later; ids: of this batch, so many of each rank. `told` is for the CPU: how many
// are asked of each rank, then those that it asks for.
extern "C" __global__ void hear(const int* ids, const int* lent, const int* next_asked, int* next_lent, int* told) {
    by_threads(RANKS, [&](long long rank) {
        next_lent[rank] = ~ids[begin_of(rank, lent)];
        told[rank] = next_asked[rank];
        told[RANKS + rank] = next_lent[rank];
    });
}

extern "C" __global__ void mark_lent(LENT, bool* input_marks, bool* output_marks) {
    const Lent lent = {ids, stride};
    by_threads(count, [&](long long n) {
        if (!lent.is_head(n)) (lent.is_output(n) ? output_marks : input_marks)[lent.row(n)] = true;
    });
}

// Claims the rows, and copies their weights, `dim` numbers at the beginning of a record, which is at slot_*[row], or at the row itself
// where slot_* is null.
extern "C" __global__ void lend(
    LENT, const Element* input, const int* slot_in, int* number_in, int* rows_in, unsigned long long* count_in, const Element* output,
    const int* slot_out, int* number_out, int* rows_out, unsigned long long* count_out, long long row_width, int dim, Element* weights) {
    typedef Pack<WIDE>::Stored Vector;
    const Lent lent = {ids, stride};
    by_threads(count, [&](long long n) {
        if (lent.is_head(n)) return;
        if (lent.is_output(n))
            claim_row(lent.row(n), number_out, rows_out, count_out);
        else
            claim_row(lent.row(n), number_in, rows_in, count_in);
    });
    by_warps(count, [&](long long n) {
        if (lent.is_head(n)) return;
        const int row = lent.row(n);
        const int* slot = lent.is_output(n) ? slot_out : slot_in;
        const Vector* record = (const Vector*)((lent.is_output(n) ? output : input) + (slot ? slot[row] : row) * row_width);
        for (int i = threadIdx.x % 32; i < dim / WIDE; i += 32) ((Vector*)(weights + n * dim))[i] = record[i];
    });
}

// Writes what this rank has to report of a step before the gradients for each rank, of which so many are asked.
extern "C" __global__ void report(
    const double* loss, const long long* pairs, const long long* fault, const int* asked, int dim, float* grads) {
    const long long facts[] = {__double_as_longlong(*loss), *pairs, *fault};
    by_threads(RANKS, [&](long long rank) {
        int* words = (int*)(grads + begin_of(rank, asked) * dim);
        for (int n = 0; n < 6; n++) words[n] = (int)(facts[n / 2] >> 32 * (n % 2));
    });
}

// Fact number n of a report.
__device__ long long fact(const int* words, int n) {
    return (long long)words[2 * n + 1] << 32 | (unsigned)words[2 * n];
}

// Adds the gradients that came for lent rows to those of the claims, and the numbers of pairs where there are any. Loss and pairs become
// the sums of what the ranks report, added in their order, so that all have the same bits; and the fault of any, found in the step before,
// becomes that of all.
extern "C" __global__ void collect(
    LENT, const int* lent_by, const float* came, const int* came_pairs, const int* number_in, float* grad_in, int* pairs_in,
    const int* number_out, float* grad_out, int* pairs_out, int dim, double* loss, long long* pairs, long long* fault) {
    const Lent lent = {ids, stride};
    if (blockIdx.x + threadIdx.x == 0) {
        double loss_of_all = 0;
        long long pairs_of_all = 0, faults = 0;
        const float* theirs = came;
        for (int rank = 0; rank < RANKS; theirs += (long long)lent_by[rank++] * dim) {
            loss_of_all += __longlong_as_double(fact((const int*)theirs, 0));
            pairs_of_all += fact((const int*)theirs, 1);
            faults |= fact((const int*)theirs, 2);
        }
        *loss = loss_of_all, *pairs = pairs_of_all, *fault = faults;
    }
    by_warps(count, [&](long long n) {
        if (lent.is_head(n)) return;
        const bool output = lent.is_output(n);
        const long long number = (output ? number_out : number_in)[lent.row(n)];
        const float* from = came + n * dim;
        float* to = (output ? grad_out : grad_in) + number * dim;
        const int lane = threadIdx.x % 32;
#if WIDE == 4 && __CUDA_ARCH__ >= 900
        for (int i = lane; i < dim / 4; i += 32) atomicAdd((float4*)to + i, ((const float4*)from)[i]);
#else
        for (int i = lane; i < dim; i += 32) atomicAdd(to + i, from[i]);
#endif
        if (lane == 0 && came_pairs) atomicAdd((output ? pairs_out : pairs_in) + number, came_pairs[n]);
    });
}
