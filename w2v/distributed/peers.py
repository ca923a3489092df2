"""Exchange between GPUs of one host that read each other's memory.

CUDA maps the memory of another process's GPU to addresses of this process, for kernels to use as
their own, over NVLink or PCIe (CUDA IPC; CUDA C++ Programming Guide, "Interprocess Communication").
Kernels wait for the other ranks, so that the CPU takes no part in the exchange of a step:

    borrow      list own rows that any rank requests; once all ranks have stepped their rows and
                have them on the GPU, read weights from their owners
    gradients
    reduce      once all ranks have their gradients, and so have read the weights, find which of
                them are of own rows
    optimizer   read these from all ranks
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

import torch
from torch import Tensor

from w2v.distributed.exchange import RankExchange, Route
from w2v.distributed.ranks import Ranks
from w2v.kernels.batch import Grads, Page, StepShape, StepState
from w2v.kernels.cuda_shard import CudaShardKernels, Peers
from w2v.system.files import one_line


class PeerExchange(RankExchange):
    """Exchange of ranks on GPUs of one host; ids travel by all-to-all.

    Args:
        memory: Maps the memory of the other ranks.
        window_rows: The most rows that a batch touches in both tables.
        (others): As in `RankExchange`.
    """

    def __init__(
        self,
        ranks: Ranks,
        kernels: CudaShardKernels,
        shape: StepShape,
        batches_per_page: int,
        state: StepState,
        planning: torch.cuda.Stream,
        memory: PeerMemory,
        window_rows: int,
    ):
        super().__init__(ranks, kernels, shape, batches_per_page, state, planning)
        self._kernels: CudaShardKernels = kernels
        self._memory = memory
        rows = min(window_rows, 2 * shape.rows) + ranks.size * shape.header_rows
        self._window = kernels.make_window(rows)
        self._joined = False  # the addresses of pages are known with the first of them
        self._turn = 0  # how often ranks have waited for each other

    def borrow(self, rows: Route, page: Page) -> tuple[Grads, Page]:
        if not self._joined:
            self._joined = True
            self._kernels.join_peers(self._share(page))
        self._route = rows
        self._turn += 1
        requests = rows.rows_U, rows.counts.send_N, rows.ids_M
        grads, lent, self._owned = self._kernels.borrow_from_peers(*requests, self._turn)
        return grads, lent

    def reduce(self, grads: Grads) -> Grads:
        route, owned, fault = self._route, self._owned, self._state.fault
        self._turn += 1
        send_N = route.counts.send_N
        self._kernels.find_gradients(route.received, send_N, owned, fault, self._turn)
        self._ranks.bytes_sent += self._bytes(route)
        return owned

    def _share(self, page: Page) -> Peers:
        addresses = self._memory.addresses(*page.inputs, *page.outputs, *self._window)
        on_gpu = torch.tensor(addresses, device=self._shape.device)
        return Peers(on_gpu, self._ranks.rank, self._window, page.inputs.records_SR.shape[1])

    def _bytes(self, route: Route) -> int:
        """Return the bytes that other ranks read of this one for a batch."""
        weights = sum(route.recv) - route.recv[self._ranks.rank]
        gradients = sum(route.send) - route.send[self._ranks.rank]
        return self._shape.dim * (weights * self._shape.dtype.itemsize + gradients * 4)


class PeerMemory:
    """Maps memory of all ranks' GPUs. All ranks make the same calls."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._opened: dict[bytes, int] = {}  # addresses by handle: each is opened once

    def obstacle(self, device: torch.device) -> str:
        """Return why ranks cannot read each other's memory; empty if they can."""
        ranks, own = self._ranks, ""
        others = set(range(ranks.local_size)) - {ranks.local_rank}
        if ranks.local_size < ranks.size:
            own = "the ranks are on several hosts"
        elif os.environ.get("NCCL_P2P_DISABLE") == "1":
            own = "NCCL_P2P_DISABLE=1 forbids it"
        elif not all(torch.cuda.can_device_access_peer(ranks.local_rank, peer) for peer in others):
            own = "not all GPUs can access each other's memory"
        if found := next(filter(None, ranks.all_gather(own)), ""):
            return found
        try:
            self.addresses(torch.zeros(1, device=device))
        except OSError as error:
            return str(error)
        return ""

    def addresses(self, *tensors: Tensor | None) -> list[list[int]]:
        """Return where this process finds the tensors of each rank; 0 for None.

        They are used until all ranks have stopped to exchange rows.

        Raises:
            OSError: CUDA cannot map a rank's memory.
        """
        with self._ranks.reraise():
            own = [tensor if tensor is None else Shared.of(tensor) for tensor in tensors]
        of_ranks = self._ranks.all_gather(own)
        with self._ranks.reraise():
            return [[self._address(shared) for shared in its] for its in of_ranks]

    def _address(self, shared: Shared | None) -> int:
        if shared is None:
            return 0
        if shared.process == os.getpid():
            return shared.address
        if shared.handle not in self._opened:
            self._opened[shared.handle] = _open(shared.handle)
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
        from cupy.cuda import runtime

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


def _open(handle: bytes) -> int:
    from cupy.cuda import runtime

    try:
        return runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
    except RuntimeError as error:
        raise OSError(one_line(error)) from None
