"""Train word vectors: python train.py [config.yaml ...] [section.key=value ...]; later wins."""

from __future__ import annotations

import argparse
import logging
import sys

from w2v import settings
from w2v.config import Config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    what = "config files, then single keys that override them"
    parser.add_argument("settings", nargs="*", metavar="config.yaml | section.key=value", help=what)
    parser.add_argument("--help-config", action="store_true", help="print every key with its default and meaning, as YAML, and stop")
    args = parser.parse_args(argv)
    if args.help_config:
        print(settings.describe(), end="")
        return 0
    try:
        files = [entry for entry in args.settings if "=" not in entry]
        run(settings.load(files, [entry for entry in args.settings if "=" in entry]))
    except (ValueError, MemoryError) as error:  # what a user can mend; anything else is a bug, and its traceback is wanted
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(config: Config) -> None:
    from w2v import metrics, plan, trainer  # heavy, so only once the config is known to be right

    metrics.log_to_console()
    planned = plan.make_plan(config)
    log = logging.getLogger("w2v")
    log.info(str(planned))
    sampler, pipeline = plan.build(planned)
    folder = trainer.new_run_folder(config)
    metrics.log_to_file(folder / "train.log")
    settings.save(config, folder / "config.yaml")
    (folder / "env.txt").write_text(plan.environment(planned), encoding="utf-8")
    job = trainer.Trainer(config, planned.vocab, planned.corpus.raw_words, sampler, pipeline, folder, plan.held_out(planned))
    job.train()
    job.export()


if __name__ == "__main__":
    sys.exit(main())
