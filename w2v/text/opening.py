"""The corpus of a run: read when it is new, and kept as ids beside its vocabulary for the runs that follow."""

from __future__ import annotations

import logging
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from w2v.config import Config, ConfigError
from w2v.system.files import exclusive, naming_file
from w2v.system.process import cores, keep_memory_whole, return_freed_memory
from w2v.text import sources
from w2v.text.corpus import Corpus, read_plainly
from w2v.text.vocab import Vocab

if TYPE_CHECKING:
    from w2v.distributed.ranks import Ranks

log = logging.getLogger("w2v")
WHOLE = "vocab.tsv"  # which is written last


def open_together(config: Config, ranks: Ranks) -> tuple[Vocab, Corpus]:
    """As `open_corpus`, where the first rank that sees the cache reads the text, and the others what it leaves there."""
    leads = ranks.leads(Path(config.corpus.data_dir).expanduser())
    with ranks.reraise():
        opened = open_corpus(config) if leads else None
    return opened or open_corpus(config)


def open_corpus(config: Config) -> tuple[Vocab, Corpus]:
    """The corpus as ids and its vocabulary, from the cache when text and settings are those of an earlier run."""
    folder, vocab = read(config)
    return Vocab.load(folder / WHOLE) if vocab is None else vocab, Corpus.open(folder)


def read(config: Config) -> tuple[Path, Vocab | None]:
    """The cache of the corpus, made now where there is none of this text and these settings; and the vocabulary, if it was."""
    keep_memory_whole()  # before the first large array
    text, data_dir = config.corpus, Path(config.corpus.data_dir).expanduser()
    with naming_file(data_dir):
        files = sources.locate(text.path, data_dir)
    how = {"lowercase": text.lowercase, "max_sentence_length": text.max_sentence_length}
    folder = (
        data_dir
        / "cache"
        / sources.content_key(files, data_dir, **how, **asdict(config.vocab))[:16]
    )
    vocab, whole = None, folder / WHOLE
    if not whole.exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(
                folder.parent, lambda: log.info("waiting for another run that reads a text")
            ):
                vocab = None if whole.exists() else _read(files, folder, config)
        except OSError as error:
            remedy = "make room there, or name another disk with corpus.data_dir=FOLDER"
            raise ConfigError(
                f"{folder.parent} cannot be written ({error.strerror or error}); {remedy}"
            ) from None
    return folder, vocab


def _read(files: list[Path], folder: Path, config: Config) -> Vocab:
    """Write the ids of the files into the folder, and their vocabulary, which says that it is whole."""
    log.info(
        "reading %s",
        ", ".join(map(str, files[:3]))
        + (f" and {len(files) - 3} more files" if len(files) > 3 else ""),
    )
    if find_spec("numba"):
        from w2v.text.encode import ingest  # heavy, so only when there is something to read

        vocab = ingest(files, folder, config.corpus, config.vocab, cores())
    else:
        log.warning(
            "numba is not installed, so one core reads the text, ten times slower; pip install numba"
        )
        vocab = read_plainly(files, folder, config.corpus, config.vocab)
    vocab.save(folder / WHOLE)
    return_freed_memory()
    return vocab
