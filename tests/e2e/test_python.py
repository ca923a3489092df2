"""Train, load and compare in Python: what the commands do, without them."""

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import w2v
from tests.support.each_case import each_case
from tests.support.small_text import settings_of_small_text
from w2v.api import cli, compare
from w2v.api.train import as_arguments
from w2v.config import ConfigError
from w2v.vectors import runs
from w2v.vectors.datasets import EvaluationError
from w2v.vectors.load import VectorsError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a small text and a run on it."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def trained(home):
    text, *settings = settings_of_small_text(home)
    settings += ["model.window=2", f"run.dir={home}/runs", "run.report=false"]
    text = text.partition("=")[2]
    log = logging.getLogger("w2v")
    before = log.handlers[:], log.level, sys.getswitchinterval()
    run = w2v.train(text, *settings, optimizer="Adamax", epochs=3, lr=0.02, quiet=True)
    assert (log.handlers, log.level, sys.getswitchinterval()) == before
    return run


def test_training_returns_the_run(trained, home):
    folder = Path(trained)
    assert folder.parent == home / "runs"
    settings = runs.read(folder).settings
    assert settings["optimizer.name"] == "Adamax" and settings["train.epochs"] == 3
    assert len(trained) == 12 and list(trained) == trained.words
    assert trained.vectors.shape == (12, 8) and trained.vectors.dtype == np.float32
    assert "king" in trained and "nobody" not in trained
    kv = trained.gensim()
    assert np.array_equal(trained["king"], kv["king"])
    kv.add_vectors(["own"], [kv["king"]])
    assert "own" not in trained and len(trained) == len(trained.vectors)


def test_a_run_is_continued(trained, home, capsys):
    more = w2v.train(resume=trained, epochs=4)
    assert Path(more) == Path(trained)
    assert "resuming from" in capsys.readouterr().out
    assert runs.read(Path(trained)).settings["train.epochs"] == 4


def test_latest_and_files_are_loaded(trained, home, monkeypatch):
    monkeypatch.chdir(home)
    latest = w2v.load("latest")
    assert np.array_equal(latest.vectors, w2v.load(trained).vectors)
    (file,) = latest.export("txt", to=home / "exported")
    of_file = w2v.load(file)
    assert os.fspath(of_file) == str(file)
    assert of_file.words == latest.words
    np.testing.assert_allclose(of_file.vectors, latest.vectors, atol=1e-6)


def test_answers_are_those_of_the_commands(trained, capsys):
    def printed(*arguments):
        assert cli.main([*arguments]) == 0
        return re.findall(r"(-?\d\.\d{4})  (\w+)", capsys.readouterr().out)

    def shown(answers):
        return [(f"{cosine:.4f}", word) for word, cosine in answers]

    trained = w2v.load(trained)  # may have been continued since
    run = os.fspath(trained)
    assert shown(trained.nn("king", topn=3)) == printed("nn", run, "king", "--topn", "3")
    expected = printed("analogies", run, "man", "king", "woman")
    assert shown(trained.analogies("man", "king", "woman")) == expected
    assert shown(trained.analogies("king - man + woman")) == expected
    assert cli.main(["score", run]) == 0
    assert capsys.readouterr().out == f"{trained.score()}\n"


@each_case(
    ("ask", "error", "key_words"),
    [
        (lambda run: run.nn("kinng"), EvaluationError, "nearest spellings: king"),
        (lambda run: run.analogies("a", "b"), EvaluationError, "'a b' is not 3 words"),
        (lambda run: run.score(["no.txt"]), EvaluationError, "no.txt"),
        (lambda run: run.score("no.txt"), EvaluationError, "questions file no.txt"),
        (lambda run: run.score(pairs=Path("no.txt")), EvaluationError, "no.txt"),
        (lambda run: run.map(words=0), ConfigError, "^words=0 is out of range"),
        (lambda run: run.export("kv", to="a.bin"), VectorsError, "names a file"),
        (lambda run: w2v.load("no-run"), runs.RunError, "no-run does not exist"),
        (lambda run: w2v.train("a.txt", epoch=2), ConfigError, "did you mean epochs"),
        (lambda run: w2v.train("a.txt", qqq=2), ConfigError, "qqq=2 is not a setting"),
        (lambda run: w2v.train("a.txt", betas=(0, 1)), ConfigError, "write args={'betas': ...}"),
        (lambda run: w2v.train([["a", "b"]]), ConfigError, "w2v.Word2Vec trains on sentences"),
        (lambda run: w2v.compare([run], seeds=[1, 2]), ConfigError, "--seeds has no effect"),
    ],
)
def test_errors_are_one_line(trained, ask, error, key_words):
    with pytest.raises(error, match=key_words) as raised:
        ask(trained)
    assert "\n" not in str(raised.value)


def test_keywords_are_settings():
    settings = {"optimizer": "SGD", "args": {"momentum": 0.5}, "epochs": np.int64(3)}
    settings |= {"max_final_vocab": None, "hs": True, "lr": 1e-05}
    arguments = as_arguments([Path("a.txt"), "adam"], settings)
    assert arguments[:3] == ["a.txt", "adam", "optimizer.name=SGD"]
    from w2v.config import load_config

    config = load_config([], arguments[2:])
    assert config.optimizer.args == {"momentum": 0.5} and config.optimizer.lr == 1e-05
    assert config.train.epochs == 3 and config.model.hs and config.vocab.max_final_vocab is None


def test_a_map_and_a_report_are_written(trained, home):
    pytest.importorskip("plotly")
    assert trained.map(home / "map.svg", words=5) == home / "map.svg"
    page = trained.report(home / "page.html")
    assert page.exists() and page.with_suffix(".js").exists()


def test_runs_and_configs_are_compared(trained, home, monkeypatch, capsys):
    text, *settings = settings_of_small_text(home)
    found = w2v.compare(trained)
    assert "Adamax" in str(found) and found.rows[0].runs[0].folder == Path(trained)
    monkeypatch.setattr(compare.pages, "write_page", lambda *_: None)
    names = ["adam", "sgd"]
    to = home / "compared"
    both = w2v.compare(names, text.partition("=")[2], *settings, epochs=1, seeds=[1, 2, 1], to=to)
    assert "4 of 4" in capsys.readouterr().out
    assert {row.settings["optimizer.name"] for row in both.rows} == {"Adam", "SGD"}
    assert [len(row.runs) for row in both.rows] == [2, 2]
    assert str(both) == str(w2v.compare([to])) and (to / "table.md").exists()


def test_public_names_are_there_and_import_little():
    code = "import sys, w2v; print(json.dumps([*sys.modules]))"
    command = [sys.executable, "-c", f"import json; {code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not {"torch", "numpy", "gensim", "yaml"} & set(json.loads(done.stdout))
    assert dir(w2v) == sorted(w2v.__all__)
    assert all(hasattr(w2v, name) for name in w2v.__all__)
    for called in (w2v.Vectors, w2v.compare, w2v.load, w2v.train):
        assert "Raises:" in inspect.getdoc(called)
