"""Comparing configs: what is trained, what is reused, what is written."""

import json
import os
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from w2v.api import compare, gensim_baseline, runs
from w2v.config import load_config
from w2v.text.vocab import Vocab
from w2v.training import plan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def configs(common):
    common = [*common, "run.score_epochs=true", "optimizer.lr=0.01"]
    adam = [*common, "optimizer.name=Adam", "train.batch_size=128"]
    rmsprop = [*common, "optimizer.name=RMSprop", "train.batch_size=64"]
    return {"adam": load_config([], adam), "rmsprop": load_config([], rmsprop)}


def test_each_config_is_trained_with_each_seed_once(configs, trained, tmp_path):
    table = compare.compare(configs, [1, 2], tmp_path)
    pairs = [(config.optimizer.name, config.train.seed) for config in trained]
    assert pairs == [("Adam", 1), ("Adam", 2), ("RMSprop", 1), ("RMSprop", 2)]
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"adam-seed1", "rmsprop-seed2", "env.txt", "table.txt", "table.csv"}
    assert (tmp_path / "adam-seed1" / "vectors.kv").exists()
    assert "Adam" in table and "RMSprop" in table
    run = runs.read(tmp_path / "adam-seed1")
    assert len(run.curve("analogies")) == len(run.curve("held_out_loss")) == 2

    (tmp_path / "adam-seed2" / "scores.json").unlink()  # as if it had been interrupted
    assert compare.compare(configs, [1, 2], tmp_path).split()[:9] == table.split()[:9]
    assert [(config.optimizer.name, config.train.seed) for config in trained[4:]] == [("Adam", 2)]


def test_a_run_with_other_settings_is_kept(configs, trained, tmp_path):
    adam = configs["adam"]
    compare.compare({"adam": adam}, [1], tmp_path)
    before = (tmp_path / "adam-seed1" / "scores.json").read_bytes()
    faster = replace(adam, optimizer=replace(adam.optimizer, lr=0.02))
    for _ in range(2):
        table = compare.compare({"adam": faster}, [1], tmp_path)
    assert len(trained) == 2
    assert (tmp_path / "adam-seed1" / "scores.json").read_bytes() == before
    assert runs.read(tmp_path / "adam-seed1-2").settings["optimizer.lr"] == 0.02
    assert "0.02" in table.split() and "0.01" not in table.split()


def test_a_diverged_run_is_a_row(configs, tmp_path):
    sgd = load_config([], ["optimizer.name=SGD", "optimizer.lr=1000"]).optimizer
    diverging = {"sgd": replace(configs["adam"], optimizer=sgd), "adam": configs["adam"]}
    assert "diverged" in compare.compare(diverging, [1], tmp_path)
    assert "diverged" in json.loads((tmp_path / "sgd-seed1" / "scores.json").read_text())


def test_gensim_is_scored_as_the_other_runs(configs, trained, tmp_path):
    gensim = gensim_baseline.as_config(configs["adam"], lr=0.05)
    compare.compare({"gensim": gensim, "adam": configs["adam"]}, [1], tmp_path)
    ours = runs.read(tmp_path / "adam-seed1")
    theirs = runs.read(tmp_path / "gensim-seed1")
    assert theirs.settings["optimizer.name"] == "gensim SGD"
    assert theirs.settings["optimizer.lr"] == 0.05
    assert theirs.scores["words"] == ours.scores["words"] == 6000
    assert len(theirs.curve("analogies")) == 2
    assert 0 < theirs.scores["held_out_loss"] < 4.16  # below that of untrained vectors
    pairs = [run.scores["similarity"]["wordsim353"]["pairs"] for run in (ours, theirs)]
    assert pairs[0] == pairs[1] > 0
    assert len(trained) == 1


def test_an_interrupted_comparison_is_continued(tmp_path):
    assert compare.folder_to_use(tmp_path).name > "compare-2026"
    interrupted = tmp_path / "compare-2020-01-01"
    interrupted.mkdir()
    assert compare.folder_to_use(tmp_path) == interrupted
    (interrupted / "table.csv").touch()
    assert compare.folder_to_use(tmp_path).name > "compare-2026"


def test_the_learning_rate_follows_the_square_root_of_the_batch_size():
    settings = ["optimizer.lr=0.4", "optimizer.min_lr=0.04", "train.batch_size=65536"]
    config = load_config([], settings)
    quarter = compare.scale_batch_size(config, 16384)
    assert (quarter.optimizer.lr, quarter.optimizer.min_lr) == (0.2, 0.02)
    assert quarter.train.batch_size == 16384
    assert compare.scale_batch_size(quarter, 65536) == config
    # With a cap, the sum of a row's gradients grows by itself.
    capped = replace(config, optimizer=replace(config.optimizer, occurrence_cap=16))
    assert compare.scale_batch_size(capped, 16384).optimizer.lr == 0.4


def test_only_a_short_text_gets_smaller_batches():
    def vocab(words, count):
        counts = np.full(words, count)
        return Vocab([str(word) for word in range(words)], counts, words * count, words)

    settings = ["model.sample=0", "train.epochs=5", "train.batch_size=65536", "optimizer.lr=0.4"]
    config = load_config([], settings)
    assert compare.fit_batch_to_text(config, vocab(70_000, 200)) == config
    short = compare.fit_batch_to_text(config, vocab(7_000, 50))
    assert 500 <= 5 * 7_000 * 50 / short.train.batch_size < 1000
    lr = 0.4 * (short.train.batch_size / 65536 * 10) ** 0.5
    assert short.optimizer.lr == pytest.approx(lr, rel=0.01)
    assert compare.fit_batch_to_text(config, vocab(20, 50)).optimizer.lr <= 0.4


@pytest.mark.parametrize(
    "second, key_words",
    [
        ("bad.yaml", "error: optimizer.name=Adafactor"),
        ("other/good.yaml", "other/good.yaml: another config is called good too"),
    ],
)
def test_configs_are_refused_before_training(common, tmp_path, capsys, second, key_words):
    (tmp_path / "other").mkdir()
    (tmp_path / "bad.yaml").write_text("optimizer: {name: Adafactor, args: {}}")
    for file in ("good.yaml", "other/good.yaml"):
        (tmp_path / file).write_text("optimizer: {name: Adam, lr: 0.01}")
    arguments = [str(tmp_path / "good.yaml"), str(tmp_path / second)]
    assert compare.main([*arguments, "--to", str(tmp_path / "out"), "--set", *common]) == 2
    assert key_words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_named(common, tmp_path, capsys):
    config = tmp_path / "good.yaml"
    config.write_text("optimizer: {name: Adam, lr: 0.01}")
    assert compare.main([str(config), "--to", f"{config}/out", "--set", *common]) == 2
    assert "good.yaml/out/good-seed1: Not a directory" in capsys.readouterr().err


def test_the_program_fits_batches_and_prints_the_table(common, tmp_path, capsys):
    config, folder = tmp_path / "fast.yaml", tmp_path / "out"
    config.write_text("optimizer: {name: Adam, lr: 0.05}")
    settings = ["--set", *common, "train.epochs=1"]
    assert compare.main([str(config), "--to", str(folder), *settings]) == 0
    run = runs.read(folder / "fast-seed1")
    assert run.settings["train.batch_size"] < 65536
    assert run.settings["train.held_out_words"] == 100  # --set comes last
    printed = capsys.readouterr().out
    assert str(folder) in printed
    assert (folder / "table.txt").read_text() in printed


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("program", ["sweep", "compare"])
def test_ctrl_c_ends_without_a_traceback(common, tmp_path, monkeypatch, capsys, program):
    name = "adam" if program == "sweep" else "configs/optimizers/adam.yaml"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [program, name, "--to", str(tmp_path), "--set", *common])
    monkeypatch.setattr(plan, "make_plan", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    # A script in the background ignores SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_module(f"w2v.api.{program}", run_name="__main__")
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ended.type is SystemExit and ended.value.code == 130
    assert capsys.readouterr().err == ""
