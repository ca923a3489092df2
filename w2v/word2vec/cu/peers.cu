// Exchange of weights and gradients between ranks that read each other's memory.
//
// Both rows of a word belong to one rank (unique.cuh).
//
// Macros: RANKS; ELEMENT of the records; WIDE, elements of a row that are read together, 1 or 4.

#include "common.cuh"
#include "element.cuh"
#include "unique.cuh"

// Call visit(rank) for each rank, by one thread of the block each.
template <class Visit>
__device__ void each_rank(Visit visit) {
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) visit(rank);
}

// Copy the weight of a row, the first `dim` elements of its record, to weights[n], by one warp.
__device__ void copy_weight(
    const View& view, long long row, long long row_width, int dim, Element* weights,
    long long n) {
    typedef Pack<WIDE>::Stored Vector;
    const Element* record = view.record(row, row_width);
    for (int i = lane_id(); i < dim / WIDE; i += 32)
        ((Vector*)(weights + n * dim))[i] = ((const Vector*)record)[i];
}

// Wait until all ranks have come here for the turn-th time; steps and plans have flags of their
// own. What a rank's kernels before this one have written, and the block of this one that `tells`,
// is then there for all.
__device__ void meet(const Peer* peers, int me, bool plans, int turn, bool tells = true) {
    const int first = plans * RANKS;
    __syncthreads();
    if (tells)
        each_rank([&](int rank) {
            __threadfence_system();
            *(volatile int*)(peers[rank].flags + first + me) = turn;
        });
    __syncthreads();
    each_rank([&](int rank) {
        while (*(volatile int*)(peers[me].flags + first + rank) - turn < 0) {}
        __threadfence_system();
    });
    __syncthreads();
}

extern "C" __global__ void meet_to_plan(const Peer* peers, int me, int turn) {
    meet(peers, me, true, turn);
}

// Mark the rows of this rank that any rank has marked.
//
// page: which of the marks; rows_each: length of a rank's marks; rows: of this rank.
extern "C" __global__ void gather_marks(
    const Peer* peers, int me, int page, long long rows_each, long long rows, bool* marks) {
    each_thread(rows, [&](long long n) {
        bool marked = false;
        for (int rank = 0; rank < RANKS; rank++)
            marked |= peers[rank].marks[(page * RANKS + me) * rows_each + n];
        marks[n] = marked;
    });
}

// Reset the indices of listed rows to -1, and mark the rows by rank unless `marks` is null.
//
// marks: of the first rank, rows_each long, then of the next. next_count: of the list that is made
// next, becomes 0.
extern "C" __global__ void mark_listed(
    RowGrads rows, unsigned long long* next_count, long long rows_each, OPTIONAL bool* marks) {
    if (thread_id() == 0) *next_count = 0;
    each_thread(*rows.row_count, [&](long long n) {
        const int row = rows.rows_U[n];
        rows.index_A[row] = -1;
        if (marks) marks[owner_of(row, RANKS) * rows_each + row_of_owner(row, RANKS)] = true;
    });
}

// Once all ranks have stepped their rows: index the rows that this rank has listed, and copy the
// weights of those of other ranks. List the rows of this rank that any rank has listed, with the
// places of their gradients, -1 before.
//
// most: rows that a list has room for; slot: of the list. borrowed: grows by the number of rows of
// other ranks.
extern "C" __global__ void borrow_from_peers(
    int* index, Element* weights, long long row_width, int dim, RowGrads own,
    unsigned long long* borrowed, Places places, int me, long long most, int slot, int turn) {
    const Peer* peers = places.peers;
    constexpr int TOGETHER = 8;  // rows that a warp looks at
    __shared__ int borrowed_here;
    if (threadIdx.x == 0) borrowed_here = 0;
    meet(peers, me, false, turn, blockIdx.x == 0);
    const long long count = peers[me].counts[slot];
    const int lane = lane_id();
    each_warp((count + TOGETHER - 1) / TOGETHER, [&](long long part) {
        const long long n = part * TOGETHER + lane;
        const bool is_row = lane < TOGETHER && n < count;
        const int row = is_row ? peers[me].rows[slot * most + n] : 2 * me;
        if (is_row) index[row] = n;
        const unsigned others = __ballot_sync(ALL, owner_of(row, RANKS) != me);
        if (lane == 0 && others) atomicAdd(&borrowed_here, __popc(others));
        for (unsigned left = others; left; left &= left - 1) {
            const int source = __ffs(left) - 1, its = __shfl_sync(ALL, row, source);
            const Peer& owner = peers[owner_of(its, RANKS)];
            copy_weight(
                {(Element*)owner.records, owner.slot_of}, row_of_owner(its, RANKS), row_width, dim,
                weights, part * TOGETHER + source);
        }
    });
    for (int rank = 0; rank < RANKS; rank++)
        each_thread(peers[rank].counts[slot], [&](long long n) {
            const int row = peers[rank].rows[slot * most + n];
            if (owner_of(row, RANKS) != me) return;
            places.places[rank * places.room + own.find_or_add(row_of_owner(row, RANKS))] = n;
        });
    __syncthreads();
    if (threadIdx.x == 0 && borrowed_here) atomicAdd(borrowed, (unsigned long long)borrowed_here);
}

// Tell all ranks that this one has its gradients, and the loss, pairs and fault of its step. Once
// all have, sum losses and pairs in the order of the ranks, so that every rank gets the same bits;
// the fault of any rank, found one step before, becomes the fault of all. By one block.
extern "C" __global__ void meet_to_step(
    const Peer* peers, int me, long long* fault, double* loss, long long* pairs, int turn) {
    if (threadIdx.x == 0) {
        long long* facts = peers[me].facts;
        facts[0] = __double_as_longlong(*loss);
        facts[1] = *pairs;
        facts[2] = *fault;
    }
    meet(peers, me, false, turn);
    if (threadIdx.x) return;
    double loss_sum = 0;
    long long pairs_sum = 0, faults = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        const volatile long long* facts = peers[rank].facts;
        loss_sum += __longlong_as_double(facts[0]);
        pairs_sum += facts[1];
        faults |= facts[2];
    }
    *loss = loss_sum;
    *pairs = pairs_sum;
    *fault = faults;
}
