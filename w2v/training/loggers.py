"""TensorBoard and Weights & Biases, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from w2v.config import ConfigError, RunConfig

AXES = {"step", "words", "seconds", "epoch"}  # values that say where a point is, not curves


class Logger(Protocol):
    """Where curves go."""

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Add a point to the curve of each value that is not None."""

    def close(self) -> None:
        """Write what is buffered."""


def check(run: RunConfig) -> None:
    """Raise `ConfigError` if a configured logger is not installed."""
    for package, wanted in (("tensorboard", run.tensorboard), ("wandb", run.wandb)):
        if wanted and find_spec(package) is None:
            missing = f"run.{package}={wanted} needs a package that is not installed"
            raise ConfigError(f"{missing}; pip install {package}")


def open_loggers(
    run: RunConfig, folder: Path, step: int, settings: Mapping[str, Any]
) -> list[Logger]:
    """Return the configured loggers of a run that goes on after `step`."""
    check(run)
    loggers: list[Logger] = []
    if run.tensorboard:
        loggers.append(TensorBoard(folder, step))
    if run.wandb:
        loggers.append(Wandb(run.wandb, folder, settings))
    return loggers


class TensorBoard:
    """Event files in the run folder."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        # Points of later steps, which a killed process left, are hidden.
        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        group = "training" if "lr" in values else "scores"
        for name, value in values.items():
            if value is not None and name not in AXES:
                self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()  # else the page is minutes late

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of a W&B project, named like its folder."""

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]):
        import wandb

        # A resumed run has the same id, and W&B ignores steps that it knows.
        name = folder.resolve().name
        where = {"project": project, "id": name, "name": name, "dir": str(folder)}
        self._run = wandb.init(**where, config=dict(settings), resume="allow")

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        points = {name: value for name, value in values.items() if value is not None}
        self._run.log(points, step=step)

    def close(self) -> None:
        self._run.finish()
