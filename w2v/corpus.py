"""Text in any container -> sentences -> memory-mapped int32 ids.

A line is a sentence and whitespace separates its words, as in gensim's LineSentence. N ids, S sentences.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = 1  # of the ids on disk; a new number makes old caches stale
BLOCK_BYTES = 1 << 20  # read at a time
BATCH_WORDS = 1 << 18  # encoded at a time
LONGEST_WORD = 10_000  # characters; what is longer is no text
ESCAPED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" marks undecodable bytes
CODECS = {".zst": "backports.zstd", ".lz4": "lz4"}  # packages that smart_open needs for these endings

logger = logging.getLogger(__name__)


class CorpusError(ValueError):
    """A corpus that cannot be used; the message is one line that names the file and the remedy."""


def locate(path: str, data_dir: str | Path) -> list[Path]:
    """The text files that `path` stands for, sorted: a file, a directory (recursive), a Wikipedia dump, or a name.

    What exists wins over a name. In a directory, hidden and empty files are skipped. Dumps and named corpora are turned
    into text once, under `data_dir`. Raises `CorpusError` when there is nothing to read.
    """
    found, data_dir = Path(path).expanduser(), Path(data_dir).expanduser()
    if path and found.exists():
        inside = found.rglob("*") if found.is_dir() else [found]
        shown = (file for file in inside if not any(part.startswith(".") for part in file.relative_to(found).parts))
        files = sorted(file for file in shown if file.is_file() and file.stat().st_size)
        if not files:
            raise CorpusError(f"corpus.path={path} is empty or no text; bring a text, one sentence or document a line, or a folder of such")
        return [_as_text(file, data_dir) for file in files]
    if path in NAMES:
        return [NAMES[path](data_dir)]
    neighbours = [str(file) for folder in {found.parent, data_dir} if folder.is_dir() for file in folder.iterdir()]
    hint = "".join(f"; did you mean {near}?" for near in difflib.get_close_matches(path, [*NAMES, *neighbours], n=1))
    raise CorpusError(f"corpus.path={path!r} is no file, no directory and no corpus name ({', '.join(NAMES)}){hint}")


def sentences(files: Iterable[Path], lowercase: bool, max_sentence_length: int, warn: bool = True) -> Iterator[list[str]]:
    """The words of each line, long lines cut into pieces of `max_sentence_length` words; memory stays bounded.

    Bytes that are not UTF-8 become U+FFFD; with `warn`, how many lines have them is logged at the end.
    Raises `CorpusError` for a file that is broken or binary.
    """
    bad = _BadLines()
    for path in files:
        pending: list[str] = []  # words of the line so far
        for text in _blocks(path, bad):
            *lines, rest = (text.lower() if lowercase else text).split("\n")
            for line in lines:
                words = pending + _words(line, path)
                pending = []
                for start in range(0, len(words), max_sentence_length):
                    yield words[start : start + max_sentence_length]
            pending += _words(rest, path)
            whole = len(pending) // max_sentence_length * max_sentence_length
            for start in range(0, whole, max_sentence_length):
                yield pending[start : start + max_sentence_length]
            pending = pending[whole:]
        if pending:
            yield pending
    if bad.count and warn:
        logger.warning("%d lines are not UTF-8, first %s; their undecodable bytes became U+FFFD", bad.count, bad.first)


def content_key(files: Iterable[Path], **settings: Any) -> str:
    """32 hex digits that stand for the files' bytes, in order, and for the settings (anything JSON); names do not matter."""
    key = hashlib.blake2b(json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode(), digest_size=16)
    for path in files:
        of_file = hashlib.blake2b()
        with open(path, "rb") as file:
            while block := file.read(BLOCK_BYTES):
                of_file.update(block)
        key.update(of_file.digest())
    return key.hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """The ids of a text, memory-mapped and read-only: sentence s is ids[offsets[s]:offsets[s + 1]]."""

    ids: np.ndarray  # int32 [N], words of the vocabulary only
    offsets: np.ndarray  # int64 [S + 1]
    raw_words: int  # words read, dropped ones included

    @classmethod
    def write(cls, folder: str | Path, sentences: Iterable[list[str]], index: Mapping[str, int]) -> Corpus:
        """Stream the ids of all sentences into `folder`, which appears whole or not at all and replaces an older one.

        Words outside `index` are dropped, then sentences of fewer than two words. Raises `CorpusError` when none is left.
        """
        raw_words, end = 0, 0
        with _aside(Path(folder)) as aside:
            aside.mkdir()
            with open(aside / "ids.bin", "wb") as ids_file, open(aside / "offsets.bin", "wb") as offsets_file:
                np.zeros(1, np.int64).tofile(offsets_file)
                for batch in _batches(sentences):
                    ids, lengths, words = _encode(batch, index)
                    ids.tofile(ids_file)
                    (end + np.cumsum(lengths)).tofile(offsets_file)
                    raw_words, end = raw_words + words, end + len(ids)
            if not end:
                raise CorpusError(f"no line of the text has two words of the vocabulary ({raw_words} words read); a line is a sentence")
            sizes = {name: (aside / name).stat().st_size for name in ("ids.bin", "offsets.bin")}
            (aside / "corpus.json").write_text(json.dumps({"format": FORMAT, "raw_words": raw_words, "bytes": sizes}), encoding="utf-8")
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Map what `write` left in `folder`. Raises `CorpusError` when it is not there, not whole or of another format."""
        folder = Path(folder)
        try:
            written = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
            sizes = {name: (folder / name).stat().st_size for name in ("ids.bin", "offsets.bin")}
            if (written["format"], written["bytes"]) != (FORMAT, sizes):
                raise ValueError(f"format {FORMAT} with {sizes} bytes does not match {written}")
            ids, offsets = np.memmap(folder / "ids.bin", np.int32, "r"), np.memmap(folder / "offsets.bin", np.int64, "r")
            if offsets[-1] != len(ids):
                raise ValueError(f"offsets.bin ends at {offsets[-1]} instead of {len(ids)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{folder} holds no whole corpus ({error}); delete the folder, the next run writes it anew") from None
        return cls(ids, offsets, written["raw_words"])


@dataclass
class _BadLines:  # that are not UTF-8, over all files
    count: int = 0
    first: str = ""


def _blocks(path: Path, bad: _BadLines) -> Iterator[str]:
    """The text of a file in blocks that end at whitespace, so that neither a word nor a character is cut."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    carry, line, last_bad, data = "", 1, 0, b"more"
    with _opened(path) as file:
        while data:
            data = file.read(BLOCK_BYTES)
            if b"\0" in data:
                raise CorpusError(f"{path} looks binary (it has a NUL byte); bring UTF-8 text, plain or as .gz .bz2 .xz .zst")
            text = decoder.decode(data, final=not data)
            if not text.isascii() and ESCAPED.search(text):
                for number, content in enumerate(text.split("\n"), start=line):
                    if number != last_bad and ESCAPED.search(content):
                        bad.first = bad.first or f"{path} line {number}"
                        bad.count, last_bad = bad.count + 1, number
                text = ESCAPED.sub("\ufffd", text)
            line += text.count("\n")
            text = carry + text
            carry = text.rsplit(None, 1)[-1] if data and text and not text[-1].isspace() else ""
            _words(carry, path)  # refuses an endless word
            yield text[: len(text) - len(carry)]


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file, unpacked as its ending says; what goes wrong inside becomes a `CorpusError` that names the file."""
    import smart_open

    try:
        with smart_open.open(path, "rb") as file:
            yield file
    except CorpusError:
        raise
    except ImportError as error:
        raise CorpusError(f"{path} needs the package {CODECS.get(path.suffix.lower(), error.name)}; install it or unpack it") from None
    except Exception as error:  # each decompressor has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(f"{path} cannot be read ({reason}); is it whole, and what its ending says?") from None


def _words(line: str, path: Path) -> list[str]:
    words = line.split()
    if len(line) > LONGEST_WORD and max(map(len, words), default=0) > LONGEST_WORD:
        raise CorpusError(f"{path} looks binary (over {LONGEST_WORD:,} characters without a space); bring text with spaces between words")
    return words


def _batches(sentences: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    batch, words = [], 0
    for sentence in sentences:
        batch.append(sentence)
        words += len(sentence)
        if words >= BATCH_WORDS:
            yield batch
            batch, words = [], 0
    if batch:
        yield batch


def _encode(batch: list[list[str]], index: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids of the known words (int32) and the lengths of the sentences that keep two or more; how many words were read."""
    lengths = np.fromiter(map(len, batch), np.int64, len(batch))
    ends = np.cumsum(lengths)
    ids = np.fromiter(map(index.get, chain.from_iterable(batch), repeat(-1)), np.int32, ends[-1])
    known = ids >= 0
    known_before = np.concatenate([[0], np.cumsum(known)])
    known_lengths = known_before[ends] - known_before[ends - lengths]
    stays = known_lengths >= 2
    return ids[known & np.repeat(stays, lengths)], known_lengths[stays], len(ids)


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """A path beside `target` for a file or folder that takes its place when the block succeeds, and goes when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        aside = Path(folder, "new")
        yield aside
        if target.is_dir():
            os.replace(target, Path(folder, "old"))
        os.replace(aside, target)


def _as_text(path: Path, data_dir: Path) -> Path:
    """The file itself, or the text that a Wikipedia dump was or is now converted to."""
    if not re.search(r"\.xml\b", path.name):
        return path
    with _opened(path) as file:
        if b"<mediawiki" not in file.read(1000):
            return path
    target = data_dir / f"{path.name.split('.xml')[0]}-{content_key([path])[:8]}.txt"
    return target if target.is_file() else _convert(path, target)


def _convert(dump: Path, target: Path) -> Path:
    """Write a dump as text, an article a line, with the words of gensim's WikiCorpus: lower case, 2 to 15 letters.

    WikiCorpus itself waits for ever at a truncated dump and takes an interrupt for the end, so only its parts are used.
    """
    from gensim.corpora import wikicorpus

    def pages() -> Iterator[tuple[str, str, str]]:
        with _opened(dump) as file:
            for title, text, number in wikicorpus.extract_pages(file, ("0",)):
                yield text, title, number

    logger.info("converting the Wikipedia dump %s to %s, once; a full dump takes hours", dump, target)
    source = pages()
    with _aside(target) as aside:
        with open(aside, "w", encoding="utf-8") as out, multiprocessing.Pool(initializer=wikicorpus.init_to_ignore_interrupt) as pool:
            while group := list(islice(source, 256)):  # imap alone would read the whole dump ahead
                for words, _, _ in pool.imap(wikicorpus.process_article, group, chunksize=8):
                    if len(words) >= wikicorpus.ARTICLE_MIN_WORDS:
                        out.write(" ".join(words) + "\n")
        if not aside.stat().st_size:
            raise CorpusError(f"{dump} holds no article of {wikicorpus.ARTICLE_MIN_WORDS} words or more")
    return target


def _enwiki_sample(data_dir: Path) -> Path:
    """106 articles of the English Wikipedia that come with gensim."""
    from gensim.test.utils import datapath

    target = data_dir / "enwiki-sample.txt"
    dump = datapath("enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")
    return target if target.is_file() else _convert(Path(dump), target)


def _text8(data_dir: Path) -> Path:
    """The first 100 MB of an English Wikipedia as a to z and spaces (mattmahoney.net/dc/textdata), fetched once."""
    plain, packed = data_dir / "text8", data_dir / "text8.gz"
    if plain.is_file() or packed.is_file():
        return plain if plain.is_file() else packed
    from gensim import downloader

    try:
        fetched = downloader.load("text8", return_path=True)
    except Exception as error:  # whatever the network and gensim's cache do
        remedy = f"put the text at {plain} or {packed}, or give corpus.path=FILE"
        raise CorpusError(f"text8 cannot be fetched ({' '.join(str(error).split())}); {remedy}") from None
    with _aside(packed) as aside:
        shutil.copyfile(fetched, aside)
    return packed


NAMES = {"enwiki-sample": _enwiki_sample, "text8": _text8}
