// Skip-gram with negative sampling on records in place: the loss and both gradients, as in reference.py::skipgram. One warp takes a
// center: it holds the vectors of a group of targets (the center, then its noise words) in registers while it goes through the context
// words, so that a context is read once for a group and each row of a window is added to memory once.
//
// Compiled for: DIM dimensions, WINDOW positions to either side, TARGETS of a center, ELEMENT of the records, COUNTED to count the pairs
// of each row.

#include "batch.cuh"
#include "element.cuh"

#if DIM % 4 == 0
#define LANES_WIDE 4
#else
#define LANES_WIDE 1
#endif

constexpr int VECTORS = DIM / LANES_WIDE;             // of a row
constexpr int PER_LANE = (VECTORS + 31) / 32;         // of a row that a lane holds
constexpr int HELD = PER_LANE * LANES_WIDE;           // numbers of a row that a lane holds
constexpr int GROUP = HELD >= 32 ? 1 : HELD > 8 ? 2 : HELD > 4 ? 4 : 8;  // targets held at a time; a power of two
constexpr int TAKEN = GROUP < TARGETS ? GROUP : TARGETS;  // of a group, at most
constexpr unsigned ALL = 0xffffffffu;

struct Row {
    float at[HELD];

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
        for (int h = 0; h < HELD; h++) at[h] = 0;
    }

    __device__ void add_scaled(const Row& other, float scale) {
#pragma unroll
        for (int h = 0; h < HELD; h++) at[h] += scale * other.at[h];
    }

    __device__ float dot_here(const Row& other) const {
        float sum = 0;
#pragma unroll
        for (int h = 0; h < HELD; h++) sum += at[h] * other.at[h];
        return sum;
    }

    // Adds to a row in memory that other warps add to as well.
    __device__ void add_to(float* row, int lane) const {
#pragma unroll
        for (int v = 0; v < PER_LANE; v++) {
            const int i = lane + 32 * v;
            if (i >= VECTORS) continue;
#if LANES_WIDE == 4 && __CUDA_ARCH__ >= 900
            atomicAdd((float4*)row + i, make_float4(at[4 * v], at[4 * v + 1], at[4 * v + 2], at[4 * v + 3]));
#else
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) atomicAdd(row + i * LANES_WIDE + h, at[v * LANES_WIDE + h]);
#endif
        }
    }
};

// Sums each of GROUP numbers over the warp; lane l gets the sum of number l / (32 / GROUP). Each exchange halves the numbers.
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

// A row's record is at slot_*[row], or at the row itself where slot_* is null; its gradient, and the number of pairs that it sums, at
// number_*[row].
extern "C" __global__ void skipgram(
    BATCH, const Element* input, const int* slot_in, const int* number_in, float* grad_input, int* pairs_input, const Element* output,
    const int* slot_out, const int* number_out, float* grad_output, int* pairs_output, long long row_width, double* loss, long long* pairs) {
    const Batch batch = {words, sentences, length, first, centers, windows, negatives};
    const int lane = threadIdx.x % 32;
    const int number = lane / (32 / GROUP);  // of the target in its group whose logit this lane gets
    const bool counts = lane % (32 / GROUP) == 0;
    const long long warps = (long long)gridDim.x * blockDim.x / 32;
    double lane_loss = 0;
    long long lane_pairs = 0;

    for (long long center = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; center < centers; center += warps) {
        if (!batch.has_context(center)) continue;
        for (int start = 0; start < TARGETS; start += GROUP) {
            // Lane t looks target t up; all lanes then share it. Where there is none, the center is read, and counts for nothing.
            const int mine = start + lane < TARGETS && lane < GROUP ? batch.target(center, start + lane) : -1;
            const int read = mine < 0 ? words[first + center] : mine;
            const long long my_slot = slot_out ? slot_out[read] : read;
            const long long my_number = mine < 0 ? -1 : number_out[mine];
            Row target[TAKEN], grad_target[TAKEN];
#pragma unroll
            for (int t = 0; t < TAKEN; t++) {
                const long long slot = __shfl_sync(ALL, my_slot, t);
                target[t].load(output + slot * row_width, lane);
                grad_target[t].clear();
            }
            const bool target_counts = __shfl_sync(ALL, my_number, number) >= 0;
#if COUNTED
            const int targets = __popc(__ballot_sync(ALL, my_number >= 0));
            int contexts = 0;
#endif
            const float label = start + number == 0;

            for (int base = 0; base < 2 * WINDOW; base += 32) {
                const int word = base + lane < 2 * WINDOW ? batch.context(center, base + lane) : -1;
                const long long word_slot = word < 0 ? 0 : slot_in ? slot_in[word] : word;
                const long long word_number = word < 0 ? 0 : number_in[word];
                lane_pairs += start == 0 && word >= 0;
#if COUNTED
                contexts += __popc(__ballot_sync(ALL, word >= 0));
                if (word >= 0) atomicAdd(pairs_input + word_number, targets);
#endif
                for (unsigned left = __ballot_sync(ALL, word >= 0); left; left &= left - 1) {
                    const int source = __ffs(left) - 1;
                    Row context, grad_context;
                    context.load(input + __shfl_sync(ALL, word_slot, source) * row_width, lane);
                    grad_context.clear();
                    float dots[GROUP];
#pragma unroll
                    for (int t = 0; t < GROUP; t++) dots[t] = t < TAKEN ? context.dot_here(target[t]) : 0;
                    const float logit = sum_over_warp(dots, lane);

                    const float signed_logit = label ? -logit : logit;  // the loss is softplus of this
                    const float e = __expf(-fabsf(logit));
                    const float sigmoid = (logit >= 0 ? 1 : e) / (1 + e);
                    const float error = target_counts ? sigmoid - label : 0;
                    if (counts && target_counts) lane_loss += fmaxf(signed_logit, 0) + log1pf(e);
#pragma unroll
                    for (int t = 0; t < TAKEN; t++) {
                        const float scale = __shfl_sync(ALL, error, t * (32 / GROUP));
                        grad_context.add_scaled(target[t], scale);
                        grad_target[t].add_scaled(context, scale);
                    }
                    grad_context.add_to(grad_input + __shfl_sync(ALL, word_number, source) * DIM, lane);
                }
            }
#pragma unroll
            for (int t = 0; t < TAKEN; t++) {
                const long long at = __shfl_sync(ALL, my_number, t);
                if (at >= 0) grad_target[t].add_to(grad_output + at * DIM, lane);
            }
#if COUNTED
            if (my_number >= 0) atomicAdd(pairs_output + my_number, contexts);
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
