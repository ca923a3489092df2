"""Atomic writes, locks and error messages."""

import errno
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.each_case import each_case
from w2v.config import ConfigError
from w2v.system import files
from w2v.system.files import (
    TEMPORARY_SUFFIX,
    apply_umask,
    as_json,
    atomic_path,
    atomic_write,
    error_message,
    exclusive,
    kernel_folder,
    naming_file,
    printable,
    refused,
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
    with pytest.raises(IsADirectoryError), atomic_path(path) as temporary:
        temporary.touch()  # a file
    assert os.listdir(path) == ["new"]


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


def test_write_synced_writes_all_parts(tmp_path):
    write_synced(tmp_path / "file", [b"some ", memoryview(b"bytes")])
    assert (tmp_path / "file").read_bytes() == b"some bytes"


def test_umask_applies(tmp_path):
    private, plain = tmp_path / "private", tmp_path / "plain"
    private.touch(mode=0o600)
    plain.touch()
    apply_umask(private)
    assert private.stat().st_mode == plain.stat().st_mode


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


@each_case(
    ("error", "message"),
    [
        (ValueError("two\nlines"), "two lines"),
        (OSError(errno.ENOSPC, "Full", "a\nb"), "a b: Full; make room there"),
        (OSError(errno.EACCES, "Denied", "a"), "a: Denied; check the folder and its permissions"),
        (OSError(errno.EROFS, "No", "b/.a.svg.z1vs_l4v.partial/a.svg"), "b/a.svg: No; check"),
        (OSError("odd"), "odd; check the folder"),
    ],
)
def test_error_message_is_one_line_with_a_remedy(error, message):
    assert error_message(error).startswith(message)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o775, None])
def test_kernels_are_kept_where_the_user_alone_may_write(tmp_path, monkeypatch, caplog, mode):
    folder = tmp_path / "kernels"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.setenv("W2V_KERNELS", str(folder))
    found = kernel_folder("W2V_KERNELS")
    assert found.stat().st_mode & 0o022 == 0 and found.stat().st_uid == os.geteuid()
    is_private = mode is None or not mode & 0o022
    assert (found == folder) == is_private == (not caplog.messages)
    assert is_private or "compiled in each run" in caplog.text


def test_json_has_null_for_numbers_that_are_not_finite():
    content = {"a": [1, math.nan, (math.inf, 2.5)], "b": {"c": -math.inf, "d": "NaN"}}
    text = as_json(content)
    assert text == '{"a": [1, null, [null, 2.5]], "b": {"c": null, "d": "NaN"}}'


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\x07\u202eb") == r"a\x1b[31m\x07\u202eb"
    assert printable("naïve 日本 \u200c\n\t", keep="\n\t") == "naïve 日本 \u200c\n\t"
    assert printable("a\nb") == r"a\nb"
    assert error_message(ValueError("a\x1b[2J")) == r"a\x1b[2J"


def test_damage_is_refused_and_bugs_are_raised():
    with (
        pytest.raises(ConfigError, match=r"x \(KeyError: 'y'\); z"),
        refused(ConfigError, "x", "z"),
    ):
        {}["y"]
    with pytest.raises(AssertionError), refused(ConfigError, "x", "z"):
        raise AssertionError
