"""End-to-end runs of train.py: from text to vectors, scores and tables."""

import json
import os
import random
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.support.each_case import each_case
from tests.support.small_text import record_calls

ROOT = Path(__file__).parents[2]
SETTINGS = """
model.vector_size=16 model.window=2 vocab.min_count=1 train.epochs=2 train.batch_size=128
train.device=cpu run.log_seconds=0.001 run.report=false
""".split()
PROGRESS = ("start ", "reading ")  # lines before an error of a later phase


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a text of two topics, whose words never share a line."""
    rng = random.Random(0)
    topics = ["red green blue pink grey".split(), "one two three four five".split()]
    lines = [" ".join(rng.choices(rng.choice(topics), k=8)) for _ in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    path.write_text("\n".join(lines))
    return path


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
    )


def paths(corpus, folder):
    data, runs = folder / "data", folder / "runs"
    return [f"corpus.path={corpus}", f"corpus.data_dir={data}", f"run.dir={runs}"]


@pytest.fixture(scope="module")
def new_process(corpus, tmp_path_factory):
    """Train in a new process; return the run folder and the output."""
    folder = tmp_path_factory.mktemp("new-process")
    settings = [*paths(corpus, folder), *SETTINGS]
    code = "import sys, torch, train, w2v; w2v.PagedEmbedding(3, 2)(torch.tensor([1]));"
    code += f"assert train.main({settings}) == 0"
    code += "; print('found', {'gensim', 'torch._dynamo'} & {*sys.modules})"
    done = python("-c", code, PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    return run, done.stdout


@pytest.fixture
def train(programs, corpus, tmp_path):
    """Train in a forked process; return the run folder and the output."""

    def run(*more, name="run"):
        status, output = programs.run(*paths(corpus, tmp_path / name), *SETTINGS, *more)
        assert status == 0, output
        (run,) = (tmp_path / name / "runs").iterdir()
        return run, output

    return run


@pytest.mark.parametrize("installed, seconds", [(True, 0), (True, 30), (False, 30)])
def test_a_report_is_written_where_plotly_is_installed(
    corpus, tmp_path, monkeypatch, capsys, installed, seconds
):
    import train
    from w2v.api import train as api
    from w2v.vectors import report, runs

    monkeypatch.setattr(api, "MAP_SECONDS", seconds)
    read = record_calls(monkeypatch, runs, "read")
    (tmp_path / "script.js").touch()
    found = mock.Mock(locate_file=lambda _: tmp_path / "script.js")
    effect = {} if installed else {"side_effect": PackageNotFoundError}
    monkeypatch.setattr(report, "distribution", mock.Mock(return_value=found, **effect))
    assert train.main([*paths(corpus, tmp_path), *SETTINGS, "run.report=true", "-q"]) == 0
    (run,) = (tmp_path / "runs").glob("*/")
    assert read == [run]  # once
    printed = capsys.readouterr().out
    assert (f"report       {run / 'report.html'}" in printed) == installed
    assert ("no report    report.html needs plotly" in printed) != installed
    assert (run / "report.html").exists() == (run / "report.js").exists() == installed
    if installed:  # short runs have no map
        assert ('"x":[]' in (run / "report.js").read_text()) == (seconds > 0)


def test_run_on_the_cpu_imports_neither_gensim_nor_torchs_compiler(new_process):
    # They take 50 and 70 MiB; a run is to take no more memory than gensim's. An embedding that is
    # used without an optimizer of torch does not load the compiler either.
    run, output = new_process
    assert "found set()" in output and (run / "scores.json").exists()


def test_run_folder(programs, train):
    from gensim.models import KeyedVectors
    from safetensors.numpy import load_file

    optimizer = "optimizer.name=Adamax", "optimizer.lr=0.1", "optimizer.args={}"
    run, output = train("train.epochs=20", *optimizer)
    expected = "config.yaml env.txt train.log metrics.jsonl scores.json vocab.tsv vectors.kv"
    expected += " vectors.kv.vectors.npy vectors.bin vectors.sha256 checkpoints .lock"
    assert sorted(os.listdir(run)) == sorted(expected.split())
    for part in ("3,200 words", "trained 64,000 words", str(run), "KeyedVectors.load"):
        assert part in output, part

    # The vectors have learned the topics, and are those of the last checkpoint.
    vectors = KeyedVectors.load(str(run / "vectors.kv"))
    nearest = {word for word, _ in vectors.most_similar("red", topn=4)}
    assert nearest == {"green", "blue", "pink", "grey"}
    last = max((run / "checkpoints").iterdir())
    manifest = json.loads((last / "manifest.json").read_text())
    table = manifest["tables"]["input"]
    assert [name for name, _ in table["fields"]] == ["weight", "exp_avg", "exp_inf"]
    assert [of_rank["step"] for of_rank in table["scalars"]] == [manifest["step"]]
    records = load_file(last / "input-00000-of-00001.safetensors")["records"]
    assert np.array_equal(records[:, :16], vectors.vectors)

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [line for line in lines if "loss" in line]
    assert curve[-1]["words"] == 3200 * 20
    assert curve[-1]["loss"] < curve[0]["loss"]
    phases = "starting reading set-up training saving exporting scoring".split()
    assert sorted(line["phase"] for line in lines if "phase" in line) == sorted(phases)

    # The saved config is a config.
    assert programs.run(run / "config.yaml")[0] == 0


def test_a_text_may_move_but_not_change(programs, train, corpus, tmp_path):
    run, _ = train("train.epochs=1")
    other, moved = tmp_path / "other.txt", tmp_path / "moved.txt"
    moved.write_bytes(corpus.read_bytes())
    other.write_bytes(corpus.read_bytes().replace(b"red", b"two"))
    status, output = programs.run("--resume", run, other, "train.epochs=2")
    assert (
        status == 2 and f"trained on another text or vocabulary than corpus.path={other}" in output
    )
    assert f"path: {corpus}" in (run / "config.yaml").read_text()
    status, output = programs.run("--resume", run, moved, "train.epochs=2")
    assert status == 0 and "trained 6,400 words" in output, output
    assert f"path: {moved}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(
    "settings, kernels",
    [
        ([], "compiled by numba, numbers in float32"),
        (["train.precision=bf16"], "plain torch, numbers in bf16"),
    ],
)
def test_log_of_a_run_names_engine_kernels_and_precision(train, settings, kernels):
    run, output = train(*settings)
    log = (run / "train.log").read_text()
    # What is decided before the run has a folder is in the log too.
    engine = "engine    tables resident on cpu"
    for part in ("machine ", engine, f"kernels   {kernels}", "trained 6,400"):
        assert part in log and part in output, part
    assert log.count("engine  ") == 1


def test_vectors_depend_on_the_seed_and_not_on_hashes(new_process, train):
    same, _ = train()
    other, _ = train("train.seed=2", name="other")
    first, second, third = (
        (run / "vectors.bin").read_bytes() for run in (new_process[0], same, other)
    )
    assert first == second != third


@each_case(
    "argument, words",
    [
        ("optimizer.lrr=1", "unknown key 'optimizer.lrr'"),  # before the text is read
        ("train.device=cuda", "train.device=cuda"),
        ("vocab.min_count=100000", "min_count"),  # after it
    ],
)
def test_user_errors_are_one_line_and_leave_no_run(programs, corpus, tmp_path, argument, words):
    status, output = programs.run(*paths(corpus, tmp_path), argument)
    (error,) = (line for line in output.splitlines() if not line.startswith(PROGRESS))
    assert status == 2 and error.startswith("error: ") and words in error, output
    assert not (tmp_path / "runs").exists()


ENDING = """
import atexit, threading, time
from tests.support.each_case import each_case
from tests.support.small_text import record_calls
from w2v.system import process
class Slow:
    def __del__(self): print("torn down")
slow = Slow()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
process.exit_fast(3)
"""


def test_fast_exit_waits_for_threads_and_handlers_but_tears_nothing_down():
    done = python("-c", ENDING)
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread\nhandler\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
@pytest.mark.parametrize("optimizer", ["Adam", "NAdam"])
def test_deterministic_runs_on_the_gpu_repeat_all_bits(corpus, tmp_path, engine, optimizer):
    settings = "train.device=cuda", "train.deterministic=true"
    choices = f"transfer.engine={engine}", f"optimizer.name={optimizer}"
    for name in ("first", "second"):
        where = paths(corpus, tmp_path / name)
        done = python("train.py", *where, *SETTINGS, *settings, *choices, CUDA_VISIBLE_DEVICES="0")
        assert done.returncode == 0, done.stderr
    first, second = (path.read_bytes() for path in tmp_path.glob("*/runs/*/vectors.bin"))
    assert first == second
