"""Atomic writes, locks and error messages of files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".partial"  # of every file and folder that is not complete yet


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path whose file or folder replaces `path` on success.

    The temporary path has the same name, in a new folder beside `path`. When the block succeeds,
    its content is synced and renamed to `path`; the new folder is removed in any case.
    """
    path = Path(path)
    prefix = f".{path.name}."
    with tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, prefix, path.parent) as folder:
        temporary = Path(folder, path.name)
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            sync(written)
        if path.is_dir():  # os.replace() cannot replace a folder that has content
            os.replace(path, Path(folder, "replaced"))
        os.replace(temporary, path)
    sync(path.parent)


def atomic_write(path: str | Path, content: str | bytes) -> None:
    """Write text (as UTF-8) or bytes: the file is complete or unchanged."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a large new file, wait until it is on disk, and return its CRC-32."""
    crc32 = 0
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
            crc32 = zlib.crc32(part, crc32)
            _start_writeback(file.fileno())
        file.flush()
        os.fsync(file.fileno())
        _start_writeback(file.fileno())
    return crc32


def _start_writeback(descriptor: int) -> None:
    """Start writing a file's cached pages to disk, and free written ones."""
    if hasattr(os, "posix_fadvise"):  # keeps the disk busy: 6 GiB took 3.5 s instead of 8
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


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


def newest_file(folder: Path, name: str) -> Path | None:
    """Return the newest file <folder>/*/<name>, or None without any."""
    found = folder.glob(f"*/{name}")
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path), default=None)


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


def hash_file(path: Path, digest: Any) -> str:
    """Return the hash of a file by one of hashlib's digests, as hex digits."""
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def refused(kind: type[ValueError], problem: str, remedy: str) -> Iterator[None]:
    """Raise any error of the block as this kind: "problem (reason); remedy"."""
    try:
        yield
    except kind:
        raise  # it has a message of its own
    except Exception as error:  # damaged files may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise kind(f"{problem} ({reason}); {remedy}") from error


def error_message(error: Exception) -> str:
    """Return the error on one line; an `OSError` with its file and a remedy."""
    if not isinstance(error, OSError):
        return " ".join(str(error).split())
    remedy = "check the folder and its permissions, or take another one"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "make room there"
    # Errors of standard output have no file name.
    place = "" if error.filename is None else f"{' '.join(str(error.filename).split())}: "
    return f"{place}{error.strerror or error}; {remedy}"
