"""Train several configs with several seeds, and compare them.

    w2v compare adam adamw my.txt train.epochs=10 --seeds 1 2 3

Runs that are already finished in the folder are not trained again.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from w2v.api.cli import make_parser
from w2v.api.train import as_arguments, sort_settings
from w2v.config import Config, ConfigError, CorpusConfig, VocabConfig, load_config, save_config
from w2v.system import console
from w2v.system.files import as_json, as_list, atomic_write
from w2v.system.process import describe_environment
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import build, plan, run_folder
from w2v.training.memory import Machine
from w2v.training.trainer import Diverged, Trainer
from w2v.vectors import datasets, evaluate, export, runs
from w2v.vectors import report as pages
from w2v.vectors.datasets import ITEM_SCORES, PAIR_SETS, EvaluationError, Further, by_name, set_name
from w2v.vectors.runs import Comparison

log = logging.getLogger("w2v")
# No checkpoints; scores and losses at many points, for the curves.
SETTINGS = ["run.checkpoint_minutes=0", "run.score_epochs=true", "run.log_seconds=0.1"]
HELD_OUT_WORDS = 20_000
FEWEST_SEEDS = 3  # with fewer, even great differences may be luck
SHOWN = ("held-out loss", "analogies %", f"{ITEM_SCORES[0]} %", "seconds")


@functools.cache
def open_once(corpus: CorpusConfig, vocab: VocabConfig, holds_items: bool) -> tuple[Vocab, Corpus]:
    """Open a corpus; later calls return the same one."""
    run = replace(Config().run, held_out_items=holds_items)
    return open_corpus(Config(corpus=corpus, vocab=vocab, run=run))


@contextmanager
def quiet() -> Iterator[None]:
    """Log errors only; warnings were shown when configs were checked."""
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def planned_config(files: Sequence[str | Path], given: Sequence[str], name: str) -> Config:
    """Return a config with held-out words and a value for each `auto`.

    All errors and warnings of the plan come here, before anything is trained.
    """
    config = load_config(files, given)
    opened = open_once(config.corpus, config.vocab, config.run.held_out_items)
    _, corpus = opened
    # Of a short text, a tenth is held out.
    words = 0
    if len(corpus.offsets) > 10:
        words = min(HELD_OUT_WORDS, len(corpus.ids) // 10)
    own = [f"train.held_out_words={words}", f"run.name={name}", *SETTINGS]
    planned = plan.make_plan(load_config(files, [*own, *given]), opened)
    planned.check(saves=False)
    return planned.config


def warm_up(planned: plan.Plan) -> None:
    """Train two steps, which compiles all kernels before the timed run."""
    loop = build.build(planned)
    deque(islice(loop.epoch(), 2), maxlen=0)
    loop.step.engine.flush()


@quiet()
def train_and_score(
    config: Config, folder: Path, save: bool = True, further: Further = Further()
) -> dict[str, Any]:
    """Return the scores of a run, as in scores.json, or {"diverged": reason}.

    metrics.jsonl is written to the folder; `save` writes vectors.kv too.
    """
    vocab, corpus = open_once(config.corpus, config.vocab, config.run.held_out_items)
    planned = plan.make_plan(config, (vocab, corpus))
    warm_up(planned)  # compiling must not count as training
    loop = build.build(planned)
    held_out = build.make_heldout(planned, loop)
    try:
        with Trainer(loop, vocab, corpus, folder, held_out) as trainer:
            trainer.train()
        table = trainer.loop.step.inputs
        words = len(vocab.words)
        if save:
            blocks = export.blocks_of(table["weight"], 0, words)
            export.save_run(vocab, table.dim, blocks, folder, ["kv"])
        vectors_VD = table["weight"][:words]
        items = datasets.read_items(folder)
        scored = evaluate.scores(
            vocab.words, vectors_VD, further.questions, further.pairs, items=items
        )
        return evaluate.as_dict(scored) | trainer.results() | {"text": corpus.digest}
    except (Diverged, EvaluationError) as error:
        return {"diverged": str(error), "text": corpus.digest}


def train(
    configs: dict[str, Config],
    seeds: Sequence[int],
    folder: Path,
    further: Further = Further(),
    save: bool = True,
) -> list[runs.Run]:
    """Train every config with every seed, and return the runs.

    Each run gets a folder `<name>-seed<seed>`. Runs that are finished there are not repeated.
    `save` writes their vectors.
    """
    further.check()
    folder.mkdir(parents=True, exist_ok=True)
    trained: list[runs.Run] = []
    with run_folder.lock(folder):  # another process would remove the unfinished run
        planned = []
        for name, config in configs.items():
            for seed in dict.fromkeys(seeds):
                seeded = with_seed(config, seed)
                run = _run_folder(folder, f"{name}-seed{seed}", seeded)
                finished = runs.read(run) if (run / "scores.json").exists() else None
                if finished:
                    check_scored(finished, config, further)
                planned.append((seeded, run, finished))
        for config, run, finished in planned:
            if not finished:
                run.mkdir()
                save_config(config, run / "config.yaml")
                try:
                    scores = train_and_score(config, run, save, further)
                except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
                    others = "the same command trains the others"
                    log.info(f"stopped after {len(trained)} runs; {others}")
                    raise
                # Written last: it marks the run as finished.
                atomic_write(run / "scores.json", as_json(scores, indent=1))
            trained.append(finished or runs.read(run))
            log.info(f"{len(trained)} of {len(planned)}  {run.name:<16}  {_summary(trained[-1])}")
        atomic_write(folder / "env.txt", describe_environment(Machine.here()))
    return trained


def _run_folder(folder: Path, name: str, config: Config) -> Path:
    """Return the folder of a run; remove what an unfinished run left there.

    A folder that is not this run's is kept: the name of this one gets a number.
    """
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    for run in (folder / name for name in names):
        file = run / "config.yaml"
        is_ours = file.exists() and load_config([file], trains=False) == config
        if is_ours or not any(run.glob("*")):
            break
    if run.exists() and not (run / "scores.json").exists():
        shutil.rmtree(run)
    return run


def _summary(run: runs.Run) -> str:
    """Return a run's scores on one line."""
    columns = runs.table(runs.rows([run]))
    shown = (f"{name} {runs.short(columns[name][0])}" for name in SHOWN if name in columns)
    return run.scores["diverged"] or "  ".join(shown)


def folder_to_use(parent: Path, planned: Sequence[Config]) -> Path:
    """Return the folder of an interrupted comparison, or one of today's.

    A folder that has runs of other configs is left alone, whatever their seeds.
    """
    known = [with_seed(config) for config in planned]
    found = [folder for folder in parent.glob("compare-*") if folder.is_dir()]
    newest = max(found, default=None, key=lambda folder: folder.stat().st_mtime)
    today = parent / f"compare-{time.strftime('%Y-%m-%d')}"
    candidates = itertools.chain([today], (Path(f"{today}-{n}") for n in itertools.count(2)))
    if newest and not (newest / "runs.csv").exists():
        candidates = itertools.chain([newest], candidates)
    for folder in candidates:
        configs = [load_config([file], trains=False) for file in folder.glob("*/config.yaml")]
        if all(with_seed(config) in known for config in configs):
            break
    return folder


def with_seed(config: Config, seed: int = 1) -> Config:
    """Return the config with this seed, or the default one."""
    return replace(config, train=replace(config.train, seed=seed))


def names_runs(path: str) -> bool:
    """Return whether a path names a run or a folder of runs, not a text."""
    found = (any(Path(path).glob(names)) for names in ("config.yaml", "*/config.yaml"))
    # A long assignment is no folder, of which glob raises an error.
    return path == "latest" or (os.path.isdir(path) and any(found))


def check_not_trained(options: argparse.Namespace) -> None:
    """Raise `ConfigError` at options that finished runs have no use for."""
    default = make_parser("compare").get_default
    names = "base", "seeds", "corpora", "questions", "pairs"
    unused = [f"--{name}" for name in names if getattr(options, name) != default(name)]
    if unused:
        without = "has no effect on runs, which are not trained again"
        raise ConfigError(f"{' '.join(unused)} {without}; leave it out, or name configs")


def check_scored(run: runs.Run, config: Config, further: Further) -> None:
    """Raise `ConfigError` if a run had another text or other files to score."""
    _, corpus = open_once(config.corpus, config.vocab, config.run.held_out_items)
    if run.scores.get("text", corpus.digest) != corpus.digest:
        changed = f"{run.folder} was trained before {config.corpus.paths} changed"
        raise ConfigError(f"{changed}; restore that text, or give another folder with --to")
    if run.scores["diverged"]:
        return
    given = {set_name(path) for path in (*further.questions, *further.pairs)}
    scored = {*run.scores["similarity"], *run.scores["questions"]} - PAIR_SETS.keys()
    scored -= set(ITEM_SCORES)
    if differing := " ".join(sorted(given ^ scored)):
        options = "give the same --questions and --pairs, or another folder with --to"
        raise ConfigError(f"{run.folder} and this call differ in scores of {differing}; {options}")


def by_corpus(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the setting of each corpus by the suffix of its runs' names."""
    corpora = by_name(options.corpora).items()
    return {f"-{name}": [f"corpus.path={path}"] for name, path in corpora} or {"": []}


def write(trained: Sequence[runs.Run], folder: Path) -> Comparison:
    """Write the table, the runs and the page; return the comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    compared = Comparison.of(trained)
    lines = [runs.markdown(compared.columns)]
    lines += [f"\n{runs.markup(line)}" for line in compared.verdicts]
    atomic_write(folder / "table.md", "\n".join(lines) + "\n")
    try:
        pages.write_page(compared, folder / "report.html")
    except pages.ReportError as error:  # plotly is not installed
        log.warning(f"no report: {error}")
    # The last file, by which a comparison is known to be finished.
    atomic_write(folder / "runs.csv", runs.as_csv(trained))
    return compared


def report(paths: Iterable[str | Path], folder: Path | None = None) -> Comparison:
    """Compare the runs that paths name; write the result to a folder."""
    found = [runs.read(path) for path in runs.find_all(paths)]
    if folder:
        return write(found, folder)
    return Comparison.of(found)


def files_and_settings(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the config files and the settings of the arguments."""
    files, assignments = sort_settings(options.settings)
    # Settings that options or the names of runs would override.
    for setting in assignments:
        key, _, value = setting.partition("=")
        if key == "train.seed":
            seeds = value.replace(",", " ")
            raise ConfigError(f"{setting} would be replaced; write --seeds {seeds}, as last option")
        if key == "run.name":
            named = "would be replaced, as runs are named after configs"
            raise ConfigError(f"{setting} {named}; name their folder with --to")
        if key == "corpus.path" and options.corpora:
            raise ConfigError(f"{setting} would be replaced; give all texts to --corpora")
    if not files:
        given = " ".join(options.settings)
        raise ConfigError(f"{given!r} has no config; name configs, such as adam adamw")
    return files, assignments


def check_text(files: Sequence[str], assignments: Sequence[str], base: str) -> None:
    """Raise `ConfigError` if configs that are compared name different texts."""
    texts = {path: load_config([base, path], assignments).corpus.paths for path in files}
    common = load_config([base], assignments).corpus.paths
    others = [path for path, text in texts.items() if text != common]
    if others and len(others) < len(files):
        differ = f"{others[0]} trains on {texts[others[0]]}, and others on {common}"
        raise ConfigError(f"{differ}; write --base {others[0]}, or a text for all")


def run(options: argparse.Namespace) -> None:
    """Print the table of run folders, or train configs and print theirs."""
    console.log_to_console()
    found, folder = compare_as(options)
    console.show(found)
    if folder:
        console.show(f"\nreport, tables and a folder for each run are in {folder}")


def compare(
    compared: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *settings: str | os.PathLike[str],
    seeds: Sequence[int] = (1,),
    base: str = "text8",
    corpora: Sequence[str] = (),
    questions: Sequence[str] = (),
    pairs: Sequence[str] = (),
    to: str | Path | None = None,
    **keys: Any,
) -> Comparison:
    """Train configs with several seeds and compare them, or compare runs.

        print(w2v.compare(["adam", "sgd"], "my.txt", seeds=[1, 2, 3], epochs=10))
        print(w2v.compare(["runs/a", run]))

    Printed, the result is the table, the best first, and sentences that say which differences are
    noise. Report and tables are written to a folder in run.dir, or `to`.

    Args:
        compared: Configs, such as "adam"; or run folders, folders of them and results of
            `w2v.train`, which are not trained again.
        settings: Text and section.key=value for all configs, as on the command line.
        seeds: Each config is trained with each of these.
        base: Config of the settings that the others leave open.
        corpora: Texts to train on in turn; configs are ranked by the mean over all.
        questions: Files of analogies to score beside Google's.
        pairs: Files of word pairs to score beside WordSim-353 and SimLex-999.
        to: Folder for the results.
        keys: Settings by the last part of their name, as for `w2v.train`.

    Raises:
        ConfigError: A setting is unknown or wrong, or has no effect on runs.
        EvaluationError: A file of questions or pairs cannot be read.
        RunError: A run folder cannot be read.
    """
    options = argparse.Namespace(base=base, seeds=list(seeds), corpora=as_list(corpora))
    options.settings = as_arguments([*as_list(compared), *settings], keys)
    options.questions, options.pairs = as_list(questions), as_list(pairs)
    options.to = to and Path(to)
    with console.restored_log():
        console.log_to_console()
        return compare_as(options)[0]


def compare_as(options: argparse.Namespace) -> tuple[Comparison, Path | None]:
    """Return the comparison of command-line options, and its folder if any."""
    if any(map(names_runs, options.settings)):
        check_not_trained(options)
        return report(options.settings, options.to), options.to
    files, assignments = files_and_settings(options)
    if not options.corpora:
        check_text(files, assignments, options.base)
    configs = {
        f"{name}{ending}": planned_config([options.base, path], [*assignments, *corpus], name)
        for ending, corpus in by_corpus(options).items()
        for name, path in by_name(files).items()
    }
    seeds = len(set(options.seeds))
    if seeds < FEWEST_SEEDS and len(configs) > 1:
        few = f"--seeds {' '.join(map(str, options.seeds))} cannot tell a difference from luck"
        log.warning(f"{few}; write --seeds 1 2 3")
    planned = list(configs.values())
    folder = options.to or folder_to_use(Path(planned[0].run.dir), planned)
    further = Further(options.questions, options.pairs)
    return write(train(configs, options.seeds, folder, further), folder), folder
