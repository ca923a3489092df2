"""Runs and caches are listed, and removed only after a yes."""

import fcntl
import io
import os
import re
from pathlib import Path

import pytest

from tests.support.runs import scores_of, write_run
from w2v.api import cli, storage
from w2v.config import load_config
from w2v.text import open_corpus


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with runs, a comparison, and the ids of a text."""
    monkeypatch.chdir(tmp_path)
    adam = ["optimizer.name=Adam", "corpus.path=texts/wiki.txt"]
    for number, (name, scores) in enumerate(
        {"done": scores_of(0.25), "running": None, "burst": {"diverged": "nan"}}.items()
    ):
        run = write_run(tmp_path / "runs" / name, scores, *adam)
        os.utime(run / "config.yaml", (10**9 + number * 10**5,) * 2)
    damaged = write_run(tmp_path / "runs" / "damaged\x1b[2J")
    (damaged / "config.yaml").write_text("{")
    write_run(tmp_path / "runs" / "compare-x" / "sgd-seed1", scores_of(0.5), "optimizer.name=SGD")
    (tmp_path / "runs" / "compare-x" / "runs.csv").touch()
    (tmp_path / "runs" / "plotly.min.js").touch()
    (tmp_path / "my.text.txt").write_text("a b a b\n" * 9)
    settings = ["corpus.path=my.text.txt", "corpus.data_dir=data", "vocab.min_count=1"]
    open_corpus(load_config([], settings))
    (tmp_path / "data" / "text8").touch()
    return tmp_path


def test_runs_are_listed_by_date_with_their_state(folder, capsys, monkeypatch):
    assert cli.main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = [re.split(r"  +", line) for line in lines[1:6]]
    assert [line[-1] for line in found[:3]] == ["runs/done", "runs/running", "runs/burst"]
    assert found[0][:5] == ["2001-09-09", "wiki.txt", "Adam", "25.0", "0.500"]
    assert [line[3] for line in found[1:3]] == ["unfinished", "diverged"]
    others = {line[-1]: line for line in found[3:]}
    assert others["runs/compare-x/sgd-seed1"][2:5] == ["SGD", "50.0", "0.500"]
    assert others[r"runs/damaged\x1b[2J"][1] == "unreadable"
    assert lines[-1].startswith("runs: 5, ") and "cached texts: 1, " in lines[-1]
    assert max(map(len, lines)) <= 100
    for names in (["runs/done"], ["runs/done", "runs/done"], ["latest"]):
        assert cli.main(["runs", *names]) == 0
        assert capsys.readouterr().out.count("runs/") == 1, names
    listed = folder / "runs/done/listed"
    monkeypatch.setattr(Path, "rglob", lambda path, _: [listed])  # a run has removed it since
    assert storage._size(folder) == 0
    assert cli.main(["runs", "data"]) == 2
    assert "no run is in data; name a folder of runs" in capsys.readouterr().err


def test_runs_of_items_are_listed_with_their_hit_rate(tmp_path, capsys):
    total = {"accuracy": 0.4, "counted": 9}
    hits = {"hit rate at 10": {"total": total, "sections": [total, total]}}
    write_run(tmp_path / "items", {"questions": hits})
    assert cli.main(["runs", str(tmp_path)]) == 0
    heading, line, *_ = capsys.readouterr().out.splitlines()
    assert "hit rate at 10 %" in heading and "analogies" not in heading and " 40.0 " in line


def test_a_cache_is_named_after_its_text(folder):
    (cache,) = (folder / "data" / "cache").iterdir()
    assert re.fullmatch(r"my-[0-9a-f]{16}", cache.name)


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("answer", ["n\n", "", "no\n"])
def test_nothing_is_removed_without_a_yes(folder, capsys, monkeypatch, answer):
    script = folder / "runs" / "plotly.min.js"
    script.touch()  # which runs/* names too
    before = everything(folder)
    runs = ["runs/done", "--caches"]
    assert cli.main(["clean", str(script), *runs, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "  runs/done\n" in shown and "data/cache/my-" in shown
    assert cli.main(["clean", *runs]) == 2  # no terminal to ask in
    assert "asks in a terminal" in capsys.readouterr().err
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["clean", *runs]) == 0
    assert "remove all of these? y/N" in capsys.readouterr().out
    assert everything(folder) == before


def test_runs_comparisons_and_caches_are_removed(folder, monkeypatch, capsys):
    terminal = io.StringIO("y\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["clean", "runs/done", "runs/compare-x"]) == 0
    left = everything(folder)
    assert not [name for name in left if "done" in name or "compare-x" in name]
    assert {"runs/running", "runs/plotly.min.js", "data/cache", "my.text.txt"} < set(left)
    assert cli.main(["clean", "--caches", "--yes"]) == 0
    assert everything(folder / "data") == ["cache", "text8"]
    assert cli.main(["clean", "--caches", "--yes"]) == 2
    assert "nothing to remove" in capsys.readouterr().err
    write_run(folder / "runs" / "compare-stopped" / "adam-seed1")
    assert cli.main(["clean", "runs/compare-stopped", "runs", "--yes"]) == 0
    assert everything(folder / "runs") == ["plotly.min.js"]


def test_a_run_in_use_and_what_is_no_run_stay(folder, capsys):
    with open(folder / "runs" / "running" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert cli.main(["clean", "runs/running", "--yes"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    assert (folder / "runs" / "running" / "config.yaml").exists()
    for path in ("data", "my.text.txt", "runs/missing"):
        before = everything(folder)
        assert cli.main(["clean", path, "--yes"]) == 2
        assert capsys.readouterr().err.count("\n") == 1 and everything(folder) == before
