"""What the program says reaches the console and train.log, whoever listens."""

import contextlib
import os
import sys
from functools import partial

import pytest

from w2v.system.console import log, log_to_console, log_to_file


def unread():
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


NOWHERE = {
    "nobody reads": unread,
    "a full disk": partial(open, "/dev/full", "w"),
    "closed": contextlib.nullcontext,
}


@pytest.mark.parametrize("opened", NOWHERE.values(), ids=NOWHERE)
def test_messages_that_reach_nobody_do_not_end_training(monkeypatch, tmp_path, opened):
    with opened() as gone, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", gone)
        patched.setattr(log, "handlers", [])
        log_to_console()
        with log_to_file(tmp_path / "train.log"):
            for number in range(3):
                log.info(f"message {number}")
    kept = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in kept] == ["message 0", "message 1", "message 2"]


def test_messages_reach_a_file_at_once(monkeypatch, tmp_path):
    with open(tmp_path / "said", "w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        patched.setattr(log, "handlers", [])
        log_to_console()
        log.info("message")
        assert (tmp_path / "said").read_text() == "message\n"


def test_what_the_encoding_lacks_is_escaped(monkeypatch, tmp_path):
    with open(tmp_path / "said", "w", encoding="latin-1") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        patched.setattr(log, "handlers", [])
        log_to_console()
        log.info("naïve 日")
    assert (tmp_path / "said").read_text(encoding="latin-1") == "naïve \\u65e5\n"
