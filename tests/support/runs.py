"""Run folders made by hand."""

import json

from w2v.config import load_config, save_config


def write_run(folder, scores=None, *assignments, metrics=()):
    """Write config, scores (None for an unfinished run) and metrics of a run."""
    folder.mkdir(parents=True)
    save_config(load_config([], assignments), folder / "config.yaml")
    lines = [json.dumps(line) + "\n" for line in metrics]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if scores is not None:
        (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def scores_of(accuracy, held_out=2.0, seconds=10.0):
    """Return the content of scores.json, given the analogies' accuracy."""
    section = {"accuracy": accuracy, "counted": 8, "skipped": 2}
    pairs = {"pairs": 5, "oov": 0.5}
    return {
        "analogies": dict.fromkeys(("total", "semantic", "syntactic"), section),
        "similarity": {
            "wordsim353": {"spearman": 0.5, **pairs},
            "simlex999": {"spearman": None, **pairs},
        },
        "held_out_loss": held_out,
        "loss": 2.5,
        "words": 5_000_000,
        "seconds": seconds,
        "bytes_host": 2**22,
        "bytes_gpu": 0,
    }
