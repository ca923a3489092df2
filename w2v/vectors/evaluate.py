"""Score vectors on analogies and word similarity, by gensim's protocol.

Shapes: N scored words, n words of a block, D dimensions, Q questions, P places in [Q, N], or pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.vectors import datasets
from w2v.vectors.datasets import RESTRICT_VOCAB, EvaluationError

# Questions and words of a block. On a CPU its cosines take 8 MiB, so that they stay in its cache.
QUESTIONS = 512
MOST_SHOWN = 10  # recommended items
LEAST_PAIRS = 10  # ranks of fewer correlate by chance
WORDS = {"cpu": 4096, "cuda": 65_536}


@dataclass
class Section:
    """Counts of answers; questions with unknown words are skipped."""

    name: str
    correct: float  # a whole number of answers, or the sum of shares
    counted: int
    skipped: int
    accuracy: float = field(init=False)  # share of the counted; 0 if there are none, as in gensim

    def __post_init__(self) -> None:
        self.accuracy = self.correct / max(1, self.counted)


@dataclass
class AnalogyScore:
    """Scores of sections, and their sums."""

    total: Section = field(init=False)
    semantic: Section = field(init=False)
    syntactic: Section = field(init=False)
    sections: Sequence[Section]
    answers: str = ""  # of all questions in order, for paired tests: 1 is right, nan was skipped

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
    answers: str = ""  # of all pairs in order: their mean is `spearman`; nan was skipped


class ItemScore(AnalogyScore):
    """Score of recommended items; the second section is of popular ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.total = self.sections[0]


class Scores(NamedTuple):
    """Scores of Google's analogies, word pairs, and further analogies by file.

    Those of held-out items are among the further ones, as `datasets.ITEM_SCORES`.
    """

    analogies: AnalogyScore
    similarities: Sequence[SimilarityScore]
    further: Mapping[str, AnalogyScore] = {}

    def __str__(self) -> str:
        return "\n\n".join(filter(None, report(self)))


class Scorer:
    """Score vectors where they are, on a CPU or a GPU.

    Words are compared in upper case. A word in a question stands for its most frequent case
    variant; any variant of the right answer is right.

    Args:
        words: Words by falling frequency.
        vectors: Their vectors; tables of a GPU are scored there.
        restrict_vocab: Number of words that are used, as in gensim; None for all.
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: Tensor | np.ndarray,
        restrict_vocab: int | None = RESTRICT_VOCAB,
    ):
        words = words[:restrict_vocab]
        self.vectors_ND = torch.as_tensor(vectors)[: len(words)].detach().float()
        length_N = torch.linalg.vector_norm(self.vectors_ND, dim=1)
        if not (finite_N := length_N.isfinite()).all():
            word = words[int(finite_N.int().argmin())]
            raise EvaluationError(
                f"the vector of {word!r} holds NaN or infinity; train with a lower optimizer.lr"
            )
        self.scale_N = 1 / length_N.clamp(min=torch.finfo().tiny)  # zero vectors have cosine 0
        self.words = words
        self.rows: dict[str, list[int]] = {}  # of all case variants, the most frequent one first
        for row, word in enumerate(words):
            self.rows.setdefault(word.upper(), []).append(row)

    def analogies(self, questions: str | Path | None = None) -> AnalogyScore:
        """Score "a is to b as c is to d" by the word nearest to b - a + c.

        This is 3CosAdd (Mikolov et al. 2013, arXiv 1301.3781), without a, b and c among the
        answers. The default questions are Google's.
        """
        sections = []
        answers = []
        for name, asked in datasets.read_questions(questions):
            is_known = [all(word in self.rows for word in words) for words in asked]
            known = list(itertools.compress(asked, is_known))
            blocks = (known[n : n + QUESTIONS] for n in range(0, len(known), QUESTIONS))
            right = [is_right for block in blocks for is_right in self._answer(block)]
            sections.append(Section(name, sum(right), len(known), len(asked) - len(known)))
            answers.append(_in_order(is_known, map(str, map(int, right))))
        return AnalogyScore(sections, " ".join(answers))

    def _answer(self, questions: Sequence[Sequence[str]]) -> list[bool]:
        """Return whether each d is nearer to b - a + c than any other word."""
        a_QD, b_QD, c_QD = (
            self._unit([self.rows[words[place]][0] for words in questions]) for place in range(3)
        )
        target_QD = b_QD - a_QD + c_QD
        device = target_QD.device
        # The cosines of d, unless it is a, b or c itself. With ties, no answer is right.
        answers = [
            (number, row)
            for number, words in enumerate(questions)
            for row in self.rows[words[3]]
            if words[3] not in words[:3]
        ]
        question_P, row_P = torch.tensor(answers, dtype=torch.long, device=device).reshape(-1, 2).T
        answer_P = (target_QD[question_P] * self._unit(row_P)).sum(1)
        answer_Q = torch.full([len(questions)], -math.inf, device=device)
        answer_Q.scatter_reduce_(0, question_P, answer_P, "amax")
        # The greatest cosine of the other words, so of all but a, b, c and d.
        asked = [
            (number, row)
            for number, words in enumerate(questions)
            for word in words
            for row in self.rows[word]
        ]
        question_P, row_P = torch.tensor(asked, device=device).T
        other_Q = torch.full_like(answer_Q, -math.inf)
        for cosine_Qn in self._cosines(target_QD, question_P, row_P):
            other_Q = other_Q.maximum(cosine_Qn.amax(1))
        return (answer_Q > other_Q).tolist()

    def _cosines(self, target_QD: Tensor, question_P: Tensor, row_P: Tensor) -> Iterator[Tensor]:
        """Yield cosines [Q, n] with blocks of words; -inf at the given places.

        Targets that are not of length 1 scale them. A block is overwritten by the next.
        """
        words = min(WORDS[target_QD.device.type], len(self.vectors_ND))
        # Memory of one block serves all: the system would clear it anew for each.
        memory = target_QD.new_empty(len(target_QD) * words)
        for first in range(0, len(self.vectors_ND), words):
            block_nD = self.vectors_ND[first : first + words]
            shape = len(target_QD), len(block_nD)
            cosine_Qn = memory[: math.prod(shape)].view(shape)
            torch.mm(target_QD, block_nD.T, out=cosine_Qn)
            cosine_Qn.mul_(self.scale_N[first : first + words])
            inside_P = (row_P >= first) & (row_P < first + words)
            cosine_Qn[question_P[inside_P], row_P[inside_P] - first] = -math.inf
            yield cosine_Qn

    def items(self, pairs: Sequence[Sequence[str]]) -> dict[str, ItemScore]:
        """Score the items nearest to each query as recommendations.

        pairs: The query, and the item that followed it, [Q, 2]. Hits are among the first 10; MRR
        is the mean of 1 / rank, 0 after the first 10. Equal cosines count against the item. The
        most frequent items are recommended for comparison.
        """
        rows = {word: row for row, word in enumerate(self.words)}  # letter case tells items apart
        is_known = [query in rows and item in rows for query, item in pairs]
        known = [(rows[query], rows[item]) for query, item in itertools.compress(pairs, is_known)]
        row_Q2 = torch.tensor(known, dtype=torch.long).reshape(-1, 2).to(self.vectors_ND.device)
        near_Q = torch.cat([self._ranks(*block.T) for block in row_Q2.split(QUESTIONS)])
        popular_Q = 1 + row_Q2[:, 1] - (row_Q2[:, 0] < row_Q2[:, 1]).long()  # without the query
        ranks = {"neighbors": near_Q, "popularity": popular_Q}
        hits = {of: (rank_Q <= MOST_SHOWN).long() for of, rank_Q in ranks.items()}
        reciprocals = {of: hits[of] / rank_Q for of, rank_Q in ranks.items()}
        found = {}
        for name, values in zip(datasets.ITEM_SCORES, (hits, reciprocals), strict=True):
            counts = len(known), len(pairs) - len(known)
            sections = [
                Section(of, value_Q.sum().item(), *counts) for of, value_Q in values.items()
            ]
            answers = (f"{value:.4g}" for value in values["neighbors"].tolist())
            found[name] = ItemScore(sections, _in_order(is_known, answers))
        return found

    def _ranks(self, query_Q: Tensor, item_Q: Tensor) -> Tensor:
        """Return the rank of each item among the words nearest to its query."""
        target_QD = self._unit(query_Q)
        cosine_Q1 = (target_QD * self._unit(item_Q)).sum(1, keepdim=True)
        question_P = torch.arange(len(query_Q), device=query_Q.device).repeat(2)
        rank_Q = torch.ones_like(query_Q)
        for other_Qn in self._cosines(target_QD, question_P, torch.cat([query_Q, item_Q])):
            rank_Q += (other_Qn >= cosine_Q1).sum(1)
        return rank_Q

    def similarity(self, name: str | Path) -> SimilarityScore:
        """Correlate cosines with human judgement.

        This is gensim's `evaluate_word_pairs`. `name` is "wordsim353", "simlex999" or a file.
        """
        judged = datasets.judged_pairs(name)
        is_known = [pair[0] in self.rows and pair[1] in self.rows for pair in judged]
        known = list(itertools.compress(judged, is_known))
        spearman = None
        answers = ""
        if len(known) >= LEAST_PAIRS:
            first_PD = self._unit([self.rows[word][0] for word, _, _ in known])
            second_PD = self._unit([self.rows[word][0] for _, word, _ in known])
            cosine_P = (first_PD * second_PD).sum(1).cpu().numpy()
            product_P = _standard_ranks(cosine_P) * _standard_ranks([pair[2] for pair in known])
            if np.isfinite(product_P).all():  # not if all cosines or judgements are equal
                spearman = float(product_P.mean())
                answers = _in_order(is_known, (f"{product:.4f}" for product in product_P))
        unknown = 1 - len(known) / len(judged)
        return SimilarityScore(datasets.set_name(name), spearman, len(known), unknown, answers)

    def _unit(self, rows: Sequence[int] | Tensor) -> Tensor:
        """Return vectors of length 1 of some rows."""
        return self.vectors_ND[rows] * self.scale_N[rows, None]


def _in_order(is_known: Iterable[bool], answers: Iterable[str]) -> str:
    """Return the answers at the places of known items, nan at the others."""
    following = iter(answers)
    return " ".join(next(following) if known else "nan" for known in is_known)


def _standard_ranks(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return ranks with mean 0 and deviation 1, NaN if all values are equal.

    Equal values share their mean rank. The mean product of two is Spearman's correlation: SciPy
    has it too, but its import takes 1 s and 55 MiB at the end of each run.
    """
    _, place_P, count = np.unique(values, return_inverse=True, return_counts=True)
    rank_P = (np.cumsum(count) - (count - 1) / 2)[place_P]
    with np.errstate(all="ignore"):
        return (rank_P - rank_P.mean()) / rank_P.std()


def scores(
    words: Sequence[str],
    vectors: Tensor | np.ndarray,
    questions: Sequence[str | Path] = (),
    pairs: Sequence[str | Path] = (),
    restrict_vocab: int | None = RESTRICT_VOCAB,
    items: Sequence[Sequence[str]] = (),
) -> Scores:
    """Score Google's analogies, word pairs, and further files of both.

    `items` are scored if there are some: see `Scorer.items`.
    """
    scorer = Scorer(words, vectors, restrict_vocab)
    further = {datasets.set_name(path): scorer.analogies(path) for path in questions}
    if items:
        further |= scorer.items(items)
    similarities = [scorer.similarity(name) for name in (*datasets.PAIR_SETS, *pairs)]
    return Scores(scorer.analogies(), similarities, further)


def report(scores: Scores) -> tuple[str, str]:
    """Format the scores as aligned tables: sections of analogies, and sums."""
    google, similarities, further = scores
    counted = sum(other.total.counted for other in (google, *further.values()))
    if not counted and not any(pairs.pairs for pairs in similarities):
        nothing = "no scores: no question of the analogies and no word pair is in the vocabulary"
        return "", nothing

    def table(title: str, parts: Sequence[tuple[str, Section]]) -> str:
        lines = [f"{title:<{width}}  accuracy  correct  counted  skipped"] if parts else []
        for name, part in parts:
            share = "-"
            if part.counted:
                share = f"{100 * part.accuracy:.1f} %"
            counts = f"{part.correct:>7.6g}  {part.counted:>7}  {part.skipped:>7}"
            lines.append(f"{name:<{width}}  {share:>8}  {counts}")
        return "\n".join(lines)

    sections, sums, items = [], [], []
    for name, other in further.items():
        if isinstance(other, ItemScore):
            items += [(name, other.total), ("  of popular items", other.sections[1])]
        else:
            sections += [(f"{name}: {part.name}", part) for part in other.sections]
            sums.append((name, other.total))
    if items:  # sets of words know nothing of them
        similarities = [pairs for pairs in similarities if pairs.pairs]
    if google.total.counted or not items:
        sections = [*((part.name, part) for part in google.sections), *sections]
        totals = google.semantic, google.syntactic, google.total
        sums = [*((part.name, part) for part in totals), *sums]
    titles = [datasets.title(pairs.name) for pairs in similarities]
    # All tables have a first column of the same width.
    width = max(map(len, [*titles, *(name for name, _ in [*sections, *sums, *items])]))
    lines = [f"{'similarity':<{width}}  spearman    pairs  unknown"] if similarities else []
    for title, pairs in zip(titles, similarities, strict=True):
        rho = "-"
        if pairs.spearman is not None:
            rho = f"{pairs.spearman:.3f}"
        lines.append(f"{title:<{width}}  {rho:>8}  {pairs.pairs:>7}  {100 * pairs.oov:>5.1f} %")
    tables = table("analogies", sums), table("items", items), "\n".join(lines)
    return table("analogies", sections), "\n\n".join(filter(None, tables))


def as_dict(scores: Scores) -> dict[str, Any]:
    """Return the scores as plain values for JSON; shares are from 0 to 1.

    "questions" has those of further files of analogies by name.
    """
    by_name = {pairs.name: asdict(pairs) for pairs in scores.similarities}
    plain = {"analogies": asdict(scores.analogies), "similarity": by_name}
    if scores.further:
        plain["questions"] = {name: asdict(other) for name, other in scores.further.items()}
    return plain
