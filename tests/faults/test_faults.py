"""Bad input, full disks and foreign files are reported in one line.

The exit status is 2 or 3, and nothing half-written is left.
"""

import contextlib
import gzip
import json
import lzma
import os
import pickle
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import evaluate
import train
from tests.support.each_case import each_case
from tests.support.saving import check_checkpoints
from tests.support.tiny import tiny_arguments, tiny_paths
from w2v.rows import checkpoint
from w2v.rows.checkpoint import Checkpoint, latest
from w2v.system.files import sealed
from w2v.training import memory, plan, save_timer
from w2v.training.memory import Plan
from w2v.vectors import load as vector_files
from w2v.word2vec.step import TrainingStep

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def run_main(capsys):
    """Run a program in this process; return exit status and error line."""

    def run(program, *arguments):
        status = program.main(list(map(str, arguments)))
        errors = capsys.readouterr().err
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert len(lines) <= 1 and "Traceback" not in errors, errors
        return status, lines[0] if lines else ""

    return run


@contextlib.contextmanager
def changed(path, change):
    """Change the content of a file, or remove it, for the time of the block."""
    before = path.read_bytes()
    after = change(before)
    path.unlink() if after is None else path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


def removed(data):
    return None


def truncated(data):
    return data[: len(data) // 2]


def flipped(data):
    return data[:-30] + bytes([data[-30] ^ 4]) + data[-29:]


# Configs

CONFIGS = {
    "unknown key": ("model:\n  windoww: 3\n", "did you mean 'model.window'?"),
    "unknown section": ("modell:\n  window: 3\n", "unknown key 'modell.window' (from {file})"),
    "type": ("model: {window: wide}\n", "model.window=wide (from {file})"),
    "range": ("model: {window: 0}\n", "model.window=0 is out of range"),
    "combination": (
        "train: {device: cpu}\ntransfer: {engine: mapped}\n",
        "transfer.engine=mapped pages rows onto a GPU",
    ),
    "combination of rates": ("optimizer: {lr: 0.1, min_lr: 0.2}\n", "optimizer.min_lr=0.2"),
    "path as a name": ("run: {name: ../../x}\n", "run.name='../../x' is out of range"),
    "not YAML": ("model: [\n", "config file {file} cannot be read"),
    "YAML that runs code": ("model: !!python/object/apply:os.system ['true']\n", "{file} cannot"),
    "endless YAML": ("[" * 5000, "config file {file} cannot be read"),
    "no text": ("\udcff\udcfe", "config file {file}"),
    "a list": ("- 1\n", "config file {file}"),
    "empty": ("", "config file {file}"),
    "missing": (None, "config file {file} does not exist"),
}


def write_config(path, content):
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))


@each_case("content, words", CONFIGS.values())
def test_bad_config(tmp_path, run_main, content, words):
    file = tmp_path / "config.yaml"
    write_config(file, content)
    status, error = run_main(train, file, *tiny_paths(tmp_path))
    assert status == 2 and words.format(file=file) in error, error
    assert not (tmp_path / "runs").exists()


@each_case("name", ["unknown key", "range", "combination", "no text", "missing"])
def test_bad_config_of_a_run(tmp_path, run_main, name):
    run = tmp_path / "run"
    run.mkdir()
    write_config(run / "config.yaml", CONFIGS[name][0])
    status, error = run_main(train, "--resume", run, "train.device=cpu")
    named = str(run) in error or "is out of range" in error or "transfer.engine" in error
    assert status == 2 and named, error


# Corpora


def packed_zst(data):
    package = "backports.zstd" if sys.version_info < (3, 14) else "compression.zstd"
    return pytest.importorskip(package).compress(data)


LONG = " ".join(f"{number:x}" for number in range(20_000)).encode()
CORPORA = {
    "missing": ("text.txt", None, "is no file"),
    "empty": ("text.txt", b"", "is empty"),
    "white space": ("text.txt", b" \n\n ", "holds no words"),
    "binary": ("text.txt", b"a b\0c", "looks binary"),
    "truncated .gz": ("text.gz", truncated(gzip.compress(LONG)), "cannot be read ("),
    "truncated .xz": ("text.xz", truncated(lzma.compress(LONG)), "cannot be read ("),
    "truncated .zst": ("text.zst", lambda: truncated(packed_zst(LONG)), "cannot be read ("),
    "one endless line": ("text.txt", b"x" * 3_000_000, "without a space"),
    "no word above min_count": ("text.txt", b"a b c d", "vocab.min_count=2 keeps no word"),
    "only one word": ("text.txt", b"a a a a b c", "vocab.min_count=2 keeps only one word"),
}


@each_case("name, content, words", CORPORA.values())
def test_bad_corpus(tmp_path, run_main, name, content, words):
    arguments = tiny_arguments(tmp_path, vocab__min_count=2)
    (tmp_path / "text.txt").unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content() if callable(content) else content)
    status, error = run_main(train, *arguments, f"corpus.path={tmp_path / name}")
    assert status == 2 and words in error, error
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != name]
    assert not left and not (tmp_path / "runs").exists()


def test_vocabulary_of_more_words_than_ids_can_number(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(plan, "MOST_ROWS", 10)
    status, error = run_main(train, *tiny_arguments(tmp_path))
    assert status == 2 and "7 words" in error and "vocab.max_final_vocab=5" in error, error


# Runs to resume


def sealed_with(**values):
    return lambda data: sealed(json.loads(data) | values).encode()


CHECKPOINTS = {
    "missing shard": ("input-00000-of-00001.safetensors", removed, "is damaged (No such file"),
    "truncated shard": ("input-00000-of-00001.safetensors", truncated, "bytes instead of"),
    "flipped shard": ("output-00000-of-00001.safetensors", flipped, "is damaged (its CRC-32 is"),
    "missing manifest": ("manifest.json", removed, "is damaged (ValueError: there is no such file"),
    "truncated manifest": ("manifest.json", truncated, "is damaged (ValueError: JSONDecodeError"),
    "flipped manifest": ("manifest.json", flipped, "manifest.json is damaged ("),
    "older format": ("manifest.json", sealed_with(format=2), "is of format 2"),
    "other vocabulary": ("manifest.json", sealed_with(text={"raw_words": 3}), "another text"),
}


@each_case("name, change, words", CHECKPOINTS.values())
def test_bad_checkpoint(tiny_run, run_main, name, change, words):
    saved = latest(tiny_run / "checkpoints").path
    with changed(saved / name, change):
        before = sorted(path.name for path in tiny_run.rglob("*"))
        config = (tiny_run / "config.yaml").read_bytes()
        status, error = run_main(train, "--resume", tiny_run, "train.epochs=9")
        assert status == 2 and words in error and str(saved) in error, error
        assert sorted(path.name for path in tiny_run.rglob("*")) == before
        # Settings that are refused must not become those of the run.
        assert (tiny_run / "config.yaml").read_bytes() == config


def swapped(data):
    lines = data.split(b"\n")
    return b"\n".join([*lines[:2][::-1], *lines[2:]])


def shuffled(data):
    lines = data.split(b"\n")
    rest = lines[len(lines) // 2 :]
    random.Random(0).shuffle(rest)
    return b"\n".join([*lines[: len(lines) // 2], *rest])


def joined(data):
    return data.replace(b"\n", b" ")


@each_case("change", [swapped, shuffled, joined])
def test_resuming_with_another_text_of_the_same_words(tiny_run, run_main, change):
    with changed(tiny_run.parents[1] / "text.txt", change):
        status, error = run_main(train, "--resume", tiny_run, "train.epochs=9")
    assert status == 2 and "another text" in error, error


@each_case(
    "run, more, words",
    [
        ("{run}x", [], "{run}x"),
        ("latest", ["run.dir={run}"], "no folder in {run} holds config.yaml"),
        ("{run}", ["model.window=9"], "model.window=9 instead of 5"),
    ],
)
def test_runs_that_cannot_be_resumed(tiny_run, run_main, run, more, words):
    arguments = [argument.format(run=tiny_run) for argument in (run, *more)]
    status, error = run_main(train, "--resume", *arguments)
    assert status == 2 and words.format(run=tiny_run) in error, error


def test_an_empty_name_begins_no_new_run(tmp_path, run_main):
    status, error = run_main(train, "--resume", "", *tiny_arguments(tmp_path))
    assert status == 2 and "empty argument ''" in error, error
    assert not list(tmp_path.glob("runs/*"))


# Vectors

VECTORS = {
    "missing": ("vectors.kv", removed, "holds no vectors.kv"),
    "truncated": ("vectors.kv", truncated, "vectors.kv is damaged"),
    "flipped": ("vectors.kv", flipped, "vectors.kv is damaged"),
    "words": ("vocab.tsv", flipped, "vocab.tsv is damaged"),
    "rows": ("vectors.kv.vectors.npy", flipped, "vectors.npy is damaged"),
    "bad list of checksums": ("vectors.sha256", lambda data: b"\xff what", "vectors.sha256"),
}


@each_case("name, change, words", VECTORS.values())
def test_bad_vectors(tiny_run, run_main, name, change, words):
    with changed(tiny_run / name, change):
        status, error = run_main(evaluate, "nn", tiny_run, "a")
        assert status == 2 and words in error, error
    assert run_main(evaluate, "nn", tiny_run, "a") == (0, "")


def test_exporting_again_updates_the_checksums(tiny_run, run_main):
    assert run_main(evaluate, "export", tiny_run, "--bin", "--kv") == (0, "")
    _, *lines = (tiny_run / "vectors.sha256").read_text().splitlines()
    names = [line.split("  ")[1] for line in lines]
    assert names == ["vectors.bin", "vectors.kv", "vectors.kv.vectors.npy"]
    assert vector_files.load(tiny_run).index_to_key
    with changed(tiny_run / "vectors.bin", flipped):
        assert run_main(evaluate, "nn", tiny_run / "vectors.bin", "a")[0] == 2


def test_no_file_of_an_earlier_step_is_left_or_read(tmp_path, run_main):
    assert run_main(train, *tiny_arguments(tmp_path)) == (0, "")
    [run] = tmp_path.glob("runs/*")
    assert run_main(evaluate, "export", run, "--text") == (0, "")
    (run / "map.svg").touch()
    status, _ = run_main(train, "--resume", run, "train.epochs=9", "run.formats=kv")
    assert status == 0
    names = {"vectors.kv", "vectors.kv.vectors.npy", "vectors.sha256"}
    assert {path.name for path in run.glob("vectors.*")} == names and not (run / "map.svg").exists()
    sums = (run / "vectors.sha256").read_text()
    assert all(name in sums for name in names - {"vectors.sha256"}) and "vocab.tsv" in sums
    assert run_main(evaluate, "nn", run, "a") == (0, "")
    # As if a run that is resumed were stopped after its next checkpoint.
    (run / "checkpoints" / "step-99999999").mkdir()
    for command in (["nn", run, "a"], ["score", run / "vectors.kv"], ["map", run]):
        status, error = run_main(evaluate, *command)
        assert status == 2 and "the run is at 99,999,999; finish it: w2v train" in error, error


class Evil:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_vectors_run_no_code(tmp_path):
    (tmp_path / "x.kv").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(vector_files.VectorsError, match=r"x.kv: .*mkdir"):
        vector_files.load(tmp_path / "x.kv")
    assert not (tmp_path / "made").exists()


def test_vectors_that_name_pickles_run_no_code(tiny_run, tmp_path):
    kv = vector_files.load(tiny_run)
    vars(kv)["__scipys"] = ["made"]
    (tmp_path / "x.kv").write_bytes(pickle.dumps(kv))
    (tmp_path / "x.kv.made").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(vector_files.VectorsError, match="gensim would unpickle"):
        vector_files.load(tmp_path / "x.kv")
    assert not (tmp_path / "made").exists()


def test_program_neither_unpickles_nor_evaluates_files():
    dangerous = ["pickle.load", "torch.load", "allow_pickle=True", " eval(", " exec(", "yaml.load("]
    for path in [*(ROOT / "w2v").rglob("*.py"), ROOT / "train.py", ROOT / "evaluate.py"]:
        source = path.read_text(encoding="utf-8")
        assert not [word for word in dangerous if word in source], path


def strict(text):
    """Read JSON, in which NaN is an error."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model__sample": 1e-12}, "nothing to train on"),
        ({"optimizer__lr": 1e9, "optimizer__name": "Adamax"}, "above that of untrained vectors"),
    ],
)
def test_a_run_that_learns_nothing_says_so(tmp_path, capsys, changes, words):
    assert train.main(tiny_arguments(tmp_path, **changes)) == 0
    assert words in capsys.readouterr().out
    [run] = (tmp_path / "runs").iterdir()
    assert train.main(["--resume", str(run)]) == 0
    assert words in capsys.readouterr().out
    for path in (tmp_path / "runs").rglob("*.json*"):
        for text in (
            path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        ):
            strict(text)


WORD = "a\x1b[31m<b>|`"


def test_words_with_marks_are_shown_as_text(tmp_path, capsys):
    (tmp_path / "<i>").mkdir()
    arguments = tiny_arguments(tmp_path / "<i>", f"{WORD} {WORD} b c d\n" * 40)
    assert train.main(arguments) == 0
    [run] = (tmp_path / "<i>" / "runs").iterdir()
    assert evaluate.main(["nn", str(run), "b"]) == 0
    assert evaluate.main(["nn", str(run), "a\x1b"]) == 2
    console = "".join(capsys.readouterr())
    assert "\x1b" not in console and r"\x1b[31m" in console


# Memory and disks


def test_dry_run_prints_what_the_run_takes_and_leaves_nothing(tmp_path, capsys, run_main):
    assert train.main([*tiny_arguments(tmp_path), "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("host", "disk", "saving", "time"):
        assert any(line.startswith(f"{name:9} ") for line in lines), lines
    large = "optimizer.name=SGD", "optimizer.lr=1e38", "--dry-run"
    status, error = run_main(train, *tiny_arguments(tmp_path), *large)
    assert status == 2 and "training diverged at step" in error, error
    assert "set a smaller optimizer.lr" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("more", [["--dry-run"], []])
def test_run_that_does_not_fit_is_refused(tmp_path, run_main, monkeypatch, more):
    monkeypatch.setattr(plan, "free_disk_bytes", lambda folder: 1 << 10)
    status, error = run_main(train, *tiny_arguments(tmp_path), *more)
    assert status == 3 and "disk space: 2 KiB of 1 KiB free in" in error and "run.dir=" in error, (
        error
    )
    assert not (tmp_path / "runs").exists()


@contextlib.contextmanager
def mounted(folder, size):
    """Mount a file system of that many bytes."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount file systems")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def temporary_files(folder):
    marks = (".partial", ".saving", ".part")
    return [path for path in folder.rglob("*") if any(mark in path.name for mark in marks)]


LINES = [[f"w{number}" for number in range(first, first + 10)] for first in range(0, 20_000, 10)]
BIG = "\n".join(map(" ".join, LINES))  # of 20,000 different words


def test_disk_full_while_ids_are_written(tmp_path, run_main):
    arguments = tiny_arguments(tmp_path, "\n".join([BIG] * 3))
    with mounted(tmp_path / "small", 200 << 10) as small:
        status, error = run_main(train, *arguments, f"corpus.data_dir={small}")
        assert status == 2 and str(small) in error and "make room there" in error, error
        assert not list(small.rglob("words.txt")) and not list(small.rglob("ids.bin"))
    assert not (tmp_path / "runs").exists()


GPU = {"train__device": "cuda", "transfer__engine": "mapped", "transfer__gpu_bytes": "80%"}


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(GPU, marks=pytest.mark.gpu)], ids=["CPU", "GPU"]
)
def test_allocation_that_fails_while_training(tmp_path, run_main, monkeypatch, changes):
    """The command in the message goes on from a whole checkpoint."""
    step = TrainingStep.__call__

    def failing(self, *arguments):
        if self.state.step == 30:
            torch.empty(1 << 60, dtype=torch.uint8, device=self.state.fault.device)
        return step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", failing)
    monkeypatch.setattr(save_timer, "EPOCH_SECONDS", 0)
    program = "PROGRAM_BYTES", "COMPILER_BYTES", "CUDA_BYTES", "UNUSED_CUDA_BYTES"
    for name in (*program, "TORCH_CUDA_BYTES", "GPU_RESERVE"):
        monkeypatch.setattr(memory, name, 0)  # beside which a cache of some MB would count little
    larger = {"train__epochs": 10, "train__batch_size": 4096}
    arguments = tiny_arguments(tmp_path, BIG, **larger, **changes)
    status, error = run_main(train, *arguments)
    assert status == 3 and "memory ran out" in error, error
    [run] = (tmp_path / "runs").iterdir()
    checkpoints = run / "checkpoints"
    # A thread writes the last one, then removes an old one: its files vanish meanwhile.
    while list(checkpoints.glob("*.partial")) or len(list(checkpoints.iterdir())) > 2:
        time.sleep(0.01)
    assert not temporary_files(run)
    assert all(Checkpoint(saved).state["step"] <= 30 for saved in check_checkpoints(run))
    monkeypatch.undo()
    change = "transfer.gpu_bytes=" if changes else "transfer.table_dir=FOLDER"
    command = error.partition("continue with w2v train ")[2].replace("FOLDER", f"{run}/t")
    assert change in error and run_main(train, *shlex.split(command)) == (0, "")
    assert (run / "vectors.bin").exists()


@pytest.mark.parametrize("copies", [0, 3 << 20, 1 << 30])
def test_disk_full_while_a_checkpoint_is_written(tmp_path, run_main, monkeypatch, copies):
    """A checkpoint has 5 MB, and there is no room for three."""
    monkeypatch.setattr(plan, "free_disk_bytes", lambda folder: 1 << 50)
    monkeypatch.setattr(Plan, "copies", copies)
    monkeypatch.setattr(save_timer, "EPOCH_SECONDS", 0)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1 << 20)
    larger = {"model__vector_size": 16, "train__epochs": 4, "train__batch_size": 4096}
    arguments = tiny_arguments(tmp_path, BIG, **larger)
    with mounted(tmp_path / "small", 12 << 20) as small:
        status, error = run_main(train, *arguments, f"run.dir={small}")
        run = next(small.iterdir())
        assert status == 2 and f"{run}/checkpoints: No space left" in error, error
        assert "a checkpoint of 5,280,000 bytes" in error and "make room there" in error
        saved = latest(run / "checkpoints")  # one that falls due while another is written waits
        assert saved.state["epochs_done"] in (1, 2, 3) and not temporary_files(run)
        assert run_main(train, "--resume", run)[0] == 2  # still full
        assert latest(run / "checkpoints").path == saved.path
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        assert run_main(train, "--resume", run) == (0, "")
        assert (run / "vectors.bin").exists()


def test_disk_full_while_vectors_are_exported(tmp_path, run_main, monkeypatch):
    monkeypatch.setattr(plan, "free_disk_bytes", lambda folder: 1 << 50)
    larger = {"model__vector_size": 16, "optimizer__name": "SGD", "train__batch_size": 4096}
    arguments = tiny_arguments(tmp_path, BIG, run__checkpoint_minutes=0, **larger)
    with mounted(tmp_path / "small", 5 << 20) as small:
        status, error = run_main(train, *arguments, f"run.dir={small}")
        run = next(small.iterdir())
        assert status == 2 and f"error: {run}" in error and "make room" in error, error
        assert not temporary_files(run)
        # A checkpoint is written at the same time: there is room for the one or the other.
        if (run / "vectors.kv").exists():
            assert len(vector_files.load(run / "vectors.kv")) == 20_000
        else:
            assert latest(run / "checkpoints")


@pytest.mark.parametrize("limit", [1 << 10, 12 << 10])
def test_limit_on_the_size_of_files(programs, tmp_path, limit):
    """Whatever exceeds it first: ids, checkpoint or vectors."""
    text = " ".join(f"w{number % 300}" for number in range(6_000)).replace("w299 ", "w299\n")
    larger = {"model__vector_size": 16, "optimizer__name": "SGD", "train__batch_size": 512}
    arguments = tiny_arguments(tmp_path, text, **larger)
    status, output = programs.run(*arguments, RLIMIT_FSIZE=limit)
    assert status == 2 and "Traceback" not in output, output
    error = output.splitlines()[-1]
    assert error.startswith("error: /"), error
    assert "make room there" in error or "is the disk full?" in error, error
    assert not temporary_files(tmp_path)


def test_runs_on_a_read_only_disk(tmp_path, run_main):
    with mounted(tmp_path / "small", 12 << 20) as small:
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        status, error = run_main(train, *tiny_arguments(tmp_path), f"run.dir={small / 'runs'}")
        assert status == 2 and f"error: {small}/runs" in error and "Read-only" in error, error


def test_run_dir_that_is_a_dangling_link(tmp_path, run_main):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    status, error = run_main(train, *tiny_arguments(tmp_path), f"run.dir={tmp_path / 'link'}")
    assert status == 2 and "link: File exists" in error, error


def test_run_dir_that_is_a_file(tmp_path, run_main):
    file = tmp_path / "file"
    file.touch()
    status, error = run_main(train, *tiny_arguments(tmp_path), f"run.dir={file}")
    assert status == 2 and f"{file}: File exists; check" in error, error
