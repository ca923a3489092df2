"""Atomic writes, locks and error messages."""

import errno
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from w2v.system import files
from w2v.system.files import (
    TEMPORARY_SUFFIX,
    apply_umask,
    atomic_path,
    atomic_write,
    error_message,
    exclusive,
    naming_file,
    newest_file,
    write_synced,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("content", ["naïve\n", b"\0\xff"])
def test_atomic_write_replaces_a_file(tmp_path, content):
    path = tmp_path / "file"
    path.write_text("old")
    atomic_write(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert os.listdir(tmp_path) == ["file"]


def test_failed_write_keeps_the_old_file_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]


def test_temporary_path_has_the_suffix_and_keeps_the_name(tmp_path):
    with atomic_path(tmp_path / "map.png") as temporary:
        temporary.touch()
        (name,) = os.listdir(tmp_path)
        assert name.endswith(TEMPORARY_SUFFIX)
        assert temporary.name == "map.png"


def test_folder_replaces_a_folder(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").touch()
    with atomic_path(path) as temporary:
        temporary.mkdir()
        (temporary / "new").touch()
        assert os.listdir(path) == ["old"]
    assert os.listdir(path) == ["new"]
    assert os.listdir(tmp_path) == ["folder"]


def test_content_is_synced_before_it_gets_its_name(tmp_path, monkeypatch):
    events = []
    replace, sync = os.replace, files.sync
    monkeypatch.setattr(files, "sync", lambda path: (events.append(Path(path).name), sync(path)))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
    atomic_write(tmp_path / "file", "text")
    assert events == ["file", "rename", tmp_path.name]


def test_killed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    code = f"""
import os, signal
from w2v.system.files import atomic_path
with atomic_path({str(path)!r}) as temporary:
    temporary.write_text("new")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -9
    assert path.read_text() == "old"
    (left,) = set(os.listdir(tmp_path)) - {"file"}
    assert left.endswith(TEMPORARY_SUFFIX)


def test_write_synced_returns_the_checksum(tmp_path):
    parts = [b"some ", memoryview(b"bytes")]
    assert write_synced(tmp_path / "file", parts) == zlib.crc32(b"some bytes")
    assert (tmp_path / "file").read_bytes() == b"some bytes"


def test_umask_applies(tmp_path):
    private, plain = tmp_path / "private", tmp_path / "plain"
    private.touch(mode=0o600)
    plain.touch()
    apply_umask(private)
    assert private.stat().st_mode == plain.stat().st_mode


def test_newest_file(tmp_path):
    assert newest_file(tmp_path, "file") is None
    for number, folder in enumerate(["b", "a", "c"]):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").touch()
        os.utime(tmp_path / folder / "file", (number % 2, number % 2))
    assert newest_file(tmp_path, "file") == tmp_path / "a" / "file"


def test_exclusive_waits_for_the_other_one(tmp_path):
    waiting = threading.Event()
    order = []

    def other():
        with exclusive(tmp_path, on_wait=waiting.set):
            order.append("other")

    thread = threading.Thread(target=other)
    with exclusive(tmp_path, on_wait=pytest.fail):
        thread.start()
        assert waiting.wait(10)
        order.append("this")
    thread.join()
    assert order == ["this", "other"]


def test_naming_file_names_only_errors_without_a_name(tmp_path):
    with pytest.raises(OSError, match="here") as caught, naming_file("here"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError, match="there"), naming_file("here"):
        (tmp_path / "there").read_text()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("two\nlines"), "two lines"),
        (OSError(errno.ENOSPC, "Full", "a\nb"), "a b: Full; make room there"),
        (OSError(errno.EACCES, "Denied", "a"), "a: Denied; check the folder and its permissions"),
        (OSError("odd"), "odd; check the folder"),
    ],
)
def test_error_message_is_one_line_with_a_remedy(error, message):
    assert error_message(error).startswith(message)
