"""Time of a step by stage, from torch's profiler.

Batches are drawn and planned on one stream, rows move on a second, and steps compute on a third:
stages overlap, and may sum to more than the step. Kernels of this project are known by name. Of
torch's kernels, those on the computing stream count as "rest", fills on other streams as "plan",
and all others as "sampling". Time between ranks includes the wait for the other ranks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.bench.results import Figures
from tests.bench.steps import Steps

STAGES = {
    "sampling": ("draw", "choose_kept", "list_kept"),
    "plan": (
        "mark",
        "count_owners",
        "group_by_owner",
        "read_counts",
        "mark_requested",
        "mark_listed",
        "meet_to_plan",
        "gather_marks",
        "survey",
        "list",
    ),
    "moves": ("exchange", "move_records"),
    "claim": ("unique_rows",),
    "lend": ("own", "gather_weights", "index_borrowed", "borrow_from_peers"),
    "skip-gram": ("skipgram", "cbow"),
    "collect": ("collect", "write_headers", "meet_to_step"),
    "optimizer": ("step",),
    "network": (),
    "rest": (),
}
STAGE_OF = {kernel: stage for stage, kernels in STAGES.items() for kernel in kernels}
COMPUTE = ("skip-gram", "optimizer")
NETWORK = "nccl"
FILLS = re.compile("FillFunctor|Memset")
COPIES = ("Memcpy", "Memset")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
# Multiples of the steps per page; a chunk of the corpus is subsampled every 20 steps or so.
WARM_UP = 24
MEASURED = 96


class Activity(NamedTuple):
    """A kernel or a copy on the GPU, in microseconds."""

    name: str
    stream: int
    start: float
    end: float


def measure(steps: Steps) -> Figures:
    """Return times and counts of a step.

    Step and CPU time are measured without the profiler, which slows both down. On a GPU the
    profiler adds the waits of the launching thread, the number of kernels and copies, the time in
    which the GPU is busy, and, where this project's kernels do all the work, the time by stage.
    """
    steps(WARM_UP)
    plain = steps(MEASURED)
    figures = {"step [us]": 1e6 * plain.seconds / MEASURED, "CPU [us]": 1e6 * plain.cpu / MEASURED}
    if steps.planned.device.type == "cpu":
        return figures
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(MEASURED)
    # Annotations of torch span several kernels, which are counted by themselves.
    events = profiler.events()
    on_gpu = [
        Activity(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    waits = sum(event.time_range.elapsed_us() for event in events if event.name in WAITS)
    copies = sum(activity.name.startswith(COPIES) for activity in on_gpu)
    figures |= {
        "waits [us]": waits / MEASURED,
        "busy [us]": busy(on_gpu) / MEASURED,
        "kernels": (len(on_gpu) - copies) / MEASURED,
        "copies": copies / MEASURED,
    }
    if steps.stages_are_known:
        figures |= {f"{stage} [us]": us / MEASURED for stage, us in by_stage(on_gpu).items()}
    return figures


def by_stage(on_gpu: list[Activity]) -> dict[str, float]:
    """Return the microseconds of each stage."""
    computing = {activity.stream for activity in on_gpu if STAGE_OF.get(activity.name) in COMPUTE}
    totals = dict.fromkeys(STAGES, 0.0)
    for name, stream, start, end in on_gpu:
        if name in STAGE_OF:
            stage = STAGE_OF[name]
        elif name.startswith(NETWORK):
            stage = "network"
        elif stream in computing:
            stage = "rest"
        else:
            stage = "plan" if FILLS.search(name) else "sampling"
        totals[stage] += end - start
    return totals


def busy(on_gpu: list[Activity]) -> float:
    """Return the microseconds in which any kernel or copy ran."""
    total = 0.0
    until = float("-inf")
    for activity in sorted(on_gpu, key=lambda activity: activity.start):
        total += max(0.0, activity.end - max(activity.start, until))
        until = max(until, activity.end)
    return total
