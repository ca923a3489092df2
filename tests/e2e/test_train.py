"""The program from the outside: text in, a run folder with vectors, scores and tables out."""

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
model.vector_size=16 model.window=2 vocab.min_count=1 train.epochs=2 train.batch_size=128 train.device=cpu run.log_seconds=0.001
""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two topics whose words never share a line."""
    rng = random.Random(0)
    topics = ["red green blue pink grey".split(), "one two three four five".split()]
    lines = [" ".join(rng.choices(rng.choice(topics), k=8)) for _ in range(400)]
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    path.write_text("\n".join(lines))
    return path


def program(*arguments, script="train.py", **environment):
    return subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment,
    )


def train(corpus, folder, *more, **environment):
    done = program(
        f"corpus.path={corpus}",
        f"corpus.data_dir={folder / 'data'}",
        f"run.dir={folder}",
        *SETTINGS,
        *more,
        **environment,
    )
    assert done.returncode == 0, done.stderr
    (run,) = folder.glob("20*")
    return run, done.stdout


def test_a_run_on_the_cpu_imports_neither_gensim_nor_scipy_nor_torchs_compiler(corpus, tmp_path):
    """50, 17 and 70 MiB: what there is beside tables has to be small, for a run to take no more memory than gensim."""
    settings = [
        f"corpus.path={corpus}",
        f"corpus.data_dir={tmp_path}",
        f"run.dir={tmp_path}",
        *SETTINGS,
        "optimizer.name=SGD",
    ]
    heavy = {"gensim", "scipy.linalg", "torch._dynamo"}
    code = f"import sys, train; assert train.main({settings}) == 0; print('found', {heavy} & {{*sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0 and "found set()" in done.stdout, done.stdout + done.stderr
    assert (next(tmp_path.glob("20*")) / "scores.json").exists()


def test_a_run_leaves_all_it_promises(corpus, tmp_path):
    from gensim.models import KeyedVectors
    from safetensors.numpy import load_file

    run, said = train(corpus, tmp_path, "train.epochs=20", "optimizer.lr=0.1")
    promised = "config.yaml env.txt train.log metrics.jsonl scores.json vocab.tsv vectors.kv vectors.bin vectors.sha256 checkpoints"
    assert sorted(os.listdir(run)) == sorted([*promised.split(), "README.md", ".lock"])
    vectors = KeyedVectors.load(str(run / "vectors.kv"))
    near = [word for word, _ in vectors.most_similar("red", topn=4)]
    assert set(near) == {"green", "blue", "pink", "grey"}
    last = sorted((run / "checkpoints").iterdir())[-1]
    manifest = json.loads((last / "manifest.json").read_text())
    assert [name for name, _ in manifest["tables"]["input"]["fields"]] == [
        "weight",
        "exp_avg",
        "exp_inf",
    ]
    assert manifest["tables"]["input"]["scalars"]["step"] == manifest["step"]
    records = load_file(last / "input-00000-of-00001.safetensors")["records"]
    assert np.array_equal(records[:, :16], vectors.vectors)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert logged[-1]["words"] == 3200 * 20 and logged[-1]["loss"] < logged[0]["loss"]
    for part in (
        "machine ",
        "engine    resident on cpu",
        "3,200 words",
        "trained 64,000 words",
        str(run),
        "KeyedVectors.load",
    ):
        assert part in said, part
    card = (run / "README.md").read_text()
    for part in (
        "| text |",
        "3,200 words, 10 distinct",
        "10 words that occur",
        "20 epochs, 64,000 words",
        "name: Adamax",
        "no GPU",
    ):
        assert part in card, part
    (block,) = re.findall("```python\n(.*?)```", card, re.DOTALL)
    subprocess.run([sys.executable, "-c", block], cwd=run, check=True)
    again = program(run / "config.yaml")
    assert again.returncode == 0  # the saved config is a config


def test_same_seed_same_vectors_whatever_the_hash_seed(corpus, tmp_path):
    runs = [train(corpus, tmp_path / name, PYTHONHASHSEED=name)[0] for name in ("1", "2")]
    other, _ = train(corpus, tmp_path / "seed", "train.seed=2")
    first, second, third = ((run / "vectors.bin").read_bytes() for run in [*runs, other])
    assert first == second and first != third


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["optimizer.lrr=1"], "unknown key 'optimizer.lrr'"),
        (["corpus.path=no/such/file"], "no/such/file"),
        (["optimizer.name=Adafactor"], "optimizer.name=Adafactor"),
        (["train.device=cuda"], "train.device=cuda"),
        (["missing.yaml"], "missing.yaml"),
        (["vocab.min_count=100000"], "min_count"),
    ],
)
def test_user_errors_are_one_line_and_leave_nothing(corpus, tmp_path, arguments, words):
    done = program(
        f"corpus.path={corpus}",
        f"corpus.data_dir={tmp_path / 'data'}",
        f"run.dir={tmp_path / 'runs'}",
        *arguments,
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and words in done.stderr
    ), done.stderr
    assert not (tmp_path / "runs").exists()


def test_help_needs_no_torch():
    code = "import sys, train; train.main(['--help-config']); assert not {'torch', 'gensim', 'numpy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "vector_size: 100" in done.stdout


ENDING = """
import atexit, gc
from w2v.system import process as host
atexit.register(lambda: print(gc.get_freeze_count() > 0, gc.collect()))
host.end(3)
"""


def test_what_is_left_at_the_end_is_not_looked_through():
    done = subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "True 0\n", "")


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["resident", "mapped"])
@pytest.mark.parametrize("optimizer", ["Adam", "NAdam"])
def test_deterministic_runs_on_the_gpu_give_the_same_bits(corpus, tmp_path, engine, optimizer):
    more = [
        "train.device=cuda",
        "train.deterministic=true",
        f"transfer.engine={engine}",
        f"optimizer.name={optimizer}",
    ]
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (
        train(corpus, folder, *more, CUDA_VISIBLE_DEVICES="0")[0] for folder in folders
    )
    assert (first / "vectors.bin").read_bytes() == (second / "vectors.bin").read_bytes()
