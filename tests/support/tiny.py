"""A tiny text, and arguments of train.py for a short run over it."""

import random

LETTERS = "a b c d e f g".split()
SETTINGS = {
    "model.vector_size": 4,
    "model.sample": 0,
    "vocab.min_count": 1,
    "train.epochs": 1,
    "train.batch_size": 16,
    "train.device": "cpu",
    "run.log_seconds": 100,
    "run.report": False,
}
TEXT = "\n".join(" ".join(random.Random(line).choices(LETTERS, k=8)) for line in range(40))


def tiny_paths(folder, text=TEXT):
    """Write the text into the folder; return the keys that keep a run there."""
    path = folder / "text.txt"
    path.write_text(text)
    data, runs = folder / "data", folder / "runs"
    return [f"corpus.path={path}", f"corpus.data_dir={data}", f"run.dir={runs}"]


def tiny_settings(**changes):
    """Return the keys of a small model, changed by `section__key=value`."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**SETTINGS, **changed}.items()]


def tiny_arguments(folder, text=TEXT, **changes):
    """Return the arguments of a run over the text that stays in the folder."""
    return [*tiny_paths(folder, text), *tiny_settings(**changes)]
