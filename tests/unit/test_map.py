"""The map shows the words that it should; errors name the remedy."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

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
    """A folder with vectors whose words XML could take for elements."""
    export.save(kv_of([f"w{row}<a>&" for row in range(60)], two_clouds()), tmp_path, ["kv"])
    return tmp_path


def test_projection_keeps_clouds_apart_and_is_repeatable():
    places, _ = report.project(two_clouds())
    clouds = places[:30], places[30:]
    radius = max(np.linalg.norm(cloud - cloud.mean(0), axis=1).mean() for cloud in clouds)
    assert np.linalg.norm(clouds[0].mean(0) - clouds[1].mean(0)) > 2 * radius
    assert np.array_equal(places, report.project(two_clouds())[0])


def names_and_dots(file):
    """Return the named words with their places, and the words of all dots."""
    root = ElementTree.parse(file).getroot()
    tag = "{http://www.w3.org/2000/svg}"
    names = [(text.text, text.attrib) for text in root.iter(f"{tag}text")]
    return names, [title.text for title in root.iter(f"{tag}title")]


def test_map_is_drawn(folder, capsys):
    assert evaluate.main(["map", str(folder), "--words", "40"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "map.svg")
    names, dots = names_and_dots(folder / "map.svg")
    assert dots == [f"w{row}<a>&" for row in range(40)]
    assert names[0][0] == dots[0] and {name for name, _ in names} < set(dots)


def test_other_pictures_than_svg_are_refused(folder, capsys):
    assert evaluate.main(["map", str(folder), "--to", str(folder / "map.png")]) == 2
    assert "map.png is not an SVG file" in capsys.readouterr().err


def test_a_map_is_a_part_of_the_map_of_the_report(tmp_path):
    kv = kv_of([f"w{row}" for row in range(60)], two_clouds())
    file = report.word_map(kv, tmp_path / "map.svg", 40)
    dots = np.array(re.findall('cx="(.*?)" cy="(.*?)"', file.read_text()), float)
    places = report.project(two_clouds())[0][:40] * [1, -1]  # SVG counts from the top
    scaled = (places - places.min(0)) / np.ptp(places, axis=0)
    assert dots == pytest.approx(
        report.MARGIN + (report.SIDE - 2 * report.MARGIN) * scaled, abs=0.1
    )


def test_names_do_not_cover_each_other(tmp_path, monkeypatch):
    places = np.array([[0, 0], [0, 0.01], [0.5, 0.5], [1, 1], [0.501, 0.5]])
    monkeypatch.setattr(report, "project", lambda _: (places, np.zeros(5, int)))
    words = ["first", "hidden", "\u4e00" * 40, "last", "wide"]
    file = report.word_map(kv_of(words, np.eye(5, dtype=np.float32)), tmp_path / "map.svg", 5)
    names, dots = names_and_dots(file)
    assert [name for name, _ in names] == ["first", "\u4e00" * 40, "last"] and dots == words
    assert float(names[0][1]["font-size"]) > float(names[2][1]["font-size"]) - 1


def test_further_words_are_placed_among_their_neighbors(monkeypatch):
    monkeypatch.setattr(report, "LANDMARKS", 40)  # of 30 words in each cloud
    mixed = two_clouds().reshape(2, 30, 8).transpose(1, 0, 2).reshape(60, 8)
    places, groups = report.project(mixed)
    assert places.shape == (60, 2) and len(groups) == 60
    centers = [places[cloud:40:2].mean(0) for cloud in (0, 1)]
    for row in range(40, 60):
        own, other = (np.linalg.norm(places[row] - centers[n]) for n in (row % 2, 1 - row % 2))
        assert own < other / 2


def test_groups_are_those_of_the_vectors():
    _, found = report.project(two_clouds())
    assert not set(found[:30]) & set(found[30:]) and max(found) < report.GROUPS


@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_pictures_of_several_runs_are_beside_them(tmp_path, names):
    folders = [tmp_path / name for name in names]
    expected = tmp_path / "a" if len(names) == 1 else tmp_path
    assert picture_path(folders, "x.png") == expected / "x.png"
    assert picture_path(folders, "x.png", tmp_path) == tmp_path / "x.png"
    assert picture_path(folders, "x.png", tmp_path / "y.png") == tmp_path / "y.png"


def test_too_few_words_and_equal_ones_are_refused(folder, capsys):
    (folder / "few").mkdir()
    export.save(kv_of(["a", "b", "c"], two_clouds()[:3]), folder / "few", ["kv"])
    assert evaluate.main(["map", str(folder / "few")]) == 2
    error = capsys.readouterr().err
    assert "a map of 3 words" in error and error.count("\n") == 1
    for row in (np.ones(8), np.zeros(8), np.full(8, 3e38), np.full(8, np.nan)):
        export.save(kv_of(list("abcd"), np.tile(row, (4, 1))), folder / "few", ["kv"])
        assert evaluate.main(["map", str(folder / "few")]) == 2
        assert "a map of 4 equal vectors shows nothing" in capsys.readouterr().err
    for kind in "248":  # bytes of a number
        sound = report._sound(np.array([[1, np.inf, np.nan, 6e4]], f"f{kind}"))
        assert sound.dtype == np.float32 and sound.tolist() == [[1, 0, 0, 6e4]]
