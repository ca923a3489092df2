"""A small text for whole runs, with words of the evaluation data sets."""

from pathlib import Path

import numpy as np

TOPICS = ["king queen man woman boy girl".split(), "tiger cat dog animal bird mouse".split()]


def settings_of_small_text(folder: Path) -> list[str]:
    """Write the text, and return the settings that train on it in a moment."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(TOPICS[rng.integers(2)], 10)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    return [
        f"corpus.path={folder}/text.txt",
        f"corpus.data_dir={folder}",
        "model.vector_size=8",
        "model.sample=0",
        "train.epochs=2",
        "train.device=cpu",
        "train.held_out_words=100",
    ]


def record_calls(monkeypatch, module, name: str) -> list:
    """Return a list that gets the first argument of each call of a function."""
    first_arguments = []
    function = getattr(module, name)

    def record(first, *rest, **named):
        first_arguments.append(first)
        return function(first, *rest, **named)

    monkeypatch.setattr(module, name, record)
    return first_arguments
