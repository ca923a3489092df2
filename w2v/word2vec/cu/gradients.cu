// Skip-gram and CBOW with negative sampling, hierarchical softmax or both, on records in place: the
// loss and both gradients, as in reference.py::gradients.
//
// One warp takes a center, and keeps a group of its targets in registers.
//
// Macros:
//   DIM                     dimensions, see row.cuh
//   WINDOW, TARGETS, PATHS  see batch.cuh
//   ELEMENT                 of the records, see element.cuh
//   COUNTED                 1 to count the pairs of each row
//   CBOW                    1 for CBOW, 0 for skip-gram
//   MEAN                    1 if CBOW predicts from the mean of the context rows, 0 from their sum
//   RANKS                   number of ranks that own the rows; 1: all rows are here
//   SHARED                  bytes of shared memory for WARPS `Window`s of at most 63 rows; then a
//                           warp of skip-gram takes consecutive centers. Or 0
//   WEIGHTED                W if pairs of skip-gram at distance d weigh (W + 1 - d) / W, 0 if 1

#include "batch.cuh"
#include "common.cuh"
#include "row.cuh"
#include "unique.cuh"

#define WARPS 8  // of a block, as launch.py starts them

constexpr int at_most(int most, int number) { return number < most ? number : most; }
constexpr int at_least(int least, int number) { return number > least ? number : least; }

// Rows that fit into a warp's registers. Skip-gram has targets, their gradients, context words and
// the gradient of one there.
constexpr int FITTING_ROWS = 96 / LANE_ELEMENTS;

// Targets in registers at a time: in CBOW a power of two; in skip-gram without paths all groups are
// of one size. And how many of them exist.
constexpr int MOST_OF_CBOW =
    LANE_ELEMENTS >= 32 ? 1 : LANE_ELEMENTS > 8 ? 2 : LANE_ELEMENTS > 4 ? 4 : 8;
constexpr int MOST = CBOW ? MOST_OF_CBOW : at_least(1, at_most(8, FITTING_ROWS / 2 - 1));
constexpr int GROUPS = at_least(1, (TARGETS + MOST - 1) / MOST);
constexpr int GROUP = CBOW || PATHS ? MOST : (TARGETS + GROUPS - 1) / GROUPS;
constexpr int TAKEN = PATHS || GROUP < TARGETS ? GROUP : TARGETS;

struct Borrowed {
    long long begin;  // where copies of other ranks' weights begin, in elements from `records_SR`
    int me;           // this rank
};

// Return where the record of a row begins, in elements from the first record. Of a row of another
// rank there is a copy of its weight, in order of index.
__device__ long long record_at(
    int row, const View& view, const RowGrads& rows, long long row_width,
    const Borrowed& borrowed) {
    if (RANKS > 1 && owner_of(row, RANKS) != borrowed.me)
        return borrowed.begin + (long long)rows.index_A[row] * DIM;
    return view.slot(RANKS > 1 ? row_of_owner(row, RANKS) : row) * row_width;
}

// Sum COUNT numbers over the warp; lane l returns the sum of number l / (32 / COUNT). Each exchange
// halves how many numbers a lane still sums.
template <int COUNT>
__device__ float sum_over_warp(float* number, int lane, int distance = 16) {
    if constexpr (COUNT > 1) {
        const bool upper = lane & distance;
#pragma unroll
        for (int n = 0; n < COUNT / 2; n++) {
            const float keep = upper ? number[n + COUNT / 2] : number[n];
            const float give = upper ? number[n] : number[n + COUNT / 2];
            number[n] = keep + __shfl_xor_sync(ALL, give, distance);
        }
        return sum_over_warp<COUNT / 2>(number, lane, distance / 2);
    }
    float sum = number[0];
    for (; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    return sum;
}

// Return the gradient of a pair's loss along its logit, sigmoid - label; 0 unless the pair counts.
// The loss is softplus(signed_logit), which `leader` adds to lane_loss. Division and logarithm are
// approximate: exact ones take a tenth of skip-gram's time.
__device__ float pair_error(
    float logit, float label, bool counts, bool leader, double& lane_loss) {
    const float signed_logit = label ? -logit : logit;
    const float e = __expf(-fabsf(logit));
    const float sigmoid = __fdividef(logit >= 0 ? 1 : e, 1 + e);
    const float error = counts ? sigmoid - label : 0;
    if (leader && counts) lane_loss += fmaxf(signed_logit, 0) + __logf(1 + e);
    return error;
}

// Add what the lanes of a warp have summed: the loss, and the number of positive pairs.
__device__ void add_sums(
    double lane_loss, long long lane_pairs, int lane, double* loss, long long* pairs) {
    for (int distance = 16; distance; distance /= 2) {
        lane_loss += __shfl_xor_sync(ALL, lane_loss, distance);
        lane_pairs += __shfl_xor_sync(ALL, lane_pairs, distance);
    }
    if (lane == 0 && lane_pairs) {
        atomicAdd(loss, lane_loss);
        atomicAdd((unsigned long long*)pairs, (unsigned long long)lane_pairs);
    }
}

// Centers of a tile: what fits into shared memory, and at most the lanes of a warp.
#define FITTING ((PATHS ? 16384 : 24576) / (4 * DIM))
#define TILE (!CBOW ? 0 : FITTING > 32 ? 32 : FITTING > 1 ? FITTING : 1)

// Rows next to the root, the last of the tree: all centers have them as targets. Their gradients
// are summed in what the tile leaves of shared memory, by each warp for itself.
#define HOT_FITTING (!PATHS ? 0 : (48896 - TILE * 4 * DIM) / (WARPS * 4 * DIM))
#define HOT (HOT_FITTING > 7 ? 7 : HOT_FITTING)

__shared__ FloatRow hot_sums[WARPS][HOT ? HOT : 1];
__shared__ unsigned hot_touched;  // bit n: row root - 2 n, of the n-th node before the root

struct HotRows {
    int root;
    unsigned touched;  // by this warp

    __device__ HotRows(const Batch& batch) : root(-1), touched(0) {
        if (!HOT) return;
        const Path path = batch.centers ? batch.path(0) : Path{0, 0};
        root = path.length ? batch.target(0, TARGETS, path) : -1;  // where all paths begin
        if (threadIdx.x == 0) hot_touched = 0;
        __syncthreads();
    }

    // Add to a row, if it is one of these.
    __device__ bool add(const Row& grad, int row, int lane) {
        const int n = (root - row) / 2;
        if (!HOT || row > root || n >= HOT) return false;
        FloatRow& shared = hot_sums[threadIdx.x / 32][n];
        Row sum = grad;
        if (touched >> n & 1) sum.add(shared, lane);
        sum.store(shared, lane);
        touched |= 1u << n;
        return true;
    }

    // Add the sums to memory. All threads of the block call this.
    __device__ void flush(const int* index, float* grads, int lane) {
        if (!HOT) return;
        const int warp = threadIdx.x / 32;
        const Row zero = {};
        for (int n = 0; n < HOT; n++)
            if (!(touched >> n & 1)) zero.store(hot_sums[warp][n], lane);
        if (lane == 0 && touched) atomicOr(&hot_touched, touched);
        __syncthreads();
        for (int n = warp; n < HOT; n += WARPS) {
            if (!(hot_touched >> n & 1)) continue;
            Row sum = {};
            for (int w = 0; w < WARPS; w++) sum.add(hot_sums[w][n], lane);
            sum.add_to(grads + (long long)index[root - 2 * n] * DIM, lane);
        }
    }
};

#if !CBOW
// Context rows that are loaded together, and their products with the targets, which are summed over
// the warp together: at most one a lane.
constexpr int TOGETHER =
    at_least(1, at_most(5, at_most(32 / TAKEN, FITTING_ROWS - 2 * TAKEN - 1)));
constexpr int PRODUCTS = TOGETHER * TAKEN;
constexpr int SUMS =
    PRODUCTS > 16 ? 32 : PRODUCTS > 8 ? 16 : PRODUCTS > 4 ? 8 : PRODUCTS > 2 ? 4 : PRODUCTS;

#define SPAN (2 * WINDOW + 1)  // positions of a window

// Sums of gradients of the words in a window; slot s is of the positions s, s + SPAN, ...
struct Window {
    FloatRow sums[SPAN];
    int index[SPAN];  // of the unique row of each sum
};
static_assert(SHARED == 0 || SHARED == WARPS * sizeof(Window));
extern __shared__ float4 windows[];

// Gradients of the words in the window of a warp's center. They are context words of the next
// centers too, so their gradients are added to memory when they leave the window.
struct SlidingWindow {
    float* grads;
    long long has_sum;  // bit s: slot s

    __device__ Window& own() const { return ((Window*)windows)[threadIdx.x / 32]; }

    __device__ void add(const Row& grad, long long at, int index, int lane) {
        if (!SHARED) {
            grad.add_to(grads + (long long)index * DIM, lane);
            return;
        }
        const int slot = (unsigned)at % SPAN;
        Row sum = grad;
        if (has_sum >> slot & 1) sum.add(own().sums[slot], lane);
        sum.store(own().sums[slot], lane);
        if (lane == 0) own().index[slot] = index;
        has_sum |= 1ll << slot;
    }

    // Add the sum of the word at a position to memory, if there is one.
    __device__ void flush(long long at, int lane) {
        if (!SHARED) return;
        const int slot = (unsigned)at % SPAN;
        if (!(has_sum >> slot & 1)) return;
        __syncwarp();  // for what lane 0 wrote
        Row sum = {};
        sum.add(own().sums[slot], lane);
        sum.add_to(grads + (long long)own().index[slot] * DIM, lane);
        __syncwarp();  // before it writes again
        has_sum &= ~(1ll << slot);
    }
};

// A warp goes through the context words with each group of targets. So a context row is read once
// per group, and the gradient of a target is added to memory once per center.
//
// Add the loss, the number of positive pairs, and the gradients of the unique rows; if COUNTED,
// also the number of pairs that each gradient sums.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 2) skipgram(
    View view, RowGrads rows, long long row_width, Borrowed borrowed, Chunk chunk, Drawn drawn,
    Tree tree, double* loss, long long* pairs) {
    const Batch batch = {chunk, drawn, tree};
    const auto record_of = [&](int row) {
        return record_at(row, view, rows, row_width, borrowed);
    };
    const int lane = threadIdx.x % 32;
    const int product = lane / (32 / SUMS);  // that this lane gets
    const int of_context = product / TAKEN, member = product % TAKEN;  // its rows
    const bool leader = lane % (32 / SUMS) == 0;  // of the lanes with the same product
    const long long begin = SHARED ? batch.centers * warp_id() / warps() : warp_id();
    const long long end = SHARED ? batch.centers * (warp_id() + 1) / warps() : batch.centers;
    const long long step = SHARED ? 1 : warps();  // else the warps of a block share context rows
    HotRows hot(batch);
    SlidingWindow sliding = {rows.grad_UD, 0};
    double lane_loss = 0;
    long long lane_pairs = 0;

    for (long long center = begin; center < end; center += step) {
        const long long at = batch.first + center;
        sliding.flush(at - WINDOW - 1, lane);
        if (!batch.has_context(center)) continue;
        const Path path = batch.path(center);
        const int targets_here = TARGETS + path.length;
        for (int start = 0; start < targets_here; start += GROUP) {
            // Lane t looks up target t, and all lanes load it. For a missing target they load
            // another row, and its error is 0.
            const bool has_target = start + lane < targets_here && lane < GROUP;
            const int target_row = has_target ? batch.target(center, start + lane, path) : -1;
            const int read_row = target_row < 0 ? batch.sure_target(center, path) : target_row;
            const long long my_record = record_of(read_row);
            const int my_index = target_row < 0 ? -1 : rows.index_A[target_row];
            Row target[TAKEN], grad_target[TAKEN] = {};
#pragma unroll
            for (int t = 0; t < TAKEN; t++)
                target[t].load(view.records_SR + __shfl_sync(ALL, my_record, t), lane);
            const bool is_target = __shfl_sync(ALL, my_index, member) >= 0;
            const int targets = COUNTED ? __popc(__ballot_sync(ALL, my_index >= 0)) : 0;
            int contexts = 0;
            const float label = batch.label(start + member, path);

            // The lanes look up 32 context words at once; the warp then takes some after others.
            for (int base = 0; base < 2 * WINDOW; base += 32) {
                const int o = base + lane;
                const int context_row = o < 2 * WINDOW ? batch.context(center, o) : -1;
                const long long context_record = context_row < 0 ? 0 : record_of(context_row);
                const int context_index = context_row < 0 ? 0 : rows.index_A[context_row];
                lane_pairs += start == 0 && context_row >= 0;
                unsigned left = __ballot_sync(ALL, context_row >= 0);
                if (COUNTED) contexts += __popc(left);
                if (COUNTED && context_row >= 0) atomicAdd(rows.pairs_U + context_index, targets);
                while (left) {
                    Row context[TOGETHER];
                    int source[TOGETHER];  // lane that has looked up the word, or -1
                    int my_source = -1;  // of the word of this lane's product
#pragma unroll
                    for (int c = 0; c < TOGETHER; c++) {
                        source[c] = __ffs(left) - 1;
                        left &= left - 1;
                        if (c == of_context) my_source = source[c];
                        // For a missing word, the first one again, with an error of 0.
                        const int lane_of = source[c] < 0 ? source[0] : source[c];
                        const long long record = __shfl_sync(ALL, context_record, lane_of);
                        context[c].load(view.records_SR + record, lane);
                    }
                    float dots[SUMS] = {};
#pragma unroll
                    for (int n = 0; n < PRODUCTS; n++)
                        dots[n] = context[n / TAKEN].partial_dot(target[n % TAKEN]);
                    const float logit = sum_over_warp<SUMS>(dots, lane);

                    const bool counts = is_target && my_source >= 0;
                    float error = pair_error(logit, label, counts, leader, lane_loss);
#if WEIGHTED
                    const int offset = base + my_source - WINDOW;  // of the word, if negative
                    const int distance = offset < 0 ? -offset : offset + 1;
                    error *= (WEIGHTED + 1 - distance) * (1.0f / WEIGHTED);
#endif
#pragma unroll
                    for (int c = 0; c < TOGETHER; c++) {
                        if (source[c] < 0) break;
                        Row grad_context = {};
#pragma unroll
                        for (int t = 0; t < TAKEN; t++) {
                            const int lane_of = (c * TAKEN + t) * (32 / SUMS);
                            const float scale = __shfl_sync(ALL, error, lane_of);
                            grad_context.add_scaled(target[t], scale);
                            grad_target[t].add_scaled(context[c], scale);
                        }
                        const int o = base + source[c];
                        const long long there = at + o - WINDOW + (o >= WINDOW);
                        const int index = __shfl_sync(ALL, context_index, source[c]);
                        sliding.add(grad_context, there, index, lane);
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < TAKEN; t++) {
                const long long index = __shfl_sync(ALL, my_index, t);
                const int row = PATHS ? __shfl_sync(ALL, target_row, t) : 0;
                if (index >= 0 && !hot.add(grad_target[t], row, lane))
                    grad_target[t].add_to(rows.grad_UD + index * DIM, lane);
            }
            if (COUNTED && my_index >= 0) atomicAdd(rows.pairs_U + my_index, contexts);
        }
    }

    for (int slot = 0; slot < SPAN; slot++) sliding.flush(slot, lane);
    hot.flush(rows.index_A, rows.grad_UD, lane);
    add_sums(lane_loss, lane_pairs, lane, loss, pairs);
}
#else
constexpr int AT_ONCE = LANE_ELEMENTS > 8 ? 2 : 4;  // context rows that are loaded together

// A block takes a tile of consecutive centers. A warp sums the context rows of a center in
// registers, and then goes through the targets. The gradient of that sum stays in shared memory: a
// context word is in the windows of many centers of the tile, so its gradient is summed there, and
// added to memory once for each tile.
//
// Add the loss, the number of centers with context words, and the gradients of the unique rows; if
// COUNTED, also the number of pairs that each gradient sums.
extern "C" __global__ void cbow(
    View view, RowGrads rows, long long row_width, Borrowed borrowed, Chunk chunk, Drawn drawn,
    Tree tree, double* loss, long long* pairs) {
    const Batch batch = {chunk, drawn, tree};
    const auto record_of = [&](int row) {
        return record_at(row, view, rows, row_width, borrowed);
    };
    HotRows hot(batch);
    __shared__ FloatRow grad_of[TILE];  // what the context words of each center get
    __shared__ int targets_of[TILE];  // number of targets of each center, if COUNTED
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int member = lane / (32 / GROUP);  // the target in the group whose logit this lane gets
    const bool leader = lane % (32 / GROUP) == 0;  // of the lanes with the same logit
    double lane_loss = 0;
    long long lane_pairs = 0;

    for (long long tile = (long long)blockIdx.x * TILE; tile < batch.centers;
         tile += (long long)gridDim.x * TILE) {
        const int tile_centers = min((long long)TILE, batch.centers - tile);
        for (int n = warp; n < tile_centers; n += WARPS) {
            const long long center = tile + n;
            if (!batch.has_context(center)) continue;  // no position below is in its window
            const Path path = batch.path(center);
            const int targets_here = TARGETS + path.length;
            // Lane t looks up target t, and all lanes load it, as above.
            Row target[TAKEN];
            int target_row;
            long long my_index;
            const auto load_targets = [&](int start) {
                const bool has_target = start + lane < targets_here && lane < GROUP;
                target_row = has_target ? batch.target(center, start + lane, path) : -1;
                const int read_row = target_row < 0 ? batch.sure_target(center, path) : target_row;
                const long long my_record = record_of(read_row);
                my_index = target_row < 0 ? -1 : rows.index_A[target_row];
#pragma unroll
                for (int t = 0; t < TAKEN; t++)
                    target[t].load(view.records_SR + __shfl_sync(ALL, my_record, t), lane);
            };
            load_targets(0);  // before the context rows, so that all are on their way together

            Row predicting = {}, grad = {};
            int contexts = 0;
            for (int base = 0; base < 2 * WINDOW; base += 32) {
                const int o = base + lane;
                const int context_row = o < 2 * WINDOW ? batch.context(center, o) : -1;
                const long long context_record = context_row < 0 ? 0 : record_of(context_row);
                unsigned left = __ballot_sync(ALL, context_row >= 0);
                contexts += __popc(left);
                while (left) {
                    Row row[AT_ONCE] = {};
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++) {
                        if (!left) continue;
                        const long long record = __shfl_sync(ALL, context_record, __ffs(left) - 1);
                        row[r].load(view.records_SR + record, lane);
                        left &= left - 1;
                    }
#pragma unroll
                    for (int r = 0; r < AT_ONCE; r++) predicting.add_scaled(row[r], 1);
                }
            }
            if (MEAN) predicting.scale(1.0f / contexts);
            lane_pairs += lane == 0;

            int counted = 0;
            for (int start = 0;;) {
                const bool counts = __shfl_sync(ALL, my_index, member) >= 0;
                float dots[GROUP];
#pragma unroll
                for (int t = 0; t < GROUP; t++)
                    dots[t] = t < TAKEN ? predicting.partial_dot(target[t]) : 0;
                const float logit = sum_over_warp<GROUP>(dots, lane);
                const float label = batch.label(start + member, path);
                const float error = pair_error(logit, label, counts, leader, lane_loss);
#pragma unroll
                for (int t = 0; t < TAKEN; t++) {
                    const float scale = __shfl_sync(ALL, error, t * (32 / GROUP));
                    const long long index = __shfl_sync(ALL, my_index, t);
                    const int row = PATHS ? __shfl_sync(ALL, target_row, t) : 0;
                    grad.add_scaled(target[t], scale);
                    if (index < 0) continue;
                    Row grad_target = predicting;
                    grad_target.scale(scale);
                    if (!hot.add(grad_target, row, lane))
                        grad_target.add_to(rows.grad_UD + index * DIM, lane);
                }
                if (COUNTED) counted += __popc(__ballot_sync(ALL, my_index >= 0));
                if (COUNTED && my_index >= 0) atomicAdd(rows.pairs_U + my_index, 1);
                start += GROUP;
                if (start >= targets_here) break;
                load_targets(start);
            }
            if (!MEAN) grad.scale(1.0f / contexts);  // see `Objective`
            grad.store(grad_of[n], lane);
            if (COUNTED && lane == 0) targets_of[n] = counted;
        }
        __syncthreads();

        // One warp takes a position of the text; its lanes find the centers that see it.
        const long long tile_at = batch.first + tile;
        const bool has_center = lane < tile_centers;
        const int window = has_center ? batch.windows[tile + lane] : 0;
        const int sentence = has_center ? batch.sentences[tile_at + lane] : 0;
        const long long end = min(batch.length, tile_at + tile_centers + WINDOW);
        for (long long base = max(0ll, tile_at - WINDOW) + warp; base < end;
             base += 32 * WARPS) {
            // The lanes look up 32 positions at once; the warp then takes one after another.
            const long long my_at = base + lane * WARPS;
            const int my_sentence = my_at < end ? batch.sentences[my_at] : 0;
            const long long my_index =
                my_at < end ? rows.index_A[2 * batch.words[my_at]] : -1;
            for (int source = 0; source < 32; source++) {
                const long long at = base + source * WARPS;
                if (at >= end) break;
                const int distance = abs((int)(at - tile_at) - lane);
                const int its_sentence = __shfl_sync(ALL, my_sentence, source);
                const long long index = __shfl_sync(ALL, my_index, source);
                const bool is_context =
                    has_center && distance > 0 && distance <= window && its_sentence == sentence;
                unsigned left = __ballot_sync(ALL, is_context);
                if (!left) continue;
                if (COUNTED && is_context)
                    atomicAdd(rows.pairs_U + index, targets_of[lane]);
                Row grad = {};
                for (; left; left &= left - 1) grad.add(grad_of[__ffs(left) - 1], lane);
                grad.add_to(rows.grad_UD + index * DIM, lane);
            }
        }
        __syncthreads();  // before the next tile's gradients take the place of these
    }
    hot.flush(rows.index_A, rows.grad_UD, lane);
    add_sums(lane_loss, lane_pairs, lane, loss, pairs);
}
#endif
