#pragma once

// Rows of DIM elements that the lanes of a warp hold together.
//
// Macros: DIM, dimensions; ELEMENT of the records, see element.cuh.

#include "element.cuh"

constexpr int LANES_WIDE = DIM % 4 ? 1 : 4;    // elements of a pack
constexpr int VECTORS = DIM / LANES_WIDE;      // packs of a row
constexpr int PER_LANE = (VECTORS + 31) / 32;  // packs of a row in one lane
constexpr int LANE_ELEMENTS = PER_LANE * LANES_WIDE;  // elements of a row in one lane

struct FloatRow {  // a row of gradients in memory
    Floats<LANES_WIDE> packs[VECTORS];
};

// Call visit(i, v) for each pack i of a row that a lane has, as its v-th.
template <class Visit>
__device__ void each_pack(int lane, Visit visit) {
#pragma unroll
    for (int v = 0; v < PER_LANE; v++)
        if (lane + 32 * v < VECTORS) visit(lane + 32 * v, v);
}

struct Row {  // one lane's elements of a row
    float at[LANE_ELEMENTS];

    __device__ Floats<LANES_WIDE> pack_of(int v) const {
        Floats<LANES_WIDE> pack;
#pragma unroll
        for (int h = 0; h < LANES_WIDE; h++) pack.at[h] = at[v * LANES_WIDE + h];
        return pack;
    }

    __device__ void load(const Element* row, int lane) {
        *this = {};
        each_pack(lane, [&](int i, int v) {
            const Pack<LANES_WIDE> pack = Pack<LANES_WIDE>::load(row, i);
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) at[v * LANES_WIDE + h] = pack.at[h];
        });
    }

    __device__ void scale(float factor) {
#pragma unroll
        for (int h = 0; h < LANE_ELEMENTS; h++) at[h] *= factor;
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

    // random: 16 bits for the rounding of each element.
    __device__ void store(Element* row, int lane, unsigned long long random = 0) const {
        each_pack(lane, [&](int i, int v) {
            Pack<LANES_WIDE> pack;
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) pack.at[h] = at[v * LANES_WIDE + h];
            pack.store(row, i, random);
        });
    }

    __device__ void store(FloatRow& row, int lane) const {
        each_pack(lane, [&](int i, int v) { row.packs[i] = pack_of(v); });
    }

    __device__ void add(const FloatRow& row, int lane) {
        each_pack(lane, [&](int i, int v) {
            const Floats<LANES_WIDE> pack = row.packs[i];
#pragma unroll
            for (int h = 0; h < LANES_WIDE; h++) at[v * LANES_WIDE + h] += pack.at[h];
        });
    }

    // Add to a row in memory, atomically.
    __device__ void add_to(float* row, int lane) const {
        each_pack(lane, [&](int i, int v) {
            atomic_add((Floats<LANES_WIDE>*)row + i, pack_of(v));
        });
    }
};
