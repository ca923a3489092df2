"""Comparing configs and sweeping settings on a small text: what is trained, what is not trained again, and what is written."""

import csv
import json
import os
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from w2v.api import compare as experiments
from w2v.api import runs as comparison
from w2v.api import sweep
from w2v.config import Config, ConfigError, config_keys, load_config
from w2v.text.vocab import Vocab
from w2v.training import plan

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    """A small text with some of the words that the word pairs and analogies ask for, and the settings for it."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    topics = ["king queen man woman boy girl".split(), "tiger cat dog animal bird mouse".split()]
    lines = [" ".join(rng.choice(topics[rng.integers(2)], 10)) for _ in range(300)]
    (folder / "text.txt").write_text("\n".join(lines))
    small = "model.vector_size=8 model.sample=0 train.epochs=2 train.device=cpu train.held_out_words=100".split()
    return [f"corpus.path={folder}/text.txt", f"corpus.data_dir={folder}", *small]


@pytest.fixture
def configs(common):
    one = [
        "optimizer.name=Adam",
        "optimizer.lr=0.01",
        "train.batch_size=128",
        "run.score_epochs=true",
    ]
    two = [
        "optimizer.name=RMSprop",
        "optimizer.lr=0.01",
        "train.batch_size=64",
        "run.score_epochs=true",
    ]
    return {"adam": load_config([], [*common, *one]), "rmsprop": load_config([], [*common, *two])}


@pytest.fixture
def trained(monkeypatch):
    """The configs that are trained, in their order."""
    made, train = [], experiments.train_once

    def record(config, *rest):
        made.append(config)
        return train(config, *rest)

    for module in (experiments, sweep):
        monkeypatch.setattr(module, "train_once", record)
    return made


def test_a_comparison_trains_each_config_with_each_seed_once(configs, trained, tmp_path):
    shown = experiments.compare(configs, [1, 2], tmp_path)
    assert [(c.optimizer.name, c.train.seed) for c in trained] == [
        ("Adam", 1),
        ("Adam", 2),
        ("RMSprop", 1),
        ("RMSprop", 2),
    ]
    assert {path.name for path in tmp_path.iterdir()} >= {
        "adam-seed1",
        "rmsprop-seed2",
        "env.txt",
        "table.txt",
        "table.md",
        "table.csv",
    }
    assert (
        (tmp_path / "adam-seed1" / "vectors.kv").exists() and "Adam" in shown and "RMSprop" in shown
    )
    run = comparison.read(tmp_path / "adam-seed1")
    assert len(run.curve("analogies")) == len(run.curve("held_out_loss")) == 2
    (tmp_path / "adam-seed2" / "scores.json").unlink()  # as if it had been stopped
    assert experiments.compare(configs, [1, 2], tmp_path).split()[:9] == shown.split()[:9]
    assert [(c.optimizer.name, c.train.seed) for c in trained[4:]] == [("Adam", 2)]


def test_a_run_with_other_settings_is_kept(configs, trained, tmp_path):
    adam = {"adam": configs["adam"]}
    experiments.compare(adam, [1], tmp_path)
    before = (tmp_path / "adam-seed1" / "scores.json").read_bytes()
    other = {
        "adam": replace(configs["adam"], optimizer=replace(configs["adam"].optimizer, lr=0.02))
    }
    for _ in range(2):
        table = experiments.compare(other, [1], tmp_path)
    assert len(trained) == 2 and (tmp_path / "adam-seed1" / "scores.json").read_bytes() == before
    assert comparison.read(tmp_path / "adam-seed1-2").settings["optimizer.lr"] == 0.02
    assert "0.02" in table.split() and "0.01" not in table.split()


def test_one_that_diverges_is_a_row_too(configs, tmp_path):
    sgd = load_config([], ["optimizer.name=SGD", "optimizer.lr=1000"]).optimizer
    wild = {"sgd": replace(configs["adam"], optimizer=sgd), "adam": configs["adam"]}
    assert "diverged" in experiments.compare(wild, [1], tmp_path)
    assert "diverged" in json.loads((tmp_path / "sgd-seed1" / "scores.json").read_text())


def test_gensim_is_a_row_by_the_same_measures(configs, trained, tmp_path):
    experiments.compare({"adam": configs["adam"]}, [1], tmp_path, gensim_alpha=0.05)
    ours, theirs = (comparison.read(tmp_path / f"{name}-seed1") for name in ("adam", "gensim"))
    assert (
        theirs.settings["optimizer.name"] == "gensim SGD"
        and theirs.settings["optimizer.lr"] == 0.05
    )
    assert (
        theirs.scores["words"] == ours.scores["words"] == 6000
        and len(theirs.curve("analogies")) == 2
    )
    assert 0 < theirs.scores["held_out_loss"] < 4.16  # below that of vectors that know nothing
    pairs = [run.scores["similarity"]["wordsim353"]["pairs"] for run in (ours, theirs)]
    assert pairs[0] == pairs[1] > 0 and len(trained) == 1


@pytest.mark.parametrize(
    "done, expected",
    [([], "today"), (["compare-2020-01-01"], "today"), (None, "compare-2020-01-01")],
)
def test_an_interrupted_comparison_goes_on(tmp_path, done, expected):
    (tmp_path / "compare-2020-01-01").mkdir()
    if done is not None:
        (tmp_path / "compare-2020-01-01" / "table.csv").touch()
    used = experiments.folder_to_use(tmp_path)
    assert used.name == expected or (expected == "today" and used.name > "compare-2026")


def test_the_learning_rate_goes_with_the_square_root_of_the_batch():
    config = load_config(
        [], ["optimizer.lr=0.4", "optimizer.min_lr=0.04", "train.batch_size=65536"]
    )
    quarter = experiments.with_batch(config, 16384)
    assert (quarter.optimizer.lr, quarter.optimizer.min_lr, quarter.train.batch_size) == (
        0.2,
        0.02,
        16384,
    )
    assert experiments.with_batch(quarter, 65536) == config
    capped = replace(config, optimizer=replace(config.optimizer, occurrence_cap=16))
    assert (
        experiments.with_batch(capped, 16384).optimizer.lr == 0.4
    )  # a sum of up to 16 gradients grows by itself


def test_a_short_text_gets_smaller_batches_and_a_long_one_keeps_them():
    def vocab(words, each):
        return Vocab(
            [str(word) for word in range(words)], np.full(words, each), words * each, words
        )

    config = load_config(
        [], ["model.sample=0", "train.epochs=5", "train.batch_size=65536", "optimizer.lr=0.4"]
    )
    assert experiments.fitted(config, vocab(70_000, 200)) == config
    short = experiments.fitted(config, vocab(7_000, 50))
    steps = 5 * 7_000 * 50 / short.train.batch_size
    assert 500 <= steps < 1000 and short.optimizer.lr == pytest.approx(
        0.4 * (short.train.batch_size / 65536 * 10) ** 0.5, rel=0.01
    )
    assert experiments.fitted(config, vocab(20, 50)).optimizer.lr <= 0.4


def test_the_comparison_program_refuses_before_it_trains(common, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("optimizer: {name: Adafactor, args: {}}")
    (tmp_path / "good.yaml").write_text("optimizer: {name: Adam, lr: 0.01}")
    arguments = [
        str(tmp_path / "good.yaml"),
        str(tmp_path / "bad.yaml"),
        "--to",
        str(tmp_path / "out"),
        "--set",
        *common,
    ]
    assert experiments.main(arguments) == 2
    assert (
        "error: optimizer.name=Adafactor" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )
    assert (
        experiments.main(
            [
                str(tmp_path / "good.yaml"),
                "--to",
                str(tmp_path / "bad.yaml" / "out"),
                "--set",
                *common,
            ]
        )
        == 2
    )
    assert "bad.yaml/out/good-seed1: Not a directory; check the folder" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "good.yaml").write_text("optimizer: {name: Adam, lr: 0.02}")
    arguments = [
        str(tmp_path / "good.yaml"),
        str(tmp_path / "other" / "good.yaml"),
        "--to",
        str(tmp_path / "out"),
        "--set",
        *common,
    ]
    assert experiments.main(arguments) == 2
    assert (
        "other/good.yaml: another config is called good too" in capsys.readouterr().err
        and not (tmp_path / "out").exists()
    )


def test_the_comparison_program_leaves_what_it_says(common, tmp_path, capsys):
    (tmp_path / "fast.yaml").write_text("optimizer: {name: Adam, lr: 0.05}")
    assert (
        experiments.main(
            [
                str(tmp_path / "fast.yaml"),
                "--to",
                str(tmp_path / "out"),
                "--set",
                *common,
                "train.epochs=1",
            ]
        )
        == 0
    )
    run = comparison.read(tmp_path / "out" / "fast-seed1")
    assert (
        run.settings["train.batch_size"] < 65536 and run.settings["train.held_out_words"] == 100
    )  # fitted; what is set comes last
    said = capsys.readouterr().out
    assert str(tmp_path / "out") in said and (tmp_path / "out" / "table.txt").read_text() in said


def test_the_sweep_program_begins_at_the_config_and_says_what_it_should_be(
    common, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    axes = "--lr 0.01 0.02 --batch 64 --epochs 1".split()
    assert (
        sweep.main(
            [
                "Adam",
                *axes,
                "--to",
                str(tmp_path / "new"),
                "--set",
                *common,
                "optimizer.args.betas=[0.0,0.9]",
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    (tmp_path / "best.yaml").write_text(said.split("yaml:\n")[1])
    chosen = load_config([tmp_path / "best.yaml"])
    assert (
        chosen.optimizer.name == "Adam"
        and chosen.optimizer.args == {"betas": [0.0, 0.9]}
        and chosen.train.batch_size == 64
    )
    assert (
        chosen.optimizer.lr in (0.01, 0.02)
        and len((tmp_path / "new" / "adam.sweep.csv").read_text().splitlines()) == 3
    )


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("program", ["sweep", "experiments"])
def test_ctrl_c_ends_without_a_word(common, tmp_path, monkeypatch, capsys, program):
    asked = f"{program} {'adam' if program == 'sweep' else 'configs/optimizers/adam.yaml'} --to {tmp_path} --set".split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*asked, *common])
    monkeypatch.setattr(plan, "make_plan", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a script's background would ignore it
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        runpy.run_module(f"w2v.{program}", run_name="__main__")
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ended.type is SystemExit and ended.value.code == 130 and capsys.readouterr().err == ""


def grid(common, lrs, **axes):
    centre = load_config([], common)
    return sweep.grid(
        centre,
        [],
        [*common, "optimizer.name=Adam"],
        lrs,
        [64, 128],
        {key.replace("__", "."): v for key, v in axes.items()},
    )


def test_the_grid_is_every_combination(common):
    found = grid(common, [0.01, 0.02], optimizer__args__betas=[[0.0, 0.9], [0.5, 0.9]])
    assert len(found) == len({sweep.identity(config) for config in found}) == 8
    assert {(c.train.batch_size, c.optimizer.lr, c.optimizer.args["betas"][0]) for c in found} >= {
        (64, 0.01, 0.0),
        (128, 0.02, 0.5),
    }
    usual = grid(common, [])
    assert [c.optimizer.lr for c in usual[:3]] == [
        float(f"{0.4 / 32 * factor:.2g}") for factor in sweep.FACTORS
    ]


def test_a_sweep_tries_all_and_is_sure_of_the_best(common, trained, tmp_path):
    file, opened = tmp_path / "adam.sweep.csv", experiments.Opened()
    configs = grid(common, [0.001, 0.01])
    best = sweep.sweep(configs, [1, 2, 3], sweep.Results(file), opened)
    with file.open() as handle:
        lines = list(csv.DictReader(handle))
    assert len(lines) == len(trained) >= 4 + 2 and all(
        line["commit"] and line["device"] and line["command"] for line in lines
    )
    results = sweep.Results(file)
    assert set(results.lines[sweep.identity(best)]) == {1, 2, 3}
    assert all(
        results.worth(sweep.identity(best)) >= results.worth(sweep.identity(config))
        for config in configs
    )
    assert str(tmp_path) not in file.read_text()
    assert sweep.sweep(configs, [1, 2, 3], results, opened) == best and len(trained) == len(
        lines
    )  # nothing again
    shown = results.ranking(sweep.identity(best)).splitlines()
    assert len(shown) == 5 and shown[1].split()[:3] == [
        f"{best.optimizer.lr:g}",
        str(best.train.batch_size),
        "3",
    ]
    assert sweep.as_yaml(best).startswith("optimizer:\n  name: Adam\n")


def test_a_sweep_stops_in_time_and_goes_on(common, trained, tmp_path):
    configs, opened, clock = grid(common, [0.001, 0.01]), experiments.Opened(), -np.inf
    results = sweep.Results(tmp_path / "s.csv")
    assert sweep.sweep(configs, [1], results, opened, deadline=clock) is None and not trained
    assert sweep.sweep(configs[:1], [1], results, opened) is not None
    assert (
        sweep.sweep(configs, [1], sweep.Results(tmp_path / "s.csv"), opened) is not None
        and len(trained) == 4
    )


def test_what_diverges_is_no_best(common, tmp_path):
    wild = load_config(
        [], [*common, "optimizer.name=SGD", "optimizer.lr=1000", "train.batch_size=128"]
    )
    tame = replace(wild, optimizer=replace(wild.optimizer, lr=0.001))
    results = sweep.Results(tmp_path / "sgd.sweep.csv")
    assert sweep.sweep([wild], [1, 2], results, experiments.Opened()) is None
    assert sweep.sweep([wild, tame], [1], results, experiments.Opened()) == tame
    assert "diverged" in results.ranking(sweep.identity(tame))


@pytest.mark.parametrize(
    "given, axes",
    [
        (
            "optimizer.args.betas=[0,0.9],[0.5,0.9]",
            {"optimizer.args.betas": [[0, 0.9], [0.5, 0.9]]},
        ),
        ("optimizer.args.eps=1e-6,1e-3", {"optimizer.args.eps": [1e-6, 1e-3]}),
        ("corpus.path=/a b/c.txt", {"corpus.path": ["/a b/c.txt"]}),
        ("transfer.engine=resident", {"transfer.engine": ["resident"]}),
    ],
)
def test_values_are_split_at_commas_outside_brackets(given, axes):
    assert sweep.axes_of([given]) == axes


@pytest.mark.parametrize("given", ["optimizer.lr", "optimizer.lr=", "optimizer.args.betas=[0"])
def test_what_is_no_setting_is_refused(given):
    with pytest.raises(ConfigError, match="section.key=value"):
        sweep.axes_of([given])


def test_the_identity_has_no_seed_and_no_place(common):
    config = load_config([], common)
    other = replace(
        config,
        train=replace(config.train, seed=7),
        corpus=replace(config.corpus, data_dir="x", path="y/text.txt"),
    )
    assert sweep.identity(config) == sweep.identity(other)
    assert sweep.identity(config) != sweep.identity(
        replace(config, model=replace(config.model, window=3))
    )
    assert set(sweep.APART) <= set(config_keys()) and Config().train.seed == 1


def test_an_unknown_optimizer_is_answered_with_a_near_one(capsys):
    assert sweep.main(["Adamx"]) == 2
    assert "did you mean adam" in capsys.readouterr().err
