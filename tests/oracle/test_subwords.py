"""Subwords: composed vectors and gradients, on all kernels and engines."""

import random

import numpy as np
import pytest
import torch
from gensim.models.fasttext import ft_ngram_hashes

from tests.support.pairwise import pairwise
from tests.support.rank_threads import checked, together
from tests.support.steps import (
    make_step,
    make_subword_step,
    moved,
    part_of,
    problem,
    records,
    train,
    with_tree,
)
from w2v.config import OptimizerConfig, load_config
from w2v.distributed.ranks import SINGLE
from w2v.vectors import export
from w2v.word2vec.batch import Objective
from w2v.word2vec.cpu_loops import ROWS_PER_OWNER
from w2v.word2vec.subwords import Subwords
from w2v.word2vec.subwords_cpu import list_rows, owned_bags

BUCKETS, LENGTHS = 37, (2, 3)
WEIGHTED = Objective(weighted=5)
CBOW = Objective(cbow=True)
SOFTMAX = ["negatives", "tree", "both"]
NEAR = {"rtol": 1e-3, "atol": 1e-4}


def words_of(count):
    """Return different words of 1 to 7 letters, some n-grams repeated."""
    rng, found = random.Random(count), {}
    while len(found) < count:
        found["".join(rng.choices("abcž", k=rng.randint(1, 7)))] = None
    return [*found]


def subword_step(words, vectors, dim, kernels="reference", name="Adam", cap=0, **how):
    """Return a step on vectors composed of subwords."""
    subwords = Subwords.of(words_of(words), (*LENGTHS, BUCKETS), vectors)
    config = OptimizerConfig(name=name, lr=0.02, occurrence_cap=cap)
    return make_subword_step(config, subwords, dim, kernels, **how)


def batches_of(seed, words, dim, objective=WEIGHTED, softmax="negatives", negative=4):
    """Return batches of one text, and the number of vectors that they need."""
    batch, weights_TVD = problem(seed, 60, 5, negative, words, dim)
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    return [part_of(batch, begin, begin + 20) for begin in (0, 20, 40)], weights_TVD.shape[1]


def test_rows_of_words_are_their_own_and_those_of_their_ngrams():
    words = words_of(20)
    subwords = Subwords.of(words, (*LENGTHS, BUCKETS), vectors=31)
    for number, word in enumerate(words):
        rows_N, place_N = subwords.rows_of(torch.tensor([number]))
        hashes = ft_ngram_hashes(word, *LENGTHS, BUCKETS)
        places = [subwords.used_B.tolist().index(bucket) for bucket in hashes]
        assert rows_N.tolist() == [62 + number, *(62 + 20 + place for place in places)]
        assert not place_N.any()
    rows_N, place_N = subwords.rows_of(torch.tensor([3, 7, 3]))
    assert rows_N[place_N == 0].tolist() == rows_N[place_N == 2].tolist()
    fewer = Subwords.of(words[:9], (*LENGTHS, BUCKETS), vectors=31)
    assert np.array_equal(fewer.used_B, subwords.used_B[: len(fewer.used_B)])
    assert len(fewer.used_B) < len(subwords.used_B) == len(set(subwords.used_B.tolist()))
    assert subwords.rows == len(subwords.rows_N.unique())


def test_rows_of_random_words_are_as_many_as_expected():
    words, drawn, rng = 60, 30, np.random.default_rng(1)
    subwords = Subwords.of(words_of(words), (*LENGTHS, 200), vectors=words)
    share_V = rng.dirichlet(np.full(words, 0.3))
    found = []
    for _ in range(300):
        words_W = torch.from_numpy(rng.choice(words, drawn, p=share_V)).unique()
        found.append(len(subwords.rows_of(words_W)[0].unique()))
    assert subwords.expected_rows(drawn * share_V) == pytest.approx(np.mean(found), rel=0.1)
    assert len(subwords.used_B) > 1.1 * np.mean(found)  # so it is no bound


@pytest.mark.parametrize("objective", [WEIGHTED, CBOW], ids=["skipgram", "cbow"])
def test_each_row_gets_the_whole_gradient_of_each_of_its_words(objective):
    words, dim, lr = 20, 8, 0.1
    (batch, *_), vectors = batches_of(1, words, dim, objective)
    step = subword_step(words, vectors, dim, name="SGD")
    before_AD = step.table["weight"].clone()
    # A plain step on vectors that a loop has composed.
    plain = make_step(OptimizerConfig(name="SGD", lr=lr), vectors, dim)
    bags = [step.kernels.subwords.rows_of(torch.tensor([w]))[0] for w in range(words)]
    for word, rows in enumerate(bags):
        plain.inputs["weight"][word] = before_AD[rows].mean(0)
    plain.outputs["weight"].copy_(before_AD[1 : 2 * vectors : 2])
    inputs_VD = plain.inputs["weight"].clone()
    expected = train(plain, [batch], lr)
    change_VD = plain.inputs["weight"] - inputs_VD
    after_AD = before_AD.clone()
    for word, rows in enumerate(bags):
        for row in rows.tolist():
            after_AD[row] += change_VD[word]
    after_AD[1 : 2 * vectors : 2] = plain.outputs["weight"]
    found = train(step, [batch], lr)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0])
    others = [*range(1, 2 * vectors, 2), *range(2 * vectors, len(after_AD))]
    torch.testing.assert_close(step.table["weight"][others], after_AD[others])
    used = change_VD.any(1).nonzero().flatten()
    torch.testing.assert_close(step.inputs["weight"][used], inputs_VD[used])


def equal_records(step, expected, words, rtol=1e-4, atol=1e-5):
    """Compare all records but those of composed vectors."""
    for number in range(2):
        ours, theirs = (records(each)[number] for each in (step, expected))
        if number == 0:
            ours, theirs = ours[words:], theirs[words:]
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


CASES = {
    "objective": [WEIGHTED, CBOW, CBOW._replace(mean=False)],
    "softmax": SOFTMAX,
    "name, cap": [("Adam", 0), ("SGD", 3), ("NAdam", 0), ("Adagrad", 0)],
    "dim": [20, 48],
}


@pairwise(CASES | {"threads": [1, 3]})
def test_cpu_kernels_equal_the_reference(objective, softmax, name, cap, dim, threads):
    words = 40
    batches, vectors = batches_of(3, words, dim, objective, softmax)
    expected = subword_step(words, vectors, dim, "reference", name, cap)
    step = subword_step(words, vectors, dim, "cpu", name, cap, threads=threads)
    again = subword_step(words, vectors, dim, "cpu", name, cap, threads=threads)
    theirs, ours, same = (train(each, batches, 0.02) for each in (expected, step, again))
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[1], theirs[1])
    equal_records(step, expected, words)
    assert torch.equal(ours[0], same[0])
    assert all(map(torch.equal, records(step), records(again)))  # bit for bit


ON = [("reference", "cpu"), ("cpu", "cpu"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]


@pairwise(CASES | {"size": [2, 3], "kernels, device": ON, "engine": ["resident", "cache"]})
def test_ranks_leave_what_one_leaves(
    objective, softmax, name, cap, dim, size, kernels, device, engine
):
    words = 40
    batches, vectors = batches_of(3, words, dim, objective, softmax)
    if kernels == "cuda" and name == "NAdam":
        kernels = "reference"  # as runs choose: torch steps its rows

    def trained(ranks):
        how = {"engine": engine, "slots": 150} if ranks.size > 1 and kernels != "cpu" else {}
        step = subword_step(
            words, vectors, dim, kernels, name, cap, ranks=ranks, device=device, **how
        )
        edges = [20 * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1)]
        sums = train(step, [moved(part_of(batch, *edges), device) for batch in batches], 0.02)
        step.flush()
        return records(step), *sums

    expected, *sums = trained(SINGLE)
    several = checked(together(size, trained))
    for number, theirs in enumerate(expected):
        ours = torch.empty_like(theirs)
        for rank, (shards, *_) in enumerate(several):
            ours[rank::size] = shards[number]
        if number == 0:  # of composed vectors, only the weights are in use
            torch.testing.assert_close(ours[:words, :dim], theirs[:words, :dim], **NEAR)
            ours, theirs = ours[words:], theirs[words:]
        torch.testing.assert_close(ours, theirs, **NEAR)
    for _, losses, pairs in several:
        torch.testing.assert_close(losses, sums[0], **NEAR)
        assert torch.equal(pairs, sums[1])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("words", [40, 41])
def test_what_words_are_composed_of_is_gathered_from_ranks(monkeypatch, size, words):
    monkeypatch.setattr(export, "BLOCK_BYTES", 500)
    config = load_config([], ["run.formats=kv,fasttext"])

    def gathered(ranks):
        step = subword_step(words, words, 8, ranks=ranks)
        found = export.Composed.of(step.subwords, step.table, config, ranks)
        return [
            np.concatenate([*part] or [[]]) for part in (found.own, found.buckets, found.outputs)
        ]

    whole = subword_step(words, words, 8)
    first, weight_AD = whole.subwords.first, whole.table["weight"].numpy()
    used = len(whole.subwords.used_B)
    (own, buckets, outputs), *_ = checked(together(size, gathered))
    assert np.array_equal(own, weight_AD[first : first + words])
    assert np.array_equal(buckets, weight_AD[first + words : first + words + used])
    assert np.array_equal(outputs, whole.outputs["weight"][:words])


@pytest.mark.parametrize("engine", ["paged", "torch cache"])
@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_paged_rows_are_those_of_a_resident_table(engine, name):
    words, dim = 40, 16
    batches, vectors = batches_of(5, words, dim)
    resident = subword_step(words, vectors, dim, name=name)
    paged = subword_step(words, vectors, dim, name=name, engine=engine, slots=150, steps_per_page=2)
    losses = [train(step, batches, 0.02)[0] for step in (resident, paged)]
    assert torch.equal(*losses)
    for ours, theirs in zip(records(paged), records(resident), strict=True):
        assert torch.equal(ours, theirs)


def test_marks_are_those_of_the_unique_rows():
    words, dim = 40, 16
    (batch, *_), vectors = batches_of(7, words, dim)
    step = subword_step(words, vectors, dim)
    marks_A = torch.zeros(step.table.rows, dtype=torch.bool)
    step.kernels.mark(batch, marks_A)
    rows_U = step.kernels.unique_rows(batch).rows.rows_U
    assert torch.equal(marks_A.nonzero().flatten(), rows_U.long())
    assert (rows_U >= step.kernels.subwords.first).any()
    of_words = marks_A[: 2 * words].clone()
    of_words[1::2] = False  # the words of a lookahead window
    soon_A = step.kernels.with_subwords(of_words)
    assert torch.equal(
        soon_A[step.kernels.subwords.first :], marks_A[step.kernels.subwords.first :]
    )


@pytest.mark.parametrize("owners", [1, 3])
def test_owners_list_each_row_with_its_words(owners):
    subwords = Subwords.of(words_of(400), (1, 5, 3000), vectors=700)
    words_W, place_V = np.array([0, 5, 6, 77, 399]), 2 * np.arange(400, dtype=np.int32)
    found = []
    for owner in range(owners):
        bags = owned_bags(owner, owners, subwords)
        rows_1N, places_1N = np.full((2, 1, len(bags[1])), -1, np.int32)
        list_rows(words_W, bags, place_V, rows_1N, places_1N)
        is_listed_N = places_1N[0] >= 0
        rows_n = rows_1N[0, is_listed_N]
        assert (rows_n // ROWS_PER_OWNER % owners == owner).all()
        found += zip((places_1N[0, is_listed_N] // 2).tolist(), rows_n.tolist(), strict=True)
    rows_N, place_N = subwords.rows_of(torch.from_numpy(words_W))
    expected = zip(words_W[place_N].tolist(), rows_N.tolist(), strict=True)
    assert sorted(found) == sorted(expected)


@pytest.mark.gpu
@pairwise(CASES | {"engine": ["resident", "cache"], "dtype": [torch.float32, torch.bfloat16]})
def test_cuda_kernels_equal_the_reference(objective, softmax, name, cap, dim, engine, dtype):
    words = 40
    batches, vectors = batches_of(3, words, dim, objective, softmax)
    slots = 150 if softmax == "both" else 125  # hardly more than a batch needs
    how = {"engine": engine, "slots": slots, "dtype": dtype}
    expected = subword_step(words, vectors, dim, "reference", name, cap)
    step = subword_step(words, vectors, dim, "cuda", name, cap, device="cuda", **how)
    on_gpu = [moved(batch, "cuda") for batch in batches]
    theirs, ours = train(expected, batches, 0.02), train(step, on_gpu, 0.02)
    rtol, atol = (1e-3, 1e-4) if dtype == torch.float32 else (0.05, 0.02)
    torch.testing.assert_close(ours[0], theirs[0], rtol=rtol, atol=atol)
    assert torch.equal(ours[1], theirs[1])
    if dtype == torch.float32:
        equal_records(step, expected, words, rtol, atol)


@pytest.mark.gpu
def test_cuda_marks_are_those_of_the_unique_rows():
    words, dim = 40, 16
    (batch, *_), vectors = batches_of(7, words, dim)
    step = subword_step(words, vectors, dim)
    on_gpu = subword_step(words, vectors, dim, "cuda", device="cuda")
    marks_A = torch.zeros(step.table.rows, dtype=torch.bool)
    marks = marks_A.cuda()
    step.kernels.mark(batch, marks_A)
    on_gpu.kernels.mark(moved(batch, "cuda"), marks)
    assert torch.equal(marks.cpu(), marks_A)
    rows = on_gpu.kernels.unique_rows(moved(batch, "cuda")).rows
    assert rows.unique_rows().sort().values.tolist() == marks_A.nonzero().flatten().tolist()
