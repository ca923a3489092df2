// Row optimizers on records in place: each row's weight, states and gradient are read once and
// written once. Each formula is the step of the torch.optim class of that name, for one element;
// what is equal for all rows of a step is computed on the CPU.
//
// Macros: STEP, one of the formulas below; STATES, the number of its states; NARROW, 1 if the last
// of them is one number a row; ELEMENT of the records; WIDE, elements of a row that are read
// together, 1 or 4; RANKS, from how many peers gradients are read, 0 for one process and for ranks
// that have exchanged them.

#include "common.cuh"
#include "element.cuh"
#include "unique.cuh"

struct Hyper {  // of optim.py: of one step; what would lose digits in float is computed on the CPU
    float lr, eps, weight_decay, lr_decay;
    float beta1, rest1, log_beta1, beta2, rest2, log_beta2;  // rest = 1 - beta
};

struct Bias {  // 1 - beta ** step for each beta; step, the row's or the table's
    float first, second, step;
    float square;  // with NARROW, the mean of the row's squared gradients
};

__device__ float squared(float g, const Bias& bias) { return NARROW ? bias.square : g * g; }

__device__ void sgd(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    w -= h.lr * (g + h.weight_decay * w);
}

__device__ void adagrad(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] += squared(g, bias);
    w -= h.lr / (1 + (bias.step - 1) * h.lr_decay) * g / (sqrtf(state[0]) + h.eps);
}

__device__ void rmsprop(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] = h.beta1 * state[0] + h.rest1 * g * g;
    w -= h.lr * g / (sqrtf(state[0]) + h.eps);
}

__device__ void adadelta(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] = h.beta1 * state[0] + h.rest1 * g * g;
    const float delta = sqrtf(state[1] + h.eps) / sqrtf(state[0] + h.eps) * g;
    state[1] = h.beta1 * state[1] + h.rest1 * delta * delta;
    w -= h.lr * delta;
}

// Return the mean of gradients, the first of two states; a single state is the second one, as with
// beta1 = 0 the mean is the gradient.
__device__ float mean(float g, float* state, const Hyper& h) {
    return STATES == 2 ? state[0] += h.rest1 * (g - state[0]) : g;
}

__device__ void adam(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    const float m = mean(g, state, h);
    float& square = state[STATES - 1];
    square = h.beta2 * square + h.rest2 * squared(g, bias);
    w -= h.lr / bias.first * m / (sqrtf(square / bias.second) + h.eps);
}

__device__ void adamw(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    w *= 1 - h.lr * h.weight_decay;
    Hyper undecayed = h;
    undecayed.weight_decay = 0;
    adam(w, g, state, undecayed, bias);
}

__device__ void adamax(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    const float m = mean(g, state, h);
    float& largest = state[STATES - 1];
    largest = fmaxf(h.beta2 * largest, fabsf(g) + h.eps);
    w -= h.lr / bias.first * m / largest;
}

constexpr float LARGEST = ELEMENT == 2 ? 65504.0f : 3.402823466e38f;  // finite Element

// Return the random bits that round a record from its element `first` on, as in
// table.py::Table.encode: 64 bits for every four elements.
__device__ unsigned long long rounding(
    long long row, long long row_width, int first, unsigned long long seed) {
    if (ELEMENT != 1) return 0;
    return splitmix64(row * (row_width / 4) + first / 4, seed) >> 16 * (first % 4);
}

// Step the unique rows in place, zero their gradients and reset their indices to -1.
// One warp steps a row. A record holds dim weights, as many numbers for each state or one, and the
// row's own count of steps at step_column, unless that is negative.
//
// stepped: grows by the number of rows. cap: if not 0, a gradient that sums more pairs is scaled
// down to the mean of `cap` of them.
// lr: of this step, in place of that of `hyper`.
// places: with RANKS = 0, gradients are those of `rows`.
// seed: mixed, for the rounding to bfloat16.
// fault: 0 as long as all is finite. A loss that is not finite sets it to this_step + 1; a number
// that the record cannot hold to this_step + bit.
// From then on no weight or state is written.
// done: unless it is null, the count of rows becomes 0; 0 before and after.
// The bounds keep 32 warps in flight, with peers too: they wait for memory most of the time.
extern "C" __global__ void __launch_bounds__(256, 4) step(
    View view, RowGrads rows, long long row_width, int dim, int step_column, int cap, Hyper hyper,
    Places places, long long* stepped, unsigned long long* fault, long long bit,
    OPTIONAL unsigned* done, float lr, float table_step, unsigned long long seed,
    const double* loss, long long this_step) {
    hyper.lr = lr;
    if (!isfinite(*loss)) atomicCAS(fault, 0, this_step + 1);
    const bool sound = isfinite(*loss) && *(volatile unsigned long long*)fault == 0;
    constexpr int WIDES = STATES + 1 - NARROW;  // fields of dim numbers
    const int lane = lane_id(), packs = dim / WIDE, narrow_at = WIDES * dim;
    const long long count = *rows.row_count, stride = warps();
    if (blockIdx.x + threadIdx.x == 0) *stepped += count;
    for (long long n = warp_id(); n < count; n += stride) {
        const int row = rows.rows_U ? rows.rows_U[n] : n;
        Element* record = view.record(row, row_width);
        Bias bias;
        bias.step = table_step;
        if (step_column >= 0) bias.step = Pack<1>::load(record, step_column).at[0] + 1;
        bias.first = -expm1f(bias.step * hyper.log_beta1);  // 1 for beta1 = 0
        bias.second = -expm1f(bias.step * hyper.log_beta2);
        int pairs = cap && !RANKS ? rows.pairs_U[n] : 0;
        int place[RANKS + 1];
#pragma unroll
        for (int rank = 0; rank < RANKS; rank++) {
            place[rank] = places.places[rank * places.room + n];
            if (cap && place[rank] >= 0) pairs += places.peers[rank].pairs[place[rank]];
        }
        const float scale = pairs > cap ? (float)cap / pairs : 1;
        const auto grads_of = [&](int rank) {
            return (Floats<WIDE>*)(places.peers[rank].grads + (long long)place[rank] * dim);
        };
        Floats<WIDE>* grads = (Floats<WIDE>*)(rows.grad_UD + n * dim);
        const auto grad_at = [&](int i) {
            Floats<WIDE> grad = {};
            if (!RANKS) grad = grads[i];
#pragma unroll
            for (int rank = 0; rank < RANKS; rank++) {
                if (place[rank] < 0) continue;
                const Floats<WIDE> part = grads_of(rank)[i];
                for (int w = 0; w < WIDE; w++) grad.at[w] += part.at[w];
            }
            for (int w = 0; w < WIDE; w++) grad.at[w] *= scale;
            return grad;
        };
        float narrow = 0, narrow_stepped = 0;
        if (NARROW) {
            float sum = 0;
            for (int i = lane; i < packs; i += 32) {
                const Floats<WIDE> grad = grad_at(i);
                const Pack<WIDE> weight = Pack<WIDE>::load(record, i);
                for (int w = 0; w < WIDE; w++) {
                    const float g = grad.at[w] + hyper.weight_decay * weight.at[w];
                    sum += g * g;
                }
            }
            bias.square = warp_sum(sum) / dim;
            narrow = Pack<1>::load(record, narrow_at).at[0];
        }
        for (int i = lane; i < packs; i += 32) {
            const Floats<WIDE> grad = grad_at(i);
            Pack<WIDE> field[STATES + 1];  // the weight, then the states
#pragma unroll
            for (int f = 0; f < WIDES; f++) field[f] = Pack<WIDE>::load(record, f * packs + i);
            for (int w = 0; NARROW && w < WIDE; w++) field[STATES].at[w] = narrow;
#pragma unroll
            for (int w = 0; w < WIDE; w++) {
                float state[STATES + 1];
                for (int s = 0; s < STATES; s++) state[s] = field[s + 1].at[w];
                STEP(field[0].at[w], grad.at[w], state, hyper, bias);
                for (int s = 0; s < STATES; s++) field[s + 1].at[w] = state[s];
            }
            bool finite = true;
#pragma unroll
            for (int f = 0; f <= STATES; f++)
                for (int w = 0; w < WIDE; w++)
                    finite &= fabsf(field[f].at[w]) <= LARGEST;  // false for NaN too
            if (sound && !finite) atomicCAS(fault, 0, this_step + bit);
#pragma unroll
            for (int f = 0; f < WIDES; f++)
                if (sound && finite) {
                    const int at = f * packs + i;
                    field[f].store(record, at, rounding(row, row_width, at * WIDE, seed));
                }
            narrow_stepped = field[STATES].at[0];
            // After the loads, which would wait for this write: 59 against 179 us for 50,700 rows.
            if (!RANKS) grads[i] = {};
#pragma unroll
            for (int rank = 0; rank < RANKS; rank++)
                if (place[rank] >= 0) grads_of(rank)[i] = {};
        }
        __syncwarp();
        if (lane == 0) {
            if (NARROW && sound && fabsf(narrow_stepped) <= LARGEST) {
                const auto random = rounding(row, row_width, narrow_at, seed);
                Pack<1>{narrow_stepped}.store(record, narrow_at, random);
            }
            if (rows.index_A) rows.index_A[row] = -1;
            if (cap && !RANKS) rows.pairs_U[n] = 0;
            for (int rank = 0; rank < RANKS; rank++) {
                if (cap && place[rank] >= 0) places.peers[rank].pairs[place[rank]] = 0;
                places.places[rank * places.room + n] = -1;
            }
            if (step_column >= 0) Pack<1>{bias.step}.store(record, step_column, 0);
        }
    }
    if (done && is_last_block(done) && threadIdx.x == 0) *rows.row_count = *done = 0;
}
