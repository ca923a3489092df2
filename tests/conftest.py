"""Fixtures of all tests, and the reason to skip those that need a GPU."""

import contextlib
import fcntl
import functools
import gc
import os
import random
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from tests.support.programs import Programs
from tests.support.tiny import tiny_arguments

MOST_SECONDS = 1200  # of a test with its fixtures
USUAL_TARGETS = 6  # of a center with five negatives

gc.set_threshold(100_000)  # of new objects: looking at them takes a second of the imports alone

os.environ["W2V_COMMIT"] = "of the tests"  # each run would ask git

# The same examples in each run of the tests.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeded():
    """Have a test draw the same numbers in each run."""
    if torch := sys.modules.get("torch"):
        # torch.manual_seed writes its stack down for each kind of device that is not there.
        for generator in (torch.default_generator, *torch.cuda.default_generators):
            generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture
def one_thread():
    """Let torch use one thread: steps of tests are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Runs of train.py and evaluate.py in processes of their own."""
    with contextlib.closing(Programs(tmp_path_factory.mktemp("programs"))) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory):
    """Folder of a finished run; tests that change its files restore them."""
    import train

    folder = tmp_path_factory.mktemp("tiny-run")
    assert train.main(tiny_arguments(folder)) == 0
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Fail a test that takes too long, where it waits."""

    def fail(number, frame):
        pytest.fail(f"it takes longer than {MOST_SECONDS} s")

    with gpu_lock(item):
        signal.signal(signal.SIGALRM, fail)
        signal.alarm(MOST_SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            if nextitem is None or nextitem.path != item.path:
                freeze()


@contextlib.contextmanager
def gpu_lock(item):
    """Keep tests that need a GPU alone apart from those of other processes."""
    if not item.get_closest_marker("gpu") or item.get_closest_marker("skip"):
        yield
        return
    kind = fcntl.LOCK_SH
    if item.get_closest_marker("alone"):
        kind = fcntl.LOCK_EX
    with open(Path(tempfile.gettempdir(), f"w2v-gpu-tests-{os.getuid()}"), "w") as lock:
        fcntl.flock(lock, kind)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests, and GPU tests where they cannot run."""
    if "W2V_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="make test-faults runs it"))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and (reason := why_no_gpu()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Compile few loops, and collect no garbage of imports."""
    from w2v.system.simd import AT_ONCE
    from w2v.word2vec import cpu_loops

    # Each number of targets has a loop of its own, compiled for seconds, which can take any.
    compile_gradients = cpu_loops.compile_gradients

    @functools.wraps(compile_gradients)
    def compile_usual(most, *kind):
        return compile_gradients(min(USUAL_TARGETS, AT_ONCE), *kind)

    cpu_loops.compile_gradients = compile_usual
    freeze()


def freeze():
    """Collect garbage; do not look at what is left again."""
    gc.collect()
    gc.freeze()  # else it takes an eighth of the time


def why_no_gpu() -> str | None:
    """Return what GPU tests miss on this machine; None where they can run."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if find_spec("cupy") is None:
        return "CuPy is not installed (make setup picks the one that fits the driver)"
    return None
