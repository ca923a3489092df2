"""Comparing configs: what is trained, what is reused, what is written."""

import json
import os
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from tests.support.small_text import record_calls
from w2v.api import cli, compare
from w2v.config import ConfigError, load_config, save_config
from w2v.system.console import log_to_console
from w2v.training import plan, run_folder
from w2v.vectors import runs
from w2v.vectors.datasets import Further

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def configs(common):
    common = [*common, "run.score_epochs=true", "optimizer.lr=0.01"]
    adam = [*common, "optimizer.name=Adam", "train.batch_size=128"]
    rmsprop = [*common, "optimizer.name=RMSprop", "train.batch_size=64"]
    return {"adam": load_config([], adam), "rmsprop": load_config([], rmsprop)}


def test_each_config_and_seed_is_trained_once(configs, trained, tmp_path, monkeypatch, capsys):
    table = str(compare.write(compare.train(configs, [1, 2], tmp_path), tmp_path))
    pairs = [(config.optimizer.name, config.train.seed) for config in trained]
    assert pairs == [("Adam", 1), ("Adam", 2), ("RMSprop", 1), ("RMSprop", 2)]
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"adam-seed1", "rmsprop-seed2", "env.txt", "table.md", "runs.csv"}
    assert (tmp_path / "adam-seed1" / "vectors.kv").exists()
    assert "Adam" in table and "RMSprop" in table
    run = runs.read(tmp_path / "adam-seed1")
    assert len(run.curve("analogies")) == len(run.curve("held_out_loss")) == 2

    (tmp_path / "adam-seed2" / "scores.json").unlink()
    with run_folder.lock(tmp_path), pytest.raises(runs.RunError, match="is in use by process"):
        compare.train(configs, [1, 2], tmp_path)  # as another process would
    assert (tmp_path / "adam-seed2").exists()
    log_to_console()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(compare, "train_and_score", mock.Mock(side_effect=KeyboardInterrupt))
        compare.train(configs, [1, 2], tmp_path)
    assert "stopped after 1 runs; the same command" in capsys.readouterr().out
    read = record_calls(monkeypatch, runs, "read")
    again = str(compare.write(compare.train(configs, [1, 2], tmp_path), tmp_path))
    assert len(read) == len(set(read)) == 4
    assert again.split()[:9] == table.split()[:9]
    assert [(config.optimizer.name, config.train.seed) for config in trained[4:]] == [("Adam", 2)]


def test_a_run_with_other_settings_is_kept(configs, trained, tmp_path):
    adam = configs["adam"]
    compare.train({"adam": adam}, [1], tmp_path)
    before = (tmp_path / "adam-seed1" / "scores.json").read_bytes()
    faster = replace(adam, optimizer=replace(adam.optimizer, lr=0.02))
    for _ in range(2):
        (run,) = compare.train({"adam": faster}, [1], tmp_path)
    assert len(trained) == 2
    assert (tmp_path / "adam-seed1" / "scores.json").read_bytes() == before
    assert run.folder == tmp_path / "adam-seed1-2" and run.settings["optimizer.lr"] == 0.02


def test_a_folder_that_is_no_run_is_kept(configs, trained, tmp_path):
    notes = tmp_path / "adam-seed1" / "notes.txt"
    notes.parent.mkdir()
    notes.touch()
    (run,) = compare.train({"adam": configs["adam"]}, [1], tmp_path)
    assert notes.exists() and run.folder == tmp_path / "adam-seed1-2"


def test_runs_of_another_text_or_scored_on_other_files_are_refused(configs, trained, tmp_path):
    (tmp_path / "colors.tsv").write_text("red\tblue\t9\nred\tone\t1\n")
    adam, further = {"adam": configs["adam"]}, Further(pairs=[tmp_path / "colors.tsv"])
    for first, second in ((further, Further()), (Further(), further)):
        folder = tmp_path / str(len(trained))
        for _ in range(2):
            compare.train(adam, [1], folder, first)
        with pytest.raises(ConfigError, match="scores of colors; give the same"):
            compare.train(adam, [2, 1], folder, second)
    assert len(trained) == 2  # none with seed 2
    file = tmp_path / "0" / "adam-seed1" / "scores.json"
    scores = json.loads(file.read_text())
    assert scores["text"]
    file.write_text(json.dumps(scores | {"text": "another"}))
    with pytest.raises(ConfigError, match="trained before .*text.* changed; restore that text"):
        compare.train(adam, [1], tmp_path / "0", further)


def test_a_diverged_run_is_a_row(configs, undrawn, tmp_path):
    sgd = load_config([], ["optimizer.name=SGD", "optimizer.lr=1000"]).optimizer
    diverging = {"sgd": replace(configs["adam"], optimizer=sgd), "adam": configs["adam"]}
    assert "diverged" in str(compare.write(compare.train(diverging, [1], tmp_path), tmp_path))
    scores = json.loads((tmp_path / "sgd-seed1" / "scores.json").read_text())
    assert {"diverged", "text"} == set(scores)


def test_an_interrupted_comparison_is_continued_and_others_are_kept(tmp_path):
    config = load_config()
    seeded = load_config([], ["train.seed=7"])
    assert compare.folder_to_use(tmp_path, [config]).name > "compare-2026"
    interrupted = tmp_path / "compare-2020-01-01"
    (interrupted / "adam-seed7").mkdir(parents=True)
    save_config(seeded, interrupted / "adam-seed7" / "config.yaml")
    assert compare.folder_to_use(tmp_path, [config]) == interrupted
    other = load_config([], ["train.epochs=9"])
    today = compare.folder_to_use(tmp_path, [other])
    assert today.name > "compare-2026"
    (interrupted / "runs.csv").touch()
    assert compare.folder_to_use(tmp_path, [config]) == today
    (today / "adam-seed1").mkdir(parents=True)
    save_config(other, today / "adam-seed1" / "config.yaml")
    (today / "runs.csv").touch()
    assert compare.folder_to_use(tmp_path, [other]) == today
    assert compare.folder_to_use(tmp_path, [config]).name == f"{today.name}-2"


@pytest.mark.parametrize(
    "second, key_words",
    [("bad.yaml", "error: optimizer.name=Adafactor"), ("other/good.yaml", "other/good.yaml have ")],
)
def test_configs_are_refused_before_training(common, tmp_path, capsys, second, key_words):
    (tmp_path / "other").mkdir()
    (tmp_path / "bad.yaml").write_text("optimizer: {name: Adafactor, args: {}}")
    for file in ("good.yaml", "other/good.yaml"):
        (tmp_path / file).write_text("optimizer: {name: Adam, lr: 0.01}")
    arguments = [str(tmp_path / "good.yaml"), str(tmp_path / second)]
    assert cli.main(["compare", *arguments, "--to", str(tmp_path / "out"), *common]) == 2
    assert key_words in capsys.readouterr().err
    large = [arguments[0], "--to", str(tmp_path / "out"), *common, "model.vector_size=2000000000"]
    assert cli.main(["compare", *large]) == 3
    assert "not enough CPU memory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program", ["sweep", "compare"])
@pytest.mark.parametrize("option", ["--questions", "--pairs"])
def test_files_to_score_by_are_read_before_training(common, tmp_path, capsys, program, option):
    arguments = [program, "adam", "--to", str(tmp_path / "out"), *common]
    assert cli.main([*arguments, option, str(tmp_path / "missing.txt")]) == 2
    assert "missing.txt" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(common, tmp_path, capsys):
    config = tmp_path / "good.yaml"
    config.write_text("optimizer: {name: Adam, lr: 0.01}")
    assert cli.main(["compare", str(config), "--to", f"{config}/out", *common]) == 2
    assert "good.yaml/out: Not a directory" in capsys.readouterr().err


def test_the_program_fits_batches_and_prints_the_table(common, tmp_path, capsys):
    pytest.importorskip("plotly")
    config, folder = tmp_path / "fast.yaml", tmp_path / "out"
    config.write_text("optimizer: {name: Adam, lr: 0.05}")
    settings = [*common, "train.epochs=1"]
    assert cli.main(["compare", str(config), "--to", str(folder), *settings]) == 0
    run = runs.read(folder / "fast-seed1")
    assert run.settings["train.batch_size"] > 0  # as chosen
    assert run.settings["train.held_out_words"] == 100  # as given
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert (folder / "table.md").read_text().startswith("| optimizer |")
    assert {"report.html", "report.js", "plotly.min.js"} <= {path.name for path in folder.iterdir()}


def test_the_text_may_be_a_folder(common, undrawn, tmp_path, capsys):
    (text,) = [name.partition("=")[2] for name in common if name.startswith("corpus.path=")]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(Path(text).read_bytes())
    settings = [name for name in common if name != f"corpus.path={text}"]
    arguments = ["adam", str(tmp_path / "texts"), "train.epochs=1", *settings]
    assert cli.main(["compare", "--to", str(tmp_path / "out"), *arguments]) == 0
    assert "Adam" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("names", "seeds", "warned"),
    [
        (["adam", "sgd"], ["1"], True),
        (["adam", "sgd"], ["1", "2", "3"], False),
        (["adam"], "1", False),
    ],
)
def test_too_few_seeds_are_a_warning(common, monkeypatch, caplog, names, seeds, warned):
    monkeypatch.setattr(compare, "train", lambda *_: [])
    monkeypatch.setattr(compare, "write", lambda *_: "")
    assert cli.main(["compare", *names, *common, "--seeds", *seeds]) == 0
    said = "--seeds 1 cannot tell a difference from luck; write --seeds 1 2 3"
    assert (said in caplog.text) == warned


@pytest.mark.parametrize("program", ["sweep", "compare"])
def test_ctrl_c_ends_without_a_traceback(common, tmp_path, monkeypatch, capsys, program):
    name = "adam" if program == "sweep" else "configs/optimizers/adam.yaml"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["w2v", program, name, "--to", str(tmp_path), *common])
    monkeypatch.setattr(plan, "make_plan", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    before = {number: signal.getsignal(number) for number in numbers}
    # A script in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_path(str(ROOT / "evaluate.py"), run_name="__main__")
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ended.type is SystemExit and ended.value.code == 130
    assert capsys.readouterr().err == ""
