"""Runs side by side: which are seeds of one setting, the figures of the table, its forms and the curves."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest

from w2v.api import runs as comparison
from w2v.config import config_keys, load_config, save_config

ROOT = Path(__file__).parents[2]


def write_run(folder, scores, *assignments, logged=()):
    folder.mkdir(parents=True)
    save_config(load_config([], assignments), folder / "config.yaml")
    (folder / "scores.json").write_text(json.dumps(scores))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
    return folder


def scores(accuracy, held_out=2.0, seconds=10.0, wordsim=0.5):
    parts = {part: {"accuracy": accuracy} for part in ("total", "semantic", "syntactic")}
    similarity = {"wordsim353": {"spearman": wordsim}, "simlex999": {"spearman": None}}
    return {
        "analogies": parts,
        "similarity": similarity,
        "held_out_loss": held_out,
        "loss": 2.5,
        "words": 5_000_000,
        "seconds": seconds,
        "bytes_host": 2**22,
        "bytes_gpu": 0,
    }


@pytest.fixture
def runs(tmp_path):
    """Adam with three seeds, RMSprop with one, and one that diverged."""
    epoch = {"epoch": 1, "words": 1_000_000, "seconds": 2.0, "held_out_loss": 3.0, "analogies": 0.1}
    loss = {"step": 1, "words": 500_000, "seconds": 1.0, "loss": 4.0}
    for seed, accuracy in enumerate((0.1, 0.2, 0.4), start=1):
        adam = [
            "optimizer.name=Adam",
            "optimizer.lr=0.05",
            f"train.seed={seed}",
            f"run.name=x{seed}",
            f"corpus.data_dir=d{seed}",
        ]
        write_run(
            tmp_path / f"adam{seed}",
            scores(accuracy, seconds=10.0 * seed),
            *adam,
            logged=[loss, epoch],
        )
    rmsprop = ["optimizer.name=RMSprop", "optimizer.lr=0.04", "optimizer.args.alpha=0.9"]
    write_run(tmp_path / "rmsprop", scores(0.3), *rmsprop, logged=[loss, epoch])
    write_run(
        tmp_path / "sgd", {"diverged": "the loss is nan"}, "optimizer.name=SGD", "optimizer.lr=3"
    )
    (tmp_path / "unfinished").mkdir()
    return tmp_path


def test_runs_that_differ_in_nothing_but_the_seed_are_one_row(runs):
    rows = comparison.rows(map(comparison.read, comparison.find([runs])))
    assert [(row.settings["optimizer.name"], len(row.runs)) for row in rows] == [
        ("RMSprop", 1),
        ("Adam", 3),
        ("SGD", 1),
    ]
    assert rows[1].values("analogies %") == pytest.approx([10, 20, 40])
    assert rows[1].values("M words/s") == pytest.approx([0.5, 0.25, 5 / 30])
    assert rows[1].values("SimLex-999") == rows[1].values("GPU MiB") == []


def test_the_table_holds_means_spreads_and_what_differs(runs):
    header, rmsprop, adam, sgd = comparison.table(
        comparison.rows(map(comparison.read, comparison.find([runs])))
    )
    cell = {name: place for place, name in enumerate(header)}
    assert header[:6] == ["optimizer", "lr", "batch", "epochs", "other settings", "seeds"]
    assert "SimLex-999" not in cell and "GPU MiB" not in cell  # nobody has any
    assert adam[cell["analogies %"]] == f"{mean([10, 20, 40]):.1f} +- {stdev([10, 20, 40]):.1f}"
    assert (
        rmsprop[cell["analogies %"]] == "30.0"
        and rmsprop[cell["other settings"]] == 'args={"alpha": 0.9}'
    )
    assert (
        adam[cell["seeds"]] == "3"
        and sgd[cell["seeds"]] == "0 of 1"
        and sgd[cell["held-out loss"]] == "diverged"
    )
    assert adam[cell["host MiB"]] == "4 +- 0"


def test_a_run_given_twice_counts_once(runs):
    assert comparison.find([runs, runs / "sgd", runs]) == comparison.find([runs])


def test_folders_without_runs_are_left_out_and_said(runs, caplog):
    assert comparison.find([runs / "adam1", runs / "unfinished"]) == [runs / "adam1"]
    assert caplog.messages == [f"left out, as there is no scores.json in it: {runs / 'unfinished'}"]
    assert len(comparison.find([runs], "metrics.jsonl")) == 5
    with pytest.raises(comparison.ComparisonError, match="adam9 does not exist; name run folders"):
        comparison.find([runs / "adam1", runs / "adam9"])


def test_latest_is_the_run_that_wrote_such_a_file_last(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        comparison.ComparisonError, match="no folder in runs holds scores.json; train first"
    ):
        comparison.find(["latest"])
    (tmp_path / "runs").symlink_to(runs)
    for age, name in enumerate(("sgd", "rmsprop", "adam1", "adam2", "adam3")):
        os.utime(runs / name / "scores.json", (1e9 - age, 1e9 - age))
        os.utime(runs / name / "metrics.jsonl", (1e9 + age, 1e9 + age))
    assert comparison.find(["latest"]) == [Path("runs/sgd")]
    assert comparison.find(["latest"], "metrics.jsonl") == [Path("runs/adam3")]


def test_curves_end_with_the_final_scores(runs):
    run = comparison.read(runs / "adam1")
    assert run.curve("loss") == [(500_000, 1.0, 4.0)]
    assert run.curve("held_out_loss") == [(1_000_000, 2.0, 3.0), (5_000_000, 10.0, 2.0)]
    assert run.curve("analogies") == [(1_000_000, 2.0, 0.1), (5_000_000, 10.0, 0.1)]
    assert comparison.read(runs / "sgd").curve("analogies") == []


def test_it_writes_all_forms(runs, tmp_path):
    pytest.importorskip("matplotlib")
    shown = comparison.report([runs], tmp_path / "out")
    assert (tmp_path / "out" / "table.txt").read_text() == shown + "\n"
    header, dashes, *body = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert {line.count("|") for line in (header, dashes, *body)} == {header.count("|")} and len(
        body
    ) == 3
    with (tmp_path / "out" / "table.csv").open() as file:
        lines = {line["optimizer.name"]: line for line in csv.DictReader(file)}
    assert float(lines["Adam"]["analogies % stdev"]) == pytest.approx(stdev([10, 20, 40]))
    assert lines["RMSprop"]["analogies % stdev"] == lines["SGD"]["held-out loss"] == ""
    assert lines["Adam"]["seeds"] == "3" and float(lines["Adam"]["optimizer.lr"]) == 0.05
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_evaluate_compares_what_it_is_given(runs):
    def evaluate(*paths):
        command = [sys.executable, str(ROOT / "evaluate.py"), "compare", *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    done = evaluate(runs / "adam1", runs / "adam2")
    assert (
        done.returncode == 0
        and "Adam" in done.stdout
        and "15.0 +- 7.1" in done.stdout
        and "RMSprop" not in done.stdout
    )
    wrong = evaluate(runs / "unfinished")
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("error: ")
        and wrong.stderr.count("\n") == 1
        and "unfinished" in wrong.stderr
    )


@pytest.mark.parametrize("file", ["config.yaml", "scores.json", "metrics.jsonl"])
def test_a_damaged_run_is_named(runs, file):
    (runs / "adam1" / file).write_text("{")
    with pytest.raises(comparison.ComparisonError, match="adam1"):
        comparison.read(runs / "adam1")


def test_the_keys_it_names_exist():
    known = list(config_keys())
    assert set(comparison.SHOWN) <= set(known) and all(
        any(name.startswith(key) for name in known) for key in comparison.NO_SETTING
    )
