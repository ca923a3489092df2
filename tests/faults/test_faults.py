"""Bad input, full disks and foreign files: one line that says what, where and what to do, exit status 2, and nothing half-written."""

import contextlib
import gzip
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
import train
from w2v.training import plan, shards
from w2v.training.checkpoint import latest
from w2v.training.memory import Budget
from w2v.vectors import load as vectorfile

ROOT = Path(__file__).parents[2]
SMALL = """
model.vector_size=4 model.sample=0 vocab.min_count=1 train.epochs=1 train.batch_size=16 train.device=cpu run.log_seconds=100
""".split()
TEXT = "\n".join(
    " ".join(random.Random(line).choices("a b c d e f g".split(), k=8)) for line in range(40)
)
pytestmark = pytest.mark.usefixtures("one_thread")


def said(capsys, program, *arguments):
    """The exit status and the error, which is one line or none."""
    status = program.main(list(map(str, arguments)))
    errors = capsys.readouterr().err
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) <= 1 and "Traceback" not in errors, errors
    return status, lines[0] if lines else ""


def arguments_for(folder, text=TEXT):
    (folder / "text.txt").write_text(text)
    return [
        f"corpus.path={folder / 'text.txt'}",
        f"corpus.data_dir={folder / 'data'}",
        f"run.dir={folder / 'runs'}",
        *SMALL,
    ]


CONFIGS = {
    "unknown key": (
        "model:\n  windoww: 3\n",
        "unknown key 'model.windoww' (from {file}); did you mean 'model.window'?",
    ),
    "unknown section": (
        "modell:\n  window: 3\n",
        "unknown key 'modell.window' (from {file}); did you mean",
    ),
    "type": ("model: {window: wide}\n", "model.window=wide (from {file}) is not a whole number"),
    "range": ("model: {window: 0}\n", "model.window=0 is out of range; it must be at least 1"),
    "combination": (
        "train: {device: cpu}\ntransfer: {engine: mapped}\n",
        "transfer.engine=mapped pages rows onto a GPU, but",
    ),
    "combination of rates": (
        "optimizer: {lr: 0.1, min_lr: 0.2}\n",
        "optimizer.min_lr=0.2 is out of range; it must be from 0 to",
    ),
    "a name that leads elsewhere": (
        "run: {name: ../../x}\n",
        "run.name='../../x' is out of range; it must be without slashes",
    ),
    "not YAML": ("model: [\n", "config file {file} cannot be read as YAML"),
    "YAML that makes objects": (
        "model: !!python/object/apply:os.system ['true']\n",
        "config file {file} cannot be read as YAML",
    ),
    "endless YAML": ("[" * 5000, "config file {file} cannot be read as YAML"),
    "no text": ("\udcff\udcfe", "config file {file} cannot be read as YAML"),
    "a list": ("- 1\n", "config file {file} must hold sections such as 'model:'"),
    "empty": ("", "config file {file} is empty; write sections"),
    "missing": (None, "config file {file} does not exist"),
}


@pytest.mark.parametrize("content, words", CONFIGS.values(), ids=CONFIGS)
def test_configs(tmp_path, capsys, content, words):
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    status, error = said(capsys, train, file, *arguments_for(tmp_path)[:3])
    assert status == 2 and words.format(file=file) in error, error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "content", [None, *(content for content, _ in CONFIGS.values() if content)]
)
def test_damaged_configs_of_runs(tmp_path, capsys, content):
    (tmp_path / "run").mkdir()
    if content is not None:
        (tmp_path / "run" / "config.yaml").write_bytes(content.encode(errors="surrogateescape"))
    status, error = said(capsys, train, "--resume", tmp_path / "run", "train.device=cpu")
    assert status == 2 and (
        str(tmp_path / "run") in error or "is out of range" in error or "transfer.engine" in error
    )


def cut(data):
    return data[: len(data) // 2]


def packed_zst(data):
    zstd = pytest.importorskip(
        "backports.zstd" if sys.version_info < (3, 14) else "compression.zstd"
    )
    return zstd.compress(data)


LONG = " ".join(f"{number:x}" for number in range(20_000)).encode()
CORPORA = {
    "missing": ("text.txt", None, "is no file, no directory and no corpus name"),
    "empty": ("text.txt", b"", "is empty or no text"),
    "white space": ("text.txt", b" \n\n ", "the text holds no words"),
    "binary": ("text.txt", b"a b\0c", "looks binary (it has a NUL byte)"),
    "truncated .gz": ("text.gz", cut(gzip.compress(LONG)), "cannot be read ("),
    "truncated .xz": ("text.xz", cut(lzma.compress(LONG)), "cannot be read ("),
    "truncated .zst": ("text.zst", lambda: cut(packed_zst(LONG)), "cannot be read ("),
    "one endless line": ("text.txt", b"x" * 3_000_000, "characters without a space"),
    "no word above min_count": (
        "text.txt",
        b"a b c d",
        "vocab.min_count=2 keeps no word and training needs two",
    ),
    "only one word": (
        "text.txt",
        b"a a a a b c",
        "vocab.min_count=2 keeps only one word and training needs two",
    ),
}


@pytest.mark.parametrize("name, content, words", CORPORA.values(), ids=CORPORA)
def test_corpora(tmp_path, capsys, name, content, words):
    given_ = [f"corpus.path={tmp_path / name}", *arguments_for(tmp_path)[1:], "vocab.min_count=2"]
    (tmp_path / "text.txt").unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content() if callable(content) else content)
    status, error = said(capsys, train, *given_)
    assert status == 2 and words in error, error
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != name]
    assert not left and not (tmp_path / "runs").exists()


def test_a_vocabulary_of_more_rows_than_ids_can_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan, "MOST_WORDS", 5)
    status, error = said(capsys, train, *arguments_for(tmp_path))
    assert (
        status == 2
        and "7 words are more than the 5 rows that a table may have; set vocab.max_final_vocab=5"
        in error
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that is done."""
    folder = tmp_path_factory.mktemp("finished")
    assert train.main(arguments_for(folder)) == 0
    (run,) = (folder / "runs").iterdir()
    return run


@contextlib.contextmanager
def changed(path, change):
    """The file with other content, or gone, for as long as the block runs."""
    before = path.read_bytes()
    after = change(before)
    path.unlink() if after is None else path.write_bytes(after)
    try:
        yield
    finally:
        path.write_bytes(before)


def flipped(data):
    return data[:-30] + bytes([data[-30] ^ 4]) + data[-29:]


def other_version(data):
    from w2v.training.checkpoint import _sealed

    return _sealed(json.loads(data) | {"format": 7}).encode()


def other_text(data):
    from w2v.training.checkpoint import _sealed

    return _sealed(json.loads(data) | {"text": {"raw_words": 3, "vocabulary": "00"}}).encode()


RESUMED = {
    "missing shard": (
        "input-00000-of-00001.safetensors",
        lambda data: None,
        "is damaged (No such file or directory); restore it, or",
    ),
    "truncated shard": ("input-00000-of-00001.safetensors", cut, "bytes instead of"),
    "flipped shard": ("output-00000-of-00001.safetensors", flipped, "is damaged (its CRC-32 is"),
    "missing manifest": (
        "manifest.json",
        lambda data: None,
        "manifest.json is damaged (FileNotFoundError",
    ),
    "truncated manifest": ("manifest.json", cut, "manifest.json is damaged (JSONDecodeError"),
    "flipped manifest": ("manifest.json", flipped, "manifest.json is damaged ("),
    "other version": (
        "manifest.json",
        other_version,
        "is of format 7, and this version reads 2; go on with the version that wrote it",
    ),
    "other vocabulary": (
        "manifest.json",
        other_text,
        "was trained on another text or vocabulary than corpus.path=",
    ),
}


@pytest.mark.parametrize("name, change, words", RESUMED.values(), ids=RESUMED)
def test_checkpoints(finished, capsys, name, change, words):
    saved = latest(finished / "checkpoints").path
    with changed(saved / name, change):
        before, config = (
            sorted(path.name for path in finished.rglob("*")),
            (finished / "config.yaml").read_bytes(),
        )
        status, error = said(capsys, train, "--resume", finished, "train.epochs=9")
        assert status == 2 and words in error and str(saved) in error, error
        assert sorted(path.name for path in finished.rglob("*")) == before
        assert (finished / "config.yaml").read_bytes() == config, (
            "what is refused must not become the run's"
        )


@pytest.mark.parametrize(
    "run, more, words",
    [
        ("{run}x", [], "no run was begun there, as it holds no config.yaml"),
        ("latest", ["run.dir={run}"], "--resume latest finds no run in {run}; name a run folder"),
        (
            "{run}",
            ["model.window=9", "optimizer.args.betas=[0.1,0.2]"],
            "model.window=9 instead of 5; optimizer.args=",
        ),
    ],
)
def test_runs_to_resume(finished, capsys, run, more, words):
    status, error = said(
        capsys,
        train,
        "--resume",
        run.format(run=finished),
        *(entry.format(run=finished) for entry in more),
    )
    assert status == 2 and words.format(run=finished) in error, error


VECTORS = {
    "missing": ("vectors.kv", lambda data: None, "holds no vectors.kv"),
    "truncated": (
        "vectors.kv",
        cut,
        "vectors.kv is damaged: its SHA-256 is not that in vectors.sha256",
    ),
    "flipped": (
        "vectors.kv",
        flipped,
        "vectors.kv is damaged: its SHA-256 is not that in vectors.sha256; export it again",
    ),
    "bad list of sums": (
        "vectors.sha256",
        lambda data: b"\xff what",
        "vectors.sha256 is no list of checksums; remove it",
    ),
}


@pytest.mark.parametrize("name, change, words", VECTORS.values(), ids=VECTORS)
def test_vectors(finished, capsys, name, change, words):
    with changed(finished / name, change):
        status, error = said(capsys, evaluate, "nn", finished, "a")
        assert status == 2 and words in error, error
    assert said(capsys, evaluate, "nn", finished, "a") == (0, "")


def test_vectors_of_a_run_may_be_exported_again_but_not_changed_unseen(finished, capsys):
    before = (finished / "vectors.sha256").read_text()
    assert [line.split("  ")[1] for line in before.splitlines()] == ["vectors.bin", "vectors.kv"]
    assert evaluate.main(["export", str(finished), "--bin", "--kv"]) == 0
    assert vectorfile.load(finished).index_to_key and (finished / "vectors.sha256").exists()
    capsys.readouterr()
    with changed(finished / "vectors.bin", flipped):
        assert said(capsys, evaluate, "nn", finished / "vectors.bin", "a")[0] == 2


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_run_no_code(tmp_path):
    victim = tmp_path / "victim"
    (tmp_path / "x.kv").write_bytes(pickle.dumps(Evil(victim)))
    with pytest.raises(
        vectorfile.VectorsError,
        match=r"x.kv is no plain KeyedVectors file: it names \w+.mkdir, which could run any code",
    ):
        vectorfile.load(tmp_path / "x.kv")
    assert not victim.exists()


def test_nothing_of_the_program_unpickles_or_evaluates():
    for path in [*(ROOT / "w2v").rglob("*.py"), ROOT / "train.py", ROOT / "evaluate.py"]:
        source = path.read_text()
        assert not [
            word
            for word in (
                "pickle.load",
                "torch.load",
                "allow_pickle=True",
                " eval(",
                " exec(",
                "yaml.load(",
            )
            if word in source
        ]
        assert (
            "pickle" not in source
            or path.name in ("vectorfile.py", "kvfile.py")
            or "unpickle" in source
        )


def test_a_dry_run_says_what_it_takes_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    given_ = [*arguments_for(tmp_path), "--dry-run"]
    assert train.main(given_) == 0
    out = capsys.readouterr().out
    for part in (
        "host      program 400 MiB + tables 672 B",
        "disk      checkpoints 5 KiB + vectors",
        "saving    checkpoints are",
    ):
        assert part in out, out
    assert (
        "time      about " in out and " M words/s in " in out and not (tmp_path / "runs").exists()
    )
    monkeypatch.setattr(plan.budget, "free_disk_bytes", lambda folder: 3 << 10)
    for arguments in (given_, given_[:-1]):  # a start is refused as well
        status, error = said(capsys, train, *arguments)
        assert status == 3 and "error: disk would run out: host program" in error, error
        assert "= 6 KiB of 3 KiB free in" in error and "run.dir=FOLDER on a larger disk" in error
        assert not (tmp_path / "runs").exists()


# Disks


@contextlib.contextmanager
def mounted(folder, size):
    """A file system of so many bytes."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems can only be mounted by root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def leftovers(folder):
    return [
        path
        for path in folder.rglob("*")
        if ".partial" in path.name or ".saving" in path.name or path.name.endswith(".part")
    ]


BIG = "\n".join(
    " ".join(f"w{number}" for number in range(start, start + 10)) for start in range(0, 20_000, 10)
)


def test_a_disk_that_is_full_when_ids_are_written(tmp_path, capsys):
    given_ = arguments_for(tmp_path, "\n".join([BIG] * 3))
    with mounted(tmp_path / "small", 200 << 10) as small:
        status, error = said(capsys, train, *given_, f"corpus.data_dir={small}")
        assert (
            status == 2
            and f"{small}/cache cannot be written (No space left on device); make room there"
            in error
        ), error
        assert (
            not list(small.rglob("vocab.tsv"))
            and not list(small.rglob("ids.bin"))
            and not (tmp_path / "runs").exists()
        )


@pytest.mark.parametrize(
    "copies", [0, 3 << 20, 1 << 30], ids=["waited for", "a part behind", "all behind"]
)
def test_a_disk_that_is_full_when_a_checkpoint_is_written(tmp_path, capsys, monkeypatch, copies):
    monkeypatch.setattr(plan.budget, "free_disk_bytes", lambda folder: 1 << 50)
    monkeypatch.setattr(Budget, "copies", copies)
    monkeypatch.setattr(shards, "FILE_BYTES", 1 << 20)
    given_ = arguments_for(tmp_path, BIG)
    with mounted(
        tmp_path / "small", 12 << 20
    ) as small:  # a checkpoint is 5 MB, and three find no room
        status, error = said(
            capsys, train, *given_, f"run.dir={small}", "train.epochs=4", "train.batch_size=4096"
        )
        (run,) = small.iterdir()
        full = f"error: {run}/checkpoints: No space left on device, so that a checkpoint of 5,120,000 bytes cannot be written"
        assert status == 2 and error.startswith(full), error
        assert "make room there" in error and not leftovers(run)
        saved = latest(run / "checkpoints")
        assert saved.state["epochs_done"] in (1, 2)
        assert said(capsys, train, "--resume", run)[0] == 2  # still full, still one line
        assert latest(run / "checkpoints").path == saved.path
        subprocess.run(["mount", "-o", "remount,size=100m", str(small)], check=True)
        assert said(capsys, train, "--resume", run) == (0, "")
        assert (run / "vectors.bin").exists()


def test_a_disk_that_is_full_when_vectors_are_exported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plan.budget, "free_disk_bytes", lambda folder: 1 << 50)
    with mounted(tmp_path / "small", 6 << 20) as small:
        more = ["model.vector_size=16", "run.checkpoint_minutes=0", "optimizer.name=SGD"]
        status, error = said(
            capsys,
            train,
            *arguments_for(tmp_path, BIG),
            f"run.dir={small}",
            "train.batch_size=4096",
            *more,
        )
        (run,) = small.iterdir()
        assert status == 2 and f"error: {run}" in error and "make room" in error, error
        assert (
            not leftovers(run) and not (run / "vectors.kv").exists() and latest(run / "checkpoints")
        )


@pytest.mark.parametrize("limit", [1 << 10, 12 << 10])
def test_a_limit_on_the_size_of_files(programs, tmp_path, limit):
    """Whatever is written first beyond it: ids, checkpoint or vectors."""
    text = " ".join(f"w{number % 300}" for number in range(6_000)).replace("w299 ", "w299\n")
    more = ["model.vector_size=16", "train.batch_size=512", "optimizer.name=SGD"]
    status, output = programs.run(*arguments_for(tmp_path, text), *more, RLIMIT_FSIZE=limit)
    assert status == 2 and "Traceback" not in output, output
    error = output.splitlines()[-1]
    assert error.startswith("error: /") and (
        "make room there" in error or "is the disk full?" in error
    ), error
    assert not leftovers(tmp_path)


def test_a_run_folder_that_cannot_be_written(tmp_path, capsys):
    with mounted(tmp_path / "small", 12 << 20) as small:
        subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True)
        status, error = said(capsys, train, *arguments_for(tmp_path), f"run.dir={small / 'runs'}")
        assert (
            status == 2
            and f"error: {small}/runs" in error
            and "Read-only file system; check the folder and its permissions" in error
        )
    (tmp_path / "file").write_text("x")
    status, error = said(capsys, train, *arguments_for(tmp_path), f"run.dir={tmp_path / 'file'}")
    assert (
        status == 2
        and str(tmp_path / "file") in error
        and "Not a directory; check the folder" in error
    ), error
