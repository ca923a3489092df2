"""How good the vectors are: analogies and word similarity, by gensim's protocol.

Shapes: V words, N of them asked for, D dimensions, Q questions, P pairs of words.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.vectors.datasets import (
    ASKED,
    GOOGLE,
    PAIR_SETS,
    EvaluationError,
    in_gensim,
    judged_pairs,
    read_questions,
)

if TYPE_CHECKING:
    import torch
    from gensim.models import KeyedVectors


@dataclass(frozen=True)
class Section:
    """Answers to some questions: `skipped` ones hold a word outside the vocabulary and are not among the `counted`."""

    name: str
    correct: int
    counted: int
    skipped: int

    @property
    def accuracy(self) -> float:
        """Share of the counted questions; 0 if there are none, as in gensim."""
        return self.correct / self.counted if self.counted else 0.0


@dataclass(frozen=True)
class AnalogyScore:
    """The sections in the order of the file; those named gram* are the syntactic ones."""

    sections: tuple[Section, ...]

    @property
    def total(self) -> Section:
        return self._sum("total", self.sections)

    @property
    def semantic(self) -> Section:
        return self._sum("semantic", [s for s in self.sections if not s.name.startswith("gram")])

    @property
    def syntactic(self) -> Section:
        return self._sum("syntactic", [s for s in self.sections if s.name.startswith("gram")])

    def _sum(self, name: str, rows: Sequence[Section]) -> Section:
        return Section(
            name,
            sum(s.correct for s in rows),
            sum(s.counted for s in rows),
            sum(s.skipped for s in rows),
        )


@dataclass(frozen=True)
class SimilarityScore:
    """Spearman's rank correlation with human judgement over `pairs` pairs; None where it is undefined. `oov`: share of unknown pairs."""

    name: str
    spearman: float | None
    pairs: int
    oov: float


def analogies(
    words: Sequence[str],
    vectors: torch.Tensor | np.ndarray,
    questions: str | Path | None = None,
    restrict_vocab: int | None = ASKED,
    case_insensitive: bool = True,
) -> AnalogyScore:
    """Score "a is to b as c is to ?" by the nearest word to b - a + c (3CosAdd, Mikolov et al. 2013, arXiv 1301.3781).

    words [V], most frequent first; vectors [V, D], taken as float32; questions: a file of ": section" lines and lines of
    four words, Google's questions-words.txt by default; only the first `restrict_vocab` words are asked for and answered.
    Counts equal those of gensim's `evaluate_word_analogies`: questions whose two best answers are so close that rounding
    could exchange them are answered in gensim's own arithmetic. gensim itself, which takes 50 MiB, is not imported.
    """
    import torch

    from w2v.vectors import analogies as nearest

    assert vectors.ndim == 2 and len(words) == len(vectors), (len(words), vectors.shape)
    words = list(words[:restrict_vocab])
    vectors_ND = torch.as_tensor(vectors).detach()[: len(words)].float()
    finite_N = torch.stack(vectors_ND.aminmax(dim=1)).isfinite().all(0)
    if not finite_N.all():
        word = words[int(finite_N.int().argmin())]
        raise EvaluationError(
            f"the vector of {word!r} holds NaN or infinity; train with a lower optimizer.lr"
        )
    first, group = _fold_vocabulary(words, case_insensitive)
    sections = read_questions(questions, case_insensitive)
    known = [
        (n, [first[w] for w in q])
        for n, (_, asked) in enumerate(sections)
        for q in asked
        if first.keys() >= set(q)
    ]
    ids_Q4 = torch.tensor([ids for _, ids in known], dtype=torch.long).reshape(-1, 4)
    right_Q = nearest.right(
        vectors_ND, torch.tensor(group, device=vectors_ND.device), ids_Q4.to(vectors_ND.device)
    )
    results: list[list[bool]] = [[] for _ in sections]
    for (n, _), right in zip(known, right_Q.tolist(), strict=True):
        results[n].append(right)
    return _score(sections, results)


def analogies_gensim(
    kv: KeyedVectors,
    questions: str | Path | None = None,
    restrict_vocab: int | None = ASKED,
    case_insensitive: bool = True,
) -> AnalogyScore:
    """The same score by gensim's own `evaluate_word_analogies`, one question at a time."""
    path = str(questions or in_gensim(GOOGLE))
    sections = read_questions(path, case_insensitive)
    with quiet():
        _, answered = kv.evaluate_word_analogies(
            path, restrict_vocab=restrict_vocab, case_insensitive=case_insensitive
        )
    results = [
        [True] * len(s["correct"]) + [False] * len(s["incorrect"])
        for s in answered[: len(sections)]
    ]  # then comes the total
    return _score(sections, results)


def similarity(
    words: Sequence[str],
    vectors: torch.Tensor | np.ndarray,
    name: str,
    restrict_vocab: int | None = ASKED,
) -> SimilarityScore:
    """Correlation of cosines with human judgement on `wordsim353` or `simlex999`, as gensim's `evaluate_word_pairs` finds it.

    words [V], most frequent first; vectors [V, D], taken as float32.
    """
    import torch

    from w2v.vectors.analogies import unit

    first, _ = _fold_vocabulary(words[:restrict_vocab], case_insensitive=True)
    judged = judged_pairs(name)
    known = [
        (first[a], first[b], judgement) for a, b, judgement in judged if a in first and b in first
    ]
    spearman = math.nan
    if len(known) >= 2:
        *ends, human_P = zip(*known, strict=True)
        a_PD, b_PD = (
            unit(torch.as_tensor(vectors)[list(end)].detach().float().cpu().numpy()) for end in ends
        )
        cosine_P = np.array([a_D @ b_D for a_D, b_D in zip(a_PD, b_PD, strict=True)])
        with np.errstate(all="ignore"):  # no order at all
            spearman = float(np.corrcoef(_ranks(cosine_P), _ranks(np.array(human_P)))[0, 1])
    return SimilarityScore(
        name, None if math.isnan(spearman) else spearman, len(known), 1 - len(known) / len(judged)
    )


def similarities(
    words: Sequence[str], vectors: torch.Tensor | np.ndarray, restrict_vocab: int | None = ASKED
) -> list[SimilarityScore]:
    """On both sets of word pairs."""
    return [similarity(words, vectors, name, restrict_vocab) for name in PAIR_SETS]


def scores(
    kv: KeyedVectors, questions: str | None, restrict_vocab: int, by_gensim: bool
) -> tuple[AnalogyScore, list[SimilarityScore]]:
    """Analogies, in torch or by gensim itself, and both sets of word pairs."""
    ask = questions, restrict_vocab
    score = (
        analogies_gensim(kv, *ask) if by_gensim else analogies(kv.index_to_key, kv.vectors, *ask)
    )
    return score, similarities(kv.index_to_key, kv.vectors, restrict_vocab)


def report(analogy_score: AnalogyScore, similarities: Sequence[SimilarityScore] = ()) -> str:
    """The scores as aligned plain text."""
    rows = [
        *analogy_score.sections,
        analogy_score.semantic,
        analogy_score.syntactic,
        analogy_score.total,
    ]
    width = max(len("WordSim-353"), *(len(row.name) for row in rows))
    lines = [f"{'analogies':<{width}}  accuracy  correct  counted  skipped"]
    for number, row in enumerate(rows):
        share = f"{100 * row.accuracy:.1f} %" if row.counted else "-"
        gap = "\n" * (number == len(analogy_score.sections))
        lines.append(
            f"{gap}{row.name:<{width}}  {share:>8}  {row.correct:>7}  {row.counted:>7}  {row.skipped:>7}"
        )
    if similarities:
        lines += ["", f"{'similarity':<{width}}  spearman    pairs  unknown"]
    for score in similarities:
        rho = "-" if score.spearman is None else f"{score.spearman:.3f}"
        lines.append(
            f"{PAIR_SETS[score.name][0]:<{width}}  {rho:>8}  {score.pairs:>7}  {100 * score.oov:>5.1f} %"
        )
    return "\n".join(lines)


def as_dict(
    analogy_score: AnalogyScore, similarities: Sequence[SimilarityScore] = ()
) -> dict[str, Any]:
    """The scores as plain values for JSON; shares are from 0 to 1, and an undefined correlation is None."""
    rows = (
        analogy_score.total,
        analogy_score.semantic,
        analogy_score.syntactic,
        *analogy_score.sections,
    )
    total, semantic, syntactic, *sections = [
        asdict(row) | {"accuracy": row.accuracy} for row in rows
    ]
    parts = {"total": total, "semantic": semantic, "syntactic": syntactic, "sections": sections}
    return {"analogies": parts, "similarity": {score.name: asdict(score) for score in similarities}}


def _ranks(values_P: np.ndarray) -> np.ndarray:
    """The place of each value, from 1; equal ones share the mean of theirs."""
    _, place_P, count = np.unique(values_P, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place_P]


def _fold_vocabulary(
    words: Sequence[str], case_insensitive: bool
) -> tuple[dict[str, int], list[int]]:
    """Number of the first word of each spelling, in upper case unless case counts; and that number for every word."""
    first: dict[str, int] = {}
    group = [
        first.setdefault(word.upper() if case_insensitive else word, index)
        for index, word in enumerate(words)
    ]
    return first, group


def _score(sections: list[tuple[str, list[list[str]]]], results: list[list[bool]]) -> AnalogyScore:
    rows = [
        Section(name, sum(right), len(right), len(asked) - len(right))
        for (name, asked), right in zip(sections, results, strict=True)
    ]
    return AnalogyScore(tuple(rows))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep gensim's log lines and numpy's warnings about zero vectors to themselves."""
    logger = logging.getLogger("gensim")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
