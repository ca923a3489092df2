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

struct LookUp {
    const Span* spans;
    int tables, ranks;  // ranks = 0: ids are numbers of rows of one rank, in any order
    long long each;     // ids of each table, 0 if they differ
    Numbers* numbers;   // behind those of all spans are the words

    __device__ int parts() const { return tables * max(ranks, 1); }
    __device__ unsigned* words() const { return (unsigned*)(numbers->found + parts()); }

    // Find the word and the bit of the i-th id; return false for one that is no row.
    __device__ bool find_bit(long long id, long long i, long long* word, unsigned* bit) const {
        int at;
        if (!ranks) {
            at = find_first(tables, [&](int t) { return spans[t + 1].first_row <= id; });
            id -= spans[at].first_row;
        } else {
            at = each ? i / each : find_first(tables, [&](int t) { return spans[t].ids_end <= i; });
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

// Blocks of `find_rows` that have started, and that have finished a phase; zeros before.
struct Progress {
    unsigned started, marked, counted, summed, listed;
};

// Wait until so many blocks have finished a phase, and see what they wrote.
__device__ void wait_for(unsigned* done, unsigned blocks) {
    if (threadIdx.x == 0) {
        while (*(volatile unsigned*)done < blocks) __nanosleep(20);
        __threadfence();
    }
    __syncthreads();
}

// List the rows of a block's words, unless an id is no row.
__device__ void list_rows(
    const LookUp& look_up, int block, const int* counts, int* before, long long* unique,
    int* narrow) {
    const long long word = (long long)block * blockDim.x + threadIdx.x;
    const int at = find_first(
        look_up.parts(), [&](int s) { return look_up.spans[s + 1].first_word <= word; });
    const Span span = look_up.spans[at];
    Found* found = look_up.numbers->found + at;
    const unsigned bits = look_up.words()[word];
    const bool valid = !look_up.numbers->wrong;
    int of_block;
    const int of_warp = counts[block] + sum_before(warp_sum(__popc(bits)), &of_block);
    before[word] = of_warp + prefix_sum(__popc(bits)) - __popc(bits);
    if (word == span.first_word) found->begin = before[word];
    each_bit(bits, word, of_warp, [&](int n, long long position) {
        if (!valid) return;
        const long long row = position - 32 * span.first_word;
        const long long numbered = span.first_row + row;
        unique[n] = numbered;
        narrow[n] = numbered;
        if (row == span.padding) found->padding = n + 1;
    });
}

// Find the unique rows of ids, by rank and sorted, and the place of each id among them. 2 *
// id_blocks + 2 * word_blocks blocks, by the order in which they start, mark the rows, count them,
// list them and place the ids: a block waits only for blocks that have started before it. Words
// and numbers are 0 before; there is a thread for each word, and Progress stands behind the words.
//
// before: of each word, the rows of the words before it; behind these are the sums over blocks.
// unique, narrow: the list of rows, in 64 and 32 bits, unless an id is no row.
// places: 0 for an id that is no row. readback: the numbers, in CPU memory; known: the first two.
// rest: if not null, the list of rows, as long as the ids, which becomes -1 behind the rows, and as
// a whole if an id is no row. last: with `rest`, the last id of each row; zeros before.
extern "C" __global__ void find_rows(
    const long long* ids, long long count, LookUp look_up, int word_blocks, int* before,
    long long* unique, int* narrow, long long* places, HOST Numbers* readback, long long* known,
    OPTIONAL long long* rest, OPTIONAL long long* last) {
    __shared__ int started;
    const int id_blocks = gridDim.x / 2 - word_blocks;
    const long long all_words = (long long)word_blocks * blockDim.x;
    unsigned* words = look_up.words();
    Progress* progress = (Progress*)(words + all_words);
    int* counts = before + all_words;
    Numbers* numbers = look_up.numbers;
    if (threadIdx.x == 0) started = atomicAdd(&progress->started, 1u);
    __syncthreads();

    int block = started;
    if (block < id_blocks) {  // set the bits of the rows
        const auto mark = [&](long long i) {
            long long word;
            unsigned bit;
            if (look_up.find_bit(ids[i], i, &word, &bit))
                if (!(words[word] >> bit & 1)) atomicOr(words + word, 1u << bit);
        };
        each_thread(count, mark, block, id_blocks);
        finish(&progress->marked);
        return;
    }
    block -= id_blocks;
    if (block < word_blocks) {  // count the bits of each block; the last block sums the counts
        wait_for(&progress->marked, id_blocks);
        int of_block;
        sum_before(warp_sum(__popc(words[block * blockDim.x + threadIdx.x])), &of_block);
        if (threadIdx.x == 0) counts[block] = of_block;
        if (!is_last_block(&progress->counted, word_blocks)) return;
        const int all = exclusive_sums(counts, word_blocks);
        if (threadIdx.x == 0) numbers->unique = all;
        finish(&progress->summed);
        return;
    }
    block -= word_blocks;
    if (block < word_blocks) {
        wait_for(&progress->summed, 1);
        list_rows(look_up, block, counts, before, unique, narrow);
        finish(&progress->listed);
        return;
    }
    block -= word_blocks;  // place the ids
    wait_for(&progress->listed, word_blocks);
    const long long listed = numbers->wrong ? 0 : numbers->unique;
    const auto place = [&](long long i) {
        if (rest && i >= listed) rest[i] = -1;
        long long word;
        unsigned bit;
        const bool is_row = look_up.find_bit(ids[i], i, &word, &bit);
        places[i] = is_row ? before[word] + __popc(words[word] & below(bit)) : 0;
        if (rest) atomicMax(last + places[i], i);
    };
    each_thread(count, place, block, id_blocks);
    const auto copy = [&](long long s) { readback->found[s] = numbers->found[s]; };
    each_thread(look_up.parts(), copy, block, id_blocks);
    if (block || threadIdx.x) return;
    known[0] = readback->unique = numbers->unique;
    known[1] = readback->wrong = numbers->wrong;
}
