// Skip-gram with negative sampling on records in place: the loss and both gradients, as in
// reference.py::skipgram.
//
// One warp takes a center. It keeps a group of targets (the center, then its negatives) in
// registers while it goes through the context words. So a context row is read once per group, and
// the gradient of a target is added to memory once per center.
//
// Macros: DIM, dimensions; WINDOW and TARGETS as in batch.cuh; ELEMENT of the records; COUNTED, 1
// to count the pairs of each row.

#include "batch.cuh"
#include "common.cuh"
#include "element.cuh"
#include "unique.cuh"

#if DIM % 4 == 0
#define LANES_WIDE 4
#else
#define LANES_WIDE 1
#endif

constexpr int VECTORS = DIM / LANES_WIDE;      // packs of a row
constexpr int PER_LANE = (VECTORS + 31) / 32;  // packs of a row in one lane
constexpr int LANE_ELEMENTS = PER_LANE * LANES_WIDE;  // elements of a row in one lane
// Targets in registers at a time, a power of two; and how many of them exist.
constexpr int GROUP = LANE_ELEMENTS >= 32 ? 1 : LANE_ELEMENTS > 8 ? 2 : LANE_ELEMENTS > 4 ? 4 : 8;
constexpr int TAKEN = GROUP < TARGETS ? GROUP : TARGETS;

struct Row {  // one lane's elements of a row
    float at[LANE_ELEMENTS];

    __device__ void load(const Element* row, int lane) {
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) {
            const int i = lane + 32 * v;
            Pack<LANES_WIDE> pack = {};
            if (i < VECTORS) pack = Pack<LANES_WIDE>::load(row, i);
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) at[v * LANES_WIDE + h] = pack.at[h];
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int h = 0; h < LANE_ELEMENTS; h++) at[h] = 0;
    }

    __device__ void add_scaled(const Row& other, float scale) {
#pragma unroll
        for (int h = 0; h < LANE_ELEMENTS; h++) at[h] += scale * other.at[h];
    }

    __device__ float partial_dot(const Row& other) const {
        float sum = 0;
#pragma unroll
        for (int h = 0; h < LANE_ELEMENTS; h++) sum += at[h] * other.at[h];
        return sum;
    }

    // Add to a row in memory, atomically, as other warps may add to it too.
    __device__ void add_to(float* row, int lane) const {
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) {
            const int i = lane + 32 * v;
            if (i >= VECTORS) continue;
            const float* from = at + LANES_WIDE * v;
#if LANES_WIDE == 4 && __CUDA_ARCH__ >= 900
            atomicAdd((float4*)row + i, make_float4(from[0], from[1], from[2], from[3]));
#else
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) atomicAdd(row + i * LANES_WIDE + h, from[h]);
#endif
        }
    }
};

// Sum GROUP numbers over the warp; lane l returns the sum of number l / (32 / GROUP). Each exchange
// halves how many numbers a lane still sums.
__device__ float sum_over_warp(float* number, int lane) {
    int distance = 16;
#pragma unroll
    for (int left = GROUP; left > 1; left /= 2, distance /= 2) {
        const bool upper = lane & distance;
#pragma unroll
        for (int n = 0; n < left / 2; n++) {
            const float keep = upper ? number[n + left / 2] : number[n];
            const float give = upper ? number[n] : number[n + left / 2];
            number[n] = keep + __shfl_xor_sync(ALL, give, distance);
        }
    }
    float sum = number[0];
    for (; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
    return sum;
}

// Add the loss, the number of positive pairs, and the gradients of the unique rows; if COUNTED,
// also the number of pairs that each gradient sums.
extern "C" __global__ void skipgram(
    BATCH, VIEW(in), GRADS(in), VIEW(out), GRADS(out), long long row_width, double* loss,
    long long* pairs) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    const int lane = threadIdx.x % 32;
    const int member = lane / (32 / GROUP);  // the target in the group whose logit this lane gets
    const bool leader = lane % (32 / GROUP) == 0;  // of the lanes with the same logit
    const long long step = warps();
    double lane_loss = 0;
    long long lane_pairs = 0;

    for (long long center = warp_id(); center < centers; center += step) {
        if (!batch.has_context(center)) continue;
        for (int start = 0; start < TARGETS; start += GROUP) {
            // Lane t looks up target t, and all lanes load it. For a missing target they load the
            // center's row, whose error is then 0.
            const bool has_target = start + lane < TARGETS && lane < GROUP;
            const int target_row = has_target ? batch.target(center, start + lane) : -1;
            const int read_row = target_row < 0 ? words[first + center] : target_row;
            const long long my_slot = slot_out ? slot_out[read_row] : read_row;
            const long long my_index = target_row < 0 ? -1 : index_out[target_row];
            Row target[TAKEN], grad_target[TAKEN];
#pragma unroll
            for (int t = 0; t < TAKEN; t++) {
                const long long slot = __shfl_sync(ALL, my_slot, t);
                target[t].load(records_out + slot * row_width, lane);
                grad_target[t].clear();
            }
            const bool counts = __shfl_sync(ALL, my_index, member) >= 0;
#if COUNTED
            const int targets = __popc(__ballot_sync(ALL, my_index >= 0));
            int contexts = 0;
#endif
            const float label = start + member == 0;

            // The lanes look up 32 context words at once; the warp then takes one after another.
            for (int base = 0; base < 2 * WINDOW; base += 32) {
                const int o = base + lane;
                const int word = o < 2 * WINDOW ? batch.context(center, o) : -1;
                const long long word_slot = word < 0 ? 0 : slot_in ? slot_in[word] : word;
                const long long word_index = word < 0 ? 0 : index_in[word];
                lane_pairs += start == 0 && word >= 0;
#if COUNTED
                contexts += __popc(__ballot_sync(ALL, word >= 0));
                if (word >= 0) atomicAdd(pairs_in + word_index, targets);
#endif
                for (unsigned left = __ballot_sync(ALL, word >= 0); left; left &= left - 1) {
                    const int source = __ffs(left) - 1;
                    Row context, grad_context;
                    const long long slot = __shfl_sync(ALL, word_slot, source);
                    context.load(records_in + slot * row_width, lane);
                    grad_context.clear();
                    float dots[GROUP];
#pragma unroll
                    for (int t = 0; t < GROUP; t++)
                        dots[t] = t < TAKEN ? context.partial_dot(target[t]) : 0;
                    const float logit = sum_over_warp(dots, lane);

                    // The loss of a pair is softplus(signed_logit), its gradient sigmoid - label.
                    const float signed_logit = label ? -logit : logit;
                    const float e = __expf(-fabsf(logit));
                    const float sigmoid = (logit >= 0 ? 1 : e) / (1 + e);
                    const float error = counts ? sigmoid - label : 0;
                    if (leader && counts) lane_loss += fmaxf(signed_logit, 0) + log1pf(e);
#pragma unroll
                    for (int t = 0; t < TAKEN; t++) {
                        const float scale = __shfl_sync(ALL, error, t * (32 / GROUP));
                        grad_context.add_scaled(target[t], scale);
                        grad_target[t].add_scaled(context, scale);
                    }
                    const long long index = __shfl_sync(ALL, word_index, source);
                    grad_context.add_to(grads_in + index * DIM, lane);
                }
            }
#pragma unroll
            for (int t = 0; t < TAKEN; t++) {
                const long long index = __shfl_sync(ALL, my_index, t);
                if (index >= 0) grad_target[t].add_to(grads_out + index * DIM, lane);
            }
#if COUNTED
            if (my_index >= 0) atomicAdd(pairs_out + my_index, contexts);
#endif
        }
    }

    for (int distance = 16; distance; distance /= 2) {
        lane_loss += __shfl_xor_sync(ALL, lane_loss, distance);
        lane_pairs += __shfl_xor_sync(ALL, lane_pairs, distance);
    }
    if (lane == 0 && lane_pairs) {
        atomicAdd(loss, lane_loss);
        atomicAdd((unsigned long long*)pairs, (unsigned long long)lane_pairs);
    }
}
