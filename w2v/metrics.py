"""What happened, while it happens: a progress bar or plain lines, and one JSON object per log in metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

log = logging.getLogger("w2v")
REFRESH_SECONDS = 1.0  # of the progress bar; reading the loss waits for the device, so it is not done at every step


def log_to_console() -> None:
    """Show the program's messages on standard output, above the progress bar where there is one."""
    handler = _AboveTheBar()
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)


def log_to_file(path: Path) -> None:
    """Keep the program's messages, from now on, with the time of each."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)


class _AboveTheBar(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record))


class Diverged(ValueError):
    """The loss is no longer a number; the message says at which step and what to try."""


class Metrics:
    """Sums losses on the device in float64 and reads them only when they are shown or logged.

    The loss shown is the mean over the positive pairs since the last line of metrics.jsonl. Words are raw words of the corpus, those
    outside the vocabulary included.
    """

    def __init__(self, path: Path, total_words: int, log_seconds: float):
        self._file = path.open("a", encoding="utf-8")
        self._total_words, self._log_seconds = total_words, log_seconds
        self._loss: Tensor | float = 0.0
        self._pairs: Tensor | int = 0
        self._bar = tqdm(total=total_words, unit="w", unit_scale=True, dynamic_ncols=True, disable=None, mininterval=0.5)
        self.step = self.words = 0
        self.loss = math.nan
        self.seconds = 0.0  # of training, at the last look
        self._start = self._logged = self._shown = time.monotonic()
        self._logged_words = 0

    def update(self, loss: Tensor, pairs: Tensor, words: int, lr: float) -> None:
        """Count one step, after which `words` raw words are done."""
        self._loss = self._loss + loss
        self._pairs = self._pairs + pairs
        self.step, self.words = self.step + 1, words
        now = time.monotonic()
        if now - self._logged >= self._log_seconds:
            self.log(lr)
        elif not self._bar.disable and now - self._shown >= REFRESH_SECONDS:
            self._read(lr)

    def log(self, lr: float) -> None:
        """Write a line with the mean loss since the last one, and start the mean anew."""
        if not self.step:
            return
        self._read(lr)
        now = time.monotonic()
        rate = (self.words - self._logged_words) / max(now - self._logged, 1e-9)
        self.write(step=self.step, words=self.words, seconds=round(self.seconds, 3), words_per_s=round(rate), loss=self.loss, lr=lr)
        if self._bar.disable:
            share = self.words / self._total_words
            left = self.seconds * (1 / share - 1)
            log.info(f"{share:4.0%} of the words  {rate / 1e6:.3f} Mw/s  loss {self.loss:.4f}  lr {lr:.4g}  {left:.0f} s left")
        self._loss, self._pairs = 0.0, 0
        self._logged, self._logged_words = now, self.words

    def write(self, **values: Any) -> None:
        """Append one JSON object to metrics.jsonl, at once."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time that passes inside is none of the training's."""
        began = time.monotonic()
        self.seconds = began - self._start
        yield
        away = time.monotonic() - began
        self._start, self._logged, self._shown = self._start + away, self._logged + away, self._shown + away

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        self._file.close()

    def _read(self, lr: float) -> None:
        loss, pairs = float(self._loss), int(self._pairs)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {self.step}, lr {lr:.4g}: training diverged, and nothing was exported; "
                "try a smaller optimizer.lr, some optimizer.warmup, or another optimizer.name"
            )
        self.loss = loss / pairs if pairs else self.loss
        self._bar.set_postfix_str(f"loss {self.loss:.4f} lr {lr:.4g}", refresh=False)
        self._bar.update(self.words - self._bar.n)
        self._shown = time.monotonic()
        self.seconds = self._shown - self._start
