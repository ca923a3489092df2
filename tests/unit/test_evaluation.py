"""The torch scorer equals gensim's; similarity, and the report."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gensim.test.utils import datapath
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.vectors import analogies as nearest
from w2v.vectors import evaluate as evaluation
from w2v.vectors import export
from w2v.vectors.datasets import read_questions


def kv_of(words, vectors):
    return export.keyed_vectors(
        words, np.arange(len(words), 0, -1), np.asarray(vectors, dtype=np.float32)
    )


def write_questions(path, sections):
    text = "".join(
        f": {name}\n" + "".join(f"{' '.join(question)}\n" for question in asked)
        for name, asked in sections.items()
    )
    path.write_text(text, encoding="utf-8")
    return path


def planted(n_pairs=60, n_relations=4, dim=24, noise=1.0, seed=0):
    """Mixed-case words and vectors in which b - a is nearly the same for all pairs of a relation, and the questions on them."""
    rng = np.random.default_rng(seed)
    words, vectors, sections = [], [], {}
    for r in range(n_relations):
        offset = rng.standard_normal(dim)
        pairs = []
        for p in range(n_pairs):
            a, b = f"{'aA'[p % 2]}{r}x{p}", f"b{r}x{p}"
            base = rng.standard_normal(dim)
            words += [a, b]
            vectors += [base, base + offset + noise * rng.standard_normal(dim)]
            pairs.append((a, b))
        chosen = rng.integers(0, n_pairs, size=(80, 2))
        name = f"gram{r}" if r % 2 else f"relation{r}"
        sections[name] = [(*pairs[i], *pairs[j]) for i, j in chosen if i != j] + [
            ("a0x1", "unseen", "b0x2", "a0x3")
        ]
    for word in words[::7]:  # case variants, some of them near enough to be found before the answer
        words.append(word.upper() if word.upper() != word else word.lower())
        vectors.append(vectors[words.index(word)] + 0.1 * rng.standard_normal(dim))
    order = rng.permutation(len(words))
    return [words[i] for i in order], np.array(vectors, dtype=np.float32)[order], sections


@pytest.mark.parametrize("case_insensitive", [True, False])
@pytest.mark.parametrize("restrict_vocab", [None, 300_000, 400])
def test_torch_equals_gensim_on_planted_analogies(tmp_path, case_insensitive, restrict_vocab):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    settings = {"restrict_vocab": restrict_vocab, "case_insensitive": case_insensitive}
    ours = evaluation.analogies(words, vectors, path, **settings)
    assert ours == evaluation.analogies_gensim(kv_of(words, vectors), path, **settings)
    assert 0.2 < ours.total.accuracy < 1 and ours.total.skipped >= 4


@pytest.mark.parametrize("kind", ["normal", "integers", "zeros", "copies", "nearly", "tiny"])
@pytest.mark.parametrize("size", [3, 4, 7, 40])
def test_torch_equals_gensim_on_random_vectors_with_ties_and_case_variants(tmp_path, kind, size):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        letters = [a + b for a in "xyzXYZ" for b in "uvwUVW"] + ["q", "Q", "r", "ß", "SS"]
        words = [str(word) for word in rng.permutation(letters)[:size]]
        vectors = (
            rng.integers(-1, 2, (len(words), 3))
            if kind == "integers"
            else rng.standard_normal((len(words), 3))
        )
        vectors = vectors.astype(np.float32)
        if kind == "zeros":
            vectors[:: max(2, size // 3)] = 0
        if kind == "copies":
            vectors[size // 2 :] = vectors[: len(vectors) - size // 2]
        if (
            kind == "nearly"
        ):  # apart by the last bit: which is nearer depends on the order of the sum
            vectors = rng.standard_normal((len(words), 20)).astype(np.float32)
            copies = vectors[: len(vectors) - size // 2]
            vectors[size // 2 :] = copies * (
                1 + rng.integers(-1, 2, copies.shape) * np.float32(2**-23)
            )
        if kind == "tiny":
            vectors *= 1e-12
        asked = [tuple(rng.choice(words, 4)) for _ in range(60)]
        path = write_questions(
            tmp_path / "q.txt", {"first": asked[:30], "gram1": asked[30:], "none": []}
        )
        for case_insensitive in (True, False):
            ours = evaluation.analogies(words, vectors, path, case_insensitive=case_insensitive)
            assert ours == evaluation.analogies_gensim(
                kv_of(words, vectors), path, case_insensitive=case_insensitive
            ), seed


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(3, 30),
    dim=st.integers(1, 6),
    restrict=st.integers(1, 35),
)
def test_torch_equals_gensim_whatever_the_vectors(tmp_path_factory, seed, size, dim, restrict):
    rng = np.random.default_rng(seed)
    words = [
        str(word)
        for word in rng.permutation([a + b + c for a in "aA" for b in "bB" for c in "cdefghkm"])[
            :size
        ]
    ]
    vectors = np.round(rng.standard_normal((len(words), dim)), int(rng.integers(0, 8))).astype(
        np.float32
    )
    path = tmp_path_factory.getbasetemp() / "questions.txt"
    write_questions(path, {"s": [tuple(rng.choice(words, 4)) for _ in range(20)]})
    assert evaluation.analogies(words, vectors, path, restrict) == evaluation.analogies_gensim(
        kv_of(words, vectors), path, restrict
    )


def test_rounding_that_a_short_sum_magnifies_is_gensims(tmp_path):
    """b + c - a all but cancels, so that its direction is rounding, different in every implementation."""
    rng = np.random.default_rng(5)
    words, vectors, asked = [f"w{i}" for i in range(300)], list(rng.standard_normal((300, 8))), []
    for n in range(100):
        x, y = np.linalg.qr(rng.standard_normal((8, 2)))[0].T
        b, c = x, -x / 2 + y * 3**0.5 / 2
        words += [f"a{n}", f"b{n}", f"c{n}"]
        vectors += [b + c + 1e-7 * rng.standard_normal(8), b, c]
        asked.append((f"a{n}", f"b{n}", f"c{n}"))
    kv = kv_of(words, vectors)
    answers = [kv.most_similar(positive=[b, c], negative=[a], topn=1)[0][0] for a, b, c in asked]
    path = write_questions(
        tmp_path / "q.txt", {"s": [(*q, answer) for q, answer in zip(asked, answers, strict=True)]}
    )
    assert evaluation.analogies(words, kv.vectors, path).total.correct == 100


def test_case_variants_may_fill_all_five_places(tmp_path):
    """The first of the five nearest that is not a, b or c is the answer; if all five are, it is the fifth, as in gensim."""
    words = ["a", "berlin", "c", "d", "Berlin", "bErlin", "beRlin", "C", "BERLIN"]
    vectors = np.zeros((9, 3), dtype=np.float32)
    vectors[:, 0], vectors[:, 1] = 1, [0.5, -0.1, 0.5, 0.6, 0.1, 0.2, 0.25, 0.55, 0.3]
    vectors[0, 2] = vectors[2, 2] = 1e-3
    asked = {
        "beyond": [("a", "berlin", "c", "d")],
        "fifth": [("a", "berlin", "c", "c")],
        "first": [("a", "berlin", "c", "berlin")],
    }
    path = write_questions(tmp_path / "q.txt", asked)
    ours = evaluation.analogies(words, vectors, path)
    assert ours == evaluation.analogies_gensim(kv_of(words, vectors), path)
    assert [section.correct for section in ours.sections] == [0, 1, 0]
    assert (
        evaluation.analogies(words[:7], vectors[:7], path).sections[0].correct == 1
    )  # fewer variants, and d is found


def test_clear_questions_are_answered_without_gensim_and_in_blocks(tmp_path, monkeypatch):
    words, vectors, sections = planted(noise=0.01)
    words, vectors = [*words, "zero"], np.vstack([vectors, np.zeros_like(vectors[:1])])
    path = write_questions(tmp_path / "q.txt", sections)
    expected = evaluation.analogies_gensim(kv_of(words, vectors), path)
    asked = []
    doubtful = nearest._answers_as_gensim
    monkeypatch.setattr(
        nearest, "_answers_as_gensim", lambda *args: asked.extend(args[2]) or doubtful(*args)
    )
    monkeypatch.setattr(nearest, "QUESTIONS", 7)
    monkeypatch.setattr(nearest, "WORDS", {"cpu": 11})
    assert evaluation.analogies(words, torch.from_numpy(vectors), path) == expected
    assert len(asked) < 0.05 * expected.total.counted


def test_strided_half_and_grad_vectors_score_as_plain_ones(tmp_path):
    words, vectors, sections = planted()
    path = write_questions(tmp_path / "q.txt", sections)
    half = torch.from_numpy(vectors).half()
    expected = evaluation.analogies(words, half.float().numpy(), path)
    records = torch.zeros(len(words), 64)
    records[:, :24] = half
    assert evaluation.analogies(words, records[:, :24], path) == expected
    assert evaluation.analogies(words, half.requires_grad_(), path) == expected


def test_matmul_precision_is_raised_and_put_back(tmp_path, monkeypatch):
    words, vectors, sections = planted(n_pairs=5)
    seen, block = [], nearest._answer_block
    monkeypatch.setattr(
        nearest,
        "_answer_block",
        lambda *a: seen.append(torch.get_float32_matmul_precision()) or block(*a),
    )
    torch.set_float32_matmul_precision("high")
    try:
        evaluation.analogies(words, vectors, write_questions(tmp_path / "q.txt", sections))
        assert [*seen, torch.get_float32_matmul_precision()] == ["highest", "high"]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_sections_totals_and_google_questions():
    sections = read_questions(None)
    assert len(sections) == 14 and sum(len(asked) for _, asked in sections) == 19_544
    score = evaluation.analogies(
        ["Athens", "Greece", "Oslo", "Norway", "Bern"], np.eye(5, dtype=np.float32)
    )
    assert (score.total.counted, score.total.skipped) == (2, 19_542)
    assert score.semantic.counted + score.semantic.skipped == 8_869
    assert (
        score.syntactic == evaluation.Section("syntactic", 0, 0, 10_675)
        and score.syntactic.accuracy == 0.0
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a b c d\n", "line 1: questions need a section"),
        (": s\na b c\n", "holds no question"),
        ("", "holds no question"),
    ],
)
def test_bad_questions_are_named(tmp_path, text, message):
    path = tmp_path / "q.txt"
    path.write_text(text)
    with pytest.raises(evaluation.EvaluationError, match=message):
        evaluation.analogies(["a"], np.ones((1, 2), dtype=np.float32), path)


def test_vectors_that_are_not_finite_are_refused():
    vectors = np.ones((3, 2), dtype=np.float32)
    vectors[1, 0] = np.nan
    with pytest.raises(
        evaluation.EvaluationError,
        match="'b' holds NaN or infinity; train with a lower optimizer.lr",
    ):
        evaluation.analogies(["a", "b", "c"], vectors)


def test_similarity_follows_the_human_order():
    angles = [0.0, 0.1, 0.4, 1.0]  # tiger-cat 7.35, love-sex 6.77, tiger-tiger 10
    words = ["tiger", "Cat", "love", "sex"]
    vectors = np.array([[np.cos(a), np.sin(a)] for a in angles], dtype=np.float32)
    score = evaluation.similarity(words, vectors, "wordsim353")
    assert (score.pairs, score.spearman) == (3, pytest.approx(1.0))
    assert score.oov == pytest.approx(350 / 353)
    nothing = evaluation.similarity(["zzz"], np.ones((1, 1)), "simlex999")
    assert (nothing.spearman, nothing.pairs, nothing.oov) == (None, 0, 1.0)
    same = evaluation.similarity(words, np.ones((4, 2)), "wordsim353")  # no order at all
    assert same.spearman is None and same.pairs == 3


def test_similarity_equals_gensims_own_call():
    rng = np.random.default_rng(0)
    text = Path(datapath("simlex999.txt")).read_text(encoding="utf-8")
    words = sorted({word for line in text.splitlines()[2:] for word in line.split("\t")[:2]})[::2]
    kv = kv_of(words, rng.standard_normal((len(words), 5)))
    _, spearman, oov = kv.evaluate_word_pairs(datapath("simlex999.txt"))
    score = evaluation.similarity(words, kv.vectors, "simlex999")
    assert score.spearman == spearman[0] and score.oov == pytest.approx(oov / 100)


def test_report_is_aligned_and_json_is_plain():
    score = evaluation.AnalogyScore(
        (evaluation.Section("family", 3, 4, 1), evaluation.Section("gram8-plural", 0, 0, 7))
    )
    similarities = [
        evaluation.SimilarityScore("wordsim353", 0.6126, 340, 13 / 353),
        evaluation.SimilarityScore("simlex999", None, 0, 1.0),
    ]
    lines = evaluation.report(score, similarities).splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["family", "75.0", "%", "3", "4", "1"],
        ["gram8-plural", "-", "0", "0", "7"],
    ]
    assert [line.split()[0] for line in lines[4:7]] == ["semantic", "syntactic", "total"]
    assert lines[-2].split() == ["WordSim-353", "0.613", "340", "3.7", "%"]
    assert len({len(line) for line in lines[:3]}) == 1
    plain = json.loads(json.dumps(evaluation.as_dict(score, similarities), allow_nan=False))
    assert plain["analogies"]["total"] == {
        "name": "total",
        "correct": 3,
        "counted": 4,
        "skipped": 8,
        "accuracy": 0.75,
    }
    assert plain["similarity"]["simlex999"]["spearman"] is None
