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

import pytest

import evaluate
from tests.unit.test_evaluation import kv_of, planted, write_questions
from w2v.vectors import export
from w2v.vectors import load as vectorfile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path):
    """A run folder with planted analogies, and its questions."""
    words, vectors, sections = planted()
    folder = tmp_path / "runs" / "one"
    export.save(kv_of(words, vectors), folder, ("kv",))
    return folder, write_questions(tmp_path / "questions.txt", sections)


def test_sums_are_taken_as_words_or_quoted_or_from_standard_input(run, capsys, monkeypatch):
    folder = run[0]
    one, two, three, *_ = vectorfile.load(folder).index_to_key
    sum_ = f"{one} - {two} + {three}"
    answers = []
    for argv, lines in (([*sum_.split()], ""), ([sum_], ""), ([], f"{sum_}\n")):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert evaluate.main(["analogies", str(folder), *argv, "--topn", "2"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0].startswith(sum_) and len(set(answers)) == 1
    assert evaluate.main(["analogies", str(folder), sum_, f"{one} - {two}", "--topn", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_score_prints_the_same_table_for_both_scorers(run, capsys):
    folder, questions = run
    tables = []
    for scorer in ("torch", "gensim"):
        assert (
            evaluate.main(["score", str(folder), "--questions", str(questions), "--scorer", scorer])
            == 0
        )
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] and "relation0" in tables[0] and "SimLex-999" in tables[0]
    assert (
        evaluate.main(
            [
                "score",
                str(folder),
                "--questions",
                str(questions),
                "--restrict-vocab",
                "100",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["analogies"]["total"]["skipped"] > 100


def test_words_from_standard_input_end_with_it_and_a_bad_one_is_passed_over(
    run, capsys, monkeypatch
):
    folder, _ = run
    monkeypatch.setattr(sys, "stdin", io.StringIO("b0x1\n\nb0x1y\nb0x2"))
    assert evaluate.main(["nn", str(folder), "--topn", "2"]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "b0x1",
        "b0x2",
    ] and len(out.splitlines()) == 6
    assert (
        err.startswith("error: 'b0x1y' is not in the vocabulary; nearest spellings: b0x1")
        and err.count("\n") == 1
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("a0x0 b0x0 a0x2\na0x0 b0x0\n"))
    assert evaluate.main(["analogies", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert (
        len(out.splitlines()) == 11
        and err.startswith("error: 'a0x0 b0x0' is not 3 words, nor a sum")
        and err.count("\n") == 1
    )


def test_who_sits_at_a_terminal_is_told_what_is_waited_for(run, capsys, monkeypatch):
    terminal = io.StringIO("b0x1\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert evaluate.main(["nn", str(run[0])]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("b0x1\n") and err == "a question a line; Ctrl-D ends\n"


def test_what_nobody_reads_any_more_ends_without_a_word():
    asked = subprocess.Popen(
        [sys.executable, "evaluate.py", "score", "-h"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    asked.stdout.close()
    assert asked.stderr.read() == b"" and asked.wait() == -signal.SIGPIPE


def test_ctrl_c_ends_without_a_word(run):
    asked = subprocess.Popen(
        [sys.executable, "evaluate.py", "nn", str(run[0])],
        cwd=ROOT,
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    asked.stdin.write("b0x1\n")
    asked.stdin.flush()
    assert asked.stdout.readline() == "b0x1\n"  # and it waits for the next one
    asked.send_signal(signal.SIGINT)
    assert asked.stderr.read() == "" and asked.wait() == 130


def test_words_that_the_terminal_cannot_show_are_escaped(tmp_path):
    words, vectors, _ = planted()
    export.save(kv_of(["日", *words[1:]], vectors), tmp_path, ("kv",))
    asked = [sys.executable, "evaluate.py", "nn", str(tmp_path), "日", "--topn", "1"]
    done = subprocess.run(
        asked,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.stdout.startswith("\\u65e5\n") and (done.returncode, done.stderr) == (0, "")


def test_what_cannot_be_written_is_said_in_one_line(run):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "evaluate.py", "nn", str(run[0]), "b0x1"],
            cwd=ROOT,
            stdout=full,
            stderr=-1,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "error: No space left on device; make room there\n",
    )


def test_a_full_disk_is_named(run, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export, "save", full)
    assert evaluate.main(["export", str(run[0]), "--text", "--to", str(tmp_path / "x")]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}/x: No space left on device; make room there\n"
    )


def test_user_errors_are_one_line_and_exit_2(run, capsys, tmp_path):
    folder, questions = run
    for argv, message in [
        (["nn", str(folder), "b0x1", "Nowhere"], "error: 'Nowhere' is not in the vocabulary"),
        (["analogies", str(folder), "b0x1", "b0x2"], "error: 'b0x1 b0x2' is not 3 words"),
        (["score", str(tmp_path / "runs" / "two")], "does not exist"),
        (["score", str(folder), "--questions", str(folder)], "cannot be read"),
        (
            ["export", str(folder), "--kv", "--to", str(questions)],
            f"error: {questions}: File exists; check the folder",
        ),
        (
            ["card", str(folder)],
            f"error: {folder} is not the whole folder of a finished run (FileNotFoundError",
        ),
    ]:
        assert evaluate.main(argv) == 2
        err = capsys.readouterr().err
        assert message in err and err.startswith("error: ") and err.count("\n") == 1
    for argv in (["export", str(folder)], ["nn", str(folder), "--topn", "0"], []):
        with pytest.raises(SystemExit) as stop:
            evaluate.main(argv)
        assert stop.value.code == 2


def test_asking_needs_no_torch(run):
    code = f"import sys, evaluate; evaluate.main(['nn', {str(run[0])!r}, 'b0x1']); print({{'torch'}} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("b0x1") and done.stdout.endswith("set()\n")


def test_help_needs_neither_torch_nor_gensim():
    code = "import sys, evaluate\ntry: evaluate.main(['score', '-h'])\nexcept SystemExit: print({'torch', 'gensim'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--restrict-vocab" in done.stdout and done.stdout.endswith("set()\n")
