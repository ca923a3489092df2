"""Word ids of a text: on disk, memory-mapped and cached."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from w2v.config import Config, ConfigError
from w2v.system.files import atomic_path, exclusive, naming_file, sealed, unsealed
from w2v.system.process import cores, limit_heap_fragmentation, return_freed_memory
from w2v.text.sources import FORMAT, CorpusError, content_key, hash_pieces, locate, tokenize_mode
from w2v.text.vocab import Vocab

if TYPE_CHECKING:
    from w2v.text.encode import EncodedBlock

HEADER = "corpus.json"
IDS = "ids.bin"
OFFSETS = "offsets.bin"
VOCAB_FILE = "vocab.tsv"
SETTINGS = ("field", "tokenize", "lowercase", "max_sentence_length")  # on which ids depend

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
    tokenized: str = ""  # how the text was split into words, if that was chosen automatically
    digest: str = ""  # of ids and offsets; the same for the same text and vocabulary

    @classmethod
    def write(
        cls, folder: str | Path, blocks: Iterable[EncodedBlock], vocab: Vocab | None = None
    ) -> Corpus:
        """Write ids, and the vocabulary, into a new folder.

        Raises `NoKnownWords` if there is nothing to write.
        """
        folder = Path(folder)
        folder.mkdir(parents=True)
        raw_words = 0
        end = 0  # of the last sentence
        with open(folder / IDS, "wb") as ids, open(folder / OFFSETS, "wb") as offsets:
            offsets.write(np.zeros(1, np.int64))
            for block in blocks:
                ids.write(block.ids)
                offsets.write(end + np.cumsum(block.lengths))
                end += int(block.lengths.sum())
                raw_words += block.raw_words
        if not end:
            raise NoKnownWords(raw_words)
        if vocab:
            vocab.save(folder / VOCAB_FILE)
        files = {path.name: checksums(path) for path in sorted(folder.iterdir())}
        header = {"format": FORMAT, "raw_words": raw_words, "files": files}
        (folder / HEADER).write_text(sealed(header))
        return cls.open(folder, checked=True)

    @classmethod
    def open(cls, folder: str | Path, checked: bool = False) -> Corpus:
        """Map the ids in a folder.

        Every byte is compared with its checksum unless it has been `checked`: on all cores, at some
        GB/s each. Ids that are altered would be trained on, or address memory of others.

        Raises:
            CorpusError: A file is damaged.
        """
        folder = Path(folder)
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
        except (OSError, ValueError, KeyError) as error:
            raise CorpusError(f"{folder} is damaged ({error})") from None
        text = json.dumps([files[IDS], files[OFFSETS]]).encode()
        digest = blake2b(text, digest_size=16).hexdigest()
        return cls(ids, offsets, header["raw_words"], digest=digest)


def checksums(path: Path) -> list[int]:
    """Return the size of a file, and the CRC-32 of each of its pieces."""
    return [path.stat().st_size, *hash_pieces(path, zlib.crc32)]


class Ranks(Protocol):
    """What `open_together` needs of `w2v.distributed.ranks.Ranks`."""

    rank: int

    def reraise(self) -> AbstractContextManager[None]: ...


def open_together(config: Config, ranks: Ranks) -> tuple[Vocab, Corpus]:
    """Open the corpus on all ranks; rank 0 encodes it if necessary."""
    with ranks.reraise():
        opened = open_corpus(config) if ranks.rank == 0 else None
    return opened or open_corpus(config)  # the others find it in the cache


def open_corpus(config: Config) -> tuple[Vocab, Corpus]:
    """Open the vocabulary and the ids of a text; encode it if it is new.

    Raises:
        CorpusError: There is no such text, or it cannot be read.
        VocabError: The vocabulary keeps fewer than two words.
        ConfigError: The cache cannot be written.
    """
    limit_heap_fragmentation()  # before the first large array
    data_dir = Path(config.corpus.data_dir).expanduser()
    with naming_file(data_dir):
        files = locate(config.corpus.path, data_dir)
    mode, why = tokenize_mode(files, config.corpus)
    text = replace(config.corpus, tokenize=mode)
    config = replace(config, corpus=text)
    how = {name: getattr(text, name) for name in SETTINGS}
    key = content_key(files, data_dir, **how, **asdict(config.vocab))
    folder = data_dir / "cache" / key[:16]
    opened = cached(folder)
    if not opened:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(folder.parent, lambda: log.info("waiting for another run's text")):
                # Another run may just have written it.
                opened = cached(folder, log.warning) or write_corpus(files, folder, config)
        except OSError as error:
            reason = f"{folder.parent} cannot be written ({error.strerror or error})"
            remedy = "make room there, or name another disk with corpus.data_dir=FOLDER"
            raise ConfigError(f"{reason}; {remedy}") from None
    vocab, corpus = opened
    return vocab, replace(corpus, tokenized=why)


def cached(folder: Path, report: Callable[[str], None] = log.debug) -> tuple[Vocab, Corpus] | None:
    """Open a folder of the cache; return None without a whole one."""
    if not (folder / HEADER).exists():
        return None
    try:
        corpus = Corpus.open(folder)
        return Vocab.load(folder / VOCAB_FILE), corpus
    except ValueError as error:
        report(f"{error}; it is made anew from the text")
        return None


def write_corpus(files: list[Path], folder: Path, config: Config) -> tuple[Vocab, Corpus]:
    """Write the vocabulary and ids of text files into a folder; atomic."""
    from w2v.text.encode import encode_files  # imports numba, which takes a quarter of a second

    log.info(f"reading {files[0]}" + (f" and {len(files) - 1} more files" if files[1:] else ""))
    vocab, blocks = encode_files(files, config.corpus, config.vocab, cores(), folder.parent)
    with atomic_path(folder) as temporary:
        Corpus.write(temporary, blocks, vocab)
    return_freed_memory()
    return vocab, Corpus.open(folder, checked=True)
