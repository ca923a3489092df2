// Moves records between rows of a table in pinned CPU memory and slots in GPU memory. A record is a multiple of 128 bytes; rows
// are sorted and unique, so that a warp's reads fall on few pages of the address translation and no two writes meet.

constexpr int UNROLL = 4;  // 16-byte loads that each thread has in flight

// Copies the record of rows[u] to or from slots[u], or slot u where `slots` is null, for all u; `width` is vectors in a record.
template <bool TO_GPU>
__device__ void move_records(float4* table, const long long* rows, float4* records, const long long* slots, long long count, int width) {
    const long long vectors = count * width;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long base = (long long)blockIdx.x * blockDim.x + threadIdx.x; base < vectors; base += UNROLL * step) {
        float4 value[UNROLL];
        float4* target[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long i = base + u * step;
            if (i >= vectors) continue;
            const long long n = i / width, offset = i - n * width;
            float4* in_table = table + rows[n] * width + offset;
            float4* in_slot = records + (slots ? slots[n] : n) * width + offset;
            value[u] = TO_GPU ? *in_table : *in_slot;
            target[u] = TO_GPU ? in_slot : in_table;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (base + u * step < vectors) *target[u] = value[u];
    }
}

#define ARGUMENTS float4 *table, const long long *rows, float4 *records, const long long *slots, long long count, int width

extern "C" __global__ void gather_records(ARGUMENTS) {
    move_records<true>(table, rows, records, slots, count, width);
}

extern "C" __global__ void scatter_records(ARGUMENTS) {
    move_records<false>(table, rows, records, slots, count, width);
}
