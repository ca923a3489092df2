"""Stop training once the loss or a row is not finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shlex import quote

from w2v.config import OptimizerConfig
from w2v.kernels.batch import StepState
from w2v.training import checkpoint
from w2v.training.checkpoint import Checkpoints


class Diverged(ValueError):
    """The loss or a row is no longer finite; names the step and remedies."""


class FiniteCheck:
    """Raises `Diverged` if kernels have noted a fault; waits for the device.

    Attributes:
        rates: Learning rates of the steps since the last check.
    """

    def __init__(self, optimizer: OptimizerConfig, state: StepState):
        self.optimizer = optimizer
        self.state = state
        self.rates: list[float] = []

    def __call__(self, remedy: Callable[[], str]) -> None:
        number, parts = self.state.first_fault()
        if number:
            steps_after = self.state.step - number
            lr = self.rates[-1 - steps_after]  # rates[-1] is that of the last step
            where = f"step {number:,} ({self.optimizer.name}, lr {lr:.4g})"
            broken = f"no longer finite: {', '.join(parts)}"
            raise Diverged(f"training diverged at {where}: {broken}; {remedy()}")
        self.rates.clear()


def remedy_of_run(folder: Path, checkpoints: Checkpoints, lr: float) -> str:
    """Return the remedy after a run with this `optimizer.lr` has diverged."""
    checkpoints.wait()
    remedy = "there is no checkpoint yet: begin again with a smaller optimizer.lr"
    if saved := checkpoint.latest(checkpoints.folder):
        command = f"w2v train --resume {quote(str(folder))}"
        remedy = f"the last good checkpoint is {saved.path}: {command} optimizer.lr={lr / 4:.3g}"
    return f"{remedy}, or with some optimizer.warmup or another optimizer.name in a new run"
