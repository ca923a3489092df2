"""Files from elsewhere cannot name code that is then imported and run."""

import shutil
import sys

import pytest

from tests.support.each_case import each_case
from tests.support.tiny import tiny_arguments
from w2v.api import cli

CODE = """
from pathlib import Path
import torch
Path(__file__).with_suffix(".ran").touch()
class Opt(torch.optim.SGD): pass
def words(line): return line.split()
"""
NAME = "optimizer.name=w2v_theirs.Opt"
WORDS = "corpus.tokenize=w2v_theirs:words"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """Return the file that importing the module w2v_theirs writes."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "w2v_theirs.py").write_text(CODE)
    monkeypatch.syspath_prepend(folder)
    yield folder / "w2v_theirs.ran"
    sys.modules.pop("w2v_theirs", None)


def refused(capsys, *arguments, name=NAME):
    """Run a command that must fail; return whether it names the remedy."""
    assert cli.main(list(map(str, arguments))) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    return f"add {name} to the command line" in error


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["optimizer.lr=0.5"]])
def test_a_config_file_imports_nothing(tmp_path, marker, capsys, more):
    file = tmp_path / "theirs.yaml"
    file.write_text("optimizer: {name: w2v_theirs.Opt, lr: 0.1}\n")
    arguments = [file, *tiny_arguments(tmp_path), *more]
    assert refused(capsys, "train", *arguments)
    assert not marker.exists() and not (tmp_path / "runs").exists()
    assert cli.main(["train", *map(str, arguments), NAME]) == 0
    assert marker.exists()


@each_case("more", [[], ["--dry-run"], ["train.epochs=2"]])
def test_a_run_folder_imports_nothing(tmp_path, tiny_run, marker, capsys, more):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: Adam", "name: w2v_theirs.Opt"))
    assert refused(capsys, "train", "--resume", run, *more)
    assert not marker.exists()


def test_a_function_that_splits_text_is_named_on_the_command_line(tmp_path, marker, capsys):
    file = tmp_path / "theirs.yaml"
    file.write_text("corpus: {tokenize: 'w2v_theirs:words'}\n")
    arguments = [file, *tiny_arguments(tmp_path)]
    assert refused(capsys, "train", *arguments, name=WORDS)
    assert refused(capsys, "compare", "adam", *arguments, name=WORDS)
    assert not marker.exists() and not (tmp_path / "runs").exists()
    assert cli.main(["train", *map(str, arguments), WORDS]) == 0
    assert marker.exists()
    (run,) = (tmp_path / "runs").iterdir()
    marker.unlink()
    del sys.modules["w2v_theirs"]
    assert refused(capsys, "train", "--resume", run, name=WORDS)
    cli.main(["nn", str(run), "a"])
    assert not marker.exists()
    assert cli.main(["train", "--resume", str(run), WORDS, "train.epochs=2"]) == 0


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_compare_and_sweep_import_nothing(tmp_path, marker, capsys, command):
    file = tmp_path / "theirs.yaml"
    file.write_text("optimizer: {name: w2v_theirs.Opt, lr: 0.1}\n")
    assert refused(capsys, command, file, *tiny_arguments(tmp_path))
    assert not marker.exists()


@each_case("command", ["nn", "score", "export", "report"])
def test_commands_that_read_a_run_import_nothing(tmp_path, tiny_run, marker, command):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("name: Adam", "name: w2v_theirs.Opt"))
    more = {"nn": ["a"], "export": ["--text"]}.get(command, [])
    cli.main([command, str(run), *more])
    assert not marker.exists()
