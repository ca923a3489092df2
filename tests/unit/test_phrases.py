"""Joined pairs of words, compared with a text that gensim has joined."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from gensim.models.phrases import Phrases
from gensim.test.utils import datapath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import plain_text
from w2v.config import CorpusConfig, VocabConfig, load_config
from w2v.text import encode, phrases
from w2v.text.vocab import VocabError
from w2v.training import plan


def join_with_gensim(sentences, passes, threshold=10.0, min_count=5):
    """Return the sentences after so many passes of gensim's Phrases."""
    for _ in range(passes):
        model = Phrases(sentences, min_count=min_count, threshold=threshold)
        sentences = [model[sentence] for sentence in sentences]
    return sentences


def check(path, folder, passes, threshold=10.0, min_count=1, **how):
    """Compare vocabulary, ids and words read with those of the joined text."""
    sentences = [line.split() for line in path.read_text().split("\n")]
    sentences = join_with_gensim(sentences, passes, threshold, phrases.MIN_COUNT)
    joined = folder / "joined"
    joined.write_text("\n".join(map(" ".join, sentences)))
    workers = how.pop("workers", 2)
    limits = VocabConfig(min_count, how.pop("max_final_vocab", None))
    how["tokenize"] = "whitespace"
    config = CorpusConfig(phrases=passes, phrases_threshold=threshold, **how)
    try:
        expected = encode.encode_files([joined], CorpusConfig(**how), limits, 1, folder)
    except VocabError as error:
        with pytest.raises(VocabError) as raised:
            encode.encode_files([path], config, limits, workers, folder)
        assert str(raised.value) == str(error)
        return None
    found = encode.encode_files([path], config, limits, workers, folder)
    assert found.vocab.words == expected.vocab.words
    assert found.vocab.counts.tolist() == expected.vocab.counts.tolist()
    assert found.vocab.raw_words == expected.vocab.raw_words
    assert found.vocab.raw_types == expected.vocab.raw_types
    assert plain_text.joined(found.blocks) == plain_text.joined(expected.blocks)
    return found


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    lines=st.lists(st.lists(st.sampled_from("aaabcdé"), max_size=12), max_size=12),
    repeated=st.lists(st.lists(st.sampled_from("abcxyz"), min_size=1, max_size=3), max_size=3),
    passes=st.integers(1, 3),
    threshold=st.sampled_from([0.01, 0.3, 1.0, 1.5, 3.0]),
    phrase_count=st.integers(1, 3),
    min_count=st.integers(1, 3),
    max_final_vocab=st.sampled_from([None, 2, 4]),
    max_sentence_length=st.sampled_from([2, 3, 10_000]),
    workers=st.integers(1, 3),
    tokens_at_once=st.integers(1, 9),
    block_bytes=st.integers(1, 40),
    pairs_at_once=st.integers(1, 40),
    most_pairs=st.integers(4, 40),
    hashes=st.sampled_from([1, 1024]),
)
def test_phrases_are_those_of_gensim(
    tmp_path_factory,
    lines,
    repeated,
    passes,
    threshold,
    phrase_count,
    min_count,
    max_final_vocab,
    max_sentence_length,
    workers,
    tokens_at_once,
    block_bytes,
    pairs_at_once,
    most_pairs,
    hashes,
):
    folder = tmp_path_factory.mktemp("text")
    text = folder / "text"
    text.write_text("\n".join(" ".join(line) for line in lines + repeated * 4))
    counts = {"MIN_COUNT": phrase_count, "TOKENS_AT_ONCE": tokens_at_once}
    sizes = {"PAIRS_AT_ONCE": pairs_at_once, "MOST_PAIRS": most_pairs, "HASHES": hashes}
    with (
        mock.patch.multiple(phrases, **counts, **sizes),
        mock.patch.object(encode, "BLOCK_BYTES", block_bytes),
    ):
        check(
            text,
            folder,
            passes,
            threshold,
            min_count,
            max_final_vocab=max_final_vocab,
            max_sentence_length=max_sentence_length,
            workers=workers,
        )
    assert sorted(path.name for path in folder.iterdir()) == ["joined", "text"]


def test_phrases_of_news(tmp_path):
    found = check(Path(datapath("lee_background.cor")), tmp_path, passes=2, min_count=5)
    joined = {word for word in found.vocab.words if "_" in word}
    assert {"New_York", "New_South_Wales"} < joined and len(joined) > 300


def test_words_of_the_text_that_look_joined_are_the_same_words(tmp_path):
    text = tmp_path / "text"
    text.write_text("a new york b\nc new york d\ne new_york f\n" * 6)
    config = CorpusConfig(phrases=1, phrases_threshold=0.5, tokenize="whitespace")
    vocab, blocks = encode.encode_files([text], config, VocabConfig(1), 2, tmp_path)
    assert vocab.words[0] == "new_york" and vocab.counts[0] == 18
    sentences, raw_words = plain_text.joined(blocks)
    assert raw_words == vocab.raw_words == 9 * 6
    assert {tuple(sentence)[1] for sentence in sentences} == {0}


def test_a_run_of_pairs_that_is_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(phrases, "TOKENS_AT_ONCE", 10)
    text = tmp_path / "text"
    others = " ".join(f"w{n}" for n in range(4000))
    for length in (699, 700, 701):
        text.write_text(f"{'ha ' * length}\n{others}\n")
        found = check(text, tmp_path, 2)
        assert "ha_ha_ha_ha" in found.vocab.words


def test_the_cache_knows_the_setting(tmp_path):
    text = tmp_path / "text"
    lines = ["new york is big", "the new york times", "old york is old", "new is not old"]
    text.write_text("\n".join(lines * 10) + "\n" + " ".join(f"w{n}" for n in range(99)))
    data = [f"corpus.path={text}", f"corpus.data_dir={tmp_path / 'data'}", "vocab.min_count=1"]

    def words(*more):
        config = load_config([], [*data, *more])
        planned = plan.make_plan(config)
        _, corpus_line = plan.describe(planned).splitlines()[:2]
        return planned.vocab.words, corpus_line.partition("kept ")[2], len(planned.corpus.ids)

    plain = words()
    for _ in range(2):  # the second time from the cache
        assert words() == plain and "phrases" not in plain[1]
        joined, noted, size = words("corpus.phrases=1", "corpus.phrases_threshold=2")
        assert "new_york" in joined and size < plain[2]
        first = next(word for word in joined if "_" in word)
        assert f"; {sum('_' in word for word in joined)} phrases, such as {first}" in noted
        assert "new_york" not in words("corpus.phrases=1", "corpus.phrases_threshold=1e9")[0]
    assert len(list((tmp_path / "data" / "cache").iterdir())) == 3


def test_many_pairs_are_counted_in_parts(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    numbers = rng.zipf(1.3, 30_000) % 3000
    words = [f"w{n} v{n}" if n % 9 == 8 else f"w{n}" for n in numbers]
    text = tmp_path / "text"
    text.write_text("\n".join(" ".join(words[n : n + 40]) for n in range(0, len(words), 40)))
    few = check(text, tmp_path, 2, 2.0)
    calls = []
    count = phrases._frequent_pairs
    monkeypatch.setattr(phrases, "PAIRS_AT_ONCE", 256)
    monkeypatch.setattr(phrases, "MOST_PAIRS", 512)
    monkeypatch.setattr(phrases, "_frequent_pairs", lambda *a: calls.append(a) or count(*a))
    many = check(text, tmp_path, 2, 2.0)
    assert many.vocab.words == few.vocab.words and any("_" in word for word in few.vocab.words)
    assert len(calls) > 50
