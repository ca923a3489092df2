"""gensim's Word2Vec, trained here: arguments, vectors, files, callbacks."""

import inspect
import random
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

from tests.support.small_text import record_calls
from w2v import Word2Vec
from w2v.api.word2vec import CPU_SGD, TUNED
from w2v.config import load_config
from w2v.model.optim import RowOptimizer, rowwise_optimizers
from w2v.training import plan

ROOT = Path(__file__).parents[2]
COLORS = "red green blue pink grey".split()
NUMBERS = "one two three four five".split()
SMALL = {"vector_size": 16, "min_count": 1, "window": 2, "sample": 0, "device": "cpu"}
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
    assert differ == {"sg", "alpha", "min_alpha"}
    train = inspect.signature(Word2Vec.train).parameters
    assert [*train, "kwargs"] == list(inspect.signature(gensim.models.Word2Vec.train).parameters)


def test_without_alpha_the_optimizer_has_its_tuned_settings():
    model = Word2Vec(optimizer="AdamW", seed=7)
    tuned = load_config([TUNED / "adamw.yaml"])
    config = model._config({}, epochs=5, seed=7)
    assert config.optimizer == tuned.optimizer
    assert config.train == replace(tuned.train, seed=7, device="auto")
    assert model.alpha == tuned.optimizer.lr


def test_sgd_on_the_cpu_steps_once_per_center_as_in_gensim():
    def optimizer(alpha=None, **arguments):
        model = Word2Vec(optimizer="SGD", device="cpu", alpha=alpha, **arguments)
        return model._config({}, 5, 1, alpha).optimizer

    assert RowOptimizer(optimizer(alpha=0.025)).is_plain_sgd
    assert optimizer(alpha=0.025).lr == 0.025
    assert optimizer().lr == load_config([CPU_SGD]).optimizer.lr
    # These need batches, and so a cap on occurrences.
    cap = load_config([TUNED / "sgd.yaml"]).optimizer.occurrence_cap
    assert optimizer(optimizer_args={"momentum": 0.5}).occurrence_cap == cap > 0
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
    assert 0 < model.get_latest_training_loss() < UNTRAINED_LOSS
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
        assert each.get_latest_training_loss() < UNTRAINED_LOSS
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


def test_a_given_batch_size_is_kept_and_the_learning_rate_follows(monkeypatch):
    configs = record_calls(monkeypatch, plan, "make_plan")
    arguments = [{}, {"batch_size": 100}, {"batch_size": 25}, {"batch_size": 25, "alpha": 0.123}]
    for given_arguments in arguments:
        Word2Vec(sentences(), epochs=1, **given_arguments, **SMALL)
    # 500 steps for 3,200 centers
    assert [config.train.batch_size for config in configs] == [4, 100, 25, 25]
    # Each of the 10 words is in every batch, however small.
    assert configs[1].optimizer.lr == configs[2].optimizer.lr
    assert configs[3].optimizer.lr == 0.123


@pytest.mark.parametrize(
    "arguments, warned",
    [
        ({"alpha": 0.025, "batch_size": 64}, True),
        ({"alpha": 0.025, "optimizer": "SGD"}, False),
        ({}, False),
    ],
)
def test_an_unsuitable_alpha_is_warned_of(arguments, warned, caplog):
    Word2Vec(sentences(), epochs=1, **SMALL, **arguments)
    assert warned == ("alpha=0.025 is Adamax's learning rate here, and " in caplog.text)


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
    Word2Vec(sentences(), epochs=3, callbacks=[recorder], **SMALL)
    assert recorder.calls == ["train", "epoch", "epoch", "epoch", "end"]
    assert recorder.losses[2] < recorder.losses[0]
    assert len(set(recorder.similarities)) == 3


def test_a_corpus_file_gives_the_same_vectors(tmp_path, model):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(map(" ".join, sentences())))
    from_file = Word2Vec(corpus_file=str(file), epochs=5, **SMALL)
    assert np.array_equal(from_file.wv.vectors, model.wv.vectors)


@pytest.mark.parametrize("name", rowwise_optimizers())
def test_every_optimizer_learns(name):
    model = Word2Vec(sentences(), epochs=5, optimizer=name, **SMALL)
    assert model.get_latest_training_loss() < UNTRAINED_LOSS
    assert np.isfinite(model.wv.vectors).all()


PAGED_ON_CPU = {"settings": ["transfer.engine=mapped"], "device": "cpu", "min_count": 1}


@pytest.mark.parametrize(
    "arguments, key_words",
    [
        ({"sg": 0}, "sg=0 is not supported"),
        ({"hs": 1}, "hs=1 is not supported"),
        ({"negative": 0}, "negative=0 is out of range"),
        ({"cbow_mean": 0}, "cbow_mean=0 is not supported"),
        ({"hashfxn": len}, "hashfxn=.* is not supported: .* set seed"),
        ({"null_word": 1}, "null_word=1 is not supported"),
        ({"batch_words": 1}, "batch_words=1 is not supported: .*batch_size"),
        ({"vector_size": 0}, "vector_size=0 is out of range"),
        ({"batch_size": 0}, "batch_size=0 is out of range; it must be None or at least 1"),
        ({"alpha": -1.0}, "lr=-1.0 is out of range"),
        ({"optimizer": "Adamaxx", "alpha": 0.1}, "did you mean Adamax?"),
        ({"optimizer": "Adafactor", "alpha": 0.1}, "is not row-separable"),
        ({"optimizer": "Mine"}, "optimizer='Mine' has no settings in .* or give alpha"),
        ({"optimizer_args": {"beta": 1}}, "optimizer.args.beta .* did you mean betas?"),
        ({"settings": ["model.window=3"]}, "'model.window=3' cannot be set here"),
        ({"settings": ["transfer.engin=mapped"]}, "did you mean 'transfer.engine'?"),
        ({"sentences": [COLORS], **PAGED_ON_CPU}, "transfer.engine=mapped pages"),
        ({"device": "gpu"}, "train.device=gpu .* did you mean cpu?"),
        (
            {"sentences": [COLORS], "min_count": 1, "callbacks": [print]},
            "derive it from gensim's CallbackAny2Vec",
        ),
    ],
)
def test_unsupported_arguments_are_refused_on_one_line(arguments, key_words):
    with pytest.raises(ValueError, match=key_words) as caught:
        Word2Vec(**arguments)
    assert "\n" not in str(caught.value)


def test_divergence_names_a_smaller_alpha():
    with pytest.raises(ValueError, match="diverged .*SGD.* give alpha=2.5e"):
        Word2Vec(sentences(), optimizer="SGD", alpha=1e38, batch_size=64, **SMALL)


def test_locked_vectors_are_refused(reloaded):
    reloaded.wv.vectors_lockf = np.array([0.0, *np.ones(9)], np.float32)
    with pytest.raises(ValueError, match=r"vectors_lockf .* set it to numpy.ones\(1\)"):
        reloaded.train(sentences(), total_examples=400, epochs=1)
    reloaded.wv.vectors_lockf = np.ones(1)
    reloaded.train(sentences(), total_examples=400, epochs=1)


@pytest.mark.parametrize(
    "rates", [{"start_alpha": -1.0}, {"end_alpha": 9.0}, {"start_alpha": 0.5, "end_alpha": 0.6}]
)
def test_a_refused_call_changes_nothing(model, rates):
    before = (model.alpha, model.min_alpha, model.epochs)
    with pytest.raises(ValueError, match="out of range"):
        model.train(sentences(), total_examples=400, epochs=2, **rates)
    assert (model.alpha, model.min_alpha, model.epochs) == before


def test_text_without_known_words_trains_nothing(model, caplog):
    before = model.wv.vectors.copy()
    assert model.train([["x", "y"]], total_examples=1, epochs=3) == (0, 6)
    assert "nothing is trained" in caplog.text
    assert np.array_equal(model.wv.vectors, before)


def test_importing_w2v_imports_neither_torch_nor_gensim():
    check = "assert not {'torch', 'gensim', 'numpy'} & set(sys.modules)"
    code = f"import sys, w2v; {check}; from w2v import Word2Vec; Word2Vec"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
