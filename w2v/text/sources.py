"""Text files of a corpus: found by path, name or address.

Remote texts are copied once; Wikipedia dumps and named corpora are written as text files once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from w2v.config import CorpusConfig
from w2v.system.files import atomic_path, in_gensim, nearest, refused
from w2v.system.process import cores, terminate_with_parent
from w2v.text.formats import DEFAULT, CorpusError, opened, recognize

HUGGING_FACE = ("dataset_info.json", "dataset_dict.json")  # beside the files of a dataset
CACHE = "cache"  # folder of the word ids, in corpus.data_dir
WIKI_SAMPLE = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"  # of gensim

log = logging.getLogger("w2v")


def locate(path: str, data_dir: str | Path, settings: CorpusConfig = DEFAULT) -> list[Path]:
    """Return the text files that an entry of `corpus.path` stands for, sorted.

    `path` is a file, a folder (with its subfolders, but without hidden, empty and cached files), a
    Wikipedia dump, an address that fsspec knows, or the name of a corpus if no such file exists.
    Dumps and named corpora are written to `data_dir` as text, and remote files are copied there.
    Raises `CorpusError` if there is no text, and for files that are known not to be text.
    """
    found = Path(os.path.expanduser(path))
    data_dir = Path(os.path.expanduser(data_dir))
    if path and found.exists():
        candidates = _visible_files(found, data_dir) if found.is_dir() else [found]
        files = sorted(file for file in candidates if _holds_text(file))
        if found.is_fifo():
            remedy = "name a file, or write ... | w2v train -"
            raise CorpusError(f"corpus.path={path} is a pipe; {remedy}")
        if not files:
            raise CorpusError(f"corpus.path={path} is empty or not text; name a text or a folder")
        texts: dict[Path, Path] = {}
        for text in (_as_text(file, data_dir, settings) for file in files):
            # A dump's text may be in the same folder, and links may lead to a file again.
            texts.setdefault(text.resolve(), text)
        return list(texts.values())
    if path in NAMED_TEXTS:
        return [NAMED_TEXTS[path](data_dir)]
    require_source(path, data_dir)
    return locate(str(_fetched(path, data_dir)), data_dir, settings)


def require_source(path: str, data_dir: str | Path) -> None:
    """Raise `CorpusError` if there is no text that `corpus.path` names."""
    found = Path(os.path.expanduser(path))
    data_dir = Path(os.path.expanduser(data_dir))
    if (path and found.exists()) or path in NAMED_TEXTS or "://" in path:
        return
    # Suggest a name, or a file beside the missing one or in data_dir.
    folders = [folder for folder in {found.parent, data_dir} if folder.is_dir()]
    files_there = [str(file) for folder in folders for file in folder.iterdir()]
    near = nearest(path, [*NAMED_TEXTS, *files_there])
    if "*" in found.name and found.parent in folders:  # no shell has expanded it
        near = f"the folder {found.parent}"
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
        if "dataset_info.json" in names and "state.json" in names:
            state = Path(parent, "state.json")
            with refused(CorpusError, f"{state} cannot be read", "save the dataset again"):
                names = [file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
        names = [name for name in names if name not in HUGGING_FACE]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _holds_text(file: Path) -> bool:
    """Return whether this is a file with content; raise at a broken link."""
    if file.is_symlink() and not file.exists():
        raise CorpusError(f"{file} is a link to {file.readlink()}, which is missing; remove it")
    return file.is_file() and file.stat().st_size > 0


def stamp(files: Iterable[Path]) -> str:
    """Return a hash of size, times and inode of files, in hex digits."""
    found = [[s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for s in map(_status, files)]
    return hashlib.blake2b("".join(map(str, found)).encode(), digest_size=16).hexdigest()


def _status(path: Path) -> os.stat_result:
    """Return the status of a file that can be read."""
    try:
        # A network file system asks its server when a file is opened, but not at each stat().
        with open(path, "rb") as file:
            return os.fstat(file.fileno())
    except OSError as error:
        remedy = "check the path and its permissions"
        raise CorpusError(f"{path} cannot be read ({error.strerror}); {remedy}") from None


def _as_text(path: Path, data_dir: Path, settings: CorpusConfig) -> Path:
    """Return the file itself, or the text of a Wikipedia dump."""
    if recognize(path, settings).kind != "dump":
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
    """Return 100 MB of the English Wikipedia, a to z; fetched once.

    gensim compares the checksum.
    """
    plain = data_dir / "text8"
    packed = data_dir / "text8.gz"
    for path in (plain, packed):
        if path.is_file():
            return path
    from gensim import downloader

    remedy = f"put the text at {plain} or {packed}, or give corpus.path=FILE"
    with refused(CorpusError, "text8 cannot be downloaded", remedy):
        fetched = Path(downloader.load("text8", return_path=True))
    data_dir.mkdir(parents=True, exist_ok=True)
    with atomic_path(packed) as temporary:
        shutil.copyfile(fetched, temporary)
    return packed


def _fetched(url: str, data_dir: Path) -> Path:
    """Return the copy of a remote file or folder; fetched once."""
    import fsspec  # torch needs it anyway

    key = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    name = url.rstrip("/").rpartition("/")[2].partition("?")[0]
    target = data_dir / f"remote-{key}" / name
    if target.exists():
        return target
    remedy = "check the address, or fetch it and name the file"
    with refused(CorpusError, f"{url} cannot be fetched", remedy):
        system, path = fsspec.core.url_to_fs(url)
        log.info(f"fetching {url} to {target}, once")
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as temporary:
            system.get(path, str(temporary), recursive=not system.isfile(path))
    return target


NAMED_TEXTS = {"enwiki-sample": _enwiki_sample, "text8": _text8}
