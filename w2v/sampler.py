"""From ids to batches: subsampling, shrinking windows and noise words, drawn on the device that computes.

The corpus is read in chunks of whole sentences; a chunk is subsampled at once and its kept words are cut into batches of nearly
equal size. All draws are seeded by (seed, epoch, chunk, batch), so three numbers say where the sampler stands.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from w2v.batch import Batch, Position
from w2v.config import ModelConfig

Inversion = Callable[[Tensor], Callable[[Tensor], Tensor]]  # of a cumulative distribution
Draw = Callable[[int, int, int, int, int, int, Tensor], tuple[Tensor, Tensor]]  # see kernels/reference.py
BATCHES_PER_CHUNK = 32  # about: a chunk holds as many raw words as this many batches hold centers


class Sampler:
    """Draws the batches of one epoch after another.

    ids_N: int32 word ids of the corpus, in a file or on the device; offsets_S: where each sentence starts, and N; keep_V: the
    probability with which an occurrence of each word is kept; noise_V: the distribution of noise words, which sums to 1; left_out:
    numbers of sentences that are passed over, sorted; inversion: a faster way to draw noise words than `search`; draw: what draws windows
    and noise words in place of torch's generator, `reference.draw` or a kernel that does the same.
    """

    def __init__(
        self, ids_N: np.ndarray | Tensor, offsets_S: np.ndarray, keep_V: np.ndarray, noise_V: np.ndarray,
        model: ModelConfig, batch_size: int, seed: int, device: torch.device, left_out: np.ndarray | None = None,
        inversion: Inversion | None = None, draw: Draw | None = None,
    ):  # fmt: skip
        self._ids_N, self._offsets_S, self._model, self._batch_size, self._seed = ids_N, offsets_S, model, batch_size, seed
        self._keep_V = torch.from_numpy(keep_V).to(device, torch.float32)
        self._noise_cdf_V = torch.from_numpy(np.cumsum(noise_V) / np.sum(noise_V)).to(device)
        self._invert, self._draw = (inversion or search)(self._noise_cdf_V), draw
        self._generator = torch.Generator(device)
        self._left_out = np.zeros(0, np.int64) if left_out is None else left_out
        starts = np.searchsorted(offsets_S, np.arange(0, len(ids_N), BATCHES_PER_CHUNK * batch_size))
        self._chunks = [*np.unique(starts[starts < len(offsets_S) - 1]), len(offsets_S) - 1]  # as sentence numbers
        self.position = Position()

    def epoch(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the epoch; the position moves on as each is drawn."""
        epoch, first_chunk, first_batch = self.position
        for chunk in range(first_chunk, len(self._chunks) - 1):
            words_n, sentences_n = self._subsample(epoch, chunk)
            cuts = _even_cuts(len(words_n), self._batch_size)
            begin, end = self._offsets_S[self._chunks[chunk]], self._offsets_S[self._chunks[chunk + 1]]
            for number in range(first_batch, len(cuts) - 1):
                windows_B, negatives_BK = self._windows_and_noise(cuts[number + 1] - cuts[number], epoch, chunk, number + 1)
                done = float(begin + (end - begin) * (number + 1) / (len(cuts) - 1)) / len(self._ids_N)
                self.position = Position(epoch, chunk, number + 1)
                window, after = self._model.window, self.position
                pool = self._model.negative_pool
                yield Batch(words_n, sentences_n, cuts[number], windows_B, negatives_BK, window, epoch + done, after, pool)
            first_batch = 0
        self.position = Position(epoch + 1)

    def _subsample(self, epoch: int, chunk: int) -> tuple[Tensor, Tensor]:
        """The kept words of a chunk and the number of the sentence that each is in, int32."""
        first, last = self._chunks[chunk], self._chunks[chunk + 1]
        offsets = self._offsets_S[first : last + 1]
        device = self._keep_V.device
        ids_n = self._ids_N[offsets[0] : offsets[-1]]
        words_n = ids_n if isinstance(ids_n, Tensor) else torch.from_numpy(np.array(ids_n)).to(device)
        lengths = torch.from_numpy(np.diff(offsets)).to(device)
        numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
        sentences_n = torch.repeat_interleave(numbers, lengths, output_size=len(words_n))
        draws_n = torch.rand(len(words_n), generator=self._seeded(epoch, chunk, 0), device=device)
        kept_n = draws_n < self._keep_V.index_select(0, words_n)
        left_out = self._left_out[slice(*np.searchsorted(self._left_out, (first, last)))] - first
        if len(left_out):
            kept_n &= ~torch.isin(sentences_n, torch.from_numpy(left_out).to(device, torch.int32))
        kept = torch.nonzero(kept_n).flatten()  # the one wait for the device
        return words_n[kept], sentences_n[kept]

    def _windows_and_noise(self, size: int, *draw: int) -> tuple[Tensor, Tensor]:
        """How far each center's window reaches, int32 [size], and its noise words, int32 [size, K]."""
        model, lowest = self._model, 1 if self._model.shrink_windows else self._model.window
        if self._draw:
            return self._draw(self._key(*draw), size, lowest, model.window, model.negative, model.negative_pool, self._noise_cdf_V)
        generator = self._seeded(*draw)
        windows_B = torch.randint(lowest, model.window + 1, (size,), generator=generator, device=generator.device, dtype=torch.int32)
        return windows_B, self._noise(size, generator)

    def _noise(self, size: int, generator: torch.Generator) -> Tensor:
        """Noise words int32 [size, K] by inversion of their cumulative distribution, or picked from a fresh pool drawn so."""
        shape, pool = (size, self._model.negative), self._model.negative_pool
        uniform = torch.rand((pool,) if pool else shape, generator=generator, device=generator.device, dtype=torch.float64)
        drawn = self._invert(uniform)
        return drawn[torch.randint(pool, shape, generator=generator, device=generator.device)] if pool else drawn

    def _seeded(self, epoch: int, chunk: int, draw: int) -> torch.Generator:
        return self._generator.manual_seed(self._key(epoch, chunk, draw) >> 1)

    def _key(self, epoch: int, chunk: int, draw: int) -> int:
        digest = hashlib.blake2b(struct.pack("<4q", self._seed, epoch, chunk, draw), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def search(cdf_V: Tensor) -> Callable[[Tensor], Tensor]:
    """What maps numbers in [0, 1) to the first word whose cumulative probability is above them, int32."""
    return lambda uniform: torch.searchsorted(cdf_V, uniform, right=True, out_int32=True).clamp_(max=len(cdf_V) - 1)


def _even_cuts(length: int, size: int) -> list[int]:
    """The fewest parts of at most `size`, as equal as they can be: where each begins, and the end."""
    parts = -(-length // size)
    return [length * part // parts for part in range(parts)] + [length]
