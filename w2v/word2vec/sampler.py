"""Batches of a text: subsampled words, shrinking windows and negatives.

The text is read in chunks of whole sentences. A chunk is subsampled at once, and its kept words are
cut into batches of nearly equal size. With `block_words`, batches mix blocks of the whole chunk, so
that a word that one place repeats is in several steps. Draws are seeded by (seed, rank, epoch,
chunk, batch), and a pool of negatives by the number of batches before it in the epoch, so a
`Position` of four numbers is the whole state.

Ranks share the text: in each epoch, each reads another part of about as many words. To exchange few
rows, each draws at most half of its negatives from the rows that it owns, and picks the others from
a pool of all words. DGL-KE draws all of them from a rank's own rows (Zheng et al. 2020, arXiv
2004.08532), which lowers scores here (docs/dev/log.md).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, count, pairwise, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from w2v.config import ModelConfig, require
from w2v.word2vec import cuda, reference
from w2v.word2vec.batch import (
    Batch,
    BatchSeed,
    Draw,
    Lookahead,
    Objective,
    Pool,
    Position,
    Subsample,
    Tree,
    chunk_words,
)

Span = tuple[int, int]  # sentences [first, last)
WIDE_WINDOW = 64  # above which a window may exceed most sentences
CHUNK_PIECES = 16  # the resolution, in parts of a chunk, of the lookahead window
EARLY_BATCHES = 2  # batches that a thread draws while one trains


@dataclass(frozen=True)
class TrainingText:
    """Text as word ids, and the distributions of its words."""

    ids_N: np.ndarray | Tensor  # int32, in memory, in a mapped file or on the device
    offsets_S: np.ndarray  # where each sentence begins in `ids_N`, and N
    keep_V: np.ndarray  # probability that subsampling keeps an occurrence of each word
    negative_prob_V: np.ndarray  # probability of each word as a negative; the papers' "noise"
    # Sorted numbers of sentences that are not trained on.
    held_out: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    tree: Tree | None = None  # of hierarchical softmax

    def count_words(self, span: Span) -> int:
        """Return the number of words of a span."""
        return int(self.offsets_S[span[1]] - self.offsets_S[span[0]])


@dataclass(eq=False)
class Sampler:
    """Draws the batches of one epoch after another."""

    text: TrainingText
    model: ModelConfig  # window, negatives, and the size of their pool for all ranks together
    batch_size: int  # centers of a batch, of all ranks together
    seed: int  # of all draws
    device: torch.device  # where batches are drawn
    _: KW_ONLY
    rank: int = 0
    world_size: int = 1  # ranks that share the text
    lookahead: int = 0  # chunks in the lookahead window of a batch
    block_words: int = 0  # of blocks that batches mix; 0: batches are consecutive text
    draw: Draw = reference.draw  # draws windows and negatives: that of the kernels
    subsample: Subsample = reference.subsample  # subsamples a chunk: that of the kernels
    draws_in_thread: bool = False  # whether a thread draws each batch while the one before trains

    def __post_init__(self) -> None:
        self.position = Position()
        text, model = self.text, self.model
        self._weighs = model.weighs_windows
        weighted = model.window if self._weighs else 0
        objective = Objective(model.architecture == "cbow", model.cbow_mean, text.tree, weighted)
        self._objective = objective.to(self.device)
        self._reach = reach(model.window, text.offsets_S)
        self._keep_V = torch.from_numpy(text.keep_V).to(self.device, torch.float32)
        # In float64: near 1, float32 cannot hold the small steps of rare words. Divided by the sum,
        # as rounding makes it differ from 1.
        prob_V = by_owner(text.negative_prob_V, self.world_size)
        self._negative_cdf_V = torch.from_numpy(np.cumsum(prob_V) / np.sum(prob_V)).to(self.device)
        self._resumed: dict[int, list[Span]] = {}  # epoch -> its spans, if others
        self._batch_size = -(-self.batch_size // self.world_size)
        self._pool = -(-max(0, model.negative_pool) // self.world_size)
        self._pool_of_rank = Pool(self._pool)
        if self.world_size > 1:
            # With fewer words, 8 ranks answer a point less of the analogies (docs/dev/log.md).
            size = self._pool or self._batch_size
            part = self.world_size - 1 - self.rank
            own = size // own_one_in(self.world_size)
            self._pool_of_rank = Pool(size, own, not self._pool, part, self.world_size)

    def epoch(self) -> Iterator[Batch]:
        """Yield the batches from `position` on, and advance it."""
        batches = self._epoch()
        if not self.draws_in_thread:
            yield from batches
            return
        with ThreadPoolExecutor(1) as thread:
            # Kernels draw on the threads that compute steps: a thread that is done with its part of
            # a step draws the next batches. One batch drawn early would not keep it busy.
            drawn = deque(thread.submit(next, batches, None) for _ in range(EARLY_BATCHES))
            while batch := drawn.popleft().result():
                drawn.append(thread.submit(next, batches, None))
                yield batch

    def _epoch(self) -> Iterator[Batch]:
        epoch, first_chunk, first_batch, drawn = self.position
        chunks = self._chunks(epoch)[first_chunk:]
        lookaheads = self._lookaheads(epoch, chunks) if self.lookahead else repeat(None)
        words_after = sum(map(self.text.count_words, chunks))
        spans = zip(chunks, lookaheads, strict=False)  # lookaheads go on into later epochs
        for chunk, (span, chunk_lookahead) in enumerate(spans, first_chunk):
            words = self.text.count_words(span)
            words_after -= words
            words_n, sentences_n = self._subsample(span, epoch, chunk)
            batches = -(-len(words_n) // self._batch_size)  # of nearly equal size
            cuts = [len(words_n) * batch // batches for batch in range(batches)] + [len(words_n)]
            draws = self._draws(cuts, Position(epoch, chunk, first_batch, drawn))
            for batch, (windows_B, negatives_BK) in enumerate(draws, first_batch):
                if self._reach < self.model.window:
                    windows_B.clamp_(max=self._reach)
                drawn += 1
                self.position = Position(epoch, chunk, batch + 1, drawn)
                words_left = words_after + words * (1 - (batch + 1) / batches)
                lookahead = chunk_lookahead
                # The pieces of this chunk that the batch has read are past, if it reads in order.
                if lookahead and not self.block_words:
                    pieces_read = CHUNK_PIECES * (batch + 1) // batches
                    lookahead = lookahead._replace(next=lookahead.next + pieces_read)
                yield Batch(
                    words_n=words_n,
                    sentences_n=sentences_n,
                    first=cuts[batch],
                    windows_B=windows_B,
                    negatives_BK=negatives_BK,
                    window=self._reach,
                    epochs_done=epoch + 1 - words_left * self.world_size / len(self.text.ids_N),
                    after=self.position,
                    pool=self._pool,
                    lookahead=lookahead,
                    objective=self._objective,
                )
            first_batch = 0  # only the first chunk is entered in its middle
        self.position = Position(epoch + 1)

    def empty_batch(self, epoch: int) -> Batch:
        """Return a batch for a rank whose epoch ends before that of others."""
        none = torch.zeros(0, dtype=torch.int32, device=self.device)
        return Batch(
            words_n=none,
            sentences_n=none,
            first=0,
            windows_B=none,
            negatives_BK=none.view(0, self.model.negative),
            window=self._reach,
            epochs_done=epoch + 1,
            after=Position(epoch, len(self._chunks(epoch))),
            objective=self._objective,
        )

    def state_dict(self, position: Position) -> dict[str, Any]:
        """Return the state to resume from `position` (JSON-serializable)."""
        return {"position": list(position), "spans": self._spans(position.epoch)}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue where the samplers of all ranks were.

        As many ranks as before draw the same batches. With another number, the unread rest of the
        epoch is divided anew, and the chunks that were being read are read again.
        """
        epoch = states[0]["position"][0]
        if len(states) == self.world_size:
            own = states[self.rank]
            self.position = Position(*own["position"])
            spans = [(first, last) for first, last in own["spans"]]
        else:
            self.position = Position(epoch)
            unread: list[Span] = []
            for rank in range(len(states)):
                former = replace(self, rank=rank, world_size=len(states))
                former.load_state_dict(states)
                unread += former._chunks(epoch)[former.position.chunk :]
            spans = self._own_share(unread, epoch)
        self._resumed = {epoch: spans}

    def _own_share(self, spans: Sequence[Span], epoch: int) -> list[Span]:
        """Return this rank's part of the spans: about as many words as others.

        Ranks take turns at stretches of a chunk, in another order in each epoch: so each reads a
        sample of the whole text, and all words meet the negatives of all ranks.
        """
        size = self.world_size
        words = sum(map(self.text.count_words, spans))
        turns = 1
        if size > 1:
            turns = max(1, -(-words // (size * chunk_words(self._batch_size))))
        edges = words * np.arange(size * turns + 1) // (size * turns)
        turn = (self.rank + epoch) % size
        own: list[Span] = []
        passed = 0
        for first, last in spans:
            # This rank reads the sentences that start within its stretches. Offsets count the words
            # of the whole text, edges those of these spans.
            starts = self.text.offsets_S[first:last]
            shift = starts[0] - passed if len(starts) else 0
            begins = first + np.searchsorted(starts, edges[turn::size] + shift)
            ends = first + np.searchsorted(starts, edges[turn + 1 :: size] + shift)
            stretches = zip(begins.tolist(), ends.tolist(), strict=False)
            own += [(begin, end) for begin, end in stretches if begin < end]
            passed += self.text.count_words((first, last))
        return own

    def _spans(self, epoch: int) -> list[Span]:
        if epoch in self._resumed:
            return self._resumed[epoch]
        return self._own_share([(0, len(self.text.offsets_S) - 1)], epoch)

    def _chunks(self, epoch: int) -> list[Span]:
        """Return the spans of an epoch, cut into chunks."""
        chunks: list[Span] = []
        for first, last in self._spans(epoch):
            offsets = self.text.offsets_S[first : last + 1]
            # Where chunks of equal length would start. A long sentence may hold several of them:
            # the equal starts then give fewer and longer chunks.
            full = np.arange(offsets[0], offsets[-1], chunk_words(self._batch_size))
            starts = first + np.searchsorted(offsets[:-1], full)
            starts = starts[np.diff(starts, prepend=-1) > 0]  # np.unique imports numpy.ma: 0.1 s
            chunks += pairwise([*starts[starts < last].tolist(), last])
        return chunks

    def _subsample(self, span: Span, epoch: int, chunk: int) -> tuple[Tensor, Tensor]:
        """Return the kept words of a chunk and their sentences: int32 [n]."""
        first, last = span
        edges_S = _copy(self.text.offsets_S, first, last + 1)
        trained_S = np.ones(last - first, np.bool_)
        begin, end = np.searchsorted(self.text.held_out, span)
        held_out = self.text.held_out[begin:end]
        trained_S[held_out - first] = False
        key = self._key(epoch, chunk, 0)
        edges_S = edges_S - edges_S[0]
        words_n = self._read(span)
        return self.subsample(
            key, words_n, edges_S, self._keep_V, trained_S, self.block_words, self._batch_size
        )

    def _read(self, span: Span) -> Tensor:
        """Return the words of a span, int32 on the device."""
        begin, end = (int(self.text.offsets_S[sentence]) for sentence in span)
        ids_N = self.text.ids_N
        if isinstance(ids_N, Tensor):
            return ids_N[begin:end]
        return torch.from_numpy(_copy(ids_N, begin, end)).to(self.device)

    def _lookaheads(self, epoch: int, chunks: Sequence[Span]) -> Iterator[Lookahead]:
        """Yield each chunk's lookahead window; its words are not subsampled."""
        last_piece_V = torch.full_like(self._keep_V, -1, dtype=torch.int32)
        later = chain.from_iterable(map(self._chunks, count(epoch + 1)))
        for number, chunk in enumerate(chain(chunks, later)):
            pieces = self._read(chunk).tensor_split(CHUNK_PIECES)
            for piece, words_p in enumerate(pieces, number * CHUNK_PIECES):
                # In the tensor that was already given out: its reader, on the same stream, sees the
                # newest pieces.
                last_piece_V.index_fill_(0, words_p.long(), piece)
            if number >= self.lookahead:
                yield Lookahead(last_piece_V, (number - self.lookahead) * CHUNK_PIECES)

    def _draws(self, cuts: list[int], first: Position) -> Iterator[tuple[Tensor, Tensor]]:
        """Draw windows [B] and negatives [B, K] of a chunk's batches, int32.

        The centers of batch n are those from cuts[n] to cuts[n + 1]. `first` is not yet drawn.
        """
        model, pool = self.model, self._pool_of_rank
        seeds = []
        for batch, (begin, end) in enumerate(pairwise(cuts[first.batch :]), first.batch):
            # Number 0 of a chunk is its subsampling, and chunk -1 the pool's: no two draws share a
            # key.
            key, pool_key = self._key(first.epoch, first.chunk, batch + 1), 0
            if pool.size:
                drawn = first.drawn + batch - first.batch
                pool_key = self._key(first.epoch, -1, drawn // model.negative_pool_steps)
            seeds.append(BatchSeed(end - begin, key, pool_key))
        lowest = 1 if model.shrink_windows and not self._weighs else model.window
        widths = lowest, model.window
        return self.draw(seeds, widths, model.negative, pool, self._negative_cdf_V)

    def _key(self, *place: int) -> int:
        """Return the 64-bit key of a place in the draws of this rank."""
        # Rank 0 has the keys of a run of one process.
        numbers = [self.seed, *place]
        if self.rank:
            numbers.append(self.rank)
        packed = struct.pack(f"<{len(numbers)}q", *numbers)
        return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def warm_up(gpu: int) -> None:
    """Load the GPU kernels that draw batches, and the library that scores.

    Their first calls take half a second: a thread makes them while others prepare what is trained.
    """
    # The plan says what is missing, such as memory or CuPy.
    with (
        contextlib.suppress(RuntimeError, ImportError),
        torch.cuda.device(gpu % torch.cuda.device_count()),
    ):
        words_N = torch.zeros(1 << 18, dtype=torch.int32, device="cuda")
        edges_S = np.array([0, len(words_N)])
        keep_V = torch.ones(1, device="cuda")
        cuda.subsample(1, words_N, edges_S, keep_V, np.ones(1, bool), 16, 1 << 16)
        list(cuda.draw([BatchSeed(1, 1)], (1, 1), 1, Pool(), keep_V.double()))
        keep_V[:, None] @ keep_V[None]


def reach(window: int, offsets_S: np.ndarray) -> int:
    """Return the largest distance that a context word can have."""
    if window <= WIDE_WINDOW:
        return window
    return min(window, max(1, int(np.diff(offsets_S).max(initial=1))))


def negative_distribution(counts_V: np.ndarray, exponent: float) -> np.ndarray:
    """Return the probability of words as negatives, ~ count ** exponent, [V]."""
    with np.errstate(all="ignore"):
        log_V = exponent * np.log(counts_V)
        weight_V = np.exp(log_V - log_V.max())  # no exponent overflows
    finite = np.isfinite(weight_V).all()
    require(finite, "model.ns_exponent", exponent, "moderate, and all counts above 0")
    return weight_V / weight_V.sum()


def by_owner(prob_V: np.ndarray, ranks: int) -> np.ndarray:
    """Return the probabilities of words in the order of `reference.draw`."""
    padded_V = np.pad(prob_V, (0, -len(prob_V) % ranks))
    return padded_V.reshape(-1, ranks)[:, ::-1].T.ravel()


def own_one_in(ranks: int) -> int:
    """Return n, where a rank draws one of n negatives from its own words.

    They are then drawn twice as often as by chance, or with two ranks 1.5 times. Over all ranks the
    distribution is unchanged, as each does the same with an equal part.
    """
    return max(2, ranks - 1)


def expected_negatives(model: ModelConfig, centers: int, ranks: int, steps: int = 1) -> float:
    """Return the expected negatives that some steps draw for their centers."""
    if ranks == 1 or model.negative_pool > 0:
        return model.distinct_negatives(centers, steps)
    # Those of ranks' own parts, and the words of pools: see `Sampler`.
    return centers * (model.negative + own_one_in(ranks) - 1) / own_one_in(ranks)


def _copy(array_N: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Copy a slice, and drop the pages of a mapped file from memory."""
    part = np.array(array_N[begin:end])
    if isinstance(array_N.base, mmap.mmap):
        array_N.base.madvise(mmap.MADV_DONTNEED)
    return part
