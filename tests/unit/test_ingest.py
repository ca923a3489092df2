"""The compiled way from text to ids against the plain one."""

import bz2
import gzip
import logging
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bench import ingest as bench
from w2v.config import ConfigError, CorpusConfig, VocabConfig
from w2v.text import encode as ingest
from w2v.text import opening
from w2v.text import tokenize as text
from w2v.text.corpus import Corpus, read_plainly
from w2v.text.lexicon import Lexicon, Tokens
from w2v.training import plan

ROOT = Path(__file__).parents[2]


def outcome(read, folder, *args):
    """All that a reading leaves: the vocabulary, the ids and what was said; or its error."""
    try:
        vocab = read(*args)
    except ValueError as error:
        assert not folder.exists()
        return type(error), str(error)
    found = Corpus.open(folder)
    return (
        vocab.words,
        vocab.counts.tolist(),
        vocab.raw_words,
        vocab.raw_types,
        found.ids.tolist(),
        found.offsets.tolist(),
        found.raw_words,
    )


pieces = ["a", "b", "cd", "A", "é", "É", "İ", "Σ", "語", "😀", "\ufffd", "\u200b"]
pieces += ["eight8by", "eight8bytes", "more-than-eight", "more-than-eighT"]
spaces = [
    " ",
    "\n",
    "\r\n",
    "\t",
    "\x0b",
    "\x1c",
    "\x1f",
    "\x85",
    "\xa0",
    "\u1680",
    "\u2009",
    "\u2028",
    "\u202f",
    "\u205f",
    "\u3000",
]
broken = [b"\xff", b"\xc2", b"\xe2\x80", b"\xed\xa0\x80", b"\xf0\x9f", b"\x80"]
words = st.sampled_from([piece.encode() for piece in pieces])
texts = st.lists(
    words | words | st.sampled_from([space.encode() for space in spaces] + broken), max_size=60
).map(b"".join)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(texts.filter(lambda data: data not in (b"\xef", b"\xef\xbb")), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(2, 5),
    st.booleans(),
    st.integers(1, 2),
    st.none() | st.integers(2, 6),
)
def test_compiled_is_plain(
    tmp_path_factory,
    caplog,
    data,
    block_bytes,
    workers,
    longest,
    lowercase,
    min_count,
    max_vocab_size,
):
    folder = tmp_path_factory.mktemp("ingest")
    files = [folder / f"text{number}" for number in range(len(data))]
    for file, content in zip(files, data, strict=True):
        file.write_bytes(content)
    how, limits = (
        CorpusConfig(lowercase=lowercase, max_sentence_length=longest),
        VocabConfig(min_count, None, max_vocab_size),
    )
    caplog.clear()
    expected = outcome(read_plainly, folder / "plain", files, folder / "plain", how, limits)
    said = caplog.messages
    caplog.clear()
    with mock.patch.object(ingest, "BLOCK_BYTES", block_bytes):
        assert (
            outcome(
                ingest.ingest, folder / "compiled", files, folder / "compiled", how, limits, workers
            )
            == expected
        )
    assert caplog.messages == said
    assert {path.name for path in folder.iterdir()} <= {
        "plain",
        "compiled",
        *(file.name for file in files),
    }


def test_white_space_is_pythons():
    chars = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code <= 0xDFFF]
    assert split("a" + "a".join(chars)) == ("a" + "a".join(chars)).split()


def split(block):
    lexicon = Lexicon(10)
    numbers = lexicon.settle(Tokens.of(block.encode()))
    return [lexicon[number] for number in numbers if number != text.END]


@pytest.mark.parametrize("ending", ["", ".gz", ".bz2"])
@pytest.mark.parametrize("limit", [None, 3000])
def test_a_text_of_many_blocks(tmp_path, monkeypatch, ending, limit):
    rng = np.random.default_rng(1)
    lines = [
        " ".join(f"wörd-number-{n}" if n % 3 else f"w{n}" for n in rng.zipf(1.3, 30) % 5000)
        for _ in range(2000)
    ]
    lines[7] = " ".join(lines[8:200])
    path = tmp_path / f"text{ending}"
    path.write_bytes(
        {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}[ending]("\n".join(lines).encode())
    )
    monkeypatch.setattr(ingest, "BLOCK_BYTES", 10_000)
    how, limits = CorpusConfig(max_sentence_length=1000), VocabConfig(max_vocab_size=limit)
    expected = outcome(read_plainly, tmp_path / "ids", [path], tmp_path / "ids", how, limits)
    assert len(expected[0]) > 500
    for workers in (1, 2, 5):
        assert (
            outcome(ingest.ingest, tmp_path / "ids", [path], tmp_path / "ids", how, limits, workers)
            == expected
        )


def test_digests_that_agree_do_not_make_words_the_same(monkeypatch):
    names = [f"{first}-and-the-rest" for first in "abcdefgh"]
    monkeypatch.setattr(text, "MIX", np.int64(0))
    module = {name: value for name, value in vars(text).items()}
    for name in (
        "_white",
        "_end",
        "_digest",
        "_same",
        "_append",
        "enter",
        "split",
        "settle",
        "_prune",
    ):
        source = getattr(text, name).py_func
        module[name] = type(source)(source.__code__, module, name)
    with np.errstate(over="ignore"):
        padded = (" ".join(names * 2)).encode() + text.PADDING
        codes, *_ = module["split"](
            np.frombuffer(padded, np.uint8),
            np.ndarray(len(padded) - 7, np.int64, padded, strides=(1,)),
        )
    assert codes.tolist() == [*range(8)] * 2


@pytest.mark.parametrize(
    "data", [b"a b\0c", b"a " + b"x" * 10_001, "\u00e9".encode() * 10_001 + b" b", b"x" * 200_000]
)
def test_binary_files_are_refused(tmp_path, data):
    (tmp_path / "text").write_bytes(data)
    args = tmp_path / "ids", [tmp_path / "text"], tmp_path / "ids", CorpusConfig(), VocabConfig()
    refused = outcome(read_plainly, *args)
    assert "looks binary" in refused[1] and outcome(ingest.ingest, *args, 2) == refused
    (tmp_path / "text").write_bytes("\u00e9".encode() * 10_000 + b" b " * 5)
    assert "keeps only one word" in outcome(ingest.ingest, *args, 2)[1]


@pytest.mark.parametrize("read", [read_plainly, partial(ingest.ingest, workers=2)])
def test_an_error_leaves_nothing_behind(tmp_path, read):
    path = tmp_path / "text.gz"
    path.write_bytes(
        gzip.compress(np.random.default_rng(1).bytes(3_000_000).hex(" ", 3).encode())[:1_000_000]
    )
    with pytest.raises(ValueError, match="text.gz cannot be read"):
        read([path], tmp_path / "cache" / "ids", CorpusConfig(), VocabConfig())
    assert not list(tmp_path.glob("cache/*"))


FULL_DISK = """
import resource, sys
from w2v.config import load_config
from w2v.text import opening
config = load_config([], [f"corpus.path={sys.argv[1]}", f"corpus.data_dir={sys.argv[2]}", "vocab.min_count=1"])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
try:
    opening.open_corpus(config)
except ValueError as error:
    print(error)
"""


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path):
    (tmp_path / "text").write_text("some words of a text\n" * 5000)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "text"), str(tmp_path / "data")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(
        "cannot be written (File too large); make room there, or name another disk with corpus.data_dir=FOLDER\n"
    )
    assert {path.name for path in (tmp_path / "data" / "cache").iterdir()} <= {"digests.json"}


GROWTH = """
import resource, sys
from pathlib import Path
from w2v.config import CorpusConfig, VocabConfig
from w2v.text.encode import ingest
folder = Path(sys.argv[1])
for times in (20, 200):
    with (folder / "text").open("w") as file:
        for _ in range(times):
            file.write("the same words " * 20_000 + "\\n")
    ingest([folder / "text"], folder / "ids", CorpusConfig(), VocabConfig(), 2)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_bounded_by_the_vocabulary(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(int, done.stdout.split())
    assert large - small < 20 * 1024  # KiB; the text has 60 MB and its numbers 48


def test_progress_without_a_terminal_is_a_line_now_and_then(tmp_path, monkeypatch, caplog):
    (tmp_path / "text").write_text("some words of a text\n" * 100)
    monkeypatch.setattr(ingest, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(ingest, "BLOCK_BYTES", 1000)
    with caplog.at_level(logging.INFO, "w2v"):
        ingest.ingest([tmp_path / "text"], tmp_path / "ids", CorpusConfig(), VocabConfig(), 2)
    assert "100% of the text" in caplog.messages[-1]


def test_without_numba_it_says_so_and_reads_plainly(tmp_path, monkeypatch, caplog):
    (tmp_path / "text").write_text("some words of a text\n" * 10)
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    config = plan.Config(
        corpus=CorpusConfig(path=str(tmp_path / "text"), data_dir=str(tmp_path / "data"))
    )
    vocab, ids = opening.open_corpus(config)
    assert (
        vocab.words == "some words of a text".split()
        and len(ids.ids) == 50
        and "numba is not installed" in caplog.text
    )


def test_a_corpus_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "text").write_text("some words of a text\n" * 10)
    (tmp_path / "file").write_text("")
    config = plan.Config(
        corpus=CorpusConfig(path=str(tmp_path / "text"), data_dir=str(tmp_path / "file"))
    )
    with pytest.raises(ConfigError, match=r"file.cache cannot be written \(.+\); make room"):
        opening.open_corpus(config)


def test_the_benchmark_reads_the_same_words_both_ways(tmp_path):
    (tmp_path / "text").write_text("some words of a text\n" * 10)
    assert [read(tmp_path / "text") for read in bench.CASES.values()] == [50, 50]
