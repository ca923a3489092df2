"""gensim's Word2Vec, trained here: arguments, vectors, files, callbacks."""

import copy
import inspect
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gensim
import numpy as np
import pytest
import torch
from gensim.models.callbacks import CallbackAny2Vec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.small_text import record_calls
from w2v import Word2Vec
from w2v.config import OPTIMIZERS, ConfigError, load_config
from w2v.rows.optim import RowOptimizer
from w2v.text.vocab import keep_probabilities
from w2v.training import plan
from w2v.word2vec import auto

ROOT = Path(__file__).parents[2]
COLORS = "red green blue pink grey".split()
NUMBERS = "one two three four five".split()
GENSIMS = {"vector_size": 16, "min_count": 1, "window": 2, "sample": 0}
SMALL = GENSIMS | {"device": "cpu", "batch_size": 64}
UNTRAINED_LOSS = 6 * np.log(2)  # of a pair and its five negatives


def sentences(count=400, topics=(COLORS, NUMBERS), seed=0):
    """Return sentences of 8 words, each of one topic."""
    rng = random.Random(seed)
    return [rng.choices(rng.choice(topics), k=8) for _ in range(count)]


def nearest(model, word, count):
    return {found for found, _ in model.wv.most_similar(word, topn=count)}


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)  # fastest for steps this small
    return Word2Vec(sentences(), epochs=5, **SMALL)


@pytest.fixture
def reloaded(model, tmp_path):
    """A copy of the model that a test may change."""
    model.save(str(tmp_path / "model"))
    return Word2Vec.load(str(tmp_path / "model"))


def test_arguments_have_gensims_order_and_defaults():
    ours = inspect.signature(Word2Vec.__init__).parameters
    theirs = inspect.signature(gensim.models.Word2Vec.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    further = list(ours.values())[len(theirs) :]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in further)
    differ = {name for name in theirs if ours[name].default != theirs[name].default}
    assert differ == {"alpha", "min_alpha", "workers"}
    train = inspect.signature(Word2Vec.train).parameters
    assert [*train, "kwargs"] == list(inspect.signature(gensim.models.Word2Vec.train).parameters)


def test_without_alpha_the_optimizer_has_its_tuned_settings():
    model = Word2Vec(optimizer="AdamW", seed=7)
    tuned = load_config(["adamw"])
    config = model._config(vars(model), epochs=5, seed=7)
    assert config.optimizer == tuned.optimizer
    assert config.train == replace(tuned.train, seed=7, device="auto")
    assert model.alpha == auto.RATES["AdamW"]


def test_sgd_on_the_cpu_steps_once_per_center_as_in_gensim():
    def optimizer(alpha=None, **arguments):
        model = Word2Vec(optimizer="SGD", device="cpu", alpha=alpha, **arguments)
        return model._config(vars(model), 5, 1, alpha).optimizer

    assert RowOptimizer(optimizer(alpha=0.025)).is_plain_sgd
    assert optimizer(alpha=0.025).lr == 0.025
    # These need batches, and so a cap on occurrences.
    cap = load_config(["sgd"]).optimizer.occurrence_cap
    assert optimizer(optimizer_args={"momentum": 0.5}).occurrence_cap == cap != 0
    assert optimizer(settings=["train.kernels=reference"]).occurrence_cap == cap


WORDS = st.text("abcdefg ", min_size=1, max_size=2)
SENTENCES = st.lists(st.lists(WORDS, max_size=12), min_size=1, max_size=30)
LIMITS = st.none() | st.integers(1, 20)


@settings(max_examples=50)
@given(SENTENCES, st.integers(0, 3), LIMITS, LIMITS)
def test_vocabulary_and_initial_vectors_are_gensims(text, min_count, most_words, most_counted):
    limits = {"min_count": min_count, "max_final_vocab": most_words, "max_vocab_size": most_counted}
    ours = Word2Vec(vector_size=4, **limits)
    theirs = gensim.models.Word2Vec(vector_size=4, sg=1, **limits)
    for each in (ours, theirs):
        each.build_vocab(text)
    assert ours.wv.index_to_key == theirs.wv.index_to_key
    for word in theirs.wv.index_to_key:
        assert ours.wv.get_vecattr(word, "count") == theirs.wv.get_vecattr(word, "count")
    assert np.array_equal(ours.wv.vectors, theirs.wv.vectors)


def test_it_learns_and_its_vectors_are_gensims(model):
    assert type(model.wv) is gensim.models.KeyedVectors
    assert nearest(model, "red", 4) == set(COLORS) - {"red"}
    assert 0 < model.loss_per_pair < UNTRAINED_LOSS
    assert model.predict_output_word(["one", "two"], topn=1)[0][0] in NUMBERS


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
def test_a_model_trained_on_a_gpu_continues_on_the_cpu(engine, tmp_path):
    on_gpu = {"vector_size": 32, "device": "cuda", "settings": [f"transfer.engine={engine}"]}
    model = Word2Vec(sentences(), epochs=5, **SMALL | on_gpu)
    assert nearest(model, "red", 4) == set(COLORS) - {"red"}
    model.save(str(tmp_path / "model"))
    loaded = Word2Vec.load(str(tmp_path / "model"))
    assert np.array_equal(loaded.wv.vectors, model.wv.vectors)
    loaded.device = "cpu"
    loaded.settings = []
    before = loaded.wv.vectors.copy()
    for each in (model, loaded):
        assert each.train(sentences(seed=1), total_examples=400, epochs=1) == (3200, 3200)
        assert each.loss_per_pair < UNTRAINED_LOSS
        assert not np.array_equal(each.wv.vectors, before)


def test_the_seed_decides_the_vectors(model):
    again = Word2Vec(sentences(), epochs=5, **SMALL)
    other = Word2Vec(sentences(), epochs=5, seed=2, **SMALL)
    assert np.array_equal(model.wv.vectors, again.wv.vectors)
    assert not np.array_equal(model.wv.vectors, other.wv.vectors)


def test_a_saved_model_continues_as_the_original(tmp_path):
    file = str(tmp_path / "model")
    original = Word2Vec(sentences(), epochs=2, **SMALL)
    original.save(file)
    assert gensim.models.Word2Vec.load(file).wv.index_to_key == original.wv.index_to_key
    loaded = Word2Vec.load(file)
    without_state = Word2Vec.load(file)
    without_state._states = {}
    for each in (original, loaded, without_state):
        assert each.train(sentences(), total_examples=400, epochs=1) == (3200, 3200)
    assert np.array_equal(original.wv.vectors, loaded.wv.vectors)
    assert np.array_equal(original.syn1neg, loaded.syn1neg)
    assert not np.array_equal(original.wv.vectors, without_state.wv.vectors)


def test_new_text_adds_words_and_keeps_the_old_ones(reloaded):
    known = list(reloaded.wv.index_to_key)
    before = reloaded.wv.vectors.copy()
    animals = "ape cat dog fox gnu".split()
    more = sentences(topics=[animals, [*COLORS, "cyan"]], seed=1)
    reloaded.build_vocab(more, update=True)
    assert reloaded.wv.index_to_key[: len(known)] == known
    assert np.array_equal(reloaded.wv.vectors[: len(known)], before)
    reloaded.train(more, total_examples=reloaded.corpus_count, epochs=5)
    assert nearest(reloaded, "ape", 1) < set(animals)
    rows = reloaded.wv.key_to_index
    absent = [rows[word] for word in NUMBERS]
    assert np.array_equal(reloaded.wv.vectors[absent], before[absent])
    present = [rows[word] for word in COLORS]
    assert not np.array_equal(reloaded.wv.vectors[present], before[present])


def test_batch_size_and_alpha_are_those_given_or_suit_the_text(monkeypatch):
    plans = []
    make_plan = plan.make_plan
    monkeypatch.setattr(
        plan, "make_plan", lambda *args: plans.append(make_plan(*args)) or plans[-1]
    )
    arguments = [{}, {"batch_size": 100}, {"batch_size": 25}, {"batch_size": 25, "alpha": 0.123}]
    for given_arguments in arguments:
        Word2Vec(sentences(), epochs=1, device="cpu", **GENSIMS, **given_arguments)
    configs = [planned.config for planned in plans]
    chosen = auto.batch_size("Adamax", auto.Use.of(configs[0], plans[0].vocab))
    assert [config.train.batch_size for config in configs] == [chosen, 100, 25, 25]
    assert configs[0].optimizer.lr > 0
    assert configs[3].optimizer.lr == 0.123


def test_a_rate_that_is_given_to_train_is_kept_also_if_it_is_the_default_one(monkeypatch):
    model = Word2Vec(sentences(), optimizer="Adam", epochs=1, **SMALL)
    rates = []
    make_plan = plan.make_plan

    def planned(config, *args):
        rates.append(config.optimizer.lr)
        return make_plan(config, *args)

    monkeypatch.setattr(plan, "make_plan", planned)
    for rate in ({}, {"start_alpha": model.alpha}, {"start_alpha": float("0.12")}, {}):
        model.train(sentences(), total_examples=400, epochs=1, **rate)
    assert auto.RATES["Adam"] == 0.12
    assert rates == [0.0, 0.0, 0.12, 0.12]  # 0: auto


def test_the_text_and_not_the_kept_words_decides_the_rate(monkeypatch):
    plans = []
    make_plan = plan.make_plan
    monkeypatch.setattr(
        plan, "make_plan", lambda *args: plans.append(make_plan(*args)) or plans[-1]
    )
    text = [[f"word{row}"] * count for row, count in enumerate((4, 5, 6, 70, 80))]
    for limits in ({"min_count": 1}, {"min_count": 60}, {"max_final_vocab": 2}):
        Word2Vec(text, **SMALL | limits)
    assert [len(planned.vocab.words) for planned in plans] == [5, 2, 2]
    assert [planned.vocab.median for planned in plans] == [38] * 3  # of words of 5 and more


@each_case("arguments", [{"alpha": 0.025, "optimizer": "Adamax"}, {"alpha": 0.025}, {}])
def test_an_alpha_alone_is_one_of_sgd(arguments):
    expected = arguments.get("optimizer", "SGD" if arguments else "Adam")
    assert Word2Vec(**SMALL, **arguments).optimizer == expected


def test_callbacks_see_each_epoch():
    class Recorder(CallbackAny2Vec):
        def __init__(self):
            self.calls, self.losses, self.similarities = [], [], []

        def on_train_begin(self, model):
            self.calls.append("train")

        def on_epoch_begin(self, model):
            self.calls.append("epoch")

        def on_epoch_end(self, model):
            self.losses.append(model.get_latest_training_loss())
            self.similarities.append(model.wv.similarity("red", "blue"))

        def on_train_end(self, model):
            self.calls.append("end")

    recorder = Recorder()
    settings = {"callbacks": [recorder], "compute_loss": True, "shrink_windows": False}
    model = Word2Vec(sentences(), epochs=3, sg=1, **settings, **SMALL)
    assert recorder.calls == ["train", "epoch", "epoch", "epoch", "end"]
    assert len(set(recorder.similarities)) == 3
    # gensim's running sum; a sentence of 8 words has 2 * (7 + 6) pairs with a window of 2.
    first, *later = np.diff([0, *recorder.losses]) / (400 * 26)
    assert UNTRAINED_LOSS > first > later[0] > later[1] == pytest.approx(model.loss_per_pair)


class CallLog:
    """Callbacks of no class of gensim's, which log their names."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda model: self.calls.append(name)


class Writer(CallbackAny2Vec):
    def on_epoch_begin(self, model):
        model.wv.vectors[model.wv.key_to_index["one"]] += 1


def test_callbacks_are_of_any_class_with_gensims_methods():
    log = CallLog()
    Word2Vec(sentences(20), epochs=1, callbacks=[log], **SMALL)
    assert log.calls == ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_callback_writes_is_trained_on(reloaded, device):
    reloaded.device = device
    before = reloaded.wv["one"] + 3
    text = sentences(topics=[COLORS])  # without that word
    reloaded.train(text, total_examples=400, epochs=3, callbacks=[Writer()])
    np.testing.assert_allclose(reloaded.wv["one"], before, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_callback_cannot_write_into_paged_vectors(reloaded, precision):
    reloaded.device = "cuda"
    reloaded.settings = ["transfer.engine=mapped", f"train.precision={precision}"]
    text = {"corpus_iterable": sentences(), "total_examples": 400, "epochs": 2}
    reloaded.train(**text, callbacks=[CallbackAny2Vec()])  # which writes nothing
    with pytest.raises(ValueError, match="a callback has changed .*transfer.engine=resident"):
        reloaded.train(**text, callbacks=[Writer()])


def test_without_compute_loss_the_sum_is_zero_as_in_gensim(model):
    assert model.get_latest_training_loss() == 0


def test_a_corpus_file_gives_the_same_vectors(tmp_path, model):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(map(" ".join, sentences())))
    from_file = Word2Vec(corpus_file=str(file), epochs=5, **SMALL)
    assert np.array_equal(from_file.wv.vectors, model.wv.vectors)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns(name):
    # In the batches that ASGD needs for so short a text, it takes 2,000 steps.
    model = Word2Vec(sentences(200), epochs=2, optimizer=name, **SMALL | {"batch_size": 16})
    assert nearest(model, "red", 4) <= set(COLORS)
    assert np.isfinite(model.wv.vectors).all()


PAGED_ON_CPU = {"settings": ["transfer.engine=mapped"], "device": "cpu", "min_count": 1}


@each_case(
    "arguments, key_words",
    [
        ({"vector_size": 0}, "^vector_size=0 is out of range"),
        ({"window": "wide"}, "^window='wide' is not such a number as gensim takes"),
        ({"sample": -1}, "^sample=-1.0 is out of range"),
        ({"workers": -1}, "^workers=-1 is out of range; it must be at least 1"),
        ({"workers": 0}, "^workers=0 is out of range"),
        ({"seed": 1.5}, "^seed=1.5 is not such a number as gensim takes"),
        ({"batch_size": -1}, "^batch_size=-1 is out of range; it must be at least 1"),
        ({"alpha": -1.0}, "^alpha=-1.0 is out of range"),
        ({"alpha": 0}, "^alpha=0 is out of range; it must be above 0"),
        ({"optimizer": "Adamaxx", "alpha": 0.1}, "^optimizer=Adamaxx .* did you mean Adamax?"),
        ({"optimizer": "Adafactor"}, "mixes rows, so it cannot be paged"),
        ({"optimizer": "Mine"}, "choose one of ASGD .* or package.Class"),
        ({"optimizer_args": {"beta": 1}}, "optimizer_args.beta .* did you mean betas?"),
        ({"settings": ["model.window=3"]}, "'model.window=3' cannot be set here"),
        ({"settings": "model.window=3"}, "'model.window=3' cannot be set here"),
        ({"settings": ["transfer.engin=mapped"]}, "did you mean 'transfer.engine'?"),
        ({"sentences": [COLORS], **PAGED_ON_CPU}, "transfer.engine=mapped pages"),
        ({"negative": 0}, "^negative=0 .* 1 without hs=1"),
        ({"device": "gpu"}, "^device=gpu is not one of .* did you mean cuda?"),
    ],
)
def test_unsupported_arguments_are_refused_on_one_line(arguments, key_words):
    with pytest.raises(ValueError, match=key_words) as caught:
        Word2Vec(**arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sg", [0, 1])
@pytest.mark.parametrize("negative", [0, 5])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_hierarchical_softmax_learns_and_its_scores_are_gensims(sg, negative, optimizer):
    arguments = {"sg": sg, "hs": 1, "negative": negative, "optimizer": optimizer, "epochs": 5}
    model = Word2Vec(sentences(), **SMALL | arguments)
    likely, unlikely = ["one", "two", "four"], ["one", "red", "four"]
    scores = model.score([likely, unlikely])
    assert scores[0] > scores[1] and (scores < 0).all()
    # gensim sums logarithms of probabilities of the words, by its own tree and window.
    loss = 0.0
    for center, word in enumerate(likely):
        row = model.wv.key_to_index[word]
        nodes_LD = model.syn1[model.wv.get_vecattr(row, "point")]
        signs_L = 1.0 - 2.0 * model.wv.get_vecattr(row, "code")
        contexts = model.wv[[other for at, other in enumerate(likely) if at != center]]
        for vector in contexts if sg else [contexts.mean(0)]:
            loss += np.log1p(np.exp(-signs_L * (nodes_LD @ vector))).sum()
    assert scores[0] == pytest.approx(-loss, rel=0.05)
    # Training goes on from these vectors, and a larger vocabulary has another tree.
    model.build_vocab([["new", "newer"] * 5], update=True)
    model.train([["new", "newer"] * 5], total_examples=1, epochs=2)
    assert model.syn1.shape == model.wv.vectors.shape
    assert model.score([likely])[0] < 0


def test_divergence_names_a_smaller_alpha():
    with pytest.raises(ValueError, match="diverged .*SGD.* give alpha=2.5e"):
        Word2Vec(sentences(), optimizer="SGD", alpha=1e38, **SMALL)


def test_vectors_that_were_added_are_not_trained(reloaded):
    reloaded.wv.add_vectors(["new", "newer"], np.ones((2, 16)))
    text = [*sentences(), ["new", "red", "newer"] * 3]
    reloaded.wv.vectors_lockf = np.full(1, 0.5)
    assert reloaded.train(text, total_examples=401, epochs=1) == (3203, 3209)
    assert (reloaded.wv[["new", "newer"]] == 1).all() and len(reloaded.syn1neg) == 10


ON_GPU = [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", ["cpu", *ON_GPU])
@pytest.mark.parametrize("optimizer", ["Adamax", "AdamW", "NAdam", "SGD"])
def test_locked_vectors_are_not_trained(reloaded, optimizer, device):
    reloaded.device = device
    reloaded.optimizer = optimizer  # SGD steps center by center, NAdam by torch
    locks = np.array([0.0, 0.0, *np.ones(8)])
    reloaded.wv.vectors_lockf = locks
    for _ in range(2):
        before = reloaded.wv.vectors.copy()
        reloaded.train(sentences(100), total_examples=100, epochs=1)
        changed = (reloaded.wv.vectors != before).any(axis=1)
        assert np.array_equal(changed, locks != 0)


def test_output_vectors_learn_from_locked_words(reloaded):
    reloaded.wv.vectors_lockf = np.zeros(1)  # one for all words
    vectors, outputs = reloaded.wv.vectors.copy(), reloaded.syn1neg.copy()
    reloaded.train(sentences(), total_examples=400, epochs=1)
    assert np.array_equal(reloaded.wv.vectors, vectors)
    assert not np.array_equal(reloaded.syn1neg, outputs)


def test_lock_factors_scale_updates(reloaded):
    reloaded.optimizer = "SGD"
    reloaded.settings = ["train.kernels=reference"]  # sums a batch, as a GPU does
    reloaded.batch_size = 10**6  # one step
    before = reloaded.wv.vectors.copy()
    reloaded.wv.vectors_lockf = np.linspace(0, 2, 10)
    outputs = reloaded.syn1neg.copy()
    arguments = {"total_examples": 400, "epochs": 1, "start_alpha": 0.001}
    reloaded.train(sentences(), **arguments)
    locked = reloaded.wv.vectors - before
    reloaded.wv.vectors[:] = before
    reloaded.syn1neg[:] = outputs
    reloaded.train_count -= 1  # on which the seed depends
    reloaded.wv.vectors_lockf = np.ones(1)
    reloaded.train(sentences(), **arguments)
    expected = (reloaded.wv.vectors - before) * np.linspace(0, 2, 10)[:, None]
    np.testing.assert_allclose(locked, expected, atol=1e-6)
    assert np.abs(expected[1:]).max(axis=1).min() > 1e-4


@pytest.mark.parametrize("optimizer", ["Adamax", "SGD"])
def test_a_callback_locks_and_unlocks(reloaded, optimizer):
    class Locker(CallbackAny2Vec):
        def __init__(self):
            self.reds = []

        def on_epoch_begin(self, model):
            model.wv.vectors_lockf = np.full(1, len(self.reds) % 2)

        def on_epoch_end(self, model):
            self.reds.append(model.wv["red"].copy())

    locker = Locker()
    reloaded.optimizer = optimizer
    before = reloaded.wv["red"].copy()
    reloaded.train(sentences(), total_examples=400, epochs=3, callbacks=[locker])
    changed = [
        (red != old).any() for red, old in zip(locker.reds, [before, *locker.reds], strict=False)
    ]
    assert changed == [False, True, False]


@each_case("locks", [np.empty(0), np.ones((2, 2)), np.array([np.nan])])
def test_lock_factors_that_mean_nothing_are_refused(reloaded, locks):
    reloaded.wv.vectors_lockf = locks
    with pytest.raises(ValueError, match="vectors_lockf has .* for each of its vectors, or one"):
        reloaded.train(sentences(), total_examples=400, epochs=1)


@pytest.mark.gpu
def test_paged_vectors_cannot_be_locked(reloaded):
    reloaded.device = "cuda"
    reloaded.settings = ["transfer.engine=mapped"]
    reloaded.wv.vectors_lockf = np.zeros(1)
    with pytest.raises(ValueError, match="vectors_lockf .*transfer.engine=resident"):
        reloaded.train(sentences(), total_examples=400, epochs=1)


def test_vectors_of_a_file_replace_those_of_known_words_and_stay(reloaded, tmp_path):
    file = str(tmp_path / "vectors.txt")
    given = gensim.models.KeyedVectors(16)
    given.add_vectors(["red", "blue", "unknown"], np.full((3, 16), 0.25, np.float32))
    given.save_word2vec_format(file)
    reloaded.wv.vectors_lockf = np.ones(len(reloaded.wv))
    reloaded.wv.intersect_word2vec_format(file, lockf=0.0)
    before = reloaded.wv["green"].copy()
    reloaded.train(sentences(), total_examples=400, epochs=1)
    assert (reloaded.wv["red"] == 0.25).all() and (reloaded.wv["blue"] == 0.25).all()
    assert "unknown" not in reloaded.wv and (reloaded.wv["green"] != before).any()


def test_scores_are_for_hierarchical_softmax_as_in_gensim(model):
    with pytest.raises(RuntimeError, match="hierarchical softmax .* hs=1") as caught:
        model.score(sentences())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rates", [{"start_alpha": -1.0}, {"end_alpha": -1.0}])
def test_a_refused_call_changes_nothing(model, rates):
    before = (model.alpha, model.min_alpha, model.epochs)
    with pytest.raises(ValueError, match="alpha=-1.0 is out of range"):
        model.train(sentences(), total_examples=400, epochs=2, **rates)
    assert (model.alpha, model.min_alpha, model.epochs) == before


def test_the_learning_rates_of_calls_are_gensims(monkeypatch):
    configs = record_calls(monkeypatch, plan, "make_plan")
    model = Word2Vec(**SMALL)
    model.build_vocab(sentences())
    totals = {"total_examples": 400, "epochs": 1}
    model.train(sentences(), **totals)  # the rate that suits the text
    model.alpha = 0.5
    for _ in range(2):  # the loop of old tutorials
        model.train(sentences(), **totals)
        model.alpha -= 0.25
        model.min_alpha = model.alpha
    model.train(sentences(), start_alpha=0.125, end_alpha=0.25, **totals)
    model.train(sentences(), start_alpha=0.5, end_alpha=0.125, **totals)
    rates = [(config.optimizer.lr, config.optimizer.min_lr) for config in configs]
    assert rates[0] == (0, 0)  # auto
    assert rates[1:] == [(0.5, 0), (0.25, 0.25), (0.25, 0.25), (0.5, 0.125)]


def test_text_without_known_words_trains_nothing(reloaded, caplog):
    before = reloaded.wv.vectors.copy()
    log = CallLog()
    assert reloaded.train([["x", "y"]], total_examples=1, epochs=2, callbacks=[log]) == (0, 4)
    assert "nothing is trained" in caplog.text
    assert np.array_equal(reloaded.wv.vectors, before)
    # As in gensim, this is a call of `train` like any other.
    epoch = ["on_epoch_begin", "on_epoch_end"]
    assert log.calls == ["on_train_begin", *epoch, *epoch, "on_train_end"]
    assert reloaded.train_count == 2


def test_training_logs_gensims_lines_and_events(caplog):
    def logged(kind, **arguments):
        caplog.clear()
        model = kind(seed=1, workers=1, **arguments)
        model.build_vocab(sentences(20))
        with caplog.at_level("INFO"):
            model.train(sentences(20), total_examples=19, total_words=150, epochs=2)
        events = [event["msg"] for event in model.lifecycle_events if event["event"] == "train"]
        lines = [line for line in caplog.messages if line.startswith("EPOCH")]
        return events[0], [re.sub("took.*", "", line) for line in [*lines, *events[1:]]]

    ours = logged(Word2Vec, **SMALL)
    assert ours == logged(gensim.models.Word2Vec, **GENSIMS)
    assert any("supplied example count (20) did not equal" in line for line in ours[1])


@pytest.mark.parametrize("renewed", ["build_vocab", "init_weights"])
def test_new_words_or_weights_begin_with_a_new_optimizer_state(renewed):
    model, fresh = Word2Vec(sentences(), epochs=1, **SMALL), Word2Vec(**SMALL)
    text = sentences(topics=[NUMBERS] if renewed == "build_vocab" else (COLORS, NUMBERS))
    fresh.build_vocab(text)
    getattr(model, renewed)(*([text] if renewed == "build_vocab" else []))
    fresh.train_count = model.train_count  # on which the seed depends
    fresh.wv.vectors[:] = model.wv.vectors  # gensim keeps them
    for each in (model, fresh):
        each.train(text, total_examples=400, epochs=1)
    assert np.array_equal(model.wv.vectors, fresh.wv.vectors)


def test_a_second_vocabulary_may_have_more_words():
    model = Word2Vec([["a", "b", "c"] * 5] * 9, **SMALL)
    model.build_vocab([[*"vwxyz"] * 5] * 9)
    assert model.wv.vectors.shape == (5, model.vector_size) and set(model.wv.index_to_key) == {
        *"vwxyz"
    }


@pytest.mark.parametrize(
    "name, arguments",
    [("Adam", None), ("SGD", None), ("Adagrad", None), ("SGD", {"momentum": 0.5})],
)
def test_another_optimizer_trains_on_with_a_new_state(reloaded, name, arguments):
    reloaded.optimizer = name
    reloaded.optimizer_args = arguments
    reloaded.batch_size = 16
    reloaded.train(sentences(), total_examples=400, epochs=1)
    assert reloaded.loss_per_pair < UNTRAINED_LOSS
    reloaded.train(sentences(), total_examples=400, epochs=1)  # with that state


@pytest.mark.parametrize("first, second", [("Adadelta", "RMSprop"), ("Adam", "AdamW")])
def test_an_optimizer_takes_no_state_of_another_with_the_same_names(first, second):
    model = Word2Vec(sentences(), epochs=1, optimizer=first, **SMALL)
    model.optimizer = second
    fresh = copy.deepcopy(model)
    fresh._states = {}
    for each in (model, fresh):
        each.train(sentences(), total_examples=400, epochs=1)
    assert np.array_equal(model.wv.vectors, fresh.wv.vectors)


def test_numpys_numbers_are_numbers(model):
    numbers = {"vector_size": np.int64(16), "min_count": np.int32(1), "window": np.uint8(2)}
    numbers |= {"sample": np.float32(0), "seed": np.int64(1), "epochs": np.int16(5)}
    numbers |= {
        "batch_size": np.int64(64),
        "negative": np.int64(5),
        "ns_exponent": np.float64(0.75),
        "device": "cpu",
    }
    again = Word2Vec(sentences(), **numbers)
    assert np.array_equal(again.wv.vectors, model.wv.vectors)


def test_without_a_seed_each_model_differs():
    first, second = (Word2Vec(sentences(), **SMALL | {"seed": None, "sample": None}) for _ in "ab")
    assert first.sample is None and not np.array_equal(first.wv.vectors, second.wv.vectors)


@each_case("sample", [None, 0, 1e-2, 20, 10**6])
def test_subsampling_is_gensims(sample):
    model = Word2Vec(**SMALL | {"sample": sample})
    model.build_vocab(sentences())
    counts = model.wv.expandos["count"]
    share = model._config(vars(model), 1, 1, words=counts.sum()).model.sample
    kept = keep_probabilities(counts, counts.sum(), share)
    np.testing.assert_allclose(model.wv.expandos["sample_int"] / 2**32, kept, rtol=1e-6)


def test_further_words_are_subsampled_as_gensim_counts_them():
    model = Word2Vec(**SMALL | {"sample": 1e-2})
    model.build_vocab(sentences(1000))
    more = [["new", "w1", "w2", "new"]] * 250
    model.build_vocab(more, update=True)
    trained, _ = model.train(more, total_examples=len(more), epochs=1)
    kept = [model.wv.get_vecattr(word, "sample_int") / 2**32 for line in more for word in line]
    assert trained == pytest.approx(sum(kept), rel=0.1)


@pytest.mark.parametrize("shrink_windows", [True, False])
def test_a_window_wider_than_any_sentence_is_the_whole_sentence(shrink_windows):
    arguments = {"window": 10**9, "shrink_windows": shrink_windows, "compute_loss": True, "sg": 1}
    model = Word2Vec(sentences(100), **SMALL | {"epochs": 1} | arguments)
    pairs = model.get_latest_training_loss() / model.loss_per_pair
    assert pairs == pytest.approx(100 * 8 * 7)  # nearly all drawn windows exceed the sentence


def test_workers_are_threads():
    class Recorder(CallbackAny2Vec):
        def on_epoch_begin(self, model):
            self.threads = torch.get_num_threads()

    recorder = Recorder()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        Word2Vec(sentences(100), callbacks=[recorder], workers=1, batch_words=4, **SMALL)
        assert (recorder.threads, torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sg", [1, 0])
def test_a_model_of_gensims_trains_on_with_sgd(tmp_path, sg):
    theirs = gensim.models.Word2Vec(sentences(), sg=sg, alpha=0.05, epochs=1, **GENSIMS)
    theirs.save(str(tmp_path / "model"))
    model = Word2Vec.load(str(tmp_path / "model"))
    assert np.array_equal(model.wv.vectors, theirs.wv.vectors)
    model.device = "cpu"
    model.train(sentences(), total_examples=400, epochs=20)
    assert type(model) is Word2Vec and model.loss_per_pair < 0.9 * UNTRAINED_LOSS


class Derived(Word2Vec):
    """A class that a user has derived."""


def test_a_loaded_model_keeps_its_class_and_optimizer(tmp_path):
    file = str(tmp_path / "model")
    Word2Vec(sentences(), optimizer="Adagrad", epochs=1, **SMALL).save(file)
    loaded = Derived.load(file)
    assert type(loaded) is Word2Vec and loaded.optimizer == "Adagrad" and loaded._states
    gensim.models.FastText(sentences(20), vector_size=4, min_count=1, bucket=9).save(file)
    assert type(Word2Vec.load(file)) is gensim.models.FastText


def test_vectors_that_cannot_be_trained_are_refused_before_training(model, tmp_path):
    file = str(tmp_path / "model")
    model.save(file, sep_limit=0)
    read_only, narrow, short, other = (Word2Vec.load(file, mmap="r") for _ in range(4))
    narrow.wv.vectors = narrow.wv.vectors[:, 1:]
    short.wv.vectors = short.wv.vectors[1:]
    model.wv.save_word2vec_format(file)
    other.wv = gensim.models.KeyedVectors.load_word2vec_format(file)
    unbuilt = Word2Vec(**SMALL)
    unbuilt.wv = model.wv
    log = CallLog()
    for loaded in (read_only, narrow, short, other, unbuilt):
        message = "wv, of shape .* is not from .* build_vocab; .*write into its wv.vectors"
        if loaded is read_only:
            message = "vectors are read-only; .*mmap='r'"
        with pytest.raises(ValueError, match=message):
            loaded.train(sentences(), total_examples=400, epochs=1, callbacks=[log])
    assert "on_epoch_end" not in log.calls


def test_a_dry_run_of_prepare_vocab_counts_as_gensim_and_keeps_the_vectors(reloaded):
    theirs, red_D = gensim.models.Word2Vec(**GENSIMS), reloaded.wv["red"].copy()
    for model in (theirs, reloaded):
        model.scan_vocab(sentences(9))
    for args, named in (([False, True, None, 9, None, True], {}), ([], {"dry_run": True})):
        found = [model.prepare_vocab(*args, **named) for model in (theirs, reloaded)]
        assert found[0] == found[1]
        assert np.array_equal(reloaded.wv["red"], red_D)


@pytest.mark.parametrize("hs", [0, 1])
def test_null_word_is_the_last_of_the_vocabulary(hs):
    model = Word2Vec(sentences(), null_word=1, hs=hs, negative=5 * (1 - hs), epochs=5, **SMALL)
    assert model.wv.index_to_key[-1] == "\0" and len(model.wv) == 11
    assert nearest(model, "red", 3) < {*COLORS}


def test_what_has_no_effect_in_gensim_has_none_here(model):
    again = Word2Vec(hashfxn=len, **SMALL)
    again.build_vocab(sentences())
    again.train(sentences(), total_examples=400, epochs=5, word_count=100)
    assert np.array_equal(again.wv.vectors, model.wv.vectors)
    assert again.lifecycle_events[-1]["event"] == "train"


def test_a_model_borrows_the_words_of_another(model):
    other = Word2Vec(**SMALL)
    other.reset_from(model)
    other.train(sentences(), total_examples=400, epochs=5)
    assert np.array_equal(other.wv.vectors, model.wv.vectors)


def test_torchs_default_dtype_changes_nothing(model):
    torch.set_default_dtype(torch.float64)
    try:
        again = Word2Vec(sentences(), epochs=5, **SMALL)
    finally:
        torch.set_default_dtype(torch.float32)
    assert np.array_equal(again.wv.vectors, model.wv.vectors)


TEXTS = ["the cat sat", "on the mat"]


class Frame:
    """A data frame: iterating gives the names of columns."""

    columns = ("text", "label")

    def __iter__(self):
        return iter(self.columns)


class Column:
    """A column of a dataset: a sequence that reads its rows on demand."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)


@each_case(
    ("given", "remedy"),
    [
        ("file.txt", "sentence 0 of a str is 'f', .* corpus_file=FILE"),
        (Path("file.txt"), "must be an iterable of lists of strings, got .*file.txt"),
        (TEXTS, r"is 'the cat sat', not .* \[text.split\(\) for text in texts"),
        (np.array(TEXTS, object), "sentence 0 of a ndarray is 'the cat sat'"),
        ([*sentences(9), "late text"], "sentence 9 of a list is 'late text'"),
        (Frame(), r"a Frame is a table, not lists of words; .* table\['text'\].str.split\(\)"),
        ({"text": TEXTS}, "sentence 0 of a dict is 'text'"),
        ([{"text": text} for text in TEXTS], r"row\['text'\].split\(\) for row in dataset"),
        ([*sentences(2), None], "sentence 2 of a list is 'None', not a list"),
        ([*sentences(2), float("nan")], "sentence 2 of a list is 'nan', not a list"),
        (iter(sentences(9)), r"list_iterator gives .* only once, .* list\(sentences\)"),
        ((words for words in sentences(9)), "a generator gives its sentences only once"),
    ],
)
def test_what_is_not_lists_of_words_is_refused_with_the_remedy(given, remedy):
    with pytest.raises(TypeError, match=remedy):
        Word2Vec(given, epochs=1, **SMALL)


def test_texts_are_refused_in_later_calls_too(reloaded):
    for call in (
        lambda: reloaded.train(TEXTS, total_examples=2, epochs=1),
        lambda: reloaded.build_vocab(TEXTS, update=True),
        lambda: Word2Vec(**SMALL).build_vocab("file.txt"),
    ):
        with pytest.raises(TypeError, match="not a list of words"):
            call()


@each_case("kind", [Column, tuple, lambda rows: np.array(rows, object), lambda rows: rows])
def test_columns_of_lists_are_sentences(kind):
    rows = sentences(9)
    found = Word2Vec(kind(rows), epochs=1, **SMALL)
    assert np.array_equal(found.wv.vectors, Word2Vec(rows, epochs=1, **SMALL).wv.vectors)


def test_an_iterator_serves_each_call_that_reads_once(caplog):
    model = Word2Vec(**SMALL)
    once = iter(sentences(9))
    model.build_vocab(once)
    assert model.train(iter(sentences(9)), total_examples=9, epochs=1)[1] == 72
    assert model.train(once, total_examples=9, epochs=1) == (0, 0)
    assert "an iterator is read again; nothing is trained" in caplog.text


def trained_from_freq(word_freq, **arguments):
    model = Word2Vec(**SMALL | {"min_count": 0} | arguments)
    model.build_vocab_from_freq(word_freq)
    model.train(sentences(60), total_examples=60, epochs=2)
    return model


SHARES = {word: 0.01 * (n + 1) for n, word in enumerate(COLORS + NUMBERS)} | {"absent": 0.001}


@each_case(
    "arguments", [{}, {"alpha": 0.025}, {"hs": 1, "negative": 0}, {"ns_exponent": -1}, {"sg": 1}]
)
def test_shares_of_a_text_are_counts(arguments):
    model = trained_from_freq(SHARES, **arguments)
    assert model.wv.index_to_key == sorted(SHARES, key=SHARES.get, reverse=True)
    assert model.wv.get_vecattr("five", "count") == SHARES["five"]
    assert np.isfinite(model.wv.vectors).all() and model.loss_per_pair > 0
    # Shares mean what counts of the same proportions mean.
    counts = {word: round(1000 * share) for word, share in SHARES.items()}
    whole = trained_from_freq(counts, **arguments)
    assert whole.wv.index_to_key == model.wv.index_to_key
    assert np.allclose(whole.cum_table, model.cum_table, atol=2) if model.negative else True
    if "alpha" in arguments:  # else the rate suits the text, or the counts
        assert np.allclose(whole.wv.vectors, model.wv.vectors, atol=1e-6)


@each_case("largest", [2**62, 2**63, 2**70, 1e308, np.uint64(2**63)])
@pytest.mark.parametrize("hs", [0, 1])
def test_counts_may_exceed_64_bits(largest, hs):
    model = trained_from_freq({"red": largest, "one": largest, "two": largest, "blue": 5}, hs=hs)
    assert model.wv.index_to_key[-1] == "blue"
    assert np.isfinite(model.wv.vectors).all() and np.isfinite(model.loss_per_pair)


@each_case(
    ("word_freq", "message"),
    [
        ({"a": math.nan}, r"word_freq\['a'\]=nan is out of range"),
        ({"a": math.inf}, r"word_freq\['a'\]=inf is out of range"),
        ({"a": -1}, r"word_freq\['a'\]=-1 is out of range"),
        ({"a": "many"}, r"word_freq\['a'\]='many' is not"),
    ],
)
def test_counts_that_are_not_numbers_are_refused(word_freq, message):
    with pytest.raises(ConfigError, match=message):
        Word2Vec(**SMALL).build_vocab_from_freq(word_freq)


def test_shares_go_with_no_counts(reloaded, caplog):
    with pytest.raises(ConfigError, match="max_final_vocab takes whole counts"):
        Word2Vec(max_final_vocab=3, **SMALL).build_vocab_from_freq(SHARES)
    with pytest.raises(ConfigError, match="update=True adds whole counts"):
        reloaded.build_vocab_from_freq(SHARES, update=True)
    with pytest.raises(ConfigError, match="update=True adds whole counts"):
        trained_from_freq(SHARES).build_vocab(sentences(9), update=True)
    Word2Vec(**SMALL).build_vocab_from_freq(SHARES)
    with pytest.raises(RuntimeError, match="build vocabulary"):  # gensim's, of rare words too
        Word2Vec([["once", "each"]], min_count=2)
    for least in (1, 2):
        assert f"min_count={least} keeps no word; lower it (to 0 for shares)" in caplog.text


def test_numbers_are_taken_without_loss_or_refused():
    text = dict(vector_size="8", window="2", hs="0", sg="1", sample="1e-3", min_count="1")
    model = Word2Vec(sentences(9), **SMALL | text)
    assert (model.vector_size, model.window, model.hs, model.sg) == (8, 2, 0, 1)
    assert Word2Vec(sentences(9), **SMALL | {"vector_size": np.uint8(8)}).wv.vector_size == 8
    for name in ("vector_size", "window", "negative", "min_count", "batch_size", "epochs"):
        with pytest.raises(ConfigError, match=f"^{name}=2.5 is not such a number"):
            Word2Vec(**SMALL | {name: 2.5})
        with pytest.raises(ConfigError, match=f"^{name}="):
            Word2Vec(**SMALL | {name: "many"})
    with pytest.raises(ConfigError, match="^hs='False' is not such a number"):
        Word2Vec(**SMALL | {"hs": "False"})
    with pytest.raises(ConfigError, match="^sample=inf is out of range"):
        Word2Vec(**SMALL | {"sample": math.inf})
    with pytest.raises(ConfigError, match="^ns_exponent=1e\\+308 is out of range"):
        Word2Vec(**SMALL | {"ns_exponent": 1e308})
    with pytest.raises(ConfigError, match="torch takes no text"):
        Word2Vec(**SMALL | {"optimizer_args": {"amsgrad": "maybe"}})


def test_importing_w2v_imports_neither_torch_nor_gensim():
    code = "import sys, w2v; assert not {'torch', 'gensim', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
