"""A trial of a run, for `train.py --dry-run`: some seconds of training, which is then thrown away."""

from __future__ import annotations

import time

from w2v.config import Config
from w2v.model.optim import learning_rate
from w2v.model.sampler import Sampler
from w2v.training.step import Pipeline

WARMUP, SECONDS = 3, 3.0  # steps that do not count, and seconds of those that do


def expected(config: Config, raw_words: int, sampler: Sampler, pipeline: Pipeline) -> str:
    """How long the run would take, as a line of what is printed."""
    lr, begun, at_first, steps = learning_rate(config.optimizer, 0.5), 0.0, 0.0, 0
    for steps, planned in enumerate(pipeline.ahead(sampler.epoch()), start=1):
        float(pipeline.step(planned, lr).loss)  # waits for the device
        if steps == WARMUP:
            begun, at_first = time.monotonic(), planned.batch.epochs_done
        if steps > WARMUP and time.monotonic() - begun > SECONDS:
            break
    if steps <= WARMUP:
        return f"time      unknown: an epoch has {steps} steps, too few to tell"
    rate = (planned.batch.epochs_done - at_first) * raw_words / (time.monotonic() - begun)
    seconds = config.train.epochs * raw_words / rate
    return f"time      about {seconds:.0f} s of training: {rate / 1e6:.3g} M words/s in {steps - WARMUP} steps"
