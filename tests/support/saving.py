"""Runs that save as often as they can, for tests that kill them, and what they leave."""

import random

from w2v.config import load_config
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table
from w2v.training.checkpoint import Checkpoint


def saving_run(folder, lines, *more):
    """The arguments of a deterministic run over a text of so many lines, which is written into the folder."""
    rng, words = random.Random(0), [f"w{i}" for i in range(200)]
    (folder / "text.txt").write_text(
        "\n".join(" ".join(rng.choices(words, k=10)) for _ in range(lines))
    )
    return [
        f"corpus.path={folder / 'text.txt'}",
        f"corpus.data_dir={folder}",
        "model.vector_size=8",
        "vocab.min_count=1",
        "optimizer.lr=0.02",
        "train.device=cpu",
        "train.deterministic=true",
        "run.log_seconds=0.05",
        "run.checkpoint_minutes=0.002",
        "model.sample=0",
        "model.window=2",
        *more,
    ]


def run_folder(folder):
    (found,) = folder.glob("20*")
    return found


def check_checkpoints(run, names="*"):
    """All that bear the name of a checkpoint are whole."""
    found = [
        path for path in (run / "checkpoints").glob(names) if not path.name.endswith(".partial")
    ]
    for path in found:
        config = load_config([run / "config.yaml"])
        optimizer, size = RowOptimizer(config.optimizer), config.model.vector_size
        Checkpoint(path).load(
            [
                Table(name, 200, size, optimizer.states(size), optimizer.scalars, "cpu")
                for name in ("input", "output")
            ]
        )
    return found
