"""The vocabulary against gensim's and against the formulas that it states."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.text.vocab import Vocab, VocabError

TEXT = [list("bacabd"), list("eba"), list("cf")]  # a 3, b 3, c 2, d e f 1: b appears before a


def test_order_is_by_count_then_first_appearance():
    vocab = Vocab.count(TEXT, min_count=1)
    assert vocab.words == ["b", "a", "c", "d", "e", "f"]
    assert vocab.counts.tolist() == [3, 3, 2, 1, 1, 1] and vocab.counts.dtype == np.int64
    assert (vocab.raw_words, vocab.raw_types) == (11, 6)
    assert vocab.index == {"b": 0, "a": 1, "c": 2, "d": 3, "e": 4, "f": 5}


def test_thresholds_drop_words_but_not_the_raw_figures():
    vocab = Vocab.count(iter(TEXT), min_count=2)
    assert vocab.words == ["b", "a", "c"]
    assert (vocab.raw_words, vocab.raw_types) == (11, 6)


words = st.lists(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=15), min_size=1, max_size=8
)


@settings(deadline=None)
@given(words, st.integers(1, 4), st.none() | st.integers(1, 11), st.none() | st.integers(2, 11))
def test_vocabulary_and_subsampling_are_gensims(text, min_count, max_final_vocab, max_vocab_size):
    from gensim.models import Word2Vec

    limits = {
        "min_count": min_count,
        "max_final_vocab": max_final_vocab,
        "max_vocab_size": max_vocab_size,
    }
    model = Word2Vec(vector_size=1, sample=0.05, **limits)
    model.build_vocab(text)
    if len(model.wv) < 2:
        with pytest.raises(VocabError):
            Vocab.count(text, **limits)
        return
    vocab = Vocab.count(text, **limits)
    assert sorted(vocab.words) == sorted(model.wv.index_to_key)  # gensim turns ties around
    assert vocab.counts.tolist() == [model.wv.get_vecattr(word, "count") for word in vocab.words]
    seen = list(dict.fromkeys(chain.from_iterable(text)))
    assert max_vocab_size or vocab.words == sorted(
        vocab.words, key=lambda word: (-model.wv.get_vecattr(word, "count"), seen.index(word))
    )
    kept = np.array([model.wv.get_vecattr(word, "sample_int") for word in vocab.words]) / (
        2**32 - 1
    )
    np.testing.assert_allclose(vocab.keep_probabilities(0.05), kept, rtol=1e-8, atol=1e-9)


def test_keep_probabilities():
    vocab = Vocab(["the", "cat", "dog"], np.array([9000, 900, 100]), 10_000, 3)
    assert vocab.keep_probabilities(0).tolist() == [1, 1, 1]
    excess = 0.9 / 1e-2
    assert vocab.keep_probabilities(1e-2).tolist() == pytest.approx(
        [(excess**0.5 + 1) / excess, (3 + 1) / 9, 1]
    )
    assert vocab.keep_probabilities(1e-2).dtype == np.float64


@pytest.mark.parametrize("exponent", [0.75, 0.0, 1.0, -0.5])
def test_noise_distribution(exponent):
    vocab = Vocab(["the", "cat", "dog"], np.array([9000, 900, 100]), 10_000, 3)
    weights = np.array([9000.0, 900.0, 100.0]) ** exponent
    np.testing.assert_allclose(
        vocab.noise_distribution(exponent), weights / weights.sum(), rtol=1e-13
    )


@pytest.mark.parametrize(("exponent", "row"), [(1e4, 0), (-1e4, 2)])
def test_no_exponent_overflows(exponent, row):
    noise = Vocab(["the", "cat", "dog"], np.array([9000, 900, 100]), 10_000, 3).noise_distribution(
        exponent
    )
    assert noise.sum() == 1 and noise[row] == 1


@pytest.mark.parametrize(
    ("text", "min_count", "most", "parts"),
    [
        ([], 5, None, ["no words", "corpus.path"]),
        ([[]], 5, None, ["no words", "corpus.path"]),
        (
            TEXT,
            9,
            None,
            ["vocab.min_count=9", "no word", "'b'", "3 times", "lower it to 3 or less"],
        ),
        (
            [["a", "a", "b"]],
            2,
            None,
            ["vocab.min_count=2", "only one word", "'a'", "2 times", "lower it to 1"],
        ),
        ([["a", "a"]], 1, None, ["vocab.min_count=1", "only one word", "bring more text"]),
        (
            [["a", "b", "c"]],
            1,
            2,
            [
                "vocab.max_final_vocab=2",
                "to 2",
                "no word",
                "1 times",
                "raise vocab.max_final_vocab",
            ],
        ),
    ],
)
def test_too_few_words(text, min_count, most, parts):
    with pytest.raises(VocabError) as error:
        Vocab.count(text, min_count, most)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_save_and_load(tmp_path):
    odd = [
        "the",
        "#",
        "na\u00efve",
        "\u00e9t\u00e9\u0085",
        "\U0001f600",
        "a\rb",
        "tab\tin",
        "\ufeffx",
    ]
    vocab = Vocab(odd, np.arange(9, 1, -1), raw_words=2**40, raw_types=99)
    vocab.save(tmp_path / "new" / "vocab.tsv")
    loaded = Vocab.load(tmp_path / "new" / "vocab.tsv")
    assert (
        loaded.words == odd
        and loaded.counts.tolist() == vocab.counts.tolist()
        and loaded.counts.dtype == np.int64
    )
    assert (loaded.raw_words, loaded.raw_types) == (2**40, 99)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["vocab.tsv"]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    vocab = Vocab(["a", "b"], np.array([2, 1]), 3, 2)
    vocab.save(tmp_path / "vocab.tsv")
    with pytest.raises(UnicodeEncodeError):
        Vocab(["a", "\udc80"], np.array([2, 1]), 3, 2).save(tmp_path / "vocab.tsv")
    assert Vocab.load(tmp_path / "vocab.tsv").words == ["a", "b"]
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.tsv"]


@pytest.mark.parametrize("cut", [0, 3, 40, -1, -3, -5])
def test_a_cut_file_is_refused(tmp_path, cut):
    path = tmp_path / "vocab.tsv"
    Vocab(["one", "two"], np.array([20, 10]), 30, 2).save(path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(VocabError, match=r"vocab.tsv is not a whole vocabulary file .*delete it"):
        Vocab.load(path)
