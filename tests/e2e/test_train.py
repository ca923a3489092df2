"""End-to-end runs of train.py: from text to vectors, scores and tables."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = """
model.vector_size=16 model.window=2 vocab.min_count=1 train.epochs=2 train.batch_size=128
train.device=cpu run.log_seconds=0.001
""".split()


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


def train(corpus, folder, *more, **environment):
    """Train; return the run folder and the output."""
    done = python("train.py", *paths(corpus, folder), *SETTINGS, *more, **environment)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    return run, done.stdout


def test_run_on_the_cpu_imports_neither_gensim_nor_torchs_compiler(corpus, tmp_path):
    # They take 50 and 70 MiB; a run is to take no more memory than gensim's.
    settings = [*paths(corpus, tmp_path), *SETTINGS, "optimizer.name=SGD"]
    code = f"import sys, train; assert train.main({settings}) == 0"
    code += "; print('found', {'gensim', 'torch._dynamo'} & {*sys.modules})"
    done = python("-c", code)
    assert done.returncode == 0 and "found set()" in done.stdout, done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/scores.json"))


def test_run_folder(corpus, tmp_path):
    from gensim.models import KeyedVectors
    from safetensors.numpy import load_file

    run, output = train(corpus, tmp_path, "train.epochs=20", "optimizer.lr=0.1")
    expected = "config.yaml env.txt train.log metrics.jsonl scores.json vocab.tsv vectors.kv"
    expected += " vectors.bin vectors.sha256 checkpoints README.md .lock"
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
    assert lines[-1]["words"] == 3200 * 20
    assert lines[-1]["loss"] < lines[0]["loss"]

    # The model card tells of the run, and its code works.
    card = (run / "README.md").read_text()
    text = "| text |", "3,200 words, 10 distinct", "10 words that occur"
    for part in (*text, "20 epochs, 64,000 words", "name: Adamax", "no GPU"):
        assert part in card, part
    (block,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    subprocess.run([sys.executable, "-c", block], cwd=run, check=True)
    # The saved config is a config.
    assert python("train.py", run / "config.yaml").returncode == 0


@pytest.mark.parametrize(
    "settings, kernels",
    [
        ([], "compiled by numba, precision float32"),
        (["train.precision=bf16"], "plain torch, precision bf16"),
    ],
)
def test_log_of_a_run_names_engine_kernels_and_precision(corpus, tmp_path, settings, kernels):
    run, output = train(corpus, tmp_path, *settings)
    log = (run / "train.log").read_text()
    # What is decided before the run has a folder is in the log too.
    for part in ("machine ", "engine    resident on cpu", f"kernels   {kernels}", "trained 6,400"):
        assert part in log and part in output, part
    assert log.count("engine  ") == 1


def test_vectors_depend_on_the_seed_and_not_on_hashes(corpus, tmp_path):
    runs = [train(corpus, tmp_path / name, PYTHONHASHSEED=name)[0] for name in ("1", "2")]
    other, _ = train(corpus, tmp_path / "seed", "train.seed=2")
    first, second, third = ((run / "vectors.bin").read_bytes() for run in [*runs, other])
    assert first == second != third


@pytest.mark.parametrize(
    "argument, words",
    [
        ("optimizer.lrr=1", "unknown key 'optimizer.lrr'"),
        ("corpus.path=no/such/file", "no/such/file"),
        ("optimizer.name=Adafactor", "optimizer.name=Adafactor"),
        ("train.device=cuda", "train.device=cuda"),
        ("missing.yaml", "missing.yaml"),
        ("vocab.min_count=100000", "min_count"),
    ],
)
def test_user_errors_are_one_line_and_leave_no_run(corpus, tmp_path, argument, words):
    done = python("train.py", *paths(corpus, tmp_path), argument)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


def test_help_needs_no_torch():
    code = "import sys, train; train.main(['--help-config'])"
    code += "; assert not {'torch', 'gensim', 'numpy'} & {*sys.modules}"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "vector_size: 100" in done.stdout


ENDING = """
import atexit, gc
from w2v.system import process
atexit.register(lambda: print(gc.get_freeze_count() > 0, gc.collect()))
process.exit_fast(3)
"""


def test_fast_exit_leaves_nothing_to_collect():
    done = python("-c", ENDING)
    assert (done.returncode, done.stdout, done.stderr) == (3, "True 0\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
@pytest.mark.parametrize("optimizer", ["Adam", "NAdam"])
def test_deterministic_runs_on_the_gpu_repeat_all_bits(corpus, tmp_path, engine, optimizer):
    settings = "train.device=cuda", "train.deterministic=true"
    choices = f"transfer.engine={engine}", f"optimizer.name={optimizer}"
    first, second = (
        train(corpus, tmp_path / name, *settings, *choices, CUDA_VISIBLE_DEVICES="0")[0]
        for name in ("first", "second")
    )
    assert (first / "vectors.bin").read_bytes() == (second / "vectors.bin").read_bytes()
