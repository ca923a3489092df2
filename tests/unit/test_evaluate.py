"""The torch scorer gives gensim's counts and correlations."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.planted import kv_of, planted, write_questions
from w2v.vectors import analogies as batched
from w2v.vectors import evaluate
from w2v.vectors.datasets import EvaluationError, in_gensim, judged_pairs


def assert_equals_gensim(words, vectors, path, restrict_vocab=None, device="cpu"):
    """Score in torch and by gensim, and return the score."""
    ours = evaluate.analogies(words, torch.tensor(vectors).to(device), path, restrict_vocab)
    with np.errstate(all="ignore"):  # zero vectors
        _, answered = kv_of(words, vectors).evaluate_word_analogies(str(path), restrict_vocab)
    theirs = [(len(part["correct"]), len(part["incorrect"])) for part in answered]
    counts = [(part.correct, part.counted - part.correct) for part in (*ours.sections, ours.total)]
    assert counts == theirs
    return ours


@pytest.mark.parametrize("restrict_vocab", [None, 300_000, 400])
def test_equals_gensim_on_planted_analogies(tmp_path, restrict_vocab):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    score = assert_equals_gensim(words, vectors, path, restrict_vocab)
    assert 0.2 < score.total.accuracy < 1 and score.total.skipped >= 4


def vectors_of_kind(kind, rng, words):
    half = words // 2
    if kind == "integers":  # many ties
        return rng.integers(-1, 2, (words, 3)).astype(np.float32)
    vectors = rng.standard_normal((words, 20)).astype(np.float32)
    if kind == "zeros":
        vectors[:: max(2, words // 3)] = 0
    if kind == "copies":
        vectors[half:] = vectors[: words - half]
    if kind == "last bit":  # which one is nearer depends on the order of summation
        copies = vectors[: words - half]
        vectors[half:] = copies * (1 + rng.integers(-1, 2, copies.shape) * np.float32(2**-23))
    return vectors * 1e-12 if kind == "tiny" else vectors


@pytest.mark.parametrize("kind", ["normal", "integers", "zeros", "copies", "last bit", "tiny"])
@each_case("size", [3, 4, 7, 40])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equals_gensim_with_ties_and_case_variants(tmp_path, kind, size, device):
    letters = [a + b for a in "xyzXYZ" for b in "uvwUVW"] + ["q", "Q", "r", "ß", "SS"]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        words = [str(word) for word in rng.permutation(letters)[:size]]
        vectors = vectors_of_kind(kind, rng, len(words))
        asked = [tuple(rng.choice(words, 4)) for _ in range(60)]
        sections = {"first": asked[:30], "gram1": asked[30:], "none": []}
        path = write_questions(tmp_path / "q.txt", sections)
        assert_equals_gensim(words, vectors, path, device=device)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(3, 30),
    dim=st.integers(1, 6),
    restrict=st.integers(1, 35),
)
def test_equals_gensim_on_rounded_vectors(tmp_path_factory, seed, size, dim, restrict):
    rng = np.random.default_rng(seed)
    letters = [a + b + c for a in "aA" for b in "bB" for c in "cdefghkm"]
    words = [str(word) for word in rng.permutation(letters)[:size]]
    vectors = rng.standard_normal((len(words), dim)).round(int(rng.integers(0, 8)))
    path = tmp_path_factory.getbasetemp() / "questions.txt"
    write_questions(path, {"s": [tuple(rng.choice(words, 4)) for _ in range(20)]})
    assert_equals_gensim(words, vectors.astype(np.float32), path, restrict)


def test_equals_gensim_where_the_sum_cancels(tmp_path):
    """The direction of b + c - a is rounding error."""
    rng = np.random.default_rng(5)
    words = [f"w{i}" for i in range(300)]
    vectors = list(rng.standard_normal((300, 8)))
    asked = []
    for n in range(100):
        x, y = np.linalg.qr(rng.standard_normal((8, 2)))[0].T
        b, c = x, -x / 2 + y * 3**0.5 / 2
        words += [f"a{n}", f"b{n}", f"c{n}"]
        vectors += [b + c + 1e-7 * rng.standard_normal(8), b, c]
        asked.append((f"a{n}", f"b{n}", f"c{n}"))
    kv = kv_of(words, vectors)
    questions = []
    for a, b, c in asked:
        ((answer, _),) = kv.most_similar(positive=[b, c], negative=[a], topn=1)
        questions.append((a, b, c, answer))
    path = write_questions(tmp_path / "q.txt", {"s": questions})
    assert evaluate.analogies(words, kv.vectors, path).total.correct == 100


def test_case_variants_fill_all_five_places(tmp_path):
    """If the five nearest are variants of a, b or c, the fifth is the answer."""
    words = ["a", "berlin", "c", "d", "Berlin", "bErlin", "beRlin", "C", "BERLIN"]
    vectors = np.zeros((9, 3), dtype=np.float32)
    vectors[:, 0] = 1
    vectors[:, 1] = [0.5, -0.1, 0.5, 0.6, 0.1, 0.2, 0.25, 0.55, 0.3]
    vectors[[0, 2], 2] = 1e-3
    answers = {"not among five": "d", "fifth": "c", "variant": "berlin"}
    sections = {name: [("a", "berlin", "c", answer)] for name, answer in answers.items()}
    path = write_questions(tmp_path / "q.txt", sections)
    score = assert_equals_gensim(words, vectors, path)
    assert [section.correct for section in score.sections] == [0, 1, 0]
    fewer = evaluate.analogies(words[:7], vectors[:7], path)
    assert fewer.sections[0].correct == 1


def test_clear_questions_are_answered_in_blocks(tmp_path, monkeypatch):
    words, vectors, sections = planted(noise=0.01)
    words, vectors = [*words, "zero"], np.vstack([vectors, np.zeros_like(vectors[:1])])
    path = write_questions(tmp_path / "q.txt", sections)
    doubtful, as_gensim = [], batched._answers_as_gensim

    def count(vectors_ND, group_N, ids_Q4):
        doubtful.extend(ids_Q4)
        return as_gensim(vectors_ND, group_N, ids_Q4)

    monkeypatch.setattr(batched, "_answers_as_gensim", count)
    monkeypatch.setattr(batched, "QUESTIONS", 7)
    monkeypatch.setattr(batched, "WORDS", 11)
    score = assert_equals_gensim(words, vectors, path)
    assert len(doubtful) < 0.05 * score.total.counted


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [5, 24, 130])
def test_gpu_answers_as_the_cpu(tmp_path, monkeypatch, dim):
    words, vectors, sections = planted(dim=dim)
    path = write_questions(tmp_path / "q.txt", sections)
    records_VR = torch.zeros(len(words), dim + 3)
    records_VR[:, :dim] = torch.from_numpy(vectors)
    blocks = []
    monkeypatch.setattr(batched, "_answer_block", lambda *args: blocks.append(args))
    on_gpu = evaluate.scores(words, records_VR.cuda()[:, :dim], [path])
    assert not blocks  # all are compared there
    monkeypatch.undo()
    assert on_gpu == evaluate.scores(words, vectors, [path])
    columns_DN = torch.from_numpy(vectors.T.copy()).cuda()
    assert on_gpu == evaluate.scores(words, columns_DN.T, [path])
    assert_equals_gensim(words, vectors, path, device="cuda")


def test_strided_half_precision_and_grad_vectors_score_as_plain_ones(tmp_path):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    half = torch.from_numpy(vectors).half()
    expected = evaluate.analogies(words, half.float().numpy(), path)
    records = torch.zeros(len(words), 64)
    records[:, :24] = half
    assert evaluate.analogies(words, records[:, :24], path) == expected
    assert evaluate.analogies(words, half.requires_grad_(), path) == expected


def test_matmul_precision_is_raised_and_restored(tmp_path, monkeypatch):
    words, vectors, sections = planted(n_pairs=5)
    seen, block = [], batched._answer_block

    def observe(*args):
        seen.append(torch.get_float32_matmul_precision())
        return block(*args)

    monkeypatch.setattr(batched, "_answer_block", observe)
    torch.set_float32_matmul_precision("high")
    try:
        evaluate.analogies(words, vectors, write_questions(tmp_path / "q.txt", sections))
        assert [*seen, torch.get_float32_matmul_precision()] == ["highest", "high"]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_google_questions_are_the_default():
    words = ["Athens", "Greece", "Oslo", "Norway", "Bern"]
    score = evaluate.analogies(words, np.eye(5, dtype=np.float32))
    assert (score.total.counted, score.total.skipped) == (2, 19_542)
    assert score.semantic.counted + score.semantic.skipped == 8_869
    assert score.syntactic == evaluate.Section("syntactic", 0, 0, 10_675)
    assert score.syntactic.accuracy == 0.0


def test_vectors_that_are_not_finite_are_refused():
    vectors = np.ones((3, 2), dtype=np.float32)
    vectors[1, 0] = np.nan
    with pytest.raises(EvaluationError, match="'b' holds NaN or infinity; .* lower optimizer.lr"):
        evaluate.analogies(["a", "b", "c"], vectors)


def test_similarity_follows_the_human_order():
    angles = np.array([0.0, 0.1, 0.4, 1.0])  # tiger-cat 7.35, love-sex 6.77, tiger-tiger 10
    words = ["tiger", "Cat", "love", "sex"]
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    score = evaluate.similarity(words, vectors, "wordsim353")
    assert (score.pairs, score.spearman) == (3, pytest.approx(1.0))
    assert score.oov == pytest.approx(350 / 353)
    nothing = evaluate.similarity(["zzz"], np.ones((1, 1)), "simlex999")
    assert (nothing.spearman, nothing.pairs, nothing.oov) == (None, 0, 1.0)
    equal = evaluate.similarity(words, np.ones((4, 2)), "wordsim353")
    assert equal.spearman is None and equal.pairs == 3


def test_similarity_equals_gensims_own_call():
    words = sorted({word for a, b, _ in judged_pairs("simlex999") for word in (a, b)})[::2]
    kv = kv_of(words, np.random.default_rng(0).standard_normal((len(words), 5)))
    _, spearman, oov = kv.evaluate_word_pairs(str(in_gensim("simlex999.txt")))
    score = evaluate.similarity(words, kv.vectors, "simlex999")
    assert score.spearman == spearman[0] and score.oov == pytest.approx(oov / 100)


def test_further_files_are_scored_beside_gensims(tmp_path):
    words, vectors, sections = planted()
    kv = kv_of(words, vectors)
    questions = write_questions(tmp_path / "mine.txt", sections)
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("".join(f"{a},{b},{n}\n" for n, (a, b) in enumerate(pairwise(words))))
    google, similarities, further = evaluate.scores(words, kv.vectors, [questions], [pairs])
    assert google.total.counted == 0 and further["mine"].total.accuracy > 0.2
    assert [score.name for score in similarities] == ["wordsim353", "simlex999", "pairs"]
    assert similarities[2] == evaluate.similarity(words, vectors, pairs)
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
