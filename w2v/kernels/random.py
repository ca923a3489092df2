"""Random bits, a function of a counter and a seed alone: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), as in kernels/bits.cuh."""

from __future__ import annotations

from torch import Tensor


def splitmix64(counter: Tensor, mixed_seed: int) -> Tensor:
    """64 bits for each number of the counter, int64."""
    bits = counter * signed(0x9E3779B97F4A7C15) + signed(mixed_seed)
    bits = (bits ^ shift_right(bits, 30)) * signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shift_right(bits, 27)) * signed(0x94D049BB133111EB)
    return bits ^ shift_right(bits, 31)


def shift_right(value: Tensor, by: int) -> Tensor:
    """Of unsigned numbers, in signed ones."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def mix(seed: int) -> int:
    """A seed of 64 bits, unsigned, that differs in many of them from those of other seeds."""
    seed = (seed + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
    return seed ^ (seed >> 32)


def signed(value: int) -> int:
    """Of 64 bits."""
    return value - 2**64 if value >= 2**63 else value
