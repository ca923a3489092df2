"""Progress of a run: on the console and in metrics.jsonl."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.system.console import is_terminal, progress_bar
from w2v.system.files import as_json

log = logging.getLogger("w2v")
STACKED = 64  # numbers gathered by one kernel; one for each step would cost as much as training
AXES = {"step", "words", "seconds", "epoch"}  # values that say where a point is, not curves


class Total:
    """Sum of numbers that wait on the device, 8 bytes each.

    They are added one by one in float64, so that sums do not depend on when they are read.
    """

    def __init__(self, start: float = 0):
        self.sum = start  # as it was read last
        self._numbers: list[Tensor] = []
        self._stacks: list[Tensor] = []

    def add(self, number: Tensor) -> None:
        """Add a number without waiting for the device."""
        self._numbers.append(number)
        if len(self._numbers) == STACKED:
            self._stacks.append(torch.stack(self._numbers))
            self._numbers = []

    def read(self, line: float = 0) -> float:
        """Add new numbers to the sum; return `line` plus these; waits."""
        waiting = self._stacks + [number[None] for number in self._numbers]
        if waiting:
            for number in torch.cat(waiting).tolist():
                self.sum += number
                line += number
        self._stacks = []
        self._numbers = []
        return line


class LinkUse(NamedTuple):
    """Use of the link between CPU and GPU so far."""

    bytes: int = 0  # both ways
    wait_seconds: float = 0.0  # for which the computation waited for them


@dataclass
class Curve:
    """State of the metrics, for a checkpoint."""

    step: int = 0
    words: int = 0
    seconds: float = 0.0  # of training, at the last report
    loss: float = 0.0  # sum since the last line
    pairs: int = 0
    mean_loss: float = math.nan  # at the last report
    last_epoch_loss: float = math.nan  # mean of the last whole epoch
    epoch_loss: float = 0.0  # sum of the epoch so far, when saved
    epoch_pairs: int = 0
    logged_words: int = 0  # at the last line
    logged_seconds: float = 0.0
    bytes: int = 0  # of metrics.jsonl, when saved

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Curve:
        """Return the curve from JSON; raise an error of any kind if it is damaged."""
        curve = cls()
        for name, default in vars(cls()).items():
            value = values[name]
            if value is None:
                value = math.nan  # which JSON does not have
            if value < 0:
                raise ValueError(f"{name} is {value}")
            setattr(curve, name, type(default)(value))
        return curve


class Metrics(contextlib.AbstractContextManager):
    """Count steps, and log the mean loss of the pairs since the last line.

    Words are raw words of the corpus, those outside the vocabulary included. Once a step:

        metrics.update(loss, pairs, words)
        if metrics.due:                 # seldom, as reading the loss waits for the device
            metrics.log(lr)
    """

    def __init__(
        self,
        path: Path | None,  # metrics.jsonl; with None nothing is shown or written
        total_words: int,  # of all epochs
        log_seconds: float,  # between two lines
        tensorboard: bool = False,  # whether to write event files beside metrics.jsonl
        link: Callable[[], LinkUse] = LinkUse,  # returns the use of the link so far
        saved: Curve | None = None,  # of the saved run; later lines are cut off
    ):
        self.curve = saved or Curve()
        self._total_words = total_words
        self._log_seconds = log_seconds
        # Sums of the epoch so far.
        self._loss = Total(self.curve.epoch_loss)
        self._pairs = Total(self.curve.epoch_pairs)
        self._ended: list[tuple[dict[str, Any], Total, Total]] = []  # epochs without a line yet
        self._link = link
        self._logged_link = link()
        self._link_values: dict[str, float] = {}

        self._start = time.monotonic() - self.curve.seconds
        self._board: Any = None
        if path and tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            # Points of later steps, which a killed process left, are hidden.
            self._board = SummaryWriter(str(path.parent), purge_step=self.curve.step + 1)
        self._file: Any = tempfile.TemporaryFile("a")  # noqa: SIM115 - closed by __exit__
        if path:
            self._file = path.open("a", encoding="utf-8")
        size = self._file.tell()
        if path and size < self.curve.bytes:
            log.warning(f"{path} has lost lines since the checkpoint; its curve has a gap")
        self._file.truncate(min(size, self.curve.bytes))
        self.bar = progress_bar(
            total=total_words,
            unit=" words",
            unit_scale=True,
            disable=not (path and is_terminal(sys.stderr)),
            mininterval=0.5,
        )

    def update(self, loss: Tensor, pairs: Tensor, words: int) -> None:
        """Count a step, after which `words` raw words are done, without waiting."""
        self._loss.add(loss)
        self._pairs.add(pairs)
        self.curve.step += 1
        # After a resume on another number of ranks, unfinished chunks are read again.
        self.curve.logged_words -= max(0, self.curve.words - words)
        self._set_words(words)

    def end_epoch(self, epoch: int, words: int) -> None:
        """Note that an epoch is over, after which `words` raw words are done.

        Its mean loss is read with the next line.
        """
        self._set_words(words)
        # Waiting for the device now would leave it idle until the next page is planned.
        seconds = round(time.monotonic() - self._start, 3)
        line = {"epoch": epoch, "words": words, "seconds": seconds}
        self._ended.append((line, self._loss, self._pairs))
        self._loss = Total()
        self._pairs = Total()

    @property
    def due(self) -> bool:
        """True when it is time for `log`."""
        logged = self._start + self.curve.logged_seconds
        return time.monotonic() >= logged + self._log_seconds

    def log(self, lr: float) -> None:
        """Write a line with the mean loss since the last one, if words were read."""
        curve = self.curve
        if curve.words == curve.logged_words:
            return
        self._read(lr)
        now = time.monotonic() - self._start
        rate = (curve.words - curve.logged_words) / max(now - curve.logged_seconds, 1e-9)
        line = {"step": curve.step, "words": curve.words, "seconds": round(curve.seconds, 3)}
        line |= {"words_per_s": round(rate), "loss": curve.mean_loss, "lr": lr}
        self.append(line | self._link_values)
        self.send(line | self._link_values, "training")
        if self.bar.disable:
            share = curve.words / self._total_words
            text = f"{share:4.0%} of the words  {rate / 1e6:.3f} M words/s  {self._text(lr)}"
            if curve.logged_words:  # the first step may have waited for compilation
                text += f"  {(self._total_words - curve.words) / rate:.0f} s left"
            log.info(text)
        curve.loss = curve.pairs = 0
        curve.logged_seconds = now
        curve.logged_words = curve.words
        self._logged_link = self._link()

    def state(self, lr: float) -> Curve:
        """Flush metrics.jsonl and return the state for a checkpoint."""
        self._read(lr)
        # The checkpoint must not be ahead of the file: on resume, lines after it are cut off.
        self._file.flush()
        os.fsync(self._file.fileno())
        return replace(
            self.curve,
            epoch_loss=self._loss.sum,
            epoch_pairs=int(self._pairs.sum),
            bytes=os.fstat(self._file.fileno()).st_size,
        )

    def append(self, line: Mapping[str, Any]) -> None:
        """Append one JSON object to metrics.jsonl."""
        self._file.write(as_json(line) + "\n")
        self._file.flush()

    def send(self, values: Mapping[str, float | None], group: str = "scores") -> None:
        """Add a point to TensorBoard's curve of each value that is not None."""
        if self._board is None:
            return
        for name, value in values.items():
            if value is not None and name not in AXES:
                self._board.add_scalar(f"{group}/{name}", value, self.curve.step)
        self._board.flush()  # else the page is minutes late

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block out of the training time."""
        began = time.monotonic()
        self.curve.seconds = began - self._start
        yield
        self._start += time.monotonic() - began

    def __exit__(self, *error: object) -> None:
        self.bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def _set_words(self, words: int) -> None:
        self.curve.words = words
        self.bar.update(words - self.bar.n)

    def _read(self, lr: float) -> None:
        """Update losses, link and bar; wait for the device."""
        curve = self.curve
        for line, loss, pairs in [*self._ended, (None, self._loss, self._pairs)]:
            curve.loss = loss.read(curve.loss)
            curve.pairs = int(pairs.read(curve.pairs))
            if line and pairs.sum:
                curve.last_epoch_loss = loss.sum / pairs.sum
                self.append(line | {"loss": curve.last_epoch_loss})
        self._ended.clear()
        if curve.pairs:
            curve.mean_loss = curve.loss / curve.pairs
        curve.seconds = time.monotonic() - self._start
        use, before = self._link(), self._logged_link
        rate = (use.bytes - before.bytes) / max(curve.seconds - curve.logged_seconds, 1e-9)
        self._link_values = {}
        if rate:
            self._link_values["link_gb_per_s"] = round(rate / 1e9, 3)
            self._link_values["link_wait"] = round(use.wait_seconds - before.wait_seconds, 4)
        self.bar.set_postfix_str(self._text(lr), refresh=False)

    def _text(self, lr: float) -> str:
        text = f"loss {self.curve.mean_loss:.4f}  lr {lr:.4g}"
        if link := self._link_values:
            text += f"  link {link['link_gb_per_s']:.1f} GB/s"
            text += f", waited for {link['link_wait']:.1f} s"
        return text
