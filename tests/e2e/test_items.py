"""Held-out items: what is kept out of training, and how it is scored."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import w2v
from tests.support.each_case import each_case
from w2v.api import cli
from w2v.config import ConfigError, load_config
from w2v.text import corpus as texts
from w2v.text.corpus import Corpus, hold_out_items, open_corpus
from w2v.text.encode import EncodedBlock
from w2v.text.formats import CorpusError
from w2v.vectors import evaluate, runs, significance
from w2v.vectors.datasets import ITEM_SCORES, ITEMS, EvaluationError, read_items
from w2v.vectors.evaluate import Scorer

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS, IN_KIND = 6, 15


def corpus_of(*sentences):
    ids = np.concatenate(sentences).astype(np.int32)
    return Corpus.temporary([EncodedBlock(ids, np.array([*map(len, sentences)]), len(ids))])


def write_sequences(path, lines=1500, seed=0):
    """Write sequences of items of one kind each; some kinds are more frequent."""
    rng = np.random.default_rng(seed)
    share = np.arange(KINDS, 0, -1) / sum(range(KINDS + 1))
    rows = []
    for kind in rng.choice(KINDS, lines, p=share):
        rows.append(" ".join(f"{'aA'[n % 2]}{kind}-{n}" for n in rng.integers(0, IN_KIND, 8)))
    path.write_text("\n".join(rows))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Settings that train on sequences of items in a moment."""
    folder = tmp_path_factory.mktemp("items")
    write_sequences(folder / "text.txt")
    given = f"corpus.path={folder}/text.txt corpus.data_dir={folder} run.dir={folder}/runs"
    given += " model.vector_size=16 model.sample=0 train.device=cpu run.report=false"
    return [*given.split(), "run.held_out_items=true", "corpus.tokenize=whitespace"]


def test_the_last_item_of_each_sentence_is_held_out():
    corpus = corpus_of([1, 2, 3], [4, 5], [6, 7, 7], [8, 9, 10, 11])
    held = hold_out_items(corpus)
    assert held.ids.tolist() == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert held.offsets.tolist() == [0, 2, 4, 6, 9]
    assert held.held_items.tolist() == [[2, 3], [10, 11]]
    assert held.digest != corpus.digest and held.raw_words == corpus.raw_words


def test_held_out_items_are_spread_and_few(monkeypatch):
    monkeypatch.setattr(texts, "MOST_ITEMS", 3)
    held = hold_out_items(corpus_of(*([0, n, n + 1] for n in range(1, 102, 2))))
    assert held.held_items[:, 0].tolist() == [1, 51, 101] and len(held.ids) == 2 * 51


def test_a_text_without_sequences_is_refused():
    with pytest.raises(CorpusError, match="lines of three items"):
        hold_out_items(corpus_of([1, 2], [3, 3, 3]))


@each_case("block", [(512, 4096), (7, 11)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_are_those_of_all_cosines(monkeypatch, block, device):
    import torch

    monkeypatch.setattr(evaluate, "QUESTIONS", block[0])
    monkeypatch.setattr(evaluate, "WORDS", dict.fromkeys(evaluate.WORDS, block[1]))
    rng = np.random.default_rng(0)
    words = [f"{'aA'[n % 2]}{n // 2}" for n in range(60)]  # letter case tells them apart
    vectors = rng.standard_normal((60, 8)).astype(np.float32)
    rows_Q2 = np.array([rng.choice(60, 2, replace=False) for _ in range(40)])
    pairs = [[words[query], words[item]] for query, item in rows_Q2]
    found = Scorer(words, torch.tensor(vectors).to(device)).items([*pairs, ["a0", "unknown"]])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    near, popular = [], []
    for query, item in rows_Q2:
        order = [row for row in np.argsort(-unit @ unit[query]) if row != query]
        near.append(order.index(item) + 1)
        popular.append([row for row in range(60) if row != query].index(item) + 1)
    hits, mrr = (found[name] for name in ITEM_SCORES)
    assert (hits.total.counted, hits.total.skipped) == (40, 1)
    for score, value in ((hits, lambda rank: 1), (mrr, lambda rank: 1 / rank)):
        for section, ranks in zip(score.sections, (near, popular), strict=True):
            values = [value(rank) * (rank <= 10) for rank in ranks]
            assert section.accuracy == pytest.approx(np.mean(values))
        assert score.total.accuracy == score.sections[0].accuracy
    answers = np.array(mrr.answers.split(), float)
    assert np.nanmean(answers) == pytest.approx(mrr.total.accuracy, abs=1e-4)
    assert np.isnan(answers).tolist() == [False] * 40 + [True]


def test_equal_vectors_and_unknown_items_are_no_hits():
    words = [f"w{number}" for number in range(20)]
    for vectors in (np.zeros((20, 4)), np.ones((20, 4))):
        assert Scorer(words, vectors).items([["w0", "w19"]])["hit rate at 10"].total.correct == 0
    assert Scorer(words, np.ones((20, 4))).items([["x", "y"]])["MRR at 10"].total.counted == 0


@pytest.fixture(scope="module")
def run(settings):
    return w2v.train(*settings, optimizer="Adam", epochs=4, window=5, quiet=True)


def accuracy(score, name="hit rate at 10"):
    return [section.accuracy for section in score.further[name].sections]


def test_a_run_scores_its_held_out_items_above_popularity(run, settings):
    folder = Path(run)
    pairs = read_items(folder)
    vocab, corpus = open_corpus(load_config([], settings))
    assert [[vocab.words[row] for row in pair] for pair in corpus.held_items] == pairs
    saved = json.loads((folder / "scores.json").read_text())["questions"]
    neighbors, popular = accuracy(run.score())
    assert saved["hit rate at 10"]["total"]["accuracy"] == pytest.approx(neighbors)
    # Ten of the 14 other items of a kind are shown, and the most frequent kind is two of seven.
    assert neighbors > 0.55 > 0.3 > popular > 0
    logged = (folder / "train.log").read_text()
    assert str(run.score()) in logged and "  of popular items" in logged
    assert re.findall("(.*)  accuracy", logged) == ["items" + " " * 13]


def test_a_resumed_run_keeps_what_is_held_out(run, settings):
    with pytest.raises(ConfigError, match="run.held_out_items=false instead of true"):
        w2v.train(resume=run, held_out_items=False)
    more = w2v.train(resume=run, epochs=5, quiet=True)
    assert accuracy(more.score())[0] > 0.55


def test_damaged_items_are_refused(tmp_path):
    (tmp_path / ITEMS).write_text("a b\n")
    with pytest.raises(EvaluationError, match="a line without two items"):
        read_items(tmp_path)


def test_comparisons_and_sweeps_rank_by_held_out_items(settings, tmp_path, capsys):
    given = [*settings, "train.held_out_words=0", "optimizer.lr=1e-6,0.02", "train.epochs=4"]
    axes = ["train.batch_size=64", "optimizer.args.betas=[0.5,0.99]"]
    given = [setting for setting in given if not setting.startswith("run.report")]
    assert cli.main(["sweep", "adam", *given, *axes, "--to", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "lr: 0.02" in printed and "hit rate at 10 of popular items" in printed
    rows = runs.rows([runs.read(path) for path in runs.find_all([tmp_path / "sweep-adam"])])
    assert [row.settings["optimizer.lr"] for row in rows] == [0.02, 1e-6]
    hits = [runs.figures(row.runs[0])["hit rate at 10 %"] for row in rows]
    assert hits[0] > 55 > hits[1]
    assert rows[0].intervals.keys() == {"hit rate at 10 %", "MRR at 10 %"}
    ranks = [{"MRR": row.items["MRR at 10 %"]} for row in rows]
    assert rows[0].test(rows[1]).p == significance.p_over_items(*ranks) < 0.05  # each item once
    compared = w2v.compare([tmp_path / "sweep-adam"])
    assert "hit rate at 10 %" in compared.columns and not compared.rows[0].test(rows[1]).is_noise


@pytest.mark.slow
def test_a_sweep_on_a_tenth_tunes_the_whole(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pyarrow")
    page = (Path(__file__).parents[2] / "docs" / "items.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec("".join(blocks[:2]).replace("12_000, 60, 33", "6_000, 30, 33"), {})
    for name in ("sweep", "compare"):
        command = shlex.split(re.search(rf"^    w2v ({name} .*)$", page, re.M)[1])
        small = ["train.device=cpu", "optimizer.args.betas=[0.0,0.99]"]
        at = command.index("--seeds")
        assert cli.main([*command[:at], *small, *command[at:], "--to", f"{tmp_path}/{name}"]) == 0
        Path("best.yaml").write_text(capsys.readouterr().out.split("yaml:\n")[-1])
    best, default = runs.rows([runs.read(path) for path in runs.find_all([tmp_path / "compare"])])
    assert {run.settings["run.name"] for run in best.runs} == {"best"}
    # The sweep has seen none of the users whose last items make up nine tenths of these scores.
    assert best.test(default).p < 0.05 and len(best.runs) == len(default.runs) == 3
    for name in ITEM_SCORES:
        tuned, usual = (
            np.array([runs.figures(run)[f"{name} %"] for run in row.runs])
            for row in (best, default)
        )
        assert tuned.min() > 1.03 * usual.max()
