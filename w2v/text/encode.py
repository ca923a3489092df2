"""Encode text as word ids, on all cores.

Threads take blocks of the text in turn. Each numbers the words that it meets in a table of its own;
the numbers go to a temporary file. Tables are merged by the hash of their words when they are
large, and at the end, which gives each word a code. Then frequent pairs of words may be joined (see
`phrases`), the vocabulary is known, and threads replace numbers by ids: a number in a thread's
table leads to a code, and that to the word's row in the vocabulary, its id.

The vocabulary and the ids do not depend on blocks or threads: words are ordered by count and by
their first position in the text. Memory is bounded by the distinct words of the text, and for each
thread by TABLE_WORDS words and a few blocks; a word takes about 130 bytes.
"""

from __future__ import annotations

import codecs
import itertools
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from smart_open.compression import get_supported_extensions
from tqdm import tqdm

from w2v.config import CorpusConfig, VocabConfig
from w2v.text import tokenize
from w2v.text.phrases import Block, CodedText, join_phrases, map_in_order
from w2v.text.sources import CorpusError, opened
from w2v.text.tokenize import Partitions, WordTable
from w2v.text.vocab import Vocab

BLOCK_BYTES = 1 << 20  # of text, read and numbered at a time
TABLE_WORDS = 1 << 18  # of one thread, before they are merged
MAX_WORD_BYTES = 40_000  # 10,000 characters of four bytes; a file with a longer word is no text
# Of a block: the end of the one before may be part of its first word, and spaces follow.
BUFFER_BYTES = BLOCK_BYTES + MAX_WORD_BYTES + 2 * tokenize.PADDING
LONG_WORD = f"over {MAX_WORD_BYTES // 4:,} characters without a space"
SENTENCES_AT_ONCE = 256
LOG_SECONDS = 10.0  # between two lines of progress without a terminal
UNDECODABLE = re.compile("[\udc80-\udcff]")  # how errors="surrogateescape" marks such bytes

log = logging.getLogger("w2v")


class EncodedBlock(NamedTuple):
    """Ids of a part of a text; a sentence may begin in the block before."""

    ids: np.ndarray  # int32, words of the vocabulary in sentences that have two of them
    lengths: np.ndarray  # int64, ids of each sentence that ends in this block
    raw_words: int  # words of the text, dropped ones included


class EncodedText(NamedTuple):
    """The vocabulary of a text, and its ids, which are made as they are taken."""

    vocab: Vocab
    blocks: Iterator[EncodedBlock]
    phrases: list[str]  # joined words of the vocabulary, the most frequent first


def encode_files(
    files: list[Path], settings: CorpusConfig, limits: VocabConfig, workers: int, folder: Path
) -> EncodedText:
    """Count and encode the words of text files; a line is a sentence.

    `workers` threads read the text; temporary files in `folder` keep its word numbers. Raises
    `CorpusError` for a file that is no text, and `VocabError`.
    """
    merged = Partitions()
    text = CodedText(folder)
    try:
        numbered = _number_words(files, settings, text, merged, workers)
        blocks = [(block.place, block.table) for block in numbered]
        counts, firsts = merged.totals()
        joined_codes = np.empty(0, np.int32)
        if settings.phrases:
            # To count pairs, words need numbers that are the same in all blocks.
            text = _coded(text, blocks, workers, folder)
            passes, threshold = settings.phrases, settings.phrases_threshold
            joined = join_phrases(text, merged, passes, threshold, workers, folder)
            text, counts, firsts, joined_codes = joined
            all_codes = _Table(np.arange(len(counts), dtype=np.int32))
            blocks = [(block, all_codes) for block in text.blocks]
        vocab, kept = Vocab.select(merged.words, counts, firsts, limits)
    except BaseException:
        text.file.close()
        raise
    # Words that are not kept have row -1.
    row_of = np.full(len(counts), -1, np.int32)
    row_of[kept] = np.arange(len(kept))
    phrases = np.flatnonzero(np.isin(kept, joined_codes)).tolist()
    encoded = _encode_blocks(text, blocks, row_of, settings.max_sentence_length, workers)
    return EncodedText(vocab, encoded, [vocab.words[row] for row in phrases])


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


class _Table:
    """The words that a thread has met, and what their numbers stand for."""

    def __init__(self, codes: np.ndarray | None = None):
        self.words = WordTable()
        self.codes = codes  # by number, when the words are merged; at last rows of the vocabulary

    def merge(self, merged: Partitions) -> None:
        """Give the words to `merged`, for their codes."""
        self.codes = merged.merge(self.words)
        self.words = WordTable()


class _Numbered(NamedTuple):
    """A block of the text whose words are numbered."""

    path: Path
    bytes: int
    place: Block  # of the word numbers
    table: _Table  # that these are of
    bad_bytes: int  # that are not UTF-8
    bad_line: int  # of the block, with the first of these


def _number_words(
    files: list[Path], settings: CorpusConfig, text: CodedText, merged: Partitions, workers: int
) -> list[_Numbered]:
    """Number all words of files, in threads; return the blocks in order.

    The word numbers are appended to `text`, and the words merged into `merged`.
    """
    own = threading.local()  # table and buffer of a thread
    tables: list[_Table] = []
    free: list[np.ndarray] = []  # buffers; new ones for each block would take 8 % more time

    def number(place: int, path: Path, block: np.ndarray, size: int) -> _Numbered:
        if not hasattr(own, "table"):
            own.table = _Table()
            own.numbers = np.empty(len(block), np.int32)  # a word has at least one byte
            tables.append(own.table)
        table = own.table
        new, new_size, bad_bytes, bad_line = _clean(block, size, settings)
        words = tokenize.number_words(new, new_size, place << 32, table.words, own.numbers)
        if words.has_nul:
            raise _binary_error(path, "it has a NUL byte, as UTF-16 has")
        if words.longest > MAX_WORD_BYTES:
            raise _binary_error(path, LONG_WORD)
        written = text.append(words.numbers)
        if table.words.size > TABLE_WORDS:  # which bounds memory, and keeps the table in caches
            table.merge(merged)
            del own.table
        free.append(block)
        return _Numbered(path, size, written, table, bad_bytes, bad_line)

    found = map_in_order(workers, number, _blocks(files, settings.field, free))
    numbered = list(_with_progress(found, files))
    rest = ((table, merged) for table in tables if table.codes is None)
    list(map_in_order(workers, _Table.merge, rest))
    bad = [block for block in numbered if block.bad_bytes]
    if bad:
        before = itertools.takewhile(lambda block: block is not bad[0], numbered)
        lines = sum(block.place.lines for block in before if block.path == bad[0].path)
        where = f"{bad[0].path} line {lines + bad[0].bad_line}"
        count = sum(block.bad_bytes for block in bad)
        log.warning(f"{count:,} bytes are not UTF-8, first in {where}; each became U+FFFD")
    return numbered


def _blocks(
    files: list[Path], field: str, free: list[np.ndarray]
) -> Iterator[tuple[int, Path, np.ndarray, int]]:
    """Yield blocks that end at white space: number, file, buffer and bytes.

    `free` are buffers that may be filled again.
    """
    place = 0
    for path in files:
        with opened(path, field) as file:
            rest = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
            read = 1
            while read:
                block = free.pop() if free else np.empty(BUFFER_BYTES, np.uint8)
                text = memoryview(block)
                text[: len(rest)] = rest
                read = file.readinto(text[len(rest) : len(rest) + BLOCK_BYTES])
                size = len(rest) + read
                if not read:  # a line ends with its file
                    text[size] = tokenize.NEWLINE
                    size += 1
                rest = _last_word(bytes(text[max(0, size - MAX_WORD_BYTES - 4) : size]), path)
                if len(rest) < size:
                    place += 1
                    yield place, path, block, size - len(rest)


def _last_word(text: bytes, path: Path) -> bytes:
    """Return what follows the last white space, which may not be ASCII."""
    if cut := max(map(text.rfind, (b" ", b"\n", b"\t"))) + 1:
        return text[cut:]
    if len(text) <= MAX_WORD_BYTES:
        return text
    decoded = text.decode(errors="surrogateescape")
    last = "" if decoded[-1].isspace() else decoded.split()[-1]
    if len(last) == len(decoded):
        raise _binary_error(path, LONG_WORD)
    return last.encode(errors="surrogateescape")


def _clean(text: np.ndarray, size: int, settings: CorpusConfig) -> tuple[np.ndarray, int, int, int]:
    """Return the text to number, its size, its bad bytes and their line."""
    words_only = settings.tokenize == "words"
    lowercase = settings.lowercase or words_only
    text[size] = ord(" ")
    if not lowercase and text[:size].max() < 0x80:
        return text, size, 0, 0
    becomes = tokenize.replacements(words_only, lowercase)
    new, new_size = tokenize.normalised(text, size, becomes)
    if new_size >= 0:
        return new, new_size, 0, 0
    # Bytes that are not UTF-8, or upper case that depends on its neighbours: seldom, so in Python.
    decoded = text[:size].tobytes().decode(errors="surrogateescape")
    bad_line = 0
    if bad := UNDECODABLE.search(decoded):
        bad_line = 1 + decoded.count("\n", 0, bad.start())
    decoded, bad_bytes = UNDECODABLE.subn("\ufffd", decoded)
    repaired = (decoded.lower() if lowercase else decoded).encode()
    new, new_size = tokenize.normalised(tokenize.padded(repaired), len(repaired), becomes)
    return new, new_size, bad_bytes, bad_line


def _binary_error(path: Path, reason: str) -> CorpusError:
    remedy = "bring UTF-8 text with spaces between words, plain or as .gz .bz2 .xz .zst"
    return CorpusError(f"{path} looks binary ({reason}); {remedy}")


class _Rows(NamedTuple):
    """Ids of a block, whose first and last sentence may be parts of one."""

    ids: np.ndarray
    lengths: np.ndarray  # of sentences that end in the block
    open: int  # ids of the last sentence, which has not ended
    raw_words: int


def _coded(
    text: CodedText, blocks: list[tuple[Block, _Table]], workers: int, folder: Path
) -> CodedText:
    """Replace word numbers by codes, which are the same in all blocks."""

    def coded(block: Block, table: _Table) -> np.ndarray:
        return table.codes[text.read(*block[:2])]

    new = CodedText(folder)
    for codes in map_in_order(workers, coded, blocks):
        new.append(codes)
    text.file.close()
    return new


def _encode_blocks(
    text: CodedText,
    blocks: list[tuple[Block, _Table]],
    row_of: np.ndarray,
    max_length: int,
    workers: int,
) -> Iterator[EncodedBlock]:
    """Replace word numbers by rows of the vocabulary, in threads."""

    def encode(block: Block, table: _Table, words: int) -> _Rows:
        numbers = text.read(*block[:2])
        lengths = np.empty(block.lines + block.tokens // max_length + 1, np.int64)
        ids, ended, last = tokenize.kept_sentences(numbers, table.codes, max_length, words, lengths)
        return _Rows(numbers[:ids], lengths[:ended], last, block.tokens - block.lines)

    def with_words() -> Iterator[tuple[Block, _Table, int]]:
        words = 0  # of the open sentence, before the block
        for block, table in blocks:
            yield block, table, words
            words = (block.tail if block.lines else words + block.tail) % max_length

    try:
        tables = list(dict.fromkeys(table for _, table in blocks))
        rows = map_in_order(workers, row_of.take, ((table.codes,) for table in tables))
        for table, of_table in zip(tables, rows, strict=True):
            table.codes = of_table
        yield from _join_sentences(map_in_order(workers, encode, with_words()))
    finally:
        text.file.close()


def _join_sentences(blocks: Iterable[_Rows]) -> Iterator[EncodedBlock]:
    """Join the sentences that span blocks; drop those of a single word."""
    kept = 0  # ids of the open sentence so far
    single = np.empty(0, np.int32)  # its only id, which waits for a second one
    for ids, lengths, last, raw_words in blocks:
        if len(lengths):
            lengths[0] += kept
            if lengths[0] == 1:  # a single word has no context
                ids = ids[1 - kept :]
                single = single[:0]
            lengths = lengths[int(lengths[0] < 2) :]
            kept = 0
        kept += last
        ids = np.concatenate([single, ids]) if len(single) else ids
        single = ids[len(ids) - int(kept == 1) :]
        yield EncodedBlock(ids[: len(ids) - len(single)], lengths, raw_words)


def _with_progress(blocks: Iterable[_Numbered], files: list[Path]) -> Iterator[_Numbered]:
    """Yield blocks; show a bar, or log lines if there is no terminal."""
    compressed = any(file.suffix.lower() in get_supported_extensions() for file in files)
    total = None if compressed else sum(file.stat().st_size for file in files)
    size = f" of {total / 1e6:,.0f}" if total else ""
    read = 0
    logged = time.monotonic()
    # disable=None: without a terminal.
    options: dict[str, Any] = {"unit": "B", "unit_scale": True, "leave": False, "disable": None}
    with tqdm(desc="reading", total=total, **options) as bar:
        for block in blocks:
            yield block
            read += block.bytes
            bar.update(block.bytes)
            if bar.disable and time.monotonic() - logged >= LOG_SECONDS:
                logged = time.monotonic()
                log.info(f"{read / 1e6:,.0f}{size} MB read")
