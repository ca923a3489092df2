"""What happened, while it happens: a progress bar or plain lines, and one JSON object per log in metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from w2v.training.loggers import Logger

log = logging.getLogger("w2v")
TOGETHER = 64  # numbers that one kernel gathers, since one for each step would cost the CPU as much as a kernel that trains
TRIAL_SECONDS = 2.0  # of training, which tell how long it will take
REFRESH_SECONDS = 1.0  # of the progress bar; reading the loss waits for the device, so it is not done at every step


class Diverged(ValueError):
    """Numbers are no longer finite; the message says at which step, where, and what to try."""


class Total:
    """A sum, from `start` on, of numbers on the device, which lie there, 8 bytes each, until it is read.

    They are added one after the other, in float64, so that the sum is the same whenever it has been read.
    """

    def __init__(self, start: float = 0):
        self._sum = start
        self._latest: list[Tensor] = []
        self._waiting: list[Tensor] = []

    def add(self, number: Tensor) -> None:
        self._latest.append(number)
        if len(self._latest) == TOGETHER:
            self._put_together()

    def read(self) -> float:
        """The sum so far; waits for the device."""
        if self._latest:
            self._put_together()
        if self._waiting:
            for number in torch.cat(self._waiting).tolist():
                self._sum += number
            self._waiting = []
        return self._sum

    def _put_together(self) -> None:
        self._waiting.append(torch.stack(self._latest))
        self._latest = []


class Metrics:
    """Keeps losses on the device and sums them only when they are shown or logged.

    The loss shown is the mean over the positive pairs since the last line of metrics.jsonl. Words are raw words of the corpus, those
    outside the vocabulary included. Whenever the device has been waited for, `look` is called, which may raise what stops the run.
    `moved` gives the bytes that have crossed the link to the GPU, both ways, of `link_rate` a second that it can carry, and `waited` the
    seconds for which the computation stood still for them. With a `state`, the curve goes on from there, and lines of the file that came
    later are cut off; without one it begins anew. Without a path nothing is shown or written.
    """

    def __init__(
        self,
        path: Path | None,
        total_words: int,
        log_seconds: float,
        look: Callable[[], None] = lambda: None,
        state: dict[str, float] | None = None,
        loggers: Sequence[Logger] = (),
        moved: Callable[[], int] = lambda: 0,
        waited: Callable[[], float] = lambda: 0.0,
        link_rate: float = 0.0,
    ):
        self._file = (
            path.open("a", encoding="utf-8")
            if path
            else tempfile.TemporaryFile("a", encoding="utf-8")
        )  # noqa: SIM115
        self._total_words, self._log_seconds, self._look = total_words, log_seconds, look
        self._bar = tqdm(
            total=total_words,
            unit="w",
            unit_scale=True,
            dynamic_ncols=True,
            disable=None if path else True,
            mininterval=0.5,
        )
        state = state or dict.fromkeys(
            (
                "step",
                "words",
                "seconds",
                "loss",
                "pairs",
                "logged_words",
                "logged_seconds",
                "bytes",
            ),
            0,
        )
        if path and self._file.tell() < state["bytes"]:
            log.warning(
                f"{path} has lost lines since the checkpoint; the curve goes on after a gap"
            )
        self._file.truncate(min(self._file.tell(), int(state["bytes"])))
        self.step, self.words, self._logged_words = (
            int(state["step"]),
            int(state["words"]),
            int(state["logged_words"]),
        )
        self._loss, self._pairs = Total(state["loss"]), Total(state["pairs"])
        self._loggers, self._moved, self._logged_bytes = loggers, moved, moved()
        self._waited, self._logged_wait, self._link_rate = waited, waited(), link_rate
        self._link: dict[str, float] = {}  # what crossed it since the last line
        self.loss = state.get("mean_loss", math.nan)
        self.seconds = state["seconds"]  # of training, at the last look
        self._shown = time.monotonic()
        self._start = self._shown - self.seconds
        self._paced: tuple[float, int] | None = (
            None  # seconds and words after the first step, which may wait for what is compiled once
        )
        self._timed = False
        self._logged = self._start + state["logged_seconds"]

    def update(self, loss: Tensor, pairs: Tensor, words: int, lr: float) -> None:
        """Count one step, after which `words` raw words are done."""
        self._loss.add(loss)
        self._pairs.add(pairs)
        self.step, self.words = self.step + 1, words
        now = time.monotonic()
        self._paced = self._paced or (now - self._start, words)
        took = now - self._start - self._paced[0]
        if not self._timed and took >= TRIAL_SECONDS:
            self._timed, rate = True, (words - self._paced[1]) / took
            log.info(
                f"time      about {self._total_words / rate:.0f} s of training: {rate / 1e6:.3g} M words/s at its beginning"
            )
        if now - self._logged >= self._log_seconds:
            self.log(lr)
        elif not self._bar.disable and now - self._shown >= REFRESH_SECONDS:
            self._read(lr)

    def log(self, lr: float) -> None:
        """Write a line with the mean loss since the last one, and start the mean anew."""
        if self.words == self._logged_words:
            return
        self._read(lr)
        now = time.monotonic()
        rate = (self.words - self._logged_words) / max(now - self._logged, 1e-9)
        seconds = round(self.seconds, 3)
        self.write(
            step=self.step,
            words=self.words,
            seconds=seconds,
            words_per_s=round(rate),
            loss=self.loss,
            lr=lr,
            **self._link,
        )
        if self._bar.disable:
            share, left = self.words / self._total_words, ""
            if self._paced and self.words > self._paced[1]:
                pace = (self.seconds - self._paced[0]) / (self.words - self._paced[1])
                left = f"  {pace * (self._total_words - self.words):.0f} s left"
            log.info(f"{share:4.0%} of the words  {rate / 1e6:.3f} Mw/s  {self._said(lr)}{left}")
        self._loss, self._pairs = Total(), Total()
        self._logged, self._logged_words, self._logged_bytes, self._logged_wait = (
            now,
            self.words,
            self._moved(),
            self._waited(),
        )

    def state(self, lr: float) -> dict[str, float]:
        """Where the curve stands, with all lines so far on disk."""
        self._read(lr)
        self._file.flush()
        os.fsync(self._file.fileno())
        return {
            "step": self.step,
            "words": self.words,
            "seconds": self.seconds,
            "loss": self._loss.read(),
            "pairs": int(self._pairs.read()),
            "mean_loss": self.loss,
            "logged_words": self._logged_words,
            "logged_seconds": self._logged - self._start,
            "bytes": os.fstat(self._file.fileno()).st_size,
        }

    def write(self, **values: Any) -> None:
        """Append one JSON object to metrics.jsonl, at once."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        self.tell(**values)

    def tell(self, **values: float | None) -> None:
        """Add a point to the loggers' curves, also once the file is closed."""
        for logger in self._loggers:
            logger.write(values, self.step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that passes inside is none of the training's."""
        began = time.monotonic()
        self.seconds = began - self._start
        yield
        away = time.monotonic() - began
        self._start, self._logged, self._shown = (
            self._start + away,
            self._logged + away,
            self._shown + away,
        )

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        self._file.close()

    def _read(self, lr: float) -> None:
        loss, pairs = self._loss.read(), self._pairs.read()
        self._look()
        self.loss = loss / pairs if pairs else self.loss
        self._shown = time.monotonic()
        if moved := (self._moved() - self._logged_bytes) / max(self._shown - self._logged, 1e-9):
            share = {"link_share": round(moved / self._link_rate, 4)} if self._link_rate else {}
            self._link = {
                "link_gb_per_s": round(moved / 1e9, 3),
                **share,
                "link_wait": round(self._waited() - self._logged_wait, 4),
            }
        else:
            self._link = {}
        self._bar.set_postfix_str(self._said(lr), refresh=False)
        self._bar.update(self.words - self._bar.n)
        self.seconds = self._shown - self._start

    def _said(self, lr: float) -> str:
        link = ""
        if self._link:
            share = f" ({self._link['link_share']:.0%} of its most)" if self._link_rate else ""
            link = f"  link {self._link['link_gb_per_s']:.1f} GB/s{share}, waited for {self._link['link_wait']:.1f} s"
        return f"loss {self.loss:.4f}  lr {lr:.4g}{link}"
