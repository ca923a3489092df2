"""Encode text as word ids, on all cores.

Threads split blocks of the text. Each distinct word gets a number by first appearance, and the
numbers of all words go to a temporary file. Once every word is counted, the vocabulary is known
and the numbers are replaced by ids. Memory is bounded by the distinct words of the text.
"""

from __future__ import annotations

import codecs
import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np
from smart_open.compression import get_supported_extensions
from tqdm import tqdm

from w2v.config import CorpusConfig, VocabConfig
from w2v.text import tokenize
from w2v.text.sources import CorpusError, opened
from w2v.text.tokenize import Tokens, WordTable
from w2v.text.vocab import Vocab

BLOCK_BYTES = 1 << 20  # of text, split at a time by one thread
MAX_WORD_BYTES = 40_000  # 10,000 characters of four bytes; a file with a longer word is no text
SENTENCES_AT_ONCE = 256
LOG_SECONDS = 10.0  # between two lines of progress without a terminal
UNDECODABLE = re.compile("[\udc80-\udcff]")  # how errors="surrogateescape" marks such bytes

log = logging.getLogger("w2v")


class EncodedBlock(NamedTuple):
    """Ids of a part of a text; a sentence may begin in the block before."""

    ids: np.ndarray  # int32, words of the vocabulary in sentences that have two of them
    lengths: np.ndarray  # int64, ids of each sentence that ends in this block
    raw_words: int  # words of the text, dropped ones included


def encode_files(
    files: list[Path], settings: CorpusConfig, limits: VocabConfig, workers: int, folder: Path
) -> tuple[Vocab, Iterator[EncodedBlock]]:
    """Count and encode the words of text files; a line is a sentence.

    `workers` threads split the text; a temporary file in `folder` keeps its word numbers. Raises
    `CorpusError` for a file that is no text, and `VocabError`.
    """
    numbers_file = TemporaryFile(dir=folder)  # noqa: SIM115 - _encode_numbers closes it
    table = WordTable()
    for numbers in _number_words(files, table, settings.lowercase, workers):
        numbers_file.write(numbers)
    vocab, kept = Vocab.select(table.word, table.counts, limits)
    row_of = np.full(len(table.counts), -1, np.int32)
    row_of[kept] = np.arange(len(kept))
    return vocab, _encode_numbers(numbers_file, row_of, settings.max_sentence_length)


def encode_sentences(
    sentences: Iterable[Iterable[str]], index: Mapping[str, int]
) -> Iterator[EncodedBlock]:
    """Encode lists of words by the ids in `index`; drop other words."""
    remaining = iter(sentences)
    while batch := [list(sentence) for sentence in islice(remaining, SENTENCES_AT_ONCE)]:
        known = [[index[word] for word in sentence if word in index] for sentence in batch]
        kept = [ids for ids in known if len(ids) > 1]
        ids = np.fromiter(chain.from_iterable(kept), np.int32)
        lengths = np.fromiter(map(len, kept), np.int64)
        yield EncodedBlock(ids, lengths, sum(map(len, batch)))


class _Block(NamedTuple):
    """A block of a file, split into words."""

    bytes: int
    bad_bytes: int  # that are not UTF-8
    bad_place: str  # file and line of the first of these
    tokens: Tokens


def _number_words(
    files: list[Path], table: WordTable, lowercase: bool, workers: int
) -> Iterator[np.ndarray]:
    """Yield the numbers of all words and line ends, block by block."""
    bad_bytes = 0
    bad_place = ""
    for block in _show_progress(_split_files(files, lowercase, workers), files):
        bad_bytes += block.bad_bytes
        bad_place = bad_place or block.bad_place
        yield table.add(block.tokens)
    if bad_bytes:
        log.warning(f"{bad_bytes:,} bytes are not UTF-8, first in {bad_place}; each became U+FFFD")


def _split_files(files: list[Path], lowercase: bool, workers: int) -> Iterator[_Block]:
    """Split blocks in threads; yield them in the order of the text."""
    pending: deque[Future[_Block]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for path in files:
            line = 1
            for text in _read_blocks(path):
                pending.append(pool.submit(_split_block, text, lowercase, path, line))
                line += text.count(b"\n")
                if len(pending) > 2 * workers:  # bounds the memory
                    yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _read_blocks(path: Path) -> Iterator[bytes]:
    """Read a file in blocks that end at whitespace, at last with a line."""
    with opened(path) as file:
        rest = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        for data in chain(iter(partial(file.read, BLOCK_BYTES), b""), [b"\n"]):
            rest += data
            if b"\0" in rest:
                raise _binary_error(path, "it has a NUL byte")
            cut = max(map(rest.rfind, (b" ", b"\n", b"\t"))) + 1
            yield rest[:cut]
            rest = rest[cut:]
            if len(rest) > MAX_WORD_BYTES:  # it may have whitespace that is not ASCII
                _split_block(rest, False, path, 0)  # raises the error if it has none


def _split_block(text: bytes, lowercase: bool, path: Path, line: int) -> _Block:
    """Split a block into words; replace bytes that are not UTF-8."""
    size = len(text)  # in the file; replaced bytes and lower case can be longer
    bad_bytes = 0
    bad_place = ""
    if not text.isascii():
        decoded = text.decode(errors="surrogateescape")
        if bad := UNDECODABLE.search(decoded):
            bad_place = f"{path} line {line + decoded.count(chr(10), 0, bad.start())}"
            decoded, bad_bytes = UNDECODABLE.subn("\ufffd", decoded)
        if bad or lowercase:
            text = (decoded.lower() if lowercase else decoded).encode()
    elif lowercase:
        text = text.lower()
    tokens = tokenize.split(text)
    if (tokens.ends - tokens.starts).max(initial=0) > MAX_WORD_BYTES:
        raise _binary_error(path, f"over {MAX_WORD_BYTES // 4:,} characters without a space")
    return _Block(size, bad_bytes, bad_place, tokens)


def _binary_error(path: Path, reason: str) -> CorpusError:
    remedy = "bring UTF-8 text with spaces between words, plain or as .gz .bz2 .xz .zst"
    return CorpusError(f"{path} looks binary ({reason}); {remedy}")


def _encode_numbers(
    numbers_file: IO[bytes], row_of: np.ndarray, max_sentence_length: int
) -> Iterator[EncodedBlock]:
    """Replace word numbers by rows of the vocabulary, block by block."""
    sentence = np.zeros(3, np.int64)  # the open sentence, see kept_sentences
    with numbers_file:
        numbers_file.seek(0)
        while data := numbers_file.read(4 * BLOCK_BYTES):
            numbers = np.frombuffer(data, np.int32)
            ids = np.empty(len(numbers) + 1, np.int32)  # one may be left from the block before
            lengths = np.empty(len(numbers), np.int64)
            id_count, sentences, words = tokenize.kept_sentences(
                numbers, row_of, max_sentence_length, sentence, ids, lengths
            )
            yield EncodedBlock(ids[:id_count], lengths[:sentences], words)


def _show_progress(blocks: Iterable[_Block], files: list[Path]) -> Iterator[_Block]:
    """Show progress: a bar, or log lines if there is no terminal."""
    compressed = any(file.suffix.lower() in get_supported_extensions() for file in files)
    total = None if compressed else sum(file.stat().st_size for file in files)
    size = f" of {total / 1e6:,.0f}" if total else ""
    logged = time.monotonic()
    done = 0
    with tqdm(
        desc="reading", total=total, unit="B", unit_scale=True, leave=False, disable=None
    ) as bar:  # None: without a terminal
        for block in blocks:
            yield block
            done += block.bytes
            bar.update(block.bytes)
            now = time.monotonic()
            if bar.disable and now - logged >= LOG_SECONDS:
                logged = now
                log.info(f"{done / 1e6:,.0f}{size} MB read")
