"""Vectors of unseen words, and fastText's .bin files.

A file holds, in little endian: magic and version; settings; the words with their counts; own
vectors of words and those of buckets; output vectors (fastText 0.9.3, src/fasttext.cc). It is
checked before memory is taken for what it says. Shapes: V words, B buckets, D dimensions.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from w2v.system.resources import require_memory
from w2v.text.ngrams import hash_words

if TYPE_CHECKING:
    from w2v.config import Config
    from w2v.text.vocab import Vocab

MAGIC = struct.pack("<i", 793712314)
VERSION = 12
# dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate, t
SETTINGS = struct.Struct("<12id")
SIZES = struct.Struct("<3i2q")  # words and labels, words, labels, tokens, pruned buckets
COUNT = struct.Struct("<qb")  # of a word, and its kind: 0
SHAPE = struct.Struct("<?2q")  # of a matrix: whether it is quantized, rows and columns
NEGATIVE_SAMPLING, CBOW, SKIPGRAM = 2, 1, 2
END = "</s>"  # fastText's end of a line, which has no n-grams
MOST = 1 << 24  # dimensions; of n-grams, characters
BLOCK_BYTES = 1 << 20
COMPOSED = 1 << 16  # words at a time


class Ngrams(NamedTuple):
    """What words are composed of: own vectors, and those of n-grams."""

    min_n: int
    max_n: int
    own_VD: np.ndarray
    buckets_BD: np.ndarray

    def compose(self, word: str) -> np.ndarray | None:
        """Return the vector [D] of an unseen word; None if its n-grams have none."""
        _, hashes_N = hash_words([word], self.min_n, self.max_n)
        if not (len(self.buckets_BD) and len(hashes_N)):
            return None
        vectors_ND = self.buckets_BD[hashes_N % len(self.buckets_BD)].astype(np.float32)
        return vectors_ND.mean(0) if vectors_ND.any() else None

    def compose_all(self, words: Sequence[str]) -> np.ndarray:
        """Return the vectors of all words: float32 [V, D]."""
        sums_VD = self.own_VD.astype(np.float32)
        if not len(self.buckets_BD):
            return sums_VD
        import torch  # only now, as queries do without
        from torch.nn import functional as F

        buckets_BD = torch.from_numpy(self.buckets_BD.astype(np.float32, copy=False))
        for first in range(0, len(words), COMPOSED):
            block = words[first : first + COMPOSED]
            begin_n, hashes_N = hash_words(block, self.min_n, self.max_n)
            rows_N = torch.from_numpy((hashes_N % np.uint32(len(buckets_BD))).astype(np.int64))
            begins_n = torch.from_numpy(begin_n[:-1])
            sums_nD = F.embedding_bag(rows_N, buckets_BD, begins_n, mode="sum").numpy()
            sums_VD[first : first + len(block)] += sums_nD
            sums_VD[first : first + len(block)] /= 1 + np.diff(begin_n)[:, None]
        return sums_VD


def read(file: io.BufferedIOBase) -> tuple[list[str], np.ndarray, Ngrams]:
    """Read a file of fastText: words, counts int64 [V], and their n-grams.

    Raises `ValueError` for what is no such file, quantized, or of a classifier.
    """
    magic, version = _take(file, 4), *struct.unpack("<i", _take(file, 4))
    if magic != MAGIC or version not in (VERSION - 1, VERSION):  # they differ for classifiers
        raise ValueError(f"it is not of version {VERSION} of fastText's format, but {version}")
    dim, *_, model, buckets, min_n, max_n, _, _ = SETTINGS.unpack(_take(file, SETTINGS.size))
    total, size, labels, _, pruned = SIZES.unpack(_take(file, SIZES.size))
    if total != size + labels or pruned > 0 or model not in (CBOW, SKIPGRAM):
        raise ValueError("it is a classifier of texts, not word vectors")
    if not (0 < dim < MOST and buckets >= 0 and 0 <= min_n < MOST and max_n < MOST and size > 0):
        raise ValueError(f"it has {size:,} words of {dim:,} dimensions, {buckets:,} buckets")
    entries = list(_entries(file, size, labels))[:size]
    words, counts = [word for word, _ in entries], [count for _, count in entries]
    is_quantized, rows, columns = SHAPE.unpack(_take(file, SHAPE.size))
    if is_quantized:
        raise ValueError("it is quantized (.ftz); take the .bin file that it was made from")
    if (rows, columns) != (size + buckets, dim):
        raise ValueError(f"it has {rows:,} x {columns:,} numbers for {size + buckets:,} x {dim:,}")
    vectors = np.frombuffer(_take(file, 4 * rows * dim), "<f4").reshape(rows, dim)
    own_VD, buckets_BD = vectors[:size], vectors[size:]
    if max_n < max(1, min_n):
        buckets_BD = vectors[:0]
    elif buckets and END in words:  # then its mean, as gensim composes it, is its vector here
        own_D = own_VD[words.index(END)]
        _, hashes_N = hash_words([END], min_n, max_n)
        own_D += (own_D - buckets_BD[hashes_N % buckets]).sum(0)
    return words, np.array(counts, np.int64), Ngrams(min_n, max_n, own_VD, buckets_BD)


def _entries(file: io.BufferedIOBase, size: int, labels: int) -> Iterator[tuple[str, int]]:
    """Yield words, then labels, with their counts, read in blocks."""
    block, at = b"", 0
    for number in range(size + labels):
        while (end := block.find(b"\0", at)) < 0 or len(block) <= end + COUNT.size:
            if end < 0 and len(block) - at > MOST:
                raise ValueError(f"a word has over {MOST:,} bytes")
            require_memory()
            more = file.read(BLOCK_BYTES)
            if not more:
                raise ValueError(f"it ends in word {number + 1:,}: more bytes should follow")
            block, at = block[at:] + more, 0
        count, kind = COUNT.unpack_from(block, end + 1)
        if kind != (number >= size) or count < 0:
            raise ValueError(f"{block[at : min(end, at + 30)]!r} has kind {kind}, count {count}")
        yield block[at:end].decode(errors="replace"), count
        at = end + 1 + COUNT.size
    file.seek(at - len(block), io.SEEK_CUR)  # to what follows the words


def _take(file: io.BufferedIOBase, size: int) -> bytearray:
    """Return the next bytes; memory grows as they are read."""
    found = bytearray()
    while len(found) < size:
        require_memory()
        block = file.read(min(size - len(found), BLOCK_BYTES))
        if not block:
            raise ValueError(f"it ends where {size - len(found):,} more bytes should follow")
        found += block
    return found


def write(
    file: BinaryIO, config: Config, vocab: Vocab, ngrams: Ngrams, outputs: Iterable[np.ndarray]
) -> None:
    """Write a file that fastText and gensim load, and train on from.

    Vectors are float32; those of outputs come in blocks [n, D], V in all.
    """
    size, (buckets, dim), model = len(vocab.words), ngrams.buckets_BD.shape, config.model
    kind = CBOW if model.architecture == "cbow" else SKIPGRAM
    text = dim, model.window, config.train.epochs, config.vocab.min_count, model.negative, 1
    subwords = buckets, ngrams.min_n, ngrams.max_n, 100, model.sample
    settings = SETTINGS.pack(*text, NEGATIVE_SAMPLING, kind, *subwords)
    file.write(MAGIC + struct.pack("<i", VERSION) + settings)
    file.write(SIZES.pack(size, size, 0, vocab.raw_words, -1))
    for word, count in zip(vocab.words, vocab.counts.tolist(), strict=True):
        file.write(word.encode() + b"\0" + COUNT.pack(count, 0))
    file.write(SHAPE.pack(False, size + buckets, dim))
    file.writelines([ngrams.own_VD.data, ngrams.buckets_BD.data])
    file.write(SHAPE.pack(False, size, dim))
    file.writelines(block_nD.data for block_nD in outputs)
