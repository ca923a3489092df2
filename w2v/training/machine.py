"""What this computer has: cores, memory, a GPU, and the packages that compile for them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch

from w2v.config import ConfigError
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.model.table import pinning_is_limited
from w2v.system.process import cores
from w2v.training import memory as budget


@dataclass(frozen=True)
class Machine:
    """What this computer offers to a run."""

    cores: int
    host_bytes: int
    gpu: str  # empty without one
    gpu_free_bytes: int
    cuda_torch: str  # CUDA version that torch was built for; empty for a CPU build
    cuda_cupy: str  # the same for CuPy; empty where CuPy cannot be imported
    host_free_bytes: float = math.inf
    lockable_bytes: float = math.inf

    @classmethod
    def here(cls, ranks: Ranks = SINGLE) -> Machine:
        """This computer, or this rank's share of it where several ranks train together here, each with a GPU of its own."""
        gpus = torch.cuda.device_count()
        if 0 < gpus < ranks.local_size:
            many = f"{ranks.local_size} ranks on a machine of {gpus} GPUs"
            raise ConfigError(
                f"{many}; start one a GPU: --nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES="
            )
        pages = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if hasattr(os, "sysconf")
            else 0
        )
        gpu, free, cupy = "", 0, ""
        if torch.cuda.is_available():
            gpu, free, cupy = (
                torch.cuda.get_device_name(),
                torch.cuda.mem_get_info()[0],
                _cupy_cuda(),
            )
        lockable = budget.lockable_bytes()
        if cupy and lockable < budget.UNLIMITED and not pinning_is_limited():
            lockable = budget.UNLIMITED
        host, share = budget.free_host_bytes(), ranks.local_size
        return cls(
            max(1, cores() // share),
            pages,
            gpu,
            free,
            torch.version.cuda or "",
            cupy,
            host / share,
            lockable / share,
        )

    def __str__(self) -> str:
        host = f"{self.cores} cores, {budget.size(self.host_bytes)}"
        if not self.gpu:
            return f"{host} | no GPU"
        built_for = f"torch for CUDA {self.cuda_torch}, " + (
            f"CuPy for CUDA {self.cuda_cupy}" if self.cuda_cupy else "no CuPy"
        )
        return f"{host} | {self.gpu}, {budget.size(self.gpu_free_bytes)} free | {built_for}"


def why_no_numba() -> str:
    """Why numba cannot be imported; empty where it can."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        return " ".join(str(error).split())
    return ""


def _cupy_cuda() -> str:
    try:
        import cupy

        number = cupy.cuda.runtime.runtimeGetVersion()
    except ImportError:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"
