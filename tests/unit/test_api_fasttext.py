"""gensim's FastText, trained here: arguments, buckets, files."""

import inspect

import gensim
import numpy as np
import pytest
from gensim.models.fasttext import FastTextKeyedVectors, load_facebook_model, save_facebook_model

from tests.support.each_case import each_case
from w2v import FastText
from w2v.config import ConfigError
from w2v.vectors import load

FORMS = [[f"{stem}{end}" for end in ("en", "er", "es", "st", "end")] for stem in ("kauf", "sing")]
TEXT = [[form, *FORMS[n % 2]] for n in range(200) for form in FORMS[n % 2]]
SMALL = {"vector_size": 16, "min_count": 1, "window": 3, "sample": 0, "device": "cpu"}
SMALL |= {"bucket": 500, "sg": 1}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model():
    return FastText(TEXT, epochs=3, workers=1, **SMALL)


def test_arguments_have_gensims_order_defaults_and_limits():
    ours = inspect.signature(FastText.__init__).parameters
    theirs = inspect.signature(gensim.models.FastText.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    differ = {name for name in theirs if ours[name].default != theirs[name].default}
    assert differ == {"alpha", "min_alpha", "workers"}
    assert FastText(**SMALL | {"min_n": "4", "bucket": 1e2}).wv.min_n == 4
    for name, value in (("bucket", -1), ("min_n", -1), ("max_n", 300), ("bucket", 2**31)):
        with pytest.raises(ConfigError, match=f"^{name}={value} is out of range"):
            FastText(**SMALL | {name: value})
    for name, value in (("bucket", "many"), ("max_n", None)):
        with pytest.raises(ConfigError, match=f"^{name}={value!r} is not such a number"):
            FastText(**SMALL | {name: value})


def test_unseen_forms_are_near_their_stem_and_words_may_be_numbers(model):
    assert type(model.wv) is FastTextKeyedVectors
    assert "kaufendes" not in model.wv.key_to_index
    nearest = {word for word, _ in model.wv.most_similar("kaufendes", topn=3)}
    assert nearest <= set(FORMS[0])
    before = model.wv.vectors.copy()
    model.wv.adjust_vectors()
    np.testing.assert_allclose(before, model.wv.vectors, rtol=1e-5, atol=1e-7)
    numbers, names = (FastText([kinds] * 9, **SMALL) for kinds in ([1, 2, 3], ["1", "2", "3"]))
    assert numbers.wv.index_to_key == [3, 2, 1]
    assert np.array_equal(numbers.wv.vectors, names.wv.vectors)


def test_only_buckets_of_the_vocabulary_are_trained(model):
    untrained = FastText(**SMALL)
    untrained.build_vocab(TEXT)
    is_used = np.zeros(500, bool)
    is_used[np.concatenate(untrained.wv.buckets_word)] = True
    assert not is_used.all()
    changed = (model.wv.vectors_ngrams != untrained.wv.vectors_ngrams).any(1)
    assert np.array_equal(changed, is_used)
    assert (model.wv.vectors_vocab != untrained.wv.vectors_vocab).any(1).all()


@pytest.mark.parametrize("optimizer", ["Adam", "NAdam", "SGD"])
def test_a_saved_model_continues_as_the_original(tmp_path, optimizer):
    text = TEXT[::15]
    original = FastText(text, epochs=1, workers=1, optimizer=optimizer, **SMALL)
    original.save(str(tmp_path / "model"))
    loaded = FastText.load(str(tmp_path / "model"))
    for each in (original, loaded):
        each.train(text, total_examples=len(text), epochs=1)
    assert np.array_equal(original.wv.vectors, loaded.wv.vectors)
    assert np.array_equal(original.wv.vectors_ngrams, loaded.wv.vectors_ngrams)


def test_a_model_borrows_the_words_of_another(model):
    other = FastText(workers=1, **SMALL)
    other.reset_from(model)
    other.train(TEXT, total_examples=len(TEXT), epochs=3)
    assert np.array_equal(other.wv.vectors, model.wv.vectors)
    assert np.array_equal(other.wv["ungesungen"], model.wv["ungesungen"])


def test_new_words_keep_the_buckets_and_their_state(model, tmp_path):
    model.save(str(tmp_path / "model"))
    more = FastText.load(str(tmp_path / "model"))
    before = more.wv.vectors_ngrams.copy()
    more.build_vocab([["neuwort", "kaufen"]] * 50, update=True)
    assert np.array_equal(more.wv.vectors_ngrams, before)
    more.train([["neuwort", "kaufen"]] * 50, total_examples=50, epochs=1)
    singing = [more.wv.buckets_word[more.wv.key_to_index["singst"]]]
    others = np.setdiff1d(np.concatenate(singing), more.wv.buckets_word[-1])
    others = np.setdiff1d(others, more.wv.buckets_word[more.wv.key_to_index["kaufen"]])
    assert len(others)
    assert not np.array_equal(more.wv.vectors_ngrams, before)
    assert "neuwort" in more.wv.key_to_index


def test_files_of_fasttext_are_written_and_read(model, tmp_path):
    path = str(tmp_path / "model.bin")
    save_facebook_model(model, path)
    theirs, words = load_facebook_model(path), load.load_words(path)
    for vectors in (theirs.wv.vectors, words.vectors):
        np.testing.assert_allclose(vectors, model.wv.vectors, rtol=1e-5, atol=1e-6)
    assert np.array_equal(theirs.syn1neg, model.syn1neg)
    np.testing.assert_allclose(words.ngrams.compose("kaufendes"), model.wv["kaufendes"], rtol=1e-5)


def test_without_ngrams_it_is_word2vec():
    for min_n, max_n, buckets in ((3, 2, 0), (0, 0, 500)):
        model = FastText(**SMALL, min_n=min_n, max_n=max_n)
        assert model.wv.bucket == buckets  # as in gensim, which keeps 500 that no n-gram is in
        model.build_vocab(TEXT)
        before = model.wv.vectors.copy()
        model.train(TEXT, total_examples=len(TEXT), epochs=1)
        assert (model.wv.vectors != before).any(1).all()
        assert np.array_equal(model.wv.vectors, model.wv.vectors_vocab)
        assert ("unseen" in model.wv) == bool(buckets)


def test_models_of_gensim_train_on(tmp_path):
    theirs = gensim.models.FastText(TEXT, vector_size=8, min_count=1, epochs=1, bucket=50)
    theirs.save(str(tmp_path / "model"))
    ours = FastText.load(str(tmp_path / "model"))
    assert type(ours) is FastText
    before = ours.wv.vectors.copy()
    ours.train(TEXT, total_examples=len(TEXT), epochs=1)
    assert not np.array_equal(ours.wv.vectors, before)


@each_case("name, locks", [("vocab", [0, 1]), ("vocab", [1, 0]), ("ngrams", [0, 1, 1])])
def test_vectors_of_words_or_ngrams_are_locked_as_in_gensim(name, locks):
    """A lock of every second or third vector, as gensim repeats them."""
    model = FastText(TEXT, **SMALL)
    setattr(model.wv, f"vectors_{name}_lockf", np.array(locks, np.float32))
    before = {part: getattr(model.wv, f"vectors_{part}").copy() for part in ("vocab", "ngrams")}
    model.train(TEXT, total_examples=len(TEXT), epochs=1)
    for part, vectors in before.items():
        changed = (getattr(model.wv, f"vectors_{part}") != vectors).any(1)
        is_free = np.resize(locks if part == name else [1], len(vectors)) != 0
        assert changed.any() and not changed[~is_free].any()
        assert part == "ngrams" or changed[is_free].all()
    with pytest.raises(ConfigError, match=f"vectors_{name}_lockf has shape"):
        setattr(model.wv, f"vectors_{name}_lockf", np.ones((2, 2)))
        model.train(TEXT, total_examples=len(TEXT), epochs=1)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
def test_a_model_trained_on_a_gpu_continues_on_the_cpu(engine, tmp_path):
    on_gpu = SMALL | {"device": "cuda", "settings": [f"transfer.engine={engine}"]}
    model = FastText(TEXT, epochs=3, **on_gpu)
    nearest = {word for word, _ in model.wv.most_similar("kaufendes", topn=3)}
    assert nearest <= set(FORMS[0])
    model.device, model.settings = "cpu", []
    before = model.wv.vectors.copy()
    model.train(TEXT, total_examples=len(TEXT), epochs=1)
    assert not np.array_equal(model.wv.vectors, before)
