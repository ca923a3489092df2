"""Encode text as word ids, on all cores.

Each thread reads a part of the text, block by block, as neighboring blocks share rare words. A text
that is not plain has one part, whose blocks threads read in turn. Each numbers the words of its
blocks in a table of its own; the numbers go to a temporary file. Tables are merged when they are
large, and at the end, which gives each word a code. Then frequent pairs of words may be joined (see
`phrases`), the vocabulary is selected, and threads replace numbers by ids: a number in a thread's
table leads to a code, and that to the word's row in the vocabulary, its id.

The vocabulary and the ids do not depend on blocks or threads: words are ordered by count and by
their first position in the text. Memory is bounded by the distinct words of the text, and for each
thread by TABLE_WORDS words and a few blocks; a word takes about 130 bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from w2v.config import CorpusConfig, VocabConfig
from w2v.system.console import progress_bar
from w2v.system.process import map_in_order
from w2v.text import tokenize
from w2v.text.formats import CorpusError, Format, binary_error, guess_encoding, recognize
from w2v.text.phrases import Block, CodedText, join_phrases
from w2v.text.splitting import EMOJI, PICTURE, opened_words, splitter
from w2v.text.tokenize import MergedWords, WordTable
from w2v.text.vocab import Vocab

BLOCK_BYTES = 1 << 21  # of text, read and numbered at a time
TABLE_WORDS = 1 << 18  # of one thread, before they are merged
MAX_WORD_BYTES = 40_000  # 10,000 characters of four bytes; a file with a longer word is no text
# Of a block with the beginning of its first word, which may be in the one before, and padding.
BUFFER_BYTES = BLOCK_BYTES + MAX_WORD_BYTES + 2 * tokenize.PADDING
LONG_WORD = f"over {MAX_WORD_BYTES // 4:,} characters without a space"
SENTENCES_AT_ONCE = 256
NOTHING = np.empty(0, np.int32)
LOG_SECONDS = 10.0  # from one line of progress to the next where there is no terminal
MOST_BROKEN = 0.001  # of the words of a file
UNDECODABLE = re.compile("[\udc80-\udcff]")  # how errors="surrogateescape" marks such bytes

log = logging.getLogger("w2v")


class EncodedBlock(NamedTuple):
    """Ids of a part of a text; a sentence may begin in the block before."""

    ids: np.ndarray  # int32, words of the vocabulary in sentences that have two of them
    lengths: np.ndarray  # int64, ids of each sentence that ends in this block
    raw_words: int  # words of the text, dropped ones included


class EncodedText(NamedTuple):
    """The vocabulary of a text, and its ids, which are encoded on demand."""

    vocab: Vocab
    blocks: Iterator[EncodedBlock]


def encode_files(
    files: list[Path], settings: CorpusConfig, limits: VocabConfig, workers: int, folder: Path
) -> EncodedText:
    """Count and encode the words of text files; a line is a sentence.

    `workers` threads read the text; temporary files in `folder` keep its word numbers. Raises
    `CorpusError` for a file that is not text, and `VocabError`.
    """
    merged = MergedWords()
    blocks = _number_words(files, settings, merged, workers, folder)
    counts, firsts = merged.totals()
    if settings.phrases:
        # Pairs are counted by codes, as a word has other numbers in other tables.
        coded = CodedText(folder)
        for codes in map_in_order(workers, NumberedBlock.codes, blocks):
            coded.append(codes)
        del blocks  # and their files
        coded, counts, firsts = join_phrases(coded, merged, settings, workers, folder)
        # From now on the number of a word is its code.
        all_codes = ThreadTable(np.arange(len(counts), dtype=np.int32))
        blocks = [NumberedBlock(coded, place, all_codes) for place in coded.blocks]
    vocab, kept = Vocab.select(merged.words, counts, firsts, limits)
    # Words that are not kept have row -1.
    row_of = np.full(len(counts), -1, np.int32)
    row_of[kept] = np.arange(len(kept))
    encoded = _encode_blocks(blocks, row_of, settings.max_sentence_length, workers)
    return EncodedText(vocab, encoded)


def encode_sentences(
    sentences: Iterable[Iterable[str]], index: Mapping[str, int]
) -> Iterator[EncodedBlock]:
    """Encode lists of words by the ids in `index`; drop other words."""
    remaining = iter(sentences)
    while batch := [list(sentence) for sentence in itertools.islice(remaining, SENTENCES_AT_ONCE)]:
        known = [[index[word] for word in sentence if word in index] for sentence in batch]
        kept = [ids for ids in known if len(ids) > 1]
        ids = np.fromiter(itertools.chain.from_iterable(kept), np.int32)
        lengths = np.fromiter(map(len, kept), np.int64)
        yield EncodedBlock(ids, lengths, sum(map(len, batch)))


class ThreadTable:
    """Words that a thread has read; their codes and rows follow later."""

    def __init__(self, codes: np.ndarray = NOTHING):
        self.words = WordTable()
        self.codes = codes  # by number, once the words are merged
        self.rows = NOTHING  # by number, once there is a vocabulary

    def merge(self, merged: MergedWords) -> None:
        """Add the words to `merged`, which gives them codes."""
        self.codes = merged.merge(self.words)
        self.words = WordTable()


class Broken(NamedTuple):
    """What is not UTF-8 in a block."""

    bytes: int = 0
    line: int = 0  # of the block, from 1: where the first of these bytes is
    words: int = 0


class NumberedBlock(NamedTuple):
    """A block of text as numbers of its words."""

    coded: CodedText  # the file of numbers
    place: Block  # in that file
    table: ThreadTable  # which has given the numbers
    path: Path | None = None  # the file of text
    broken: Broken = Broken()

    def numbers(self) -> np.ndarray:
        """Return the number of each word."""
        return self.coded.read(self.place.first, self.place.tokens)

    def codes(self) -> np.ndarray:
        """Return the code of each word; its table is merged."""
        return self.table.codes[self.numbers()]


class Piece(NamedTuple):
    """What one thread at a time reads of a file: all, or some of its bytes."""

    path: Path
    found: Format
    start: int = 0
    end: int | None = None  # after a space; None: the end of the file


class TextBlock(NamedTuple):
    """A block of text in the buffer of a thread."""

    first: int  # bytes of the text before it, with a line end after each file; no fewer than words
    path: Path
    size: int  # bytes


def _number_words(
    files: list[Path], settings: CorpusConfig, merged: MergedWords, workers: int, folder: Path
) -> list[NumberedBlock]:
    """Number all words of files, in threads, and add the words to `merged`."""
    formats = [recognize(path, settings) for path in files]
    pieces = [Piece(path, found) for path, found in zip(files, formats, strict=True)]
    readers = [_Reader(pieces, settings)]
    size = 0
    if all(found.is_plain for found in formats) and not splitter(settings):
        size = sum(path.stat().st_size for path in files)
        readers = _split(pieces, settings, workers)
    coded_texts = [CodedText(folder) for _ in range(workers)]
    numbered: dict[int, NumberedBlock] = {}  # by `TextBlock.first`
    stopped = threading.Event()

    def number_blocks(worker: int, progress: Callable[[int], None]) -> None:
        coded = coded_texts[worker]
        buffer = np.empty(BUFFER_BYTES, np.uint8)
        numbers = np.empty(BUFFER_BYTES, np.int32)  # a word has at least one byte
        try:
            # Its own part first, then what is left of the others'.
            for reader in readers[worker:] + readers[:worker]:
                table = ThreadTable()
                while not stopped.is_set() and (block := reader.read(buffer)):
                    # Merged when large, which bounds memory and keeps the table in caches.
                    if table.words.size > TABLE_WORDS:
                        table.merge(merged)
                        table = ThreadTable()
                    progress(block.size)
                    words, broken = _number_block(buffer, block, settings, table, numbers)
                    place = coded.append(words)
                    numbered[block.first] = NumberedBlock(coded, place, table, block.path, broken)
                table.merge(merged)
        finally:
            stopped.set()  # no block is left, or the text is refused

    with _progress(size) as progress, ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(number_blocks, range(workers), itertools.repeat(progress)))
        finally:  # a signal
            stopped.set()
    blocks = [numbered[first] for first in sorted(numbered)]
    for path, of_file in itertools.groupby(blocks, lambda block: block.path):
        _check_encoding(path, list(of_file), settings)
    return blocks


def _check_encoding(path: Path, blocks: list[NumberedBlock], settings: CorpusConfig) -> None:
    """Log how many bytes of a file are broken; raise if many words are."""
    count = sum(block.broken.bytes for block in blocks)
    if not count:
        return
    first = next(place for place, block in enumerate(blocks) if block.broken.bytes)
    line = sum(block.place.lines for block in blocks[:first]) + blocks[first].broken.line
    bad_words = sum(block.broken.words for block in blocks)
    words = max(bad_words, sum(block.place.tokens - block.place.lines for block in blocks))
    encoding = recognize(path, settings).encoding.removesuffix("-sig").upper()
    if bad_words > MOST_BROKEN * words:
        broken = f"{bad_words:,} of {words:,} words are not {encoding}, first in line {line}"
        remedy = f"set corpus.encoding{guess_encoding(path)}, or remove them with iconv -c"
        raise CorpusError(f"{path}: {broken}; {remedy}")
    broken = f"{count:,} bytes are not {encoding}, first in {path} line {line}"
    log.warning(f"{broken}; each became U+FFFD")


def _number_block(
    buffer: np.ndarray,
    block: TextBlock,
    settings: CorpusConfig,
    table: ThreadTable,
    numbers: np.ndarray,
) -> tuple[np.ndarray, Broken]:
    """Return the number of each word of a block, which are in `numbers`."""
    if not buffer[: block.size].all():
        raise binary_error(block.path, "a NUL byte")
    text, size, broken = _clean(buffer, block.size, settings)
    numbers, longest = tokenize.number_words(text, size, block.first, table.words, numbers)
    if longest > MAX_WORD_BYTES:
        raise binary_error(block.path, LONG_WORD)
    return numbers, broken


def _split(pieces: Sequence[Piece], settings: CorpusConfig, workers: int) -> list[_Reader]:
    """Return readers of about equal parts of plain text, one for each thread."""
    sizes = [piece.path.stat().st_size for piece in pieces]
    share = max(BLOCK_BYTES, -(-sum(sizes) // workers))
    readers = []
    part: list[Piece] = []
    room = share
    first = 0  # of the part, as of a block
    done = 0  # bytes of the text, with line ends
    for (path, found, start, _), size in zip(pieces, sizes, strict=True):
        while room < size - start and (end := _after_space(path, start + room)) < size:
            readers.append(_Reader([*part, Piece(path, found, start, end)], settings, first))
            done += end - start
            first = done
            start = end
            part = []
            room = share
        part.append(Piece(path, found, start))
        done += size - start + 1
        room = max(0, room - (size - start))
    return [*readers, _Reader(part, settings, first)]


def _after_space(path: Path, start: int) -> int:
    """Return the byte after the next space of a file.

    It is the end of the file if there is no space in ASCII nearby.
    """
    with open(path, "rb") as file:
        file.seek(start)
        found = re.search(rb"[ \n\t]", file.read(MAX_WORD_BYTES))
        return start + found.end() if found else file.seek(0, os.SEEK_END)


class _Reader:
    """Blocks of text, read in order by one thread at a time.

    first: that of the first block.
    """

    def __init__(self, pieces: Sequence[Piece], settings: CorpusConfig, first: int = 0):
        self._lock = threading.Lock()
        self._blocks = self._read(pieces, settings, first)

    def read(self, buffer: np.ndarray) -> TextBlock | None:
        """Read a block into the buffer; return None after the last one."""
        with self._lock:
            self._buffer = buffer
            return next(self._blocks, None)

    def _read(
        self, pieces: Sequence[Piece], settings: CorpusConfig, first: int
    ) -> Iterator[TextBlock]:
        for piece in pieces:
            for size in self._read_piece(piece, settings):
                yield TextBlock(first, piece.path, size)
                first += size

    def _read_piece(self, piece: Piece, settings: CorpusConfig) -> Iterator[int]:
        """Yield the size of each block in the buffer."""
        path, found, start, end = piece
        with opened_words(path, settings, found) as file:
            rest = b""
            left = sys.maxsize if end is None else end - start
            if start:
                file.seek(start)
            else:
                head = file.read(min(left, len(codecs.BOM_UTF8)))
                left -= len(head)
                rest = head.removeprefix(codecs.BOM_UTF8)
            while True:
                memory = memoryview(self._buffer)
                memory[: len(rest)] = rest
                read = file.readinto(memory[len(rest) : len(rest) + min(left, BLOCK_BYTES)])
                left -= read
                size = len(rest) + read
                if not read:
                    if end is None:  # a line ends with its file
                        memory[size] = tokenize.NEWLINE
                        size += 1
                    if size:
                        yield size
                    break
                last = bytes(memory[max(0, size - MAX_WORD_BYTES - 4) : size])
                rest = _last_word(last, path)
                if size > len(rest):
                    yield size - len(rest)


def _last_word(text: bytes, path: Path) -> bytes:
    """Return what follows the last white space, which may not be ASCII."""
    if cut := max(map(text.rfind, (b" ", b"\n", b"\t"))) + 1:
        return text[cut:]
    if len(text) <= MAX_WORD_BYTES:
        return text
    decoded = text.decode(errors="surrogateescape")
    last = "" if decoded[-1].isspace() else decoded.split()[-1]
    if len(last) == len(decoded):
        raise binary_error(path, LONG_WORD)
    return last.encode(errors="surrogateescape")


def _clean(text: np.ndarray, size: int, settings: CorpusConfig) -> tuple[np.ndarray, int, Broken]:
    """Replace white space, punctuation and upper case, as the settings say.

    Returns the text, uint8 and padded, its bytes, and what was not UTF-8.
    """
    words_only = settings.tokenize == "words"
    lowercase = settings.lowercase or words_only
    text[size] = ord(" ")
    if not lowercase and text[:size].max() < 0x80:
        return text, size, Broken()
    if settings.emoji:
        decoded = text[:size].tobytes().decode(errors="surrogateescape")
        spaced = EMOJI.sub(lambda found: f" {found[0]} ", decoded).replace("\ufe0f", "")
        encoded = spaced.encode(errors="surrogateescape")
        text, size = tokenize.padded(encoded), len(encoded)
    becomes = tokenize.replacements(words_only, lowercase, PICTURE if settings.emoji else "")
    clean, clean_size = tokenize.normalized(text, size, becomes)
    if clean_size >= 0:
        return clean, clean_size, Broken()
    # Bytes that are not UTF-8, or upper case that depends on its neighbors: seldom, so in Python.
    decoded = text[:size].tobytes().decode(errors="surrogateescape")
    bad_line = bad_words = 0
    if bad := UNDECODABLE.search(decoded):
        bad_line = 1 + decoded.count("\n", 0, bad.start())
        bad_words = len(list(filter(UNDECODABLE.search, decoded.split())))
    decoded, bad_bytes = UNDECODABLE.subn("\ufffd", decoded)
    repaired = (decoded.lower() if lowercase else decoded).encode()
    clean, clean_size = tokenize.normalized(tokenize.padded(repaired), len(repaired), becomes)
    return clean, clean_size, Broken(bad_bytes, bad_line, bad_words)


def _encode_blocks(
    blocks: list[NumberedBlock], row_of: np.ndarray, max_length: int, workers: int
) -> Iterator[EncodedBlock]:
    """Replace word numbers by rows of the vocabulary, in threads."""

    def encode(item: tuple[NumberedBlock, int]) -> tuple[EncodedBlock, int]:
        block, words = item
        place, numbers = block.place, block.numbers()
        lengths = np.empty(place.lines + place.tokens // max_length + 1, np.int64)
        rows = block.table.rows
        ids, ended, last = tokenize.kept_sentences(numbers, rows, max_length, words, lengths)
        return EncodedBlock(numbers[:ids], lengths[:ended], place.tokens - place.lines), last

    def with_words() -> Iterator[tuple[NumberedBlock, int]]:
        words = 0  # of the open sentence, before the block
        for block in blocks:
            yield block, words
            tail = block.place.tail
            words = (tail if block.place.lines else words + tail) % max_length

    tables = list(dict.fromkeys(block.table for block in blocks))
    rows = map_in_order(workers, row_of.take, [table.codes for table in tables])
    for table, table_rows in zip(tables, rows, strict=True):
        table.rows = table_rows
        table.codes = NOTHING  # frees its memory
    yield from _join_sentences(map_in_order(workers, encode, with_words()))


def _join_sentences(blocks: Iterable[tuple[EncodedBlock, int]]) -> Iterator[EncodedBlock]:
    """Join the sentences that span blocks; drop those of a single word.

    With each block comes how many of its ids are in the last sentence, which has not ended.
    """
    kept = 0  # ids of the open sentence so far
    single = np.empty(0, np.int32)  # its only id, which waits for a second one
    for (ids, lengths, raw_words), last in blocks:
        if len(lengths):
            lengths[0] += kept
            if lengths[0] == 1:  # a single word has no context
                ids = ids[1 - kept :]  # it is the first one here, or waits in `single`
                single = single[:0]
            lengths = lengths[int(lengths[0] < 2) :]
            kept = 0
        kept += last
        ids = np.concatenate([single, ids]) if len(single) else ids
        single = ids[len(ids) - int(kept == 1) :]
        yield EncodedBlock(ids[: len(ids) - len(single)], lengths, raw_words)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show bytes by a bar, or in the log; 0 is an unknown total."""
    size = f" of {total / 1e6:,.0f}" if total else ""
    read = 0
    logged = time.monotonic()
    lock = threading.Lock()
    # disable=None: without a terminal.
    with progress_bar(
        desc="reading", total=total or None, unit="B", unit_scale=True, disable=None
    ) as bar:

        def count(done: int) -> None:
            nonlocal read, logged
            with lock:
                read += done
                bar.update(done)
                if bar.disable and time.monotonic() - logged >= LOG_SECONDS:
                    logged = time.monotonic()
                    log.info(f"{read / 1e6:,.0f}{size} MB read")

        yield count
