"""Text files of a corpus: found by path or name, decompressed.

Of JSON lines a field is read. Wikipedia dumps and named corpora are written as text files once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import signal
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from io import BufferedIOBase, BufferedReader, RawIOBase
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from w2v.config import CorpusConfig
from w2v.system.files import atomic_path, hash_file, in_gensim, nearest, one_line, refused
from w2v.system.process import cores, terminate_with_parent

CACHE = "cache"  # folder of the word ids, in corpus.data_dir
JSON_LINES = {".jsonl", ".ndjson"}  # endings
PACKED = (".gz", ".bz2", ".xz", ".zst", ".lz4")  # endings of compressed files
SAMPLE_BYTES = 1_000_000  # read to recognize raw text
RAW_SHARE = 0.03  # of the tokens; in raw text more of them end in punctuation
CLOCK_TICK_NS = 20_000_000  # resolution of the times of files
COARSE_TICK_NS = 2_000_000_000  # where they are whole seconds
TEXT8_MD5 = "68799af40b6bda07dfa47a32612e5364"  # of text8.gz, as gensim-data publishes it
WIKI_SAMPLE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"  # of gensim

log = logging.getLogger("w2v")


class CorpusError(ValueError):
    """An unusable corpus; the message names the file and the remedy."""


def locate(path: str, data_dir: str | Path) -> list[Path]:
    """Return the text files that `corpus.path` stands for, sorted.

    `path` is a file, a folder (with its subfolders, but without hidden, empty and cached files), a
    Wikipedia dump, or the name of a corpus if no such file exists. Several are joined by ":". Dumps
    and named corpora are written to `data_dir` as text. Raises `CorpusError` if there is no text.
    """
    found = Path(os.path.expanduser(path))
    data_dir = Path(os.path.expanduser(data_dir))
    if path and found.exists():
        candidates = _visible_files(found, data_dir) if found.is_dir() else [found]
        files = sorted(file for file in candidates if _holds_text(file))
        if found.is_fifo():
            raise CorpusError(
                f"corpus.path={path} is a pipe; name a file, or write ... | w2v train -"
            )
        if not files:
            raise CorpusError(f"corpus.path={path} is empty or not text; name a text or a folder")
        texts: dict[Path, Path] = {}
        for text in (_as_text(file, data_dir) for file in files):
            # A dump's text may be in the same folder, and links may lead to a file again.
            texts.setdefault(text.resolve(), text)
        return list(texts.values())
    if path in NAMED_TEXTS:
        return [NAMED_TEXTS[path](data_dir)]
    require_source(path, data_dir)
    return [file for part in path.split(os.pathsep) for file in locate(part, data_dir)]


def require_source(path: str, data_dir: str | Path) -> None:
    """Raise `CorpusError` if there is no text that `corpus.path` names."""
    found = Path(os.path.expanduser(path))
    data_dir = Path(os.path.expanduser(data_dir))
    if (path and found.exists()) or path in NAMED_TEXTS:
        return
    if "://" in path:
        raise CorpusError(f"corpus.path={path} is a URL; download the text and name the file")
    if os.pathsep in path:
        for part in path.split(os.pathsep):
            require_source(part, data_dir)
        return
    # Suggest a name, or a file beside the missing one or in data_dir.
    folders = [folder for folder in {found.parent, data_dir} if folder.is_dir()]
    files_there = [str(file) for folder in folders for file in folder.iterdir()]
    near = nearest(path, [*NAMED_TEXTS, *files_there])
    hint = f"; did you mean {near}?" if near else ""
    known = f"no file, no folder and no corpus name ({', '.join(NAMED_TEXTS)})"
    raise CorpusError(f"corpus.path={path!r} is {known}{hint}")


def _visible_files(folder: Path, data_dir: Path) -> Iterator[Path]:
    """Yield the files in a folder and below, except hidden and cached ones."""

    def refuse(error: OSError) -> None:
        raise error  # os.walk and Path.rglob would skip an unreadable folder silently

    entered = {os.path.realpath(data_dir / CACHE)}  # links may lead to a folder again
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(parent)) in entered:
            folders.clear()
            continue
        entered.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _holds_text(file: Path) -> bool:
    """Return whether this is a file with content; raise at a broken link."""
    if file.is_symlink() and not file.exists():
        raise CorpusError(f"{file} is a link to {file.readlink()}, which is missing; remove it")
    return file.is_file() and file.stat().st_size > 0


def is_plain(path: Path) -> bool:
    """Return whether the file is neither compressed nor JSON."""
    return not (_is_packed(path) or _is_json(path))


def _is_packed(path: Path) -> bool:
    return path.suffix.lower() in PACKED


def _is_json(path: Path) -> bool:
    return not JSON_LINES.isdisjoint(map(str.lower, path.suffixes[-2:]))


@contextmanager
def opened(path: Path, field: str = "text") -> Iterator[BufferedIOBase]:
    """Open a file, decompressed if its name ends in one of `PACKED`.

    A file of JSON lines is read as the text in `field` of each. Every error names the file.
    """
    remedy = "is it complete, its ending right, and the package that unpacks it installed?"
    opener: Callable[..., Any] = open
    if _is_packed(path):
        from smart_open import open as opener  # takes 50 ms
    with refused(CorpusError, f"{path} cannot be read", remedy), opener(path, "rb") as file:
        if _is_json(path):
            file = BufferedReader(_JoinedParts(_json_texts(file, path, field)))
        yield file


def _json_texts(lines: Iterable[bytes], path: Path, field: str) -> Iterator[bytes]:
    """Yield the text in a field of each JSON line."""
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        try:
            entry = json.loads(line)
            text = entry[field].encode(errors="surrogatepass")
        except ValueError as error:
            raise CorpusError(f"{path} line {number} is not JSON ({error}); correct it") from None
        except (KeyError, TypeError, AttributeError):
            found = type(entry).__name__
            if isinstance(entry, dict):
                found = ", ".join(f"{key}: {type(value).__name__}" for key, value in entry.items())
            reason = f"has no text in the field {field!r} (it has {found[:80]})"
            remedy = "set corpus.field=NAME"
            raise CorpusError(f"{path} line {number} {reason}; {remedy}") from None
        if b"\0" in text:  # refused in any text, but here the line is known
            raise CorpusError(f"{path} line {number} has \\u0000 in the field {field!r}; remove it")
        yield text + b"\n"


class _JoinedParts(RawIOBase):
    """A file that holds parts one after another."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts = parts
        self._rest = b""  # of a part that was read in part

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(self._parts, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def tokenize_mode(
    files: list[Path], settings: CorpusConfig
) -> tuple[Literal["whitespace", "words"], str]:
    """Return how to split a text, and why if `corpus.tokenize` is auto.

    In raw text, many tokens end in punctuation, here in the first megabyte of the first file.
    Tokens of punctuation alone do not count, as they come from a tokenizer.
    """
    if settings.tokenize != "auto":
        return settings.tokenize, ""
    with opened(files[0], settings.field) as file:
        tokens = file.read(SAMPLE_BYTES).decode(errors="replace").split()
    ending = [token for token in tokens if unicodedata.category(token[-1])[0] == "P"]
    raw = sum(any(map(str.isalnum, token)) for token in ending)
    share = raw / (len(tokens) or 1)
    if share <= RAW_SHARE:
        return "whitespace", ""
    return "words", f"{100 * share:.0f} % of the tokens end in punctuation: tokenize=words"


def stamp(files: Iterable[Path]) -> str:
    """Return a hash of size, times and inode of files, in hex digits.

    It changes whenever a file does, unless that is within the resolution of the file system's times
    (see `wait_for_clock`).
    """
    found = [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in map(_status, files)]
    return hashlib.blake2b("".join(map(str, found)).encode(), digest_size=16).hexdigest()


def wait_for_clock(files: Iterable[Path]) -> None:
    """Wait until any later change of these files changes their `stamp`.

    That is 20 ms after the last change, or 2 s where times are whole seconds.
    """
    for status in map(_status, files):
        changed = status.st_ctime_ns
        tick = CLOCK_TICK_NS if changed % 1_000_000_000 else COARSE_TICK_NS
        wait = tick - (time.time_ns() - changed)
        if wait > 0:  # at most a tick, as a file server's clock may be ahead
            time.sleep(min(wait, tick) / 1e9)


def _status(path: Path) -> os.stat_result:
    """Return the status of a file that can be read."""
    try:
        # A network file system asks its server when a file is opened, but not at each stat().
        with open(path, "rb") as file:
            return os.fstat(file.fileno())
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _as_text(path: Path, data_dir: Path) -> Path:
    """Return the file itself, or the text of a Wikipedia dump."""
    if not re.search(r"\.xml\b", path.name):
        return path
    with opened(path) as file:
        if b"<mediawiki" not in file.read(1000):
            return path
    name = path.name.split(".xml")[0]
    # Converting takes hours, so a copy with the same time, if another inode, is the same dump.
    status = path.stat()
    key = hashlib.blake2b(f"{status.st_size} {status.st_mtime_ns}".encode(), digest_size=4)
    return _converted(path, data_dir / f"{name}-{key.hexdigest()}.txt")


def _converted(dump: Path, target: Path) -> Path:
    """Convert a Wikipedia dump to WikiCorpus's words, an article a line."""
    # gensim's class hangs at a truncated dump and ends normally at Ctrl-C, so only its parts serve.
    if target.is_file():
        return target
    from gensim.corpora import wikicorpus

    def articles() -> Iterator[tuple[str, str, str]]:
        with opened(dump) as file:
            for title, text, page_id in wikicorpus.extract_pages(file, ("0",)):
                yield text, title, page_id

    log.info(f"converting the Wikipedia dump {dump.name} to {target}, once; a full one takes hours")
    target.parent.mkdir(parents=True, exist_ok=True)
    workers = get_context("fork"), _prepare_worker, (os.getpid(),)
    with atomic_path(target) as temporary:
        remaining = articles()
        try:
            with (
                open(temporary, "w", encoding="utf-8") as out,
                ProcessPoolExecutor(cores(), *workers) as pool,
            ):
                # In groups, since map alone would read the whole dump into its queue.
                while group := list(islice(remaining, 256)):
                    for words, _, _ in pool.map(wikicorpus.process_article, group, chunksize=8):
                        if len(words) >= wikicorpus.ARTICLE_MIN_WORDS:
                            out.write(" ".join(words) + "\n")
        except BrokenProcessPool:
            killed = f"one of the {cores()} processes that convert it was killed"
            remedy = "is memory short? Take fewer with --threads"
            raise CorpusError(f"{dump} cannot be converted ({killed}); {remedy}") from None
        if not temporary.stat().st_size:
            least = wikicorpus.ARTICLE_MIN_WORDS
            raise CorpusError(f"{dump} holds no article of {least} words; name another dump")
    return target


def _prepare_worker(parent: int) -> None:
    """Have a worker end with the main process, and ignore Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler may not run while it waits
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminate_with_parent(parent)


def _enwiki_sample(data_dir: Path) -> Path:
    """Return 106 articles of the English Wikipedia, gensim's sample."""
    return _converted(in_gensim(WIKI_SAMPLE), data_dir / "enwiki-sample.txt")


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
        reason = one_line(error)
        raise CorpusError(f"text8 cannot be downloaded ({reason}); {remedy}") from None
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


NAMED_TEXTS = {"enwiki-sample": _enwiki_sample, "text8": _text8}
