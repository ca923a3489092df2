"""Messages reach the console and train.log, whoever reads them."""

import contextlib
import os
import sys
from functools import partial

import pytest

from w2v.system.console import log, log_to_console, log_to_file


@pytest.fixture(autouse=True)
def restored_handlers(monkeypatch):
    monkeypatch.setattr(log, "handlers", [])


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


OUTPUTS = {
    "closed pipe": closed_pipe,
    "full disk": partial(open, "/dev/full", "w"),
    "no output": contextlib.nullcontext,
}


@pytest.mark.parametrize("open_output", OUTPUTS.values(), ids=OUTPUTS)
def test_unwritable_console_does_not_end_training(monkeypatch, tmp_path, open_output):
    with open_output() as output, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", output)
        log_to_console()
        with log_to_file(tmp_path / "train.log"):
            for number in range(3):
                log.info(f"message {number}")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in lines] == ["message 0", "message 1", "message 2"]


@pytest.mark.parametrize(("quiet", "expected"), [(False, "message\nerror\n"), (True, "error\n")])
def test_messages_are_written_at_once(monkeypatch, tmp_path, quiet, expected):
    with open(tmp_path / "output", "w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        log_to_console(quiet)
        log.info("message")
        log.error("error")
        assert (tmp_path / "output").read_text() == expected


def test_unencodable_characters_are_escaped(monkeypatch, tmp_path):
    path = tmp_path / "output"
    with open(path, "w", encoding="latin-1") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        log_to_console()
        log.info("naïve 日")
    assert path.read_text(encoding="latin-1") == "naïve \\u65e5\n"
