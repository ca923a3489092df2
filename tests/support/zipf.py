"""Text of random words by Zipf's law."""

from collections.abc import Sequence

import numpy as np
import torch

from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab

SENTENCE = 1000  # words, about as many as in an article


class Numbered(Sequence):
    """The words w0, w1, ...: a list of ten million would take 0.7 GB."""

    def __init__(self, count):
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, number):
        return f"w{range(self._count)[number]}"


def zipf_text(rows, words, device="cpu"):
    """Return vocabulary and corpus of about so many words in random order.

    Word r occurs in proportion to 1 / (r + 1), and at least once. Ids take 4 bytes a word of CPU
    memory, and about 40 bytes a word on the device while they are shuffled.
    """
    share_V = 1 / np.arange(1, rows + 1)
    counts_V = np.maximum(1, np.rint(words * share_V / share_V.sum())).astype(np.int64)
    total = int(counts_V.sum())
    order_N = torch.randperm(total, generator=torch.Generator(device).manual_seed(0), device=device)
    rows_V = torch.arange(rows, dtype=torch.int32, device=device)
    repeats_V = torch.from_numpy(counts_V).to(device)
    ids_N = rows_V.repeat_interleave(repeats_V, output_size=total)[order_N]
    offsets_S = np.append(np.arange(0, total - 1, SENTENCE), total)  # no sentence of one word
    vocab = Vocab(Numbered(rows), counts_V, total, rows)
    return vocab, Corpus(ids_N.cpu().numpy(), offsets_S, total)
