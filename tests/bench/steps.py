"""Training steps of a plan, as many as one asks for, without a run around them; what they took and what they moved."""

from __future__ import annotations

import math
import time
from itertools import count, islice
from typing import NamedTuple

import torch
from torch import Tensor

from tests.bench.measure import Figures
from w2v.model.optim import learning_rate
from w2v.training import plan
from w2v.training.metrics import Total
from w2v.training.plan import Plan
from w2v.training.step import Pipeline


class Stretch(NamedTuple):
    """Some steps, from a device at rest to one at rest.

    words: of the text, those that subsampling drops included; seconds: on the clock; cpu: seconds that the launching thread computed, or
    waited for the device without sleeping; loss: mean of a pair, NaN of none, and once a step was not finite.
    """

    words: float
    seconds: float
    cpu: float
    loss: float


class Steps:
    """The steps of a plan, over one epoch after another; the learning rate falls over `total` of them, or stays at its mean for 0."""

    def __init__(self, planned: Plan, total: int = 0):
        self.device, self._total, self._done, self._passes = planned.device, total, 0, 0.0
        self._optimizer, self._raw_words = planned.config.optimizer, planned.corpus.raw_words
        sampler, self.pipeline = plan.build(planned)
        self.ids_N = sampler._ids_N
        self._ahead = self.pipeline.ahead(batch for _ in count() for batch in sampler.epoch())

    def __call__(self, number: int) -> Stretch:
        """Make so many."""
        self._wait()
        passes, began, computed = self._passes, time.perf_counter(), time.thread_time()
        loss, pairs = Total(), Total()
        for planned in islice(self._ahead, number):
            share = self._done / self._total if self._total else 0.5
            result = self.pipeline.step(planned, learning_rate(self._optimizer, share))
            loss.add(result.loss)
            pairs.add(result.pairs)
            self._done, self._passes = self._done + 1, planned.batch.epochs_done
        computed = time.thread_time() - computed
        self._wait()
        seconds = time.perf_counter() - began
        mean = (
            loss.read() / pairs.read()
            if pairs.read() and not int(self.pipeline.fault)
            else math.nan
        )
        return Stretch((self._passes - passes) * self._raw_words, seconds, computed, mean)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Moved(NamedTuple):
    """Rows so far: used by pages, read over the link, written back, and of all steps had none been kept."""

    used: int
    read: int
    written: int
    stepped: int

    @classmethod
    def by(cls, pipeline: Pipeline) -> Moved:
        engine = pipeline.engine
        return cls(engine.rows_used, engine.rows_read, engine.rows_written, pipeline.rows_stepped)

    def since(self, before: Moved) -> Moved:
        return Moved(*(now - then for now, then in zip(self, before, strict=True)))


def link(moved: Moved, pipeline: Pipeline, words: float, seconds: float) -> Figures:
    """What so many words moved over the link in that time; nothing where it moved nothing."""
    if not moved.read:
        return {}
    gigabytes = pipeline.inputs.bytes / pipeline.inputs.rows / 1e9
    return {
        "rows read": (100 * moved.read / moved.used, "% of used"),
        "read": (moved.read / words, "rows a word"),
        "written": (moved.written / words, "rows a word"),
        "stepped": (moved.stepped / words, "rows a word"),
        "to GPU": (moved.read * gigabytes / seconds, "GB/s"),
        "from GPU": (moved.written * gigabytes / seconds, "GB/s"),
    }


def gpu_memory(pipeline: Pipeline, ids_N: object) -> Figures:
    """The most that tensors took since the pipeline was made; with paged tables also what is neither their rows nor the corpus."""
    if not (most := pipeline.bytes_gpu):
        return {}
    figures = {"gpu memory": (most / 2**30, "GiB")}
    if slots := getattr(pipeline.engine, "slots", 0):
        ids = ids_N.nbytes if isinstance(ids_N, Tensor) else 0
        figures["gpu memory besides rows and ids"] = (
            (most - ids - slots * pipeline.inputs.bytes / pipeline.inputs.rows) / 2**30,
            "GiB",
        )
    return figures
