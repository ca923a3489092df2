"""Run folders: find them, and read what a run has written."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from w2v.system.files import newest_file, refused

log = logging.getLogger("w2v")


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
        """Return the points (x, metric); the final scores are the last one."""
        final = {key: self.scores.get(key) for key in ("words", "seconds", "held_out_loss")}
        final["analogies"] = self.scores.get("analogies", {}).get("total", {}).get("accuracy")
        points = [(line.get(x), line.get(name)) for line in [*self.metrics, final]]
        return [point for point in points if None not in point]


def find(run: str | Path, file: str, runs: str | Path = "runs") -> Path:
    """Return the folder that `run` names, which must hold `file`.

    "latest" names the folder in `runs` whose `file` is the newest. Every run has a
    config.yaml, but only finished runs have a scores.json.
    """
    if str(run) == "latest":
        newest = newest_file(Path(runs), file)
        if newest is None:
            raise RunError(f"no folder in {runs} holds {file}; train first, or name a run folder")
        return newest.parent
    folder = Path(run)
    if not folder.exists():
        near = difflib.get_close_matches(folder.name, [p.name for p in folder.parent.glob("*")])
        hint = f"did you mean {folder.parent / near[0]}?" if near else "name a run or latest"
        raise RunError(f"{run} does not exist; {hint}")
    if not (folder / file).is_file():
        raise RunError(f"{run} holds no {file}; name another run folder or latest")
    return folder


def find_all(paths: Iterable[str | Path], file: str = "scores.json") -> list[Path]:
    """Return the run folders that paths name.

    A path is a run folder, a folder of run folders, or "latest". Folders without any
    `file` are left out with a warning; it is an error if none has one.
    """
    found: list[Path] = []
    without: list[str] = []
    for path in map(Path, paths):
        if not path.is_dir() or (path / file).is_file():
            found.append(find(path, file))
        elif nested := sorted(match.parent for match in path.glob(f"*/{file}")):
            found += nested
        else:
            without.append(str(path))
    if not found:
        raise RunError(f"no {file} in {', '.join(without)} or a folder there; name run folders")
    if without:
        log.warning(f"left out, as there is no {file} in it: {', '.join(without)}")
    return list(dict.fromkeys(found))  # each once


def read(folder: Path) -> Run:
    """Read config.yaml, metrics.jsonl and, if present, scores.json."""
    remedy = "leave it out, or train it again"
    with refused(RunError, f"{folder} is not a whole run folder", remedy):
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        # A run that still trains, or was killed, may leave its last line half-written.
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        scores = folder / "scores.json"
        return Run(
            folder,
            {section: dict(keys) for section, keys in config.items()},
            json.loads(scores.read_text(encoding="utf-8")) if scores.exists() else {},
            [json.loads(line) for line in lines],
        )
