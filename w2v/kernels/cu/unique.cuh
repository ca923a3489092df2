#pragma once

// Unique rows of a table that a batch touches, and their gradients.

#include "common.cuh"

// `TableGrads` of batch.py.
struct TableGrads {
    OPTIONAL int* index_V;  // of each row of the table among the unique ones, or -1
    OPTIONAL int* rows_U;   // the row of each index
    OPTIONAL float* grad_UD;
    OPTIONAL int* pairs_U;                  // that each gradient sums
    OPTIONAL unsigned long long* row_count;  // number of unique rows

    // Add a row to the unique ones unless it is there; it gets the next free index, without
    // sorting. Return whether it was added.
    __device__ bool add(int row) const {
        // -2 marks a row whose index another thread is about to write.
        if (index_V[row] != -1 || atomicCAS(index_V + row, -1, -2) != -1) return false;
        const int next = atomicAdd(row_count, 1ull);
        rows_U[next] = row;
        index_V[row] = next;
        return true;
    }

    // Return the index of a row, which is added to the unique ones if it is not among them.
    __device__ int find_or_add(int row) const {
        add(row);
        int found;
        do
            found = *(volatile int*)(index_V + row);
        while (found < 0);  // another thread is about to write it
        return found;
    }
};

// What each rank of a host lets the others read, at addresses of this process. Lists of rows have a
// slot for each of the last batches.
struct Peer {
    const void* records_in;  // of both tables
    OPTIONAL const int* slot_in;
    const void* records_out;
    OPTIONAL const int* slot_out;
    float *grads_in, *grads_out;  // of the rows of the batch at hand
    int *pairs_in, *pairs_out;    // that each gradient sums
    const int *rows_in, *rows_out;     // the unique rows of each batch
    const unsigned long long* counts;  // their number in both tables
    long long* facts;                  // loss, pairs and fault of the rank's step
    int* flags;  // [2, N]: how often each rank has met all, in steps and in plans
    OPTIONAL const bool* marks;  // [2, N, 2, V]: of the last two pages, the rows of each rank
};

// Where each rank has the gradients of the unique rows of both tables, -1 for none: those of rank r
// begin at element r * room.
struct Places {
    OPTIONAL const Peer* peers;
    OPTIONAL int *places_in, *places_out;
    long long room;
};
