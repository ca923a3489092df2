"""Train word vectors: python train.py [config.yaml ...] [section.key=value ...]; later wins."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from w2v.config import describe_config, load_config
from w2v.distributed import launcher as torchrun
from w2v.system import console
from w2v.system import process as host
from w2v.system import versions as environment
from w2v.system.files import error_message, naming_file
from w2v.system.signals import Signals
from w2v.text import ahead
from w2v.training import loggers


def main(argv: Sequence[str] | None = None) -> int:
    statuses = "exit status: 0 done, 2 an error, 3 too little memory or disk; 130, 143, 129 Ctrl-C, SIGTERM or a closed terminal"
    parser = argparse.ArgumentParser(description=__doc__, epilog=statuses)
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="config.yaml | section.key=value",
        help="config files, then keys that override them",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on in a run folder, or in the `latest` of run.dir, from its last checkpoint",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="say what the run would take, bytes and time; exit 0 if it fits, 3 if not",
    )
    parser.add_argument(
        "--help-config",
        action="store_true",
        help="print every key with its default and meaning, as YAML, and stop",
    )
    args = parser.parse_intermixed_args(argv)
    if args.help_config:
        print(describe_config(), end="")
        return 0
    files, assignments = (
        [entry for entry in args.settings if ("=" in entry) == sets] for sets in (False, True)
    )
    with Signals() as signals:
        try:
            run(files, assignments, args, signals)
        except (
            ValueError,
            MemoryError,
            OSError,
        ) as error:  # what a user can mend; anything else is a bug, and its traceback is wanted
            torchrun.say(error, error_message(error))
            return 3 if isinstance(error, MemoryError) else 2
        except torchrun.RankLost as error:
            torchrun.leave(error)
    return 0


def run(
    files: Sequence[str], assignments: Sequence[str], args: argparse.Namespace, signals: Signals
) -> None:
    with torchrun.on_all():
        config = load_config(files, assignments)
        loggers.check(config.run)
    with ahead.reading(config, args.resume), signals.put_off():
        from w2v.text import opening
        from w2v.training import plan, trainer, trial
        from w2v.training import run_folder as runfolder

    ranks = plan.join(config)
    console.log_to_console(quiet=ranks.rank > 0)
    if folder := runfolder.begun(args.resume, config.run.dir, ranks):
        lock = runfolder.lock(folder, ranks)
        with ranks.reraise():
            config = runfolder.resumed(folder, files, assignments)
    ranks.require_equal(plan.must_be_alike(config))
    opened = opening.open_together(config, ranks)
    with ranks.reraise():
        planned = plan.make_plan(config, opened, folder, ranks)
        console.log.info(str(planned))
        planned.budget.check()
        with planned.budget.explained():
            sampler, pipeline = plan.build(planned)
    if args.dry_run and ranks.size == 1:
        print(trial.expected(config, planned.corpus.raw_words, sampler, pipeline))
    if args.dry_run:
        return ranks.leave()
    if folder is None:
        folder = runfolder.create(config, ranks)
        lock = runfolder.lock(folder, ranks)
    with (
        lock as leads,
        planned.budget.explained(),
        naming_file(folder),
        console.log_to_file(folder / "train.log", quiet=ranks.rank > 0),
    ):
        held_out, raw_words, room = (
            plan.held_out(planned),
            planned.corpus.raw_words,
            planned.budget.copies,
        )
        with trainer.Trainer(
            config,
            planned.vocab,
            raw_words,
            sampler,
            pipeline,
            folder,
            held_out,
            signals,
            room,
            ranks,
        ) as job:
            if leads:  # only now, as a checkpoint may refuse the settings, which then must not become the run's
                runfolder.begin(folder, config, environment.describe(planned.machine))
            job.train()
            job.export()
    ranks.leave()


if __name__ == "__main__":
    host.end(torchrun.recorded(main)())
