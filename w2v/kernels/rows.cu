// Moves records between rows of a table in pinned CPU memory and slots in GPU memory. A record is a multiple of 16 bytes; rows are
// sorted and unique, so that what is in flight falls on few pages of the address translation and no two writes meet.

constexpr int UNROLL = 4;  // 16-byte loads that each thread has in flight

// One warp copies the record of rows[n] to or from slots[n], or slot n where `slots` is null; `width` is 16-byte vectors in a record.
template <bool TO_GPU>
__device__ void move_records(float4* table, const long long* rows, float4* records, const long long* slots, long long count, int width) {
    const int lane = threadIdx.x % 32;
    const long long warps = (long long)gridDim.x * blockDim.x / 32;
    for (long long n = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32; n < count; n += warps) {
        float4* in_table = table + rows[n] * width;
        float4* in_slot = records + (slots ? slots[n] : n) * width;
        const float4* from = TO_GPU ? in_table : in_slot;
        float4* to = TO_GPU ? in_slot : in_table;
        for (int first = lane; first < width; first += 32 * UNROLL) {
            float4 value[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (first + 32 * u < width) value[u] = from[first + 32 * u];
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                if (first + 32 * u < width) to[first + 32 * u] = value[u];
        }
    }
}

#define ARGUMENTS float4 *table, const long long *rows, float4 *records, const long long *slots, long long count, int width

extern "C" __global__ void gather_records(ARGUMENTS) {
    move_records<true>(table, rows, records, slots, count, width);
}

extern "C" __global__ void scatter_records(ARGUMENTS) {
    move_records<false>(table, rows, records, slots, count, width);
}
