#pragma once

// Unique rows of a table that a batch touches, and their gradients.

// Kernel parameters that make up `TableGrads` of batch.py. index: of each row of the table among
// the unique ones, or -1. rows: the row of each index. count: number of unique rows.
#define GRADS(which)                                                                           \
    int *index_##which, int *rows_##which, float *grads_##which, int *pairs_##which,           \
        unsigned long long *count_##which

// Add a row to the unique ones unless it is there; it gets the next free index, without sorting.
// Return whether it was added.
__device__ bool add_unique(int row, int* index, int* rows, unsigned long long* count) {
    // -2 marks a row whose index another thread is about to write.
    if (index[row] != -1 || atomicCAS(index + row, -1, -2) != -1) return false;
    const int next = atomicAdd(count, 1ull);
    rows[next] = row;
    index[row] = next;
    return true;
}

// Return the index of a row, which is added to the unique ones if it is not among them.
__device__ int unique_index(int row, int* index, int* rows, unsigned long long* count) {
    add_unique(row, index, rows, count);
    int found;
    do
        found = *(volatile int*)(index + row);
    while (found < 0);  // another thread is about to write it
    return found;
}

// What each rank of a host lets the others read, at addresses of this process: records of both
// tables, and its `Window` (cuda_shard.py).
struct Peer {
    const void* records_in;
    const int* slot_in;
    const void* records_out;
    const int* slot_out;
    float *grads_in, *grads_out;
    int *pairs_in, *pairs_out;
    const int *rows_in, *rows_out;
    const unsigned long long* counts;
    long long* facts;
    int* flags;
    const bool* marks;
};

// Kernel parameters: where each rank has the gradients of the unique rows of both tables, -1 for
// none: those of rank r begin at element r * room.
#define PLACES const Peer *peers, int *places_in, int *places_out, long long room
