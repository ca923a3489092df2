"""Look for an optimizer's best settings: a grid of learning rates, batch sizes and arguments, in one process:

    python -m w2v.api.sweep Adamax --base configs/text8.yaml --seeds 1 2 3 --set corpus.path=text8

Every setting is trained with the first seed; then the best one with the other seeds, until the best by the mean has them all. What is
trained stands in a .csv file and is not trained again, so a sweep can be stopped, continued, and made finer around what it found.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import itertools
import json
import logging
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from w2v.api import runs as comparison
from w2v.api.compare import Opened, fitted, train_once, warm_up, with_batch
from w2v.config import Config, ConfigError, load_config
from w2v.system import console
from w2v.system import versions as environment
from w2v.system.files import error_message
from w2v.system.signals import Signals
from w2v.training import metrics, plan
from w2v.vectors import evaluate as evaluation

log = logging.getLogger("w2v")
FACTORS = (0.6, 1.0, 1.6)  # of the config's learning rate, fitted to each batch size
BATCH_FACTORS = (0.5, 1.0)
AXES: dict[str, dict[str, list[Any]]] = {
    **{
        name: {"optimizer.args.betas": [[0.0, 0.99], [0.5, 0.99]]}
        for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
    },
    **{name: {"optimizer.occurrence_cap": [8, 16]} for name in ("SGD", "ASGD")},
    "RMSprop": {"optimizer.args.alpha": [0.95, 0.99]},
    "Adadelta": {"optimizer.args.eps": [1e-5, 1e-3], "optimizer.args.rho": [0.9, 0.99]},
    "Rprop": {
        "optimizer.args.etas": [[0.5, 1.2], [0.8, 1.1]],
        "optimizer.args.step_sizes": [[1e-3, 1e-2], [3e-3, 3e-2]],
    },
}
BASICS = [
    "train.held_out_words=20000",
    "run.log_seconds=1e9",
    "run.checkpoint_minutes=0",
]  # reading the loss would wait for the device
SHOWN = 15  # settings of a ranking

IDENTITY = [
    "corpus",
    "epochs",
    "settings",
    "batch_size",
    "lr",
]  # with the seed: what a line of the file stands for
APART = {
    "corpus.path",
    "corpus.data_dir",
    "optimizer.lr",
    "train.batch_size",
    "train.epochs",
    "train.seed",
}  # not among `settings`
QUALITY = ["analogies", "wordsim353", "simlex999"]
SCORES = [*QUALITY, "semantic", "syntactic", "held_out_loss", "loss", "seconds", "words_per_s"]
COLUMNS = [*IDENTITY, "seed", *SCORES, "date", "commit", "device", "command"]
Setting = tuple[str, ...]  # the values of IDENTITY, as the file has them


def grid(
    centre: Config,
    files: Sequence[str | Path],
    assignments: Sequence[str],
    lrs: Sequence[float],
    batches: Sequence[int],
    axes: dict[str, list[Any]],
) -> list[Config]:
    """Every combination laid over the files; by default FACTORS of the centre's learning rate and BATCH_FACTORS of its batch size."""
    found = []
    for batch in batches or [
        max(1, int(centre.train.batch_size * factor)) for factor in BATCH_FACTORS
    ]:
        usual = with_batch(centre, batch).optimizer.lr
        for lr in lrs or [float(f"{usual * factor:.2g}") for factor in FACTORS]:
            for values in itertools.product(*axes.values()):
                further = [
                    f"{key}={json.dumps(value)}" for key, value in zip(axes, values, strict=True)
                ]
                found.append(
                    load_config(
                        files,
                        [*assignments, *further, f"optimizer.lr={lr}", f"train.batch_size={batch}"],
                    )
                )
    return found


def identity(config: Config) -> Setting:
    """What tells a setting from others, whatever the seed and wherever files lie; `settings` are the keys that are not at their default."""
    default, own = asdict(Config()), []
    for section, keys in asdict(config).items():
        for key, value in keys.items():
            if (
                section != "run"
                and f"{section}.{key}" not in APART
                and value != default[section][key]
            ):
                own.append(f"{section}.{key}={json.dumps(value, separators=(',', ':'))}")
    train = config.train
    return (
        Path(config.corpus.path).name,
        str(train.epochs),
        " ".join(own),
        str(train.batch_size),
        f"{config.optimizer.lr:g}",
    )


def score(config: Config, opened: Opened) -> dict[str, Any]:
    """Train once: the values of SCORES, or nothing where training diverged."""
    with TemporaryDirectory() as folder:
        try:
            trainer = train_once(config, opened, Path(folder))
            analogies, similarities = trainer.score()
            took = trainer.took()
        except (metrics.Diverged, evaluation.EvaluationError):
            return {}
    shares = {
        "analogies": analogies.total,
        "semantic": analogies.semantic,
        "syntactic": analogies.syntactic,
    }
    return {
        **{name: section.accuracy for name, section in shares.items()},
        **{similarity.name: similarity.spearman for similarity in similarities},
        **{name: took[name] for name in ("held_out_loss", "loss", "seconds")},
        "words_per_s": round(took["words"] / took["seconds"]),
    }


class Results:
    """The file of a sweep, a line for each setting and seed."""

    def __init__(self, file: Path):
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)  # before anything is trained for it
        self.lines: dict[Setting, dict[int, dict[str, str]]] = defaultdict(
            dict
        )  # by setting, then by seed
        if file.exists():
            with file.open(newline="", encoding="utf-8") as handle:
                for line in csv.DictReader(handle):
                    if list(line) != COLUMNS:
                        raise ConfigError(
                            f"{file} has other columns than a sweep writes now; delete it, or write elsewhere with --to"
                        )
                    self.lines[tuple(line[key] for key in IDENTITY)][int(line["seed"])] = line

    def add(self, setting: Setting, seed: int, scores: dict[str, Any], device: str) -> None:
        """Append a line, at once."""
        command = " ".join(
            [
                "python -m w2v.api.sweep",
                *(os.path.basename(arg) if os.path.isabs(arg) else arg for arg in sys.argv[1:]),
            ]
        )
        circumstances = [time.strftime("%Y-%m-%d"), environment.commit(), device, command]
        values = [
            f"{value:.6g}" if isinstance(value, float) else value
            for value in map(scores.get, SCORES)
        ]
        line = dict(zip(COLUMNS, [*setting, seed, *values, *circumstances], strict=True))
        fresh = not self.file.exists()
        with self.file.open("a", newline="", encoding="utf-8") as handle:
            writer = csv.DictWriter(handle, COLUMNS, lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(line)
        self.lines[setting][seed] = {
            key: "" if value is None else str(value) for key, value in line.items()
        }

    def values(self, setting: Setting, score: str) -> list[float]:
        return [float(line[score]) for line in self.lines[setting].values() if line[score]]

    def worth(self, setting: Setting) -> tuple[float, float]:
        """The sum of the mean scores, so that nothing is won on analogies that is lost on similarity, and the held-out loss, negative;
        -inf if a seed diverged."""
        losses = self.values(setting, "held_out_loss")
        if not losses or len(losses) < len(self.lines[setting]):
            return -math.inf, -math.inf
        return sum(mean(self.values(setting, score) or [0.0]) for score in QUALITY), -mean(losses)

    def ranking(self, like: Setting) -> str:
        """The settings tried on the corpus and in the epochs of `like`, best first, with their ranks by analogies and by held-out loss."""
        compared = sorted(
            (s for s, seeds in self.lines.items() if seeds and s[:2] == like[:2]),
            key=self.worth,
            reverse=True,
        )
        common = set.intersection(*(set(own.split()) for _, _, own, _, _ in compared))
        ranks = {}
        for score, sign in (("analogies", -1), ("held_out_loss", 1)):
            signed = [
                mean([sign * value for value in self.values(setting, score)] or [math.inf])
                for setting in compared
            ]
            ranks[score] = [str(1 + sum(other < value for other in signed)) for value in signed]
        rows = [
            [
                "lr",
                "batch",
                "seeds",
                "sum",
                "analogies",
                "rank",
                "held-out loss",
                "rank",
                "WordSim-353",
                "SimLex-999",
                "settings",
            ]
        ]
        for setting, by_analogies, by_loss in list(
            zip(compared, ranks["analogies"], ranks["held_out_loss"], strict=True)
        )[:SHOWN]:
            _, _, own, batch, lr = setting
            total = (
                f"{self.worth(setting)[0]:.3f}"
                if math.isfinite(self.worth(setting)[0])
                else "diverged"
            )
            analogies, wordsim, simlex = (
                comparison.spread(self.values(setting, score), "{:.3f}") for score in QUALITY
            )
            loss = comparison.spread(self.values(setting, "held_out_loss"), "{:.4f}")
            differing = " ".join(part for part in own.split() if part not in common) or "-"
            seeds = str(len(self.lines[setting]))
            rows.append(
                [
                    lr,
                    batch,
                    seeds,
                    total,
                    analogies,
                    by_analogies,
                    loss,
                    by_loss,
                    wordsim,
                    simlex,
                    differing,
                ]
            )
        return comparison.text(rows)


def sweep(
    configs: Sequence[Config],
    seeds: Sequence[int],
    results: Results,
    opened: Opened,
    deadline: float = math.inf,
) -> Config | None:
    """Train what the results lack; gives the best config, or None where time.monotonic() would pass the deadline, or all diverged."""
    by_setting, longest = {identity(config): config for config in configs}, 0.0

    def best() -> Setting | None:
        first = max(by_setting, key=results.worth)
        return first if math.isfinite(results.worth(first)[0]) else None

    def lacking() -> tuple[Setting, int] | None:
        untried = [(setting, seeds[0]) for setting in by_setting if not results.lines[setting]]
        unsure = [
            (first, seed)
            for first in [best()]
            if first
            for seed in seeds
            if seed not in results.lines[first]
        ]
        return next(iter(untried + unsure), None)

    if lacking():
        warm_up(configs[0], opened)
    while (todo := lacking()) is not None:
        start, (setting, seed) = time.monotonic(), todo
        if start + longest > deadline:
            log.info("stopped for want of time; the same command goes on from here")
            return None
        config, machine = by_setting[setting], plan.Machine.here()
        scores = score(replace(config, train=replace(config.train, seed=seed)), opened)
        results.add(
            setting, seed, scores, machine.gpu or f"{platform.machine()}, {machine.cores} cores"
        )
        longest = max(longest, time.monotonic() - start)
        said = (
            "  ".join(f"{name} {value:.4g}" for name, value in scores.items() if value is not None)
            or "diverged"
        )
        log.info(
            f"{config.optimizer.name}  lr {setting[4]}  batch {setting[3]}  {config.optimizer.args}  seed {seed}  {said}"
        )
    return by_setting[found] if (found := best()) else None


def as_yaml(config: Config) -> str:
    """What a file of configs/optimizers says of a config."""
    default, own = asdict(Config().optimizer), asdict(config.optimizer)
    lines = [
        f"  {key}: {own[key] if key == 'name' else json.dumps(own[key])}"
        for key in own
        if key in ("name", "lr", "args") or own[key] != default[key]
    ]
    return "\n".join(["optimizer:", *lines, "train:", f"  batch_size: {config.train.batch_size}"])


def axes_of(given: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each `key=value,value`; commas inside brackets stay."""
    axes: dict[str, Any] = {}
    for assignment in given:
        key, equals, text = assignment.partition("=")
        try:
            axes[key] = OmegaConf.to_container(OmegaConf.create(f"[{text}]"))
        except YAMLError:
            equals = ""
        if not equals or not axes[key]:
            raise ConfigError(
                f"{assignment!r} is not section.key=value or section.key=value,value,...; see --help"
            )
    return axes


def file_of(name: str) -> Path:
    folder = Path("configs/optimizers")
    known = {path.stem: path for path in folder.glob("*.yaml")}
    if name.lower() not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {' '.join(sorted(known))}"
        raise ConfigError(f"{folder} has no {name.lower()}.yaml for the search to begin at; {hint}")
    return known[name.lower()]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m w2v.api.sweep", description="Look for the best settings of optimizers."
    )
    parser.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="an optimizer; the search begins at its file in configs/optimizers",
    )
    parser.add_argument(
        "--base",
        default="configs/text8.yaml",
        metavar="CONFIG",
        help="what it is laid over (default: configs/text8.yaml)",
    )
    parser.add_argument(
        "--lr",
        nargs="+",
        type=float,
        default=[],
        help=f"learning rates (default: {FACTORS} of the file's, by batch)",
    )
    batch = f"batch sizes (default: {BATCH_FACTORS} of the file's, or of what leaves a short text enough steps)"
    parser.add_argument("--batch", nargs="+", type=int, default=[], help=batch)
    parser.add_argument("--epochs", type=int, help="default: the base's")
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="the first for each, all for the best (default: 1)",
    )
    what = "a value for all settings, or several: optimizer.args.betas=[0,0.99],[0.5,0.99], instead of those usual for the optimizer"
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help=what)
    parser.add_argument(
        "--limit-seconds",
        type=float,
        default=math.inf,
        metavar="N",
        help="stop before; the same command then goes on",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="where <name>.sweep.csv lies (default: configs/optimizers)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console.log_to_console()
    opened, deadline = Opened(), time.monotonic() + options.limit_seconds
    try:
        for path in map(file_of, options.names):
            files = [options.base, path]
            given = AXES.get(load_config(files).optimizer.name, {}) | axes_of(options.set)
            given |= {"train.epochs": [options.epochs]} if options.epochs else {}
            fixed = [
                f"{key}={json.dumps(values[0])}"
                for key, values in given.items()
                if len(values) == 1
            ]
            axes = {key: values for key, values in given.items() if len(values) > 1}
            fixed = [*BASICS, *fixed]
            centre = load_config(files, fixed)
            configs = grid(
                fitted(centre, opened(centre)[0]), files, fixed, options.lr, options.batch, axes
            )
            results = Results((options.to or path.parent) / f"{path.stem}.sweep.csv")
            best = sweep(configs, options.seeds, results, opened, deadline)
            if any(results.lines.values()):
                print(f"\n{results.ranking(identity(configs[0]))}\n")
            if best:
                print(f"best by the sum of its scores, to be {path}:\n\n{as_yaml(best)}\n")
    except (ValueError, MemoryError, OSError) as error:
        print(f"error: {error_message(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    with Signals():
        sys.exit(main())
