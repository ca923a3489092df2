"""Text files to ids, compared with reading in plain Python."""

import bz2
import gzip
import itertools
import logging
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import plain_text
from tests.support.each_case import each_case
from w2v.config import CorpusConfig, VocabConfig
from w2v.text import encode
from w2v.text.formats import CorpusError, recognize
from w2v.text.vocab import VocabError

ROOT = Path(__file__).parents[2]
LIMITS = ("min_count", "max_final_vocab")


def read(files, folder, workers=2, **settings):
    """Return the vocabulary, the encoded sentences and the words read."""
    limits = {name: settings.pop(name) for name in LIMITS if name in settings}
    reading = CorpusConfig(**settings)
    limits = VocabConfig(**{"min_count": 1} | limits)
    vocab, blocks = encode.encode_files(files, reading, limits, workers, folder)
    return vocab, *plain_text.joined(blocks)


def check_against_plain(files, folder, workers, how, **limits):
    sentences = plain_text.read_sentences(files, **how)
    try:
        expected = plain_text.count(sentences, **limits)
    except VocabError as error:
        with pytest.raises(VocabError) as found:
            read(files, folder, workers, **how, **limits)
        assert str(found.value) == str(error)
        return
    vocab, ids, raw_words = read(files, folder, workers, **how, **limits)
    assert vocab.words == expected.words
    assert vocab.counts.tolist() == expected.counts.tolist()
    assert (vocab.raw_words, vocab.raw_types) == (expected.raw_words, expected.raw_types)
    assert ids == plain_text.encode(sentences, vocab)
    assert raw_words == expected.raw_words


LETTERS = ["a", "b", "cd", "A", "é", "É", "İ", "Σ", "語", "😀", "\ufffd", "\ufeff", "long-word-x"]
LETTERS += [
    "it's",
    "e\u0301.",
    "\ufe0f",
    "1\ufe0f\u20e3",
    "a1\u0301",
    "\u200c",
    "_x",
    "\x07",
    "\U00020000",
]
SPACES = [" ", "\n", "\r\n", "\t", "\x0b", "\x1f", "\x85", "\xa0", "\u2028", "\u3000", "\u200b"]
BROKEN = [b"\xff", b"\xc2", b"\xe2\x80", b"\xed\xa0\x80", b"\xf0\x9f", b"\x80"]
PIECES = [piece.encode() for piece in LETTERS * 2 + SPACES] + BROKEN
TEXTS = st.lists(st.sampled_from(PIECES), max_size=60).map(b"".join)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.lists(TEXTS, min_size=1, max_size=3),
    block_bytes=st.integers(1, 70),
    table_words=st.integers(0, 20),
    workers=st.integers(1, 3),
    max_sentence_length=st.integers(2, 5),
    lowercase=st.booleans(),
    mode=st.sampled_from(["whitespace", "words"]),
    min_count=st.integers(1, 2),
)
def test_any_text_is_read_as_in_plain_python(
    tmp_path_factory,
    data,
    block_bytes,
    table_words,
    workers,
    max_sentence_length,
    lowercase,
    mode,
    min_count,
):
    folder = tmp_path_factory.mktemp("texts")
    files = [folder / f"text{number}" for number in range(len(data))]
    for file, content in zip(files, data, strict=True):
        file.write_bytes(content)
    how = {"lowercase": lowercase, "tokenize": mode, "max_sentence_length": max_sentence_length}
    sizes = {"BLOCK_BYTES": block_bytes, "TABLE_WORDS": table_words, "MOST_BROKEN": 1}
    with mock.patch.multiple(encode, **sizes):
        check_against_plain(files, folder, workers, how, min_count=min_count)
    assert sorted(folder.iterdir()) == files


@each_case("pack", [bytes, gzip.compress, bz2.compress])
def test_a_text_of_many_blocks(tmp_path, monkeypatch, pack):
    rng = np.random.default_rng(1)
    words = [f"wörd-number-{n}" if n % 3 else f"w{n}" for n in rng.zipf(1.3, 60_000) % 5000]
    lines = [" ".join(words[start : start + 30]) for start in range(0, len(words), 30)]
    lines[7] = " ".join(lines[8:200])  # longer than max_sentence_length
    plain = tmp_path / "plain"
    plain.write_text("\n".join(lines), encoding="utf-8")
    packed = tmp_path / {bytes: "text", gzip.compress: "text.gz", bz2.compress: "text.bz2"}[pack]
    packed.write_bytes(pack(plain.read_bytes()))
    monkeypatch.setattr(encode, "BLOCK_BYTES", 10_000)
    sentences = plain_text.read_sentences([plain], max_sentence_length=1000)
    for workers in (1, 3):
        vocab, ids, _ = read([packed], tmp_path, workers, max_sentence_length=1000, min_count=5)
        assert vocab.words == plain_text.count(sentences, min_count=5).words
        assert ids == plain_text.encode(sentences, vocab)


def test_each_thread_reads_a_part_of_plain_files(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_BYTES", 50)
    contents = "ein Wort\n" * 40, "", "ohne\u3000Leerzeichen" * 20, "zwei\tWörter " * 30
    files = [tmp_path / f"text{number}" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content, encoding="utf-8")
    how = CorpusConfig()
    pieces = [encode.Piece(file, recognize(file, how)) for file in files]
    buffer = np.empty(encode.BUFFER_BYTES, np.uint8)
    parts = []
    done = 0
    for reader in encode._split(pieces, how, 4):
        parts.append("")
        while block := reader.read(buffer):
            assert block.first == done
            done += block.size
            parts[-1] += str(buffer[: block.size].data, "utf-8")
    assert "".join(parts) == "\n".join([*contents, ""])
    assert all(part[-1].isspace() for part in parts)  # words are whole
    # About equal, though the third file has no space to be split at.
    assert len(parts) == 4 and max(map(len, parts)) < done / 2


@pytest.mark.parametrize("content", ["a b cd\n\n ef", "\ufeffa b ", "\ufeff"])
def test_a_file_is_read_in_pieces_of_any_size(tmp_path, content):
    file = tmp_path / "text"
    file.write_text(content, encoding="utf-8")
    how = CorpusConfig()
    data = file.read_bytes()
    cuts = [0, *(place + 1 for place in range(len(data) - 1) if chr(data[place]).isspace()), None]
    pieces = [encode.Piece(file, recognize(file, how), *ends) for ends in itertools.pairwise(cuts)]
    reader = encode._Reader(pieces, how)
    buffer = np.empty(encode.BUFFER_BYTES, np.uint8)
    read = ""
    while block := reader.read(buffer):
        read += str(buffer[: block.size].data, "utf-8")
    assert read == content.removeprefix("\ufeff") + "\n"


def test_bytes_that_are_not_utf8_are_counted_and_located(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(encode, "BLOCK_BYTES", 8)
    good = tmp_path / "good"
    good.write_text("ein \ufffd Wort\n" * 3, encoding="utf-8")  # U+FFFD itself is valid
    latin = tmp_path / "latin"
    latin.write_bytes("ja\nFluß über über\nja\nüb\n".encode("latin-1"))
    assert read([good], tmp_path)[2] == 9 and not caplog.records
    monkeypatch.setattr(encode, "MOST_BROKEN", 0.7)
    vocab, _, _ = read([good, latin], tmp_path)
    assert {"Flu\ufffd", "\ufffdber", "\ufffdb"} < set(vocab.words)
    assert len(caplog.records) == 1
    assert "4 bytes are not UTF-8" in caplog.text and "latin line 2" in caplog.text


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
@each_case(
    "data",
    [b"a b\0c", b"\0", b"a " + b"x" * 40_001, b"x" * 90_000 + b" a\n", "é".encode() * 40_001],
)
def test_binary_files_are_refused(tmp_path, monkeypatch, data, block_bytes):
    (tmp_path / "text").write_bytes(data)
    monkeypatch.setattr(encode, "BLOCK_BYTES", block_bytes)
    with pytest.raises(CorpusError, match=r"text looks binary .*; use .*text"):
        read([tmp_path / "text"], tmp_path)


def test_an_error_of_reading_names_the_file(tmp_path):
    (tmp_path / "text" / "folder").mkdir(parents=True)  # which no read succeeds in
    with pytest.raises(CorpusError, match=r"text cannot be read \(Is a directory"):
        read([tmp_path / "text"], tmp_path)


def test_long_words_and_rare_whitespace_are_text(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_BYTES", 1000)
    text = "語" * 10_000 + " a\u3000" + "b\u3000c\xa0" * 10_000
    (tmp_path / "text").write_text(text, encoding="utf-8")
    vocab, _, _ = read([tmp_path / "text"], tmp_path)
    assert vocab.words == ["b", "c", "語" * 10_000, "a"]


def test_json_lines_are_read(tmp_path):
    lines = [f'{{"body": "word{n % 7} again\\nnew line"}}' for n in range(500)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    vocab, ids, words = read([tmp_path / "texts.jsonl"], tmp_path, field="body")
    assert vocab.words[:3] == ["again", "new", "line"] and len(vocab.words) == 10
    assert len(ids) == 1000 and words == 2000


def test_progress_without_a_terminal_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "text").write_text("some words of a text\n" * 100_000)
    monkeypatch.setattr(encode, "LOG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "w2v"):
        read([tmp_path / "text"], tmp_path)
    assert "2 of 2 MB read" in caplog.messages[-1]


GROWTH = """
import resource, sys
from pathlib import Path
from w2v.config import load_config
from w2v.text.corpus import write_corpus
folder = Path(sys.argv[1])
config = load_config([], sys.argv[2:])
for times in (10, 50):
    with (folder / "text").open("w") as file:
        for _ in range(times):
            file.write("the same words " * 20_000 + "\\n")
    write_corpus([folder / "text"], folder / "ids", config)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.parametrize("phrases", [0, 1])
def test_memory_does_not_grow_with_the_text(tmp_path, phrases):
    joining = [f"corpus.phrases={phrases}", "corpus.phrases_threshold=1e-6"]
    command = [sys.executable, "-c", GROWTH, str(tmp_path), *joining]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    small, large = map(int, done.stdout.split())
    assert large - small < 5 * 1024  # KiB; the text has 15 MB and its numbers 12


@given(
    st.lists(st.lists(st.sampled_from("abcxy"), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_sentences_in_memory_are_encoded(sentences, at_once):
    index = {"a": 0, "b": 1, "c": 2}
    with mock.patch.object(encode, "SENTENCES_AT_ONCE", at_once):
        found, raw_words = plain_text.joined(encode.encode_sentences(map(iter, sentences), index))
    known = [[index[word] for word in sentence if word in index] for sentence in sentences]
    assert found == [ids for ids in known if len(ids) > 1]
    assert raw_words == sum(map(len, sentences))
