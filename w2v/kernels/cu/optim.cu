// Row optimizers on records in place: weight, gradient and state of a row are read once and written once. Each function is the step of the
// torch.optim class of that name, for one number; what is the same for all rows of a step is worked out on the CPU.
//
// Compiled for: STEP, one of the functions below, STATES, how many states it keeps, ELEMENT of the records, and WIDE, how many numbers of a
// row go together, 1 or 4.

#include "element.cuh"

struct Hyper {  // of one step; the CPU works out what would lose digits in float
    float lr, eps, weight_decay, lr_decay, beta1, rest1, log_beta1, beta2, rest2, log_beta2;  // rest = 1 - beta
};

struct Bias {  // 1 - beta ** step, for the row's or the table's count of steps; and the step itself
    float first, second, step;
};

__device__ void sgd(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    w -= h.lr * (g + h.weight_decay * w);
}

__device__ void adagrad(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] += g * g;
    w -= h.lr / (1 + (bias.step - 1) * h.lr_decay) * g / (sqrtf(state[0]) + h.eps);
}

__device__ void rmsprop(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] = h.beta1 * state[0] + h.rest1 * g * g;
    w -= h.lr * g / (sqrtf(state[0]) + h.eps);
}

__device__ void adam(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] += h.rest1 * (g - state[0]);
    state[1] = h.beta2 * state[1] + h.rest2 * g * g;
    w -= h.lr / bias.first * state[0] / (sqrtf(state[1] / bias.second) + h.eps);
}

__device__ void adamw(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    w *= 1 - h.lr * h.weight_decay;
    Hyper undecayed = h;
    undecayed.weight_decay = 0;
    adam(w, g, state, undecayed, bias);
}

__device__ void adamax(float& w, float g, float* state, const Hyper& h, const Bias& bias) {
    g += h.weight_decay * w;
    state[0] += h.rest1 * (g - state[0]);
    state[1] = fmaxf(h.beta2 * state[1], fabsf(g) + h.eps);
    w -= h.lr / bias.first * state[0] / state[1];
}

constexpr float LARGEST = ELEMENT == 2 ? 65504.0f : 3.402823466e38f;  // number that a record holds

struct alignas(4 * WIDE) Grads {
    float at[WIDE];
};

// The random bits that round pack number i of a row's record, as in table.py::Table.encode: 64 for each four elements.
__device__ unsigned long long rounding(long long row, long long row_width, int i, unsigned long long noise) {
#if ELEMENT == 1
    const int first = i * WIDE;
    return splitmix64(row * (row_width / 4) + first / 4, noise) >> 16 * (first % 4);
#else
    return 0;
#endif
}

// A table, and what is claimed of it (sgns.cu).
struct Table {
    Element* records;
    const int* slot;
    float* grads;
    int* pairs;  // of how many pairs each gradient is the sum
    const int* rows;
    int* number;
    unsigned long long noise;  // the seed, already mixed, of the rounding to bfloat16
};
#define TABLE(which)                                                                                                          \
    Element *records_##which, const int *slot_##which, float *grads_##which, int *pairs_##which, const int *rows_##which,     \
        int *number_##which, unsigned long long noise_##which, const long long *count_##which

// Steps the claimed rows of both tables in place, zeroes their gradients and takes the claims back. A record is dim weights, then STATES
// times dim numbers, then, where `step_column` is not negative, the row's own count of steps there. One warp takes a row.
//
// count_*: how many rows are claimed, which are added to `stepped`.
// cap: where it is not 0, gradients that sum more pairs are scaled down to the mean of `cap` of them.
// A loss that is not finite, or a number that the record cannot hold, sets `fault` unless it is set, the latter with `bit` in the input
// table and the next one in the output table; from then on no record is written.
extern "C" __global__ void step(
    TABLE(in), TABLE(out), long long* stepped, long long row_width, int dim, int step_column, float table_step, int cap, float lr,
    float eps, float weight_decay, float lr_decay, float beta1, float rest1, float log_beta1, float beta2, float rest2, float log_beta2,
    const double* loss, unsigned long long* fault, long long this_step, long long bit) {
    const Table in = {records_in, slot_in, grads_in, pairs_in, rows_in, number_in, noise_in};
    const Table out = {records_out, slot_out, grads_out, pairs_out, rows_out, number_out, noise_out};
    if (!isfinite(*loss)) atomicCAS(fault, 0, this_step + 1);
    const bool sound = isfinite(*loss) && *(volatile unsigned long long*)fault == 0;
    const Hyper hyper = {lr, eps, weight_decay, lr_decay, beta1, rest1, log_beta1, beta2, rest2, log_beta2};
    const int lane = threadIdx.x % 32, packs = dim / WIDE;
    const long long warps = (long long)gridDim.x * blockDim.x / 32, inputs = *count_in, claimed = inputs + *count_out;
    if (blockIdx.x + threadIdx.x == 0) *stepped += claimed;
    for (long long claim = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; claim < claimed; claim += warps) {
        const bool output = claim >= inputs;
        const Table of = output ? out : in;
        const long long n = output ? claim - inputs : claim;
        const int row = of.rows[n];
        Element* record = of.records + (of.slot ? of.slot[row] : row) * row_width;
        Bias bias;
        bias.step = table_step;
        if (step_column >= 0) bias.step = Pack<1>::load(record, step_column).at[0] + 1;
        bias.first = -expm1f(bias.step * hyper.log_beta1);  // 1 for beta1 = 0
        bias.second = -expm1f(bias.step * hyper.log_beta2);
        const float scale = cap && of.pairs[n] > cap ? (float)cap / of.pairs[n] : 1;
        for (int i = lane; i < packs; i += 32) {
            Grads* its = (Grads*)(of.grads + n * dim) + i;
            const Grads grad = *its;
            Pack<WIDE> field[STATES + 1];  // the weight, then the states
#pragma unroll
            for (int f = 0; f <= STATES; f++) field[f] = Pack<WIDE>::load(record, f * packs + i);
#pragma unroll
            for (int w = 0; w < WIDE; w++) {
                float state[STATES + 1];
                for (int s = 0; s < STATES; s++) state[s] = field[s + 1].at[w];
                STEP(field[0].at[w], scale * grad.at[w], state, hyper, bias);
                for (int s = 0; s < STATES; s++) field[s + 1].at[w] = state[s];
            }
            bool finite = true;
#pragma unroll
            for (int f = 0; f <= STATES; f++)
                for (int w = 0; w < WIDE; w++) finite &= fabsf(field[f].at[w]) <= LARGEST;  // which no NaN is
            if (sound && !finite) atomicCAS(fault, 0, this_step + (bit << output));
#pragma unroll
            for (int f = 0; f <= STATES; f++)
                if (sound && finite) field[f].store(record, f * packs + i, rounding(row, row_width, f * packs + i, of.noise));
            *its = {};  // not before the loads, which would wait for it: 59 against 179 us for 50,700 rows
        }
        __syncwarp();
        if (lane == 0) {
            of.number[row] = -1;
            if (cap) of.pairs[n] = 0;
            if (step_column >= 0) Pack<1>{bias.step}.store(record, step_column, 0);
        }
    }
}
