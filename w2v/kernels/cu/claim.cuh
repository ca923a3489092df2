// Rows numbered as they are met: each row that is named for the first time gets the next number.

// The number of a row is number[row], -1 before it has one; rows[number[row]] is the row.
__device__ void claim_row(int row, int* number, int* rows, unsigned long long* count) {
    if (number[row] != -1 || atomicCAS(number + row, -1, -2) != -1) return;
    const int next = atomicAdd(count, 1ull);
    rows[next] = row;
    number[row] = next;
}
