// Moves records between a table in pinned CPU memory and a page in GPU memory. A record is a multiple of 128 bytes; rows are
// sorted and unique, so that a warp's reads fall on few pages of the address translation and no two writes meet.

constexpr int UNROLL = 4;  // 16-byte loads that each thread has in flight

// Copies vector i of the page from or to the vector of its row in the table, for all i; `width` is vectors in a record.
template <bool TO_PAGE>
__device__ void move_records(float4* table, const long long* rows, long long count, int width, float4* page) {
    const long long vectors = count * width;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long base = (long long)blockIdx.x * blockDim.x + threadIdx.x; base < vectors; base += UNROLL * step) {
        float4 value[UNROLL];
        float4* target[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const long long i = base + u * step;
            if (i >= vectors) continue;
            const long long slot = i / width;
            float4* in_table = table + rows[slot] * width + (i - slot * width);
            value[u] = TO_PAGE ? *in_table : page[i];
            target[u] = TO_PAGE ? page + i : in_table;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (base + u * step < vectors) *target[u] = value[u];
    }
}

extern "C" __global__ void gather_records(float4* table, const long long* rows, long long count, int width, float4* page) {
    move_records<true>(table, rows, count, width, page);
}

extern "C" __global__ void scatter_records(float4* table, const long long* rows, long long count, int width, float4* page) {
    move_records<false>(table, rows, count, width, page);
}
