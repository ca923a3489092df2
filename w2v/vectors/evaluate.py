"""Score vectors on analogies and word similarity, by gensim's protocol.

Shapes: V words, the first N of them used, D dimensions, Q questions, P pairs of words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from w2v.vectors import datasets
from w2v.vectors.datasets import ASKED, EvaluationError
from w2v.vectors.query import normalize

if TYPE_CHECKING:
    import torch


Folded = tuple[dict[str, int], list[int]]


@dataclass
class Section:
    """Counts of answers; questions with unknown words are skipped."""

    name: str
    correct: int
    counted: int
    skipped: int
    accuracy: float = field(init=False)  # share of the counted; 0 if there are none, as in gensim

    def __post_init__(self) -> None:
        self.accuracy = self.correct / self.counted if self.counted else 0.0


@dataclass
class AnalogyScore:
    """Scores of sections, and their sums."""

    total: Section = field(init=False)
    semantic: Section = field(init=False)
    syntactic: Section = field(init=False)
    sections: Sequence[Section]

    def __post_init__(self) -> None:
        # Google's syntactic sections are named "gram1-adjective-to-adverb" and so on.
        syntactic = [part for part in self.sections if part.name.startswith("gram")]
        semantic = [part for part in self.sections if part not in syntactic]
        self.total = _sum("total", self.sections)
        self.semantic = _sum("semantic", semantic)
        self.syntactic = _sum("syntactic", syntactic)


def _sum(name: str, parts: Sequence[Section]) -> Section:
    correct = sum(part.correct for part in parts)
    counted = sum(part.counted for part in parts)
    return Section(name, correct, counted, sum(part.skipped for part in parts))


@dataclass
class SimilarityScore:
    """Correlation of cosines with human judgement on a set of word pairs."""

    name: str
    spearman: float | None  # rank correlation; None if undefined
    pairs: int  # that were counted
    oov: float  # share of the pairs with unknown words


def analogies(
    words: Sequence[str],
    vectors: torch.Tensor | np.ndarray,
    questions: str | Path | None = None,
    restrict_vocab: int | None = ASKED,
    folded: Folded | None = None,
) -> AnalogyScore:
    """Score "a is to b as c is to ?" by the word nearest to b - a + c.

    Counts equal those of gensim's `evaluate_word_analogies`, but gensim, which takes
    50 MiB, is not imported. This is 3CosAdd: Mikolov et al. 2013, arXiv 1301.3781.
    Only the first `restrict_vocab` words, the most frequent ones, are asked for and answered. The
    default questions are Google's. `folded` is what `fold_case` returns for these words.
    """
    import torch

    from w2v.vectors.analogies import answered_correctly

    words = words[:restrict_vocab]
    vectors_ND = torch.as_tensor(vectors).detach()[: len(words)].float()
    finite_N = torch.stack(vectors_ND.aminmax(dim=1)).isfinite().all(0)
    if not finite_N.all():
        word = words[int(finite_N.int().argmin())]
        raise EvaluationError(
            f"the vector of {word!r} holds NaN or infinity; train with a lower optimizer.lr"
        )
    # Questions are in upper case; a word stands for the most frequent of its case variants.
    first, group = folded or fold_case(words)
    sections = datasets.read_questions(questions)
    rows = [first.get(word, -1) for _, asked in sections for four in asked for word in four]
    ids_Q4 = torch.tensor(rows).view(-1, 4)
    # All sections are answered in one call, as batches are fastest.
    known_Q = (ids_Q4 >= 0).all(1)
    correct_Q = torch.zeros_like(known_Q)
    device = vectors_ND.device
    correct_Q[known_Q] = answered_correctly(
        vectors_ND, torch.tensor(group, device=device), ids_Q4[known_Q].to(device)
    )
    sizes = [len(asked) for _, asked in sections]
    parts = zip(correct_Q.split(sizes), known_Q.split(sizes), strict=True)
    return AnalogyScore(
        [
            Section(name, int(correct.sum()), int(known.sum()), int((~known).sum()))
            for (name, _), (correct, known) in zip(sections, parts, strict=True)
        ]
    )


def similarity(
    words: Sequence[str],
    vectors: torch.Tensor | np.ndarray,
    name: str | Path,
    restrict_vocab: int | None = ASKED,
    folded: Folded | None = None,
) -> SimilarityScore:
    """Correlate cosines with human judgement, as `evaluate_word_pairs`.

    `name` is "wordsim353", "simlex999" or a file; the other arguments are those of `analogies`.
    """
    import torch

    first, _ = folded or fold_case(words[:restrict_vocab])
    judged = datasets.judged_pairs(name)
    known = [pair for pair in judged if pair[0] in first and pair[1] in first]
    spearman = math.nan
    if len(known) >= 2:
        rows_P2 = torch.tensor([[first[a], first[b]] for a, b, _ in known])
        pairs_P2D = torch.as_tensor(vectors)[rows_P2].detach().float().cpu().numpy()
        unit_2PD = [normalize(pairs_P2D[:, end]) for end in (0, 1)]
        cosine_P = [a_D @ b_D for a_D, b_D in zip(*unit_2PD, strict=True)]
        human_P = [judgement for _, _, judgement in known]
        with np.errstate(all="ignore"):  # NaN if all cosines are equal
            spearman = float(np.corrcoef(_ranks(cosine_P), _ranks(human_P))[0, 1])
    defined = None if math.isnan(spearman) else spearman
    return SimilarityScore(
        datasets.set_name(name), defined, len(known), 1 - len(known) / len(judged)
    )


class Scores(NamedTuple):
    """Scores of Google's analogies, word pairs, and further analogies by file."""

    analogies: AnalogyScore
    similarities: Sequence[SimilarityScore]
    further: Mapping[str, AnalogyScore] = {}


def scores(
    words: Sequence[str],
    vectors: torch.Tensor | np.ndarray,
    questions: Sequence[str | Path] = (),
    pairs: Sequence[str | Path] = (),
    restrict_vocab: int | None = ASKED,
) -> Scores:
    """Score Google's analogies, word pairs, and further files of both."""
    same = restrict_vocab, fold_case(words[:restrict_vocab])
    google, *further = (analogies(words, vectors, file, *same) for file in (None, *questions))
    sets = (*datasets.PAIR_SETS, *pairs)
    similarities = [similarity(words, vectors, name, *same) for name in sets]
    names = map(datasets.set_name, questions)
    return Scores(google, similarities, dict(zip(names, further, strict=True)))


def report(scores: Scores) -> tuple[str, str]:
    """Format the scores as aligned tables: sections of analogies, and sums."""
    score, similarities, further = scores
    counted = sum(other.total.counted for other in (score, *further.values()))
    if not counted and not any(pairs.pairs for pairs in similarities):
        nothing = "no scores: no question of the analogies and no word pair is in the vocabulary"
        return "", nothing

    def table(parts: Iterable[tuple[str, Section]]) -> list[str]:
        lines = [f"{'analogies':<{width}}  accuracy  correct  counted  skipped"]
        for name, part in parts:
            share = f"{100 * part.accuracy:.1f} %" if part.counted else "-"
            counts = f"{part.correct:>7}  {part.counted:>7}  {part.skipped:>7}"
            lines.append(f"{name:<{width}}  {share:>8}  {counts}")
        return lines

    sections = [(part.name, part) for part in score.sections]
    for name, other in further.items():
        sections += [(f"{name}: {part.name}", part) for part in other.sections]
    sums = [(part.name, part) for part in (score.semantic, score.syntactic, score.total)]
    sums += [(name, other.total) for name, other in further.items()]
    titles = [datasets.title(pairs.name) for pairs in similarities]
    # All tables have a first column of the same width.
    width = max(map(len, [*titles, *(name for name, _ in [*sections, *sums])]))
    lines = [*table(sums), "", f"{'similarity':<{width}}  spearman    pairs  unknown"]
    for title, pairs in zip(titles, similarities, strict=True):
        rho = "-" if pairs.spearman is None else f"{pairs.spearman:.3f}"
        lines.append(f"{title:<{width}}  {rho:>8}  {pairs.pairs:>7}  {100 * pairs.oov:>5.1f} %")
    return "\n".join(table(sections)), "\n".join(lines)


def as_dict(scores: Scores) -> dict[str, Any]:
    """Return the scores as plain values for JSON; shares are from 0 to 1.

    "questions" has those of further files of analogies by name.
    """
    by_name = {pairs.name: asdict(pairs) for pairs in scores.similarities}
    plain = {"analogies": asdict(scores.analogies), "similarity": by_name}
    others = {name: asdict(other) for name, other in scores.further.items()}
    return plain | {"questions": others} if others else plain


def _ranks(values_P: Sequence[float]) -> np.ndarray:
    """Return ranks from 1; equal values share their mean rank."""
    # SciPy does the same, but its import takes 1 s and 55 MiB at the end of each run.
    _, place_P, count = np.unique(values_P, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place_P]


def fold_case(words: Sequence[str]) -> Folded:
    """Return the first row of each upper-case word, and that of every word."""
    first: dict[str, int] = {}
    group = [first.setdefault(word.upper(), row) for row, word in enumerate(words)]
    return first, group
