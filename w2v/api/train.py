"""The command train: load, plan, check, train, export."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import re
import reprlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w2v.api.cli import make_parser
from w2v.config import (
    TYPES,
    YAML_SUFFIXES,
    Config,
    ConfigError,
    as_assignment,
    describe_config,
    load_config,
    nearest_config,
    nearest_key,
    shipped_config,
)
from w2v.distributed import launcher
from w2v.system import console
from w2v.system.files import atomic_path, naming_file
from w2v.system.process import Signals, cores, describe_environment, forked, open_gpu
from w2v.system.timeline import Timeline

if TYPE_CHECKING:
    from w2v.api.vectors import Vectors

STDIN = "-"
MAP_SECONDS = 30.0  # of training, for which a report has a map, which takes some seconds
SWITCH_SECONDS = 0.0005  # after which a thread that waits for Python gets it
LONGEST_NAME = 255  # of a file
MOST_GPUS = 64  # of one machine
# Keys by the last part of their name, and optimizer for optimizer.name.
KEYWORDS = {name.rpartition(".")[2]: name for name in TYPES} | {"optimizer": "optimizer.name"}


def run(options: argparse.Namespace) -> int | None:
    """Train as the command line says; return the exit status of ranks."""
    if options.help_config:
        console.show(describe_config().rstrip())
        return None
    # Threads that write files take turns with one that computes in Python; by default each waits
    # for 5 ms, several times for each part of a file.
    sys.setswitchinterval(SWITCH_SECONDS)
    if options.threads:
        if options.threads > cores():
            raise ConfigError(f"--threads {options.threads} is more than the {cores()} cores")
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.gpus > MOST_GPUS:
        raise ConfigError(
            f"--gpus {options.gpus} is more than one machine has, at most {MOST_GPUS}"
        )
    if options.gpus > 1:
        with launcher.on_all_ranks():
            if launcher.started():
                raise ConfigError("--gpus and torchrun both start ranks; leave one of them out")
        count = options.gpus
        options.gpus = 1  # of each rank
        return launcher.start_ranks(count, run, options)
    with Signals() as signals:
        folder = train_run(options, signals)
    if folder:  # tables are freed by now
        write_report(folder)
    return None


def train(
    *settings: str | os.PathLike[str],
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **keys: Any,
) -> Vectors:
    """Train word vectors on a text, as `w2v train` does, and return them.

        run = w2v.train("my.txt", optimizer="Adam", vector_size=200, epochs=10)

    The run folder has vectors, scores, curves and a report; `os.fspath(run)` is its path. Progress
    is printed. An interrupt ends the run without a checkpoint.

    Args:
        settings: Text to train on, configs, and section.key=value, as on the command line.
        resume: A run folder to continue, or the `latest` in run.dir.
        quiet: Whether to print only warnings and the result.
        keys: Settings by the last part of their name, such as epochs for train.epochs, and
            `optimizer` for optimizer.name.

    Raises:
        ConfigError: A setting is unknown or wrong, or this machine cannot do what is asked for.
        CorpusError: The text cannot be read. Both are `ValueError`, as are all user errors.
        Diverged: The loss is no longer finite.
        MemoryError: There is too little memory.
    """
    import torch  # noqa: F401 - first, as this process may have threads and so is not forked

    from w2v.api.vectors import load

    if launcher.started():
        raise ConfigError("w2v.train trains in one process; start ranks with w2v train --gpus N")
    options = make_parser("train").parse_args(["--quiet"] * quiet)
    options.settings = as_arguments(settings, keys)
    options.resume = resume and os.fspath(resume)
    with console.restored_log():
        folder = train_run(options, Signals())
        assert folder, "only a dry run has none"
        write_report(folder)
    return load(folder)


def as_arguments(settings: Sequence[str | os.PathLike[str]], keys: Mapping[str, Any]) -> list[str]:
    """Return settings and keywords of Python as command-line arguments."""
    for setting in settings:
        if not isinstance(setting, (str, os.PathLike)):
            remedy = "give files and section.key=value; w2v.Word2Vec trains on sentences"
            raise ConfigError(f"{reprlib.repr(setting)} is not a file; {remedy}")
    arguments = [os.fspath(setting) for setting in settings]
    for keyword, value in keys.items():
        if not (name := KEYWORDS.get(keyword)):
            section, _, near = nearest_key(keyword).rpartition(".")
            hint = f"did you mean {near}?" if near else "see w2v train --help-config"
            if section == "optimizer.args":
                hint = f"write args={{{near!r}: ...}}"
            raise ConfigError(f"{keyword}={value!r} is not a setting; {hint}")
        is_text = isinstance(value, (str, os.PathLike))
        arguments.append(f"{name}={value}" if is_text else as_assignment(name, value))
    return arguments


def write_report(folder: Path) -> None:
    """Write the page of a run, unless plotly is missing."""
    from w2v.vectors import report, runs

    run = runs.read(folder)
    if not run.settings["run.report"]:
        return
    with_map = run.scores["seconds"] >= MAP_SECONDS
    try:
        page = report.write_page(runs.Comparison.of([run]), folder / "report.html", with_map)
        console.log.log(console.RESULTS, f"report       {page}")
    except report.ReportError as error:
        console.log.log(console.RESULTS, f"no report    {error}")


def train_run(options: argparse.Namespace, signals: Signals) -> Path | None:
    """Load, plan, check, train and export; return the folder, on rank 0."""
    timeline = Timeline()
    # Load: settings, torch and the text.
    level = console.RESULTS if options.quiet else logging.INFO
    level = console.DETAILS if options.verbose or options.dry_run else level
    with launcher.on_all_ranks(), signals.deferred():
        config, files, assignments = read_settings(options)
    if config.corpus.path == (STDIN,):
        with launcher.on_all_ranks():
            assignments.append(f"corpus.path={spool(config.corpus.data_dir)}")
            config = load_config(files, assignments)
    is_other = launcher.started() and launcher.number("RANK") > 0
    console.log_to_console(console.ERRORS if is_other else level)
    console.log.info("start     loading torch")  # seconds
    # A new text is encoded while torch is imported: over 1 s less for 100 MB on two cores, 3 s in
    # the first run of an installation, as numba compiles meanwhile. A thread would wait.
    is_new = not (options.resume or launcher.number("RANK") or "torch" in sys.modules)
    encoding: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_new:
        from w2v.text import open_corpus

        encoding = forked(partial(open_corpus, config))
    starting = timeline.phase("starting")
    with timeline.phase("reading"), encoding, starting:
        with signals.deferred():
            # Two threads open the GPU and load kernels: .8 s of 6.5 less on an H100.
            if config.train.device != "cpu":
                open_gpu(launcher.number("LOCAL_RANK"))
            import torch

            from w2v.word2vec import sampler

            uses_gpu = config.train.device != "cpu" and torch.cuda.is_available()
            if uses_gpu and (is_new or launcher.started()):
                warm_up = partial(sampler.warm_up, launcher.number("LOCAL_RANK"))
                threading.Thread(target=warm_up, name="warm_up", daemon=True).start()
            from w2v.training import build, memory, plan, run_folder, trainer
        # Not deferred: of the ranks that it waits for, a signal may have ended some.
        ranks = plan.join_ranks(config)
    with signals.deferred():
        folder = run_folder.find_to_resume(options.resume, config.run.dir, ranks)
        if folder:
            lock = run_folder.lock(folder, ranks)
            with ranks.reraise():
                config = run_folder.resume_config(folder, files, assignments)
                run_folder.require_text(folder, config)
        ranks.require_equal(plan.common_facts(config))
    timeline.begin("reading")
    opened = plan.open_together(config, ranks)

    # Plan, and check that it fits.
    timeline.begin("set-up")
    with signals.deferred(), ranks.reraise():
        planned = plan.make_plan(config, opened, folder, ranks)
        config = planned.config  # with a value for each `auto`
        console.log.info(plan.describe(planned))
        console.log.debug(plan.describe_bytes(planned))
        planned.check()
        with memory.explained(planned):
            loop = build.build(planned)
    if options.dry_run:
        trial = trainer.Trial.of(loop, planned.corpus.raw_words, ranks)
        if ranks.rank == 0:
            console.show(f"time      {trial}")
        ranks.leave()
        return None

    # Train and export, in a folder of its own.
    if folder is None:
        folder = run_folder.create(config, ranks)
        lock = run_folder.lock(folder, ranks)
    console.log.info(f"run       {folder}")
    log_file = console.log_to_file(folder / "train.log", quiet=ranks.rank > 0)
    with lock as leads, memory.explained(planned, folder), naming_file(folder), log_file:
        job = trainer.Trainer(
            loop,
            planned.vocab,
            planned.corpus,
            folder,
            held_out=build.make_heldout(planned, loop),
            signals=signals,
            copy_bytes=planned.copies,
            ranks=ranks,
            timeline=timeline,
        )
        with job:
            # Only now: a checkpoint may refuse the settings, which then must not become the run's.
            if leads:
                run_folder.begin(folder, config, describe_environment(planned.machine))
            with signals.deferred():
                job.train()
                results = job.finish()
            job.export(results)
    ranks.leave()
    return folder if leads else None


def read_settings(options: argparse.Namespace) -> tuple[Config, list[str], list[str]]:
    """Return the config of a run, and the files and assignments that gave it."""
    files, assignments = sort_settings(options.settings)
    shipped = {shipped_config(name): name for name in files}
    named = [name for path, name in shipped.items() if path and path.parent.name == "optimizers"]
    if len(named) > 1:
        remedy = f"name one; w2v compare {' '.join(named)} TEXT compares them"
        raise ConfigError(f"{' and '.join(named)} are several optimizers; {remedy}")
    config = load_config(files, assignments)
    if config.run.tensorboard and find_spec("tensorboard") is None:
        missing = "run.tensorboard=true needs a package that is not installed"
        raise ConfigError(f"{missing}; pip install tensorboard")
    if not options.resume and config.corpus.path != (STDIN,):
        from w2v.text.sources import require_source

        for path in config.corpus.path:
            require_source(path, config.corpus.data_dir)
    return config, files, assignments


def sort_settings(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the config files and the assignments among the arguments.

    What is neither is the text: files, folders and addresses, a list in corpus.path.
    """
    files, assignments, texts = [], [], []
    for entry in entries:
        path = Path(os.path.expanduser(entry))  # as it is, if there is no such user
        if os.path.isfile(path / "config.yaml"):  # Path.is_file refuses a long assignment
            raise ConfigError(f"{entry} is a run folder; continue it with --resume {entry}")
        is_config = path.suffix in YAML_SUFFIXES
        is_url = re.match(r"\w+://", entry) is not None
        if entry == STDIN or is_url or (os.path.exists(path) and not is_config):
            texts.append(entry)
        elif "=" in entry:
            assignments.append(entry)
        elif len(path.name) > LONGEST_NAME:
            raise ConfigError(f"'{entry[:57]}...' is not a file; name one that holds the text")
        elif is_config or shipped_config(entry):
            files.append(entry)
        elif f".{nearest_key(entry)}".endswith(f".{entry}"):
            remedy = f"write {nearest_key(entry)}=VALUE, without spaces"
            raise ConfigError(f"{entry!r} is neither a file nor a setting; {remedy}")
        elif near := nearest_config(entry, cutoff=0.75):
            hint = f"did you mean {Path(near).stem}?"
            raise ConfigError(f"{entry!r} is neither a text nor a config; {hint}")
        else:
            texts.append(entry)  # the name of a corpus, or of a file that does not exist
    if texts:
        is_simple = len(texts) == 1 and re.fullmatch(r"[\w./~-]+", texts[0])
        plain = f"corpus.path={texts[0]}"
        assignments.insert(0, plain if is_simple else as_assignment("corpus.path", texts))
    return files, assignments


def spool(data_dir: str) -> Path:
    """Write standard input to a file in `data_dir`, named by its content.

    The file is kept, as a resumed run needs the text again.
    """
    if launcher.started():
        raise ConfigError("several ranks cannot share standard input; write the text to a file")
    if sys.stdin.isatty():
        console.show("reading the text from the keyboard; Ctrl-D ends", file=sys.stderr)
    folder = Path(os.path.expanduser(data_dir))
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=8)
    # A file without a name, which the system frees even after a kill.
    with naming_file(folder), tempfile.TemporaryFile(dir=folder) as text:
        while block := sys.stdin.buffer.read(1 << 20):
            digest.update(block)
            text.write(block)
        if not text.tell():
            raise ConfigError("standard input is empty; send a text, or name a file")
        spooled = folder / f"stdin-{digest.hexdigest()}.txt"
        if not spooled.exists():  # the same text keeps its file, as cached ids belong to the file
            text.seek(0)
            with atomic_path(spooled) as temporary, open(temporary, "wb") as file:
                shutil.copyfileobj(text, file)
        return spooled
