"""The files of a corpus: which they are, what stands in them, and how they are opened.

Wikipedia dumps and named corpora are turned into text on the way.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from w2v.vectors.datasets import in_gensim

FORMAT = 1  # of the ids on disk; a new number makes old caches stale
BLOCK_BYTES = 1 << 20  # read at a time
STILL_NS = (
    2_000_000_000  # a file changed more recently may change again within one tick of its clock
)
PACKED = {".gz", ".bz2", ".xz", ".zst", ".lz4"}
CODECS = {
    ".zst": "backports.zstd",
    ".lz4": "lz4",
}  # packages that smart_open needs for these endings
TEXT8_MD5 = "68799af40b6bda07dfa47a32612e5364"  # of the text8.gz that never changes; gensim-data publishes no other digest of it

log = logging.getLogger("w2v")


class CorpusError(ValueError):
    """A corpus that cannot be used; the message is one line that names the file and the remedy."""


def locate(path: str, data_dir: str | Path) -> list[Path]:
    """The text files that `path` stands for, sorted: a file, a directory (recursive), a Wikipedia dump, or a name.

    What exists wins over a name. In a directory, hidden and empty files are skipped. Dumps and named corpora are turned
    into text once, under `data_dir`. Raises `CorpusError` when there is nothing to read, `OSError` for a folder that cannot be read.
    """
    found, data_dir = Path(path).expanduser(), Path(data_dir).expanduser()
    if path and found.exists():
        inside = _shown(found) if found.is_dir() else [found]
        files = sorted(file for file in inside if file.is_file() and file.stat().st_size)
        if not files:
            raise CorpusError(
                f"corpus.path={path} is empty or no text; bring a text, one sentence or document a line, or a folder of such"
            )
        return [_as_text(file, data_dir) for file in files]
    if path in NAMES:
        return [NAMES[path](data_dir)]
    neighbours = [
        str(file)
        for folder in {found.parent, data_dir}
        if folder.is_dir()
        for file in folder.iterdir()
    ]
    hint = "".join(
        f"; did you mean {near}?"
        for near in difflib.get_close_matches(path, [*NAMES, *neighbours], n=1)
    )
    raise CorpusError(
        f"corpus.path={path!r} is no file, no directory and no corpus name ({', '.join(NAMES)}){hint}"
    )


def _shown(folder: Path) -> Iterator[Path]:
    """The files in it and below, but for hidden ones; where a folder cannot be read, `Path.rglob` would leave its files out in silence."""

    def refuse(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in names if not name.startswith("."))


def content_key(files: Iterable[Path], data_dir: str | Path, **settings: Any) -> str:
    """32 hex digits that stand for the files' bytes, in order, and for the settings (anything JSON); names do not matter.

    Digests are remembered under `data_dir` by path, size, times and inode, so that a file is read again only when it may have changed.
    """
    memory = Path(data_dir, "cache", "digests.json")
    try:
        known = dict(json.loads(memory.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    key, learned = (
        hashlib.blake2b(
            json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode(), digest_size=16
        ),
        False,
    )
    for path in files:
        try:
            stat, name = path.stat(), str(path.resolve())
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            if name not in known or known[name][0] != stamp:
                digest = _digest(path, hashlib.blake2b())
                if time.time_ns() - stat.st_ctime_ns > STILL_NS:
                    known[name], learned = (stamp, digest), True
            else:
                digest = known[name][1]
        except OSError as error:
            raise CorpusError(
                f"{path} cannot be read ({error.strerror}); is it there, and are you allowed to?"
            ) from None
        key.update(bytes.fromhex(digest))
    if learned:
        with (
            suppress(OSError),
            aside_of(memory) as aside,
        ):  # a cache that cannot be written can still be read
            aside.write_text(json.dumps(known), encoding="utf-8")
    return key.hexdigest()


def _digest(path: Path, digest: Any) -> str:
    """Hex digits of the file's bytes, by one of `hashlib`'s digests."""
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file, unpacked as its ending says; what goes wrong inside becomes a `CorpusError` that names the file."""
    import smart_open

    try:
        with smart_open.open(path, "rb") as file:
            yield file
    except CorpusError:
        raise
    except ImportError as error:
        raise CorpusError(
            f"{path} needs the package {CODECS.get(path.suffix.lower(), error.name)}; install it or unpack it"
        ) from None
    except Exception as error:  # each decompressor has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{path} cannot be read ({reason}); is it whole, and what its ending says?"
        ) from None


@contextmanager
def aside_of(target: Path) -> Iterator[Path]:
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
    with opened(path) as file:
        if b"<mediawiki" not in file.read(1000):
            return path
    target = data_dir / f"{path.name.split('.xml')[0]}-{content_key([path], data_dir)[:8]}.txt"
    return target if target.is_file() else _convert(path, target)


def _convert(dump: Path, target: Path) -> Path:
    """Write a dump as text, an article a line, with the words of gensim's WikiCorpus: lower case, 2 to 15 letters.

    WikiCorpus itself waits for ever at a truncated dump and takes an interrupt for the end, so only its parts are used.
    """
    from gensim.corpora import wikicorpus

    def pages() -> Iterator[tuple[str, str, str]]:
        with opened(dump) as file:
            for title, text, number in wikicorpus.extract_pages(file, ("0",)):
                yield text, title, number

    log.info("converting the Wikipedia dump %s to %s, once; a full dump takes hours", dump, target)
    source = pages()
    with aside_of(target) as aside:
        with (
            open(aside, "w", encoding="utf-8") as out,
            multiprocessing.Pool(initializer=_may_be_ended) as pool,
        ):
            while group := list(islice(source, 256)):  # imap alone would read the whole dump ahead
                for words, _, _ in pool.imap(wikicorpus.process_article, group, chunksize=8):
                    if len(words) >= wikicorpus.ARTICLE_MIN_WORDS:
                        out.write(" ".join(words) + "\n")
        if not aside.stat().st_size:
            raise CorpusError(
                f"{dump} holds no article of {wikicorpus.ARTICLE_MIN_WORDS} words or more"
            )
    return target


def _may_be_ended() -> None:
    """In a worker process: SIGTERM, by which a pool ends it, does so at once; a handler inherited from the program could come too late, as
    Python looks for signals before it waits, and then waits for ever."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program itself sees to it


def _enwiki_sample(data_dir: Path) -> Path:
    """106 articles of the English Wikipedia that come with gensim."""
    target = data_dir / "enwiki-sample.txt"
    dump = in_gensim("enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")
    return target if target.is_file() else _convert(dump, target)


def _text8(data_dir: Path) -> Path:
    """The first 100 MB of an English Wikipedia as a to z and spaces (mattmahoney.net/dc/textdata), fetched once."""
    plain, packed = data_dir / "text8", data_dir / "text8.gz"
    if plain.is_file() or packed.is_file():
        return plain if plain.is_file() else packed
    from gensim import downloader

    remedy = f"put the text at {plain} or {packed}, or give corpus.path=FILE"
    try:
        fetched = downloader.load("text8", return_path=True)
    except Exception as error:  # whatever the network and gensim's cache do
        raise CorpusError(
            f"text8 cannot be fetched ({' '.join(str(error).split())}); {remedy}"
        ) from None
    with aside_of(packed) as aside:
        shutil.copyfile(fetched, aside)
        found = _digest(aside, hashlib.md5(usedforsecurity=False))
        if found != TEXT8_MD5:
            remedy = f"remove {Path(fetched).parent}, or {remedy}"
            raise CorpusError(
                f"{fetched} is not text8: its MD5 is {found} instead of {TEXT8_MD5}; {remedy}"
            )
    return packed


NAMES = {"enwiki-sample": _enwiki_sample, "text8": _text8}
