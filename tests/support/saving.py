"""Runs that save as often as they can, for tests that kill them."""

import json
import random

from w2v.config import load_config
from w2v.rows.checkpoint import Checkpoint
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table

NEAR = 200  # words of a line are so near to each other


def saving_run(folder, lines, *more, words=NEAR):
    """Write a text; return the arguments of a deterministic run over it.

    Where there are more `words`, its subject moves on.
    """
    rng, names = random.Random(0), [f"w{i}" for i in range(words)]
    firsts = [line * (words - NEAR) // lines for line in range(lines)]
    text = "\n".join(" ".join(rng.choices(names[n : n + NEAR], k=10)) for n in firsts)
    (folder / "text.txt").write_text(text)
    return [
        f"corpus.path={folder / 'text.txt'}",
        f"corpus.data_dir={folder}",
        "model.vector_size=8",
        "vocab.min_count=1",
        "run.report=false",
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
    """Return the only run folder in a folder."""
    (found,) = folder.glob("20*")
    return found


def check_checkpoints(run, names="*"):
    """Return the checkpoints of a run, if any, after loading each of them."""
    paths = [path for path in (run / "checkpoints").glob(names) if path.suffix != ".partial"]
    if not paths:
        return []
    config = load_config([run / "config.yaml"])
    optimizer, size = RowOptimizer(config.optimizer), config.model.vector_size
    states, scalars = optimizer.states(size), optimizer.scalars
    for path in paths:
        manifest = json.loads((path / "manifest.json").read_text())
        tables = [
            Table(name, table["rows"], size, states, scalars, "cpu")
            for name, table in manifest["tables"].items()
        ]
        Checkpoint(path).load(tables)
    return paths
