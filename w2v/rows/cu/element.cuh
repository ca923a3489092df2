// Elements of records: stored as float, bfloat16 or float16, read and written in packs. Arithmetic
// is in float.
//
// Macros: ELEMENT, 0 for float, 1 for bfloat16, 2 for float16.

#include "common.cuh"

#if ELEMENT == 0
typedef float Element;
#else
typedef unsigned short Element;  // the bits
#endif

__device__ float to_float(Element stored) {
#if ELEMENT == 1
    return __uint_as_float((unsigned)stored << 16);
#elif ELEMENT == 2
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(stored));
    return value;
#else
    return stored;
#endif
}

// Round as table.py::Table.encode does: float16 to nearest; bfloat16 stochastically, by 16 random
// bits, which keeps the mean.
__device__ Element to_element(float value, unsigned random) {
#if ELEMENT == 1
    return (__float_as_uint(value) + (isfinite(value) ? random & 0xffff : 0)) >> 16;
#elif ELEMENT == 2
    Element stored;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(stored) : "f"(value));
    return stored;
#else
    return value;
#endif
}

// `View` of ops.py: the records of rows, row_width elements apart.
struct View {
    Element* records_SR;
    OPTIONAL const int* slot_of_A;  // null if row r is record r

    __device__ long long slot(long long row) const { return slot_of_A ? slot_of_A[row] : row; }

    __device__ Element* record(long long row, long long row_width) const {
        return records_SR + slot(row) * row_width;
    }
};

// N adjacent elements; pack i starts at element i * N of an array.
template <int N>
struct Pack {
    float at[N];

    struct alignas(sizeof(Element) * N) Stored {
        Element at[N];
    };

    __device__ static Pack load(const Element* from, long long i) {
        const Stored stored = ((const Stored*)from)[i];
        Pack pack;
#pragma unroll
        for (int n = 0; n < N; n++) pack.at[n] = to_float(stored.at[n]);
        return pack;
    }

    // Write pack i of floats.
    __device__ void write(float* to, long long i) const {
        Floats<N> floats;
#pragma unroll
        for (int n = 0; n < N; n++) floats.at[n] = at[n];
        ((Floats<N>*)to)[i] = floats;
    }

    // random: 16 bits per element.
    __device__ void store(Element* to, long long i, unsigned long long random) const {
        Stored stored;
#pragma unroll
        for (int n = 0; n < N; n++) stored.at[n] = to_element(at[n], random >> 16 * n);
        ((Stored*)to)[i] = stored;
    }
};
