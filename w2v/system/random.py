"""Random bits as a function of a counter and a seed.

SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). `_splitmix64` of word2vec/cpu_loops.py and
`splitmix64` of rows/cu/common.cuh compute the same, by numba and on a GPU.
"""

from __future__ import annotations

from torch import Tensor


def splitmix64(counter: Tensor, mixed_seed: int) -> Tensor:
    """Return 64 random bits (int64) for each number of the counter."""
    bits = counter * signed(0x9E3779B97F4A7C15) + signed(mixed_seed)
    bits = (bits ^ shift_right(bits, 30)) * signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shift_right(bits, 27)) * signed(0x94D049BB133111EB)
    return bits ^ shift_right(bits, 31)


def shift_right(value: Tensor, by: int) -> Tensor:
    """Shift the bits of int64 right as if they were unsigned."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def mix(seed: int) -> int:
    """Return a 64-bit seed whose bits differ for nearby seeds."""
    # The products are modulo 2^64, as those of the unsigned integers of a GPU.
    seed = (seed + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
    return seed ^ (seed >> 32)


def signed(value: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return value - 2**64 if value >= 2**63 else value
