"""Training on several GPUs, of generated words or of a real text.

    python tests/bench/ranks.py [--room .1]
    torchrun --nproc-per-node 4 tests/bench/ranks.py --room .4                   (strong scaling)
    torchrun --nproc-per-node 4 tests/bench/ranks.py --batch 524288 --room .4    (weak scaling)
    torchrun --nproc-per-node 2 tests/bench/ranks.py --text wiki100.txt          (a real text)

Generated words are those of zipf.py. The batch, a pool of half as many negatives, and the cache are
shared out among the GPUs. No rank looks ahead at the text, so that one GPU does as several do.

A real text is trained in many copies, as one whose rare words differ from copy to copy, with the
default settings and batches of 65,536 centers of all ranks together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench import zipf
from tests.support.zipf import Numbered
from w2v.config import load_config
from w2v.text import Corpus, Vocab, open_corpus

FREQUENT = 20_000  # words that all copies of a text have in common


def copies(text: tuple[Vocab, Corpus], count: int) -> tuple[Vocab, Corpus]:
    """Return so many copies of a text, each with rare words of its own."""
    vocab, corpus = text
    common = min(FREQUENT, len(vocab.words))
    own_N = np.maximum(corpus.ids - common, 0) * (count - 1)
    parts = []
    for copy in range(count):
        parts.append(np.where(corpus.ids < common, corpus.ids, corpus.ids + own_N + copy))
    lengths_S = np.tile(np.diff(corpus.offsets), count)
    counts_V = np.concatenate([vocab.counts[:common] * count, vocab.counts[common:].repeat(count)])
    raw_words = corpus.raw_words * count
    words = Numbered(len(counts_V))
    return (
        Vocab(words, counts_V, raw_words, len(words)),
        Corpus(np.concatenate(parts), np.append(0, np.cumsum(lengths_S)), raw_words),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = zipf.options(__doc__, 1_000_000_000)
    parser.add_argument("--batch", type=int, help="of all ranks together (131072, 65536 of a text)")
    parser.add_argument("--room", type=float, default=0.1, help="share of the rows to cache")
    parser.add_argument("--text", help="a text file in place of generated words")
    parser.add_argument("--copies", type=int, default=30, help="of the text")
    args = parser.parse_args(arguments)
    batch = args.batch or (65_536 if args.text else 131_072)
    settings = [f"train.batch_size={batch}"]
    if args.text:
        text = open_corpus(load_config(zipf.CONFIGS, [f"corpus.path={args.text}"]))
        zipf.measure("ranks", settings, args, copies(text, args.copies))
        return
    settings += [f"model.negative_pool={batch // 2}", f"transfer.gpu_bytes={100 * args.room:g}%"]
    zipf.measure("ranks", [*settings, "transfer.lookahead=false"], args)


if __name__ == "__main__":
    main()
