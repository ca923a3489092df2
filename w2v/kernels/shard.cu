// Rows of both tables that belong to several ranks: who is asked for which, what owners lend of theirs, and gradients that come back.
//
// A row is named to its owner by an id: its place in the owner's shard, plus `stride`, which no shard is longer than, if it is a row of the
// output table. Row v belongs to rank v % RANKS, as its row v / RANKS.
//
// Compiled for: RANKS, ELEMENT of the records, and WIDE, how many numbers of a row go together, 1 or 4.

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

// The rows that claim.cu has found, those of the input table first.
struct Claimed {
    const int *rows_in, *rows_out;
    long long inputs, total;

    __device__ bool is_output(long long n) const { return n >= inputs; }
    __device__ int row(long long n) const { return is_output(n) ? rows_out[n - inputs] : rows_in[n]; }
};
#define CLAIMED const int *rows_in, const long long *count_in, const int *rows_out, const long long *count_out

// How many of the claimed rows belong to each rank; asked: zeros before.
extern "C" __global__ void count_owners(CLAIMED, int* asked) {
    __shared__ int here[RANKS];
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) here[rank] = 0;
    __syncthreads();
    const Claimed claimed = {rows_in, rows_out, *count_in, *count_in + *count_out};
    by_threads(claimed.total, [&](long long n) { atomicAdd(here + claimed.row(n) % RANKS, 1); });
    __syncthreads();
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x)
        if (here[rank]) atomicAdd(asked + rank, here[rank]);
}

// Lists the claimed rows owner by owner and takes the claims back. rows: the row, plus `rows_all` in the output table; ids: as its owner
// knows it; dealt: zeros before.
extern "C" __global__ void deal(
    CLAIMED, int* number_in, int* number_out, long long rows_all, int stride, const int* asked, int* dealt, long long* rows, int* ids) {
    __shared__ int begin[RANKS], here[RANKS];  // where a rank's rows begin; how many this block has of them, then where these begin
    if (threadIdx.x == 0)
        for (int rank = 0, before = 0; rank < RANKS; before += asked[rank++]) begin[rank] = before;
    const Claimed claimed = {rows_in, rows_out, *count_in, *count_in + *count_out};
    for (long long first = (long long)blockIdx.x * blockDim.x; first < claimed.total; first += (long long)gridDim.x * blockDim.x) {
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) here[rank] = 0;
        __syncthreads();
        const long long n = first + threadIdx.x;
        const int row = n < claimed.total ? claimed.row(n) : 0, owner = row % RANKS;
        const int place = n < claimed.total ? atomicAdd(here + owner, 1) : 0;
        __syncthreads();
        for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x)
            if (here[rank]) here[rank] = begin[rank] + atomicAdd(dealt + rank, here[rank]);
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

// place_of[rows[n]] = n
extern "C" __global__ void place(const long long* rows, long long count, int* place_of) {
    by_threads(count, [&](long long n) { place_of[rows[n]] = (int)n; });
}

// The ids that ranks ask for, which may name a row many times.
struct Lent {
    const int* ids;
    int stride;

    __device__ bool is_output(long long n) const { return ids[n] >= stride; }
    __device__ int row(long long n) const { return is_output(n) ? ids[n] - stride : ids[n]; }
};
#define LENT const int *ids, long long count, int stride

extern "C" __global__ void mark_lent(LENT, bool* input_marks, bool* output_marks) {
    const Lent lent = {ids, stride};
    by_threads(count, [&](long long n) { (lent.is_output(n) ? output_marks : input_marks)[lent.row(n)] = true; });
}

extern "C" __global__ void claim_lent(
    LENT, int* number_in, int* rows_in, unsigned long long* count_in, int* number_out, int* rows_out, unsigned long long* count_out) {
    const Lent lent = {ids, stride};
    by_threads(count, [&](long long n) {
        if (lent.is_output(n))
            claim_row(lent.row(n), number_out, rows_out, count_out);
        else
            claim_row(lent.row(n), number_in, rows_in, count_in);
    });
}

// Copies the weights, `dim` numbers at the beginning of a record, which is at slot_*[row], or at the row itself where slot_* is null.
extern "C" __global__ void lend(
    LENT, const Element* input, const int* slot_in, const Element* output, const int* slot_out, long long row_width, int dim,
    Element* weights) {
    typedef Pack<WIDE>::Stored Vector;
    const Lent lent = {ids, stride};
    by_warps(count, [&](long long n) {
        const int row = lent.row(n);
        const int* slot = lent.is_output(n) ? slot_out : slot_in;
        const Vector* record = (const Vector*)((lent.is_output(n) ? output : input) + (slot ? slot[row] : row) * row_width);
        for (int i = threadIdx.x % 32; i < dim / WIDE; i += 32) ((Vector*)(weights + n * dim))[i] = record[i];
    });
}

// Adds the gradients that came for lent rows to those of the claims, and the numbers of pairs where there are any.
extern "C" __global__ void collect(
    LENT, const float* came, const int* came_pairs, const int* number_in, float* grad_in, int* pairs_in, const int* number_out,
    float* grad_out, int* pairs_out, int dim) {
    const Lent lent = {ids, stride};
    by_warps(count, [&](long long n) {
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

// What a rank reports of a step: its loss, its pairs, and each bit of its fault.
extern "C" __global__ void report(const double* loss, const long long* pairs, const long long* fault, int bits, double* report) {
    const int bit = threadIdx.x - 2;
    if (blockIdx.x == 0 && bit < bits) report[threadIdx.x] = bit == -2 ? *loss : bit == -1 ? *pairs : *fault >> bit & 1;
}

// With the sum of the reports: the fault of another rank, which was that of the step before, becomes this one's.
extern "C" __global__ void heed(const double* report, int bits, long long step_before, long long* fault) {
    if (blockIdx.x || threadIdx.x || *fault) return;
    for (int bit = 0; bit < bits; bit++)
        if (report[2 + bit] > 0) *fault |= step_before | 1ll << bit;
}
