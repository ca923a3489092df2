#pragma once

// Unique rows that a batch touches, and their gradients.

#include "common.cuh"

// `RowGrads` of word2vec/batch.py.
struct RowGrads {
    OPTIONAL int* index_A;  // of each row among the unique ones, or -1
    OPTIONAL int* rows_U;   // the row of each index
    OPTIONAL float* grad_UD;
    OPTIONAL int* pairs_U;                  // that each gradient sums
    OPTIONAL unsigned long long* row_count;  // number of unique rows

    // Add a row to the unique ones unless it is there; it gets the next free index, without
    // sorting. Return whether it was added.
    __device__ bool add(int row) const {
        // -2 marks a row whose index another thread is about to write.
        if (index_A[row] != -1 || atomicCAS(index_A + row, -1, -2) != -1) return false;
        // One addition for the threads of the warp that are here.
        const unsigned here = __activemask();
        const int leader = __ffs(here) - 1;
        int first = 0;
        if (lane_id() == leader) first = atomicAdd(row_count, (unsigned long long)__popc(here));
        const int next = __shfl_sync(here, first, leader) + __popc(here & below(lane_id()));
        rows_U[next] = row;
        index_A[row] = next;
        return true;
    }

    // Return the index of a row, which is added to the unique ones if it is not among them.
    __device__ int find_or_add(int row) const {
        add(row);
        int found;
        do
            found = *(volatile int*)(index_A + row);
        while (found < 0);  // another thread is about to write it
        return found;
    }
};

// What each rank of a host lets the others read, at addresses of this process. Lists of rows have a
// slot for each of the last batches.
struct Peer {
    const void* records;
    OPTIONAL const int* slot_of;
    float* grads;  // of the rows of the batch at hand
    int* pairs;    // that each gradient sums
    const int* rows;                   // the unique rows of each batch
    const unsigned long long* counts;  // their number
    long long* facts;                  // loss, pairs and fault of the rank's step
    int* flags;  // [2, N]: how often each rank has met all, in steps and in plans
    OPTIONAL const bool* marks;  // [2, N, A]: of the last two pages, the rows of each rank
};

// Where each rank has the gradients of the unique rows, -1 for none: those of rank r begin at
// element r * room.
struct Places {
    OPTIONAL const Peer* peers;
    OPTIONAL int* places;
    long long room;
};

// Both rows of word w belong to rank w % ranks; there they are rows of word w / ranks.
__device__ int owner_of(int row, int ranks) { return row / 2 % ranks; }
__device__ int row_of_owner(int row, int ranks) { return row / 2 / ranks * 2 + row % 2; }
