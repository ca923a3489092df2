"""Messages reach the console and train.log, whoever reads them."""

import ast
import contextlib
import fcntl
import io
import logging
import os
import pty
import signal
import struct
import sys
import termios
from functools import partial
from pathlib import Path

import pytest
from tqdm import tqdm

import w2v
from w2v.system import console
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


def test_a_forked_process_that_is_killed_while_it_prints_stops_no_other():
    log_to_console()
    with tqdm.get_lock():
        pass
    if (child := os.fork()) == 0:
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert tqdm.get_lock().acquire(timeout=1) or pytest.fail("the lock is held by a dead process")
    tqdm.get_lock().release()


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


def test_control_characters_are_escaped_in_console_and_file(monkeypatch, tmp_path, capsys):
    log_to_console()
    with log_to_file(tmp_path / "train.log"):
        log.info("near \x1b[31mred")
    for text in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        assert "near \\x1b[31mred\n" in text and "\x1b" not in text


def test_all_output_goes_through_one_function():
    calls = {}
    for path in (Path(w2v.__file__).parent).rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        names = [node.func.id for node in nodes if isinstance(getattr(node, "func", 0), ast.Name)]
        calls[path.name] = names.count("print")
    assert {name: count for name, count in calls.items() if count} == {"console.py": 1}


def test_the_error_that_ends_a_run_is_in_its_file_alone(tmp_path, capsys):
    log_to_console()
    with pytest.raises(ValueError), log_to_file(tmp_path / "train.log"):
        raise ValueError("training\ndiverged")
    assert (tmp_path / "train.log").read_text().endswith(" ERROR training diverged\n")
    assert capsys.readouterr() == ("", "")


LEVELS = {
    console.DETAILS: "detail message result error",
    logging.INFO: "message result error",
    console.RESULTS: "result error",
    console.ERRORS: "error",
}


@pytest.mark.parametrize(("level", "expected"), LEVELS.items())
def test_messages_are_written_at_once(monkeypatch, tmp_path, level, expected):
    with open(tmp_path / "output", "w") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        log_to_console(level)
        with log_to_file(tmp_path / "train.log"):
            log.debug("detail")
            log.info("message")
            log.log(console.RESULTS, "result")
            log.error("error")
        assert (tmp_path / "output").read_text().split() == expected.split()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert len(lines) == (1 if level == console.ERRORS else 4)


@pytest.mark.parametrize(("no_color", "expected"), [("", True), ("1", False)])
def test_warnings_have_a_color_in_a_terminal_alone(monkeypatch, no_color, expected):
    monkeypatch.setenv("NO_COLOR", no_color)
    for is_terminal in (True, False):
        output = io.StringIO()
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(console, "is_terminal", lambda _, found=is_terminal: found)
        log_to_console()
        log.warning("take care")
        log.info("go on")
        assert ("\033[" in output.getvalue()) == (is_terminal and expected)
        assert output.getvalue().endswith("go on\n")


def test_a_terminal_of_width_0_gets_lines():
    _, descriptor = pty.openpty()
    with open(descriptor, "w") as terminal:
        assert terminal.isatty() and not console.is_terminal(terminal)
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        assert console.is_terminal(terminal)


def test_unencodable_characters_are_escaped(monkeypatch, tmp_path):
    path = tmp_path / "output"
    with open(path, "w", encoding="latin-1") as file, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", file)
        log_to_console()
        log.info("naïve 日")
    assert path.read_text(encoding="latin-1") == "naïve \\u65e5\n"


def test_a_log_file_on_a_full_disk_is_reported_once(monkeypatch, capsys):
    log_to_console()
    with log_to_file(Path("/dev/full")):
        for number in range(3):
            log.info(f"message \x1b[2J{number}")
    out, errors = capsys.readouterr()
    assert errors == "" and out.count("/dev/full cannot be written") == 1
    assert [line for line in out.splitlines() if "message" in line] == [
        rf"message \x1b[2J{number}" for number in range(3)
    ]


def test_long_lines_hang_below_their_first_word():
    text = "corpus    some words\npath      a/long-path-that-stays-whole and more"
    assert console.hang(text, 24).split("\n") == [
        "corpus    some words",
        "path",
        "          a/long-path-that-stays-whole",
        "          and more",
    ]


def test_a_bar_leaves_nothing_behind():
    output = io.StringIO()
    with console.progress_bar(file=output, total=9) as bar:
        bar.update(9)
        bar.refresh()
    *_, last, end = output.getvalue().split("\r")
    assert "100%" in output.getvalue() and last.isspace() and not end
