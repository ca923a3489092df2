"""Text -> sentences -> memory-mapped int32 ids.

A line is a sentence and whitespace separates its words, as in gensim's LineSentence. N ids, S sentences.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np

from w2v.config import CorpusConfig, VocabConfig
from w2v.text.sources import BLOCK_BYTES, FORMAT, CorpusError, aside_of, opened
from w2v.text.vocab import Vocab

BATCH_WORDS = 1 << 18  # encoded at a time
LONGEST_WORD = 10_000  # characters; what is longer is no text
ESCAPED = re.compile("[\udc80-\udcff]")  # how "surrogateescape" marks undecodable bytes

log = logging.getLogger("w2v")


def sentences(
    files: Iterable[Path], lowercase: bool, max_sentence_length: int, warn: bool = True
) -> Iterator[list[str]]:
    """The words of each line, long lines cut into pieces of `max_sentence_length` words; memory stays bounded.

    Bytes that are not UTF-8 become U+FFFD; with `warn`, how many lines have them is logged at the end.
    Raises `CorpusError` for a file that is broken or binary.
    """
    bad = BadLines()
    for path in files:
        pending: list[str] = []  # words of the line so far
        for text in _blocks(path, bad):
            *lines, rest = (text.lower() if lowercase else text).split("\n")
            for line in lines:
                words = pending + split(line, path)
                pending = []
                for start in range(0, len(words), max_sentence_length):
                    yield words[start : start + max_sentence_length]
            pending += split(rest, path)
            whole = len(pending) // max_sentence_length * max_sentence_length
            for start in range(0, whole, max_sentence_length):
                yield pending[start : start + max_sentence_length]
            pending = pending[whole:]
        if pending:
            yield pending
    if warn:
        bad.warn()


class NoKnownWords(CorpusError):
    """A text has nothing to train on."""

    raw_words = 0  # that were read


@dataclass(frozen=True, eq=False)
class Corpus:
    """The ids of a text, memory-mapped and read-only: sentence s is ids[offsets[s]:offsets[s + 1]]."""

    ids: np.ndarray  # int32 [N], words of the vocabulary only
    offsets: np.ndarray  # int64 [S + 1]
    raw_words: int  # words read, dropped ones included

    @classmethod
    def write(
        cls, folder: str | Path, encoded: Iterable[tuple[np.ndarray, np.ndarray, int]]
    ) -> Corpus:
        """Stream ids, lengths of sentences and counts of words read into `folder`, which appears whole or not at all.

        It replaces an older one. A sentence's ids may begin in an earlier block than its length. Raises `NoKnownWords` without ids.
        """
        raw_words, end = 0, 0
        with aside_of(Path(folder)) as aside:
            aside.mkdir()
            with (
                open(aside / "ids.bin", "wb") as ids_file,
                open(aside / "offsets.bin", "wb") as offsets_file,
            ):
                offsets_file.write(np.zeros(1, np.int64))
                for ids, lengths, words in encoded:
                    ids_file.write(ids)
                    offsets_file.write(end + np.cumsum(lengths))
                    raw_words, end = raw_words + words, end + int(lengths.sum())
            if not end:
                read = f"({raw_words} words read)"
                nothing = NoKnownWords(
                    f"no line of the text has two words of the vocabulary {read}; a line is a sentence"
                )
                nothing.raw_words = raw_words
                raise nothing
            sizes = {name: (aside / name).stat().st_size for name in ("ids.bin", "offsets.bin")}
            (aside / "corpus.json").write_text(
                json.dumps({"format": FORMAT, "raw_words": raw_words, "bytes": sizes}),
                encoding="utf-8",
            )
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
            ids, offsets = (
                np.memmap(folder / "ids.bin", np.int32, "r"),
                np.memmap(folder / "offsets.bin", np.int64, "r"),
            )
            if offsets[-1] != len(ids):
                raise ValueError(f"offsets.bin ends at {offsets[-1]} instead of {len(ids)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{folder} holds no whole corpus ({error}); delete the folder, the next run writes it anew"
            ) from None
        return cls(ids, offsets, written["raw_words"])


def read_plainly(
    files: list[Path], folder: Path, settings: CorpusConfig, limits: VocabConfig
) -> Vocab:
    """Write the ids of the files into `folder` and return their vocabulary: what `ingest` does, in two passes of Python on one core."""
    how = settings.lowercase, settings.max_sentence_length
    vocab = Vocab.count(
        sentences(files, *how), limits.min_count, limits.max_final_vocab, limits.max_vocab_size
    )
    Corpus.write(folder, encoded(sentences(files, *how, warn=False), vocab.index))
    return vocab


@dataclass
class BadLines:
    """Those that are not UTF-8, over all files."""

    count: int = 0
    first: str = ""
    last: str = ""

    def add(self, path: Path, line: int) -> None:
        """Count a line, which may have been counted just before."""
        place = f"{path} line {line}"
        self.count += place != self.last
        self.first, self.last = self.first or place, place

    def warn(self) -> None:
        if self.count:
            log.warning(
                "%d lines are not UTF-8, first %s; their undecodable bytes became U+FFFD",
                self.count,
                self.first,
            )


def bad_lines(text: str) -> list[int]:
    """Which lines of a text, counted from 0, have undecodable bytes, as "surrogateescape" left them."""
    if text.isascii() or not ESCAPED.search(text):
        return []
    return [number for number, line in enumerate(text.split("\n")) if ESCAPED.search(line)]


def refuse_binary(data: bytes, path: Path) -> None:
    if b"\0" in data:
        raise CorpusError(
            f"{path} looks binary (it has a NUL byte); bring UTF-8 text, plain or as .gz .bz2 .xz .zst"
        )


def _blocks(path: Path, bad: BadLines) -> Iterator[str]:
    """The text of a file in blocks that end at whitespace, so that neither a word nor a character is cut."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    carry, line, data = "", 1, b"more"
    with opened(path) as file:
        while data:
            data = file.read(BLOCK_BYTES)
            refuse_binary(data, path)
            text = decoder.decode(data, final=not data)
            for number in bad_lines(text):
                bad.add(path, line + number)
            text = ESCAPED.sub("\ufffd", text)
            line += text.count("\n")
            text = carry + text
            carry = text.rsplit(None, 1)[-1] if data and text and not text[-1].isspace() else ""
            split(carry, path)  # refuses an endless word
            yield text[: len(text) - len(carry)]


def split(line: str, path: Path) -> list[str]:
    """The words of a line; raises `CorpusError` for one that no text has."""
    found = line.split()
    if len(line) > LONGEST_WORD and max(map(len, found), default=0) > LONGEST_WORD:
        raise CorpusError(
            f"{path} looks binary (over {LONGEST_WORD:,} characters without a space); bring text with spaces between words"
        )
    return found


def encoded(
    sentences: Iterable[list[str]], index: Mapping[str, int]
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """What `Corpus.write` takes: words outside `index` are dropped, then sentences of fewer than two words."""
    batch, words = [], 0
    for sentence in sentences:
        batch.append(sentence)
        words += len(sentence)
        if words >= BATCH_WORDS:
            yield _ids(batch, index)
            batch, words = [], 0
    if batch:
        yield _ids(batch, index)


def _ids(batch: list[list[str]], index: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray, int]:
    """Ids of the known words (int32) and the lengths of the sentences that keep two or more; how many words were read."""
    lengths = np.fromiter(map(len, batch), np.int64, len(batch))
    ends = np.cumsum(lengths)
    ids = np.fromiter(map(index.get, chain.from_iterable(batch), repeat(-1)), np.int32, ends[-1])
    known = ids >= 0
    known_before = np.concatenate([[0], np.cumsum(known)])
    known_lengths = known_before[ends] - known_before[ends - lengths]
    stays = known_lengths >= 2
    return ids[known & np.repeat(stays, lengths)], known_lengths[stays], len(ids)
