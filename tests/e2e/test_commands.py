"""evaluate.py from its arguments to its exit status."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gensim.models import KeyedVectors

import evaluate
from tests.support.each_case import each_case
from w2v.vectors import export

ROOT = Path(__file__).parents[2]
PAIRS = 40
HEAVY = {"torch", "gensim"}


def save_vectors(folder, words):
    """Save vectors of words a0 b0 a1 b1 ... with nearly equal b_i - a_i."""
    rng = np.random.default_rng(0)
    a_ND = rng.standard_normal((PAIRS, 24))
    b_ND = a_ND + rng.standard_normal(24) + 0.1 * rng.standard_normal((PAIRS, 24))
    kv = KeyedVectors(24)
    kv.add_vectors(words, np.stack([a_ND, b_ND], axis=1).reshape(-1, 24).astype(np.float32))
    for count, word in enumerate(reversed(words), start=1):
        kv.set_vecattr(word, "count", count)
    folder.mkdir(parents=True, exist_ok=True)
    kv.save(str(folder / "vectors.kv"))


@pytest.fixture
def run(tmp_path):
    """Return a run folder with words a0 b0 a1 b1 ... whose analogies hold."""
    folder = tmp_path / "runs" / "one"
    save_vectors(folder, [f"{side}{number}" for number in range(PAIRS) for side in "ab"])
    return folder


@pytest.fixture
def questions(tmp_path):
    """Return a file of analogies, one of them with an unknown word."""
    path = tmp_path / "questions.txt"
    lines = [f"a{i} b{i} a{i + 1} b{i + 1}" for i in range(PAIRS - 1)]
    path.write_text("\n".join([": pairs", *lines, "a0 unknown a1 b1"]))
    return path


def ask(*arguments, **options):
    """Run evaluate.py in a process of its own."""
    command = [sys.executable, "evaluate.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, text=True, **options)


def run_code(code):
    """Return the output of a Python program that ends with status 0."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_analogy_sums_as_words_quoted_and_from_standard_input(run, capsys, monkeypatch):
    question = "b0 - a0 + a1"
    answers = set()
    for words, lines in ((question.split(), ""), ([question], ""), ([], f"{question}\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert evaluate.main(["analogies", str(run), *words, "--topn", "2"]) == 0
        answers.add(capsys.readouterr().out)
    (answer,) = answers
    assert answer.startswith(question)
    assert answer.splitlines()[1].endswith("b1")
    assert evaluate.main(["analogies", str(run), question, "b0 - a0", "--topn", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_score_prints_tables_or_json(run, questions, capsys):
    command = ["score", str(run), "--questions", str(questions)]
    assert evaluate.main(command) == 0
    shown = capsys.readouterr().out
    assert "skipped" in shown and "SimLex-999" in shown
    assert evaluate.main([*command, "--restrict-vocab", "20", "--json"]) == 0
    (further,) = json.loads(capsys.readouterr().out)["questions"].values()
    total = further["total"]
    assert total["skipped"] == PAIRS - 9  # pairs beyond the first ten, and the unknown word


@pytest.mark.parametrize(
    ("command", "lines", "answered", "message"),
    [
        ("nn", "b1\n\nb1y\nb2", ["b1", "b2"], "'b1y' is not in the vocabulary"),
        ("analogies", "a0 b0 a2\na0 b0\n", ["a0 b0 a2"], "'a0 b0' is not 3 words"),
    ],
)
def test_bad_line_of_standard_input_is_reported_and_skipped(
    run, capsys, monkeypatch, command, lines, answered, message
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert evaluate.main([command, str(run), "--topn", "2"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if not line.startswith(" ")] == answered
    assert len(out.splitlines()) == 3 * len(answered)
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_terminal_shows_a_prompt(run, capsys, monkeypatch):
    terminal = io.StringIO("b1\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert evaluate.main(["nn", str(run)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("b1\n")
    assert "Ctrl-D" in err


def test_closed_pipe_ends_quietly():
    command = [sys.executable, "evaluate.py", "score", "-h"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=-1, stderr=-1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == -signal.SIGPIPE


def test_ctrl_c_ends_quietly(run):
    process = subprocess.Popen(
        [sys.executable, "evaluate.py", "nn", str(run)],
        cwd=ROOT,
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    process.stdin.write("b1\n")
    process.stdin.flush()
    assert process.stdout.readline() == "b1\n"  # now it waits for the next question
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == ""
    assert process.wait() == 130


def test_unencodable_words_are_escaped(tmp_path):
    save_vectors(tmp_path, ["日", *map(str, range(1, 2 * PAIRS))])
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = ask("nn", tmp_path, "日", "--topn", "1", capture_output=True, env=ascii_only)
    assert done.stdout.startswith("\\u65e5\n")
    assert (done.returncode, done.stderr) == (0, "")


def test_full_standard_output_is_an_error(run):
    with open("/dev/full", "w") as full:
        done = ask("nn", run, "b1", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == "error: No space left on device; make room there\n"


def test_the_home_folder_is_written_to(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert evaluate.main(["export", str(run), "--text", "--to=~/x"]) == 0
    assert (tmp_path / "x" / "vectors.txt").exists()


def test_full_disk_is_named(run, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "save", full)
    assert evaluate.main(["export", str(run), "--text", "--to", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/x: No space left on device")


@each_case(
    ("arguments", "message"),
    [
        (["nn", "{run}", "b1", "Nowhere"], "'Nowhere' is not in the vocabulary"),
        (["analogies", "{run}", "b1", "b2"], "'b1 b2' is not 3 words"),
        (["score", "{run}/none"], "does not exist"),
        (["score", "{run}", "--questions", "{run}"], "cannot be read"),
        (["export", "{run}", "--kv", "--to", "{run}/vectors.kv"], "vectors.kv names a file"),
    ],
)
def test_user_errors_are_one_line_with_status_2(run, capsys, arguments, message):
    assert evaluate.main([argument.format(run=run) for argument in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message.format(run=run) in err
    assert err.count("\n") == 1


def test_queries_import_neither_torch_nor_gensim(run):
    asked = f"evaluate.main(['nn', {str(run)!r}, '--topn', '3', 'b1'])"
    out = run_code(f"import sys, evaluate; {asked}; print({HEAVY} & {{*sys.modules}})")
    assert out.startswith("b1")
    assert out.endswith("set()\n")


def test_help_imports_neither_torch_nor_gensim():
    code = "import sys, evaluate\ntry: evaluate.main(['score', '-h'])\n"
    out = run_code(code + "except SystemExit: print({'torch', 'gensim'} & {*sys.modules})")
    assert "--restrict-vocab" in out
    assert out.endswith("set()\n")
