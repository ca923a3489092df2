"""The torch scorer gives gensim's counts and correlations."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.planted import kv_of, planted, write_questions
from w2v.vectors import evaluate
from w2v.vectors.datasets import EvaluationError, in_gensim, judged_pairs
from w2v.vectors.evaluate import Scorer


def assert_equals_gensim(words, vectors, path, restrict_vocab=None, device="cpu"):
    """Score in torch and by gensim, and return the score."""
    ours = Scorer(words, torch.tensor(vectors).to(device), restrict_vocab).analogies(path)
    _, answered = kv_of(words, vectors).evaluate_word_analogies(str(path), restrict_vocab)
    theirs = [(len(part["correct"]), len(part["incorrect"])) for part in answered]
    counts = [(part.correct, part.counted - part.correct) for part in (*ours.sections, ours.total)]
    assert counts == theirs
    return ours


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("block", [(512, 4096), (7, 11)])
@each_case("restrict_vocab", [None, 300_000, 400])
def test_equals_gensim_on_planted_analogies(tmp_path, monkeypatch, restrict_vocab, device, block):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    monkeypatch.setattr(evaluate, "QUESTIONS", block[0])
    monkeypatch.setattr(evaluate, "WORDS", dict.fromkeys(evaluate.WORDS, block[1]))
    score = assert_equals_gensim(words, vectors, path, restrict_vocab, device)
    assert 0.2 < score.total.accuracy < 1 and score.total.skipped >= 4


@pytest.mark.parametrize("size", [25, 40])
def test_equals_gensim_with_case_variants(tmp_path, size):
    """Questions may repeat words, or ask for a word that they name."""
    letters = [a + b for a in "xyzXYZ" for b in "uvwUVW"] + ["q", "Q", "r", "ß", "SS"]
    for seed in range(10):
        rng = np.random.default_rng(seed)
        words = [str(word) for word in rng.permutation(letters)[:size]]
        vectors = rng.standard_normal((len(words), 20)).astype(np.float32)
        asked = [tuple(rng.choice(words, 4)) for _ in range(60)]
        sections = {"first": asked[:30], "gram1": asked[30:], "none": []}
        assert_equals_gensim(words, vectors, write_questions(tmp_path / "q.txt", sections))


def test_ties_and_zero_vectors_answer_nothing(tmp_path):
    words = [f"w{number}" for number in range(6)]
    path = write_questions(tmp_path / "q.txt", {"s": [("w0", "w1", "w2", "w3")]})
    for vectors in (np.zeros((6, 4)), np.ones((6, 4))):
        assert Scorer(words, vectors).analogies(path).total.correct == 0
    path.write_text("w0 w1 w2 w0\nw0 w1 w2 W2\n")  # no answer is asked for
    assert Scorer(words, np.eye(6)).analogies(path).total.correct == 0
    path.write_text("w0 w1 w2 w3\n")
    alone = Scorer(words[:4], np.eye(4)).analogies(path)  # no other word could be nearer
    assert alone.total.correct == 1


def test_strided_half_precision_and_grad_vectors_score_as_plain_ones(tmp_path):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    half = torch.from_numpy(vectors).half()
    expected = Scorer(words, half.float().numpy()).analogies(path)
    records = torch.zeros(len(words), 64)
    records[:, :24] = half
    assert Scorer(words, records[:, :24]).analogies(path) == expected
    assert Scorer(words, half.requires_grad_()).analogies(path) == expected


def test_google_questions_are_the_default():
    words = ["Athens", "Greece", "Oslo", "Norway", "Bern"]
    score = Scorer(words, np.eye(5, dtype=np.float32)).analogies()
    assert (score.total.counted, score.total.skipped) == (2, 19_542)
    assert score.semantic.counted + score.semantic.skipped == 8_869
    assert score.syntactic == evaluate.Section("syntactic", 0, 0, 10_675)
    assert score.syntactic.accuracy == 0.0


def test_vectors_that_are_not_finite_are_refused():
    vectors = np.ones((3, 2), dtype=np.float32)
    vectors[1, 0] = np.nan
    with pytest.raises(EvaluationError, match="'b' holds NaN or infinity; .* lower optimizer.lr"):
        Scorer(["a", "b", "c"], vectors)


def test_similarity_follows_the_human_order(monkeypatch):
    angles = np.array([0.0, 0.1, 0.4, 1.0])  # tiger-cat 7.35, love-sex 6.77, tiger-tiger 10
    words = ["tiger", "Cat", "love", "sex"]
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    few = Scorer(words, vectors).similarity("wordsim353")
    assert (few.pairs, few.spearman) == (3, None)  # fewer than ten pairs may agree by chance
    monkeypatch.setattr(evaluate, "LEAST_PAIRS", 3)
    score = Scorer(words, vectors).similarity("wordsim353")
    assert (score.pairs, score.spearman) == (3, pytest.approx(1.0))
    assert score.oov == pytest.approx(350 / 353)
    nothing = Scorer(["zzz"], np.ones((1, 1))).similarity("simlex999")
    assert (nothing.spearman, nothing.pairs, nothing.oov) == (None, 0, 1.0)
    equal = Scorer(words, np.ones((4, 2))).similarity("wordsim353")
    assert equal.spearman is None and equal.pairs == 3


def test_similarity_equals_gensims_own_call():
    words = sorted({word for a, b, _ in judged_pairs("simlex999") for word in (a, b)})[::2]
    kv = kv_of(words, np.random.default_rng(0).standard_normal((len(words), 5)))
    _, spearman, oov = kv.evaluate_word_pairs(str(in_gensim("simlex999.txt")))
    score = Scorer(words, kv.vectors).similarity("simlex999")
    assert score.spearman == pytest.approx(spearman[0]) and score.oov == pytest.approx(oov / 100)


def test_further_files_are_scored_beside_gensims(tmp_path):
    words, vectors, sections = planted()
    kv = kv_of(words, vectors)
    questions = write_questions(tmp_path / "mine.txt", sections)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("".join(f"{a},{b},{n}\n" for n, (a, b) in enumerate(pairwise(words))))
    google, similarities, further = evaluate.scores(words, kv.vectors, [questions], [pairs])
    assert google.total.counted == 0 and further["mine"].total.accuracy > 0.2
    assert [score.name for score in similarities] == ["wordsim353", "simlex999", "pairs"]
    assert similarities[2] == Scorer(words, vectors).similarity(pairs)
    assert similarities[2].pairs == len(words) - 1


def test_report_without_counted_questions_and_pairs_is_a_line():
    score = evaluate.AnalogyScore((evaluate.Section("family", 0, 0, 8),))
    pairs = [evaluate.SimilarityScore("wordsim353", None, 0, 1.0)]
    sections, sums = evaluate.report(evaluate.Scores(score, pairs))
    assert not sections and sums.startswith("no scores: ")


def test_report_is_aligned_and_json_is_plain():
    sections = evaluate.Section("family", 3, 4, 1), evaluate.Section("gram8-plural", 0, 0, 7)
    similarities = [
        evaluate.SimilarityScore("wordsim353", 0.6126, 340, 13 / 353),
        evaluate.SimilarityScore("simlex999", None, 0, 1.0),
    ]
    score = evaluate.AnalogyScore(sections)
    header = "analogies     accuracy  correct  counted  skipped"
    sections, sums = evaluate.report(evaluate.Scores(score, similarities))
    assert sections.splitlines() == [
        header,
        "family          75.0 %        3        4        1",
        "gram8-plural         -        0        0        7",
    ]
    assert sums.splitlines() == [
        header,
        "semantic        75.0 %        3        4        1",
        "syntactic            -        0        0        7",
        "total           75.0 %        3        4        8",
        "",
        "similarity    spearman    pairs  unknown",
        "WordSim-353      0.613      340    3.7 %",
        "SimLex-999           -        0  100.0 %",
    ]
    further = {"msr": evaluate.AnalogyScore([evaluate.Section("part", 1, 2, 3)])}
    scores = evaluate.Scores(score, similarities, further)
    sections, sums = evaluate.report(scores)
    assert sections.splitlines()[3] == "msr: part       50.0 %        1        2        3"
    assert sums.splitlines()[4:6] == ["msr             50.0 %        1        2        3", ""]
    plain = json.loads(json.dumps(evaluate.as_dict(scores), allow_nan=False))
    assert plain["questions"]["msr"]["total"]["counted"] == 2
    total = {"name": "total", "correct": 3, "counted": 4, "skipped": 8, "accuracy": 0.75}
    assert plain["analogies"]["total"] == total
    assert plain["similarity"]["simlex999"]["spearman"] is None
