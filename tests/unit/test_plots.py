"""Plots show the runs and words they should; errors name the remedy."""

import sys

import numpy as np
import pytest

import evaluate
from tests.support.planted import kv_of
from tests.support.runs import write_run
from w2v.vectors import export, plots

imread = pytest.importorskip("matplotlib.image").imread
pytest.importorskip("sklearn")


def two_clouds(n=30, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    centers = np.repeat(np.eye(2, dim), n, axis=0)
    return (centers + 0.05 * rng.standard_normal((2 * n, dim))).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """A folder with vectors whose words matplotlib could take for formulas."""
    export.save(kv_of([f"w{row}$_^" for row in range(60)], two_clouds()), tmp_path, ["kv"])
    return tmp_path


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_projection_keeps_clouds_apart_and_is_repeatable(method):
    places = plots.project(two_clouds(), method)
    clouds = places[:30], places[30:]
    radius = max(np.linalg.norm(cloud - cloud.mean(0), axis=1).mean() for cloud in clouds)
    assert np.linalg.norm(clouds[0].mean(0) - clouds[1].mean(0)) > 2 * radius
    assert np.array_equal(places, plots.project(two_clouds(), method))


@pytest.mark.parametrize("method", ["tsne", "pca"])
def test_map_is_drawn(folder, capsys, method):
    assert evaluate.main(["map", str(folder), "--words", "40", "--by", method]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "map.png")
    drawn = imread(folder / "map.png")
    assert drawn.shape[:2] == (1680, 1680) and drawn[..., :3].min() < 0.2


def test_letters_missing_from_the_font_are_logged_once(tmp_path, caplog, recwarn):
    words = [chr(0x4E00 + number) for number in range(60)]
    plots.word_map(kv_of(words, two_clouds()), tmp_path / "map.png", 60, "pca")
    (message,) = caplog.messages
    assert "missing from font" in message and "font.family" in message and not recwarn.list


def test_frequent_words_are_named_first():
    axis = plots._figure(4, 4).subplots()
    places = np.array([[0, 0], [0, 0], [1, 1], [0.0, 0.001]])
    axis.scatter(*places.T)
    assert plots._name_dots(axis, places, ["first", "second", "third", "fourth"]) == 2
    assert [text.get_text() for text in axis.texts] == ["first", "third"]


def test_curves_of_finished_and_unfinished_runs(tmp_path):
    lines = [
        {"words": n, "seconds": n / 10, "loss": 3 / n, "words_per_s": 10, "lr": 0.1}
        for n in (1, 2, 3)
    ]
    total = {"accuracy": 0.5}
    scores = {"words": 3, "seconds": 0.3, "held_out_loss": None, "analogies": {"total": total}}
    write_run(tmp_path / "done", scores, metrics=lines)
    write_run(tmp_path / "running", metrics=lines)
    file = tmp_path / "x" / "two.png"
    assert evaluate.main(["plot", str(tmp_path), "--to", str(file)]) == 0
    # Loss, analogies and below them speed: the panels that the runs have.
    assert imread(file).shape[:2] == (2 * 540 + 2 * 24, 2 * 780)


def test_what_cannot_be_drawn_is_refused(folder, capsys):
    empty = write_run(folder / "empty")
    for argv, message in (
        (["map", str(folder), "--words", "3"], "a map of 3 words"),
        (["plot", str(empty)], "metrics.jsonl of empty is empty"),
        (["map", str(folder), "--to", str(empty)], f"{empty} is a folder; name a file"),
    ):
        assert evaluate.main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "package"),
    [("matplotlib.figure", "matplotlib"), ("sklearn.manifold", "scikit-learn")],
)
def test_a_missing_package_is_named(folder, capsys, monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    assert evaluate.main(["map", str(folder)]) == 2
    assert f"pip install {package}" in capsys.readouterr().err
    assert not (folder / "map.png").exists()
