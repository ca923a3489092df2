"""Word ids of a text: on disk, memory-mapped and cached."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from w2v.config import Config, ConfigError
from w2v.system.files import atomic_path, exclusive, naming_file, remove_partial, sealed, unsealed
from w2v.system.process import (
    cores,
    limit_heap_fragmentation,
    map_in_order,
    on_threads,
    return_freed_memory,
)
from w2v.text.formats import CorpusError
from w2v.text.sources import CACHE, locate, stamp
from w2v.text.splitting import source_of, tokenize_mode
from w2v.text.vocab import Vocab

if TYPE_CHECKING:
    from w2v.text.encode import EncodedBlock

HEADER = "corpus.json"
IDS = "ids.bin"
OFFSETS = "offsets.bin"
WORDS = "words.txt"  # of the vocabulary, joined by line feeds
COUNTS = "counts.bin"
FORMAT = 5  # of the files; others are not read
PIECE_BYTES = 4 << 20  # of a file, for a checksum
MOST_CHARACTERS = 40  # of a text's name in that of its cache, which may have 255 bytes
MOST_ITEMS = 10_000  # held-out items that are scored: errors of hit rates are below 1 %

log = logging.getLogger("w2v")


class NoKnownWords(CorpusError):
    """A text that has nothing to train on."""

    def __init__(self, raw_words: int):
        super().__init__(raw_words)
        self.raw_words = raw_words

    def __str__(self) -> str:
        read = f"{self.raw_words} words read"
        return f"no line of the text has two words of the vocabulary ({read}); a line is a sentence"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Ids of a text, read-only: sentence s is ids[offsets[s]:offsets[s + 1]]."""

    ids: np.ndarray  # int32 [N], words of the vocabulary only
    offsets: np.ndarray  # int64 [S + 1], of sentences with two words or more
    raw_words: int  # words of the text, dropped ones included
    tokenized: str = ""  # for the plan: why raw text was split into words
    files_stamp: str = ""  # of the text files, see `sources.stamp`
    digest: str = ""  # of ids and offsets: equal texts and vocabularies have equal digests
    # int32 [Q, 2]: held-out items, each after the item before it.
    held_items: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    @staticmethod
    def write(
        folder: Path, blocks: Iterable[EncodedBlock], vocab: Vocab, files_stamp: str = ""
    ) -> None:
        """Write ids and the vocabulary into a new folder.

        Raises `NoKnownWords` if there is nothing to write.
        """
        folder.mkdir(parents=True)
        with open(folder / IDS, "wb") as ids, open(folder / OFFSETS, "wb") as offsets:
            raw_words = _write_blocks(blocks, ids, offsets)
        (folder / WORDS).write_bytes("\n".join(vocab.words).encode())
        (folder / COUNTS).write_bytes(vocab.counts)
        header = {"format": FORMAT, "raw_words": raw_words, "text": files_stamp}
        header |= {"raw_types": vocab.raw_types, "median": vocab.median}
        header["files"] = {path.name: checksums(path) for path in folder.iterdir()}
        (folder / HEADER).write_text(sealed(header))

    @classmethod
    def temporary(cls, blocks: Iterable[EncodedBlock]) -> Corpus:
        """Map ids in files without a name.

        The system frees them even after a kill. Raises `NoKnownWords` if there is nothing to write.
        """
        with TemporaryFile() as ids, TemporaryFile() as offsets:
            raw_words = _write_blocks(blocks, ids, offsets)
            ids.flush()
            offsets.flush()
            ids_N = np.memmap(ids, np.int32, "r")
            return cls(ids_N, np.memmap(offsets, np.int64, "r"), raw_words)

    @classmethod
    def open(cls, folder: Path, checked: bool = False) -> tuple[Vocab, Corpus]:
        """Read a vocabulary and map ids; raise `CorpusError` if a file is damaged.

        Unless they have been `checked`, all bytes are compared with their checksums, on all cores:
        damaged ids would be trained on, or address memory outside of the tables.
        """
        try:
            header = unsealed((folder / HEADER).read_text(encoding="utf-8"))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']} instead of {FORMAT}")
            files = header["files"]
            for name, expected in files.items():
                if not checked and checksums(folder / name) != expected:
                    raise ValueError(f"{name} differs from its checksum")
            ids = np.memmap(folder / IDS, np.int32, "r")
            offsets = np.memmap(folder / OFFSETS, np.int64, "r")
            # Not vocab.tsv, as a line for each of two million words takes a second to read.
            words = (folder / WORDS).read_bytes().decode().split("\n")
            counts = np.fromfile(folder / COUNTS, np.int64)
            raw_words, median = header["raw_words"], header["median"]
            vocab = Vocab(words, counts, raw_words, header["raw_types"], median=median)
        except (OSError, ValueError, KeyError) as error:
            raise CorpusError(f"{folder} is damaged ({error})") from None
        # Checksums of all pieces, in their order, identify the text.
        content = json.dumps([files[IDS], files[OFFSETS]]).encode()
        return vocab, cls(
            ids,
            offsets,
            raw_words,
            files_stamp=header["text"],
            digest=blake2b(content, digest_size=16).hexdigest(),
        )


def hold_out_items(corpus: Corpus) -> Corpus:
    """Return the text without the last item of each sentence of three or more.

    That is next-event prediction (Caselles-Dupré et al. 2018, arXiv 1804.04212). Items that repeat
    the one before are not among `held_items`, which are spread evenly. The copy is in memory.
    """
    is_long_S = np.diff(corpus.offsets) > 2
    last_S = corpus.offsets[1:][is_long_S] - 1
    pairs_Q2 = np.stack([corpus.ids[last_S - 1], corpus.ids[last_S]], axis=1)
    pairs_Q2 = pairs_Q2[pairs_Q2[:, 0] != pairs_Q2[:, 1]]
    if not len(pairs_Q2):
        few = "run.held_out_items=true needs lines of three items or more, the last one a new one"
        raise CorpusError(f"{few}; set it to false")
    spread = np.linspace(0, len(pairs_Q2) - 1, min(MOST_ITEMS, len(pairs_Q2))).astype(int)
    return replace(
        corpus,
        ids=np.delete(corpus.ids, last_S),
        offsets=corpus.offsets - np.cumsum([0, *is_long_S]),
        digest=f"{corpus.digest}-items",
        held_items=pairs_Q2[spread],
    )


def _write_blocks(blocks: Iterable[EncodedBlock], ids: BinaryIO, offsets: BinaryIO) -> int:
    """Write ids and offsets; return the number of words of the text."""
    raw_words = 0
    end = 0  # of the last sentence

    def write_ids(block: EncodedBlock) -> EncodedBlock:
        ids.write(block.ids)
        return block

    offsets.write(np.zeros(1, np.int64))
    for block in map_in_order(1, write_ids, blocks):  # while next ones are encoded
        offsets.write(end + np.cumsum(block.lengths))
        end += int(block.lengths.sum())
        raw_words += block.raw_words
    if not end:
        raise NoKnownWords(raw_words)
    return raw_words


def checksums(path: Path) -> list[int]:
    """Return the size of a file, and the CRC-32 of each of its pieces."""
    size = path.stat().st_size

    def crc32(start: int) -> int:
        return zlib.crc32(np.memmap(path, np.uint8, "r", start, min(PIECE_BYTES, size - start)))

    return [size, *on_threads(crc32, range(0, size, PIECE_BYTES), cores())]


def open_corpus(config: Config) -> tuple[Vocab, Corpus]:
    """Open the vocabulary and the ids of a text; encode it if it is new.

    Raises:
        CorpusError: There is no such text, it cannot be read, or it is being changed.
        VocabError: The vocabulary keeps fewer than two words.
        ConfigError: The cache cannot be written.
    """
    limit_heap_fragmentation()  # before the first large array
    data_dir = Path(os.path.expanduser(config.corpus.data_dir))
    with naming_file(data_dir):
        paths = config.corpus.path
        files = [file for path in paths for file in locate(path, data_dir, config.corpus)]
    mode, why = tokenize_mode(files, config.corpus)
    config = replace(config, corpus=replace(config.corpus, tokenize=mode))
    folder = data_dir / CACHE / _cache_name(files, config)
    files_stamp = stamp(files)
    opened = cached(folder, files_stamp)
    if not opened:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            waiting = f"waiting for another run that reads a text into {folder.parent}"
            with exclusive(folder.parent, lambda: log.warning(waiting)):
                remove_partial(folder.parent)
                # Another run may have written it while this one waited.
                opened = cached(folder, files_stamp, report=log.warning)
                opened = opened or write_corpus(files, folder, config)
        except OSError as error:
            reason = f"{folder.parent} cannot be written ({error.strerror or error})"
            remedy = "make room there or make it writable, or set corpus.data_dir=FOLDER"
            raise ConfigError(f"{reason}; {remedy}") from None
    vocab, corpus = opened
    if config.run.held_out_items:
        corpus = hold_out_items(corpus)
    return vocab, replace(corpus, tokenized=why)


def _cache_name(files: list[Path], config: Config) -> str:
    """Return a name for ids: the text's, and a hash of paths and settings."""
    settings = asdict(config.corpus) | asdict(config.vocab)
    del settings["path"], settings["data_dir"]
    names = [str(path.resolve()) for path in files]
    key = json.dumps([FORMAT, settings, names, source_of(config.corpus)], sort_keys=True)
    digest = blake2b(key.encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return f"{files[0].name.strip('.').split('.')[0][:MOST_CHARACTERS]}-{digest}"


def cached(
    folder: Path, files_stamp: str, report: Callable[[str], None] = log.debug
) -> tuple[Vocab, Corpus] | None:
    """Open a cached text; return None if it is damaged or outdated."""
    if not (folder / HEADER).exists():
        return None
    try:
        vocab, corpus = Corpus.open(folder)
    except CorpusError as error:
        report(f"{error}; it is rebuilt from the text")
        return None
    return (vocab, corpus) if corpus.files_stamp == files_stamp else None


def write_corpus(files: list[Path], folder: Path, config: Config) -> tuple[Vocab, Corpus]:
    """Write the vocabulary and ids of text files into a folder; atomic."""
    from w2v.text.encode import encode_files  # imports numba, which takes a quarter of a second

    log.info(f"reading {files[0]}" + (f" and {len(files) - 1} more files" if files[1:] else ""))
    files_stamp = stamp(files)
    vocab, blocks = encode_files(files, config.corpus, config.vocab, cores(), folder.parent)
    with atomic_path(folder, synced=False) as temporary:  # a quarter of the time for 4 GB
        Corpus.write(temporary, blocks, vocab, files_stamp)
        if stamp(files) != files_stamp:
            name = f"corpus.path={config.corpus.paths}"
            raise CorpusError(f"{name} changed while it was read; start again when it is complete")
    return_freed_memory()
    return Corpus.open(folder, checked=True)
