"""The vocabulary, compared with gensim's and with its formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.each_case import each_case
from tests.support.plain_text import count
from w2v.text.vocab import Vocab, VocabError

TEXT = [list("bacabd"), list("eba"), list("cf")]  # a 3, b 3, c 2, d e f 1: b appears before a
ANIMALS = Vocab(["the", "cat", "dog"], np.array([9000, 900, 100]), 10_000, 3)


def test_words_are_ordered_by_count_then_first_appearance():
    vocab = count(TEXT, min_count=1)
    assert vocab.words == ["b", "a", "c", "d", "e", "f"]
    assert vocab.counts.tolist() == [3, 3, 2, 1, 1, 1] and vocab.counts.dtype == np.int64
    assert (vocab.raw_words, vocab.raw_types) == (11, 6)
    fewer = count(TEXT, min_count=2)
    assert fewer.words == ["b", "a", "c"]
    assert (fewer.raw_words, fewer.raw_types) == (11, 6)


@pytest.mark.parametrize(
    "limits", [{"min_count": 1}, {"min_count": 9}, {"min_count": 1, "max_final_vocab": 2}]
)
def test_the_median_is_that_of_the_text_whatever_is_kept(limits):
    text = ["ab" * 10, "c" * 8, "d" * 5, "efgh"]
    assert count(map(list, text), **limits).median == 9  # of a, b, c and d
    assert Vocab(["a", "b", "c"], np.array([4, 3, 1]), 8, 3).median == 3  # all are rare


SENTENCES = st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=15)


@given(
    st.lists(SENTENCES, min_size=1, max_size=8), st.integers(1, 4), st.none() | st.integers(2, 11)
)
def test_vocabulary_and_subsampling_are_those_of_gensim(text, min_count, max_final_vocab):
    from gensim.models import Word2Vec

    limits = {"min_count": min_count, "max_final_vocab": max_final_vocab}
    model = Word2Vec(vector_size=1, sample=0.05, **limits)
    model.build_vocab(text)
    if len(model.wv) < 2:
        with pytest.raises(VocabError):
            count(text, **limits)
        return
    vocab = count(text, **limits)
    assert sorted(vocab.words) == sorted(model.wv.index_to_key)  # gensim reverses ties
    assert vocab.counts.tolist() == [model.wv.get_vecattr(word, "count") for word in vocab.words]
    kept = [model.wv.get_vecattr(word, "sample_int") / (2**32 - 1) for word in vocab.words]
    np.testing.assert_allclose(vocab.keep_probabilities(0.05), kept, rtol=1e-8, atol=1e-9)


def test_keep_probabilities():
    assert ANIMALS.keep_probabilities(0).tolist() == [1, 1, 1]
    excess = 0.9 / 1e-2
    expected = [(excess**0.5 + 1) / excess, (3 + 1) / 9, 1]
    assert ANIMALS.keep_probabilities(1e-2).tolist() == pytest.approx(expected)


@each_case(
    ("text", "min_count", "most", "parts"),
    [
        ([], 5, None, ["no words", "corpus.path"]),
        ([[]], 5, None, ["no words", "corpus.path"]),
        (TEXT, 9, None, ["vocab.min_count=9", "no word", "3 times", "lower it to 3"]),
        ([["a", "a", "b"]], 2, None, ["vocab.min_count=2", "only one word", "lower it to 1"]),
        ([["a", "a"]], 1, None, ["vocab.min_count=1", "only one word", "use more text"]),
        ([["a", "b", "c"]], 1, 2, ["vocab.max_final_vocab=2", "no word", "1 times", "raise"]),
    ],
)
def test_too_few_words_are_an_error_with_a_remedy(text, min_count, most, parts):
    with pytest.raises(VocabError) as error:
        count(text, min_count, most)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


def test_fingerprint_depends_on_words_and_counts():
    others = [(["the", "cat"], [2, 1]), (["the", "dog"], [2, 1]), (["the", "cat"], [3, 1])]
    found = {Vocab(words, np.array(counts), 9, 9).fingerprint for words, counts in others}
    assert len(found) == 3
    assert Vocab(["the", "cat"], np.array([2, 1]), 10, 10).fingerprint in found


def test_save(tmp_path):
    words = ["the", "naïve", "été\u0085", "a\rb"]
    vocab = Vocab(words, np.array([9, 7, 7, 6]), raw_words=2**40, raw_types=99)
    vocab.save(tmp_path / "vocab.tsv")
    text = (tmp_path / "vocab.tsv").read_bytes().decode()
    lines = [f"{word}\t{count}\n" for word, count in zip(words, [9, 7, 7, 6], strict=True)]
    assert text == f"# words 4 raw_words {2**40} raw_types 99\n" + "".join(lines)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    Vocab(["a", "b"], np.array([2, 1]), 3, 2).save(tmp_path / "vocab.tsv")
    with pytest.raises(UnicodeEncodeError):
        Vocab(["a", "\udc80"], np.array([2, 1]), 3, 2).save(tmp_path / "vocab.tsv")
    assert (tmp_path / "vocab.tsv").read_text().endswith("\na\t2\nb\t1\n")
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.tsv"]
