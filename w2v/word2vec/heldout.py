"""Loss on held-out sentences, comparable between runs and machines.

Shapes: V words, D dimensions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from w2v.config import ConfigError, ModelConfig
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.ops import View
from w2v.word2vec.batch import Batch, Objective, StepShape, output_vectors
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.sampler import Sampler, TrainingText

BATCH_SIZE = 1024  # centers, which bounds the memory for their rows


def choose(offsets_S: np.ndarray, words: int) -> np.ndarray:
    """Return numbers of evenly spread sentences with about `words` words.

    Raises `ConfigError` if that would be half the text or more.
    """
    sentences, ids = len(offsets_S) - 1, int(offsets_S[-1])
    chosen = -(-words * sentences // ids)
    if 2 * chosen > sentences:
        remedy = f"set it to {ids // 10} or less" if sentences >= 10 else "set it to 0"
        raise ConfigError(
            f"train.held_out_words={words} would leave too little of {ids:,} words "
            f"in {sentences:,} sentences; {remedy}, or use a text of more lines"
        )
    return (2 * np.arange(chosen) + 1) * sentences // (2 * max(1, chosen))


class HeldOut:
    """Pairs of a text's held-out sentences, drawn once.

    They are drawn on the CPU without a pool, so that they are the same on every machine.
    """

    def __init__(self, text: TrainingText, model: ModelConfig, device: torch.device):
        spans = [text.offsets_S[number : number + 2] for number in text.held_out]
        sentences = [text.ids_N[begin:end] for begin, end in spans]
        offsets = np.cumsum([0, *map(len, sentences)])
        none = np.zeros(0, np.int64)
        sample = replace(text, ids_N=np.concatenate(sentences), offsets_S=offsets, held_out=none)
        model = replace(model, negative_pool=0, negative_pool_steps=1, shrink_by="draw")
        drawn = Sampler(sample, model, BATCH_SIZE, seed=0, device=torch.device("cpu")).epoch()
        # Only the draws are on the CPU; the loss is computed on the device.
        self._device = device
        self._vectors = output_vectors(len(text.keep_V), model.hs, model.negative)
        moved = (Tensor, Objective)
        self._batches = [
            Batch._make(part.to(device) if isinstance(part, moved) else part for part in batch)
            for batch in drawn
        ]

    def loss(self, input_VD: Tensor, output_VD: Tensor, ranks: Ranks = SINGLE) -> float:
        """Return the mean loss of a pair and its negatives; NaN without pairs.

        The vectors are those of this rank, on any device.
        """
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        pairs = torch.zeros((), dtype=torch.int64, device=self._device)
        shape = StepShape(self._vectors, input_VD.shape[1], torch.float32, self._device)
        kernels = ReferenceKernels(shape)
        # The sums stay on the device, to wait for it only once.
        for batch in self._batches:
            grads = kernels.unique_rows(batch)
            rows_U = grads.rows.unique_rows().long()
            input_UD = ranks.fetch_rows(input_VD, rows_U // 2).to(self._device)
            output_UD = ranks.fetch_rows(output_VD, rows_U // 2).to(self._device)
            weight_UD = torch.where((rows_U % 2 == 0)[:, None], input_UD, output_UD)
            grads = kernels.gradients(batch, View(weight_UD, grads.rows.index_A), grads, lr=0.0)
            loss += grads.loss
            pairs += grads.pairs
        return float(loss / pairs)
