"""A new text, read by a process of its own while train.py imports torch: what is seen of it from the outside."""

import contextlib
import gzip
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from w2v.config import ConfigError, load_config
from w2v.system.signals import Signals
from w2v.text import ahead, opening, sources, vocab

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, time, train
from w2v.text import opening
from w2v.text import sources

def hold(files, folder, config):
    with sources.aside_of(folder) as aside:
        aside.touch()
        time.sleep(60)

read = opening._read
opening._read = {read}
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("red green blue red green\none two three one two\n" * 50)
    return path


def start(text, folder, *more, read="read"):
    """train.py in a process of its own that sees no GPU; `read` stands for the function that reads a new text."""
    here = [
        f"corpus.path={text}",
        f"corpus.data_dir={folder / 'data'}",
        f"run.dir={folder / 'runs'}",
    ]
    small = [
        "model.vector_size=8",
        "vocab.min_count=1",
        "train.epochs=1",
        "train.device=cpu",
        "train.kernels=reference",
    ]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(read=read), *here, *small, *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )


def run(text, folder, *more, read="read"):
    process = start(text, folder, *more, read=read)
    return *process.communicate(timeout=120), process.returncode


def of_session(leader):
    """The processes that were started in it and have not ended."""
    listed = subprocess.run(
        ["ps", "-eo", "sid=,stat="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in listed if line.split()[0] == str(leader) and "Z" not in line]


OF_A_CHILD = "lambda *given: print('read by a child:', 'torch' not in sys.modules) or read(*given)"


def test_a_new_text_is_read_once_without_torch_and_then_found(text, tmp_path):
    said, errors, status = run(text, tmp_path, read=OF_A_CHILD)
    assert status == 0, errors
    assert said.count(f"reading {text}") == said.count("read by a child: True") == 1
    assert said.index("reading") < said.index("machine ") and "500 words in 100 sentences" in said
    said, errors, status = run(text, tmp_path, "--dry-run", read=OF_A_CHILD)
    assert (
        status == 0
        and "reading" not in said
        and "read by" not in said
        and "500 words in 100 sentences" in said
    ), errors


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.txt", None, "missing.txt' is no file, no directory and no corpus name"),
        ("cut.txt.gz", gzip.compress(os.urandom(10_000))[:5_000], "cut.txt.gz cannot be read"),
    ],
    ids=["missing", "cut"],
)
def test_what_is_wrong_with_a_text_is_one_line_once(tmp_path, name, content, words):
    if content:
        (tmp_path / name).write_bytes(content)
    _, errors, status = run(tmp_path / name, tmp_path)
    assert (
        status == 2 and errors.startswith("error: ") and errors.count("\n") == 1 and words in errors
    ), errors
    assert not list(tmp_path.rglob("*.bin")) and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "read, status, words",
    [
        (
            "lambda *given: (_ for _ in ()).throw(MemoryError('of the host'))",
            3,
            "error: of the host",
        ),
        (
            "lambda *given: os.kill(os.getpid(), 9)",
            2,
            "text.txt: the process that read it ended with status -9; where that is -9, see",
        ),
        ("lambda *given: 1 / 0", 2, "ZeroDivisionError: division by zero\nerror: corpus.path="),
    ],
    ids=["memory", "killed", "bug"],
)
def test_what_befalls_the_reader_ends_the_program(text, tmp_path, read, status, words):
    _, errors, found = run(text, tmp_path, read=read)
    assert found == status and words in errors and not (tmp_path / "runs").exists(), errors


@pytest.mark.parametrize(
    "number, status, to_all",
    [
        (signal.SIGINT, 130, True),
        (signal.SIGHUP, 129, True),
        (signal.SIGTERM, 143, True),
        (signal.SIGTERM, 143, False),
        (signal.SIGKILL, -9, False),
    ],
)
def test_a_signal_ends_both_and_leaves_nothing(text, tmp_path, number, status, to_all):
    """To the program alone, or as from a terminal to the reader too."""
    process, cache = start(text, tmp_path, read="hold"), tmp_path / "data" / "cache"
    while not list(cache.glob(".*/new")):
        assert process.poll() is None
        time.sleep(0.01)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status and "Traceback" not in errors, errors
    while of_session(process.pid):  # 60 s, if it were not ended
        time.sleep(0.01)
    assert not [path for path in cache.iterdir() if path.name != "digests.json"]


@pytest.mark.parametrize(
    "error",
    [
        sources.CorpusError("x"),
        vocab.VocabError("x"),
        ConfigError("x"),
        OSError(28, "full", "file"),
    ],
)
def test_errors_come_through_whole(error):
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), getattr(again, "filename", None)) == (
        type(error),
        str(error),
        getattr(error, "filename", None),
    )


def test_nothing_is_read_ahead_where_torch_is_there(text, tmp_path):
    config = load_config(
        [], [f"corpus.path={text}", f"corpus.data_dir={tmp_path / 'data'}", "vocab.min_count=1"]
    )
    import torch  # noqa: F401

    with ahead.reading(config):
        pass
    assert not (tmp_path / "data").exists()
    assert opening.open_corpus(config)[1].raw_words == 500


def test_a_signal_while_modules_are_imported_is_not_lost():
    imported = False
    with Signals() as signals, pytest.raises(SystemExit) as ended, signals.put_off():
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        imported = True
    assert imported and ended.value.code == 143
