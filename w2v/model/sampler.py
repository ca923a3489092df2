"""From ids to batches: subsampling, shrinking windows and noise words, drawn on the device that computes.

The corpus is read in chunks of whole sentences; a chunk is subsampled at once and its kept words are cut into batches of nearly
equal size. All draws are seeded by (seed, rank, epoch, chunk, batch), and a pool of noise words by how many the epoch had before it, so
four numbers say where the sampler stands. Where several ranks train together, each reads a span of sentences with about as many words
as the others'.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.config import ModelConfig
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels.batch import CHUNK_BATCHES, Ahead, Batch, Position
from w2v.kernels.reference import spread

Span = tuple[int, int]  # of sentences: the first, and the one after the last
Inversion = Callable[[Tensor], Callable[[Tensor], Tensor]]  # of a cumulative distribution
Draw = Callable[
    [int, int, int, int, int, int, int, Tensor], tuple[Tensor, Tensor]
]  # see kernels/reference.py
CHUNK_PIECES = 16  # parts of a chunk, in one of which a word is when it is looked ahead at


class Sampler:
    """Draws the batches of one epoch after another.

    ids_N: int32 word ids of the corpus, in a file or on the device; offsets_S: where each sentence starts, and N; keep_V: the
    probability with which an occurrence of each word is kept; noise_V: the distribution of noise words, which sums to 1; left_out:
    numbers of sentences that are passed over, sorted; inversion: a faster way to draw noise words than `search`; draw: what draws windows
    and noise words in place of torch's generator, `reference.draw` or a kernel that does the same; lookahead: at how many chunks
    after its own a batch looks ahead; batch_size and the model's pool of noise words: of all ranks together, which share them out.
    """

    def __init__(
        self,
        ids_N: np.ndarray | Tensor,
        offsets_S: np.ndarray,
        keep_V: np.ndarray,
        noise_V: np.ndarray,
        model: ModelConfig,
        batch_size: int,
        seed: int,
        device: torch.device,
        left_out: np.ndarray | None = None,
        inversion: Inversion | None = None,
        draw: Draw | None = None,
        ranks: Ranks = SINGLE,
        lookahead: int = 0,
    ):
        self._ids_N, self._offsets_S, self._model = ids_N, offsets_S, model
        self._all_centers, self._seed, self._lookahead = batch_size, seed, lookahead
        self._keep_V = torch.from_numpy(keep_V).to(device, torch.float32)
        self._noise_cdf_V = torch.from_numpy(np.cumsum(noise_V) / np.sum(noise_V)).to(device)
        self._invert, self._draw = (inversion or search)(self._noise_cdf_V), draw
        self._generator = torch.Generator(device)
        self._last_pool: tuple[int, Tensor] = -1, self._noise_cdf_V[:0]  # its key, and its words
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out
        self._stand_for(ranks.rank, ranks.size)
        self._begun: tuple[int, list[Span]] = (
            0,
            self._share,
        )  # an epoch, and what of the text is read in it
        self.position = Position()

    def epoch(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the epoch; the position moves on as each is drawn."""
        epoch, first_chunk, first_batch, drawn = self.position
        chunks, words = self._chunks(epoch), len(self._ids_N)
        ahead = sum(self._words(*chunk) for chunk in chunks)  # words that are not read yet
        seen_ahead = self._look_ahead(epoch, first_chunk)
        for number, chunk in enumerate(chunks):
            ahead -= self._words(*chunk)
            if number < first_chunk:
                continue
            seen = next(seen_ahead)
            words_n, sentences_n = self._subsample(chunk, epoch, number)
            cuts, raw_words = _even_cuts(len(words_n), self._batch_size), self._words(*chunk)
            for batch in range(first_batch, len(cuts) - 1):
                windows_B, negatives_BK = self._windows_and_noise(
                    cuts[batch + 1] - cuts[batch], epoch, number, batch, drawn
                )
                drawn += 1
                left = ahead + raw_words * (1 - (batch + 1) / (len(cuts) - 1))
                self.position = Position(epoch, number, batch + 1, drawn)
                window, done, after = (
                    self._model.window,
                    epoch + 1 - left * self._size / words,
                    self.position,
                )
                coming = seen and seen._replace(
                    next=seen.next + CHUNK_PIECES * (batch + 1) // (len(cuts) - 1)
                )
                yield Batch(
                    words_n,
                    sentences_n,
                    cuts[batch],
                    windows_B,
                    negatives_BK,
                    window,
                    done,
                    after,
                    self._pool,
                    coming,
                )
            first_batch = 0
        self.position = Position(epoch + 1)

    def no_batch(self, epoch: int) -> Batch:
        """What stands for a batch where the text of this epoch has come to its end here and not yet at other ranks."""
        none = torch.zeros(0, dtype=torch.int32, device=self._keep_V.device)
        end = Position(epoch, len(self._chunks(epoch)))
        return Batch(
            none,
            none,
            0,
            none,
            none.view(0, self._model.negative),
            self._model.window,
            epoch + 1,
            end,
        )

    def state(self, position: Position) -> dict[str, Any]:
        """What `go_on` takes to draw on from a position, in JSON."""
        return {"position": list(position), "spans": self._spans(position.epoch)}

    def go_on(self, states: Sequence[dict[str, Any]]) -> None:
        """Draw on where the samplers of all ranks stood: the same batches, if there are as many ranks as then.

        Otherwise what is left of the epoch is dealt anew; a sentence that was read in part is read again.
        """
        epoch = states[0]["position"][0]
        if len(states) == self._size:
            mine = states[self._rank]
            self.position, spans = Position(*mine["position"]), mine.get("spans", self._share)
        else:
            self.position, spans = (
                Position(epoch),
                self._deal(
                    [span for rank in range(len(states)) for span in self._rest(states, rank)]
                ),
            )
        self._begun = epoch, [(first, last) for first, last in spans]

    def _rest(self, states: Sequence[dict[str, Any]], rank: int) -> list[Span]:
        """What one of the ranks that there were had not read."""
        then = copy.copy(self)
        then._stand_for(rank, len(states))
        then.go_on(states)
        epoch, number, batch, _ = then.position
        chunks = then._chunks(epoch)
        if batch:
            _, sentences_n = then._subsample(chunks[number], epoch, number)
            cuts, (first, last) = _even_cuts(len(sentences_n), then._batch_size), chunks[number]
            chunks[number] = (
                first + int(sentences_n[cuts[batch]]) if batch < len(cuts) - 1 else last,
                last,
            )
        return [(first, last) for first, last in chunks[number:] if first < last]

    def _stand_for(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._batch_size, self._pool = (
            -(-self._all_centers // size),
            -(-self._model.negative_pool // size),
        )
        self._share = self._deal([(0, len(self._offsets_S) - 1)])

    def _deal(self, spans: Sequence[Span]) -> list[Span]:
        """This rank's part of the spans: the ranks' parts follow each other and have about as many words each."""
        words = sum(self._words(*span) for span in spans)
        begin, end = words * self._rank // self._size, words * (self._rank + 1) // self._size
        dealt, passed = [], 0
        for first, last in spans:
            base, offsets = passed - self._offsets_S[first], self._offsets_S[first:last]
            passed += self._words(first, last)
            mine = [
                first + int(np.searchsorted(offsets, edge - base)) for edge in (begin, end)
            ]  # sentences that begin there or later
            if mine[0] < mine[1]:
                dealt.append((mine[0], mine[1]))
        return dealt

    def _spans(self, epoch: int) -> list[Span]:
        return self._begun[1] if epoch == self._begun[0] else self._share

    def _chunks(self, epoch: int) -> list[Span]:
        """The spans of an epoch, cut where a chunk is full."""
        return [chunk for span in self._spans(epoch) for chunk in self._cut(*span)]

    def _cut(self, first: int, last: int) -> list[Span]:
        offsets = self._offsets_S[first:last]
        full = np.arange(offsets[0], self._offsets_S[last], CHUNK_BATCHES * self._batch_size)
        starts = first + np.searchsorted(offsets, full)
        edges = [*map(int, np.unique(starts[starts < last])), last]
        return list(pairwise(edges))

    def _words(self, first: int, last: int) -> int:
        """Of so many sentences."""
        return int(self._offsets_S[last] - self._offsets_S[first])

    def _subsample(self, chunk: Span, epoch: int, number: int) -> tuple[Tensor, Tensor]:
        """The kept words of a chunk and the number in it of the sentence that each is in, int32."""
        first, last = chunk
        offsets = _copied(self._offsets_S, first, last + 1)
        device, words_n = self._keep_V.device, self._text(chunk)
        kept_n = torch.rand(
            len(words_n), **self._seeded(self._key(epoch, number, 0))
        ) < self._keep_V.index_select(0, words_n)
        edges = torch.from_numpy(offsets - offsets[0]).to(device)
        numbers = torch.arange(last - first, dtype=torch.int32, device=device)
        left_out = self._left_out[slice(*np.searchsorted(self._left_out, (first, last)))] - first
        if len(left_out):
            sentences_n = torch.repeat_interleave(
                numbers, edges[1:] - edges[:-1], output_size=len(words_n)
            )
            kept_n &= ~torch.isin(sentences_n, torch.from_numpy(left_out).to(device, torch.int32))
        kept = torch.nonzero(kept_n).flatten()  # the one wait for the device
        words_n, places = words_n[kept], torch.searchsorted(kept, edges)
        del (
            kept_n,
            kept,
        )  # what is held here is held on top of all else that a run without a GPU takes
        return words_n, torch.repeat_interleave(
            numbers, places[1:] - places[:-1], output_size=len(words_n)
        )

    def _text(self, chunk: Span) -> Tensor:
        """The words of a chunk, int32, on the device."""
        begin, end = (int(self._offsets_S[edge]) for edge in chunk)
        ids_N = self._ids_N  # on the GPU or, when they take too much of it, not
        return (
            ids_N[begin:end]
            if isinstance(ids_N, Tensor)
            else torch.from_numpy(_copied(ids_N, begin, end)).to(self._keep_V.device)
        )

    def _look_ahead(self, epoch: int, first: int) -> Iterator[Ahead | None]:
        """For each chunk from there on, what it and those after it use. Rare words are what matters, and subsampling keeps them."""
        if not self._lookahead:
            yield from repeat(None)
        last_piece_V = torch.full_like(self._keep_V, -1, dtype=torch.int32)
        for number, words_n in enumerate(self._text_from(epoch, first)):
            for piece, words_p in enumerate(
                words_n.tensor_split(CHUNK_PIECES), number * CHUNK_PIECES
            ):
                last_piece_V.index_fill_(0, words_p.long(), piece)
            if number >= self._lookahead:
                yield Ahead(last_piece_V, (number - self._lookahead) * CHUNK_PIECES)

    def _text_from(self, epoch: int, first: int) -> Iterator[Tensor]:
        """The words of the chunks from there on; one epoch follows the other without end."""
        yield from (self._text(chunk) for chunk in self._chunks(epoch)[first:])
        for later in count(epoch + 1):
            yield from map(self._text, self._chunks(later))

    def _windows_and_noise(
        self, size: int, epoch: int, chunk: int, batch: int, drawn: int
    ) -> tuple[Tensor, Tensor]:
        """How far each center's window reaches, int32 [size], and its noise words, int32 [size, K]."""
        model, lowest = self._model, 1 if self._model.shrink_windows else self._model.window
        key = self._key(epoch, chunk, batch + 1)
        pool_key = self._key(epoch, -1, drawn // model.negative_pool_steps) if self._pool else 0
        if self._draw:
            return self._draw(
                key,
                size,
                lowest,
                model.window,
                model.negative,
                self._pool,
                pool_key,
                self._noise_cdf_V,
            )
        if self._pool and pool_key != self._last_pool[0]:
            self._last_pool = (
                pool_key,
                self._invert(
                    spread(torch.rand(self._pool, dtype=torch.float64, **self._seeded(pool_key)))
                ),
            )
        shape, seeded = (size, model.negative), self._seeded(key)
        windows_B = torch.randint(lowest, model.window + 1, (size,), dtype=torch.int32, **seeded)
        if not self._pool:
            return windows_B, self._invert(torch.rand(shape, dtype=torch.float64, **seeded))
        return windows_B, self._last_pool[1][torch.randint(self._pool, shape, **seeded)]

    def _seeded(self, key: int) -> dict[str, Any]:
        """What has torch draw on this device, with that seed."""
        return {"generator": self._generator.manual_seed(key >> 1), "device": self._keep_V.device}

    def _key(self, epoch: int, chunk: int, draw: int) -> int:
        where = (
            (self._seed, epoch, chunk, draw, self._rank)
            if self._rank
            else (self._seed, epoch, chunk, draw)
        )
        digest = hashlib.blake2b(struct.pack(f"<{len(where)}q", *where), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def search(cdf_V: Tensor) -> Callable[[Tensor], Tensor]:
    """What maps numbers in [0, 1) to the first word whose cumulative probability is above them, int32."""
    return lambda uniform: torch.searchsorted(cdf_V, uniform, right=True, out_int32=True).clamp_(
        max=len(cdf_V) - 1
    )


def _copied(array_N: np.ndarray, begin: int, end: int) -> np.ndarray:
    """A copy of `array_N[begin:end]`; of an array that is mapped from a file, no more than that stays in this process's memory."""
    part = np.array(array_N[begin:end])
    if isinstance(array_N.base, mmap.mmap):
        array_N.base.madvise(mmap.MADV_DONTNEED)
    return part


def _even_cuts(length: int, size: int) -> list[int]:
    """The fewest parts of at most `size`, as equal as they can be: where each begins, and the end."""
    parts = -(-length // size)
    return [length * part // parts for part in range(parts)] + [length]
