"""Text files -> vocabulary and ids, on all cores and in memory bounded by the vocabulary.

Threads split blocks of the text; their words are numbered in the order of the text, and the numbers kept on disk until the vocabulary is
known and ids take their place. What comes out is what `corpus.sentences`, `Vocab.count` and `corpus.encoded` give.
"""

from __future__ import annotations

import codecs
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, NamedTuple

import numpy as np
from tqdm import tqdm

from w2v.config import CorpusConfig, VocabConfig
from w2v.text import corpus
from w2v.text.corpus import Corpus
from w2v.text.lexicon import Lexicon, Tokens, encoded
from w2v.text.sources import PACKED, opened
from w2v.text.tokenize import last_break
from w2v.text.vocab import Vocab

BLOCK_BYTES = 1 << 20  # split at a time by one thread
LOG_SECONDS = 10.0  # between lines without a terminal

log = logging.getLogger("w2v")


def ingest(
    files: list[Path], folder: Path, settings: CorpusConfig, limits: VocabConfig, workers: int
) -> Vocab:
    """Write the ids of the files into `folder` and return their vocabulary.

    The text is split once and its numbers are kept; where pruning changes the numbers on the way, it is split again. Raises
    `CorpusError` or `VocabError` as `Corpus.write` and `Vocab.count` do.
    """
    words = Lexicon(settings.max_sentence_length, limits.max_vocab_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryFile(
        dir=folder.parent
    ) as kept:  # has no name, so nothing of it survives the process
        for numbers in _numbers(files, words, settings.lowercase, workers):
            if limits.max_vocab_size is None:
                kept.write(numbers)
        vocab, rows = Vocab.select(
            words.__getitem__,
            words.counts,
            words.words_read,
            limits.min_count,
            limits.max_final_vocab,
        )
        if limits.max_vocab_size is None:
            row_of = np.full(len(words), -1, np.int32)
            row_of[rows] = np.arange(len(rows))
            again = _from_start(kept)
        else:
            words = Lexicon.closed(vocab.words, settings.max_sentence_length)
            row_of = np.append(np.arange(len(rows), dtype=np.int32), np.int32(-1))
            again = _numbers(files, words, settings.lowercase, workers, warn=False)
        Corpus.write(folder, encoded(again, row_of))
    return vocab


class Block(NamedTuple):
    """A piece of a file that ends at white space, split."""

    path: Path
    size: int  # bytes
    lines: int  # that end in it
    bad_lines: list[int]  # counted from 0 in this block
    tokens: Tokens


def _numbers(
    files: list[Path], words: Lexicon, lowercase: bool, workers: int, warn: bool = True
) -> Iterator[np.ndarray]:
    """The lexicon's numbers of all words in the files, END after each sentence, block by block in the order of the text."""
    bad, path, line = corpus.BadLines(), None, 0
    with ThreadPoolExecutor(workers) as pool:
        blocks = ((path, block, lowercase) for path in files for block in _blocks(path))
        for block in _shown(_in_order(pool, _split, blocks, 2 * workers), files):
            path, line = block.path, 1 if block.path != path else line
            for number in block.bad_lines:
                bad.add(path, line + number)
            line += block.lines
            yield words.settle(block.tokens)
    if warn:
        bad.warn()


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[..., Block], items: Iterable[tuple], ahead: int
) -> Iterator[Block]:
    """The function's results for the items, in their order; at most `ahead` are computed and not yet taken."""
    waiting: deque[Future[Block]] = deque()
    for item in items:
        waiting.append(pool.submit(function, *item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _blocks(path: Path) -> Iterator[bytes]:
    """A file in blocks that end at white space, so that neither a word nor a character is cut; the last one ends a line."""
    with opened(path) as file:
        rest, data = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8), b"more"
        while data:
            data = file.read(BLOCK_BYTES)
            rest += data
            corpus.refuse_binary(rest, path)
            cut = last_break(np.frombuffer(rest, np.uint8))
            yield rest[:cut]
            rest = rest[cut:]
            if len(rest) > 4 * corpus.LONGEST_WORD:  # bytes; a character has four at most
                corpus.split(rest.decode(errors="replace"), path)  # refuses an endless word
        yield rest + b"\n"


def _split(path: Path, block: bytes, lowercase: bool) -> Block:
    bad_lines, size, lines = [], len(block), block.count(b"\n")
    if block.isascii():
        block = block.lower() if lowercase else block
    else:
        text = block.decode(errors="surrogateescape")
        bad_lines = corpus.bad_lines(text)
        if bad_lines or lowercase:
            text = corpus.ESCAPED.sub("\ufffd", text)
            block = (text.lower() if lowercase else text).encode()
    tokens = Tokens.of(block)
    if tokens.longest > corpus.LONGEST_WORD:  # bytes; the limit is one of characters
        corpus.split(block.decode(), path)
    return Block(path, size, lines, bad_lines, tokens)


def _shown(blocks: Iterable[Block], files: list[Path]) -> Iterator[Block]:
    """The blocks, with a progress bar or, where there is no terminal, a line now and then."""
    packed = any(file.suffix.lower() in PACKED for file in files)
    total = None if packed else sum(file.stat().st_size for file in files)
    start = shown = time.monotonic()
    with tqdm(
        total=total,
        desc="reading",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=None,
        leave=False,
    ) as bar:
        done = 0
        for block in blocks:
            yield block
            done += block.size
            bar.update(block.size)
            now = time.monotonic()
            if bar.disable and now - shown >= LOG_SECONDS:
                shown = now
                share = f"{done / total:4.0%} of the text  " if total else ""
                log.info(f"{share}{done / 1e6:,.0f} MB read, {done / 1e6 / (now - start):.0f} MB/s")


def _from_start(file: IO[bytes]) -> Iterator[np.ndarray]:
    file.seek(0)
    while data := file.read(4 * BLOCK_BYTES):
        yield np.frombuffer(data, np.int32)
