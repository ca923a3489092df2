"""Word ids of a text: on disk, memory-mapped and cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from w2v.config import Config, ConfigError
from w2v.system.files import atomic_path, exclusive, naming_file
from w2v.system.process import cores, limit_heap_fragmentation, return_freed_memory
from w2v.text.sources import FORMAT, CorpusError, content_key, locate
from w2v.text.vocab import Vocab

if TYPE_CHECKING:
    from w2v.text.encode import EncodedBlock

VOCAB_FILE = "vocab.tsv"

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

    @classmethod
    def write(cls, folder: str | Path, blocks: Iterable[EncodedBlock]) -> Corpus:
        """Write ids into a new folder; raise `NoKnownWords` without any."""
        folder = Path(folder)
        folder.mkdir(parents=True)
        raw_words = 0
        end = 0  # of the last sentence
        with open(folder / "ids.bin", "wb") as ids, open(folder / "offsets.bin", "wb") as offsets:
            offsets.write(np.zeros(1, np.int64))
            for block in blocks:
                ids.write(block.ids)
                offsets.write(end + np.cumsum(block.lengths))
                end += int(block.lengths.sum())
                raw_words += block.raw_words
        if not end:
            raise NoKnownWords(raw_words)
        (folder / "corpus.json").write_text(json.dumps({"format": FORMAT, "raw_words": raw_words}))
        return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Map the ids in a folder; raise `CorpusError` if damaged."""
        folder = Path(folder)
        try:
            header = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
            if header["format"] != FORMAT:
                raise ValueError(f"format {header['format']} instead of {FORMAT}")
            ids = np.memmap(folder / "ids.bin", np.int32, "r")
            offsets = np.memmap(folder / "offsets.bin", np.int64, "r")
            if offsets[-1] != len(ids):
                raise ValueError(f"offsets.bin ends at {offsets[-1]} instead of {len(ids)}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            remedy = "delete the folder, the next run writes it anew"
            raise CorpusError(f"{folder} holds no whole corpus ({error}); {remedy}") from None
        return cls(ids, offsets, header["raw_words"])


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
    text = config.corpus
    how = {"lowercase": text.lowercase, "max_sentence_length": text.max_sentence_length}
    key = content_key(files, data_dir, **how, **asdict(config.vocab))
    folder = data_dir / "cache" / key[:16]
    if not (folder / VOCAB_FILE).exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(folder.parent, lambda: log.info("waiting for another run's text")):
                if not (folder / VOCAB_FILE).exists():  # another run may just have written it
                    write_corpus(files, folder, config)
        except OSError as error:
            reason = f"{folder.parent} cannot be written ({error.strerror or error})"
            remedy = "make room there, or name another disk with corpus.data_dir=FOLDER"
            raise ConfigError(f"{reason}; {remedy}") from None
    return Vocab.load(folder / VOCAB_FILE), Corpus.open(folder)


def write_corpus(files: list[Path], folder: Path, config: Config) -> Vocab:
    """Write the vocabulary and ids of text files into a folder; atomic."""
    from w2v.text.encode import encode_files  # imports numba, which takes a quarter of a second

    log.info(f"reading {files[0]}" + (f" and {len(files) - 1} more files" if files[1:] else ""))
    vocab, blocks = encode_files(files, config.corpus, config.vocab, cores(), folder.parent)
    with atomic_path(folder) as temporary:
        Corpus.write(temporary, blocks)
        vocab.save(temporary / VOCAB_FILE)
    return_freed_memory()
    return vocab
