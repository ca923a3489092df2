"""Atomic writes, locks and error messages of files."""

from __future__ import annotations

import atexit
import contextlib
import difflib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

log = logging.getLogger("w2v")

# Control characters, line separators, and what turns the direction of text.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
TEMPORARY_SUFFIX = ".partial"  # of every file and folder that is not complete yet
# Names of the folders that `atomic_path` and checkpoints write to.
OF_ATOMIC_PATH = r"\.([^/]+)\.[a-z0-9_]{8}\.partial"
TEMPORARY_NAME = re.compile(rf"{OF_ATOMIC_PATH}|step-\d+(\.old)?\.partial")


@contextlib.contextmanager
def atomic_path(path: str | Path, synced: bool = True) -> Iterator[Path]:
    """Yield a temporary path whose file or folder replaces `path` on success.

    The temporary path has the same name, in a new folder beside `path`. When the block succeeds,
    its content is synced and renamed to `path`; the new folder is removed in any case. Content
    whose checksum readers compare, and which can be made again, need not be `synced`.
    """
    path = Path(path)
    prefix = f".{path.name}."
    with tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, prefix, path.parent) as folder:
        temporary = Path(folder, path.name)
        yield temporary
        for written in (temporary, *temporary.rglob("*")) if synced else ():
            sync(written)
        # os.replace() cannot replace a folder that has content; a file is not to replace one.
        if path.is_dir() and temporary.is_dir():
            os.replace(path, Path(folder, "replaced"))
        os.replace(temporary, path)
    sync(path.parent)


def remove_partial(folder: Path) -> None:
    """Remove the temporary folders of killed processes.

    No other process may write to such names meanwhile. Files and folders of other names stay, and
    what cannot be removed is left.
    """
    for path in folder.glob(f"*{TEMPORARY_SUFFIX}"):
        if TEMPORARY_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes: the file is complete or unchanged."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def synced_file(path: Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yield a function that writes a large new file in parts.

    At the end of the block the file is on disk.
    """
    with open(path, "wb") as file:

        def write(part: bytes | memoryview) -> None:
            file.write(part)
            # Start to write cached pages, and free written ones: 6 GiB took 3.5 s instead of 8.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        yield write
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a large new file, and wait until it is on disk."""
    with synced_file(path) as write:
        for part in parts:
            write(part)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def apply_umask(path: Path) -> None:
    """Give a file default permissions; safetensors makes it private."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


@contextlib.contextmanager
def exclusive(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Lock a folder during the block; call `on_wait` if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """Add this path to an `OSError` in the block that names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or f"{error}; is the disk full?"
        raise OSError(error.errno or errno.EIO, reason, str(path)) from None


def as_json(content: Any, **options: Any) -> str:
    """Return JSON, which knows no NaN and no infinity: they become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), **options)


def sealed(content: Mapping[str, Any]) -> str:
    """Return the content as JSON with a checksum of all the rest."""
    content = {key: value for key, value in content.items() if key != "checksum"}
    text = as_json(content, sort_keys=True)
    checksum = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return as_json(content | {"checksum": checksum}, indent=1, sort_keys=True) + "\n"


def unsealed(text: str) -> dict[str, Any]:
    """Return what `sealed` was given; raise `ValueError` if it is damaged."""
    try:
        content = json.loads(text)
        if text == sealed(content):
            return content
    # A damaged file may hold any JSON, or none.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(one_line(f"{type(error).__name__}: {error}")[:100]) from None
    raise ValueError("its checksum differs")


def kernel_folder(variable: str) -> Path:
    """Return the folder of kernels: from the environment, or ~/.cache/w2v.

    Kernels are programs, and numba's are pickled: a temporary folder replaces one in which other
    users may write.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return _private(Path(os.environ.get(variable) or caches / "w2v"))


@functools.cache
def _private(folder: Path) -> Path:
    """Return the folder if only this user can write to it, or a temporary one."""
    try:
        folder = folder.expanduser().absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError("others may write to it; chmod go-w it")
        tempfile.TemporaryFile(dir=folder).close()
        return folder
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        log.warning(f"kernels are compiled in each run, as {folder} cannot be used ({error})")
    temporary = tempfile.mkdtemp(prefix="w2v-kernels-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    return Path(temporary)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size:
            # As one part: for each, a thread would wait for others that compute in Python.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
    return digest.hexdigest()


def in_gensim(name: str) -> Path:
    """Return the path of a data file of gensim, whose import takes a second."""
    return Path(str(distribution("gensim").locate_file(f"gensim/test/test_data/{name}")))


@contextlib.contextmanager
def refused(kind: type[ValueError], problem: str, remedy: str) -> Iterator[None]:
    """Raise an error of the block as this kind: "problem (reason); remedy".

    For blocks that read one file: damage makes readers raise almost anything.
    """
    try:
        yield
    except (kind, AssertionError):
        raise  # it has a message of its own, or is a bug
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.filename:
            reason = f"{error.strerror}: {error.filename}"
        reason = one_line(reason)[:200]
        raise kind(f"{problem} ({reason}); {remedy}") from error


def as_list(names: Any) -> list[Any]:
    """Return names as a list; one name may be given alone."""
    return [names] if isinstance(names, (str, os.PathLike)) else list(names)


def nearest(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of the words, or nothing, for a message."""
    return "".join(difflib.get_close_matches(word, list(words), n=1, cutoff=cutoff))


def one_line(text: object) -> str:
    """Return a text, such as an error's, without its line breaks."""
    return " ".join(str(text).split())


def printable(text: str, keep: str = "") -> str:
    r"""Escape control characters, as \x1b, except those in `keep`."""
    plain = {mark: mark for mark in keep}
    return CONTROLS.sub(lambda match: plain.get(match[0], ascii(match[0])[1:-1]), text)


def error_message(error: Exception) -> str:
    """Return the error on one line; an `OSError` with its file and a remedy."""
    if not isinstance(error, OSError):
        return printable(one_line(error))
    remedy = "check the folder and its permissions, or take another one"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "make room there"
    place = ""
    if error.filename is not None:  # as errors of standard output have none
        place = re.sub(f"{OF_ATOMIC_PATH}.*", r"\1", one_line(error.filename)) + ": "
    return printable(f"{place}{error.strerror or error}; {remedy}")
