"""Estimated memory is 1.0 to 1.5 times the peak of a process of its own.

A run that compiles its kernels takes the most. `make test` measures one run that does not.
`make test-faults` compiles them anew for each of ten runs on the CPU, and of seven on a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from w2v.config import load_config
from w2v.text import open_corpus

ROOT = Path(__file__).parents[2]
MEASURED = """
import json, sys
import train
from tests.bench.measure import GpuMemory
from w2v.training import plan
make_plan, estimates = plan.make_plan, {}
def recorded(*arguments):
    planned = make_plan(*arguments)
    estimates.update((place, sum(parts.values())) for place, parts in planned.takes().items())
    return planned
plan.make_plan = recorded
with GpuMemory() as gpu:
    assert train.main(sys.argv[1:]) == 0
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM:")]
peaks = {"host": int(peak.split()[1]) << 10, "gpu": gpu.bytes}
print(json.dumps([estimates, peaks]))
"""
ADAM = "configs/optimizers/adam.yaml"
CPU = [
    ["train.kernels=reference", "train.batch_size=8192"],
    [],
    ["model.vector_size=300"],
    ["model.vector_size=8", "train.batch_size=1000000"],
    ["model.vector_size=300", "model.window=10", "model.negative=20", ADAM],
    ["model.vector_size=1000", ADAM],
    ["model.vector_size=1000", "optimizer.name=SGD", "optimizer.lr=0.001"],
    ["model.vector_size=200", "optimizer.name=NAdam", "optimizer.lr=0.001"],
    ["train.kernels=reference", "train.batch_size=8192", "model.negative_pool=20000000"],
    ["train.precision=bf16", "train.batch_size=16384"],
    ["model.subwords=true", "model.vector_size=300", ADAM],
    ["model.subwords=true", "train.kernels=reference", "train.batch_size=8192"],
]
GPU = [
    [ADAM],
    [ADAM, "model.vector_size=200", "model.window=10", "model.negative=20"],
    [ADAM, "transfer.engine=mapped", "transfer.gpu_bytes=50%", "train.batch_size=8192"],
    [ADAM, "transfer.engine=staged", "transfer.gpu_bytes=50%", "train.batch_size=8192"],
    [ADAM, "train.deterministic=true", "train.batch_size=8192"],
    [ADAM, "model.subwords=true"],
    [ADAM, "model.architecture=cbow", "model.hs=true"],
    ["optimizer.name=NAdam", "optimizer.lr=0.001"],
]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Arguments of a short run over words by Zipf's law."""
    folder = tmp_path_factory.mktemp("estimates")
    ids = np.minimum(np.random.default_rng(0).zipf(1.2, 120_000), 60_000)
    words = np.char.add("w", ids.astype(str)).reshape(-1, 20)
    (folder / "text.txt").write_text("\n".join(map(" ".join, words)))
    paths = [f"corpus.path={folder}/text.txt", f"corpus.data_dir={folder}", f"run.dir={folder}"]
    # Copies of tables for checkpoints are made when the first line is logged.
    arguments = [
        *paths,
        "vocab.min_count=1",
        "train.epochs=1",
        "run.log_seconds=0.1",
        "run.report=false",
    ]
    open_corpus(load_config([], arguments))  # train.py does it in a process of its own
    return arguments


def measure(arguments, **environment):
    """Run train.py; return estimated and measured bytes by place."""
    command = [sys.executable, "-c", MEASURED, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "2"} | environment
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    estimates, peaks = json.loads(done.stdout.splitlines()[-1])
    print({place: (estimates.get(place, 0) >> 20, peaks[place] >> 20) for place in peaks})
    return estimates, peaks


def test_memory_of_a_run(arguments):
    estimates, peaks = measure([*arguments, *CPU[1]], CUDA_VISIBLE_DEVICES="")
    # The compiler takes a tenth, which is a part of the estimate.
    assert 1.1 <= estimates["host"] / peaks["host"] <= 1.5, (estimates, peaks)


@pytest.mark.slow
@pytest.mark.parametrize("settings", CPU)
def test_memory_of_the_cpu(arguments, tmp_path, settings):
    """The greatest peak counts: those of plain torch differ by a third."""
    folders = {"CUDA_VISIBLE_DEVICES": "", "NUMBA_CACHE_DIR": str(tmp_path)}
    equal_runs = 4 if "train.kernels=reference" in settings else 1
    runs = [measure([*arguments, *settings], **folders) for _ in range(equal_runs)]
    estimates, peak = runs[0][0], max(peaks["host"] for _, peaks in runs)
    assert 1 <= estimates["host"] / peak <= 1.5, (estimates, peak)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("settings", GPU)
def test_memory_of_a_gpu(arguments, tmp_path, settings):
    """Tables have some GiB, beside which what CUDA takes is small."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"w{n} w{n + 1} w{n + 2} w{n + 3}" for n in range(0, 800_000, 4)))
    more = (
        f"corpus.path={text}",
        "model.sample=0",
        "run.checkpoint_minutes=0",
        f"run.dir={tmp_path}",
    )
    folders = {"CUPY_CACHE_DIR": str(tmp_path / "cupy"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    estimates, peaks = measure([*arguments, *more, *settings], **folders)
    for place, peak in peaks.items():
        assert 1 <= estimates[place] / peak <= 1.5, (place, estimates, peaks)
