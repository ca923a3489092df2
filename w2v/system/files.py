"""Files that are whole or not there, whatever ends the process or the machine."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


def write_synced(path: Path, parts: Iterable[bytes | memoryview]) -> int:
    """Write a new file, and return when it is on disk with the CRC-32 of it; the name is on disk after `sync_folder`."""
    crc32 = 0
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
            crc32 = zlib.crc32(part, crc32)
            _let_go(file)
        file.flush()
        os.fsync(file.fileno())
        _let_go(file)
    return crc32


def _let_go(file: BinaryIO) -> None:
    """Have the system begin to write what it keeps of a file to disk, and forget what is there: the memory is for other things, and
    the disk idle meanwhile: 6 GiB were there after 3.5 s in place of 8."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def atomic_write(path: Path, text: str) -> None:
    """Write a text aside, and give it its name once it is on disk; what fails leaves nothing."""
    aside = Path(f"{path}.part")
    try:
        write_synced(aside, [text.encode()])
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def apply_umask(path: Path) -> None:
    """Give a file the permissions that new files have; safetensors gives its files to their owner alone."""
    mask = os.umask(0o077)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def sync_folder(path: Path) -> None:
    """Return when the names in it are on disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def newest_file(folder: Path, name: str) -> Path | None:
    """Of the files of that name in the folders of a folder the one that was written last; None without any."""
    return max(
        folder.glob(f"*/{name}"), key=lambda path: (path.stat().st_mtime_ns, path), default=None
    )


@contextlib.contextmanager
def exclusive(folder: Path, waits: Callable[[], None]) -> Iterator[None]:
    """Lets one process at a time into the block, of those that name the same folder; `waits` is called where another is in."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


@contextlib.contextmanager
def naming_file(path: str | Path) -> Iterator[None]:
    """An `OSError` in the block that names no file names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(
            error.errno or errno.EIO, error.strerror or f"{error}; is the disk full?", str(path)
        ) from None


def error_message(error: Exception) -> str:
    """What went wrong, on one line; and where and what to do, which an `OSError` does not say itself."""
    if not isinstance(error, OSError):
        return " ".join(str(error).split())
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = (
        "make room there" if full else "check the folder and its permissions, or take another one"
    )
    place = (
        "" if error.filename is None else f"{' '.join(str(error.filename).split())}: "
    )  # standard output has no name
    return f"{place}{error.strerror or error}; {remedy}"
