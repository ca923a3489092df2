"""Text sources: find and open files, convert dumps and named corpora."""

import bz2
import errno
import gzip
import logging
import lzma
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from gensim.corpora import wikicorpus

from tests.support.each_case import each_case
from tests.support.plain_text import read_sentences
from w2v.config import CorpusConfig
from w2v.text.formats import CorpusError, opened
from w2v.text.sources import locate, stamp
from w2v.text.splitting import tokenize_mode


def zst(data: bytes) -> bytes:
    name = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    return pytest.importorskip(name).compress(data)


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zst}


@each_case("ending", ["", *PACK])
def test_files_are_decompressed_by_their_ending(tmp_path, ending):
    path = tmp_path / f"text.txt{ending}"
    data = b"some text\n" * 1000
    path.write_bytes(PACK.get(ending, bytes)(data))
    assert locate(str(path), tmp_path) == [path]
    with opened(path) as file:
        assert file.read() == data


@each_case("ending", PACK)
@pytest.mark.parametrize("size", [20_000, 200_000])  # below and above what is read to recognize it
def test_broken_files_are_named(tmp_path, ending, size):
    path = tmp_path / f"text.txt{ending}"
    data = PACK[ending](np.random.default_rng(1).bytes(size).hex().encode())
    path.write_bytes(data[: len(data) // 2])
    with (
        pytest.raises(CorpusError, match=r"text\.txt\.\w+ cannot be read \(.+\)") as error,
        opened(path) as file,
    ):
        file.read()
    assert "\n" not in str(error.value)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="zstd is in the standard library")
def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "text.zst").write_bytes(zst(b"any"))
    monkeypatch.setitem(sys.modules, "backports", None)
    with (
        pytest.raises(CorpusError, match=r"text\.zst .*backports.* package"),
        opened(tmp_path / "text.zst"),
    ):
        pass


def test_a_folder_is_searched_without_hidden_and_empty_files(tmp_path):
    texts = tmp_path / "texts"
    for name in ["b.txt", "a/z.xml", "a/b/c.gz", ".hidden", "a/.git/x", "c/empty"]:
        path = texts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "empty" else "x y", encoding="utf-8")
    found = [str(file.relative_to(texts)) for file in locate(str(texts), tmp_path)]
    assert found == ["a/b/c.gz", "a/z.xml", "b.txt"]
    for path in [texts / "c", texts / "c" / "empty"]:
        with pytest.raises(CorpusError, match="is empty or not text"):
            locate(str(path), tmp_path)


def test_links_in_a_folder_are_followed_once(tmp_path):
    for name in ["texts/a.txt", "other/b.txt"]:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x y", encoding="utf-8")
    texts = tmp_path / "texts"
    for name, target in [("c", "other"), ("d", "other"), ("e", "texts"), ("f.txt", "other/b.txt")]:
        (texts / name).symlink_to(tmp_path / target)
    found = [str(file.relative_to(texts)) for file in locate(str(texts), tmp_path)]
    assert found == ["a.txt", "c/b.txt"]
    (tmp_path / "other" / "b.txt").unlink()
    with pytest.raises(
        CorpusError, match=r"f\.txt is a link to .*b\.txt, which is missing; remove"
    ):
        locate(str(texts), tmp_path)


def test_a_folder_may_be_that_of_the_cache_and_of_converted_dumps(tmp_path):
    for name in ["a.txt", "cache/0123/words.txt", "b/cache/c.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x y", encoding="utf-8")
    (tmp_path / "z.xml").write_bytes(dump(("A", 0, ARTICLE)))
    for _ in range(2):
        texts = [file.name for file in locate(str(tmp_path), tmp_path)]
        assert len(texts) == 3 and texts[:2] == ["a.txt", "c.txt"], texts


def test_a_pipe_is_refused_with_a_remedy(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=r"pipe is a pipe; .* \| w2v train -"):
        locate(str(tmp_path / "pipe"), tmp_path)


def test_an_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    for name in ["a.txt", "locked/b.txt", ".hidden/c.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x y", encoding="utf-8")
    scandir = os.scandir
    locked = {str(tmp_path / ".hidden")}

    def refusing(folder):
        if str(folder) in locked:
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refusing)
    assert [file.name for file in locate(str(tmp_path), tmp_path)] == ["a.txt", "b.txt"]
    locked.add(str(tmp_path / "locked"))
    with pytest.raises(PermissionError, match="locked"):
        locate(str(tmp_path), tmp_path)


NEAREST = {
    "txt8": "text8",
    "enwiki_sample": "enwiki-sample",
    "novel.tx": "novel.txt",
    "data/nowel": "data/novel.gz",
    "zzz": None,
    "": None,
}


@each_case("path", NEAREST)
def test_an_unknown_path_is_answered_by_the_nearest_one(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    for name in ["novel.txt", "data/novel.gz"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x", encoding="utf-8")
    with pytest.raises(CorpusError, match=f"corpus.path='{path}' .*enwiki-sample, text8") as error:
        locate(path, "data")
    hint = f"did you mean {NEAREST[path]}?"
    assert str(error.value).endswith(hint if NEAREST[path] else "text8)")


def test_a_file_wins_over_a_corpus_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text8").write_text("my own", encoding="utf-8")
    assert locate("text8", "data") == [Path("text8")]


def test_text8_is_fetched_once(tmp_path, monkeypatch):
    from gensim import downloader

    fetched = tmp_path / "fetched"
    fetched.write_bytes(gzip.compress(b"anarchism originated"))
    load = mock.Mock(side_effect=[OSError("no route\nto host"), str(fetched)])
    monkeypatch.setattr(downloader, "load", load)
    data = tmp_path / "data"
    with pytest.raises(
        CorpusError, match=r"\(OSError: no route to host\); put the text at .*text8\.gz"
    ):
        locate("text8", data)
    for _ in range(2):
        assert locate("text8", data) == [data / "text8.gz"]
    assert (data / "text8.gz").read_bytes() == fetched.read_bytes()
    assert load.mock_calls == [mock.call("text8", return_path=True)] * 2
    (data / "text8").write_text("unpacked", encoding="utf-8")
    assert locate("text8", data) == [data / "text8"]


ARTICLE = " ".join(f"[[Target{'abcdefghij'[i % 10]}|Word]] ''number''" for i in range(40))
DUMP = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">\n{}</mediawiki>\n'
PAGE = "<page><title>{}</title><ns>{}</ns><id>1</id><revision><text>{}</text></revision></page>\n"


def dump(*pages):
    return bz2.compress(DUMP.format("".join(PAGE.format(*page) for page in pages)).encode())


def test_a_wikipedia_dump_is_converted_once_as_gensim_does(tmp_path, caplog):
    from gensim.corpora import WikiCorpus

    pages = [("A", 0, ARTICLE), ("Talk:A", 1, ARTICLE), ("Stub", 0, "short")]
    path = tmp_path / "xwiki-1-pages-articles.xml.bz2"
    path.write_bytes(dump(*pages, ("B", 0, ARTICLE + " more")))
    with caplog.at_level(logging.INFO, "w2v"):
        [text] = locate(str(path), tmp_path / "data")
        assert locate(str(path), tmp_path / "data") == [text]
    assert caplog.text.count("converting the Wikipedia dump") == 1
    assert text.parent == tmp_path / "data"
    assert text.name.startswith("xwiki-1-pages-articles-") and text.suffix == ".txt"
    expected = list(WikiCorpus(str(path), processes=1, dictionary={}).get_texts())
    assert read_sentences([text]) == expected and len(expected) == 2


def test_a_bad_dump_leaves_nothing_behind(tmp_path):
    path = tmp_path / "xwiki-pages-articles.xml.bz2"
    whole = dump(("A", 0, ARTICLE))
    bad = {
        "cut XML": bz2.compress(bz2.decompress(whole)[:-20]),
        "cut file": whole[:-20],
        "no article": dump(("Stub", 0, "short")),
    }
    for name, data in bad.items():
        path.write_bytes(data)
        with pytest.raises(CorpusError, match="no article" if name == "no article" else "be read"):
            locate(str(path), tmp_path / "data")
        assert not list(tmp_path.glob("data/*"))


def kill_this_process(arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_conversion(tmp_path, monkeypatch):
    path = tmp_path / "xwiki-pages-articles.xml.bz2"
    path.write_bytes(dump(("A", 0, ARTICLE)))
    monkeypatch.setattr(wikicorpus, "process_article", kill_this_process)
    with pytest.raises(CorpusError, match="xwiki.* processes that convert it was killed"):
        locate(str(path), tmp_path / "data")
    assert not list(tmp_path.glob("data/*"))


def test_the_default_corpus_needs_no_network(tmp_path):
    [path] = locate("enwiki-sample", tmp_path)
    assert path.name == "enwiki-sample.txt"
    articles = read_sentences([path], max_sentence_length=100_000)
    assert len(articles) == 106 and sum(map(len, articles)) == 452_944
    assert articles[0][:5] == ["anarchism", "is", "political", "philosophy", "that"]


def test_a_stamp_tells_files_and_their_changes_apart(tmp_path):
    for name in "abc":
        (tmp_path / name).write_text("one text")
    stamps = {stamp([tmp_path / name for name in names]) for names in ("a", "ab", "ba", "abc")}
    assert len(stamps) == 4 and stamp([tmp_path / "a"]) in stamps
    path = tmp_path / "a"
    times = path.stat()
    for number in range(3):  # each within the old length and time
        time.sleep(0.02)  # the resolution of the times of files
        before = stamp([path])
        path.write_text(f"text {number:03}")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert stamp([path]) != before
    with pytest.raises(CorpusError, match=r"gone cannot be read \(No such file or directory\)"):
        stamp([tmp_path / "gone"])


def test_a_converted_dump_is_found_for_a_copy_of_it(tmp_path):
    path = tmp_path / "xwiki-pages-articles.xml.bz2"
    path.write_bytes(dump(("A", 0, ARTICLE)))
    copy = tmp_path / "other" / path.name
    copy.parent.mkdir()
    shutil.copy2(path, copy)
    [text] = locate(str(path), tmp_path / "data")
    assert locate(str(copy), tmp_path / "data") == [text]
    path.write_bytes(dump(("A", 0, ARTICLE + " and more")))
    assert locate(str(path), tmp_path / "data") != [text]


JSON = '{"id": 1, "text": "naïve a\\nb"}\n\n{"text": "c \\ud800", "other": {}}\n'


@pytest.mark.parametrize("suffix", ["jsonl", "JSONL", "ndjson"])
@each_case("ending", ["", *PACK])
def test_a_field_of_json_lines_is_the_text(tmp_path, suffix, ending):
    path = tmp_path / f"texts.{suffix}{ending}"
    path.write_bytes(PACK.get(ending, bytes)(JSON.encode() * 1000))
    with opened(path) as file:
        assert file.read() == b"na\xc3\xafve a\nb\nc \xff\n" * 1000


@each_case(
    ("line", "message"),
    [
        ('{"text": 3, "n": ""}', r"no text in the field 'text' \(it has text: int, n: str\)"),
        ('{"text": [null]}', r"no text in the field 'text' \(it has text: list\)"),
        (r'{"text": "a \u0000"}', r"has \\u0000 in the field 'text'; remove it"),
        ("1", "no text in the field 'text'"),
        ('{"text": ', "not JSON"),
    ],
)
def test_json_lines_without_the_text_are_named(tmp_path, line, message):
    path = tmp_path / "texts.jsonl"
    path.write_text(JSON + line + "\n", encoding="utf-8")
    with (
        pytest.raises(CorpusError, match=rf"texts\.jsonl line 4 .*{message}"),
        opened(path) as file,
    ):
        file.read()


RAW = "The cat, it sat.\n" * 50
TOKENIZED = "the cat , it sat . don't\n" * 50
HINDI = "बिल्ली बैठी थी और कुत्ता\n" * 50


@each_case(
    ("text", "setting", "mode"),
    [
        (RAW, "auto", "words"),
        (RAW, "whitespace", "whitespace"),
        (TOKENIZED, "auto", "whitespace"),
        (TOKENIZED, "words", "words"),
        (HINDI, "auto", "whitespace"),
        ("", "auto", "whitespace"),
    ],
)
def test_raw_text_is_recognized(tmp_path, text, setting, mode):
    (tmp_path / "text").write_text(text, encoding="utf-8")
    found, why = tokenize_mode([tmp_path / "text"], CorpusConfig(tokenize=setting))
    assert found == mode
    automatic = text == RAW and setting == "auto"
    assert why == "50 % of the tokens end in punctuation: tokenize=words" * automatic


def test_an_address_that_cannot_be_fetched_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(CorpusError, match=r"s3://bucket/text cannot be fetched \(.*s3fs"):
        locate("s3://bucket/text", tmp_path)
    assert not list(tmp_path.rglob("text*"))
