// All-to-all of rows between ranks: requests for rows go to the ranks that own them, weights come
// back, and gradients go to the owners.
//
// Both rows of a word belong to one rank (unique.cuh). A request names a row by an id: its number
// at the owner.
//
// What a rank requests of another for a batch begins with a header of HEADER_ROWS ids below zero.
// The first is ~n, where n is the number of ids, header included, of the same request one page
// later, so that the receiver knows the size in time. In the gradients that go back, the header's
// rows carry the facts of the step: loss, pairs and fault, in six numbers of 4 bytes.
//
// Macros: RANKS; HEADER_ROWS; ELEMENT of the records; WIDE, elements of a row that are read
// together, 1 or 4.

#include "common.cuh"
#include "element.cuh"
#include "unique.cuh"

// Return where the part of a rank begins, if each part has counts[rank] entries.
__device__ long long begin_of(int rank, const int* counts) {
    long long begin = 0;
    for (int before = 0; before < rank; before++) begin += counts[before];
    return begin;
}

// Call visit(rank) for each rank, by one thread of the block each.
template <class Visit>
__device__ void each_rank(Visit visit) {
    for (int rank = threadIdx.x; rank < RANKS; rank += blockDim.x) visit(rank);
}

struct IdsByRank {  // of batch.py
    int* ids_M;
    const int* count_N;  // of each rank
};

struct Counts {  // of batch.py
    const int* send_N;
    int* recv_N;
};

// Count the ids to send to each rank, header included. sent: zeros before.
extern "C" __global__ void count_owners(RowGrads rows, int* sent) {
    __shared__ int here[RANKS];  // counts of this block
    each_rank([&](int rank) { here[rank] = blockIdx.x ? 0 : HEADER_ROWS; });
    __syncthreads();
    each_thread(*rows.row_count, [&](long long n) {
        atomicAdd(here + owner_of(rows.rows_U[n], RANKS), 1);
    });
    __syncthreads();
    each_rank([&](int rank) { if (here[rank]) atomicAdd(sent + rank, here[rank]); });
}

// Group the unique rows by owner, behind a header each, and reset their indices to -1.
//
// listed_rows: the rows; -1 in headers. ids: as the owner knows the row.
// sent: from count_owners. listed: zeros before; ids listed so far for each rank.
// before: of the batch one page before, whose headers get the counts `sent`.
extern "C" __global__ void group_by_owner(
    RowGrads rows, const int* sent, int* listed, long long* listed_rows, int* ids,
    IdsByRank before) {
    __shared__ int begin[RANKS];  // of each rank's ids
    __shared__ int here[RANKS];   // this block's ids of each rank: their number, then where they go
    if (threadIdx.x == 0)
        for (int rank = 0, before = 0; rank < RANKS; before += sent[rank++]) begin[rank] = before;
    __syncthreads();
    if (blockIdx.x == 0)
        each_rank([&](int rank) {
            for (int n = begin[rank]; n < begin[rank] + HEADER_ROWS; n++)
                listed_rows[n] = ids[n] = -1;
            before.ids_M[begin_of(rank, before.count_N)] = ~sent[rank];
        });
    const long long count = *rows.row_count;
    for (long long first = (long long)blockIdx.x * blockDim.x; first < count;
         first += (long long)gridDim.x * blockDim.x) {
        // The block counts its rows per owner, reserves room for them and then writes them.
        each_rank([&](int rank) { here[rank] = 0; });
        __syncthreads();
        const long long n = first + threadIdx.x;
        const int row = n < count ? rows.rows_U[n] : 0, owner = owner_of(row, RANKS);
        const int place = n < count ? atomicAdd(here + owner, 1) : 0;
        __syncthreads();
        each_rank([&](int rank) {
            if (!here[rank]) return;
            here[rank] = begin[rank] + HEADER_ROWS + atomicAdd(listed + rank, here[rank]);
        });
        __syncthreads();
        if (n < count) {
            const int at = here[owner] + place;
            listed_rows[at] = row;
            ids[at] = row_of_owner(row, RANKS);
            rows.index_A[row] = -1;
        }
        __syncthreads();
    }
}

// Copy the weight of a row, the first `dim` elements of its record, to weights[n], by one warp.
__device__ void copy_weight(
    const void* records, const int* slot, long long row, long long row_width, int dim,
    Element* weights, long long n) {
    typedef Pack<WIDE>::Stored Vector;
    const Element* record = (const Element*)records + (slot ? slot[row] : row) * row_width;
    for (int i = lane_id(); i < dim / WIDE; i += 32)
        ((Vector*)(weights + n * dim))[i] = ((const Vector*)record)[i];
}

// Set place_of[rows[n]] = n, headers aside, and zero the gradient of each row, and its number of
// pairs unless `pairs` is null.
extern "C" __global__ void index_borrowed(
    const long long* rows, long long count, int* place_of, float* grads,
    OPTIONAL int* pairs, int dim) {
    each_warp(count, [&](long long n) {
        const int lane = lane_id();
        for (int i = lane; i < dim / WIDE; i += 32) ((Floats<WIDE>*)(grads + n * dim))[i] = {};
        if (lane) return;
        if (rows[n] >= 0) place_of[rows[n]] = (int)n;
        if (pairs) pairs[n] = 0;
    });
}

// The ids received from all ranks; several may name the same row.
struct RequestedIds {
    const int* ids;
    long long length;

    __device__ bool is_header(long long n) const { return ids[n] < 0; }
};

// Read from the headers how many ids each rank will send for the batch one page later.
//
// received: ids of this batch. following: of the later batch, of which the ids to send are known.
// both: for the CPU, the ids to send and then those to receive.
extern "C" __global__ void read_counts(
    IdsByRank received, Counts following, HOST int* both) {
    each_thread(RANKS, [&](long long rank) {
        following.recv_N[rank] = ~received.ids_M[begin_of(rank, received.count_N)];
        both[rank] = following.send_N[rank];
        both[RANKS + rank] = following.recv_N[rank];
    });
}

// Mark the requested rows.
extern "C" __global__ void mark_requested(RequestedIds requests, bool* marks) {
    each_thread(requests.length, [&](long long n) {
        if (!requests.is_header(n)) marks[requests.ids[n]] = true;
    });
}

// List the unique requested rows.
extern "C" __global__ void own(RequestedIds requests, RowGrads rows) {
    each_thread(requests.length, [&](long long n) {
        if (!requests.is_header(n)) rows.add(requests.ids[n]);
    });
}

// Copy the weights of all requested rows, the first `dim` elements of each record.
extern "C" __global__ void gather_weights(
    RequestedIds requests, View view, long long row_width, int dim, Element* weights) {
    each_warp(requests.length, [&](long long n) {
        if (requests.is_header(n)) return;
        copy_weight(
            view.records_SR, view.slot_of_A, requests.ids[n], row_width, dim, weights, n);
    });
}

// Write the facts of a step into a header.
__device__ void write_facts(
    const double* loss, const long long* pairs, const long long* fault, int* words) {
    const long long facts[] = {__double_as_longlong(*loss), *pairs, *fault};
    for (int n = 0; n < 6; n++) words[n] = (int)(facts[n / 2] >> 32 * (n % 2));
}

// Write the facts of this rank's step into the header of the gradients for each rank.
extern "C" __global__ void write_headers(
    const double* loss, const long long* pairs, const long long* fault, const int* sent, int dim,
    float* grads) {
    if (blockIdx.x) return;
    each_rank([&](int rank) {
        write_facts(loss, pairs, fault, (int*)(grads + begin_of(rank, sent) * dim));
    });
}

// Return fact n of a header.
__device__ long long fact(const int* words, int n) {
    return (long long)words[2 * n + 1] << 32 | (unsigned)words[2 * n];
}

// Set loss and pairs to the sums of the ranks' facts, added in the order of the ranks, so that
// every rank gets the same bits. The fault of any rank, found one step before, becomes the fault of
// all.
//
// header_of(rank): where its facts are.
template <class HeaderOf>
__device__ void add_facts(
    HeaderOf header_of, double* loss, long long* pairs, long long* fault) {
    double loss_sum = 0;
    long long pairs_sum = 0, faults = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        const int* header = (const int*)header_of(rank);
        loss_sum += __longlong_as_double(fact(header, 0));
        pairs_sum += fact(header, 1);
        faults |= fact(header, 2);
    }
    *loss = loss_sum;
    *pairs = pairs_sum;
    *fault = faults;
}

// Add the received gradients to those of the unique rows, and the numbers of pairs unless
// grad_pairs is null.
extern "C" __global__ void collect(
    RequestedIds requests, const int* received, const float* grads,
    OPTIONAL const int* grad_pairs, RowGrads rows, int dim, double* loss, long long* pairs,
    long long* fault) {
    if (blockIdx.x + threadIdx.x == 0)
        add_facts(
            [&](int rank) { return grads + begin_of(rank, received) * dim; }, loss, pairs, fault);
    each_warp(requests.length, [&](long long n) {
        if (requests.is_header(n)) return;
        const long long index = rows.index_A[requests.ids[n]];
        const float* from = grads + n * dim;
        float* to = rows.grad_UD + index * dim;
        const int lane = lane_id();
#if WIDE == 4 && __CUDA_ARCH__ >= 900
        for (int i = lane; i < dim / 4; i += 32)
            atomicAdd((float4*)to + i, ((const float4*)from)[i]);
#else
        for (int i = lane; i < dim; i += 32) atomicAdd(to + i, from[i]);
#endif
        if (lane == 0 && grad_pairs) atomicAdd(rows.pairs_U + index, grad_pairs[n]);
    });
}

// What follows is for ranks that read each other's memory.

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
                owner.records, owner.slot_of, row_of_owner(its, RANKS), row_width, dim, weights,
                part * TOGETHER + source);
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

// Tell all ranks that this one has its gradients, and the facts of its step; once all have, add the
// facts. By one block.
extern "C" __global__ void meet_to_step(
    const Peer* peers, int me, long long* fault, double* loss, long long* pairs, int turn) {
    if (threadIdx.x == 0) write_facts(loss, pairs, fault, (int*)peers[me].facts);
    meet(peers, me, false, turn);
    if (threadIdx.x == 0)
        add_facts([&](int rank) { return peers[rank].facts; }, loss, pairs, fault);
}
