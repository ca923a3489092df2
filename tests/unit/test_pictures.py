"""Pictures: what they show is there, places follow meaning, and what cannot be drawn is said in one line."""

import json
import sys

import numpy as np
import pytest
import torch

import evaluate
from w2v.vectors import export
from w2v.vectors import plots as pictures

imread = pytest.importorskip("matplotlib.image").imread


def two_clouds(n=30, dim=8, seed=0):
    rng = np.random.default_rng(seed)
    centers = np.repeat(np.eye(2, dim), n, axis=0)
    return (centers + 0.05 * rng.standard_normal((2 * n, dim))).astype(np.float32)


def kv_of(vectors):
    words = [f"w{number}$_^" for number in range(len(vectors))]
    return export.keyed_vectors(words, np.arange(len(vectors), 0, -1), vectors)


@pytest.mark.parametrize("place", [pictures.tsne, lambda values: pictures.principal(values, 2)])
def test_clouds_lie_apart(place):
    torch.set_num_threads(1)
    found = place(torch.from_numpy(two_clouds())).numpy()
    one, two = found[:30], found[30:]
    apart = np.linalg.norm(one.mean(0) - two.mean(0))
    assert apart > 2 * max(
        np.linalg.norm(cloud - cloud.mean(0), axis=1).mean() for cloud in (one, two)
    )


def test_tsne_keeps_neighbours_where_two_components_cannot():
    rng = np.random.default_rng(1)
    topic = np.arange(60) % 6
    values = torch.from_numpy(
        (np.eye(6)[topic] + 0.1 * rng.standard_normal((60, 6))).astype(np.float32)
    )

    def nearest_is_of_the_topic(places):
        away = torch.cdist(places, places).fill_diagonal_(torch.inf)
        return (topic[away.argmin(1).numpy()] == topic).mean()

    by_tsne, by_components = (
        nearest_is_of_the_topic(pictures.tsne(values)),
        nearest_is_of_the_topic(pictures.principal(values, 2)),
    )
    assert by_tsne == 1 > by_components


def test_entropy_of_the_neighbourhoods_is_as_wanted():
    values = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    shares = pictures._affinities(torch.cdist(values, values).square())
    assert float(shares.sum()) == pytest.approx(1, abs=1e-5) and torch.equal(shares, shares.T)


@pytest.mark.parametrize("by", ["tsne", "pca"])
def test_map_is_drawn_and_names_do_not_overlap(tmp_path, capsys, by):
    export.save(kv_of(two_clouds()), tmp_path, ["kv"])
    assert evaluate.main(["map", str(tmp_path), "--words", "40", "--by", by]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "map.png")
    drawn = imread(tmp_path / "map.png")
    assert drawn.shape[:2] == (1680, 1680) and drawn[..., :3].min() < 0.2


def test_letters_that_the_font_lacks_are_told_once(tmp_path, caplog, recwarn):
    words = [chr(0x4E00 + number) for number in range(60)]
    pictures.word_map(
        export.keyed_vectors(words, np.ones(60, int), two_clouds()), tmp_path / "map.png", 60
    )
    (message,) = caplog.messages
    assert (
        "missing from font" in message
        and "such warnings; a line such as 'font.family" in message
        and not recwarn.list
    )


def test_frequent_words_are_named_first(tmp_path):
    figure = pictures._figure(4, 4)
    axis = figure.subplots()
    places = np.array([[0, 0], [0, 0], [1, 1], [0.0, 0.001]])
    axis.scatter(*places.T)
    assert pictures._name_dots(axis, places, ["first", "second", "third", "fourth"]) == 2
    assert [text.get_text() for text in axis.texts] == ["first", "third"]


def write_run(folder, lines, scores=None, tail=""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    if scores:
        (folder / "scores.json").write_text(json.dumps(scores))
    return folder


def test_curves_of_finished_and_unfinished_runs(tmp_path, capsys):
    lines = [
        {"words": n, "seconds": n / 10, "loss": 3 / n, "words_per_s": 10, "lr": 0.1}
        for n in (1, 2, 3)
    ]
    scores = {
        "words": 3,
        "seconds": 0.3,
        "held_out_loss": None,
        "analogies": {"total": {"accuracy": 0.5}},
    }
    done, running = (
        write_run(tmp_path / "done", lines, scores),
        write_run(tmp_path / "running", lines, tail='{"words": 4'),
    )
    assert pictures.read_metrics(running) == lines
    assert pictures.read_metrics(done)[-1]["analogies"] == 0.5
    assert (
        evaluate.main(["plot", str(done), str(running), "--to", str(tmp_path / "x" / "two.png")])
        == 0
    )
    assert imread(tmp_path / "x" / "two.png").shape[:2] == (
        2 * 540 + 2 * 24,
        2 * 780,
    )  # loss, analogies, and below them speed


def test_what_cannot_be_drawn_is_said(tmp_path, capsys, monkeypatch):
    export.save(kv_of(two_clouds()), tmp_path, ["kv"])
    empty = write_run(tmp_path / "empty", [])
    for argv, words in (
        (["map", str(tmp_path), "--words", "3"], "a map of 3 words shows nothing"),
        (["plot", str(tmp_path / "vectors.kv")], "no metrics.jsonl in"),
        (["plot", str(tmp_path / "gone")], "gone does not exist"),
        (["plot", str(empty)], "metrics.jsonl of empty is empty"),
        (
            ["map", str(tmp_path), "--by", "pca", "--to", str(empty)],
            f"{empty} is a folder; name a file, such as {empty}/picture.png",
        ),
    ):
        assert evaluate.main(argv) == 2
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert evaluate.main(["map", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
