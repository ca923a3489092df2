"""Run folders: find them, and read what a run has written."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from w2v.system.files import refused

log = logging.getLogger("w2v")
# What w2v writes beside runs, which `runs/*` names too.
OWN = ["pictures", "curves.png", "env.txt", "table.txt", "table.md", "table.csv"]


class RunError(ValueError):
    """A run folder that cannot be found or read; one line with the remedy."""


@dataclass(frozen=True)
class Run:
    """What a run has written; scores are empty for an unfinished run."""

    folder: Path
    config: dict[str, dict[str, Any]]
    scores: dict[str, Any]
    metrics: list[dict[str, Any]]

    @property
    def settings(self) -> dict[str, Any]:
        """The config by dotted name, such as "optimizer.lr"."""
        sections = self.config.items()
        return {f"{name}.{key}": keys[key] for name, keys in sections for key in keys}

    @property
    def diverged(self) -> bool:
        """Whether the loss became NaN or infinite."""
        return "diverged" in self.scores

    def curve(self, name: str, x: str = "words") -> list[tuple[float, float]]:
        """Return the points (x, metric); the final scores are the last one.

        They are the means of epochs where the run has recorded those.
        """
        final = {key: self.scores.get(key) for key in ("words", "seconds", "held_out_loss")}
        total = self.scores.get("analogies", {}).get("total", {})
        final["analogies"] = total.get("accuracy") if total.get("counted", 1) else None
        lines = [line for line in self.metrics if "epoch" in line and name in line]
        points = [(line.get(x), line.get(name)) for line in [*(lines or self.metrics), final]]
        return [point for point in points if None not in point]


def find(run: str | Path, file: str, runs: str | Path = "runs") -> Path:
    """Return the folder that `run` names, which must hold `file`.

    "latest" names the folder in `runs` whose `file` is the newest. Every run has a
    config.yaml, but only finished runs have a scores.json.
    """
    if str(run) == "latest":
        found = Path(runs).glob(f"*/{file}")
        newest = max(found, key=lambda path: (path.stat().st_mtime_ns, path), default=None)
        if newest is None:
            remedy = "name a run folder, or train first"
            raise RunError(f"no folder in {runs} holds {file}; {remedy}")
        return newest.parent
    folder = Path(run)
    if not folder.exists():
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*")])
        hint = f"did you mean {folder.parent / near[0]}?" if near else "name a run or latest"
        raise RunError(f"{run} does not exist; {hint}")
    if nested := min(folder.glob(f"*/{file}"), default=None):
        raise RunError(f"{run} holds several runs; name one run's folder, such as {nested.parent}")
    if not (folder / file).is_file():
        raise RunError(f"{run} holds no {file}; name another run folder or latest")
    return folder


def find_all(paths: Iterable[str | Path], file: str = "scores.json") -> list[Path]:
    """Return the run folders that paths name.

    A path is a run folder, a folder of run folders, or "latest". Folders without any
    `file` are left out, as are files, with a warning unless w2v wrote them; it is an error if
    none has one.
    """
    found: list[Path] = []
    without: list[str] = []
    for path in map(Path, paths):
        if str(path) == "latest" or not path.exists() or (path / file).is_file():
            found.append(find(path, file))
        elif nested := sorted(match.parent for match in path.glob(f"*/{file}")):
            found += nested
        else:
            without.append(str(path))
    if not found:
        raise RunError(f"no {file} in {', '.join(without)} or a folder there; name run folders")
    without = [path for path in without if Path(path).name not in OWN]
    if without:
        log.warning(f"left out, as there is no {file} in it: {', '.join(without)}")
    return list(dict.fromkeys(found))  # each once


def picture_path(folders: Sequence[Path], name: str, to: str | Path | None = None) -> Path:
    """Return the file for a picture of runs.

    That is `to`, or `name` in the folder `to`; by default `name` in the run folder, or for
    several runs in the folder "pictures" beside the first.
    """
    if to is None:
        to = folders[0] if len(folders) == 1 else folders[0].parent / "pictures"
        return to / name
    return Path(to) / name if Path(to).is_dir() else Path(to)


def read(folder: Path) -> Run:
    """Read config.yaml, metrics.jsonl and, if present, scores.json."""
    remedy = "leave it out, or train it again"
    with refused(RunError, f"{folder} is not a whole run folder", remedy):
        try:
            config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
        # A run that still trains, or was killed, may leave its last line half-written.
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        scores = folder / "scores.json"
        return Run(
            folder,
            {section: dict(keys) for section, keys in config.items()},
            dict(json.loads(scores.read_text(encoding="utf-8"))) if scores.exists() else {},
            [dict(json.loads(line)) for line in lines],
        )
