"""Score analogies by gensim's protocol, all questions in batches.

Shapes: V words, the first N of them used, D dimensions, Q questions, n words of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from w2v.vectors import datasets
from w2v.vectors.datasets import RESTRICT_VOCAB, EvaluationError
from w2v.vectors.query import normalize

TOPN = 5  # gensim looks for the answer among the five nearest words
# Questions and words of a block on the CPU: its cosines are 8 MiB, near the cache.
QUESTIONS = 1 << 9
WORDS = 1 << 12
TILE = 128  # questions and words that a block of the GPU's kernel compares at a time
SPLITS = 8  # blocks that share the words of as many questions
Folded = tuple[dict[str, int], Tensor]  # from `fold_case`


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


def analogies(
    words: Sequence[str],
    vectors: Tensor | np.ndarray,
    questions: str | Path | None = None,
    restrict_vocab: int | None = RESTRICT_VOCAB,
    folded: Folded | None = None,
    on_gpu: Tensor | None = None,
) -> AnalogyScore:
    """Score "a is to b as c is to ?" by the word nearest to b - a + c.

    This is 3CosAdd (Mikolov et al. 2013, arXiv 1301.3781). Counts equal those of gensim's
    `evaluate_word_analogies`, among the first `restrict_vocab` words, the most frequent ones. The
    default questions are Google's. `folded` is what `fold_case` returns for these words, `on_gpu`
    what `on_devices` returns for the vectors.
    """
    words = words[:restrict_vocab]
    if on_gpu is None:
        vectors, on_gpu = on_devices(vectors, len(words))
    vectors_ND = torch.as_tensor(vectors)[: len(words)]
    length_N = torch.linalg.vector_norm(vectors_ND, dim=1)
    if not (finite_N := length_N.isfinite()).all():
        word = words[int(finite_N.int().argmin())]
        raise EvaluationError(
            f"the vector of {word!r} holds NaN or infinity; train with a lower optimizer.lr"
        )
    # Questions are in upper case; a word stands for the most frequent of its case variants.
    first, group_N = folded or fold_case(words)
    sections = datasets.read_questions(questions)
    rows = (first.get(word, -1) for _, asked in sections for four in asked for word in four)
    ids_Q4 = torch.from_numpy(np.fromiter(rows, np.int64).reshape(-1, 4))
    # All sections are answered in one call, as batches are fastest.
    known_Q = (ids_Q4 >= 0).all(1)
    correct_Q = torch.zeros_like(known_Q)
    answered = answered_correctly(vectors_ND, length_N, group_N, ids_Q4[known_Q], on_gpu)
    correct_Q[known_Q] = answered
    sizes = [len(asked) for _, asked in sections]
    parts = zip(correct_Q.split(sizes), known_Q.split(sizes), strict=True)
    scored = [
        Section(name, int(correct.sum()), int(known.sum()), int((~known).sum()))
        for (name, _), (correct, known) in zip(sections, parts, strict=True)
    ]
    return AnalogyScore(scored)


def on_devices(vectors: Tensor | np.ndarray, count: int | None) -> tuple[Tensor, Tensor | None]:
    """Return `count` vectors on the CPU, and on a GPU that can compare them."""
    vectors_ND = torch.as_tensor(vectors).detach()[:count].float()
    if not vectors_ND.is_cuda or find_spec("cupy") is None:
        return vectors_ND.cpu(), None
    on_gpu = vectors_ND if vectors_ND.stride(1) == 1 else vectors_ND.contiguous()
    return vectors_ND.cpu(), on_gpu


def fold_case(words: Sequence[str]) -> Folded:
    """Return the row of each upper-case word's first case variant.

    Second, that row for each of the words: [N].
    """
    first: dict[str, int] = {}
    rows = map(first.setdefault, map(str.upper, words), range(len(words)))
    return first, torch.from_numpy(np.fromiter(rows, np.int64, len(words)))


def answered_correctly(
    vectors_ND: Tensor, length_N: Tensor, group_N: Tensor, ids_Q4: Tensor, on_gpu_ND: Tensor | None
) -> Tensor:
    """Return bool [Q]: is "a is to b as c is to" answered by d?

    `group_N` is for each word the row of its first case variant; `ids_Q4` are rows of a, b, c, d.
    All are on the CPU. A GPU compares the vectors if `on_gpu_ND` has them too.
    """
    if not len(ids_Q4):
        return torch.zeros(0, dtype=torch.bool)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the margin below is that of float32
    try:
        if on_gpu_ND is not None:
            correct_Q, doubtful_Q = _answer_on_gpu(on_gpu_ND, vectors_ND, length_N, group_N, ids_Q4)
        else:
            parts = ids_Q4.split(QUESTIONS)
            blocks = [_answer_block(vectors_ND, length_N, group_N, ids) for ids in parts]
            correct_Q, doubtful_Q = map(torch.cat, zip(*blocks, strict=True))
    finally:
        torch.set_float32_matmul_precision(precision)
    if doubtful_Q.any():
        doubtful_ids = ids_Q4[doubtful_Q]
        parts = doubtful_ids.split(QUESTIONS)
        answer_Q = torch.cat([_settle(vectors_ND, length_N, group_N, ids) for ids in parts])
        undecided_Q = answer_Q < 0
        answers = _answers_as_gensim(vectors_ND, group_N, doubtful_ids[undecided_Q])
        answer_Q[undecided_Q] = torch.tensor(answers, dtype=torch.long)
        correct_Q[doubtful_Q] = answer_Q == doubtful_ids[:, 3]
    return correct_Q


def _answer_on_gpu(
    on_gpu_ND: Tensor, vectors_ND: Tensor, length_N: Tensor, group_N: Tensor, ids_Q4: Tensor
) -> tuple[Tensor, Tensor]:
    """Do what `_answer_block` does, for all questions and by one kernel.

    The kernels of torch that it would take, cuBLAS above all, take .3 s to load.
    """
    from w2v.kernels.launch import launch

    device, (words, dim), count = on_gpu_ND.device, on_gpu_ND.shape, len(ids_Q4)
    target_QD, margin_Q1 = _targets(vectors_ND, length_N, ids_Q4)
    excluded_Q3 = ids_Q4[:, :3].contiguous()
    asked = target_QD.to(device), excluded_Q3.int().to(device), count
    compared = on_gpu_ND, on_gpu_ND.stride(0), (1 / length_N).to(device), group_N.int().to(device)
    best_SQ, second_SQ = (torch.empty(SPLITS, count, device=device) for _ in range(2))
    row_SQ = torch.empty(SPLITS, count, dtype=torch.int32, device=device)
    found = best_SQ, row_SQ, second_SQ
    blocks = SPLITS * -(-count // TILE)
    with torch.cuda.device(device):
        launch("draw.cu", "nearest", {}, blocks, *asked, *compared, words, dim, SPLITS, *found)
    best_SQ, row_SQ, second_SQ = (part.cpu() for part in found)
    nearest_2Q = torch.cat([best_SQ, second_SQ]).topk(2, dim=0).values
    answer_Q = group_N[row_SQ.gather(0, best_SQ.argmax(0, keepdim=True))[0]]
    # Where more variants than gensim looks at could be nearer, it may find no answer.
    variants_Q = torch.bincount(group_N, minlength=words)[excluded_Q3].sum(1)
    certain_Q = (nearest_2Q[0] - nearest_2Q[1] > margin_Q1[:, 0]) & (nearest_2Q[0] < 2)
    certain_Q &= variants_Q - 3 < TOPN
    return answer_Q == ids_Q4[:, 3], ~certain_Q


def _answer_block(
    vectors_ND: Tensor, length_N: Tensor, group_N: Tensor, ids_Q4: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two bool [Q]: correct answers; answers that rounding may change."""
    best_Qn, top_Qn, margin_Q1 = _nearest(vectors_ND, length_N, ids_Q4)
    # The answer is the first of the five that is no case variant of a, b or c.
    group_Qn = group_N[top_Qn[:, :TOPN]]
    other_Qn = (group_Qn[:, :, None] != ids_Q4[:, None, :3]).all(2)
    place_Q1 = other_Qn.int().argmax(1, keepdim=True)
    next_Q1 = (place_Q1 + 1).clamp(max=best_Qn.shape[1] - 1)
    gap_Q1 = best_Qn.gather(1, place_Q1) - best_Qn.gather(1, next_Q1)
    certain_Q1 = other_Qn.any(1, keepdim=True) & (gap_Q1 > margin_Q1)  # False where anything is NaN
    return group_Qn.gather(1, place_Q1).squeeze(1) == ids_Q4[:, 3], ~certain_Q1.squeeze(1)


def _settle(vectors_ND: Tensor, length_N: Tensor, group_N: Tensor, ids_Q4: Tensor) -> Tensor:
    """Return groups of answers, or -1 where gensim's rounding decides: [Q].

    The cosines of the nearest words are computed on the CPU in float64, from gensim's lengths.
    """
    best_Qn, top_Qn, margin_Q1 = _nearest(vectors_ND, length_N, ids_Q4)
    near = vectors_ND[torch.cat([ids_Q4[:, :3], top_Qn], 1)]
    unit = near.double() / torch.from_numpy(np.linalg.norm(near.numpy(), axis=2))[:, :, None]
    target_QD = unit[:, 1] + unit[:, 2] - unit[:, 0]
    length_Q1 = target_QD.norm(dim=1, keepdim=True)
    terms_QnD = unit[:, 3:] * (target_QD / length_Q1)[:, None]
    # What float32 can change in a sum of D terms, in any order, and in the target.
    error_Qn = 2.0**-24 * (near.shape[2] * terms_QnD.abs().sum(2) + 16 / length_Q1)
    cosine_Qn = terms_QnD.sum(2)
    group_Qn = group_N[top_Qn]
    is_variant_Qn = (group_Qn[:, :, None] == ids_Q4[:, None, :3]).any(2)
    is_variant_Qn[:, TOPN:] = True  # too far to be an answer
    least_Qn = (cosine_Qn - error_Qn).masked_fill(is_variant_Qn, -math.inf)
    most_Qn = (cosine_Qn + error_Qn).masked_fill(is_variant_Qn, -math.inf)
    least_Q1, place_Q1 = least_Qn.max(1, keepdim=True)
    most_Qn.scatter_(1, place_Q1, -math.inf)  # of the others
    # Words that are not among these are below the last.
    certain_Q1 = best_Qn.gather(1, place_Q1) - best_Qn[:, -1:] > margin_Q1
    certain_Q1 &= (least_Q1 > most_Qn.amax(1, keepdim=True)) & least_Q1.isfinite()
    return group_Qn.gather(1, place_Q1).where(certain_Q1, -1).squeeze(1)


def _nearest(vectors_ND: Tensor, length_N: Tensor, ids_Q4: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the TOPN + 1 greatest cosines to b - a + c, and their rows.

    Third, the margin [Q, 1]: what is nearer by less may be farther in gensim's rounding.
    """
    target_QD, margin_Q1 = _targets(vectors_ND, length_N, ids_Q4)
    size = min(WORDS, len(vectors_ND))
    # One buffer for all blocks: allocating each takes 15 % more time.
    buffer = target_QD.new_empty(len(target_QD) * size)
    candidates = []
    for first in range(0, len(vectors_ND), size):
        part_nD = vectors_ND[first : first + size]
        cosines_Qn = buffer[: len(target_QD) * len(part_nD)].view(len(target_QD), -1)
        torch.mm(target_QD, part_nD.T, out=cosines_Qn).div_(length_N[first : first + size])
        cosines_Qn.nan_to_num_(nan=-math.inf)  # of a zero vector
        # The excluded words may be among the best, so take as many more.
        best = cosines_Qn.topk(min(TOPN + 4, len(part_nD)), dim=1)
        candidates.append((best.values, best.indices + first))
    best_Qn, top_Qn = (torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True))
    best_Qn.masked_fill_((top_Qn[:, :, None] == ids_Q4[:, None, :3]).any(2), -math.inf)
    nearest = best_Qn.topk(min(TOPN + 1, best_Qn.shape[1]), dim=1)
    return nearest.values, top_Qn.gather(1, nearest.indices), margin_Q1


def _targets(vectors_ND: Tensor, length_N: Tensor, ids_Q4: Tensor) -> tuple[Tensor, Tensor]:
    """Return the directions b - a + c, [Q, D], and the margins of `_nearest`."""
    asked = ids_Q4[:, :3].unbind(1)
    # In place, as new memory takes longer than the arithmetic.
    a_QD, b_QD, c_QD = (vectors_ND[ids_Q].div_(length_N[ids_Q, None]) for ids_Q in asked)
    target_QD = b_QD.add_(c_QD).sub_(a_QD)
    length_Q1 = target_QD.norm(dim=1, keepdim=True)
    # float32's worst rounding of two dot products of D terms, of the norms, and of the sum,
    # whose relative error grows as its length shrinks.
    margin_Q1 = 6 * 2.0**-23 * (vectors_ND.shape[1] + 8) / length_Q1.clamp(max=1)
    return target_QD.div_(length_Q1), margin_Q1


def _answers_as_gensim(vectors_ND: Tensor, group_N: Tensor, ids_Q4: Tensor) -> list[int]:
    """Return the group of gensim's answer to each question; -1 for none."""
    # Every operation and dtype is that of `most_similar`, so that results are rounded alike.
    rows_ND = vectors_ND.numpy()
    group = group_N.tolist()
    blocks = np.split(rows_ND, range(WORDS, len(rows_ND), WORDS))
    length_N = np.concatenate([np.linalg.norm(block_nD, axis=1) for block_nD in blocks])
    signs = np.array([1.0, 1.0, -1.0])
    answers = []
    with np.errstate(all="ignore"):  # zero vectors
        for a, b, c, _ in ids_Q4.tolist():
            mean_D = np.zeros(rows_ND.shape[1], rows_ND.dtype)
            for sign, row in zip(signs, (b, c, a), strict=True):
                mean_D += sign * (rows_ND[row] / length_N[row])
            mean_D = normalize((mean_D / abs(signs).sum())[None])[0].astype(np.float32)
            distance_N = -(rows_ND @ mean_D / length_N)
            nearest = np.arange(len(distance_N))
            if len(nearest) > TOPN + 3:
                nearest = np.argpartition(distance_N, TOPN + 3)[: TOPN + 3]
            nearest = nearest[np.argsort(distance_N[nearest])]
            groups = [group[row] for row in nearest.tolist() if row not in (a, b, c)][:TOPN]
            # gensim takes the last of the five if all are case variants.
            last = groups[-1] if groups else -1
            answers.append(next((g for g in groups if g not in (a, b, c)), last))
    return answers
