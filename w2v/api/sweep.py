"""Search for an optimizer's best settings on a grid.

    w2v sweep adamax my.txt optimizer.lr=.1,.2 --seeds 1 2 3

A sweep is a comparison of the points of a grid over learning rates, batch sizes and other settings.
Each point is trained with the first seed, then the best with the other seeds, until the best by the
mean has been trained with all. What is finished is not trained again, so that a sweep can be
stopped, continued and refined.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from w2v.api import compare
from w2v.config import (
    TYPES,
    Config,
    ConfigError,
    as_assignment,
    find_config,
    load_config,
    parse_yaml,
    plain_values,
)
from w2v.system import console
from w2v.vectors import runs
from w2v.vectors.datasets import Further

LR_FACTORS = (0.6, 1.0, 1.6)  # of the config's learning rate, or of the automatic one
BATCH_FACTORS = (0.5, 1.0)  # of the config's batch size, or of the automatic one
BETAS = {"optimizer.args.betas": [[0.0, 0.99], [0.5, 0.99]]}
AXES: dict[str, dict[str, list[Any]]] = {  # further settings to search, by optimizer
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax"), BETAS),
    "RMSprop": {"optimizer.args.alpha": [0.95, 0.99]},
    "Adadelta": {"optimizer.args.eps": [1e-5, 1e-3], "optimizer.args.rho": [0.9, 0.99]},
    "Rprop": {
        "optimizer.args.etas": [[0.5, 1.2], [0.8, 1.1]],
        "optimizer.args.step_sizes": [[1e-3, 1e-2], [3e-3, 3e-2]],
    },
}
# Scores after each epoch would take longer than many of the runs.
SETTINGS = ["run.score_epochs=false", "run.log_seconds=1e9"]


def parse_axes(assignments: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each `key=value,value`.

    Commas inside brackets do not separate.
    """
    axes: dict[str, Any] = {}
    for assignment in assignments:
        key, _, text = assignment.partition("=")
        try:
            values = parse_yaml(f"[{text}]")
            if TYPES.get(key) not in (str, tuple[str, ...]):
                values = plain_values(values)
            axes[key] = values
        except yaml.YAMLError:
            axes[key] = []
        if not axes[key]:
            valid = "section.key=value or section.key=value,value,..."
            raise ConfigError(f"{assignment!r} is not {valid}; see --help")
    return axes


def grid(path: Path, assignments: Sequence[str], options: argparse.Namespace) -> dict[str, Config]:
    """Return a config for each point, on each corpus, by the name of its run.

    Learning rates and batch sizes that are not given are factors of those that the text needs.
    """
    files = [options.base, path]
    corpora = compare.by_corpus(options)
    given_axes = parse_axes(assignments)
    axes = AXES.get(load_config(files, trains=False).optimizer.name, {})
    if "optimizer.args" in given_axes:  # which would replace those of the points
        axes = {key: axes[key] for key in axes if not key.startswith("optimizer.args.")}
    axes = axes | given_axes
    first = [as_assignment(key, values[0]) for key, values in axes.items()]
    first_corpus = next(iter(corpora.values()))
    center = compare.planned_config(files, [*first, *first_corpus], path.stem)
    lrs = [float(f"{center.optimizer.lr * factor:.2g}") for factor in LR_FACTORS]
    batches = [max(1, int(center.train.batch_size * factor)) for factor in BATCH_FACTORS]
    around: dict[str, list[Any]] = {"train.batch_size": batches, "optimizer.lr": lrs}
    axes = around | axes
    configs = {}
    for values in itertools.product(*axes.values()):
        point = dict(zip(axes, values, strict=True))
        # Runs are named after what differs between them, a minus sign included.
        differing = [f"{key.rpartition('.')[2]} {point[key]}" for key in axes if axes[key][1:]]
        name = re.sub(r"[^\w.-]+", "-", " ".join([path.stem, *differing])).strip("-")
        settings = [as_assignment(key, value) for key, value in point.items()]
        for ending, corpus in corpora.items():
            given = [*SETTINGS, *settings, *corpus]
            with compare.quiet():  # the plan of the center has logged all warnings
                configs[f"{name}{ending}"] = compare.planned_config(files, given, name)
    return configs


def sweep(
    configs: dict[str, Config], seeds: Sequence[int], folder: Path, further: Further = Further()
) -> Config | None:
    """Train what the folder lacks; return the best config, or None.

    Configs of one run.name are ranked together. The best gets all seeds, the others get the first.
    None is best if all diverged.
    """
    seeds = list(dict.fromkeys(seeds))
    trained = compare.train(configs, seeds[:1], folder, further, save=False)
    # More seeds may show that another point is best, which then needs all seeds too.
    while True:
        points: dict[str, list[runs.Run]] = {}
        for run in trained:
            points.setdefault(run.settings["run.name"], []).append(run)
        best = max(points, key=lambda name: runs.quality(points[name]))
        chosen = {name: config for name, config in configs.items() if config.run.name == best}
        if len(points[best]) == len(chosen) * len(seeds):
            break
        trained += compare.train(chosen, seeds[1:], folder, further, save=False)
    if math.isinf(runs.quality(points[best])[0]):
        return None
    return next(iter(chosen.values()))


def as_yaml(config: Config, given: Iterable[str]) -> str:
    """Return a config file: optimizer, batch size and the given keys."""
    default = asdict(Config().optimizer)
    optimizer = {
        key: value
        for key, value in asdict(config.optimizer).items()
        if key in ("name", "lr", "args") or value != default[key]
    }
    content = {"optimizer": optimizer, "train": {"batch_size": config.train.batch_size}}
    for name in given:
        section, _, key = name.partition(".")
        if section not in ("optimizer", "corpus", "run"):
            content.setdefault(section, {})[key] = getattr(getattr(config, section), key)
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def run(options: argparse.Namespace) -> None:
    """Search the settings of each optimizer; print a table and the best."""
    console.log_to_console()
    further = Further(options.questions, options.pairs)
    files, assignments = compare.files_and_settings(options)
    for path in map(find_config, files):
        configs = grid(path, assignments, options)
        parent = options.to or Path(next(iter(configs.values())).run.dir)
        folder = parent / f"sweep-{path.stem}"
        best = sweep(configs, options.seeds, folder, further)
        # An earlier sweep of other texts may be in the folder.
        texts = {config.corpus.paths for config in configs.values()}
        found = map(runs.read, runs.find_all([folder]))
        of_texts = [run for run in found if run.settings["corpus.path"] in texts]
        console.show(f"\n{compare.write(of_texts, folder)}\n")
        if best:
            settings = as_yaml(best, parse_axes(assignments))
            best_as = f"best by the mean of its scores, as a file like {path.name}"
            console.show(f"{best_as}:\n\n{settings}")
