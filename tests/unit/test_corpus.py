"""Reading text in any container, bad text, and ids on disk."""

import bz2
import errno
import gzip
import hashlib
import io
import logging
import lzma
import os
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w2v.text import corpus, sources
from w2v.text.corpus import Corpus, encoded, sentences
from w2v.text.sources import CorpusError, content_key, locate

TEXT = "Der Fluß ist\nbreit und\r\n\r\n  kalt .\nja"
SENTENCES = [["Der", "Fluß", "ist"], ["breit", "und"], ["kalt", "."], ["ja"]]


def read(*files, lowercase=False, max_sentence_length=10_000, warn=True):
    return list(sentences(files, lowercase, max_sentence_length, warn))


def zst(data: bytes) -> bytes:
    return pytest.importorskip(
        "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    ).compress(data)


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@pytest.mark.parametrize("ending", PACK)
def test_containers(tmp_path, ending):
    path = tmp_path / f"text.txt{ending}"
    path.write_bytes(PACK[ending](TEXT.encode()))
    assert locate(str(path), tmp_path) == [path]
    assert read(path) == SENTENCES


@pytest.mark.parametrize("ending", [ending for ending in PACK if ending])
@pytest.mark.parametrize("breakage", ["cut", "wrong ending"])
def test_broken_containers(tmp_path, ending, breakage):
    path = tmp_path / f"text.txt{ending}"
    data = PACK[ending](np.random.default_rng(1).bytes(20_000).hex().encode())
    path.write_bytes(data[: len(data) // 2] if breakage == "cut" else b"plain words\n" * 9)
    with pytest.raises(
        CorpusError, match=r"text\.txt\.\w+ cannot be read \(.+\); is it whole"
    ) as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zstd is in the standard library")
def test_zst_without_its_package(tmp_path, monkeypatch):
    (tmp_path / "text.zst").write_bytes(b"any")
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(
        CorpusError, match=r"text\.zst needs the package backports\.zstd; install it"
    ):
        read(tmp_path / "text.zst")


def test_lowercase_and_byte_order_mark(tmp_path):
    (tmp_path / "text").write_text(TEXT, encoding="utf-8-sig")
    assert read(tmp_path / "text") == SENTENCES
    assert read(tmp_path / "text", lowercase=True)[0] == ["der", "fluß", "ist"]


def test_sentences_do_not_cross_files(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name} x", encoding="utf-8")
    assert read(tmp_path / "a", tmp_path / "b") == [["a", "x"], ["b", "x"]]


pieces = st.sampled_from(
    [
        "a",
        "bc",
        "é",
        "ß",
        "語",
        "😀",
        "İ",
        "Σ",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\u3000",
        "\x85",
        "\ufeff",
        "\ufffd",
    ]
)
broken = st.sampled_from([b"\xff", b"\xc3", b"\xe8\xaa", b"\xed\xa0\x80", b"\xf0\x9f"])


@settings(deadline=None)
@given(
    st.lists(pieces.map(str.encode) | broken, max_size=40).map(b"".join),
    st.integers(1, 5),
    st.integers(1, 7),
    st.booleans(),
)
def test_result_does_not_depend_on_the_block_size(
    data, max_sentence_length, block_bytes, lowercase
):
    bad = [corpus.BadLines(), corpus.BadLines()]
    read_as = {"lowercase": lowercase, "max_sentence_length": max_sentence_length, "warn": False}
    with mock.patch("smart_open.open", lambda path, mode: io.BytesIO(data)):
        with mock.patch.object(corpus, "BadLines", lambda: bad[0]):
            at_once = read(Path("t"), **read_as)
        with (
            mock.patch.object(corpus, "BLOCK_BYTES", block_bytes),
            mock.patch.object(corpus, "BadLines", lambda: bad[1]),
        ):
            assert read(Path("t"), **read_as) == at_once
    assert bad[0] == bad[1]

    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = []  # gensim's LineSentence, with one U+FFFD for each undecodable byte
    for line in lines:
        text = "".join(
            "\ufffd" if "\udc80" <= char <= "\udcff" else char
            for char in line.decode("utf-8", "surrogateescape")
        )
        words = (text.lower() if lowercase else text).split()
        expected += [
            words[i : i + max_sentence_length] for i in range(0, len(words), max_sentence_length)
        ]
    if data not in (b"\xef", b"\xef\xbb"):
        assert at_once == expected
        assert bad[0].count == sum(
            line.decode("utf-8", "ignore").encode() != line for line in lines
        )


def test_an_endless_line_is_read_in_bounded_memory(tmp_path, monkeypatch):
    words = [f"w{i}" for i in range(5000)]
    (tmp_path / "text").write_text(" ".join(words), encoding="utf-8")
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 64)
    reader = sentences([tmp_path / "text"], False, 1000)
    with mock.patch.object(corpus, "split", wraps=corpus.split) as split:
        assert next(reader) == words[:1000]
        assert max(len(call.args[0]) for call in split.call_args_list) < 80
    assert [word for piece in reader for word in piece] == words[1000:]
    file = mock.MagicMock()
    file.__enter__().read.side_effect = [b"x" * 64] * 157 + [
        AssertionError("read on")
    ]  # 157 * 64 > 10,000
    with (
        mock.patch("smart_open.open", return_value=file),
        pytest.raises(CorpusError, match="over 10,000 characters"),
    ):
        read(Path("endless"))


def test_not_utf8_is_warned_of_once(tmp_path, caplog):
    (tmp_path / "good").write_text(
        "ein \ufffd Wort\n" * 3, encoding="utf-8"
    )  # U+FFFD itself is valid
    (tmp_path / "latin").write_bytes("ja\nFluß über über\nja\nüb\n".encode("latin-1"))
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path / "good", tmp_path / "latin")
        read(tmp_path / "latin", warn=False)
    assert found[4] == ["Flu\ufffd", "\ufffdber", "\ufffdber"]
    assert len(caplog.records) == 1
    assert "2 lines are not UTF-8" in caplog.text and "latin line 2" in caplog.text


@pytest.mark.parametrize("block_bytes", [7, 1 << 20])
@pytest.mark.parametrize(
    "data",
    [b"a b\0c", b"a " + b"x" * 10_001, b"x" * 10_001 + b" a\n", "\u00e9".encode() * 10_001],
    ids=range(4),
)
def test_binary_files_are_refused(tmp_path, monkeypatch, data, block_bytes):
    (tmp_path / "text").write_bytes(data)
    monkeypatch.setattr(corpus, "BLOCK_BYTES", block_bytes)
    with pytest.raises(CorpusError, match=r"text looks binary .*; bring .*text"):
        read(tmp_path / "text")
    (tmp_path / "text").write_text("é" * 10_000 + " a", encoding="utf-8")
    assert [len(word) for word in read(tmp_path / "text")[0]] == [10_000, 1]


def test_directory_is_recursive_sorted_and_skips_hidden_and_empty(tmp_path):
    for name in ["b.txt", "a/z.xml", "a/b/c.gz", ".hidden", "a/.git/x", "c/empty"]:
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "empty" else "x y", encoding="utf-8")
    found = locate(str(tmp_path / "texts"), tmp_path)
    assert [str(file.relative_to(tmp_path / "texts")) for file in found] == [
        "a/b/c.gz",
        "a/z.xml",
        "b.txt",
    ]
    for path in [tmp_path / "texts" / "c", tmp_path / "texts" / "c" / "empty"]:
        with pytest.raises(CorpusError, match="is empty or no text"):
            locate(str(path), tmp_path)


def test_a_folder_that_cannot_be_read_is_not_left_out(tmp_path, monkeypatch):
    for name in ["a.txt", "locked/b.txt", ".hidden/c.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x y", encoding="utf-8")
    scandir, locked = os.scandir, {str(tmp_path / ".hidden")}

    def refusing(folder):
        if str(folder) in locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    assert [file.name for file in locate(str(tmp_path), tmp_path)] == ["a.txt", "b.txt"]
    locked.add(str(tmp_path / "locked"))
    with pytest.raises(PermissionError, match="locked"):
        locate(str(tmp_path), tmp_path)


MEANT = {
    "txt8": "text8",
    "enwiki_sample": "enwiki-sample",
    "novel.tx": "novel.txt",
    "data/nowel": "data/novel.gz",
    "zzz": "",
}


@pytest.mark.parametrize("path", MEANT)
def test_unknown_path(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for name in ["novel.txt", "data/novel.gz"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    with pytest.raises(CorpusError) as error:
        locate(path, "data")
    assert (
        f"corpus.path='{path}' is no file, no directory and no corpus name (enwiki-sample, text8)"
        in str(error.value)
    )
    assert str(error.value).endswith(f"; did you mean {MEANT[path]}?" if MEANT[path] else "text8)")


def test_what_exists_wins_over_a_name_and_nothing_is_not_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text8").write_text("my own", encoding="utf-8")
    assert locate("text8", "data") == [Path("text8")]
    with pytest.raises(CorpusError, match=r"corpus\.path='' is no file"):
        locate("", "data")


def test_text8_is_fetched_once_and_then_offline(tmp_path, monkeypatch):
    from gensim import downloader

    packed = gzip.compress(b"anarchism originated")
    (tmp_path / "fetched").write_bytes(packed)
    load = mock.Mock(side_effect=[OSError("no route\nto host"), str(tmp_path / "fetched")])
    monkeypatch.setattr(downloader, "load", load)
    monkeypatch.setattr(sources, "TEXT8_MD5", hashlib.md5(packed).hexdigest())
    with pytest.raises(
        CorpusError,
        match=r"fetched \(no route to host\); put the text at .*text8 or .*text8\.gz, or give corpus\.path",
    ):
        locate("text8", tmp_path / "data")
    for _ in range(2):
        [path] = locate("text8", tmp_path / "data")
        assert path == tmp_path / "data" / "text8.gz" and read(path) == [
            ["anarchism", "originated"]
        ]
    assert load.mock_calls == [mock.call("text8", return_path=True)] * 2
    (tmp_path / "data" / "text8").write_text("unpacked", encoding="utf-8")
    assert locate("text8", tmp_path / "data") == [tmp_path / "data" / "text8"]


@pytest.mark.parametrize(
    "wrong",
    [gzip.compress(b"anarchism originated"), b"<html>not found</html>", b""],
    ids=["other", "page", "empty"],
)
def test_what_is_fetched_has_to_be_text8(tmp_path, monkeypatch, wrong):
    from gensim import downloader

    fetched = tmp_path / "gensim-data" / "text8" / "text8.gz"
    fetched.parent.mkdir(parents=True)
    fetched.write_bytes(wrong)
    monkeypatch.setattr(downloader, "load", lambda *_, **__: str(fetched))
    with pytest.raises(CorpusError) as error:
        locate("text8", tmp_path / "data")
    assert f"its MD5 is {hashlib.md5(wrong).hexdigest()} instead of 68799af40b" in str(error.value)
    assert f"; remove {fetched.parent}, or put the text at" in str(error.value) and "\n" not in str(
        error.value
    )
    assert not list((tmp_path / "data").iterdir())


ARTICLE = " ".join(f"[[Target{'abcdefghij'[i % 10]}|Word]] ''number''" for i in range(40))
DUMP = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">\n{}</mediawiki>\n'
PAGE = "<page><title>{}</title><ns>{}</ns><id>1</id><revision><text>{}</text></revision></page>\n"


def dump(*pages):
    return bz2.compress(DUMP.format("".join(PAGE.format(*page) for page in pages)).encode())


def test_wikipedia_dump_is_converted_once_with_the_words_of_gensims_wikicorpus(tmp_path, caplog):
    from gensim.corpora import WikiCorpus

    path = tmp_path / "xwiki-1-pages-articles.xml.bz2"
    path.write_bytes(
        dump(
            ("A", 0, ARTICLE),
            ("Talk:A", 1, ARTICLE),
            ("Stub", 0, "short"),
            ("B", 0, ARTICLE + " more"),
        )
    )
    with caplog.at_level(logging.INFO, "w2v"):
        [text] = locate(str(path), tmp_path / "data")
        assert locate(str(path), tmp_path / "data") == [text]
    assert caplog.text.count("converting the Wikipedia dump") == 1
    assert (
        text.parent == tmp_path / "data"
        and text.name.startswith("xwiki-1-pages-articles-")
        and text.suffix == ".txt"
    )
    assert read(text) == list(WikiCorpus(str(path), processes=1, dictionary={}).get_texts())
    assert len(read(text)) == 2


def test_bad_dumps_leave_nothing_behind(tmp_path):
    path = tmp_path / "xwiki-pages-articles.xml.bz2"
    whole = dump(("A", 0, ARTICLE))
    cut = bz2.compress(bz2.decompress(whole)[:-20])
    for data, reason in [
        (cut, "cannot be read"),
        (dump(("Stub", 0, "short")), "no article"),
        (whole[:-20], "cannot be read"),
    ]:
        path.write_bytes(data)
        with pytest.raises(CorpusError, match=reason):
            locate(str(path), tmp_path / "data")
        assert not list((tmp_path / "data").iterdir())


def test_the_default_corpus_needs_no_network(tmp_path):
    [path] = locate("enwiki-sample", tmp_path)
    assert path == tmp_path / "enwiki-sample.txt"
    articles = read(path, max_sentence_length=100_000)
    assert len(articles) == 106 and sum(map(len, articles)) == 452_944
    assert articles[0][:5] == ["anarchism", "is", "political", "philosophy", "that"]


def test_content_key(tmp_path):
    for name, data in {"a": b"xy", "b": b"z", "c": b"x", "d": b"yz", "same": b"xy"}.items():
        (tmp_path / name).write_bytes(data)
    a, b, c, d, same = (tmp_path / name for name in ("a", "b", "c", "d", "same"))
    key = content_key([a, b], tmp_path, min_count=5, lowercase=False)
    assert key == content_key([same, b], tmp_path, lowercase=False, min_count=5)
    assert len(key) == 32 and int(key, 16)
    others = [
        content_key([b, a], tmp_path, min_count=5, lowercase=False),
        content_key([c, d], tmp_path, min_count=5, lowercase=False),
    ]
    others += [
        content_key([a, b], tmp_path, min_count=4, lowercase=False),
        content_key([a], tmp_path, min_count=5, lowercase=False),
    ]
    assert len({key, *others}) == 5


def test_a_file_is_read_again_only_when_it_may_have_changed(tmp_path, monkeypatch):
    path, data = tmp_path / "text", tmp_path / "data"
    path.write_text("one text")
    key = content_key([path], data)
    assert not data.exists()  # so fresh that it might change unseen
    monkeypatch.setattr(sources, "STILL_NS", -1)
    assert content_key([path], data) == key
    with mock.patch.object(sources, "_digest", side_effect=AssertionError):
        assert content_key([path], data) == key
        assert content_key([path], data, min_count=1) != key
    times = path.stat()
    path.write_text("two text")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    other = content_key([path], data)
    assert other != key and content_key([path], data) == other
    (data / "cache" / "digests.json").write_text("[1, 2")
    assert content_key([path], data) == other
    with pytest.raises(
        CorpusError, match=r"gone cannot be read \(No such file or directory\); is it there"
    ):
        content_key([tmp_path / "gone"], data)


INDEX = {"a": 0, "b": 1, "c": 2}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcxy"), min_size=1, max_size=9), max_size=12),
    st.integers(1, 20),
)
def test_ids_are_those_of_known_words_in_sentences_of_two(tmp_path_factory, text, batch_words):
    expected = [[INDEX[word] for word in sentence if word in INDEX] for sentence in text]
    expected = [ids for ids in expected if len(ids) >= 2]
    folder = tmp_path_factory.mktemp("corpus") / "ids"
    with mock.patch.object(corpus, "BATCH_WORDS", batch_words):
        if not expected:
            with pytest.raises(
                CorpusError, match="no line of the text has two words of the vocabulary"
            ):
                Corpus.write(folder, encoded(iter(text), INDEX))
            assert not list(folder.parent.iterdir())
            return
        written = Corpus.write(folder, encoded(iter(text), INDEX))
    opened = Corpus.open(folder)
    for found in (written, opened):
        assert [
            found.ids[i:j].tolist()
            for i, j in zip(found.offsets[:-1], found.offsets[1:], strict=True)
        ] == expected
        assert (found.ids.dtype, found.offsets.dtype) == (np.int32, np.int64)
        assert found.offsets[0] == 0 and found.raw_words == sum(map(len, text))
    assert [path.name for path in folder.parent.iterdir()] == ["ids"]


def test_a_failed_write_leaves_the_old_corpus(tmp_path, monkeypatch):
    Corpus.write(tmp_path / "ids", encoded([["a", "b"]], INDEX))

    def stops():
        yield ["b", "c"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Corpus.write(tmp_path / "ids", encoded(stops(), INDEX))
    assert Corpus.open(tmp_path / "ids").ids.tolist() == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]
    Corpus.write(tmp_path / "ids", encoded([["b", "c"]], INDEX))
    replaced = Corpus.open(tmp_path / "ids")
    assert replaced.ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        replaced.ids[0] = 1
    monkeypatch.setattr(corpus, "FORMAT", corpus.FORMAT + 1)
    with pytest.raises(CorpusError, match="holds no whole corpus"):
        Corpus.open(tmp_path / "ids")


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "corpus.json"])
@pytest.mark.parametrize("cut", [-1, -4, -8, 0, None])
def test_a_damaged_corpus_is_refused(tmp_path, name, cut):
    Corpus.write(tmp_path / "ids", encoded([["a", "b", "c"], ["b", "c"]], INDEX))
    path = tmp_path / "ids" / name
    kept = path.read_bytes()[:cut]
    path.unlink()
    if cut is not None:
        path.write_bytes(kept)
    with pytest.raises(CorpusError, match=r"holds no whole corpus .*delete the folder"):
        Corpus.open(tmp_path / "ids")
