// Find the unique rows of ids, and the place of each id among them, by a bit for each row.

#include "common.cuh"

// Ids of several tables are looked up together. Row v belongs to rank v % ranks, and is row
// v / ranks there. A table has a span of the words for each rank, which have a bit for each row;
// spans stand by rank, then by table. The rows of a span are numbered from first_row on.
struct Span {
    long long ids_end;  // of the table, unless all tables have as many
    long long first_word, first_row;
    long long rows;     // of the whole table
    long long padding;  // a row of the span, or -1
};

struct Found {  // of a span
    long long begin;            // unique rows of the spans before
    long long least, greatest;  // ids that are no rows, in the first span of a table; 0: none
    long long padding;          // 1 + the place of the padding row, or 0
};

struct Numbers {  // of a look-up
    long long unique;  // rows of all spans
    long long wrong;   // not 0 if an id is no row
    Found found[1];    // of each span
};

// Words and numbers are 0 before. Behind the words is the number of blocks that have finished, for
// is_last_block; behind `before` are the sums over the blocks.
struct LookUp {
    HOST const void* ids;
    bool narrow_ids;    // of 32 bits
    long long step;     // bytes from the ids of a table to those of the next, if `each`
    long long count;    // of all ids
    const Span* spans;
    int tables, ranks;  // ranks = 0: ids are numbers of rows of one rank, in any order
    long long each;     // ids of each table, 0 if they differ
    int gaps;           // whether -1 is no id
    Numbers* numbers;   // behind those of all spans are the words
    int* before;        // the number of rows before each word
    long long* unique;  // the rows, then -1, as all are if an id is no row; the rows in 32 bits
    int* narrow;
    long long* places;  // first the ids; then of each among the rows, 0 for one that is no row
    long long* last;    // the last id of each row, zeros before
    HOST Numbers* readback;  // gets the numbers, in CPU memory
    long long* row_count;    // gets the first

    __device__ int parts() const { return tables * max(ranks, 1); }
    __device__ unsigned* words() const { return (unsigned*)(numbers->found + parts()); }

    // Return the i-th id.
    __device__ long long id(long long i) const {
        const long long table = each ? i / each : 0, n = i - table * each;
        const char* its = (const char*)ids + table * step;
        return narrow_ids ? ((const int*)its)[n] : ((const long long*)its)[n];
    }

    // Find the word and the bit of the i-th id; return false for one that is no row.
    __device__ bool find_bit(long long id, long long i, long long* word, unsigned* bit) const {
        int at;
        if (!ranks) {
            at = find_first(tables, [&](int t) { return spans[t + 1].first_row <= id; });
            id -= spans[at].first_row;
        } else {
            at = each ? i / each : find_first(tables, [&](int t) { return spans[t].ids_end <= i; });
            if (gaps && id == -1) return false;
            if (id < 0 || id >= spans[at].rows) {
                if (id < 0) atomicMin(&numbers->found[at].least, id);
                else atomicMax(&numbers->found[at].greatest, id);
                numbers->wrong = 1;
                return false;
            }
            if (ranks > 1) {
                at += id % ranks * tables;
                id /= ranks;
            }
        }
        *word = spans[at].first_word + id / 32;
        *bit = id % 32;
        return true;
    }
};

// The unique rows of ids, by rank and sorted, and the place of each id among them, by four
// kernels in turn. `count_ids` and `list_ids` have a thread for each word.

// Set the bits of the rows. Ids in CPU memory are read only here.
extern "C" __global__ void mark_ids(LookUp look_up) {
    unsigned* words = look_up.words();
    each_thread(look_up.count, [&](long long i) {
        const long long id = look_up.id(i);
        long long word;
        unsigned bit;
        look_up.places[i] = id;
        look_up.last[i] = 0;
        if (look_up.find_bit(id, i, &word, &bit))
            if (!(words[word] >> bit & 1)) atomicOr(words + word, 1u << bit);
    });
}

// Count the rows: prefix sums over blocks.
extern "C" __global__ void count_ids(LookUp look_up) {
    unsigned* words = look_up.words();
    unsigned* done = words + threads();
    int* counts = look_up.before + threads();
    int count;
    sum_before(warp_sum(__popc(words[thread_id()])), &count);
    if (threadIdx.x == 0) counts[blockIdx.x] = count;
    if (!is_last_block(done)) return;
    const int all = exclusive_sums(counts, gridDim.x);
    if (threadIdx.x) return;
    look_up.numbers->unique = all;
    *done = 0;
}

// List the rows, unless an id is no row.
extern "C" __global__ void list_ids(LookUp look_up) {
    int* before = look_up.before;
    const long long word = thread_id();
    const int at = find_first(
        look_up.parts(), [&](int s) { return look_up.spans[s + 1].first_word <= word; });
    const Span span = look_up.spans[at];
    Found* found = look_up.numbers->found + at;
    const unsigned bits = look_up.words()[word];
    const bool valid = !look_up.numbers->wrong;
    const int* counts = before + threads();
    int of_block;
    const int of_warp = counts[blockIdx.x] + sum_before(warp_sum(__popc(bits)), &of_block);
    before[word] = of_warp + prefix_sum(__popc(bits)) - __popc(bits);
    if (word == span.first_word) found->begin = before[word];
    each_bit(bits, word, of_warp, [&](int n, long long position) {
        if (!valid) return;
        const long long row = position - 32 * span.first_word;
        const long long numbered = span.first_row + row;
        look_up.unique[n] = numbered;
        look_up.narrow[n] = numbered;
        if (row == span.padding) found->padding = n + 1;
    });
}

// Find the places of the ids, and copy the numbers.
extern "C" __global__ void place_ids(LookUp look_up) {
    const Numbers* numbers = look_up.numbers;
    Numbers* readback = look_up.readback;
    const unsigned* words = look_up.words();
    const long long listed = numbers->wrong ? 0 : numbers->unique;
    each_thread(look_up.count, [&](long long i) {
        if (i >= listed) look_up.unique[i] = -1;
        long long word;
        unsigned bit, place = 0;
        if (look_up.find_bit(look_up.places[i], i, &word, &bit)) {
            place = look_up.before[word] + __popc(words[word] & below(bit));
            atomicMax(look_up.last + place, i);
        }
        look_up.places[i] = place;
    });
    each_thread(look_up.parts(), [&](long long s) { readback->found[s] = numbers->found[s]; });
    if (thread_id() == 0) {
        *look_up.row_count = readback->unique = numbers->unique;
        readback->wrong = numbers->wrong;
    }
}
