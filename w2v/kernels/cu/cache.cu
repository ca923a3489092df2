// Which rows of the tables move between CPU memory and the slots of a cache on the GPU, decided on the GPU: see transfer/cached.py, whose
// plans these are. Rows of all tables stand in one order, the most used first; a row's place there is its rank, and what is known of it
// is a bit at that rank. A warp has a stretch of that order, a word of bits for each lane.
//
// survey counts the rows that are missing or idle in each stretch; its last block sums the counts and settles how many come and leave.
// list then names them. Idle rows are early, if they are used soon, or late; early ones leave after all late ones. Slots of rows are looked
// up here and changed by the moves (rows.cu).

constexpr unsigned ALL = 0xffffffffu;
constexpr int MOST_ROWS = 0x7fffffff;

struct Book {  // of all plans so far; slots from `taken` on were never used
    long long taken, used, read, written;
    long long lacking;  // rows for which the last plan found no room beside those in use
};

struct Orders {  // of one plan
    long long coming, at_once;  // rows that come, and how many of them to slots never used; the others' slots are left by as many rows
    long long late, early;      // idle rows that stay: of those that are not used soon, and of those that are
    long long taken;            // before this plan
};

struct Notice {  // for the CPU, in its memory
    long long lacking;  // as in the book
    long long refused;  // not 0 once rows found no room at all
};

struct Rows {
    unsigned* wanted;        // by this plan
    const unsigned* in_use;  // wanted by the plan before, whose steps may compute now; null once they are done
    unsigned* here;          // in slots, or on the way there
    unsigned* soon;          // used by steps soon after those of this plan

    __device__ unsigned missing(long long word) const { return wanted[word] & ~here[word]; }
    __device__ unsigned idle(long long word) const { return here[word] & ~wanted[word] & ~(in_use ? in_use[word] : 0); }
    __device__ unsigned late(long long word) const { return idle(word) & ~soon[word]; }
    __device__ unsigned early(long long word) const { return idle(word) & soon[word]; }
};

#define ROWS unsigned *wanted, const unsigned *in_use, unsigned *here, unsigned *soon
#define GATHERED {wanted, in_use, here, soon}

__device__ int lane() { return threadIdx.x % 32; }
__device__ long long warp() { return ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; }

// The sum of the numbers of the lanes up to this one.
__device__ int sum_up_to_here(int number) {
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL, number, distance);
        if (lane() >= distance) number += other;
    }
    return number;
}

// Turns n counts into how many come before each, with the sum at the end, by one block; gives the sum. Other blocks have written them.
__device__ int sum_before(int* counts, int n) {
    __shared__ int sums[32];
    const int each = (n + blockDim.x - 1) / blockDim.x, begin = min(n, (int)threadIdx.x * each), end = min(n, begin + each);
    int mine = 0;
    for (int i = begin; i < end; i++) mine += __ldcg(counts + i);
    const int sum = sum_up_to_here(mine);
    if (lane() == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    int total = 0, before = sum - mine;
    for (int w = 0; w < blockDim.x / 32; w++) {
        if (w < threadIdx.x / 32) before += sums[w];
        total += sums[w];
    }
    __syncthreads();
    for (int i = begin; i < end; i++) {
        const int count = __ldcg(counts + i);
        counts[i] = before;
        before += count;
    }
    if (threadIdx.x == 0) counts[n] = total;
    return total;
}

// marks: of each row, whether it is wanted; null where `wanted` says so already. used_soon: of each of the rows of a table, whether it is
// early; may be null. missing, late and early: of each of so many stretches.
// final: nothing is in use any more, so what finds no room now is refused. done: how many blocks are, 0 before and after.
extern "C" __global__ void survey(
    ROWS, const bool* marks, const bool* used_soon, int rows, const int* order, long long count, int* missing, int* late, int* early,
    int stretches, long long slots, bool final, unsigned* done, Book* book, Orders* orders, Notice* notice) {
    const Rows all = GATHERED;
    if (!marks && book->lacking == 0) {  // the plan before has brought all
        if (blockIdx.x + threadIdx.x == 0) *orders = {0, 0, MOST_ROWS, MOST_ROWS, book->taken};
        return;
    }
    if (warp() < stretches) {
        const long long first = 32 * warp(), word = first + lane();
        if (marks) {
            unsigned bits = 0, soon_bits = 0;
#pragma unroll 8
            for (int w = 0; w < 32; w++) {
                const long long rank = 32 * (first + w) + lane();
                const int row = rank < count ? order[rank] : -1;
                const unsigned marked = __ballot_sync(ALL, row >= 0 && marks[row]);
                const unsigned marked_soon = __ballot_sync(ALL, row >= 0 && used_soon && used_soon[row % rows]);
                if (w == lane()) bits = marked, soon_bits = marked_soon;
            }
            wanted[word] = bits;
            soon[word] = soon_bits;
            const int used = __reduce_add_sync(ALL, __popc(bits));
            if (lane() == 0 && used) atomicAdd((unsigned long long*)&book->used, (unsigned long long)used);
        }
        const int missing_here = __reduce_add_sync(ALL, __popc(all.missing(word)));
        const int late_here = __reduce_add_sync(ALL, __popc(all.late(word))), early_here = __reduce_add_sync(ALL, __popc(all.early(word)));
        if (lane() == 0) {
            missing[warp()] = missing_here;
            late[warp()] = late_here;
            early[warp()] = early_here;
        }
    }
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();

    const long long wanting = sum_before(missing, stretches);
    const long long all_late = sum_before(late, stretches), all_early = sum_before(early, stretches);
    if (threadIdx.x) return;
    const long long free = slots - book->taken;
    const long long leaving = min(max(wanting - free, 0ll), all_late + all_early), coming = min(wanting, free + leaving);
    const long long leaving_late = min(leaving, all_late);
    *orders = {coming, coming - leaving, all_late - leaving_late, all_early - (leaving - leaving_late), book->taken};
    book->taken += coming - leaving;
    book->read += coming;
    book->written += leaving;
    book->lacking = notice->lacking = wanting - coming;
    if (final && wanting > coming) notice->refused = wanting - coming;
    *done = 0;
}

// Calls visit(number, rank) for each bit of the lane's word, numbers counting up from `before` through the warp's words.
template <class Visit>
__device__ void each_bit(unsigned bits, long long word, int before, Visit visit) {
    int number = before + sum_up_to_here(__popc(bits)) - __popc(bits);
    for (; bits; bits &= bits - 1) visit(number++, 32 * word + __ffs(bits) - 1);
}

// Lists the idle rows that leave, the least used; the missing rows that come, the most used where not all can; and for these their slots.
extern "C" __global__ void list(
    ROWS, const int* order, const int* slot_of, const int* missing, const int* late, const int* early, int stretches, const Orders* orders,
    int* coming, int* leaving, int* slots) {
    const Rows all = GATHERED;
    if (warp() >= stretches) return;
    const long long word = 32 * warp() + lane();
    const int at_once = orders->at_once, staying_late = orders->late, staying_early = orders->early, taken = orders->taken;
    const int most = orders->coming, leaving_late = late[stretches] - staying_late;
    unsigned changed = 0;
    const auto leave = [&](int number, long long rank) {
        leaving[number] = order[rank];
        slots[at_once + number] = slot_of[order[rank]];
        changed |= 1u << rank % 32;
    };
    if (late[warp() + 1] > staying_late)
        each_bit(all.late(word), word, late[warp()] - staying_late, [&](int number, long long rank) {
            if (number >= 0) leave(number, rank);
        });
    if (early[warp() + 1] > staying_early)
        each_bit(all.early(word), word, early[warp()] - staying_early, [&](int number, long long rank) {
            if (number >= 0) leave(leaving_late + number, rank);
        });
    if (missing[warp()] < most)
        each_bit(all.missing(word), word, missing[warp()], [&](int number, long long rank) {
            if (number >= most) return;
            coming[number] = order[rank];
            if (number < at_once) slots[number] = taken + number;
            changed |= 1u << rank % 32;
        });
    if (changed) here[word] ^= changed;
}
