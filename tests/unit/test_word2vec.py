"""The class for people who come from gensim: the same arguments, vocabulary, files and further training; what it has not, it says."""

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

from w2v import Word2Vec
from w2v.api.word2vec import DESCENT, TUNED
from w2v.config import ModelConfig
from w2v.config import load_config as load_settings
from w2v.model.optim import RowOptimizer, rowwise_optimizers
from w2v.training import plan

ROOT = Path(__file__).parents[2]
TOPICS = ["red green blue pink grey".split(), "one two three four five".split()]
SMALL = {"vector_size": 16, "min_count": 1, "window": 2, "sample": 0, "device": "cpu"}


def two_topics(lines=400, topics=TOPICS, seed=0):
    """Words of the two topics never share a line."""
    rng = random.Random(seed)
    return [rng.choices(rng.choice(topics), k=8) for _ in range(lines)]


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)  # quickest for so small steps
    return Word2Vec(two_topics(), epochs=5, **SMALL)


def test_arguments_are_gensims_in_its_order_with_its_defaults():
    ours, theirs = (
        inspect.signature(cls.__init__).parameters for cls in (Word2Vec, gensim.models.Word2Vec)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(
        ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in list(ours)[len(theirs) :]
    )
    differ = {name for name in theirs if ours[name].default != theirs[name].default}
    assert differ == {"sg", "alpha", "min_alpha"}
    trained, by_gensim = (
        inspect.signature(cls.train).parameters for cls in (Word2Vec, gensim.models.Word2Vec)
    )
    assert [*trained, "kwargs"] == list(by_gensim)


def test_without_alpha_the_optimizer_has_the_settings_of_its_config():
    ours = Word2Vec(optimizer="AdamW", seed=7)
    said = load_settings([TUNED / "adamw.yaml"])
    config = ours._config(ModelConfig(), 5, 7, None, None)
    assert config.optimizer == said.optimizer and config.train == replace(
        said.train, seed=7, device="auto"
    )
    assert ours.alpha == said.optimizer.lr


def test_sgd_on_the_cpu_steps_for_each_center_as_gensim_does():
    def config(**how):
        return Word2Vec(device="cpu", **how)._config(ModelConfig(), 5, 1, how.get("alpha"), None)

    alone = config(optimizer="SGD", alpha=0.025)
    assert RowOptimizer(alone.optimizer, fused=True).descends and alone.optimizer.lr == 0.025
    assert config(optimizer="SGD").optimizer.lr == load_settings([DESCENT]).optimizer.lr
    for how in (
        {"optimizer_args": {"momentum": 0.5}},
        {"settings": ["train.kernels=reference"]},
    ):  # these need batches, and so a cap
        assert (
            config(optimizer="SGD", **how).optimizer.occurrence_cap
            == load_settings([TUNED / "sgd.yaml"]).optimizer.occurrence_cap
            > 0
        )


SENTENCES = st.lists(
    st.lists(st.text("abcdefg ", min_size=1, max_size=2), max_size=12), min_size=1, max_size=30
)


@settings(max_examples=50)
@given(SENTENCES, st.integers(0, 3), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_the_vocabulary_is_gensims(sentences, min_count, max_final_vocab, max_vocab_size):
    limits = {
        "min_count": min_count,
        "max_final_vocab": max_final_vocab,
        "max_vocab_size": max_vocab_size,
    }
    ours, theirs = (
        Word2Vec(vector_size=4, **limits),
        gensim.models.Word2Vec(vector_size=4, sg=1, **limits),
    )
    for each in (ours, theirs):
        each.build_vocab(sentences)
    assert ours.wv.index_to_key == theirs.wv.index_to_key
    assert [ours.wv.get_vecattr(word, "count") for word in ours.wv.index_to_key] == [
        theirs.wv.get_vecattr(word, "count") for word in theirs.wv.index_to_key
    ]
    assert np.array_equal(ours.wv.vectors, theirs.wv.vectors)  # the initial ones


def test_it_learns_and_its_vectors_are_gensims(model):
    assert type(model.wv) is gensim.models.KeyedVectors
    assert {word for word, _ in model.wv.most_similar("red", topn=4)} == {
        "green",
        "blue",
        "pink",
        "grey",
    }
    assert 0 < model.get_latest_training_loss() < 6 * np.log(2)
    assert model.predict_output_word(["one", "two"], topn=1)[0][0] in TOPICS[1]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
def test_it_learns_on_a_gpu_and_goes_on_without_one(engine, tmp_path):
    how = SMALL | {"vector_size": 32, "device": "cuda", "settings": [f"transfer.engine={engine}"]}
    model = Word2Vec(two_topics(), epochs=5, **how)
    assert {word for word, _ in model.wv.most_similar("red", topn=4)} == {
        "green",
        "blue",
        "pink",
        "grey",
    }
    model.save(str(tmp_path / "model"))
    loaded = Word2Vec.load(str(tmp_path / "model"))
    assert np.array_equal(loaded.wv.vectors, model.wv.vectors)
    loaded.device, loaded.settings = "cpu", []
    before = loaded.wv.vectors.copy()
    for each in (model, loaded):
        assert each.train(two_topics(seed=1), total_examples=400, epochs=1) == (3200, 3200)
        assert each.get_latest_training_loss() < 6 * np.log(2) and not np.array_equal(
            each.wv.vectors, before
        )


def test_the_same_seed_gives_the_same_vectors(model):
    again, other = (
        Word2Vec(two_topics(), epochs=5, **SMALL),
        Word2Vec(two_topics(), epochs=5, seed=2, **SMALL),
    )
    assert np.array_equal(model.wv.vectors, again.wv.vectors) and not np.array_equal(
        model.wv.vectors, other.wv.vectors
    )


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    text, how = two_topics(), {"total_examples": 400, "epochs": 1}
    first = Word2Vec(text, epochs=2, **SMALL)
    first.save(str(tmp_path / "model"))
    second = Word2Vec.load(str(tmp_path / "model"))
    assert (
        gensim.models.Word2Vec.load(str(tmp_path / "model")).wv.index_to_key
        == first.wv.index_to_key
    )
    trained = [each.train(text, **how) for each in (first, second)]
    assert trained[0] == trained[1] == (3200, 3200)
    assert np.array_equal(first.wv.vectors, second.wv.vectors) and np.array_equal(
        first.syn1neg, second.syn1neg
    )
    fresh = Word2Vec.load(str(tmp_path / "model"))
    fresh._states = {}
    fresh.train(text, **how)
    assert not np.array_equal(
        fresh.wv.vectors, first.wv.vectors
    )  # so the optimizer's state was saved


def test_new_text_brings_new_words_and_keeps_the_old(model, tmp_path):
    model.save(str(tmp_path / "model"))
    model = Word2Vec.load(str(tmp_path / "model"))
    known, before = list(model.wv.index_to_key), model.wv.vectors.copy()
    more = two_topics(400, [["ape", "cat", "dog", "fox", "gnu"], [*TOPICS[0], "cyan"]], seed=1)
    model.build_vocab(more, update=True)
    assert model.wv.index_to_key[: len(known)] == known and np.array_equal(
        model.wv.vectors[: len(known)], before
    )
    model.train(more, total_examples=model.corpus_count, epochs=5)
    assert model.wv.most_similar("ape", topn=1)[0][0] in {"cat", "dog", "fox", "gnu"}
    unseen, seen = (
        [model.wv.key_to_index[word] for word in words] for words in (TOPICS[1], TOPICS[0])
    )
    assert np.array_equal(
        model.wv.vectors[unseen], before[unseen]
    )  # input rows of words that are no context stay
    assert not np.array_equal(model.wv.vectors[seen], before[seen])


def test_a_batch_size_is_kept_and_the_rate_goes_with_it(monkeypatch):
    seen = []
    make_plan = plan.make_plan
    monkeypatch.setattr(
        plan, "make_plan", lambda config, opened: seen.append(config) or make_plan(config, opened)
    )
    for how in ({}, {"batch_size": 100}, {"batch_size": 25}, {"batch_size": 25, "alpha": 0.123}):
        Word2Vec(two_topics(), epochs=1, **how, **SMALL)
    fit, hundred, less, given = seen
    assert fit.train.batch_size == 4 and (hundred.train.batch_size, less.train.batch_size) == (
        100,
        25,
    )  # 3,200 centers, 500 steps
    assert (
        hundred.optimizer.lr == less.optimizer.lr
    )  # of 10 words all are in each batch, however small
    assert (given.train.batch_size, given.optimizer.lr) == (25, 0.123)


@pytest.mark.parametrize(
    "how, warned",
    [
        ({"alpha": 0.025, "batch_size": 64}, True),
        ({"alpha": 0.025, "optimizer": "SGD"}, False),
        ({}, False),
    ],
)
def test_gensims_rate_for_another_optimizer_is_remarked_upon(how, warned, caplog):
    Word2Vec(two_topics(), epochs=1, **SMALL, **how)
    assert warned == ("alpha=0.025 is Adamax's learning rate here, and " in caplog.text)


def test_callbacks_see_each_epoch():
    class Told(CallbackAny2Vec):
        def __init__(self):
            self.said, self.losses, self.near = [], [], []

        def on_train_begin(self, model):
            self.said.append("train")

        def on_epoch_begin(self, model):
            self.said.append("epoch")

        def on_epoch_end(self, model):
            self.losses.append(model.get_latest_training_loss())
            self.near.append(model.wv.similarity("red", "blue"))

        def on_train_end(self, model):
            self.said.append("end")

    told = Told()
    Word2Vec(two_topics(), epochs=3, callbacks=[told], **SMALL)
    assert told.said == ["train", "epoch", "epoch", "epoch", "end"]
    assert told.losses[2] < told.losses[0] and len(set(told.near)) == 3


def test_a_file_is_read_as_gensim_reads_it(tmp_path, model):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(map(" ".join, two_topics())))
    from_file = Word2Vec(corpus_file=str(file), epochs=5, **SMALL)
    assert np.array_equal(from_file.wv.vectors, model.wv.vectors)


@pytest.mark.parametrize("name", rowwise_optimizers())
def test_every_optimizer_learns(name):
    model = Word2Vec(two_topics(), epochs=5, optimizer=name, **SMALL)
    assert model.get_latest_training_loss() < 6 * np.log(2) and np.isfinite(model.wv.vectors).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sg": 0}, "sg=0 is not supported: skip-gram"),
        ({"hs": 1}, "hs=1 is not supported: only negative sampling"),
        ({"negative": 0}, "negative=0 is out of range"),
        ({"cbow_mean": 0}, "cbow_mean=0 is not supported"),
        ({"hashfxn": len}, "hashfxn=.* is not supported: .* set seed"),
        ({"null_word": 1}, "null_word=1 is not supported"),
        ({"batch_words": 1}, "batch_words=1 is not supported: .*batch_size"),
        ({"vector_size": 0}, "vector_size=0 is out of range"),
        ({"batch_size": 0}, "batch_size=0 is out of range; it must be None or at least 1"),
        ({"alpha": -1.0}, "lr=-1.0 is out of range"),
        ({"optimizer": "Adamaxx", "alpha": 0.1}, "did you mean Adamax?"),
        ({"optimizer": "Adafactor", "alpha": 0.1}, "cannot be paged"),
        (
            {"optimizer": "Mine"},
            "optimizer='Mine' has no settings in .*; spell it as torch.optim does, or give alpha",
        ),
        (
            {"optimizer_args": {"beta": 1}},
            "optimizer.args.beta is not an argument of Adamax; did you mean betas?",
        ),
        ({"settings": ["model.window=3"]}, "'model.window=3' is none that can be set here"),
        ({"settings": ["transfer.engin=mapped"]}, "did you mean 'transfer.engine'?"),
        (
            {
                "settings": ["transfer.engine=mapped"],
                "device": "cpu",
                "sentences": TOPICS,
                "min_count": 1,
            },
            "transfer.engine=mapped pages",
        ),
        ({"device": "gpu"}, "train.device=gpu .* is not one of auto, cpu, cuda; did you mean cpu?"),
        ({"callbacks": [print]}, "derive it from gensim's CallbackAny2Vec"),
    ],
)
def test_what_is_not_supported_is_said_in_one_line(wrong, words):
    with pytest.raises(ValueError, match=words) as caught:
        Word2Vec(**wrong)
    assert "\n" not in str(caught.value)


def test_words_that_are_not_to_be_trained_are_refused(model, tmp_path):
    model.save(str(tmp_path / "model"))
    model = Word2Vec.load(str(tmp_path / "model"))
    model.wv.vectors_lockf = np.array([0.0, *np.ones(9)], np.float32)
    with pytest.raises(
        ValueError,
        match=r"wv.vectors_lockf other than 1 is not supported: .* set it to numpy.ones\(1\)",
    ):
        model.train(two_topics(), total_examples=400, epochs=1)
    model.wv.vectors_lockf = np.ones(1)
    model.train(two_topics(), total_examples=400, epochs=1)


@pytest.mark.parametrize(
    "how", [{"start_alpha": -1.0}, {"end_alpha": 9.0}, {"start_alpha": 0.5, "end_alpha": 0.6}]
)
def test_a_call_that_is_refused_changes_nothing(model, how):
    before = model.alpha, model.min_alpha, model.epochs
    with pytest.raises(ValueError, match="out of range"):
        model.train(two_topics(), total_examples=400, epochs=2, **how)
    assert (model.alpha, model.min_alpha, model.epochs) == before


def test_text_without_known_words_trains_nothing_as_in_gensim(model, caplog):
    before = model.wv.vectors.copy()
    assert model.train([["x", "y"]], total_examples=1, epochs=3) == (0, 6)
    assert (
        "no line of the text has two words of the vocabulary (2 words read)" in caplog.text
        and np.array_equal(model.wv.vectors, before)
    )


def test_importing_w2v_stays_light():
    code = "import sys, w2v; assert not {'torch', 'gensim', 'numpy'} & set(sys.modules); from w2v import Word2Vec; Word2Vec"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
