"""Text of random words by Zipf's law."""

import numpy as np

from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab

SENTENCE = 1000  # words


def zipf_text(rows, words, seed=0):
    """Return vocabulary and corpus of about so many words in random order.

    Word r occurs in proportion to 1 / (r + 1), and at least once.
    """
    share_V = 1 / np.arange(1, rows + 1)
    counts_V = np.maximum(1, np.rint(words * share_V / share_V.sum())).astype(np.int64)
    ids_N = np.repeat(np.arange(rows, dtype=np.int32), counts_V)
    np.random.default_rng(seed).shuffle(ids_N)
    offsets_S = np.append(np.arange(0, len(ids_N) - 1, SENTENCE), len(ids_N))
    vocab = Vocab([f"w{row}" for row in range(rows)], counts_V, len(ids_N), rows)
    return vocab, Corpus(ids_N, offsets_S, len(ids_N))
