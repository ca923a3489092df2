"""Search for an optimizer's best settings on a grid.

    w2v sweep Adamax --base text8 --seeds 1 2 3 --set corpus.path=text8

The grid is over learning rates, batch sizes and other settings. Each setting is trained with the
first seed, then the best with the other seeds, until the best by the mean has been trained with
all. Results go to a .csv file. What is there is not trained again, so that a sweep can be stopped,
continued and refined.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf

from w2v.api import compare, runs
from w2v.config import PACKAGE, Config, ConfigError, find_config, flat_config, load_config
from w2v.system import console
from w2v.system.files import atomic_write
from w2v.system.process import git_commit
from w2v.training import plan
from w2v.training.memory import Machine
from w2v.vectors.datasets import NOTHING_FURTHER, Further

log = logging.getLogger("w2v")
LR_FACTORS = (0.6, 1.0, 1.6)  # of the config's learning rate, or of the automatic one
BATCH_FACTORS = (0.5, 1.0)  # of the config's batch size, or of the automatic one
BETAS = {"optimizer.args.betas": [[0.0, 0.99], [0.5, 0.99]]}
CAPS = {"optimizer.occurrence_cap": [32, 64]}
AXES: dict[str, dict[str, list[Any]]] = {  # further settings to search, by optimizer
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), BETAS),
    **dict.fromkeys(("SGD", "ASGD"), CAPS),
    "RMSprop": {"optimizer.args.alpha": [0.95, 0.99]},
    "Adadelta": {"optimizer.args.eps": [1e-5, 1e-3], "optimizer.args.rho": [0.9, 0.99]},
    "Rprop": {
        "optimizer.args.etas": [[0.5, 1.2], [0.8, 1.1]],
        "optimizer.args.step_sizes": [[1e-3, 1e-2], [3e-3, 3e-2]],
    },
}
# Logging the loss would make training wait for the device.
SETTINGS = [*compare.COMMON_SETTINGS, "run.log_seconds=1e9"]
SHOWN = 15  # rows of a ranking
QUALITY = ("quality", "analogies", "wordsim353", "simlex999")
SCORES = (*QUALITY, "semantic", "syntactic", "held_out_loss", "loss", "seconds", "words_per_s")
RANKED = (*QUALITY, "held_out_loss")  # columns of a ranking
# Keys that have columns of their own, and keys that do not make another setting.
OWN_COLUMNS = ("corpus.path", "train.epochs", "train.batch_size", "optimizer.lr")
NO_SETTINGS = (*OWN_COLUMNS, "train.seed", "corpus.data_dir", "run.")


class Setting(NamedTuple):
    """What the runs of all seeds have in common, as in the .csv file."""

    corpus: str
    epochs: str
    settings: str  # all other keys that are not at their default
    batch_size: str
    lr: str

    @classmethod
    def of(cls, config: Config, corpora: Sequence[str] = ()) -> Setting:
        """Return the setting of a config, on its own corpus or on these."""
        default = flat_config(Config())
        settings = [
            f"{key}={json.dumps(value, separators=(',', ':'))}"
            for key, value in flat_config(config).items()
            if value != default[key] and not key.startswith(NO_SETTINGS)
        ]
        corpus = "+".join(Path(path).name for path in corpora or [config.corpus.path])
        train = config.train
        numbers = str(train.batch_size), f"{config.optimizer.lr:g}"
        return cls(corpus, str(train.epochs), " ".join(settings), *numbers)


COLUMNS = [*Setting._fields, "seed", *SCORES, "date", "commit", "device", "command"]


class Results:
    """The .csv file of a sweep, one line for each setting and seed."""

    def __init__(self, file: Path):
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)  # fails before anything is trained
        header = ",".join(COLUMNS) + "\n"
        self._text = file.read_text(encoding="utf-8") if file.exists() else header
        reader = csv.DictReader(io.StringIO(self._text))
        self._lines = list(reader)
        if reader.fieldnames != COLUMNS:
            remedy = "delete it, or write elsewhere with --to"
            raise ConfigError(f"{file} has other columns than a sweep writes; {remedy}")

    def add(self, setting: Setting, seed: int, scores: dict[str, Any], device: str) -> None:
        """Add a line, with no scores if training diverged, and write the file."""
        # Absolute paths say nothing to readers of the file.
        arguments = [os.path.basename(arg) if os.path.isabs(arg) else arg for arg in sys.argv[1:]]
        self._lines.append(
            {name: f"{value:.9g}" for name, value in scores.items() if value is not None}
            | setting._asdict()
            | {"seed": str(seed), "date": time.strftime("%Y-%m-%d"), "commit": git_commit()}
            | {"device": device, "command": " ".join(["w2v", *arguments])}
        )
        line = io.StringIO()
        csv.DictWriter(line, COLUMNS, lineterminator="\n").writerow(self._lines[-1])
        self._text += line.getvalue()
        atomic_write(self.file, self._text)

    def seeds(self, setting: Setting) -> list[int]:
        """Return the seeds with which a setting was trained."""
        return [int(line["seed"]) for line in self._lines_of(setting)]

    def values(self, setting: Setting, score: str) -> list[float]:
        """Return a score of all seeds that did not diverge."""
        return [float(line[score]) for line in self._lines_of(setting) if line.get(score)]

    def quality(self, setting: Setting) -> tuple[float, float]:
        """Return the mean over all sets, and the negative held-out loss.

        Both are -inf if the setting has not been trained or any seed diverged.
        """
        losses = self.values(setting, "held_out_loss")
        if not losses or len(losses) < len(self.seeds(setting)):
            return -math.inf, -math.inf
        return mean(self.values(setting, "quality")), -mean(losses)

    def best(self, settings: Collection[Setting]) -> Setting | None:
        """Return the best setting, or None if all diverged."""
        best = max(settings, key=self.quality)
        return best if math.isfinite(self.quality(best)[0]) else None

    def ranking(self, like: Setting) -> str:
        """Return a table of settings with the corpus and epochs of `like`."""
        tried = dict.fromkeys(Setting(*map(line.get, Setting._fields)) for line in self._lines)
        compared = [setting for setting in tried if setting[:2] == like[:2]]
        if not compared:
            return ""
        compared.sort(key=self.quality, reverse=True)
        # Only what differs between the settings is shown of them.
        common = set.intersection(*(set(setting.settings.split()) for setting in compared))
        table = [["lr", "batch", "seeds", *RANKED, "settings"]]
        for setting in compared[:SHOWN]:
            differing = [part for part in setting.settings.split() if part not in common]
            row = [setting.lr, setting.batch_size, str(len(self.seeds(setting)))]
            row += [runs.spread(self.values(setting, name), "{:.4f}") for name in RANKED]
            if not math.isfinite(self.quality(setting)[0]):
                row[3] = "diverged"
            table.append([*row, " ".join(differing) or "-"])
        return runs.text(table)

    def _lines_of(self, setting: Setting) -> list[dict[str, str]]:
        own = setting._asdict().items()
        return [line for line in self._lines if own <= line.items()]


def grid(
    centre: Config,
    files: Sequence[str | Path],
    lrs: Sequence[float],
    batch_sizes: Sequence[int],
    axes: dict[str, list[Any]],
) -> list[Config]:
    """Return a config for every point; `axes` has values of further keys.

    Batch sizes and learning rates that are not given are factors of the centre's.
    """
    found = []
    # Each axis as a list of key=value, for the product below.
    values_of_axes = [[f"{key}={json.dumps(value)}" for value in axes[key]] for key in axes]
    tuned, usual = centre.train.batch_size, centre.optimizer.lr
    for batch in batch_sizes or [max(1, int(tuned * factor)) for factor in BATCH_FACTORS]:
        for lr in lrs or [float(f"{usual * factor:.2g}") for factor in LR_FACTORS]:
            for point in itertools.product(*values_of_axes):
                own = [f"optimizer.lr={lr}", f"train.batch_size={batch}"]
                found.append(load_config(files, [*SETTINGS, *point, *own]))
    return found


def score(
    config: Config, corpora: Sequence[str] = (), further: Further = NOTHING_FURTHER
) -> dict[str, Any]:
    """Train once on each corpus; return the mean SCORES, none if one diverged.

    "quality" is the mean over all sets, those of `further` files included.
    """
    found = []
    for path in corpora or [config.corpus.path]:
        own = replace(config, corpus=replace(config.corpus, path=path))
        with TemporaryDirectory() as folder:
            scores = compare.train_and_score(own, Path(folder), further=further)
        if "diverged" in scores:
            return {}
        analogies, similarity = scores["analogies"], scores["similarity"]
        of_pairs = {name: similarity[name]["spearman"] for name in similarity}
        of_questions = [part["total"]["accuracy"] for part in scores.get("questions", {}).values()]
        sets = [analogies["total"]["accuracy"], *of_questions, *of_pairs.values()]
        found.append(
            {
                "quality": mean(value or 0.0 for value in sets),
                "analogies": analogies["total"]["accuracy"],
                **{name: of_pairs[name] for name in ("wordsim353", "simlex999")},
                **{name: analogies[name]["accuracy"] for name in ("semantic", "syntactic")},
                **{name: scores[name] for name in ("held_out_loss", "loss", "seconds")},
                "words_per_s": round(scores["words"] / scores["seconds"]),
            }
        )
    values = {name: [scores[name] for scores in found] for name in found[0]}
    return {name: None if None in part else mean(part) for name, part in values.items()}


def sweep(
    configs: Sequence[Config],
    seeds: Sequence[int],
    results: Results,
    deadline: float = math.inf,
    corpora: Sequence[str] = (),
    further: Further = NOTHING_FURTHER,
) -> Config | None:
    """Train what the results lack, and return the best config.

    Args:
        configs: What to train.
        seeds: Seeds of the best; the others get the first.
        results: What has been trained.
        deadline: In time.monotonic().
        corpora: Texts to train each config on, if not its own alone.
        further: Sets to score beside gensim's.

    Returns:
        None if all diverged, or if a run would end after the deadline.
    """
    by_setting = {Setting.of(config, corpora): config for config in configs}
    machine = Machine.here()
    device = machine.gpu or f"{platform.machine()}, {machine.cores} cores"
    longest = 0.0  # seconds of a run
    while todo := _next_run(by_setting, seeds, results):
        # The next run may take as long as the longest so far.
        if time.monotonic() + longest > deadline:
            log.info("stopped at the time limit; the same command continues from here")
            return None
        setting, seed = todo
        config = by_setting[setting]
        start = time.monotonic()
        seeded = replace(config, train=replace(config.train, seed=seed))
        scores = score(seeded, corpora, further)
        results.add(setting, seed, scores, device)
        longest = max(longest, time.monotonic() - start)
        known = [f"{name} {value:.4g}" for name, value in scores.items() if value is not None]
        about = f"{config.optimizer.name}  lr {setting.lr}  batch {setting.batch_size}"
        about = f"{about}  {config.optimizer.args}  seed {seed}"
        log.info(f"{about}  {'  '.join(known) or 'diverged'}")
    best = results.best(by_setting)
    return best and by_setting[best]


def _next_run(
    settings: Collection[Setting], seeds: Sequence[int], results: Results
) -> tuple[Setting, int] | None:
    """Return the setting and seed to train next, or None."""
    for setting in settings:
        if not results.seeds(setting):
            return setting, seeds[0]
    # More seeds may show that another setting is best, which then needs all seeds too.
    best = results.best(settings)
    return next(((best, seed) for seed in seeds if best and seed not in results.seeds(best)), None)


def as_yaml(config: Config) -> str:
    """Return optimizer and batch size as in configs/optimizers/*.yaml."""
    default = asdict(Config().optimizer)
    optimizer = {
        key: value
        for key, value in asdict(config.optimizer).items()
        if key in ("name", "lr", "args") or value != default[key]
    }
    content = {"optimizer": optimizer, "train": {"batch_size": config.train.batch_size}}
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def parse_axes(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each `key=value,value`.

    Commas inside brackets do not separate.
    """
    axes: dict[str, Any] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        try:
            axes[key] = OmegaConf.to_container(OmegaConf.create(f"[{text}]"))
        except yaml.YAMLError:
            axes[key] = []
        if not axes[key]:
            valid = "section.key=value or section.key=value,value,..."
            raise ConfigError(f"{assignment!r} is not {valid}; see --help")
    return axes


def sweep_optimizer(path: Path, options: argparse.Namespace, deadline: float) -> None:
    """Search around a config file, and print ranking and best settings."""
    files = [options.base, path]
    axes = AXES.get(load_config(files).optimizer.name, {}) | parse_axes(options.set)
    if options.corpora:
        axes["corpus.path"] = options.corpora[:1]
    text = [f"{key}={json.dumps(values[0])}" for key, values in axes.items()]
    axes = parse_axes([compare.held_out(load_config(files, text))]) | axes
    if options.epochs:
        axes["train.epochs"] = [options.epochs]
    first = [f"{key}={json.dumps(values[0])}" for key, values in axes.items()]
    centre = load_config(files, [*SETTINGS, *first])
    centre = plan.make_plan(centre, compare.open_once(centre.corpus, centre.vocab)).config
    configs = grid(centre, files, options.lr, options.batch, axes)
    # An installed package is not written to.
    folder = options.to or (Path() if PACKAGE in path.parents else path.parent)
    results = Results(folder / f"{path.stem}.sweep.csv")
    further = Further(options.questions, options.pairs)
    best = sweep(configs, options.seeds, results, deadline, options.corpora, further)
    if ranking := results.ranking(Setting.of(configs[0], options.corpora)):
        print(f"\n{ranking}\n")
    if best:
        print(f"best by the mean of its scores, to be {path}:\n\n{as_yaml(best)}")


def run(options: argparse.Namespace) -> None:
    """Search the settings of each optimizer."""
    console.log_to_console()
    deadline = time.monotonic() + options.limit_seconds
    paths = [find_config(f"optimizers/{name.lower()}.yaml") for name in options.names]
    for path in paths:
        sweep_optimizer(path, options, deadline)
