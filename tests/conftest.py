"""What all tests share: GPU tests are skipped with the reason where they cannot run, and hypothesis draws the same examples each time."""

from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.support.forked import Programs

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture
def one_thread():
    """Small steps are quickest so, and other processes that keep the cores busy would slow several threads down a hundredfold."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs of train.py in processes of their own."""
    running = Programs(tmp_path_factory.mktemp("programs"))
    yield running
    running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and (reason := why_no_gpu()):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_no_gpu() -> str | None:
    """What GPU tests miss on this machine; None where they can run."""
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA GPU"
    if find_spec("cupy") is None:
        return "CuPy is not installed (make setup picks the one that fits the driver)"
    return None
