// Which rows of the tables move between CPU memory and the slots of a cache on the GPU, decided on the GPU: see transfer/cached.py, whose
// plans these are. Rows of all tables are gone through in one order, the most used first.
//
// survey counts the rows that are missing or idle in each stretch of that order, decide sums the counts and settles how many come and
// leave, and leave and come list them. A stretch belongs to one warp.

constexpr unsigned ALL = 0xffffffffu;

struct Book {  // of all plans so far; slots from `taken` on were never used
    long long taken, used, read, written;
};

struct Orders {  // of one plan
    long long coming, at_once;  // rows that come, and how many of them to slots never used; the others' slots are left by as many rows
    long long staying, taken;   // idle rows that stay; taken before this plan
};

struct Notice {  // for the CPU, in its memory
    long long lacking;  // rows for which the last plan found no room beside those in use
    long long refused;  // not 0 once rows found no room at all
};

struct Rows {
    int *slot, *wanted;      // of each row: its slot, or `slots`; the last plan that wanted it
    const long long* order;  // the rows, the most used first
    long long count, stretch, slots;
    int plan, in_use;

    __device__ bool missing(long long row) const { return wanted[row] == plan && slot[row] == slots; }
    __device__ bool idle(long long row) const { return slot[row] != slots && wanted[row] < in_use; }
};

#define ROWS int *slot, int *wanted, const long long *order, long long count, long long stretch, long long slots, int plan, int in_use
#define GATHERED {slot, wanted, order, count, stretch, slots, plan, in_use}

__device__ int lane() { return threadIdx.x % 32; }
__device__ long long warp() { return ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// Calls visit(row, rank) for each row of the warp's stretch that is chosen, rank counting up from `rank`.
template <class Choose, class Visit>
__device__ void each_of(const Rows& all, long long rank, Choose choose, Visit visit) {
    const long long end = min(all.count, (warp() + 1) * all.stretch);
    for (long long first = warp() * all.stretch; first < end; first += 32) {
        const long long row = first + lane() < end ? all.order[first + lane()] : -1;
        const bool chosen = row >= 0 && choose(row);
        const unsigned ballot = __ballot_sync(ALL, chosen);
        if (chosen) visit(row, rank + __popc(ballot & ((1u << lane()) - 1)));
        rank += __popc(ballot);
    }
}

// marks: the rows that are wanted; null where `wanted` says so already. missing and idle: for each stretch.
extern "C" __global__ void survey(ROWS, const bool* marks, long long* missing, long long* idle, Book* book) {
    const Rows all = GATHERED;
    const long long begin = warp() * stretch, end = min(count, begin + stretch);
    if (begin >= count) return;
    int missed = 0, idled = 0, used = 0;
    for (long long n = begin + lane(); n < end; n += 32) {
        const long long row = order[n];
        if (marks && marks[row]) {
            wanted[row] = plan;
            used++;
        }
        missed += all.missing(row);
        idled += all.idle(row);
    }
    missed = __reduce_add_sync(ALL, missed);
    idled = __reduce_add_sync(ALL, idled);
    used = __reduce_add_sync(ALL, used);
    if (lane() == 0) {
        missing[warp()] = missed;
        idle[warp()] = idled;
        if (used) atomicAdd((unsigned long long*)&book->used, (unsigned long long)used);
    }
}

// Turns n counts into how many come before each, with the sum at the end, by one block; gives the sum.
__device__ long long sum_before(long long* counts, long long n) {
    __shared__ long long sums[32];
    const long long each = (n + blockDim.x - 1) / blockDim.x, begin = min(n, threadIdx.x * each), end = min(n, begin + each);
    long long mine = 0;
    for (long long i = begin; i < end; i++) mine += counts[i];
    long long sum = mine;  // of this thread and those before it in the warp
    for (int distance = 1; distance < 32; distance *= 2) {
        const long long other = __shfl_up_sync(ALL, sum, distance);
        if (lane() >= distance) sum += other;
    }
    if (lane() == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    long long total = 0, before = sum - mine;
    for (int w = 0; w < blockDim.x / 32; w++) {
        if (w < threadIdx.x / 32) before += sums[w];
        total += sums[w];
    }
    __syncthreads();
    for (long long i = begin; i < end; i++) {
        const long long count = counts[i];
        counts[i] = before;
        before += count;
    }
    if (threadIdx.x == 0) counts[n] = total;
    return total;
}

// One block. final: nothing is in use any more, so what finds no room now is refused.
extern "C" __global__ void decide(
    long long* missing, long long* idle, long long stretches, long long slots, bool final, Book* book, Orders* orders, Notice* notice) {
    const long long wanting = sum_before(missing, stretches), idling = sum_before(idle, stretches);
    if (threadIdx.x) return;
    const long long free = slots - book->taken;
    const long long leaving = min(max(wanting - free, 0ll), idling), coming = min(wanting, free + leaving);
    *orders = {coming, coming - leaving, idling - leaving, book->taken};
    book->taken += coming - leaving;
    book->read += coming;
    book->written += leaving;
    notice->lacking = wanting - coming;
    if (final && wanting > coming) notice->refused = wanting - coming;
}

// Lists the idle rows that leave, the least used, and the slots that those which come find empty.
extern "C" __global__ void leave(ROWS, const long long* idle, const Orders* orders, long long* leaving, int* given) {
    const Rows all = GATHERED;
    if (warp() * stretch >= count || idle[warp() + 1] <= orders->staying) return;
    const long long staying = orders->staying, at_once = orders->at_once;
    each_of(all, idle[warp()], [&](long long row) { return all.idle(row); }, [&](long long row, long long rank) {
        const long long n = rank - staying;
        if (n < 0) return;
        leaving[n] = row;
        given[at_once + n] = slot[row];
        slot[row] = slots;
    });
}

// Lists the missing rows that come, the most used where not all can, and gives them slots.
extern "C" __global__ void come(ROWS, const long long* missing, const Orders* orders, long long* rows, int* given) {
    const Rows all = GATHERED;
    if (warp() * stretch >= count || missing[warp()] >= orders->coming || missing[warp()] == missing[warp() + 1]) return;
    const long long coming = orders->coming, at_once = orders->at_once, taken = orders->taken;
    each_of(all, missing[warp()], [&](long long row) { return all.missing(row); }, [&](long long row, long long rank) {
        if (rank >= coming) return;
        rows[rank] = row;
        if (rank < at_once) given[rank] = taken + rank;
        slot[row] = given[rank];
    });
}
