"""A loss that compares across settings: over sentences that are never trained on, with windows and noise words that are always the same.

Shapes: N ids of the corpus, S sentences, V words, D dimensions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from w2v.config import ConfigError, ModelConfig
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels import reference
from w2v.kernels.batch import Batch
from w2v.model.sampler import Sampler
from w2v.model.skipgram import expand, find_slots

BATCH = 1024  # centers whose rows are looked at together, which bounds the memory
SEED = 0


def choose(offsets_S: np.ndarray, words: int) -> np.ndarray:
    """The numbers of sentences, evenly spread over the text, that hold about so many of its words; sorted, none for 0.

    Raises `ConfigError` where that would be half the text or more.
    """
    sentences, ids = len(offsets_S) - 1, int(offsets_S[-1])
    count = -(-words * sentences // ids)
    if 2 * count > sentences:
        remedy = (
            f"set it to {ids // 10:,} or less".replace(",", "")
            if sentences >= 10
            else "set it to 0, or bring text of more lines"
        )
        raise ConfigError(
            f"train.held_out_words={words} would leave too little of {ids:,} words in {sentences:,} sentences; {remedy}"
        )
    return (2 * np.arange(count) + 1) * sentences // (2 * max(1, count))


class HeldOut:
    """The pairs of the chosen sentences of a text, drawn once, as the settings of the `model` say but for a pool of noise words.

    They are drawn on the CPU whatever the device, so that they are the same on every machine.
    """

    def __init__(
        self,
        ids_N: np.ndarray,
        offsets_S: np.ndarray,
        chosen: np.ndarray,
        keep_V: np.ndarray,
        noise_V: np.ndarray,
        model: ModelConfig,
        device: torch.device,
    ):
        sentences = [ids_N[offsets_S[number] : offsets_S[number + 1]] for number in chosen]
        offsets = np.cumsum([0, *map(len, sentences)])
        cpu, model = torch.device("cpu"), replace(model, negative_pool=0, negative_pool_steps=1)
        drawn = list(
            Sampler(
                np.concatenate(sentences), offsets, keep_V, noise_V, model, BATCH, SEED, cpu
            ).epoch()
        )
        if not any(bool(expand(batch).context_mask_BC.any()) for batch in drawn):
            raise ConfigError(
                f"train.held_out_words chose {offsets[-1]} words that make no pair; raise it, or model.sample={model.sample}"
            )
        self._batches = [
            Batch._make(part.to(device) if isinstance(part, Tensor) else part for part in batch)
            for batch in drawn
        ]
        self._device, self._words = device, len(keep_V)

    def loss(self, input_VD: Tensor, output_VD: Tensor, ranks: Ranks = SINGLE) -> float:
        """The mean loss of a positive pair and its noise words, for vectors that may lie on any device, and may be dealt to ranks."""
        loss: Tensor | float = 0.0
        pairs: Tensor | float = 0.0
        for batch in self._batches:
            slots = find_slots(expand(batch), self._words)
            result = reference.skipgram(
                ranks.fetch_rows(input_VD, slots.input_rows_U).to(self._device),
                ranks.fetch_rows(output_VD, slots.output_rows_V).to(self._device),
                slots.context_slots_BC,
                slots.context_mask_BC,
                slots.target_slots_BT,
                slots.target_mask_BT,
            )
            loss, pairs = loss + result.loss, pairs + result.pairs
        return float(loss) / float(pairs)
