"""Arguments of launches, and importing CuPy from two threads."""

import subprocess
import sys

import pytest
import torch

from tests.support.steps import make_tables, problem
from w2v.config import OptimizerConfig
from w2v.kernels import launch
from w2v.kernels.batch import Page, StepShape, StepState, Update, View
from w2v.kernels.cuda import CudaKernels
from w2v.model.optim import RowOptimizer

CPU = torch.device("cpu")
# `cupy.cuda` needs what CuPy sets before it imports it. As compiled modules do, it does not wait.
CUPY = "import time; time.sleep(0.3); version = 13; import cupy.cuda"
CUDA = "import sys, types; runtime = types.SimpleNamespace(**vars(sys.modules['cupy']))"
THREADS = """
import importlib, threading, time
from w2v.kernels.launch import cuda_runtime
other = threading.Thread(target=importlib.import_module, args=["cupy"])
other.start()
time.sleep(0.1)
print(cuda_runtime().version)
"""


def test_a_thread_that_imports_cupy_meanwhile_is_waited_for(tmp_path):
    (tmp_path / "cupy/cuda").mkdir(parents=True)
    (tmp_path / "cupy/__init__.py").write_text(CUPY)
    (tmp_path / "cupy/cuda/__init__.py").write_text(CUDA)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{THREADS}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("13\n", "")


@pytest.fixture
def launches(monkeypatch):
    """Names and arguments of launched kernels, none of which is compiled."""
    found = []

    def launcher(kernel, _, first):
        return lambda blocks, values, stream: found.append((kernel, [*first, *values]))

    monkeypatch.setattr(launch, "Launcher", launcher)
    monkeypatch.setattr(launch, "_compiled", lambda device, source, kernel, **defines: (kernel, 0))
    monkeypatch.setattr(launch, "_processors", lambda: 1)
    monkeypatch.setattr(launch._thread, "device", 0, raising=False)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *device: 0, raising=False)
    return found


def test_bound_kernels_get_the_buffers_at_hand(launches):
    rows, dim = 40, 4
    optimizer = RowOptimizer(OptimizerConfig(name="Adam", lr=0.1))
    tables = make_tables(optimizer, rows, dim)
    kernels, state = CudaKernels(StepShape(rows, dim, torch.float32, CPU)), StepState(CPU)
    (small, _), (large, _) = (problem(0, centers, 2, 3, rows) for centers in (8, 30))
    first, second = (
        Page(*(View(table.records_VR.clone(), None) for table in tables)) for _ in range(2)
    )
    buffers = []
    for batch, page, lr in ((small, first, 0.5), (small, first, 0.25), (small, second, 0.125)):
        buffers.append(
            check_step(launches, kernels, batch, page, Update(optimizer, tables, lr), state)
        )
    buffers.append(
        check_step(launches, kernels, large, second, Update(optimizer, tables, 0.0), state)
    )
    assert buffers[0] == buffers[1] == buffers[2]
    assert not buffers[2] & buffers[3], "the larger batch needs larger buffers"


def check_step(launches, kernels, batch, page, update, state):
    """Make a step; return the addresses of the buffers that its kernels got."""
    state.step += 1
    grads = kernels.gradients(batch, page, kernels.unique_rows(batch), update.lr)
    kernels.optimizer_step(update, page, grads, state)
    unique, skipgram, step = (set(args) for _, args in launches)
    launches.clear()
    text = {part.data_ptr() for part in (batch.words_n, batch.windows_B, batch.negatives_BK)}
    records = {view.records_SR.data_ptr() for view in page}
    buffers = {part.data_ptr() for table in grads[:2] for part in table}
    loss = grads.loss.data_ptr()
    assert text | buffers <= unique
    assert text | buffers | records | {loss, grads.pairs.data_ptr()} <= skipgram
    assert buffers | records | {loss, update.lr, float(state.step)} <= step
    return buffers
