"""Plots show the runs and words they should; errors name the remedy."""

import itertools

import numpy as np
import pytest
from matplotlib.image import imread

import evaluate
from tests.support.planted import kv_of
from tests.support.runs import write_run
from w2v.vectors import export, plots
from w2v.vectors.runs import picture_path


def two_clouds(n=30, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    centers = np.repeat(np.eye(2, dim), n, axis=0)
    return (centers + 0.05 * rng.standard_normal((2 * n, dim))).astype(np.float32)


@pytest.fixture
def folder(tmp_path):
    """A folder with vectors whose words matplotlib could take for formulas."""
    export.save(kv_of([f"w{row}$_^" for row in range(60)], two_clouds()), tmp_path, ["kv"])
    return tmp_path


def test_projection_keeps_clouds_apart_and_is_repeatable():
    places, _ = plots.project(two_clouds())
    clouds = places[:30], places[30:]
    radius = max(np.linalg.norm(cloud - cloud.mean(0), axis=1).mean() for cloud in clouds)
    assert np.linalg.norm(clouds[0].mean(0) - clouds[1].mean(0)) > 2 * radius
    assert np.array_equal(places, plots.project(two_clouds())[0])


def test_map_is_drawn(folder, capsys):
    assert evaluate.main(["map", str(folder), "--words", "40"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "map.png")
    drawn = imread(folder / "map.png")
    assert drawn.shape[:2] == (1680, 1680) and drawn[..., :3].min() < 0.2


def test_map_has_the_format_of_its_file_name(folder, tmp_path):
    file = tmp_path / "map.svg"
    assert evaluate.main(["map", str(folder), "--words", "40", "--to", str(file)]) == 0
    assert "<svg" in file.read_text()


def test_letters_missing_from_the_font_are_logged_once(tmp_path, caplog, recwarn):
    words = [chr(0x4E00 + number) for number in range(60)]
    plots.word_map(kv_of(words, two_clouds()), tmp_path / "map.png", 60)
    (message,) = caplog.messages
    assert "missing from font" in message and "font.family" in message and not recwarn.list


def test_frequent_words_are_named_first_and_beside_their_dots():
    axis = plots._figure(4, 4).subplots()
    # More names for one place than its four corners have room for.
    places = np.array([[0, 0]] * 6 + [[1, 1], [0.0, 0.001]])
    axis.scatter(*places.T)
    words = [f"word{number}" for number in range(8)]
    assert plots._name_dots(axis, places, words, ["k"] * 8) == 5
    assert [text.get_text() for text in axis.texts] == ["word0", "word1", "word2", "word3", "word6"]
    boxes = [text.get_window_extent() for text in axis.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_groups_are_those_of_the_vectors():
    _, found = plots.project(two_clouds())
    assert not set(found[:30]) & set(found[30:]) and max(found) < len(plots.COLORS)


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_pictures_of_several_runs_have_a_folder(tmp_path, names):
    folders = [tmp_path / name for name in names]
    expected = tmp_path / ("a" if len(names) == 1 else "pictures") / "x.png"
    assert picture_path(folders, "x.png") == expected
    assert picture_path(folders, "x.png", tmp_path) == tmp_path / "x.png"
    assert picture_path(folders, "x.png", tmp_path / "y.png") == tmp_path / "y.png"


def test_curves_of_finished_and_unfinished_runs(tmp_path):
    lines = [
        {"words": n, "seconds": n / 10, "loss": 3 / n, "words_per_s": 10, "lr": 0.1}
        for n in (1, 2, 3)
    ]
    total = {"accuracy": 0.5, "counted": 8}
    scores = {"words": 3, "seconds": 0.3, "held_out_loss": None, "analogies": {"total": total}}
    write_run(tmp_path / "done", scores, metrics=lines)
    write_run(tmp_path / "running $^$", metrics=lines)  # no formula
    file = tmp_path / "x" / "two.png"
    assert evaluate.main(["plot", str(tmp_path), "--to", str(file)]) == 0
    # Loss, analogies and below them speed: the panels that the runs have.
    assert imread(file).shape[:2] == (2 * 540 + 2 * 24, 2 * 780)


def test_runs_of_equal_names_have_a_line_each(tmp_path, monkeypatch):
    folders = [str(write_run(tmp_path / name / "adam")) for name in ("text8", "novels")]
    drawn = []
    monkeypatch.setattr(plots, "curves", lambda runs, file: drawn.extend(runs))
    assert evaluate.main(["plot", *folders]) == 0
    assert drawn == folders


def test_what_cannot_be_drawn_is_refused(folder, capsys):
    empty = write_run(folder / "empty")
    for argv, message in (
        (["map", str(folder), "--words", "3"], "a map of 3 words"),
        (["plot", str(empty)], "metrics.jsonl of empty is empty"),
    ):
        assert evaluate.main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
