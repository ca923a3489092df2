// Plan the moves of a cache of GPU rows, on the GPU: which rows are loaded into which slots, and
// which are evicted for them.
//
// A row's state is some bits at the place of its number, and a number of uses. A warp handles a
// stretch of 32 words of 32 bits, one word per lane.
//
// `survey` counts the misses and the evictable rows of each stretch; its last block sums the counts
// and decides how many rows are loaded and evicted. `list` then writes their row ids and slots.
// Rows are evicted from the last, in word2vec those of rare words, and those that are used soon or
// more often than a limit after all others.

#include "common.cuh"

constexpr int MOST_ROWS = 0x7fffffff;
constexpr int USE_BITS = 4;        // of the number of uses of a row
constexpr int HIGHEST_LIMIT = 12;  // of uses, at which all numbers are halved

struct Totals {  // over all plans
    long long allocated;            // slots used so far; those from here on are empty
    long long used, read, written;  // rows
    long long limit;                // rows with more uses are evicted last
};

struct Plan {
    long long loads;                  // rows to load
    long long into_empty;             // those of them that go into empty slots
    long long kept_first, kept_last;  // evictable rows that stay, of each kind in Bits
    long long allocated;              // slots in use before this plan
    long long unplaced;               // misses that found no slot
};

struct Moves {  // of moves.py
    int *loaded, *evicted;
    int* slots;  // of the loaded rows
    Plan* plan;
};

struct Notice {  // in CPU memory
    long long unplaced;  // as in Plan
    long long refused;   // not 0 once rows found no slot though nothing else was in use
};

struct Bits {  // of rows
    unsigned* wanted;                 // by this plan
    OPTIONAL const unsigned* in_use;  // wanted by the previous plan; null when it is done
    unsigned* cached;        // in a slot, or about to be loaded
    unsigned* late;          // evicted after all others; 0 once a plan has placed all its rows

    __device__ unsigned misses(long long word) const { return wanted[word] & ~cached[word]; }
    __device__ unsigned evictable(long long word) const {
        return cached[word] & ~wanted[word] & ~(in_use ? in_use[word] : 0);
    }
    __device__ unsigned evict_first(long long word) const { return evictable(word) & ~late[word]; }
    __device__ unsigned evict_last(long long word) const { return evictable(word) & late[word]; }
};

// What `survey` counts, as prefix sums over the stretches.
struct RowCounts {
    int *misses, *evict_first, *evict_last;
    int stretches;
};

// Count a use of the used rows of a word; return the rows with more than `limit` uses. Numbers have
// USE_BITS bits and stay at the greatest: uses[b * words] has bit b of each. halve: halve them
// first.
__device__ unsigned count_uses(
    unsigned* uses, long long words, unsigned used, long long limit, bool halve) {
    unsigned bits[USE_BITS + 1] = {}, carry = used;
#pragma unroll
    for (int b = 0; b < USE_BITS; b++) bits[b] = uses[b * words];
#pragma unroll
    for (int b = 0; b < USE_BITS; b++) {
        const unsigned bit = halve ? bits[b + 1] : bits[b];
        bits[b] = bit ^ carry;
        carry &= bit;
    }
    unsigned more = 0, equal = ALL;
#pragma unroll
    for (int b = USE_BITS - 1; b >= 0; b--) {
        bits[b] |= carry;  // beyond the last bit: the number stays
        if (used || halve) uses[b * words] = bits[b];
        const unsigned of_limit = limit >> b & 1 ? ALL : 0;
        more |= equal & bits[b] & ~of_limit;
        equal &= ~(bits[b] ^ of_limit);
    }
    return more;
}

// What a page needs. Without marks, Bits::wanted and Bits::late have their bits from mark_rows.
// Rows with more than totals->limit uses become late too; this limit rises where others do not
// suffice. Without `uses`, rows that the previous plan left unplaced are placed.
struct Wanted {
    OPTIONAL const bool* marks;      // whether each row is wanted
    OPTIONAL const bool* used_soon;  // whether each row is used soon
    OPTIONAL unsigned* uses;         // see count_uses, as for halve
    bool is_counted;                 // whether the wanted rows have been used
    bool halve;
};

// Count the moves of a plan.
//
// final: no other plan is computing, so a miss without a slot is refused.
// done: 0 before and after.
extern "C" __global__ void survey(
    Bits all, Wanted page, long long count, RowCounts counts, long long slots,
    bool final, unsigned* done, Totals* totals, Plan* plan,
    HOST Notice* notice) {
    const bool *marks = page.marks, *used_soon = page.used_soon;
    const int stretches = counts.stretches;
    const bool is_new = page.uses;
    if (!is_new && plan->unplaced == 0) {  // nothing is left to place
        if (blockIdx.x + threadIdx.x == 0)
            *plan = {0, 0, MOST_ROWS, MOST_ROWS, totals->allocated, 0};
        return;
    }
    const bool halve = page.halve || totals->limit >= HIGHEST_LIMIT;
    const long long limit = max(1ll, totals->limit >> halve);

    // Each warp turns the marks of its stretch into bits, or counts uses, and then the moves.
    if (warp_id() < stretches) {
        const long long first = 32 * warp_id(), word = first + lane_id();
        if (marks) {
            unsigned bits = 0, soon_bits = 0;
#pragma unroll 8
            for (int w = 0; w < 32; w++) {
                const long long row = 32 * (first + w) + lane_id();
                const unsigned marked = __ballot_sync(ALL, row < count && marks[row]);
                const unsigned marked_soon =
                    __ballot_sync(ALL, row < count && used_soon && used_soon[row]);
                if (w == lane_id()) {
                    bits = marked;
                    soon_bits = marked_soon;
                }
            }
            all.wanted[word] = bits;
            all.late[word] = soon_bits;
        }
        if (is_new) {
            const unsigned used = page.is_counted ? all.wanted[word] : 0;
            all.late[word] |= count_uses(page.uses + word, 32ll * stretches, used, limit, halve);
        }
        const int used = is_new ? warp_sum(__popc(all.wanted[word])) : 0;
        const int miss_count = warp_sum(__popc(all.misses(word)));
        const int first_count = warp_sum(__popc(all.evict_first(word)));
        const int last_count = warp_sum(__popc(all.evict_last(word)));
        if (lane_id() == 0) {
            if (used) atomicAdd((unsigned long long*)&totals->used, (unsigned long long)used);
            counts.misses[warp_id()] = miss_count;
            counts.evict_first[warp_id()] = first_count;
            counts.evict_last[warp_id()] = last_count;
        }
    }

    if (!is_last_block(done)) return;
    const long long all_misses = exclusive_sums(counts.misses, stretches);
    const long long all_first = exclusive_sums(counts.evict_first, stretches);
    const long long all_last = exclusive_sums(counts.evict_last, stretches);
    if (threadIdx.x) return;
    const long long empty = slots - totals->allocated;
    const long long evictions = min(max(all_misses - empty, 0ll), all_first + all_last);
    const long long loads = min(all_misses, empty + evictions), unplaced = all_misses - loads;
    const long long from_first = min(evictions, all_first), from_last = evictions - from_first;
    *plan = {loads, loads - evictions, all_first - from_first, all_last - from_last,
             totals->allocated, unplaced};
    totals->allocated += loads - evictions;
    totals->read += loads;
    totals->written += evictions;
    notice->unplaced = unplaced;
    if (final && unplaced) notice->refused = unplaced;
    if (is_new) totals->limit = limit + (from_last > 0);
    *done = 0;
}

// List the rows to load, the first misses, and the slot of each; and the rows to evict, the last of
// those evictable. all, counts: those of `survey`. slot_of: the slot of each row, updated when the
// rows move (rows.cu).
// next_wanted: bits of the next plan, which become 0; may be those in use.
extern "C" __global__ void list(
    Bits all, RowCounts counts, const int* slot_of, Moves moves, unsigned* next_wanted) {
    const Plan* plan = moves.plan;
    int *loaded = moves.loaded, *evicted = moves.evicted, *slots = moves.slots;
    if (warp_id() >= counts.stretches) return;
    const long long word = 32 * warp_id() + lane_id();
    const int into_empty = plan->into_empty, kept_first = plan->kept_first;
    const int kept_last = plan->kept_last, allocated = plan->allocated;
    const int loads = plan->loads;
    const int evicted_first = counts.evict_first[counts.stretches] - kept_first;
    unsigned changed = 0;
    const auto evict = [&](unsigned bits, int sum, int offset) {
        each_bit(bits, word, sum, [&](int n, long long row) {
            if (n < 0) return;
            evicted[offset + n] = row;
            slots[into_empty + offset + n] = slot_of[row];
            changed |= 1u << row % 32;
        });
    };
    if (counts.evict_first[warp_id() + 1] > kept_first)
        evict(all.evict_first(word), counts.evict_first[warp_id()] - kept_first, 0);
    if (counts.evict_last[warp_id() + 1] > kept_last)
        evict(all.evict_last(word), counts.evict_last[warp_id()] - kept_last, evicted_first);
    const int miss_sum = counts.misses[warp_id()];
    if (miss_sum < loads)
        each_bit(all.misses(word), word, miss_sum, [&](int n, long long row) {
            if (n >= loads) return;
            loaded[n] = row;
            if (n < into_empty) slots[n] = allocated + n;
            changed |= 1u << row % 32;
        });
    if (changed) all.cached[word] ^= changed;
    if (!plan->unplaced) all.late[word] = 0;
    next_wanted[word] = 0;  // last, as it may be in_use
}

// Set the bits of rows, where a row's position is its number. Negative rows are skipped.
extern "C" __global__ void mark_rows(const long long* rows, long long count, unsigned* words) {
    each_thread(count, [&](long long i) {
        if (rows[i] >= 0) atomicOr(words + rows[i] / 32, 1u << rows[i] % 32);
    });
}
