"""The model card of a run tells its corpus, scores and settings."""

import pytest

from tests.support.runs import scores_of, write_run
from w2v.vectors import report
from w2v.vectors.runs import RunError


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "one", scores_of(0.25), "corpus.path=wiki.txt", "train.epochs=3")
    (folder / "vocab.tsv").write_text("# words 2 raw_words 9 raw_types 4\nthe\t5\nof\t2\n")
    return folder


def test_card_tells_what_the_run_is(run):
    (run / "env.txt").write_text("machine 8 cores | 1 GPU\ntorch 2.10\n")
    text = report.write_card(run).read_text()
    for part in (
        "# Word vectors of wiki.txt",
        "most_similar('the')",
        "9 words, 4 distinct",
        "| epochs | 3 |",
        "5,000,000 words in 10.0 s",
        "| M words/s | 0.5 |",
        "| 8 cores, 1 GPU |",
        "w2v unknown, commit unknown, Python unknown, torch 2.10",
        "| analogies % | 25.0 |\n| questions | 8 |",
        "| WordSim-353 | 0.500 |",
        "  epochs: 3\n",
    ):
        assert part in text, part


def test_card_of_baskets_has_no_empty_tables(tmp_path):
    scores = scores_of(0.0)
    for part in ("total", "semantic", "syntactic"):
        scores["analogies"][part] = {"accuracy": 0.0, "counted": 0, "skipped": 9}
    for pairs in scores["similarity"].values():
        pairs["spearman"] = None
    folder = write_run(tmp_path / "one", scores)
    (folder / "vocab.tsv").write_text("# words 1 raw_words 9 raw_types 4\nmilk\t5\n")
    text = report.write_card(folder).read_text()
    assert not any(name in text for name in ("analogies %", "semantic %", "SimLex", "WordSim"))


@pytest.mark.parametrize("missing", ["config.yaml", "scores.json", "vocab.tsv"])
def test_an_unfinished_run_is_refused(run, missing):
    (run / missing).unlink()
    with pytest.raises(RunError, match=str(run)):
        report.write_card(run)
    assert not (run / "README.md").exists()
