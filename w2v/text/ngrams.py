"""Character n-grams of words, hashed as fastText does.

A word is written between < and >, and cut into n-grams of UTF-8 characters. Each is hashed by
FNV-1a of 32 bits, whose bytes are signed as in fastText's files. Shapes: V words, N n-grams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

OFFSET, PRIME = 2166136261, 16777619  # of FNV-1a
CONTINUES, MASK = 0x80, 0xC0  # a byte that does not begin a character, under the mask
MOST_BUCKETS = 2_000_000  # as in fastText
ENGLISH, OTHERS = (3, 6), (2, 5)  # docs/dev/tuning.md: characters of n-grams, at least and at most
ACCENTED = 0.02  # share of letters outside a to z from which a text is not English


def lengths_of(words: Sequence[str]) -> tuple[tuple[int, int], float]:
    """Return lengths of n-grams that suit words, and what chose them.

    That is the share of letters outside a to z.
    """
    letters = "".join(words)
    share = 1 - sum(map(str.isascii, letters)) / len(letters)
    return ENGLISH if share < ACCENTED else OTHERS, share


def buckets_of(words: Sequence[str], min_n: int, max_n: int) -> tuple[int, int]:
    """Return buckets for the n-grams of words, and how many are distinct."""
    _, hashes_N = hash_words(words, min_n, max_n)
    distinct = len(np.unique(hashes_N))
    return max(1, min(distinct, MOST_BUCKETS)), distinct


def hash_words(words: Sequence[str], min_n: int, max_n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where the hashes of each word begin, and all hashes.

    int64 [V + 1] and uint32 [N]. N-grams have min_n to max_n characters; < and > alone are none.
    """
    text = np.frombuffer("".join(f"<{word}>" for word in words).encode(), np.uint8)
    sizes = np.fromiter((len(word.encode()) + 2 for word in words), np.int64, len(words))
    edges_V = np.concatenate([[0], sizes.cumsum()])
    begin_V = np.zeros(len(words) + 1, np.int64)
    count_and_hash = _compiled_loop()
    count_and_hash(text, edges_V, min_n, max_n, begin_V, np.empty(0, np.uint32))
    hashes_N = np.empty(begin_V[-1], np.uint32)
    count_and_hash(text, edges_V, min_n, max_n, begin_V, hashes_N)
    return begin_V, hashes_N


@functools.cache
def _compiled_loop() -> Callable[..., None]:
    from w2v.system.jit import compiled  # numba takes half a second

    return compiled(_count_and_hash)


def _count_and_hash(text, edges_V, min_n, max_n, begin_V, hashes_N):
    """Set where each word's n-grams begin, and their hashes.

    Hashes are set only if there is room for any.

    text: bytes of words between < and >; edges_V: where each begins, and the end.
    """
    count = 0
    for word in range(len(edges_V) - 1):
        begin_V[word] = count
        last = edges_V[word + 1]
        for first in range(edges_V[word], last):
            if text[first] & MASK == CONTINUES:
                continue
            hashed, end, n = np.uint32(OFFSET), first, 0
            while end < last and n < max_n:
                # A whole character.
                while True:
                    signed = np.uint32(np.int32(np.int8(text[end])))
                    hashed = np.uint32((hashed ^ signed) * np.uint32(PRIME))
                    end += 1
                    if end == last or text[end] & MASK != CONTINUES:
                        break
                n += 1
                is_edge = n == 1 and (first == edges_V[word] or end == last)
                if n >= min_n and not is_edge:
                    if len(hashes_N):
                        hashes_N[count] = hashed
                    count += 1
    begin_V[len(edges_V) - 1] = count
