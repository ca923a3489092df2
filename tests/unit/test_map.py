"""The map shows the words that it should; errors name the remedy."""

import itertools
from importlib import import_module

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

import evaluate
from tests.support.planted import kv_of
from w2v.vectors import export, report
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
    places, _ = report.project(two_clouds())
    clouds = places[:30], places[30:]
    radius = max(np.linalg.norm(cloud - cloud.mean(0), axis=1).mean() for cloud in clouds)
    assert np.linalg.norm(clouds[0].mean(0) - clouds[1].mean(0)) > 2 * radius
    assert np.array_equal(places, report.project(two_clouds())[0])


def test_map_is_drawn(folder, capsys):
    assert evaluate.main(["map", str(folder), "--words", "40"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "map.png")
    drawn = imread(folder / "map.png")
    assert drawn.shape[:2] == (1680, 1680) and drawn[..., :3].min() < 0.2


def test_map_has_the_format_of_its_file_name(folder, tmp_path):
    file = tmp_path / "map.svg"
    assert evaluate.main(["map", str(folder), "--words", "40", "--to", str(file)]) == 0
    assert "<svg" in file.read_text()


def test_letters_have_an_installed_font_or_are_logged(tmp_path, monkeypatch, caplog, recwarn):
    words = [chr(0x4E00 + number) for number in range(60)]
    manager = import_module("matplotlib.font_manager")
    monkeypatch.setattr(manager, "findSystemFonts", list)
    report.word_map(kv_of(words, two_clouds()), tmp_path / "map.png", 60)
    (message,) = caplog.messages
    assert "no font has '一'; install one" in message and not recwarn.list
    monkeypatch.undo()
    fonts = [path for path in manager.findSystemFonts() if "CJK" in path]
    if fonts:  # as on a desktop
        monkeypatch.setattr(manager, "findSystemFonts", lambda: [str(tmp_path / "no.ttf"), *fonts])
        assert len(report._fonts("".join(words))) == 2 and len(caplog.messages) == 1


def test_a_map_is_a_part_of_the_map_of_the_report(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(report, "_name_dots", lambda axis, places, *_: drawn.append(places) or 0)
    kv = kv_of([f"w{row}" for row in range(60)], two_clouds())
    report.word_map(kv, tmp_path / "map.png", 40)
    assert np.array_equal(drawn[0], report.project(two_clouds())[0][:40])


def test_further_words_are_placed_among_their_neighbors(monkeypatch):
    monkeypatch.setattr(report, "LANDMARKS", 40)  # of 30 words in each cloud
    mixed = two_clouds().reshape(2, 30, 8).transpose(1, 0, 2).reshape(60, 8)
    places, groups = report.project(mixed)
    assert places.shape == (60, 2) and len(groups) == 60
    centers = [places[cloud:40:2].mean(0) for cloud in (0, 1)]
    for row in range(40, 60):
        own, other = (np.linalg.norm(places[row] - centers[n]) for n in (row % 2, 1 - row % 2))
        assert own < other / 2


def test_frequent_words_are_named_first_and_beside_their_dots():
    figure = Figure(figsize=(4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    # More names for one place than its four corners have room for.
    places = np.array([[0, 0]] * 6 + [[1, 1], [0.0, 0.001]])
    axis.scatter(*places.T)
    words = [f"word{number}" for number in range(8)]
    assert report._name_dots(axis, places, words, ["k"] * 8) == 5
    assert [text.get_text() for text in axis.texts] == ["word0", "word1", "word2", "word3", "word6"]
    boxes = [text.get_window_extent() for text in axis.texts]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_groups_are_those_of_the_vectors():
    _, found = report.project(two_clouds())
    assert not set(found[:30]) & set(found[30:]) and max(found) < report.GROUPS


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_pictures_of_several_runs_have_a_folder(tmp_path, names):
    folders = [tmp_path / name for name in names]
    expected = tmp_path / ("a" if len(names) == 1 else "pictures") / "x.png"
    assert picture_path(folders, "x.png") == expected
    assert picture_path(folders, "x.png", tmp_path) == tmp_path / "x.png"
    assert picture_path(folders, "x.png", tmp_path / "y.png") == tmp_path / "y.png"


def test_too_few_words_are_refused(folder, capsys):
    (folder / "few").mkdir()
    export.save(kv_of(["a", "b", "c"], two_clouds()[:3]), folder / "few", ["kv"])
    assert evaluate.main(["map", str(folder / "few")]) == 2
    error = capsys.readouterr().err
    assert "a map of 3 words" in error and error.count("\n") == 1
