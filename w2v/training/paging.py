"""How many rows steps touch and how many of them cross the link, as expected from how often words occur.

Words that occur equally often, or nearly so, stand together in G groups, so that nothing here is as long as the vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from w2v.config import ModelConfig, TransferConfig
from w2v.kernels.batch import CHUNK_BATCHES
from w2v.text.vocab import keep_probabilities

SINGLE, GROUPS = (
    1 << 16,
    2000,
)  # so many of Zipf's words are groups of their own, the others are in about so many
MOST_STEPS = 8  # of a page, a power of two: more spare the CPU nothing that could be noticed
FILLED = (
    7 / 8
)  # of the slots, by rows that stay since they are used soon; with more of them, rows leave too early
OFFSETS = 8  # at which a word may begin in its part of a spread pool
STRETCH, STRETCHES, MOST_CLUMPS = (
    1 << 17,
    8,
    16,
)  # words of a text that are looked at to find its clumps; how often; and at most


@dataclass(frozen=True, eq=False)
class Spectrum:
    """How often words occur: `words_G` of them `counts_G` times each.

    clumps: words come in clumps, so that a stretch of text has fewer different ones than chance would draw: as if so many occurrences
    were one. 1 where each stands where chance puts it; some 1.65 for Wikipedia.
    """

    counts_G: np.ndarray
    words_G: np.ndarray
    clumps: float = 1.0

    @classmethod
    def of(cls, counts_V: np.ndarray, ids_N: np.ndarray) -> Spectrum:
        """That of a text, of which stretches here and there tell the clumps."""
        counts_G, words_G = np.unique(counts_V, return_counts=True)
        size = min(STRETCH, len(ids_N) // 2)
        starts = np.linspace(0, len(ids_N) - size, STRETCHES).astype(int)
        found = np.mean([len(np.unique(ids_N[start : start + size])) for start in starts])
        missed = np.log1p(
            -size / max(len(ids_N), counts_V.sum())
        )  # words may have been counted in more text than this
        fewest, most = 1.0, float(MOST_CLUMPS)
        while most - fewest > 1e-3:
            clumps = (fewest + most) / 2
            fewest, most = (
                (clumps, most)
                if words_G.dot(-np.expm1(counts_G * missed / clumps)) > found
                else (fewest, clumps)
            )
        return cls(counts_G, words_G, fewest)

    @classmethod
    def zipf(cls, rows: int, words: int) -> Spectrum:
        """`rows` words of which number r occurs in proportion to 1 / r, and at least once, in about so many `words` in random order."""
        first = np.arange(1, min(rows, SINGLE) + 2, dtype=np.float64)
        rest = (
            np.unique(np.rint(np.geomspace(SINGLE + 1, rows + 1, GROUPS)))
            if rows > SINGLE
            else first[-1:]
        )
        edges = np.concatenate([first[:-1], rest])
        words_G = np.diff(edges)
        share_G = np.where(
            words_G == 1, 1 / edges[:-1], np.log((edges[1:] - 0.5) / (edges[:-1] - 0.5)) / words_G
        )  # means of a group
        return cls(np.maximum(1, words * share_G / (words_G * share_G).sum()), words_G)

    @property
    def rows(self) -> int:
        return int(self.words_G.sum())

    @property
    def words(self) -> float:
        """Of the text."""
        return float((self.counts_G * self.words_G).sum())


class Paging(NamedTuple):
    """How rows come to a GPU: for so many steps at a time; and stay if they are used in the next `lookahead` chunks of the text."""

    steps: int
    lookahead: int = 0


class Traffic:
    """What steps touch of both tables, rows of inputs first; chance_TG is that of one word of a group."""

    def __init__(self, spectrum: Spectrum, model: ModelConfig):
        self.words_G, self._words, self._model, self._clumps = (
            spectrum.words_G,
            spectrum.words,
            model,
            spectrum.clumps,
        )
        share_G = spectrum.counts_G / spectrum.words
        kept_G = share_G * keep_probabilities(spectrum.counts_G, spectrum.words, model.sample)
        noise_G = np.exp(model.ns_exponent * np.log(share_G))
        self.kept = float((kept_G * self.words_G).sum())  # of the text, by subsampling
        self._center_G, self._noise_G = kept_G / self.kept, noise_G / (noise_G * self.words_G).sum()

    @classmethod
    def of_rank(cls, spectrum: Spectrum, model: ModelConfig, ranks: int) -> Traffic:
        """That of the steps in which so many ranks share out the model's pool of noise words."""
        return cls(spectrum, replace(model, negative_pool=-(-model.negative_pool // ranks)))

    def touched(self, centers: float, ranks: int = 1, steps: int = 1) -> np.ndarray:
        """The chance that at least one of so many steps, in each of which so many ranks draw a batch, touches a row: float64 [2, G].

        Where there are pools of noise words, the first of the steps begins one.
        """
        no_text_G = self._no_text(centers, ranks, steps)
        return 1 - np.stack([no_text_G, no_text_G * self._no_noise(centers, ranks, steps)])

    def _no_text(self, centers: float, ranks: int, steps: int) -> np.ndarray:
        return 1 - _ever(
            self._center_G, steps * ranks * centers / self._clumps
        )  # a center's neighbours are centers too

    def _no_noise(self, centers: float, ranks: int, steps: float) -> np.ndarray:
        drawn, pool = centers * self._model.negative, self._model.negative_pool
        if not pool:
            return 1 - _ever(self._noise_G, steps * ranks * drawn)
        sharing = max(1, min(steps, self._model.negative_pool_steps))
        picked = -math.expm1(-sharing * drawn / pool)  # of the words of a pool
        return _never_of_spread(pool * self._noise_G, picked) ** (ranks * steps / sharing)

    def rows(self, chance_TG: np.ndarray) -> float:
        """How many rows of both tables that is."""
        return float((chance_TG * self.words_G).sum())

    def page_rows(self, centers: float, ranks: int = 1, steps: int = 1) -> float:
        """How many rows of each rank's shards so many steps touch."""
        return self.rows(self.touched(centers, ranks, steps)) / ranks

    def rows_of_two(self, centers: float, ranks: int = 1, steps: int = 1) -> float:
        """How many rows of each rank's shards two pages of so many steps touch."""
        return self.rows(1 - (1 - self.touched(centers, ranks, steps)) ** 2) / ranks

    def steps_of_page(self, centers: float, slots: float, ranks: int = 1) -> int:
        """How many steps can share a page, 1, 2, 4 or 8, so that a rank has room in its `slots` for the rows of a page and of the next."""
        steps = MOST_STEPS
        while steps > 1 and self.rows_of_two(centers, ranks, steps) > slots:
            steps //= 2
        return steps

    def paging(self, centers: float, slots: float, ranks: int, transfer: TransferConfig) -> Paging:
        """As configured, or what suits a rank that has so many `slots`; it looks ahead as far as rows that stay have room, or an epoch.

        Several ranks do not look ahead, since each would have to know the others' text.
        """
        steps = transfer.steps_per_page or self.steps_of_page(centers, slots, ranks)
        if ranks > 1 or not transfer.lookahead or self.rows_of_two(centers, ranks, steps) > slots:
            return Paging(steps)

        def filled(chunks: int) -> float:
            return self.rows(1 - self._gone_and_coming(centers, ranks, steps, 2, chunks)[0])

        chunks = range(1, 1 + int(self._words / (CHUNK_BATCHES * centers)))
        return Paging(steps, bisect_right(chunks, FILLED * slots, key=filled))

    def read(
        self, centers: float, slots: float, ranks: int = 1, steps: int = 1, lookahead: int = 0
    ) -> float:
        """How many rows come over the links of all ranks, which have so many `slots` together, for a page; as many go back.

        A GPU has the rows of the page, those of the page before if both have room, those that stay as the text uses them in the chunk at
        hand or the `lookahead` ones after it, and in what is left of `slots` those that are used most. Without slots, all rows of a page
        come for it alone.
        """
        if not slots:
            return self.rows(self.touched(centers, ranks, steps))
        pages = 2 if ranks * self.rows_of_two(centers, ranks, steps) <= slots else 1
        gone, coming = self._gone_and_coming(centers, ranks, steps, pages, lookahead)
        drawn = 0 if lookahead else self._model.negative
        uses_TG = np.stack([self._center_G, self._center_G + drawn * self._noise_G])
        order = np.argsort(-uses_TG, axis=None, kind="stable")
        gone, coming, words = (
            gone.flatten()[order],
            coming.flatten()[order],
            np.tile(self.words_G, 2)[order],
        )
        left = (
            slots - (words * (1 - gone)).sum()
        )  # for rows that stay; each frees the room that it took now and then
        taken = words * gone
        stay = np.clip((left - np.cumsum(taken) + taken) / np.maximum(taken, 1e-30), 0, 1)
        return float((words * (1 - stay) * coming).sum())

    def _gone_and_coming(
        self, centers: float, ranks: int, steps: int, pages: int, lookahead: int
    ) -> np.ndarray:
        """The chances, float64 [2, 2, G], that a row is not on the GPU, and that a page brings it, if it does not stay for being used much.

        It is there if one of the last `pages` touched it; and from then on until the text uses it, if that is within the chunks that are
        looked ahead at.
        """
        served = (
            max(1.0, self._model.negative_pool_steps / steps) if self._model.negative_pool else 1.0
        )  # pages, by a pool

        @cache
        def missed(
            pages: float,
        ) -> (
            np.ndarray
        ):  # the chance that so many, of one pool where it serves them, draw no such word as noise
            return self._no_noise(centers, ranks, pages * steps)

        no_text_G = np.maximum(self._no_text(centers, ranks, steps), 1e-300)
        gone_TG, noise_G = np.stack([no_text_G**pages, 0 * no_text_G]), 0 * no_text_G
        for same in range(pages + 1):  # how many of the last pages had the pool of this one
            share = max(0.0, min(1.0, served - same) if same < pages else served - pages) / served
            other = share * no_text_G**pages * missed(pages - same)
            gone_TG[1] += other * missed(same)
            noise_G += other * no_text_G * (missed(same) - missed(same + 1))  # alone brings the row

        # From here on pages are a stream, of which the text touches a row `text_G` times a page, and noise `noise_TG` times.
        further = (
            max(0.0, (lookahead + 0.5) * CHUNK_BATCHES * self.kept / steps - pages)
            if lookahead
            else 0.0
        )
        rate_G = -np.log(np.maximum(missed(pages + further), 1e-300)) / (pages + further)
        text_G, noise_TG = -np.log(no_text_G), np.maximum(np.stack([0 * rate_G, rate_G]), 1e-12)
        silent_TG = np.exp(-further * noise_TG)
        too_late_TG = no_text_G**further * (
            (text_G + noise_TG) / noise_TG * -np.expm1(-further * noise_TG) + silent_TG
        )
        coming_TG = (1 - no_text_G) * gone_TG * no_text_G**further * silent_TG
        coming_TG[1] += noise_G * too_late_TG[1]
        return np.stack([gone_TG * too_late_TG, coming_TG])


def _ever(share_G: np.ndarray, draws: float) -> np.ndarray:
    """The chance to be drawn at least once."""
    return -np.expm1(draws * np.log1p(-np.minimum(share_G, 1 - 1e-12)))


def _never_of_spread(members_G: np.ndarray, picked: float) -> np.ndarray:
    """The chance that a word is picked by none, of a spread pool that has so many members of it in the mean and that chance to pick each.

    A word begins anywhere in one of the pool's parts, has the rest of it, then whole parts, and some of a last one.
    """
    first = np.minimum((np.arange(OFFSETS)[:, None] + 0.5) / OFFSETS, members_G)
    whole, last = np.divmod(members_G - first, 1)
    return ((1 - picked * first) * (1 - picked) ** whole * (1 - picked * last)).mean(0)
