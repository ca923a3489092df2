// Row optimizers on records in place: weight, gradient and state of a row are read once and written once. Each function is the step of the
// torch.optim class of that name, for one number; what is the same for all rows of a step is worked out on the CPU.
//
// Compiled for: STEP, one of the functions below, and STATES, how many states it keeps.

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

// Steps the claimed rows in place (sgns.cu), zeroes their gradients and takes the claims back. A record is dim weights, then STATES times
// dim numbers, then, where `step_column` is not negative, the row's own count of steps there. One warp takes a row.
extern "C" __global__ void step(
    float* records, const int* slot, long long row_floats, float* grads, const int* rows, const int* count, int* number, int dim,
    int step_column, float table_step, float lr, float eps, float weight_decay, float lr_decay, float beta1, float rest1, float log_beta1,
    float beta2, float rest2, float log_beta2) {
    const Hyper hyper = {lr, eps, weight_decay, lr_decay, beta1, rest1, log_beta1, beta2, rest2, log_beta2};
    const int lane = threadIdx.x % 32;
    const long long warps = (long long)gridDim.x * blockDim.x / 32, claimed = *count;
    for (long long n = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < claimed; n += warps) {
        const int row = rows[n];
        float* record = records + (slot ? slot[row] : row) * row_floats;
        Bias bias;
        bias.step = step_column < 0 ? table_step : record[step_column] + 1;
        bias.first = -expm1f(bias.step * hyper.log_beta1);  // 1 for beta1 = 0
        bias.second = -expm1f(bias.step * hyper.log_beta2);
        for (int d = lane; d < dim; d += 32) {
            float state[STATES + 1];
            for (int s = 0; s < STATES; s++) state[s] = record[(s + 1) * dim + d];
            float weight = record[d];
            STEP(weight, grads[n * dim + d], state, hyper, bias);
            record[d] = weight;
            for (int s = 0; s < STATES; s++) record[(s + 1) * dim + d] = state[s];
            grads[n * dim + d] = 0;
        }
        __syncwarp();
        if (lane == 0) {
            number[row] = -1;
            if (step_column >= 0) record[step_column] = bias.step;
        }
    }
}
