// Unique rows without sorting: each row gets the next free index when it is first added.

// Add a row unless it is there. Its index is number[row], -1 before; rows[number[row]] is the row.
__device__ void add_unique(int row, int* number, int* rows, unsigned long long* count) {
    // -2 marks a row whose index another thread is about to write.
    if (number[row] != -1 || atomicCAS(number + row, -1, -2) != -1) return;
    const int next = atomicAdd(count, 1ull);
    rows[next] = row;
    number[row] = next;
}
