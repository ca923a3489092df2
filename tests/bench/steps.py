"""Run training steps, or a whole training run, for the benchmarks."""

from __future__ import annotations

import math
import time
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tests.bench.results import Figures, memory
from w2v.distributed.ranks import SINGLE
from w2v.rows.optim import learning_rate
from w2v.system.process import return_freed_memory
from w2v.training import build
from w2v.training.metrics import Total
from w2v.training.plan import Plan
from w2v.training.plan import make_plan as make_plan
from w2v.training.trainer import Trainer
from w2v.vectors import export
from w2v.word2vec.step import TrainingStep


class Stretch(NamedTuple):
    """Some steps, from an idle device to an idle device.

    words: words of the text, with those that subsampling drops; cpu: seconds that the launching
    thread computed; loss: mean over positive pairs, NaN once a step was not finite.
    """

    words: float
    seconds: float
    cpu: float
    loss: float


class Moved(NamedTuple):
    """Rows that steps have used, moved and updated, and bytes sent to ranks."""

    used: int  # by pages
    read: int  # from CPU memory
    written: int  # back to CPU memory
    updated: int
    bytes_sent: int

    @classmethod
    def by(cls, step: TrainingStep) -> Moved:
        """Return the counters of a training step."""
        moved = step.engine.stats
        return cls(*moved, int(step.state.rows_updated), step.exchange.bytes_sent)


class Steps:
    """Training steps of a plan, over one epoch after another.

    The learning rate falls over `total` steps, or keeps its mean if that is 0.
    """

    def __init__(self, planned: Plan, total: int = 0):
        self.planned = planned
        loop = build.build(planned)
        self.sampler, self.step = loop.sampler, loop.step
        self._total = total
        self._done = 0
        self._passes = 0.0  # over the text
        endless = (batch for _ in count() for batch in self.sampler.epoch())
        self._planned = self.step.plan_pages(endless)

    def __call__(self, number: int) -> Stretch:
        """Run `number` steps."""
        optimizer = self.planned.config.optimizer
        loss, pairs = Total(), Total()
        self._wait()  # other work must not count
        passes = self._passes
        began = time.perf_counter()
        computed = time.thread_time()
        for planned in islice(self._planned, number):
            share = self._done / self._total if self._total else 0.5
            result = self.step(planned, learning_rate(optimizer, share))
            loss.add(result.loss)
            pairs.add(result.pairs)
            self._done += 1
            self._passes = planned.batch.epochs_done
        computed = time.thread_time() - computed
        self._wait()
        seconds = time.perf_counter() - began
        finite = pairs.read() and not int(self.step.state.fault)
        mean = loss.read() / pairs.sum if finite else math.nan
        words = (self._passes - passes) * self.planned.corpus.raw_words
        return Stretch(words, seconds, computed, mean)

    def _wait(self) -> None:
        if self.planned.device.type == "cuda":
            torch.cuda.synchronize(self.planned.device)
        if self.planned.ranks.size > 1:
            self.planned.ranks.all_gather(None)

    def measure(self, number: int) -> Figures:
        """Run `number` steps and return the figures of all ranks together."""
        ranks = self.planned.ranks
        before = Moved.by(self.step)
        stretch = self(number)
        mine = [now - then for now, then in zip(Moved.by(self.step), before, strict=True)]
        # Each rank counts its own rows and bytes, but all steps take the same time.
        moved = Moved(*map(sum, zip(*ranks.all_gather(mine), strict=True)))
        host = sum(ranks.all_gather(memory()))
        figures = {
            "words/s": stretch.words / stretch.seconds,
            "seconds [s]": stretch.seconds,
            "step [ms]": 1000 * stretch.seconds / number,
            "CPU [ms]": 1000 * stretch.cpu / number,
            "loss": stretch.loss,
            **link(moved, self.step, stretch.words, stretch.seconds, ranks.size),
            **gpu_memory(self.step),
            "tables [GiB]": ranks.size * self.planned.table_bytes / 2**30,
            "host memory [GiB]": host / 1024,
        }
        if ranks.size > 1:
            figures["sent by a GPU [GB/s]"] = moved.bytes_sent / ranks.size / stretch.seconds / 1e9
        return figures

    @property
    def stages_are_known(self) -> bool:
        """Whether this project's kernels do all the work of a step."""
        moves_in_place = self.planned.engine in ("resident", "mapped")
        return self.planned.kernels == "cuda" and moves_in_place


def train(planned: Plan, folder: Path) -> Trainer:
    """Train a whole run with its metrics in `folder`."""
    loop = build.build(planned)
    held_out = build.make_heldout(planned, loop)
    with Trainer(loop, planned.vocab, planned.corpus, folder, held_out) as trainer:
        trainer.train()
    return trainer


def run_figures(trainer: Trainer) -> Figures:
    """Return speed, loss, memory and traffic of a finished run."""
    step = trainer.loop.step
    words, seconds = trainer.metrics.curve.words, trainer.metrics.curve.seconds
    return {
        "words/s": words / seconds,
        "seconds [s]": seconds,
        "loss": trainer.metrics.curve.mean_loss,
        **link(Moved.by(step), step, words, seconds),
        **gpu_memory(step),
    }


def vectors(trainer: Trainer) -> Tensor:
    """Return the input vectors of a finished run, [V, D]."""
    return trainer.loop.step.inputs["weight"]


def link(moved: Moved, step: TrainingStep, words: float, seconds: float, gpus: int = 1) -> Figures:
    """Return the traffic by word and by second of a GPU, if there is any."""
    if not moved.read:
        return {}
    record = step.inputs.bytes / step.inputs.rows / 1e9 / gpus
    return {
        "rows read [% of used]": 100 * moved.read / moved.used,
        "read [rows a word]": moved.read / words,
        "written [rows a word]": moved.written / words,
        "stepped [rows a word]": moved.updated / words,
        "to GPU [GB/s]": moved.read * record / seconds,
        "from GPU [GB/s]": moved.written * record / seconds,
    }


def gpu_memory(step: TrainingStep) -> Figures:
    """Return the peak of GPU memory, if there is a GPU."""
    peak = step.peak_gpu_bytes
    return {"gpu memory [GiB]": peak / 2**30} if peak else {}


def release(trainer: Trainer) -> None:
    """Free the memory of all but the tables."""
    trainer.loop.step.finish()
    del trainer.loop.sampler
    return_freed_memory()


def export_vectors(trainer: Trainer, folder: Path) -> None:
    """Write vectors.kv and vectors.bin of a finished run."""
    inputs, vocab = trainer.loop.step.inputs, trainer.vocab
    blocks = export.in_order(inputs["weight"], SINGLE, len(vocab.words))
    export.save_run(vocab, inputs.dim, blocks, folder, ["kv", "bin"])
