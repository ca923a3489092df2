"""How good the vectors are: analogies and word similarity, by gensim's protocol.

`analogies` is gensim's `evaluate_word_analogies` in batches, on whichever device the vectors lie, with the same counts.
Shapes: V words, N of them searched, D dimensions, Q questions of a block.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from gensim.models import KeyedVectors

TOPN = 5  # gensim looks for the answer among the five nearest words
ASKED = 300_000  # words, the most frequent, that are asked for and answered, as in gensim
QUESTIONS, WORDS = 512, {"cpu": 1 << 12, "cuda": 1 << 16}  # scored at once: 8 MiB near a CPU's cache, 128 MiB on a GPU
PAIR_SETS = {"wordsim353": ("WordSim-353", "wordsim353.tsv"), "simlex999": ("SimLex-999", "simlex999.txt")}  # in gensim's test data


class EvaluationError(ValueError):
    """A question that cannot be asked; the message is one line that names the value and the remedy."""


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
        return Section(name, sum(s.correct for s in rows), sum(s.counted for s in rows), sum(s.skipped for s in rows))


@dataclass(frozen=True)
class SimilarityScore:
    """Spearman's rank correlation with human judgement over `pairs` pairs; None where it is undefined. `oov`: share of unknown pairs."""

    name: str
    spearman: float | None
    pairs: int
    oov: float


def analogies(
    words: Sequence[str], vectors: torch.Tensor | np.ndarray, questions: str | Path | None = None,
    restrict_vocab: int | None = ASKED, case_insensitive: bool = True,
) -> AnalogyScore:  # fmt: skip
    """Score "a is to b as c is to ?" by the nearest word to b - a + c (3CosAdd, Mikolov et al. 2013, arXiv 1301.3781).

    words [V], most frequent first; vectors [V, D], taken as float32; questions: a file of ": section" lines and lines of
    four words, Google's questions-words.txt by default; only the first `restrict_vocab` words are asked for and answered.
    Counts equal those of gensim's `evaluate_word_analogies`: questions whose two best answers are so close that rounding
    could exchange them are answered in gensim's own arithmetic. gensim itself, which takes 50 MiB, is not imported.
    """
    import torch

    assert vectors.ndim == 2 and len(words) == len(vectors), (len(words), vectors.shape)
    words = list(words[:restrict_vocab])
    vectors_ND = torch.as_tensor(vectors).detach()[: len(words)].float()
    finite_N = torch.stack(vectors_ND.aminmax(dim=1)).isfinite().all(0)
    if not finite_N.all():
        word = words[int(finite_N.int().argmin())]
        raise EvaluationError(f"the vector of {word!r} holds NaN or infinity; train with a lower optimizer.lr")
    first, group = _fold_vocabulary(words, case_insensitive)
    sections = read_questions(questions, case_insensitive)
    known = [(n, [first[w] for w in q]) for n, (_, asked) in enumerate(sections) for q in asked if first.keys() >= set(q)]
    ids_Q4 = torch.tensor([ids for _, ids in known], dtype=torch.long).reshape(-1, 4)
    right_Q = _answer(vectors_ND, torch.tensor(group, device=vectors_ND.device), ids_Q4.to(vectors_ND.device))
    results: list[list[bool]] = [[] for _ in sections]
    for (n, _), right in zip(known, right_Q.tolist(), strict=True):
        results[n].append(right)
    return _score(sections, results)


def analogies_gensim(
    kv: KeyedVectors, questions: str | Path | None = None, restrict_vocab: int | None = ASKED, case_insensitive: bool = True
) -> AnalogyScore:
    """The same score by gensim's own `evaluate_word_analogies`, one question at a time."""
    path = str(questions or _test_data("questions-words.txt"))
    sections = read_questions(path, case_insensitive)
    with quiet():
        _, answered = kv.evaluate_word_analogies(path, restrict_vocab=restrict_vocab, case_insensitive=case_insensitive)
    results = [[True] * len(s["correct"]) + [False] * len(s["incorrect"]) for s in answered[: len(sections)]]  # then comes the total
    return _score(sections, results)


def read_questions(path: str | Path | None, case_insensitive: bool = True) -> list[tuple[str, list[list[str]]]]:
    """Names and four-word questions of a file's sections, in upper case unless case counts; as in gensim, other lines are passed over."""
    path = Path(path or _test_data("questions-words.txt"))
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"questions file {path} cannot be read ({error}); name a UTF-8 text file") from None
    sections: list[tuple[str, list[list[str]]]] = []
    for number, line in enumerate(lines, start=1):
        if line.startswith(": "):
            sections.append((line.lstrip(": ").strip(), []))
        elif sections:
            question = [*map(sys.intern, (line.upper() if case_insensitive else line).split())]  # a word stands in many questions
            if len(question) == 4:
                sections[-1][1].append(question)
        elif line or number < len(lines):
            raise EvaluationError(f"{path}, line {number}: questions need a section first; begin the file with ': name'")
    if not any(asked for _, asked in sections):
        raise EvaluationError(f"{path} holds no question; write ': section' lines, and lines of four words below them")
    return sections


def similarity(
    words: Sequence[str], vectors: torch.Tensor | np.ndarray, name: str, restrict_vocab: int | None = ASKED
) -> SimilarityScore:
    """Correlation of cosines with human judgement on `wordsim353` or `simlex999`, as gensim's `evaluate_word_pairs` finds it.

    words [V], most frequent first; vectors [V, D], taken as float32.
    """
    import numpy as np
    import torch

    first, _ = _fold_vocabulary(words[:restrict_vocab], case_insensitive=True)
    lines = _test_data(PAIR_SETS[name][1]).read_text(encoding="utf-8").splitlines()
    judged = [line.upper().split("\t") for line in lines if line.count("\t") == 2 and not line.startswith("#")]
    known = [(first[a], first[b], float(judgement)) for a, b, judgement in judged if a in first and b in first]
    spearman = math.nan
    if len(known) >= 2:
        *ends, human_P = zip(*known, strict=True)
        a_PD, b_PD = (_unit(torch.as_tensor(vectors)[list(end)].detach().float().cpu().numpy()) for end in ends)
        cosine_P = np.array([a_D @ b_D for a_D, b_D in zip(a_PD, b_PD, strict=True)])
        with np.errstate(all="ignore"):  # no order at all
            spearman = float(np.corrcoef(_ranks(cosine_P), _ranks(np.array(human_P)))[0, 1])
    return SimilarityScore(name, None if math.isnan(spearman) else spearman, len(known), 1 - len(known) / len(judged))


def scores(kv: KeyedVectors, questions: str | None, restrict_vocab: int, by_gensim: bool) -> tuple[AnalogyScore, list[SimilarityScore]]:
    """Analogies, in torch or by gensim itself, and both sets of word pairs."""
    ask = questions, restrict_vocab
    score = analogies_gensim(kv, *ask) if by_gensim else analogies(kv.index_to_key, kv.vectors, *ask)
    return score, [similarity(kv.index_to_key, kv.vectors, name, restrict_vocab) for name in PAIR_SETS]


def report(analogy_score: AnalogyScore, similarities: Sequence[SimilarityScore] = ()) -> str:
    """The scores as aligned plain text."""
    rows = [*analogy_score.sections, analogy_score.semantic, analogy_score.syntactic, analogy_score.total]
    width = max(len("WordSim-353"), *(len(row.name) for row in rows))
    lines = [f"{'analogies':<{width}}  accuracy  correct  counted  skipped"]
    for number, row in enumerate(rows):
        share = f"{100 * row.accuracy:.1f} %" if row.counted else "-"
        gap = "\n" * (number == len(analogy_score.sections))
        lines.append(f"{gap}{row.name:<{width}}  {share:>8}  {row.correct:>7}  {row.counted:>7}  {row.skipped:>7}")
    if similarities:
        lines += ["", f"{'similarity':<{width}}  spearman    pairs  unknown"]
    for score in similarities:
        rho = "-" if score.spearman is None else f"{score.spearman:.3f}"
        lines.append(f"{PAIR_SETS[score.name][0]:<{width}}  {rho:>8}  {score.pairs:>7}  {100 * score.oov:>5.1f} %")
    return "\n".join(lines)


def as_dict(analogy_score: AnalogyScore, similarities: Sequence[SimilarityScore] = ()) -> dict[str, Any]:
    """The scores as plain values for JSON; shares are from 0 to 1, and an undefined correlation is None."""
    rows = (analogy_score.total, analogy_score.semantic, analogy_score.syntactic, *analogy_score.sections)
    total, semantic, syntactic, *sections = [asdict(row) | {"accuracy": row.accuracy} for row in rows]
    parts = {"total": total, "semantic": semantic, "syntactic": syntactic, "sections": sections}
    return {"analogies": parts, "similarity": {score.name: asdict(score) for score in similarities}}


def _answer(vectors_ND: torch.Tensor, group_N: torch.Tensor, ids_Q4: torch.Tensor) -> torch.Tensor:
    """Whether each question a, b, c, d is answered rightly: bool [Q], on the CPU; words are numbered by the first of their spelling."""
    import torch

    if not len(ids_Q4):
        return torch.zeros(0, dtype=torch.bool)
    length_N = torch.linalg.vector_norm(vectors_ND, dim=1)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the margin in _answer_block is that of float32
    try:
        blocks = [_answer_block(vectors_ND, length_N, group_N, ids) for ids in ids_Q4.split(QUESTIONS)]
    finally:
        torch.set_float32_matmul_precision(precision)
    right_Q, doubtful_Q = (torch.cat(parts).cpu() for parts in zip(*blocks, strict=True))
    if doubtful_Q.any():
        answers = _answers_as_gensim(vectors_ND, group_N, ids_Q4[doubtful_Q.to(ids_Q4.device)])
        right_Q[doubtful_Q] = torch.tensor(answers) == ids_Q4.cpu()[doubtful_Q, 3]
    return right_Q


def _answer_block(
    vectors_ND: torch.Tensor, length_N: torch.Tensor, group_N: torch.Tensor, ids_Q4: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which questions are answered rightly, and which are doubtful, since rounding could change the answer: two bool [Q]."""
    a_QD, b_QD, c_QD, _ = (vectors_ND[ids_Q] / length_N[ids_Q, None] for ids_Q in ids_Q4.unbind(1))
    target_QD = b_QD + c_QD - a_QD
    length_Q1 = target_QD.norm(dim=1, keepdim=True)
    best, top = _nearest(vectors_ND, length_N, target_QD / length_Q1, ids_Q4[:, :3])
    # Case variants of a, b and c may be among the five; they are passed over.
    group = group_N[top[:, :TOPN]]
    other = (group[:, :, None] != ids_Q4[:, None, :3]).all(2)
    place_Q1 = other.int().argmax(1, keepdim=True)  # the first that is another word
    gap_Q = (best.gather(1, place_Q1) - best.gather(1, (place_Q1 + 1).clamp(max=best.shape[1] - 1))).squeeze(1)
    # float32's rounding at worst: of two D-term dot products, of norms, and of the sum, where it grows as the sum shrinks.
    margin_Q = 6 * 2.0**-23 * (vectors_ND.shape[1] + 8) / length_Q1.squeeze(1).clamp(max=1)
    certain_Q = other.any(1) & (gap_Q > margin_Q)  # False where anything is NaN
    return group.gather(1, place_Q1).squeeze(1) == ids_Q4[:, 3], ~certain_Q


def _nearest(
    vectors_ND: torch.Tensor, length_N: torch.Tensor, target_QD: torch.Tensor, without_Q3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The TOPN + 1 greatest cosines for each target, and of which words they are; of some words at a time, and none to `without_Q3`."""
    import torch

    enough, at_once = TOPN + 1 + without_Q3.shape[1], WORDS[vectors_ND.device.type]
    memory = target_QD.new_empty(len(target_QD) * at_once)  # one for all, as the allocator would leave holes
    best, top = [], []
    for first in range(0, len(vectors_ND), at_once):
        part_nD, length_n = vectors_ND[first : first + at_once], length_N[first : first + at_once]
        cosines_Qn = memory[: len(target_QD) * len(part_nD)].view(len(target_QD), len(part_nD))
        torch.mm(target_QD, part_nD.T, out=cosines_Qn).div_(length_n).nan_to_num_(nan=-math.inf)  # NaN for a zero vector, as in gensim
        of_part = cosines_Qn.topk(min(enough, cosines_Qn.shape[1]), dim=1)
        best.append(of_part.values)
        top.append(of_part.indices + first)
    best_Qn, top_Qn = torch.cat(best, dim=1), torch.cat(top, dim=1)
    best_Qn.masked_fill_((top_Qn[:, :, None] == without_Q3[:, None]).any(2), -math.inf)
    nearest = best_Qn.topk(min(TOPN + 1, best_Qn.shape[1]), dim=1)
    return nearest.values, top_Qn.gather(1, nearest.indices)


def _answers_as_gensim(vectors_ND: torch.Tensor, group_N: torch.Tensor, ids_Q4: torch.Tensor) -> list[int]:
    """What gensim's `most_similar` answers to each question, as a number of `group_N`; -1 for nothing.

    Operation by operation as there, with the types that numpy gives them, since only so does rounding fall alike.
    """
    import numpy as np

    rows_ND, group, answers = vectors_ND.cpu().numpy(), group_N.tolist(), []
    at_once = WORDS["cpu"]
    norms_N = np.concatenate([np.linalg.norm(rows_ND[first : first + at_once], axis=1) for first in range(0, len(rows_ND), at_once)])
    signs = np.array([1.0, 1.0, -1.0])
    with np.errstate(all="ignore"):  # zero vectors
        for a, b, c, _ in ids_Q4.tolist():
            mean_D = np.zeros(rows_ND.shape[1], rows_ND.dtype)
            for sign, word in zip(signs, (b, c, a), strict=True):
                mean_D += sign * (rows_ND[word] / norms_N[word])
            mean_D = _unit((mean_D / abs(signs).sum())[None])[0].astype(np.float32)
            distance_N = -(rows_ND @ mean_D / norms_N)
            nearest = TOPN + 3
            if nearest < len(distance_N):
                places = np.argpartition(distance_N, nearest)[:nearest]
                places = places[np.argsort(distance_N[places])]
            else:
                places = np.argsort(distance_N)[:nearest]
            found = [group[place] for place in places.tolist() if place not in (a, b, c)][:TOPN]
            answers.append(next((g for g in found if g not in (a, b, c)), found[-1] if found else -1))
    return answers


def _test_data(name: str) -> Path:
    """A file that comes with gensim, found without importing it."""
    return Path(find_spec("gensim").origin).parent / "test" / "test_data" / name


def _unit(vectors_ND: np.ndarray) -> np.ndarray:
    """Vectors of length 1, by way of float64 as in gensim; those without length or with NaN stay as they are."""
    import numpy as np

    wide_ND = vectors_ND.astype(np.float64)
    length_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return (wide_ND * (1.0 / np.where(length_N1 > 0, length_N1, 1))).astype(vectors_ND.dtype)


def _ranks(values_P: np.ndarray) -> np.ndarray:
    """The place of each value, from 1; equal ones share the mean of theirs."""
    import numpy as np

    _, place_P, count = np.unique(values_P, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place_P]


def _fold_vocabulary(words: Sequence[str], case_insensitive: bool) -> tuple[dict[str, int], list[int]]:
    """Number of the first word of each spelling, in upper case unless case counts; and that number for every word."""
    first: dict[str, int] = {}
    group = [first.setdefault(word.upper() if case_insensitive else word, index) for index, word in enumerate(words)]
    return first, group


def _score(sections: list[tuple[str, list[list[str]]]], results: list[list[bool]]) -> AnalogyScore:
    rows = [Section(name, sum(right), len(right), len(asked) - len(right)) for (name, asked), right in zip(sections, results, strict=True)]
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
