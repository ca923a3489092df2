"""Run folders are found and read; runs of one setting are one row."""

import csv
import json
import os
import re
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from statistics import mean, stdev
from unittest import mock

import numpy as np
import pytest

import evaluate
from tests.support.each_case import each_case
from tests.support.runs import scores_of, write_run
from w2v.api import compare
from w2v.config import TYPES, load_config, save_config
from w2v.vectors import report
from w2v.vectors import runs as comparison
from w2v.vectors.runs import RunError, find, find_all, read


@pytest.fixture
def runs(tmp_path):
    """Adam with three seeds, RMSprop, SGD that diverged, and an empty folder."""
    loss = {"step": 1, "words": 500_000, "seconds": 1.0, "loss": 4.0}
    epoch = {"epoch": 1, "words": 1_000_000, "seconds": 2.0, "held_out_loss": 3.0, "analogies": 0.1}
    for seed, accuracy in enumerate((0.1, 0.2, 0.4), start=1):
        settings = ["optimizer.name=Adam", "optimizer.lr=0.05", f"train.seed={seed}"]
        settings += [f"run.name=x{seed}", f"corpus.data_dir=d{seed}"]
        scores = scores_of(accuracy, seconds=10.0 * seed)
        write_run(tmp_path / f"adam{seed}", scores, *settings, metrics=[loss, epoch])
    rmsprop = ["optimizer.name=RMSprop", "optimizer.lr=0.04", "optimizer.args.alpha=0.9"]
    write_run(tmp_path / "rmsprop", scores_of(0.3), *rmsprop, metrics=[loss, epoch])
    diverged = {"diverged": "the loss is nan"}
    write_run(
        tmp_path / "sgd",
        diverged,
        "optimizer.name=SGD",
        "optimizer.lr=3",
        "optimizer.occurrence_cap=0",
    )
    (tmp_path / "empty").mkdir()
    return tmp_path


def rows_of(folder):
    return comparison.rows([read(found) for found in find_all([folder])])


def test_find_names_what_is_missing(runs, tmp_path):
    assert find(runs / "adam1", "scores.json") == runs / "adam1"
    # A process that was killed while it wrote the file leaves a hidden folder.
    (runs / ".scores.json.x.partial").mkdir()
    (runs / ".scores.json.x.partial" / "scores.json").touch()
    with pytest.raises(RunError, match="is a folder of runs; .* such as .*adam1"):
        find(runs, "scores.json")
    # A run folder may hold other runs.
    (runs / "adam1" / "again").mkdir()
    (runs / "adam1" / "again" / "scores.json").touch()
    assert find(runs / "adam1", "scores.json") == runs / "adam1"
    assert find_all([runs / "adam1"]) == [runs / "adam1"]
    with pytest.raises(RunError, match="empty holds no scores.json; name"):
        find(runs / "empty", "scores.json")
    with pytest.raises(RunError, match="adam9 does not exist; did you mean .*adam"):
        find(runs / "adam9", "scores.json")
    with pytest.raises(RunError, match="no folder in .*empty holds scores.json; name a run"):
        find("latest", "scores.json", runs / "empty")


def test_latest_is_the_run_whose_file_is_newest(runs, caplog):
    for age, name in enumerate(("sgd", "rmsprop", "adam1", "adam2", "adam3")):
        os.utime(runs / name / "scores.json", (1e9 - age, 1e9 - age))
        os.utime(runs / name / "metrics.jsonl", (1e9 + age, 1e9 + age))
    assert find("latest", "scores.json", runs) == runs / "sgd"
    assert find("latest", "metrics.jsonl", runs) == runs / "adam3"
    assert not caplog.messages
    (runs / "empty" / "config.yaml").touch()  # of a run that trains
    assert find("latest", "scores.json", runs) == runs / "sgd"
    said = f"latest is {runs / 'sgd'}, as {runs / 'empty'} has no scores.json yet"
    assert caplog.messages == [said]


def test_find_all_takes_runs_folders_of_runs_and_latest(runs, monkeypatch, caplog):
    names = ["adam1", "adam2", "adam3", "rmsprop", "sgd"]
    assert find_all([runs, runs / "sgd", runs]) == [runs / name for name in names]
    assert find_all([runs / "adam1", runs / "empty", runs / "plotly.min.js"]) == [runs / "adam1"]
    assert caplog.messages == [f"left out, as there is no scores.json in it: {runs / 'empty'}"]
    with pytest.raises(RunError, match="no scores.json in .*empty"):
        find_all([runs / "empty"])
    (runs / "runs").symlink_to(runs)
    monkeypatch.chdir(runs)
    assert find_all(["latest"])[0].parent == Path("runs")


def test_a_run_that_trains_is_read_up_to_its_last_whole_line(tmp_path):
    line = {"words": 1, "seconds": 0.1, "loss": 3.0}
    folder = write_run(tmp_path / "one", metrics=[line])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"words": 4')
    assert [found | line for found in read(folder).metrics] == read(folder).metrics
    assert len(read(folder).metrics) == 1 and read(folder).scores["words"] is None


@each_case("content", ["{\n", "3\n", "[" * 9999, "a: &a [1]\nb: *a\n"])
@pytest.mark.parametrize("file", ["config.yaml", "scores.json"])
def test_a_damaged_run_is_named(runs, file, content):
    (runs / "adam1" / file).write_text(content)
    with pytest.raises(RunError, match="adam1 is not a whole run folder .*; leave it out"):
        read(runs / "adam1")


def test_damaged_lines_of_metrics_are_left_out(runs, caplog):
    whole = read(runs / "adam1").metrics
    file = runs / "adam1" / "metrics.jsonl"
    other = ["3", '{"words": "x", "loss": NaN}', '{"words":', "[" * 9999, "\udc9f{}"]
    content = file.read_text() + "\n".join(other) + "\n"
    file.write_bytes(content.encode(errors="surrogateescape"))
    assert read(runs / "adam1").metrics == whole
    assert "5 of 7 lines are damaged" in caplog.text


def test_curves_end_with_the_final_scores(runs):
    run = read(runs / "adam1")
    assert run.curve("loss") == [(500_000, 1.0, 4.0), (5_000_000, 10.0, 2.5)]
    assert run.curve("held_out_loss") == [(1_000_000, 2.0, 3.0), (5_000_000, 10.0, 2.0)]
    assert run.curve("analogies") == [(1_000_000, 2.0, 0.1), (5_000_000, 10.0, 0.1)]
    assert read(runs / "sgd").curve("analogies") == []


@each_case(
    ("metric", "heading", "scale"),
    [("loss", "loss", 1), ("held_out_loss", "held-out loss", 1), ("analogies", "analogies %", 100)],
)
def test_the_mean_curve_of_seeds_ends_where_the_table_ends(tmp_path, metric, heading, scale):
    """Seeds take 10, 20 and 40 seconds; one diverged, and one was interrupted."""
    for seed, seconds in enumerate((10.0, 20.0, 40.0), start=1):
        lines = [
            {"epoch": n, "words": n * 1_000_000, "seconds": n * seconds / 5, metric: 1 / n}
            for n in range(1, 6)
        ]
        scores = scores_of(0.1 * seed, held_out=seconds, seconds=seconds) | {"loss": seconds}
        write_run(tmp_path / str(seed), scores, f"train.seed={seed}", metrics=lines)
    early = [{"epoch": 1, "words": 1_000_000, "seconds": 1.0, metric: 9.0}]
    write_run(tmp_path / "4", {"diverged": "the loss is nan"}, "train.seed=4", metrics=early)
    write_run(tmp_path / "5", None, "train.seed=5", metrics=early)
    curve = comparison.mean_curve([read(tmp_path / str(seed)) for seed in range(1, 6)], metric)
    figures = [comparison.figures(read(tmp_path / str(seed))) for seed in (1, 2, 3)]
    ends = [found[heading] / scale for found in figures]
    assert curve["words"].tolist() == [1e6, 2e6, 3e6, 4e6, 5e6]
    assert curve["seconds"][-1] == pytest.approx(mean([10, 20, 40]))
    assert curve["mean"][-1] == pytest.approx(mean(ends))
    assert (curve["low"][-1], curve["high"][-1]) == pytest.approx((min(ends), max(ends)))
    assert curve["mean"][0] == 1.0  # without the seeds that did not get as far
    assert comparison.mean_curve([read(tmp_path / "1")], "words_per_s") == {}


def test_seeds_are_averaged_at_equal_words(tmp_path):
    for seed, words in enumerate(([10, 20], [15, 20]), start=1):
        lines = [{"words": at, "seconds": at * seed, "loss": at * seed} for at in words]
        write_run(tmp_path / str(seed), metrics=lines)
    curve = comparison.mean_curve([read(tmp_path / "1"), read(tmp_path / "2")], "loss")
    assert curve["words"].tolist() == [15, 20] and curve["mean"].tolist() == [22.5, 30]
    assert curve["low"].tolist() == [15, 20] and curve["seconds"].tolist() == [22.5, 30]


def test_runs_that_differ_in_the_seed_are_one_row(runs):
    rows = rows_of(runs)
    found = [(row.settings["optimizer.name"], len(row.runs)) for row in rows]
    assert found == [("RMSprop", 1), ("Adam", 3), ("SGD", 1)]
    figures = [comparison.figures(run) for run in rows[1].runs]
    assert [run["analogies %"] for run in figures] == pytest.approx([10, 20, 40])
    assert [run["M words/s"] for run in figures] == pytest.approx([0.5, 0.25, 5 / 30])
    assert all(run["SimLex-999"] is run["GPU MiB"] is None for run in figures)


def test_rows_are_ranked_by_all_sets_over_all_corpora(tmp_path):
    for name, corpus, own in (
        ("Adam", "a", 0.9),
        ("Adam", "b", 0.1),
        ("SGD", "a", 0.6),
        ("SGD", "b", 0.5),
    ):
        run = tmp_path / f"{name}{corpus}"
        run.mkdir()
        settings = [f"optimizer.name={name}", f"corpus.path={corpus}", "optimizer.lr=0.1"]
        save_config(load_config([], settings), run / "config.yaml")
        (run / "metrics.jsonl").touch()
        part = {"accuracy": 0.5, "counted": 10}
        scores = {
            "analogies": {"total": part, "semantic": part, "syntactic": part},
            "similarity": {"own": {"spearman": own}},
            "questions": {"msr": {"total": part}},
        }
        (run / "scores.json").write_text(json.dumps(scores))
    rows = rows_of(tmp_path)
    found = [(row.settings["optimizer.name"], row.settings["corpus.path"]) for row in rows]
    assert found == [("SGD", "a"), ("SGD", "b"), ("Adam", "a"), ("Adam", "b")]
    columns = comparison.table(rows)
    assert columns["own"][0] == "0.600" and columns["msr %"][0] == "50.0"


def test_table_holds_means_spreads_and_differing_settings(runs):
    columns = comparison.table(rows_of(runs))
    header = list(columns)
    lines = zip(*columns.values(), strict=True)
    rmsprop, adam, sgd = (dict(zip(header, line, strict=True)) for line in lines)
    assert header[:4] == ["optimizer", "seeds", "held-out loss", "analogies %"]
    assert header[-3:] == ["lr", "batch_size", "epochs"]
    assert "SimLex-999" not in header and "GPU MiB" not in header  # no run has them
    assert adam["analogies %"] == f"{mean([10, 20, 40]):.1f} +- {stdev([10, 20, 40]):.1f}"
    assert (adam["seeds"], adam["host MiB"]) == ("3", "4")
    assert (rmsprop["optimizer"], rmsprop["analogies %"]) == ("RMSprop", "30.0")
    assert (sgd["seeds"], sgd["held-out loss"]) == ("1", "diverged")


def test_a_run_without_counted_questions_has_no_accuracy(tmp_path):
    scores = scores_of(0.0)
    scores["analogies"]["total"]["counted"] = 0
    write_run(tmp_path / "baskets", scores)
    columns = comparison.table(rows_of(tmp_path))
    assert read(tmp_path / "baskets").curve("analogies") == []
    assert "analogies %" not in columns and "questions" not in columns


def test_a_terminal_gets_its_columns(runs):
    columns = comparison.table(rows_of(runs))
    for name in ("held-out loss", "WordSim-353"):
        columns[name] = ["2.7901 +- 0.0046 [2.7, 2.8]"] * len(columns["lr"])
    wide, narrow = (comparison.in_columns(columns, width).splitlines() for width in (120, 60))
    assert 100 < max(map(len, wide)) <= 120 and max(map(len, narrow)) <= 60
    assert re.split("  +", narrow[0])[:4] == ["optimizer", "seeds", "held-out loss", "analogies %"]
    assert wide[0].startswith(narrow[0]) and "2.7901±0.0046" in wide[1] and "[" not in wide[1]
    assert comparison.in_columns(columns, 1).split()[0] == "optimizer"


def test_long_names_are_wrapped_beside_their_scores():
    names = [
        f"Adam ns_exponent -0.5 epochs 20 batch_size 32 betas [{beta}, 0.99]" for beta in (0, 0.5)
    ]
    columns = {"optimizer": names, "seeds": ["3", "1"], "MRR %": ["24.0 +- 1.3 [23, 25]", "9.1"]}
    heading, *lines = comparison.in_columns(columns, 80).splitlines()
    assert heading.split() == ["optimizer", "seeds", "MRR", "%"]
    assert all(line.startswith("Adam ns_exponent -0.5 epochs 20  ") for line in lines[::2])
    assert lines[1::2] == [f"  batch_size 32 betas [{beta}, 0.99]" for beta in (0, 0.5)]
    assert [line.split()[-2:] for line in lines[::2]] == [["3", "24.0±1.3"], ["1", "9.1"]]


def test_rows_that_differ_in_arguments_are_named_by_them(tmp_path):
    for beta in (0.0, 0.5):
        betas = f"optimizer.args.betas=[{beta}, 0.99]"
        write_run(tmp_path / str(beta), scores_of(0.25 + beta), "optimizer.lr=0.1", betas)
    names = [row.name for row in rows_of(tmp_path)]
    assert names == ["Adam betas [0.5, 0.99]", "Adam betas [0.0, 0.99]"]


def with_answers(accuracy, seed, size=400):
    """Return scores with answers to questions, the easiest ones first."""
    right = np.arange(size) < accuracy * size
    right ^= np.random.default_rng(seed).random(size) < 0.02  # differs between seeds
    scores = scores_of(float(right.mean()))
    scores["analogies"]["total"] = {"accuracy": float(right.mean()), "counted": size}
    scores["analogies"]["answers"] = " ".join(["nan", *map(str, right.astype(int)), "nan"])
    return scores


def write_seeds(folder, name, accuracies, *settings):
    for seed, accuracy in enumerate(accuracies, start=1):
        scores = with_answers(accuracy, 100 * seed + len(name))
        given = [f"optimizer.name={name}", "optimizer.lr=0.1", f"train.seed={seed}", *settings]
        write_run(folder / f"{name}{seed}{len(settings)}", scores, *given)


def test_a_clear_difference_is_told_from_noise(tmp_path, monkeypatch):
    write_seeds(tmp_path, "Adam", [0.42, 0.43, 0.425])
    write_seeds(tmp_path, "RMSprop", [0.419, 0.43, 0.424])
    write_seeds(tmp_path, "SGD", [0.28, 0.27, 0.29])
    compared = rows_of(tmp_path)
    noise, clear = comparison.verdicts(compared)
    assert re.fullmatch(
        r"(Adam|RMSprop) and (Adam|RMSprop) are not distinguishable \(p = \.\d+\); "
        r"about \d+ more seeds? would tell",
        noise,
    )
    assert re.fullmatch(r"(Adam|RMSprop) > SGD \(p = \.0\d+\)", clear)
    monkeypatch.setenv("COLUMNS", "40")
    shown = str(comparison.Comparison.of([run for row in compared for run in row.runs]))
    assert max(map(len, shown.splitlines())) <= 40 and noise in " ".join(shown.split())


def test_one_seed_is_not_enough(tmp_path):
    write_seeds(tmp_path, "Adam", [0.42])
    write_seeds(tmp_path, "RMSprop", [0.42])
    write_seeds(tmp_path, "SGD", [0.28])
    lines = "\n".join(comparison.verdicts(rows_of(tmp_path)))
    assert re.search(r"not distinguishable \(p = .*\); train more seeds", lines)
    assert re.search(r"> SGD \(p = \.0.*\); other seeds may differ: train more", lines)


def test_questions_may_be_too_few(tmp_path):
    for name, answers in (("Adam", "1 1 1 0"), ("SGD", "1 0 0 0")):
        for seed in (1, 2, 3):
            accuracy = {"Adam": 0.75, "SGD": 0.25}[name] + seed / 1000 * (name == "SGD")
            scores = scores_of(accuracy)
            scores["analogies"]["answers"] = answers
            settings = [f"optimizer.name={name}", "optimizer.lr=1", f"train.seed={seed}"]
            write_run(tmp_path / f"{name}{seed}", scores, *settings)
    (line,) = comparison.verdicts(rows_of(tmp_path))
    assert line.startswith("Adam and SGD are not") and line.endswith("these questions are too few")


def test_runs_without_answers_are_tested_over_seeds(tmp_path):
    for name, accuracies in (("Adam", (0.4, 0.41, 0.42)), ("SGD", (0.2, 0.21, 0.23))):
        for seed, accuracy in enumerate(accuracies, start=1):
            settings = [f"optimizer.name={name}", "optimizer.lr=1", f"train.seed={seed}"]
            write_run(tmp_path / f"{name}{seed}", scores_of(accuracy), *settings)
    (line,) = comparison.verdicts(rows_of(tmp_path))
    assert line == "Adam > SGD (p < .001)"
    one = [read(tmp_path / "Adam1"), read(tmp_path / "SGD1")]
    (line,) = comparison.verdicts(comparison.rows(one))
    assert line == "Adam and SGD are not distinguishable (not tested); train more seeds"


def test_rows_of_one_optimizer_are_named_by_what_differs(tmp_path):
    write_seeds(tmp_path, "Adam", [0.3])
    write_seeds(tmp_path, "Adam", [0.2], "optimizer.lr=0.2")
    write_seeds(tmp_path, "SGD", [0.1])
    names = [row.name for row in rows_of(tmp_path)]
    assert names == ["Adam lr 0.1", "Adam lr 0.2", "SGD lr 0.1"]


def test_scores_have_intervals(tmp_path):
    write_seeds(tmp_path, "Adam", [0.42, 0.44])
    cell = comparison.table(rows_of(tmp_path))["analogies %"][0]
    center, low, high = map(float, re.fullmatch(r"(.*) \+- .* \[(.*), (.*)\]", cell).groups())
    assert low < center < high and high - low == pytest.approx(2 * 196 * 0.495 / 20, rel=0.1)
    runs = [read(path) for path in sorted(tmp_path.iterdir())]
    for line in csv.DictReader(comparison.as_csv(runs).splitlines()):
        low, center, high = (float(line[f"analogies %{end}"]) for end in (" low", "", " high"))
        assert low < center < high
    assert comparison.short("43.0 +- 1.4 [41.5, 44.5]") == "43.0±1.4"


def test_one_seed_twice_is_one_seed(runs):
    twice = [read(runs / name) for name in ("adam1", "adam1", "adam2")]
    assert comparison.table(comparison.rows(twice))["seeds"] == ["2"]


def test_a_comparison_of_runs_writes_its_files(runs, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "out"
    monkeypatch.setattr(report, "distribution", mock.Mock(side_effect=PackageNotFoundError))
    compare.report([runs], folder)
    assert "no report: report.html needs plotly: pip install plotly" in caplog.text
    table, *verdicts = (folder / "table.md").read_text().split("\n\n")
    assert verdicts and "RMSprop and Adam are not distinguishable" in verdicts[0]
    header, dashes, *body = table.splitlines()
    assert {line.count("|") for line in (dashes, *body)} == {header.count("|")} and len(body) == 3
    with (folder / "runs.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    adam = [line for line in lines if line["optimizer.name"] == "Adam"]
    assert sorted(float(line["analogies %"]) for line in adam) == [10, 20, 40]
    assert {line["optimizer.lr"] for line in adam} == {"0.05"}
    assert len({line["train.seed"] for line in adam}) == 3
    (sgd,) = (line for line in lines if line["optimizer.name"] == "SGD")
    assert sgd["held-out loss"] == ""


def test_text_of_runs_is_neither_formula_nor_markup(tmp_path, capsys):
    evil = "=HYPERLINK(1)\x1b[2J\n| <b>"
    scores = scores_of(0.5) | {"similarity": {evil: {"spearman": -0.5}}}
    settings = ["optimizer.lr=0.1", "model.ns_exponent=-0.5"]
    write_run(tmp_path / "one", scores, *settings)
    config = tmp_path / "one" / "config.yaml"
    config.write_text(config.read_text().replace("enwiki-sample", json.dumps(evil)))
    assert evaluate.main(["compare", str(tmp_path), "--to", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    table = (tmp_path / "out" / "table.md").read_text()
    assert "\x1b" not in shown + table and "<b>" not in table and len(table.splitlines()) == 3
    with (tmp_path / "out" / "runs.csv").open(newline="") as file:
        (line,) = csv.DictReader(file)
    assert {key[:2] for key in line if "HYPER" in key} == {"'="}
    assert line["corpus.path"].startswith("'=HYPERLINK(1)\\x1b")
    assert line["model.ns_exponent"] == "-0.5"


def test_evaluate_compares_the_runs_it_is_given(runs, capsys):
    assert evaluate.main(["compare", str(runs / "adam1"), str(runs / "adam2")]) == 0
    shown = capsys.readouterr().out
    assert "Adam" in shown and "15.0±7.1" in shown and "RMSprop" not in shown
    assert evaluate.main(["compare", str(runs / "empty")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "empty" in error


def test_named_settings_exist():
    assert all(any(key.startswith(name) for key in TYPES) for name in comparison.NO_SETTING)


def test_rows_of_several_texts_are_compared_text_by_text(tmp_path):
    for text in ("novels.txt", "wiki.txt"):
        write_seeds(tmp_path / text, "Adam", [0.42, 0.43, 0.425], f"corpus.path={text}")
        write_seeds(tmp_path / text, "SGD", [0.28, 0.27, 0.29], f"corpus.path={text}")
    compared = comparison.rows([read(path.parent) for path in tmp_path.rglob("config.yaml")])
    assert [line.partition(" (")[0] for line in sorted(comparison.verdicts(compared))] == [
        "Adam path novels.txt > SGD path novels.txt",
        "Adam path wiki.txt > SGD path wiki.txt",
    ]
