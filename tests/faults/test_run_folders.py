"""Any run folder is read, or refused in one line."""

import json
import math
import os
from unittest import mock

import numpy as np
import pytest
import yaml

import evaluate
from tests.support.each_case import each_case
from tests.support.planted import kv_of
from tests.support.processes import run_python
from tests.support.runs import scores_of, write_run
from w2v.vectors import export, report, runs

DEEP = json.loads("[" * 50 + "]" * 50)
VALUES = {
    "null": None,
    "empty": "",
    "text": "x\x1b[2J\n<b>=",
    "negative": -1,
    "nan": math.nan,
    "infinity": 1e400,
    "huge": 10**400,
    "list": [],
    "mapping": {},
    "deep": DEEP,
    "flag": True,
}
REMOVED = object()
LINES = [
    {"words": n, "seconds": n / 10, "loss": 3 / n, "words_per_s": 10, "lr": 0.1} for n in (1, 2, 3)
]
LINES += [{"epoch": 1, "words": 3, "seconds": 0.3, "held_out_loss": 2.0, "analogies": 0.1}]
LINES += [{"phase": "training", "seconds": 1.0}]


def whole_scores():
    scores = scores_of(0.25)
    part = {"name": "gram1", "accuracy": 0.5, "correct": 4, "counted": 8, "skipped": 0}
    scores["analogies"]["sections"] = [part]
    return scores | {"questions": {"msr": scores["analogies"]}, "diverged": ""}


def make_run(folder):
    return write_run(folder, whole_scores(), "optimizer.name=Adam", metrics=LINES)


def places(content, path=()):
    """Return the path of each value, those inside of others included."""
    items = []
    if isinstance(content, dict):
        items = list(content.items())
    elif isinstance(content, list):
        items = list(enumerate(content))
    found = [path] if path else []
    for key, value in items:
        found += places(value, (*path, key))
    return found


def replaced(content, path, value):
    """Return a copy with another value at a path."""
    content = json.loads(json.dumps(content))
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return content


def use(folder):
    """Read a run and make all texts of it; only a `RunError` may come of that."""
    try:
        run = runs.read(folder)
    except runs.RunError as error:
        assert "\n" not in str(error)
        return
    columns = runs.table(runs.rows([run, run]))
    text = runs.markdown(columns)
    assert "\x1b" not in text and "<b>" not in text and "=HYPER" not in text
    runs.in_columns(columns, 80)
    runs.verdicts(runs.rows([run, run]))
    runs.as_csv([run])
    for name in ("loss", "held_out_loss", "analogies"):
        curve = runs.mean_curve([run, run], name)
        assert all(np.isfinite(column).all() for column in curve.values())


@each_case("value", [*VALUES.values(), REMOVED])
def test_any_value_of_any_key_is_read_or_refused(tmp_path, value):
    run = make_run(tmp_path / "run")
    names = "corpus.path optimizer.name optimizer.lr optimizer.args run.name train.seed"
    used = [name.split(".") for name in names.split()]
    whole, config = yaml.safe_load((run / "config.yaml").read_text()), {}
    for section, key in used:  # a short file is read faster
        config.setdefault(section, {})[key] = whole[section][key]
    (run / "config.yaml").write_text(json.dumps(config))
    scores, its_config = whole_scores(), runs.load_config([run / "config.yaml"], trains=False)
    with mock.patch.object(runs, "load_config", return_value=its_config):  # takes half of the time
        for path in places(scores):
            (run / "scores.json").write_text(json.dumps(replaced(scores, path, value)))
            use(run)
        (run / "scores.json").write_text(json.dumps(scores))
        for path in [path for path in places(LINES) if path[0] > 1]:  # the first three are alike
            lines = [json.dumps(line) + "\n" for line in replaced(LINES, path, value)]
            (run / "metrics.jsonl").write_text("".join(lines))
            use(run)
    for path in [*used, ["train"], ["optimizer"]]:
        (run / "config.yaml").write_text(json.dumps(replaced(config, path, value)))
        use(run)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A small script in place of plotly's, which need not be installed."""
    (tmp_path / "plotly.js").write_text("// plotly")
    found = mock.Mock(locate_file=lambda _: tmp_path / "plotly.js")
    monkeypatch.setattr(report, "distribution", lambda _: found)


@pytest.mark.usefixtures("script")
def test_a_page_and_a_table_of_any_values(tmp_path, capsys):
    """Give all scores and metrics, or all settings, one wrong value."""
    for number, (name, value) in enumerate(VALUES.items()):
        folder = tmp_path / str(number)
        make_run(folder / "whole")
        run = make_run(folder / f"{name}\x1b[2J")
        lines = [json.dumps(dict.fromkeys(line, value)) + "\n" for line in LINES]
        (run / "metrics.jsonl").write_text("".join(lines))
        use_commands(folder, capsys, (0,))
        scores = dict.fromkeys(whole_scores(), value)
        (run / "scores.json").write_text(json.dumps(scores))
        use_commands(folder, capsys, (0, 2))
        (run / "scores.json").unlink()
        config = yaml.safe_load((run / "config.yaml").read_text())
        config = {section: dict.fromkeys(keys, value) for section, keys in config.items()}
        (run / "config.yaml").write_text(json.dumps(config))
        assert evaluate.main(["report", str(folder)]) == 2
        assert_refused(capsys.readouterr().err)


def use_commands(folder, capsys, statuses):
    for command in (["report"], ["compare", "--to", str(folder / "out")]):
        status = evaluate.main([*command, str(folder)])
        out, error = capsys.readouterr()
        assert status in statuses and "\x1b" not in out + error
        if status:
            assert_refused(error)


def assert_refused(error):
    assert "is not a whole run folder" in error and error.count("\n") == 1


FILES = "config.yaml", "scores.json", "metrics.jsonl", "env.txt"


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("kind", ["folder", "pipe", "bytes", "nested"])
@each_case("name", FILES)
def test_any_file_in_place_of_another(tmp_path, capsys, name, kind):
    run = write_run(tmp_path / "run", metrics=LINES[:1])
    export.save(kv_of("abc", np.eye(3, dtype=np.float32)), run, ["kv"])
    (run / name).unlink(missing_ok=True)
    if kind == "folder":
        (run / name / "x").mkdir(parents=True)
    elif kind == "pipe":
        os.mkfifo(run / name)
    else:
        content = {"bytes": b"\xff\0\x1b[2J\n", "nested": b"[" * 10_000 + b"\n"}[kind]
        (run / name).write_bytes(content)
    for command in (["report"], ["compare"], ["compare", "--to", str(tmp_path / "out")]):
        status = evaluate.main([*command, str(run)])
        out, error = capsys.readouterr()
        assert status in (0, 2) and "\x1b" not in out + error
        assert error.startswith("error: ") == (status == 2) and error.count("\n") <= 1
    assert evaluate.main(["nn", str(run), "a"]) == 0
    assert evaluate.main(["score", str(run)]) == 0


EVIL = "word\x1b[2J\u202e"
IN_FOLDER = """
import os, sys, evaluate
os.chdir(sys.argv[1])
sys.exit(evaluate.main(sys.argv[2:]))
"""


@each_case(
    ("command", "shown"),
    [
        (["nn", "run", "word[2Jx"], "nearest spellings"),
        (["nn", "run", "a"], "word"),
        (["analogies", "run", EVIL, "a", "b"], "word"),
        (["score", "run", "--questions", f"{EVIL}.txt"], "section"),
        (["compare", "run", EVIL], "left out"),
        (["report", EVIL], "no metrics.jsonl"),
        (["export", "run", "--text", "--to", EVIL], "vectors.txt"),
    ],
)
def test_no_word_and_no_name_commands_the_terminal(tmp_path, command, shown):
    run = make_run(tmp_path / "run")
    export.save(kv_of([EVIL, "a", "b"], np.eye(3, dtype=np.float32)), run, ["kv"])
    (tmp_path / EVIL).mkdir()
    (tmp_path / f"{EVIL}.txt").write_text(f": section {EVIL}\na b a b\n")
    done = run_python(IN_FOLDER, tmp_path, *command)
    output = done.stdout + done.stderr
    assert done.returncode in (0, 2) and shown in output and "Traceback" not in output
    assert r"\x1b" in output and not {"\x1b", "\u202e"} & set(output)
