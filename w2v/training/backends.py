"""Which device, engine and kernels a run uses, and why: the one file that chooses between backends.

Where a choice cannot be had, `ConfigError` says what is missing and the remedy; where a slower one takes its place, a warning does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from w2v.config import Config, ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.model.table import Storage
from w2v.training import memory as budget
from w2v.training.machine import Machine, why_no_numba
from w2v.training.memory import GPU_RESERVE
from w2v.transfer import timing
from w2v.transfer.engine import Link
from w2v.transfer.mapped import Mapped
from w2v.transfer.staged import Staged

log = logging.getLogger("w2v")
ROWS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # what a precision keeps rows in, float32 where it is not named
PRODUCTS = ROWS | {
    "amp": torch.bfloat16
}  # and what it computes matrix products in, by plain torch; the fused kernels have none
Rates = dict[str, tuple[float, float]]
LINKS: dict[str, tuple[type[Link], Storage]] = {
    "mapped": (Mapped, "pinned"),
    "staged": (Staged, "cpu"),
}


def choose_device(config: Config, machine: Machine) -> torch.device:
    wanted = config.train.device
    if wanted == "cuda" and not machine.gpu:
        why = (
            "this torch is a CPU build"
            if not machine.cuda_torch
            else "no usable NVIDIA GPU was found"
        )
        raise ConfigError(
            f"train.device=cuda, but {why}; set train.device=cpu, or run `make setup` where nvidia-smi works"
        )
    if (
        machine.gpu
        and machine.cuda_cupy
        and machine.cuda_cupy.split(".")[0] != machine.cuda_torch.split(".")[0]
    ):
        log.warning(
            f"torch is built for CUDA {machine.cuda_torch}, CuPy for CUDA {machine.cuda_cupy}: kernels may fail to load; "
            f"install cupy-cuda{machine.cuda_torch.split('.')[0]}x instead"
        )
    return torch.device("cuda" if wanted != "cpu" and machine.gpu else "cpu")


def aligned(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether records are padded: for a GPU, and where rounding counts the padding too."""
    return device.type != "cpu" or dtype != torch.float32


def choose_engine(
    config: Config,
    machine: Machine,
    device: torch.device,
    table_bytes: int,
    measured: Callable[[], Rates] = dict,
) -> tuple[str, str]:
    """The engine's name and the reason for it; `measured` gives what each link moves, where that decides."""
    wanted, in_files = config.transfer.engine, bool(config.transfer.table_dir)
    if device.type == "cpu":
        if wanted in LINKS:
            raise ConfigError(
                f"transfer.engine={wanted} pages rows onto a GPU, but the run is on the CPU; set transfer.engine=resident"
            )
        return "resident", "the CPU computes where the tables are"
    install = f"pip install 'cupy-cuda{machine.cuda_torch.split('.')[0]}x'"
    if not machine.cuda_cupy:
        if wanted == "mapped":
            raise ConfigError(
                f"transfer.engine=mapped needs CuPy, which cannot be imported; {install}, or set transfer.engine=staged"
            )
        log.warning(
            f"CuPy cannot be imported, so neither the fused kernels nor transfer.engine=mapped can be used; {install}"
        )
    if in_files and wanted in ("mapped", "resident"):
        raise ConfigError(
            f"transfer.engine={wanted} cannot read tables in files; set transfer.engine=staged or transfer.table_dir="
        )
    if in_files:
        return "staged", f"tables in files in {config.transfer.table_dir}"
    lockable = table_bytes <= machine.lockable_bytes
    if wanted == "mapped" and not lockable:
        log.warning(
            f"transfer.engine=mapped needs {budget.size(table_bytes)} of locked memory, and {budget.size(machine.lockable_bytes)} may be "
            "locked (ulimit -l, or --ulimit memlock=-1 for a container): going on with transfer.engine=staged, which is slower"
        )
        return "staged", "too little memory may be locked for mapped"
    if wanted != "auto":
        return wanted, "as configured"
    room = machine.gpu_free_bytes - GPU_RESERVE
    fit = f"tables of {budget.size(table_bytes)}, {budget.size(machine.gpu_free_bytes)} free on the GPU"
    if table_bytes <= room:
        return "resident", f"{fit}; force paging with transfer.engine=mapped"
    if not machine.cuda_cupy:
        return (
            "staged",
            f"{fit}, so rows are copied from CPU memory, through the CPU for want of CuPy",
        )
    if not lockable:
        few = f"only {budget.size(machine.lockable_bytes)} of memory may be locked (ulimit -l, or --ulimit memlock=-1 for a container)"
        log.warning(
            f"{few}, so rows are copied through the CPU (transfer.engine=staged), which is slower than reading them in place"
        )
        return "staged", f"{fit}, and {few}"
    rates = measured()
    best = min(rates, key=lambda name: sum(1 / rate for rate in rates[name]), default="mapped")
    found = ", ".join(
        f"{name} {to / 1e9:.1f} / {back / 1e9:.1f}" for name, (to, back) in rates.items()
    )
    return best, f"{fit}, so rows are paged; GB/s of a trial to and from the GPU: {found}"


def link_rates(width: int, config: Config, device: torch.device) -> Rates:
    """Bytes a second to and from the GPU by each link, for records of so many elements; one that cannot be used is left out."""
    rates: Rates = {}
    for name, (link, storage) in LINKS.items():
        try:
            rates[name] = timing.rates(
                link(), storage, width, ROWS.get(config.train.precision, torch.float32), device
            )
        except MemoryError as error:
            log.warning(f"transfer.engine={name} cannot be used: {error}")
    return rates


def choose_kernels(
    config: Config, machine: Machine, device: torch.device, ranks: Ranks = SINGLE
) -> bool:
    """Whether to use kernels made for the step: CUDA's, which add gradients in the order in which they come and so are not for where
    bits must repeat; or on the CPU those that numba compiles, for every optimizer and one rank."""
    wanted = config.train.kernels
    if device.type == "cpu":
        if wanted == "fused" and ranks.size > 1:
            raise ConfigError(
                f"train.kernels=fused is for one rank on the CPU, and there are {ranks.size}; set train.kernels=auto"
            )
        if wanted == "fused" and (missing := why_no_numba()):
            raise ConfigError(
                f"train.kernels=fused needs numba on the CPU ({missing}); pip install numba, or set train.kernels=auto"
            )
        if wanted == "fused" and config.train.precision != "float32":
            raise ConfigError(
                f"train.precision={config.train.precision} is plain torch's on the CPU; set train.kernels=auto"
            )
        return (
            ranks.size == 1
            and wanted != "reference"
            and config.train.precision == "float32"
            and not why_no_numba()
        )
    usable = bool(machine.cuda_cupy)
    if wanted == "fused" and not usable:
        raise ConfigError(
            "train.kernels=fused needs CuPy on the GPU, which cannot be imported; set train.kernels=auto"
        )
    if wanted == "fused" and config.train.deterministic:
        raise ConfigError(
            "train.kernels=fused sums in no fixed order, which train.deterministic=true forbids; set train.kernels=auto"
        )
    return usable and wanted != "reference" and not config.train.deterministic
