"""Which word is nearest to b - a + c, for many questions at once, on whichever device the vectors lie; with gensim's answers.

Shapes: N words, D dimensions, Q questions of a block.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

TOPN = 5  # gensim looks for the answer among the five nearest words
QUESTIONS, WORDS = (
    512,
    {"cpu": 1 << 12, "cuda": 1 << 16},
)  # asked at once: 8 MiB near a CPU's cache, 128 MiB on a GPU


def right(vectors_ND: Tensor, group_N: Tensor, ids_Q4: Tensor) -> Tensor:
    """Whether each question a, b, c, d is answered rightly: bool [Q], on the CPU; words are numbered by the first of their spelling."""
    if not len(ids_Q4):
        return torch.zeros(0, dtype=torch.bool)
    length_N = torch.linalg.vector_norm(vectors_ND, dim=1)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # the margin in _answer_block is that of float32
    try:
        blocks = [
            _answer_block(vectors_ND, length_N, group_N, ids) for ids in ids_Q4.split(QUESTIONS)
        ]
    finally:
        torch.set_float32_matmul_precision(precision)
    right_Q, doubtful_Q = (torch.cat(parts).cpu() for parts in zip(*blocks, strict=True))
    if doubtful_Q.any():
        answers = _answers_as_gensim(vectors_ND, group_N, ids_Q4[doubtful_Q.to(ids_Q4.device)])
        right_Q[doubtful_Q] = torch.tensor(answers) == ids_Q4.cpu()[doubtful_Q, 3]
    return right_Q


def _answer_block(
    vectors_ND: Tensor, length_N: Tensor, group_N: Tensor, ids_Q4: Tensor
) -> tuple[Tensor, Tensor]:
    """Which questions are answered rightly, and which are doubtful, since rounding could change the answer: two bool [Q]."""
    a_QD, b_QD, c_QD, _ = (vectors_ND[ids_Q] / length_N[ids_Q, None] for ids_Q in ids_Q4.unbind(1))
    target_QD = b_QD + c_QD - a_QD
    length_Q1 = target_QD.norm(dim=1, keepdim=True)
    best, top = _nearest(vectors_ND, length_N, target_QD / length_Q1, ids_Q4[:, :3])
    # Case variants of a, b and c may be among the five; they are passed over.
    group = group_N[top[:, :TOPN]]
    other = (group[:, :, None] != ids_Q4[:, None, :3]).all(2)
    place_Q1 = other.int().argmax(1, keepdim=True)  # the first that is another word
    gap_Q = (
        best.gather(1, place_Q1) - best.gather(1, (place_Q1 + 1).clamp(max=best.shape[1] - 1))
    ).squeeze(1)
    # float32's rounding at worst: of two D-term dot products, of norms, and of the sum, where it grows as the sum shrinks.
    margin_Q = 6 * 2.0**-23 * (vectors_ND.shape[1] + 8) / length_Q1.squeeze(1).clamp(max=1)
    certain_Q = other.any(1) & (gap_Q > margin_Q)  # False where anything is NaN
    return group.gather(1, place_Q1).squeeze(1) == ids_Q4[:, 3], ~certain_Q


def _nearest(
    vectors_ND: Tensor, length_N: Tensor, target_QD: Tensor, without_Q3: Tensor
) -> tuple[Tensor, Tensor]:
    """The TOPN + 1 greatest cosines for each target, and of which words they are; of some words at a time, and none to `without_Q3`."""
    enough, at_once = TOPN + 1 + without_Q3.shape[1], WORDS[vectors_ND.device.type]
    memory = target_QD.new_empty(
        len(target_QD) * at_once
    )  # one for all, as the allocator would leave holes
    best, top = [], []
    for first in range(0, len(vectors_ND), at_once):
        part_nD, length_n = vectors_ND[first : first + at_once], length_N[first : first + at_once]
        cosines_Qn = memory[: len(target_QD) * len(part_nD)].view(len(target_QD), len(part_nD))
        torch.mm(target_QD, part_nD.T, out=cosines_Qn).div_(length_n).nan_to_num_(
            nan=-math.inf
        )  # NaN for a zero vector, as in gensim
        of_part = cosines_Qn.topk(min(enough, cosines_Qn.shape[1]), dim=1)
        best.append(of_part.values)
        top.append(of_part.indices + first)
    best_Qn, top_Qn = torch.cat(best, dim=1), torch.cat(top, dim=1)
    best_Qn.masked_fill_((top_Qn[:, :, None] == without_Q3[:, None]).any(2), -math.inf)
    nearest = best_Qn.topk(min(TOPN + 1, best_Qn.shape[1]), dim=1)
    return nearest.values, top_Qn.gather(1, nearest.indices)


def _answers_as_gensim(vectors_ND: Tensor, group_N: Tensor, ids_Q4: Tensor) -> list[int]:
    """What gensim's `most_similar` answers to each question, as a number of `group_N`; -1 for nothing.

    Operation by operation as there, with the types that numpy gives them, since only so does rounding fall alike.
    """
    rows_ND, group, answers = vectors_ND.cpu().numpy(), group_N.tolist(), []
    at_once = WORDS["cpu"]
    norms_N = np.concatenate(
        [
            np.linalg.norm(rows_ND[first : first + at_once], axis=1)
            for first in range(0, len(rows_ND), at_once)
        ]
    )
    signs = np.array([1.0, 1.0, -1.0])
    with np.errstate(all="ignore"):  # zero vectors
        for a, b, c, _ in ids_Q4.tolist():
            mean_D = np.zeros(rows_ND.shape[1], rows_ND.dtype)
            for sign, word in zip(signs, (b, c, a), strict=True):
                mean_D += sign * (rows_ND[word] / norms_N[word])
            mean_D = unit((mean_D / abs(signs).sum())[None])[0].astype(np.float32)
            distance_N = -(rows_ND @ mean_D / norms_N)
            nearest = TOPN + 3
            if nearest < len(distance_N):
                places = np.argpartition(distance_N, nearest)[:nearest]
                places = places[np.argsort(distance_N[places])]
            else:
                places = np.argsort(distance_N)[:nearest]
            found = [group[place] for place in places.tolist() if place not in (a, b, c)][:TOPN]
            answers.append(
                next((g for g in found if g not in (a, b, c)), found[-1] if found else -1)
            )
    return answers


def unit(vectors_ND: np.ndarray) -> np.ndarray:
    """Vectors of length 1, by way of float64 as in gensim; those without length or with NaN stay as they are."""
    wide_ND = vectors_ND.astype(np.float64)
    length_N1 = np.linalg.norm(wide_ND, axis=1, keepdims=True)
    return (wide_ND * (1.0 / np.where(length_N1 > 0, length_N1, 1))).astype(vectors_ND.dtype)
