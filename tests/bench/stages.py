"""What the time of a step goes into: the kernels of some steps by stage, as torch's profiler sees them on the GPU.

Batches are drawn and their rows planned on one stream, rows move on another, and the steps before compute on a third, so the stages may
sum to more than the step; `busy` is the time in which any kernel runs. Our kernels are known by their names. Of torch's own, those on
the stream that computes zero counters and gather losses ("rest"), and the others draw batches, but for the zeroing of marks. What is sent
between ranks counts with the wait for the other ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.bench.measure import Figures
from tests.bench.steps import Steps
from w2v.training.step import FusedPipeline
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.resident import Resident

STAGES = {
    "sampling": ("draw",),
    "plan": ("mark", "mark_lent", "count_owners", "deal", "hear", "survey", "list"),
    "moves": ("exchange", "gather_records", "scatter_records"),
    "claim": ("claim",),
    "lend": ("lend", "place"),
    "skip-gram": ("skipgram",),
    "collect": ("collect", "report"),
    "optimizer": ("step",),
    "network": (),
    "rest": (),
}
STAGE_OF = {kernel: stage for stage, kernels in STAGES.items() for kernel in kernels}
COMPUTE = ("skip-gram", "optimizer")
NETWORK = "nccl"
ZEROES = re.compile("FillFunctor|Memset")
COPIES = ("Memcpy", "Memset")  # which are no kernels
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
WARM_UP, MEASURED = (
    24,
    96,
)  # multiples of the steps of a page; chunks of the corpus are subsampled every 20 steps or so


class Activity(NamedTuple):
    """A kernel or a copy on the GPU, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


def measure(steps: Steps) -> Figures:
    """Microseconds and counts of a step.

    step, CPU: on the clock, and computed by the launching thread, which waits without sleeping; both without the profiler, which slows it.
    On a GPU also, with the profiler, how long that thread waits, how many kernels and copies it launches, how long any of these runs, and
    those of each stage; these only where our kernels do the work: plain torch's cannot be told apart.
    """
    steps(WARM_UP)
    plain = steps(MEASURED)
    figures = {
        "step": (1e6 * plain.seconds / MEASURED, "us"),
        "CPU": (1e6 * plain.cpu / MEASURED, "us"),
    }
    if steps.device.type == "cpu":
        return figures
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(MEASURED)
    events = profiler.events()
    on_gpu = [
        Activity(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    waits = sum(event.time_range.elapsed_us() for event in events if event.name in WAITS)
    known = isinstance(steps.pipeline, FusedPipeline) and isinstance(
        steps.pipeline.engine, (Resident, CachedMapped)
    )
    stages = by_stage(on_gpu) if known else {}
    return figures | {
        "waits": (waits / MEASURED, "us"),
        "busy": (busy(on_gpu) / MEASURED, "us"),
        "kernels": (
            sum(not activity.name.startswith(COPIES) for activity in on_gpu) / MEASURED,
            "",
        ),
        "copies": (sum(activity.name.startswith(COPIES) for activity in on_gpu) / MEASURED, ""),
        **{stage: (us / MEASURED, "us") for stage, us in stages.items()},
    }


def by_stage(on_gpu: list[Activity]) -> dict[str, float]:
    """The microseconds of each stage."""
    computing = {activity.stream for activity in on_gpu if STAGE_OF.get(activity.name) in COMPUTE}
    totals = dict.fromkeys(STAGES, 0.0)
    for name, stream, start, end in on_gpu:
        torchs = "rest" if stream in computing else "plan" if ZEROES.search(name) else "sampling"
        totals[STAGE_OF.get(name, "network" if name.startswith(NETWORK) else torchs)] += end - start
    return totals


def busy(on_gpu: list[Activity]) -> float:
    """The microseconds in which anything ran."""
    total, until = 0.0, float("-inf")
    for activity in sorted(on_gpu, key=lambda activity: activity.start):
        total += max(0.0, activity.end - max(activity.start, until))
        until = max(until, activity.end)
    return total
