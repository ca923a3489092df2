"""Size of a page and of the lookahead window, by counting rows.

Both are found on the text itself: its first batches are drawn and their unique rows counted.

Shapes: V rows of a table, N ids of the text, n ids of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.kernels import Kernels
from w2v.kernels.batch import Batch

MOST_STEPS = 8  # of a page, a power of two: with more the CPU saves nothing that can be measured
# Share of the cache for rows of the lookahead window; with more, rows are evicted too early.
LOOKAHEAD_SHARE = 7 / 8


class Paging(NamedTuple):
    """Size of a page and of the lookahead window."""

    steps: int  # batches of a page, whose rows come to the GPU together
    lookahead: int = 0  # chunks of text after the current one whose rows are evicted last


def choose_paging(
    batches: Iterable[Batch], kernels: Kernels, marks_TV: Tensor, slots: int, steps: int = 0
) -> tuple[Paging, Tensor | None]:
    """Choose the most steps a page for which two pages fit into the cache.

    The rows of the first batches are marked in `marks_TV`, bool [2, V], which is False before.
    `slots` is the capacity of the caches of all ranks together, in rows. `steps` is given if
    configured. Returns also the marks of two pages, if they fit.
    """
    chosen: tuple[Paging, Tensor | None] = Paging(steps or 1), None
    counted = [2 * steps] if steps else [2, 4, 8, 2 * MOST_STEPS]
    for number, batch in enumerate(islice(batches, counted[-1]), start=1):
        kernels.mark(batch, marks_TV)
        if number in counted:
            if int(marks_TV.sum()) > slots:
                break
            chosen = Paging(number // 2), marks_TV.clone()
    return chosen


def choose_lookahead(
    ids_N: np.ndarray | Tensor, chunk_words: int, page_marks_TV: Tensor, slots: int
) -> int:
    """Return the longest lookahead window whose rows fit into the cache.

    A row stays on the GPU between two uses at most a window apart. The text is read from its
    beginning forward, and from its end backward, as one epoch follows the other: a word last used
    `past` chunks ago, and used next in `future` chunks, stays if past + future is in the window.
    The rows in `page_marks_TV`, those of two pages, are on the GPU anyway. `slots` is the capacity
    of the cache in rows.
    """
    device = page_marks_TV.device
    chunks = len(ids_N) // chunk_words
    rows = page_marks_TV.shape[1]
    future_V = torch.full((rows,), 2 * chunks + 2, dtype=torch.int32, device=device)
    past_V = future_V.clone()

    def note_uses(uses_V: Tensor, chunk: int, distance: int) -> None:
        part = ids_N[chunk * chunk_words : (chunk + 1) * chunk_words]
        words_n = torch.as_tensor(np.array(part)) if isinstance(part, np.ndarray) else part
        words_n = words_n.to(device).long()
        uses_V[words_n] = uses_V[words_n].clamp(max=distance)

    for window in range(1, chunks):
        note_uses(future_V, window - 1, window - 1)
        note_uses(past_V, chunks - window, window)
        stays_V = past_V + future_V <= window
        if int((page_marks_TV | stays_V).sum()) > LOOKAHEAD_SHARE * slots:
            return window - 1
    return max(0, chunks - 1)
