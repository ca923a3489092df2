"""Text files of a corpus: found by path or name, decompressed.

Wikipedia dumps and named corpora are written as text files once.
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
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

from w2v.system.files import atomic_path, atomic_write, hash_file

FORMAT = 1  # of the ids on disk; a new number makes old caches stale
CLOCK_TICK_NS = 2_000_000_000  # the coarsest time stamps of a file system
TEXT8_MD5 = "68799af40b6bda07dfa47a32612e5364"  # of text8.gz, as gensim-data publishes it
WIKI_SAMPLE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"  # of gensim

log = logging.getLogger("w2v")


class CorpusError(ValueError):
    """An unusable corpus; the message names the file and the remedy."""


def locate(path: str, data_dir: str | Path) -> list[Path]:
    """Return the text files that `corpus.path` stands for, sorted.

    It is a file, a folder (recursive, without hidden and empty files), a Wikipedia dump, or the
    name of a corpus, unless such a file exists. Dumps and named corpora are written as text into
    `data_dir`. Raises `CorpusError` if there is nothing to read.
    """
    found = Path(path).expanduser()
    data_dir = Path(data_dir).expanduser()
    if path and found.exists():
        candidates = _visible_files(found) if found.is_dir() else [found]
        files = sorted(file for file in candidates if file.is_file() and file.stat().st_size)
        if not files:
            raise CorpusError(f"corpus.path={path} is empty or no text; bring a text or a folder")
        return [_as_text(file, data_dir) for file in files]
    if path in NAMES:
        return [NAMES[path](data_dir)]
    # Suggest a name, or a file beside the missing one or in data_dir.
    folders = [folder for folder in {found.parent, data_dir} if folder.is_dir()]
    files_there = [str(file) for folder in folders for file in folder.iterdir()]
    near = difflib.get_close_matches(path, [*NAMES, *files_there], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = f"no file, no directory and no corpus name ({', '.join(NAMES)})"
    raise CorpusError(f"corpus.path={path!r} is {known}{hint}")


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, except hidden ones."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk and Path.rglob would skip an unreadable folder silently

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, decompressed by its suffix; any error names the file."""
    import smart_open

    try:
        with smart_open.open(path, "rb") as file:
            yield file
    except CorpusError:
        raise
    except ImportError as error:
        raise CorpusError(f"{path} needs the package {error.name}; install it or unpack") from None
    except Exception as error:  # each decompressor has its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{path} cannot be read ({reason}); is it whole, and what its ending says?"
        ) from None


def content_key(files: Iterable[Path], data_dir: str | Path, **settings: Any) -> str:
    """Return a hash of the files' content and the settings: 32 hex digits.

    Digests are remembered under `data_dir` by path, size, times and inode, so that a file is hashed
    again only when it may have changed.
    """
    key = hashlib.blake2b(digest_size=16)
    key.update(json.dumps({"format": FORMAT, **settings}, sort_keys=True).encode())
    digests_file = Path(data_dir, "cache", "digests.json")
    try:
        digests = dict(json.loads(digests_file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        digests = {}
    changed = False
    for path in files:
        try:
            name = str(path.resolve())
            stat = path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            known_stamp, digest = digests.get(name, (None, ""))
            if stamp != known_stamp:
                digest = hash_file(path, hashlib.blake2b())
                # A file could change again within one tick of the clock and keep its times.
                if time.time_ns() - stat.st_ctime_ns > CLOCK_TICK_NS:
                    digests[name] = stamp, digest
                    changed = True
        except OSError as error:
            raise CorpusError(
                f"{path} cannot be read ({error.strerror}); is it there, and are you allowed to?"
            ) from None
        key.update(bytes.fromhex(digest))
    if changed:
        with suppress(OSError):  # the data may be on a read-only disk
            digests_file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(digests_file, json.dumps(digests))
    return key.hexdigest()


def _as_text(path: Path, data_dir: Path) -> Path:
    """Return the file itself, or the text of a Wikipedia dump."""
    if not re.search(r"\.xml\b", path.name):
        return path
    with opened(path) as file:
        if b"<mediawiki" not in file.read(1000):
            return path
    name = path.name.split(".xml")[0]
    return _converted(path, data_dir / f"{name}-{content_key([path], data_dir)[:8]}.txt")


def _converted(dump: Path, target: Path) -> Path:
    """Convert a Wikipedia dump to text, an article a line, once.

    Words are those of gensim's WikiCorpus: lower case, 2 to 15 letters. WikiCorpus itself hangs at
    a truncated dump and ends normally at Ctrl-C, so only its parts are used.
    """
    if target.is_file():
        return target
    from gensim.corpora import wikicorpus

    def articles() -> Iterator[tuple[str, str, str]]:
        with opened(dump) as file:
            for title, text, page_id in wikicorpus.extract_pages(file, ("0",)):
                yield text, title, page_id

    log.info("converting the Wikipedia dump %s to %s, once; a full dump takes hours", dump, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(target) as temporary:
        remaining = articles()
        with (
            open(temporary, "w", encoding="utf-8") as out,
            multiprocessing.Pool(initializer=_reset_signals) as pool,
        ):
            # In groups, since imap alone would read the whole dump into its queue.
            while group := list(islice(remaining, 256)):
                for words, _, _ in pool.imap(wikicorpus.process_article, group, chunksize=8):
                    if len(words) >= wikicorpus.ARTICLE_MIN_WORDS:
                        out.write(" ".join(words) + "\n")
        if not temporary.stat().st_size:
            least = wikicorpus.ARTICLE_MIN_WORDS
            raise CorpusError(f"{dump} holds no article of {least} words; name another dump")
    return target


def _reset_signals() -> None:
    """Let SIGTERM end a worker, and leave Ctrl-C to the main process."""
    # A pool ends its workers by SIGTERM; an inherited Python handler may not run while they wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _enwiki_sample(data_dir: Path) -> Path:
    """Return 106 articles of the English Wikipedia, gensim's sample."""
    import gensim

    dump = Path(gensim.__file__).parent / "test" / "test_data" / WIKI_SAMPLE
    return _converted(dump, data_dir / "enwiki-sample.txt")


def _text8(data_dir: Path) -> Path:
    """Return 100 MB of the English Wikipedia, a to z; fetched once."""
    plain = data_dir / "text8"
    packed = data_dir / "text8.gz"
    for path in (plain, packed):
        if path.is_file():
            return path
    from gensim import downloader

    remedy = f"put the text at {plain} or {packed}, or give corpus.path=FILE"
    try:
        fetched = Path(downloader.load("text8", return_path=True))
    except Exception as error:  # whatever the network and gensim's cache raise
        reason = " ".join(str(error).split())
        raise CorpusError(f"text8 cannot be fetched ({reason}); {remedy}") from None
    found = hash_file(fetched, hashlib.md5(usedforsecurity=False))
    if found != TEXT8_MD5:
        raise CorpusError(
            f"{fetched} is not text8: its MD5 is {found} instead of {TEXT8_MD5}; "
            f"remove {fetched.parent}, or {remedy}"
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    with atomic_path(packed) as temporary:
        shutil.copyfile(fetched, temporary)
    return packed


NAMES = {"enwiki-sample": _enwiki_sample, "text8": _text8}
