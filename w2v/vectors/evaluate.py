"""Score vectors on analogies and word similarity, by gensim's protocol.

Shapes: V words, the first N of them used, D dimensions, P pairs of words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.vectors import datasets
from w2v.vectors.analogies import AnalogyScore, Folded, Section, analogies, fold_case, on_devices
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.query import normalize


@dataclass
class SimilarityScore:
    """Correlation of cosines with human judgement on a set of word pairs."""

    name: str
    spearman: float | None  # rank correlation; None if undefined
    pairs: int  # that were counted
    oov: float  # share of the pairs with unknown words


def similarity(
    words: Sequence[str],
    vectors: Tensor | np.ndarray,
    name: str | Path,
    restrict_vocab: int | None = RESTRICT_VOCAB,
    folded: Folded | None = None,
) -> SimilarityScore:
    """Correlate cosines with human judgement, as `evaluate_word_pairs`.

    `name` is "wordsim353", "simlex999" or a file; the other arguments are those of `analogies`.
    """
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
    unknown = 1 - len(known) / len(judged)
    return SimilarityScore(datasets.set_name(name), defined, len(known), unknown)


class Scores(NamedTuple):
    """Scores of Google's analogies, word pairs, and further analogies by file."""

    analogies: AnalogyScore
    similarities: Sequence[SimilarityScore]
    further: Mapping[str, AnalogyScore] = {}


def scores(
    words: Sequence[str],
    vectors: Tensor | np.ndarray,
    questions: Sequence[str | Path] = (),
    pairs: Sequence[str | Path] = (),
    restrict_vocab: int | None = RESTRICT_VOCAB,
) -> Scores:
    """Score Google's analogies, word pairs, and further files of both."""
    with ThreadPoolExecutor(1) as copies:
        copied = copies.submit(on_devices, vectors, restrict_vocab)
        same = restrict_vocab, fold_case(words[:restrict_vocab])
        on_cpu, on_gpu = copied.result()
    files = None, *questions
    google, *further = (analogies(words, on_cpu, file, *same, on_gpu) for file in files)
    sets = (*datasets.PAIR_SETS, *pairs)
    similarities = [similarity(words, on_cpu, name, *same) for name in sets]
    names = map(datasets.set_name, questions)
    return Scores(google, similarities, dict(zip(names, further, strict=True)))


def report(scores: Scores) -> tuple[str, str]:
    """Format the scores as aligned tables: sections of analogies, and sums."""
    google, similarities, further = scores
    counted = sum(other.total.counted for other in (google, *further.values()))
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

    sections = [(part.name, part) for part in google.sections]
    for name, other in further.items():
        sections += [(f"{name}: {part.name}", part) for part in other.sections]
    sums = [(part.name, part) for part in (google.semantic, google.syntactic, google.total)]
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
