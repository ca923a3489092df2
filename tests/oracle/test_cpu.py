"""CPU kernels: threads, SGD center by center, the search for negatives."""

import threading
import time

import gensim
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.steps import (
    make_step,
    part_of,
    problem,
    records,
    train,
    train_on_text,
    with_tree,
)
from w2v.config import ModelConfig, OptimizerConfig
from w2v.rows.optim import RowOptimizer
from w2v.word2vec import cpu_loops
from w2v.word2vec.batch import FAULT_BITS, Batch, Objective, output_vectors
from w2v.word2vec.cpu import ThreadGrads, Threads
from w2v.word2vec.cpu_loops import UniqueRows
from w2v.word2vec.huffman import make_tree

CBOW = Objective(cbow=True)
MODELS = pytest.mark.parametrize(
    "model",
    [
        ModelConfig(negative=5),
        ModelConfig(negative=5, architecture="cbow"),
        ModelConfig(negative=0, hs=True),
        ModelConfig(negative=5, hs=True, architecture="cbow"),
    ],
    ids=lambda model: f"{model.architecture} {model.negative} {model.hs}",
)
SOFTMAX = ["negatives", "tree", "both"]


def make(name, kernels="cpu", rows=20, dim=100):
    """Return a step with one thread, whose learning rate is 0.02."""
    return make_step(OptimizerConfig(name=name, lr=0.02), rows, dim, kernels)


def kernels_for(name):
    return "sequential" if name == "SGD" else "cpu"


# Records of 20 dimensions are whole vectors, computed as such.
@pairwise(
    {
        "dim, negative": [(1, 1), (100, 5), (20, 5), (33, 5)],
        "objective": [Objective(), Objective(weighted=9), CBOW, CBOW._replace(mean=False)],
        "softmax": SOFTMAX,
    }
)
@settings(max_examples=6)
@given(
    seed=st.integers(0, 2**31),
    centers=st.integers(1, 25),
    window=st.integers(1, 9),
    rows=st.integers(1, 80),
)
def test_sequential_sgd_equals_a_reference_step_for_each_center(
    dim, negative, objective, softmax, seed, centers, window, rows
):
    batch, weights_TVD = problem(seed, centers, window, negative, rows, dim)
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
        rows = weights_TVD.shape[1]
    ours, theirs = make("SGD", "sequential", rows, dim), make("SGD", "reference", rows, dim)
    beside = 0 if dim == 20 else 7
    for step in (ours, theirs):
        for table, weights_VD in zip(step.tables, weights_TVD, strict=True):
            table.records_VR.fill_(beside)
            table["weight"].copy_(weights_VD)
    # gensim's lock factors: 0 for rows that are not trained.
    factors_V = torch.tensor([1.0, 0.0, 0.5])[torch.arange(rows) % 3]
    ours.kernels.input_factors = factors_V.numpy()
    (loss,), (pairs,) = train(ours, [batch], 0.05)
    losses = torch.zeros(centers)
    for center in range(centers):
        before_VD = theirs.inputs["weight"].clone()
        (losses[center],), (pairs_of_center,) = train(
            theirs, [part_of(batch, center, center + 1)], 0.05
        )
        pairs -= pairs_of_center
        theirs.inputs["weight"].copy_(
            before_VD.lerp(theirs.inputs["weight"], factors_V.unsqueeze(1))
        )
    assert pairs == 0
    assert loss.item() == pytest.approx(losses.sum().item(), rel=1e-4, abs=1e-5)
    if centers:
        locked_VD = ours.inputs["weight"][1::3]
        assert torch.equal(locked_VD, weights_TVD[0][1::3])
    for table, expected in zip(ours.tables, theirs.tables, strict=True):
        torch.testing.assert_close(table["weight"], expected["weight"], rtol=1e-3, atol=1e-4)
        assert (table.records_VR[:, dim:] == beside).all()  # what is beside the weights


@pytest.mark.slow
def test_any_number_of_targets_may_be_taken_at_once(monkeypatch):
    batch, _ = problem(1, 60, 5, 5, 20, 100)
    compile_gradients = cpu_loops.compile_gradients.__wrapped__  # see conftest.py
    steps = [make("SGD", "sequential") for _ in range(2)]
    train(steps[0], [batch] * 3, 0.02)
    monkeypatch.setattr(
        cpu_loops, "compile_gradients", lambda _, *kind: compile_gradients(2, *kind)
    )
    train(steps[1], [batch] * 3, 0.02)
    for usual, other in zip(*map(records, steps), strict=True):
        torch.testing.assert_close(usual, other, rtol=1e-3, atol=1e-4)


@each_case("name, threads", [("Adam", 4), ("SGD", 1), ("NAdam", 2)])
@MODELS
def test_training_repeats_bit_for_bit(model, name, threads):
    config = OptimizerConfig(name=name, lr=0.02)
    kernels = kernels_for(name)
    runs = [train_on_text(config, kernels, model=model, threads=threads) for _ in range(2)]
    (step, losses), (same, same_losses) = runs
    assert torch.equal(losses, same_losses)
    assert all(map(torch.equal, records(step), records(same)))


@MODELS
def test_threads_without_locks_stay_finite_and_learn(model):
    config = OptimizerConfig(name="SGD", lr=0.05)
    step, losses = train_on_text(config, "sequential", model=model, threads=4)
    assert all(table.isfinite().all() for table in records(step))
    # A tree's vectors, which are not 0 at first, have more to unlearn than to learn.
    assert losses[-20:].mean() < (0.97 if model.hs else 0.9) * losses[:20].mean()


@pairwise({"name": ["SGD", "Adam", "NAdam"], "softmax": SOFTMAX, "objective": [Objective(), CBOW]})
def test_first_step_that_is_not_finite_is_noted(name, objective, softmax):
    batch, weights_TVD = problem(1, 200, 5, 5, 20, 100)
    batch = batch._replace(objective=objective)
    if softmax != "negatives":
        batch, weights_TVD = with_tree(batch, weights_TVD, alone=softmax == "tree")
    step = make(name, kernels_for(name), weights_TVD.shape[1])
    for number in (1, 2, 3):
        if number == 2:
            step.outputs["weight"][3, 50] = torch.nan
        before = records(step)
        (loss,), _ = train(step, [batch], 0.02)
        assert loss.isfinite() == (number == 1)
        assert int(step.state.fault) == (0 if number == 1 else (2 << FAULT_BITS) + 1)
        if name != "SGD" and number > 1:
            for table, old in zip(records(step), before, strict=True):
                assert torch.equal(table.nan_to_num(7), old.nan_to_num(7))


@pytest.mark.parametrize("name", ["RMSprop", "NAdam"])
def test_rows_that_would_not_stay_finite_are_not_written(name):
    batch, _ = problem(1, 200, 5, 5, 20, 100)
    step = make(name)
    step.inputs["weight"].fill_(0.1)
    step.outputs["weight"].zero_()  # so input rows have no gradient yet
    (loss,), _ = train(step, [batch], 1e38)
    assert loss.isfinite()
    assert int(step.state.fault) == (1 << FAULT_BITS) + 2  # rows of the output table
    assert all(table.isfinite().all() for table in records(step))


def test_threads_do_not_write_to_the_same_cache_lines():
    def lines(array):
        first = array.ctypes.data
        return set(range(first // 64, (first + array.nbytes - 1) // 64 + 1))

    grads = ThreadGrads(rows=1000, most=500, dim=100, threads=3)
    of_thread = [UniqueRows(*unique) for unique in grads.of_thread]
    for written, end in ("grad_UP", None), ("count_1", None), ("starts_P", 2 * 3 + 1):
        of_threads = [lines(getattr(unique, written)[:end]) for unique in of_thread]
        assert sum(map(len, of_threads)) == len(set.union(*of_threads))
    assert grads.grad_NP.ctypes.data % 64 == grads.grad_NP.strides[0] % 64 == 0


def test_only_plain_sgd_steps_center_by_center():
    def is_plain_sgd(**config):
        return RowOptimizer(OptimizerConfig(**config)).is_plain_sgd

    assert is_plain_sgd(name="SGD")
    assert not is_plain_sgd(name="SGD", occurrence_cap=16)
    assert not is_plain_sgd(name="SGD", args={"weight_decay": 0.1})
    assert not is_plain_sgd(name="SGD", args={"momentum": 0.9})
    assert not is_plain_sgd(name="Adam")


@each_case("objective", [Objective(), CBOW, CBOW._replace(mean=False)])
@pytest.mark.parametrize("hs, negative", [(False, 1), (True, 0), (True, 1)])
def test_sequential_sgd_is_gensims(objective, hs, negative):
    """Compare with gensim, all of whose negatives are one word here.

    gensim steps at each pair of skip-gram, so its centers have one context word, and once more at
    each where it has both a tree and negatives. Its logistic function, a table of 1,000 numbers, is
    that of logits .02 to .04 lower, as 1000 / 6 / 2 is 83 there: with a tree, whose labels are 0
    and 1 in turn, that moves the weights by 8 %, and without it by less.
    """
    rng, window, dim, lr = np.random.default_rng(1), 3, 16, 0.1
    lengths = rng.integers(2, 9 if objective.cbow else 3, 400)
    ids = [rng.integers(0, 30, n) * (rng.random(n) < 0.9) for n in lengths]
    theirs = gensim.models.Word2Vec(
        vector_size=dim,
        window=window,
        shrink_windows=False,
        sample=0,
        min_count=1,
        negative=negative,
        hs=hs,
        ns_exponent=50,
        sg=not objective.cbow,
        cbow_mean=objective.mean,
        alpha=lr,
        min_alpha=lr,
        workers=1,
    )
    sentences = [[str(word) for word in sentence] for sentence in ids]
    theirs.build_vocab(sentences)
    size = len(theirs.wv)
    ours = make("SGD", "sequential", output_vectors(size, hs, negative), dim)
    pairs = [(ours.inputs["weight"][:size], theirs.wv.vectors)]
    nodes_VD = ours.outputs["weight"]
    if negative:
        pairs.append((ours.outputs["weight"][:size], theirs.syn1neg))
        nodes_VD = nodes_VD[size:]
    if hs:
        pairs.append((nodes_VD, theirs.syn1[: len(nodes_VD)]))
        tree = make_tree(theirs.wv.expandos["count"], size if negative else 0)
        objective = objective._replace(tree=tree)
    for weights_VD, vectors_VD in pairs:
        weights_VD.copy_(torch.from_numpy(vectors_VD))
    words = [theirs.wv.key_to_index[word] for sentence in sentences for word in sentence]
    batch = Batch(
        words_n=torch.tensor(words, dtype=torch.int32),
        sentences_n=torch.arange(len(ids), dtype=torch.int32).repeat_interleave(
            torch.from_numpy(lengths)
        ),
        first=0,
        windows_B=torch.full((len(words),), window, dtype=torch.int32),
        negatives_BK=torch.zeros(len(words), negative, dtype=torch.int32),
        window=window,
        epochs_done=0.0,
        objective=objective,
    )
    train(ours, [batch] * 3, lr)
    theirs.train(sentences, total_examples=len(sentences), epochs=3)
    for weights_VD, vectors_VD in pairs:
        expected_VD = torch.from_numpy(vectors_VD)
        near = 0.15 if hs else 0.05
        assert (weights_VD - expected_VD).norm() < near * expected_VD.norm()


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_loops_are_compiled_once_for_any_number_of_threads(name):
    model = ModelConfig(negative=5)
    for threads in 1, 2:
        config = OptimizerConfig(name=name, lr=0.01)
        train_on_text(config, kernels_for(name), model=model, threads=threads)
    loop = cpu_loops.compile_gradients(None, name == "SGD", False, False)
    steps = cpu_loops.step_rows.signatures if name == "Adam" else []
    assert len(loop.signatures) == 1 and len(steps) <= 1


def test_threads_return_results_in_order_and_raise_once_all_have_finished():
    threads = Threads(3)
    assert threads.run(lambda number: 10 * number) == [0, 10, 20]
    finished = []

    def fail(number):
        if number == 1:
            raise ValueError("of thread 1")
        time.sleep(0.05)
        finished.append(number)

    with pytest.raises(ValueError, match="of thread 1"):
        threads.run(fail)
    assert sorted(finished) == [0, 2]
    assert threads.run(lambda number: number) == [0, 1, 2]


def test_threads_end_with_their_pool():
    before = set(threading.enumerate())
    threads = Threads(4)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    del threads
    for thread in started:
        thread.join(timeout=10)
    assert not any(map(threading.Thread.is_alive, started))
