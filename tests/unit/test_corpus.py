"""Ids on disk, and the cache of corpora."""

import os
import pickle
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.each_case import each_case
from tests.support.plain_text import blocks
from tests.support.processes import run_python
from w2v.config import ConfigError, load_config
from w2v.text import corpus
from w2v.text.corpus import Corpus, NoKnownWords, open_corpus
from w2v.text.formats import CorpusError
from w2v.text.vocab import Vocab
from w2v.training.plan import open_together

VOCAB = Vocab(["a", "b", "c"], np.array([3, 2, 1]), raw_words=6, raw_types=3)


def test_sentences_of_two_known_words_are_written(tmp_path):
    sentences = [["a", "?", "b", "c"], ["d"], ["?"], [], ["b", "c"]]
    Corpus.write(tmp_path / "ids", blocks(sentences), VOCAB)
    vocab, found = Corpus.open(tmp_path / "ids")
    assert found.ids.tolist() == [0, 1, 2, 1, 2] and found.ids.dtype == np.int32
    assert found.offsets.tolist() == [0, 3, 5] and found.offsets.dtype == np.int64
    assert vocab.words == VOCAB.words and vocab.raw_words == found.raw_words == 8
    with pytest.raises(ValueError, match="read-only"):
        found.ids[0] = 1


def test_a_text_without_known_words_is_an_error_that_ranks_can_send(tmp_path):
    with pytest.raises(NoKnownWords, match=r"two words of the vocabulary \(3 words") as error:
        Corpus.write(tmp_path / "ids", blocks([["a", "?"], ["?"]]), VOCAB)
    assert error.value.raw_words == 3
    received = pickle.loads(pickle.dumps(error.value))
    assert (str(received), received.raw_words) == (str(error.value), 3)


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "corpus.json"])
@each_case("cut", [-1, -4, -8, 0, None])
def test_a_damaged_corpus_is_refused(tmp_path, name, cut):
    Corpus.write(tmp_path / "ids", blocks([["a", "b", "c"], ["b", "c"]]), VOCAB)
    path = tmp_path / "ids" / name
    content = path.read_bytes()[:cut]
    path.unlink()
    if cut is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"ids is damaged \("):
        Corpus.open(tmp_path / "ids")


def test_another_format_is_refused(tmp_path, monkeypatch):
    Corpus.write(tmp_path / "ids", blocks([["a", "b"]]), VOCAB)
    monkeypatch.setattr(corpus, "FORMAT", corpus.FORMAT + 1)
    with pytest.raises(CorpusError, match=r"is damaged \(format 5 instead of 6"):
        Corpus.open(tmp_path / "ids")


@pytest.fixture
def configured(tmp_path):
    """A function that returns the config of a small text."""
    (tmp_path / "text").write_text("b a b c a b\nc b a b\n" * 3)
    paths = [f"corpus.path={tmp_path / 'text'}", f"corpus.data_dir={tmp_path / 'data'}"]
    return lambda *more: load_config([], [*paths, "vocab.min_count=1", *more])


def test_a_text_is_encoded_once_for_the_same_settings(configured, monkeypatch):
    vocab, ids = open_corpus(configured())
    assert vocab.words == ["b", "a", "c"] and vocab.counts.tolist() == [15, 9, 6]
    assert ids.ids[:10].tolist() == [0, 1, 0, 2, 1, 0, 2, 0, 1, 0]
    assert ids.offsets[:3].tolist() == [0, 6, 10] and ids.raw_words == 30
    monkeypatch.setattr(corpus, "write_corpus", None)  # would fail if called
    again, same = open_corpus(configured("train.epochs=2"))
    assert again.words == vocab.words and np.array_equal(same.ids, ids.ids)
    assert again.median == vocab.median == 9
    monkeypatch.undo()
    fewer, _ = open_corpus(configured("vocab.min_count=8"))
    assert fewer.words == ["b", "a"] and fewer.median == 9
    assert open_corpus(configured("vocab.min_count=8"))[0].median == 9  # from the cache
    assert open_corpus(configured("vocab.max_final_vocab=2"))[0].words == ["b", "a"]
    sentences = open_corpus(configured("corpus.max_sentence_length=2"))[1].offsets
    assert sentences.tolist() == list(range(0, 31, 2))


def test_a_text_that_changes_is_read_again(configured, tmp_path):
    path = tmp_path / "text"
    content = path.read_text()
    first = open_corpus(configured())[1]
    times = path.stat()
    path.write_text(content.replace("c", "d"))  # as long, and with the same time
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    vocab, changed = open_corpus(configured())
    assert vocab.words == ["b", "a", "d"] and np.array_equal(changed.ids, first.ids)
    assert len(list((tmp_path / "data" / "cache").iterdir())) == 1  # the old ids are gone
    replaced = tmp_path / "replaced"
    replaced.write_text(content)
    os.utime(replaced, ns=(times.st_atime_ns, times.st_mtime_ns))
    replaced.replace(path)
    assert open_corpus(configured())[0].words == ["b", "a", "c"]


def test_a_text_that_changes_while_it_is_read_is_refused(configured, tmp_path, monkeypatch):
    write = Corpus.write

    def slow(*arguments):
        (tmp_path / "text").write_text("b a b a\n")
        return write(*arguments)

    monkeypatch.setattr(Corpus, "write", slow)
    with pytest.raises(CorpusError, match=r"corpus.path=.*text changed while it was read"):
        open_corpus(configured())
    assert not list((tmp_path / "data" / "cache").iterdir())


def test_raw_text_is_split_into_words(configured, tmp_path):
    (tmp_path / "text").write_text("The cat, it sat. A dog!\n" * 30)
    vocab, corpus = open_corpus(configured())
    assert vocab.words == ["the", "cat", "it", "sat", "a", "dog"]
    assert corpus.tokenized.endswith("tokenize=words")
    again = open_corpus(configured("corpus.tokenize=words"))[1]
    assert np.array_equal(again.ids, corpus.ids) and not again.tokenized
    plain = open_corpus(configured("corpus.tokenize=whitespace"))[0]
    assert plain.words == ["The", "cat,", "it", "sat.", "A", "dog!"]


def test_a_cache_without_its_vocabulary_is_written_again(configured, tmp_path):
    open_corpus(configured())
    [path] = (tmp_path / "data" / "cache").glob("*/words.txt")
    path.unlink()
    assert open_corpus(configured())[0].words == ["b", "a", "c"] and path.exists()


def test_runs_that_start_together_encode_a_text_once(configured, monkeypatch, caplog):
    calls = []
    write = corpus.write_corpus

    def slow(*arguments):
        calls.append(arguments)
        time.sleep(0.3)
        return write(*arguments)

    monkeypatch.setattr(corpus, "write_corpus", slow)
    with caplog.at_level("INFO", "w2v"), ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(open_corpus, [configured()] * 3))
    assert len(calls) == 1
    assert (
        sum(
            "waiting for another run that reads a text into" in message
            for message in caplog.messages
        )
        == 2
    )
    assert all(vocab.words == ["b", "a", "c"] and ids.raw_words == 30 for vocab, ids in opened)


class Rank:
    """One of two ranks, in a thread."""

    barrier = threading.Barrier(2)

    def __init__(self, rank):
        self.rank = rank

    @contextmanager
    def reraise(self):
        yield
        self.barrier.wait(30)


def test_of_two_ranks_the_first_encodes(configured, monkeypatch):
    writers = []
    write = corpus.write_corpus

    def recorded(*arguments):
        writers.append(threading.current_thread().name)
        return write(*arguments)

    def run(number):
        threading.current_thread().name = str(number)
        return open_together(configured(), Rank(number))

    monkeypatch.setattr(corpus, "write_corpus", recorded)
    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(run, [1, 0]))
    assert writers == ["0"]
    assert [vocab.words for vocab, _ in opened] == [["b", "a", "c"]] * 2


def test_a_failed_encoding_leaves_nothing_behind(configured, tmp_path):
    for more in ("vocab.min_count=99", "vocab.max_final_vocab=2"):
        (tmp_path / "text").write_text("b\na\nb\na\nc\n")  # no sentence has two words
        with pytest.raises(ValueError, match="two"):
            open_corpus(configured(more))
    assert not list((tmp_path / "data" / "cache").iterdir())


FULL_DISK = """
import resource, sys
from w2v.config import load_config
from w2v.text.corpus import open_corpus
config = load_config([], sys.argv[1:])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    open_corpus(config)
except ValueError as error:
    print(error)
"""


def test_a_full_disk_leaves_nothing_behind(tmp_path):
    text = tmp_path / "text"
    text.write_text("some words of a text\n" * 5000)
    done = run_python(FULL_DISK, f"corpus.path={text}", f"corpus.data_dir={tmp_path / 'data'}")
    assert "cannot be written (File too large); make room there" in done.stdout
    assert not list((tmp_path / "data" / "cache").iterdir())


def test_a_cache_folder_that_cannot_be_written(configured, tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(ConfigError, match=r"data.cache cannot be written .*corpus.data_dir="):
        open_corpus(configured())


def test_a_stray_file_does_not_block_a_new_text(tmp_path):
    (tmp_path / "text").write_text("a b a b a b\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "x.partial").touch()
    settings = [f"corpus.path={tmp_path}/text", f"corpus.data_dir={tmp_path}", "vocab.min_count=1"]
    _, corpus = open_corpus(load_config([], settings))
    assert corpus.raw_words == 6 and (tmp_path / "cache" / "x.partial").exists()


def test_temporary_ids_have_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sentences = [["a", "b", "c"], ["b", "c"]]
    Corpus.write(tmp_path / "ids", blocks(sentences), VOCAB)
    _, written = Corpus.open(tmp_path / "ids")

    def watched():
        for block in blocks(sentences):
            assert os.listdir(tmp_path) == ["ids"]
            yield block

    corpus = Corpus.temporary(watched())
    assert np.array_equal(corpus.ids, written.ids)
    assert np.array_equal(corpus.offsets, written.offsets)
    assert corpus.raw_words == written.raw_words and os.listdir(tmp_path) == ["ids"]
    with pytest.raises(NoKnownWords):
        Corpus.temporary(blocks([["a", "?"], ["?"]]))
