"""Where the curve of a run goes besides metrics.jsonl: TensorBoard and Weights & Biases, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from w2v.config import ConfigError, RunConfig

WHERE = {
    "step",
    "words",
    "seconds",
    "epoch",
}  # of a point on the curves; none is a curve to look at


class Logger(Protocol):
    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Add a point to the curve of each value; one that is None is left out."""

    def close(self) -> None:
        """Write what is still to be written."""


def check(run: RunConfig) -> None:
    """Raise a ConfigError if a logger that the config asks for is not installed."""
    for package, wanted in (("tensorboard", run.tensorboard), ("wandb", run.wandb)):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"run.{package}={wanted} needs a package that is not installed; pip install {package}"
            )


def opened(run: RunConfig, folder: Path, step: int, about: Mapping[str, Any]) -> list[Logger]:
    """The loggers that the config asks for, which go on after `step`; about: the settings of the run, by name."""
    check(run)
    found: list[Logger] = [TensorBoard(folder, step)] if run.tensorboard else []
    return found + ([Wandb(run.wandb, folder, about)] if run.wandb else [])


class TensorBoard:
    """Events in the run folder, after which TensorBoard names its curves; those of later steps that an earlier process left are hidden."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        group = "training" if "lr" in values else "scores"
        for name, value in values.items():
            if value is not None and name not in WHERE:
                self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()  # or the page would be minutes late

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of a project, named as its folder, which one that is resumed goes on in; steps that are there already are not written again."""

    def __init__(self, project: str, folder: Path, about: Mapping[str, Any]):
        import wandb

        name = folder.resolve().name
        self._run = wandb.init(
            project=project, id=name, name=name, dir=str(folder), config=dict(about), resume="allow"
        )

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        self._run.log(
            {name: value for name, value in values.items() if value is not None}, step=step
        )

    def close(self) -> None:
        self._run.finish()
