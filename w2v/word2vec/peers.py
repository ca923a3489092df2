"""Exchange between GPUs of one host that read each other's memory.

CUDA maps the memory of another process's GPU to addresses of this process, for kernels to use as
their own, over NVLink or PCIe (CUDA IPC; CUDA C++ Programming Guide, "Interprocess Communication").
Kernels wait for the other ranks, so that the CPU takes no part in the exchange:

    next_page    list the unique rows of the page's batches
    mark         once all ranks have marked what they list, find the own rows among these
    borrow       once all ranks have stepped their rows, read weights from their owners, and find
                 the own rows in the lists of all ranks
    gradients    of rows of this rank, and of those that were read
    reduce       once all ranks have their gradients, sum losses
    optimizer    read the gradients of own rows from all ranks
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from dataclasses import InitVar, dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.rows.launch import cuda_runtime
from w2v.rows.ops import View
from w2v.system.files import one_line
from w2v.word2vec.batch import Batch, Grads, StepState
from w2v.word2vec.cuda_shard import CudaPeerKernels
from w2v.word2vec.exchange import Exchange, PlannedBatch


@dataclass(eq=False)
class PeerExchange(Exchange[int]):
    """Exchange of ranks on GPUs of one host.

    What it knows of a batch's rows is a slot of `CudaPeerKernels`.
    """

    kernels: CudaPeerKernels
    batches_per_page: int
    state: StepState  # its fault is shared with the other ranks
    memory: InitVar[PeerMemory]
    view: InitVar[View]  # the records of all pages

    def __post_init__(self, memory: PeerMemory, view: View) -> None:
        addresses = memory.addresses(self.kernels.shared(view))
        self.kernels.join(memory.rank, addresses, view)

    def next_page(self, batches: Iterator[Batch]) -> list[PlannedBatch[int]]:
        page = list(islice(batches, self.batches_per_page))
        slots = self.kernels.list_page(page)
        return [PlannedBatch(batch, slot) for batch, slot in zip(page, slots, strict=True)]

    def mark(self, page: list[PlannedBatch[int]], marks_A: Tensor) -> None:
        self.kernels.mark_owned(marks_A)

    def borrow(self, planned: PlannedBatch[int], view: View) -> tuple[Grads, View]:
        return self.kernels.borrow(planned.rows), view

    def reduce(self, grads: Grads) -> Grads:
        return self.kernels.find_gradients(grads, self.state.fault)

    @property
    def bytes_sent(self) -> int:
        # A weight comes for each gradient that goes.
        shape = self.kernels.shape
        return int(self.kernels.rows_borrowed) * shape.dim * (shape.dtype.itemsize + 4)


class PeerMemory:
    """Maps memory of all ranks' GPUs. All ranks make the same calls."""

    def __init__(self, ranks: Ranks):
        self.rank = ranks.rank
        self._ranks = ranks
        self._opened: dict[bytes, int] = {}  # addresses by handle: each is opened once

    def obstacle(self, device: torch.device) -> str:
        """Return why ranks cannot read each other's memory; empty if they can."""
        ranks, own = self._ranks, ""
        gpu, gpus = torch.cuda.current_device(), torch.cuda.device_count()
        others = set(range(min(gpus, ranks.local_size))) - {gpu}
        if ranks.local_size < ranks.size:
            own = "the ranks are on several hosts"
        elif os.environ.get("NCCL_P2P_DISABLE") == "1":
            own = "NCCL_P2P_DISABLE=1 forbids it"
        elif not all(torch.cuda.can_device_access_peer(gpu, peer) for peer in others):
            own = "not all GPUs can access each other's memory"
        if obstacle := next(filter(None, ranks.all_gather(own)), ""):
            return obstacle
        try:
            self.addresses([torch.zeros(1, device=device)])
        except OSError as error:
            return str(error)
        return ""

    def addresses(self, tensors: Iterable[Tensor | None]) -> list[list[int]]:
        """Return where this process finds the tensors of each rank; 0 for None.

        They are used until all ranks have stopped to exchange rows. Raises `OSError` if CUDA cannot
        map a rank's memory.
        """
        # Others may write to it as soon as they know where it is.
        torch.cuda.current_stream().synchronize()
        with self._ranks.reraise():
            own = [tensor if tensor is None else Shared.of(tensor) for tensor in tensors]
        of_ranks = self._ranks.all_gather(own)
        with self._ranks.reraise():
            return [[self._address(shared) for shared in of_rank] for of_rank in of_ranks]

    def _address(self, shared: Shared | None) -> int:
        if shared is None:
            return 0
        if shared.process == os.getpid():
            return shared.address
        if shared.handle not in self._opened:
            runtime = cuda_runtime()
            flag = runtime.cudaIpcMemLazyEnablePeerAccess
            try:
                self._opened[shared.handle] = runtime.ipcOpenMemHandle(shared.handle, flag)
            except RuntimeError as error:
                raise OSError(one_line(error)) from None
        return self._opened[shared.handle] + shared.offset


class Shared(NamedTuple):
    """Where other processes find a tensor."""

    process: int
    address: int  # in that process
    handle: bytes  # of the allocation that it is part of
    offset: int  # in the allocation

    @classmethod
    def of(cls, tensor: Tensor) -> Shared:
        """Share a tensor of a GPU; raise OSError if CUDA cannot."""
        runtime = cuda_runtime()
        address, base, size = tensor.data_ptr(), ctypes.c_uint64(), ctypes.c_size_t()
        parts = ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        status = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2(*parts)
        if status:
            raise OSError(f"cuMemGetAddressRange ends with status {status}")
        try:
            handle = runtime.ipcGetMemHandle(base.value)
        except RuntimeError as error:
            raise OSError(one_line(error)) from None
        return cls(os.getpid(), address, handle, address - base.value)
