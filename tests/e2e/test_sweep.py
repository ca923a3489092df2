"""Searching an optimizer's settings: the grid, what is trained, the best."""

import itertools
import re
from argparse import Namespace
from pathlib import Path

import pytest

from tests.support.each_case import each_case
from w2v.api import cli, sweep
from w2v.config import ConfigError, as_assignment, load_config
from w2v.vectors.datasets import Further
from w2v.vectors.runs import find_all, quality, read

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
BETAS = "optimizer.args.betas=[0.0,0.9]"
pytestmark = pytest.mark.usefixtures("one_thread")


def grid(common, *settings, corpora=(), name="adam"):
    given = Namespace(base=CONFIGS / "text8.yaml", corpora=corpora)
    return sweep.grid(CONFIGS / "optimizers" / f"{name}.yaml", [*common, *settings], given)


def test_the_program_prints_the_best_settings_as_yaml(
    common, undrawn, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    lrs = ["optimizer.lr=0.01,0.02", "train.batch_size=64", "train.epochs=1"]
    other = tmp_path / "other.txt"
    (text,) = [name.partition("=")[2] for name in common if name.startswith("corpus.path=")]
    other.write_text(Path(text).read_text().upper())
    settings = [*common, *lrs, "model.window=3", BETAS]
    for path in (other, text):  # only runs on the text at hand are ranked
        command = ["sweep", "Adam", "--to", str(tmp_path), *settings, f"corpus.path={path}"]
        assert cli.main(command) == 0
    printed = capsys.readouterr().out
    (tmp_path / "best.yaml").write_text(printed.split("yaml:\n")[-1])
    best = load_config([tmp_path / "best.yaml"])
    assert best.optimizer.name == "Adam"
    assert best.optimizer.args["betas"] == [0.0, 0.9]
    assert best.optimizer.lr in (0.01, 0.02)
    assert best.train.batch_size == 64
    assert (best.model.window, best.train.epochs) == (3, 1)
    table = (tmp_path / "sweep-adam" / "table.md").read_text()
    assert len(re.findall(r"^\|", table, re.M)) == 4


def test_the_grid_has_every_combination(common):
    batches = "train.batch_size=64,128"
    betas = "optimizer.args.betas=[0.0,0.9],[0.5,0.9]"
    found = grid(common, "optimizer.lr=0.01,0.02", batches, betas).values()
    points = {(c.train.batch_size, c.optimizer.lr, c.optimizer.args["betas"][0]) for c in found}
    assert len(found) == len(points) == 8
    assert points >= {(64, 0.01, 0.0), (128, 0.02, 0.5)}
    around = grid(common, "train.batch_size=64", BETAS).values()
    low, usual, high = (config.optimizer.lr for config in around)
    assert (low, high) == (float(f"{0.6 * usual:.2g}"), float(f"{1.6 * usual:.2g}"))


def test_values_that_differ_in_their_sign_are_two_points(common):
    fixed = ["optimizer.lr=0.01", "train.batch_size=64", BETAS]
    found = grid(common, *fixed, "model.ns_exponent=-0.5,0.5").values()
    assert {config.model.ns_exponent for config in found} == {-0.5, 0.5}
    assert len({config.run.name for config in found}) == 2


def test_arguments_that_are_given_as_a_whole_are_not_searched(common):
    settings = ["optimizer.lr=0.01", "train.batch_size=64", "optimizer.args={eps: 0.5}"]
    (config,) = grid(common, *settings).values()
    assert config.optimizer.args == {"eps": 0.5}


def test_all_settings_get_one_seed_and_the_best_gets_all(common, trained, tmp_path):
    configs = grid(common, "optimizer.lr=0.001,0.01", "train.batch_size=64,128", BETAS)
    best = sweep.sweep(configs, [1, 1, 2, 3], tmp_path)
    found = [read(folder) for folder in find_all([tmp_path])]
    assert len(found) == len(trained) >= 4 + 2
    points = {}
    for run in found:
        points.setdefault(run.settings["run.name"], []).append(run)
    seeds = [run.settings["train.seed"] for run in points[best.run.name]]
    assert sorted(seeds) == [1, 2, 3]
    assert quality(points[best.run.name]) == max(map(quality, points.values()))
    assert not list(tmp_path.glob("*/vectors.kv"))
    assert sweep.sweep(configs, [1, 2, 3], tmp_path) == best
    assert len(trained) == len(found)  # nothing is trained again


def test_a_diverged_setting_is_not_the_best(common, tmp_path):
    settings = ["optimizer.lr=1000,0.001", "optimizer.occurrence_cap=0", "train.batch_size=128"]
    diverging, stable = grid(common, *settings, name="sgd").items()
    assert sweep.sweep(dict([diverging]), [1, 2], tmp_path) is None
    assert sweep.sweep(dict([diverging, stable]), [1], tmp_path) == stable[1]


def test_settings_are_ranked_by_all_sets_on_all_corpora(common, tmp_path):
    words = itertools.combinations("king queen man woman boy".split(), 2)
    pairs = [f"{first}\t{second}\t{rank}\n" for rank, (first, second) in enumerate(words)]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    (text,) = [name.partition("=")[2] for name in common if name.startswith("corpus.path=")]
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text().upper())
    settings = ["optimizer.lr=0.01", "train.batch_size=64", BETAS]
    configs = grid(common, *settings, corpora=[text, str(other)])
    assert {config.run.name for config in configs.values()} == {"adam"}
    further = Further(pairs=[tmp_path / "pairs.tsv"])
    assert sweep.sweep(configs, [1], tmp_path / "runs", further)
    found = [read(folder) for folder in find_all([tmp_path / "runs"])]
    assert {run.settings["corpus.path"] for run in found} == {text, str(other)}
    assert quality(found)[0] != 0  # of the pairs: no word is Google's


@each_case(
    "key, values, expected",
    [
        ("optimizer.args.betas", "[0,0.9],[0.5,0.9]", [[0, 0.9], [0.5, 0.9]]),
        ("optimizer.args.eps", "1e-6,1e-3", [1e-6, 1e-3]),
        ("corpus.path", "/a b/c.txt", ["/a b/c.txt"]),
        ("transfer.engine", "resident", ["resident"]),
        ("corpus.path", "2024.10,\U0001f600.txt", ["2024.10", "\U0001f600.txt"]),
    ],
)
def test_axis_values_are_split_at_commas_outside_brackets(key, values, expected):
    assert sweep.parse_axes([f"{key}={values}"]) == {key: expected}
    for value in expected if key == "corpus.path" else ():
        assert load_config([], [as_assignment(key, value)]).corpus.path == (value,)


@each_case("text", ["optimizer.lr", "optimizer.lr=", "optimizer.args.betas=[0"])
def test_an_axis_without_values_is_refused(text):
    with pytest.raises(ConfigError, match="section.key=value"):
        sweep.parse_axes([text])
