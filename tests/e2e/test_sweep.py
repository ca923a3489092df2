"""Searching an optimizer's settings: grid, results file, best setting."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest

from w2v.api import cli, sweep
from w2v.api.sweep import Results, Setting
from w2v.config import ConfigError, config_keys, load_config
from w2v.vectors.datasets import Further

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


def grid(common, lrs, axes=None):
    settings = sweep.parse_axes([*common, "optimizer.name=Adam"])
    centre = load_config([], [*common, "optimizer.lr=0.4"])
    return sweep.grid(centre, [], lrs, [64, 128], settings | (axes or {}))


def test_the_program_prints_the_best_settings_as_yaml(common, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = ["Adam", *"--lr 0.01 0.02 --batch 64 --epochs 1 --to".split(), str(tmp_path)]
    settings = ["--set", *common, "optimizer.args.betas=[0.0,0.9]"]
    assert cli.main(["sweep", *arguments, *settings]) == 0
    (tmp_path / "best.yaml").write_text(capsys.readouterr().out.split("yaml:\n")[1])
    best = load_config([tmp_path / "best.yaml"])
    assert best.optimizer.name == "Adam"
    assert best.optimizer.args["betas"] == [0.0, 0.9]
    assert best.optimizer.lr in (0.01, 0.02)
    assert best.train.batch_size == 64
    assert len((tmp_path / "adam.sweep.csv").read_text().splitlines()) == 3


def test_the_grid_has_every_combination(common):
    found = grid(common, [0.01, 0.02], {"optimizer.args.betas": [[0.0, 0.9], [0.5, 0.9]]})
    assert len(found) == len({Setting.of(config) for config in found}) == 8
    points = {(c.train.batch_size, c.optimizer.lr, c.optimizer.args["betas"][0]) for c in found}
    assert points >= {(64, 0.01, 0.0), (128, 0.02, 0.5)}
    default = [config.optimizer.lr for config in grid(common, [])[:3]]
    assert default == [float(f"{0.4 * factor:.2g}") for factor in sweep.LR_FACTORS]


def test_all_settings_get_one_seed_and_the_best_gets_all(common, trained, tmp_path):
    file = tmp_path / "adam.sweep.csv"
    configs = grid(common, [0.001, 0.01])
    best = sweep.sweep(configs, [1, 2, 3], Results(file))
    lines = list(csv.DictReader(file.read_text().splitlines()))
    assert len(lines) == len(trained) >= 4 + 2
    assert all(line["commit"] and line["device"] and line["command"] for line in lines)
    assert str(tmp_path) not in file.read_text()

    results = Results(file)
    assert sorted(results.seeds(Setting.of(best))) == [1, 2, 3]
    qualities = [results.quality(Setting.of(config)) for config in configs]
    assert results.quality(Setting.of(best)) == max(qualities)
    assert sweep.sweep(configs, [1, 2, 3], results) == best
    assert len(trained) == len(lines)  # nothing is trained again

    ranking = results.ranking(Setting.of(best)).splitlines()
    assert len(ranking) == 5
    first = [f"{best.optimizer.lr:g}", str(best.train.batch_size), "3"]
    assert ranking[1].split()[:3] == first


def test_a_sweep_stops_at_the_deadline_and_continues(common, trained, tmp_path):
    configs, file = grid(common, [0.001, 0.01]), tmp_path / "adam.sweep.csv"
    assert sweep.sweep(configs, [1], Results(file), deadline=-math.inf) is None
    assert not trained
    assert sweep.sweep(configs[:1], [1], Results(file)) == configs[0]
    assert sweep.sweep(configs, [1], Results(file)) is not None
    assert len(trained) == 4


def test_a_diverged_setting_is_not_the_best(common, tmp_path):
    settings = [*common, "optimizer.name=SGD", "optimizer.lr=1000", "train.batch_size=128"]
    diverging = load_config([], settings)
    stable = replace(diverging, optimizer=replace(diverging.optimizer, lr=0.001))
    results = Results(tmp_path / "sgd.sweep.csv")
    assert sweep.sweep([diverging], [1, 2], results) is None
    assert sweep.sweep([diverging, stable], [1], results) == stable
    assert "diverged" in results.ranking(Setting.of(stable))


def test_results_are_kept_when_one_is_added(tmp_path):
    file = tmp_path / "adam.sweep.csv"
    for lr in ("0.1", "0.2"):
        before = file.read_text() if file.exists() else ""
        Results(file).add(Setting("text", "5", "", "64", lr), 1, {"analogies": 0.5}, "a CPU")
        assert file.read_text().startswith(before)
    assert file.read_text().count("\n") == 3


def test_settings_are_ranked_by_all_sets_on_all_corpora(common, tmp_path):
    (tmp_path / "pairs.tsv").write_text("red\tblue\t9\nred\tone\t1\ngreen\ttwo\t0\n")
    (path,) = [setting for setting in common if setting.startswith("corpus.path=")]
    text = path.partition("=")[2]
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text().upper())
    config = grid(common, [0.01])[0]
    further = Further(pairs=[tmp_path / "pairs.tsv"])
    results = Results(tmp_path / "adam.sweep.csv")
    assert sweep.sweep([config], [1], results, corpora=[text, str(other)], further=further)
    setting = Setting.of(config, [text, str(other)])
    assert setting.corpus == f"{text.rpartition('/')[2]}+other.txt"
    (quality,) = results.values(setting, "quality")
    assert results.quality(setting)[0] == quality != 0  # of the pairs: no word is Google's


def test_results_with_other_columns_are_refused(tmp_path):
    (tmp_path / "old.csv").write_text("corpus,lr\ntext,0.1\n")
    with pytest.raises(ConfigError, match="old.csv has other columns .* --to"):
        Results(tmp_path / "old.csv")


@pytest.mark.parametrize(
    "key, values, expected",
    [
        ("optimizer.args.betas", "[0,0.9],[0.5,0.9]", [[0, 0.9], [0.5, 0.9]]),
        ("optimizer.args.eps", "1e-6,1e-3", [1e-6, 1e-3]),
        ("corpus.path", "/a b/c.txt", ["/a b/c.txt"]),
        ("transfer.engine", "resident", ["resident"]),
    ],
)
def test_axis_values_are_split_at_commas_outside_brackets(key, values, expected):
    assert sweep.parse_axes([f"{key}={values}"]) == {key: expected}


@pytest.mark.parametrize("text", ["optimizer.lr", "optimizer.lr=", "optimizer.args.betas=[0"])
def test_an_axis_without_values_is_refused(text):
    with pytest.raises(ConfigError, match="section.key=value"):
        sweep.parse_axes([text])


def test_a_setting_leaves_out_seed_and_folders(common):
    config = load_config([], common)
    moved = replace(config.corpus, data_dir="x", path="y/text.txt")
    other = replace(config, train=replace(config.train, seed=7), corpus=moved)
    assert Setting.of(config) == Setting.of(other)
    narrower = replace(config, model=replace(config.model, window=3))
    assert Setting.of(config) != Setting.of(narrower)
    assert all(any(key.startswith(own) for key in config_keys()) for own in sweep.NO_SETTINGS)


def test_an_unknown_optimizer_gets_a_suggestion(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["sweep", "Adamx"]) == 2
    assert "did you mean configs/optimizers/adam" in capsys.readouterr().err
