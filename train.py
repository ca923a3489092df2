"""Train word vectors, as config files and settings say; later ones win."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from functools import partial

from w2v.config import Config, describe_config, load_config
from w2v.distributed import launcher
from w2v.system import console
from w2v.system.files import error_message, naming_file
from w2v.system.process import Signals, describe_environment, exit_fast, forked
from w2v.training import loggers

EXIT_STATUS = (
    "exit status: 0 success, 2 an error, 3 too little memory or disk; "
    "130, 143, 129 Ctrl-C, SIGTERM or a closed terminal"
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; split the settings by kind."""
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXIT_STATUS)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="config.yaml | section.key=value",
        help="config files, and keys that override them",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="continue a run folder, or the `latest` in run.dir, from its last checkpoint",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the memory, disk and time that the run needs; exit with 0 if it fits, else 3",
    )
    parser.add_argument(
        "--help-config",
        action="store_true",
        help="print every key with its default and meaning, as YAML",
    )
    args = parser.parse_intermixed_args(argv)
    args.files = [entry for entry in args.settings if "=" not in entry]
    args.assignments = [entry for entry in args.settings if "=" in entry]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says, and return the exit status."""
    args = arguments(argv)
    if args.help_config:
        print(describe_config(), end="")
        return 0
    with Signals() as signals:
        try:
            run(args, signals)
        except (ValueError, MemoryError, OSError) as error:
            # User errors are one line. Anything else is a bug and keeps its traceback.
            launcher.report_error(error, error_message(error))
            return 3 if isinstance(error, MemoryError) else 2
    return 0


def encode(config: Config) -> None:
    """Encode the corpus, unless it is cached; leave errors to `run`."""
    from w2v.text import open_corpus

    console.log_to_console()
    with contextlib.suppress(ValueError, MemoryError, OSError):
        open_corpus(config)


def run(args: argparse.Namespace, signals: Signals) -> None:
    """Load, plan, check, train and export."""
    # Load: settings and what trains, which takes seconds to import.
    with launcher.on_all_ranks():
        config = load_config(args.files, args.assignments)
        loggers.check(config.run)
    # A new text is encoded while torch is imported: 0.5 s less for 45 MB, and 3 s in the first run
    # of an installation, as numba compiles meanwhile. A thread would wait for the importing one.
    is_new = not (args.resume or launcher.started() or "torch" in sys.modules)
    encoding = forked(partial(encode, config)) if is_new else contextlib.nullcontext()
    with encoding, signals.deferred():
        from w2v.text import open_together
        from w2v.training import plan, run_folder, trainer
    ranks = plan.join_ranks(config)
    console.log_to_console(quiet=ranks.rank > 0)
    folder = run_folder.find_to_resume(args.resume, config.run.dir, ranks)
    if folder:
        lock = run_folder.lock(folder, ranks)
        with ranks.reraise():
            config = run_folder.resume_config(folder, args.files, args.assignments)
    ranks.require_equal(plan.common_facts(config))
    opened = open_together(config, ranks)

    # Plan, and check that it fits.
    with ranks.reraise():
        planned = plan.make_plan(config, opened, folder, ranks)
        console.log.info(str(planned))
        planned.budget.check()
        with planned.budget.explained():
            loop = plan.build(planned)
    if args.dry_run:
        if ranks.size == 1:
            print(trainer.estimate_time(loop, planned.corpus.raw_words))
        ranks.leave()
        return

    # Train and export, in a folder of its own.
    if folder is None:
        folder = run_folder.create(config, ranks)
        lock = run_folder.lock(folder, ranks)
    log_file = console.log_to_file(folder / "train.log", quiet=ranks.rank > 0)
    with lock as leads, planned.budget.explained(), naming_file(folder), log_file:
        job = trainer.Trainer(
            loop,
            planned.vocab,
            planned.corpus.raw_words,
            folder,
            held_out=plan.make_heldout(planned),
            signals=signals,
            copy_bytes=planned.budget.copies,
            ranks=ranks,
            link_rate=plan.measure_link(planned),
        )
        with job:
            # Only now: a checkpoint may refuse the settings, which then must not become the run's.
            if leads:
                run_folder.begin(folder, config, describe_environment(planned.machine))
            job.train()
            job.export()
    ranks.leave()


if __name__ == "__main__":
    exit_fast(launcher.run(main))
