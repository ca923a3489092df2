"""Exchange between GPUs of one host that read each other's memory.

CUDA maps the memory of another process's GPU to addresses of this process, for kernels to use as
their own, over NVLink or PCIe (CUDA IPC; CUDA C++ Programming Guide, "Interprocess Communication").
Kernels wait for the other ranks, so that the CPU takes no part in the exchange:

    plan         list the unique rows of the page's batches
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
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.rows.launch import ELEMENTS, Kernel, blocks_for, c_struct, cuda_runtime, kernel
from w2v.rows.ops import View
from w2v.system.files import one_line
from w2v.word2vec.batch import Batch, Grads, RowGrads, StepState, zeros_by_step
from w2v.word2vec.cuda import CudaKernels, with_room
from w2v.word2vec.exchange import Exchange, PlannedBatch


@dataclass(eq=False)
class PeerExchange(Exchange):
    """Exchange of ranks on GPUs of one host.

    The CPU never knows how many rows a batch has: what it knows of them is the slot of their list.
    """

    kernels: CudaKernels
    state: StepState  # its fault is shared with the other ranks
    memory: InitVar[PeerMemory]
    view: InitVar[View]  # this rank's records, of all pages
    most: int  # rows that a batch touches

    def __post_init__(self, memory: PeerMemory, view: View) -> None:
        shape, most = self.kernels.shape, self.most
        size, device = shape.world_size, shape.device
        # While a page is listed, lists of the two pages before it may be read; and the count of the
        # list after the last becomes 0.
        slots = 3 * self.batches_per_page + 1
        rows = torch.empty(slots, most, dtype=torch.int32, device=device)
        counts = torch.zeros(slots, dtype=torch.int64, device=device)
        buffers = with_room(None, most, shape.rows, shape)
        self._lists = [
            buffers._replace(rows_U=rows[slot], row_count=counts[slot]) for slot in range(slots)
        ]
        self._marks: Tensor | None = None
        if view.slot_of_A is not None:  # rows are paged
            marks = 2, size, shape.shard_rows
            self._marks = torch.zeros(marks, dtype=torch.bool, device=device)
        self._shared = c_struct("unique.cuh", "Peer")(
            records=view.records_SR,
            slot_of=view.slot_of_A,
            grads=buffers.grad_UD,
            pairs=buffers.pairs_U,
            rows=rows,
            counts=counts,
            facts=torch.zeros(3, dtype=torch.int64, device=device),
            flags=torch.zeros(2, size, dtype=torch.int32, device=device),
            marks=self._marks,
        )
        self._rank = memory.rank
        self._peers_N = torch.tensor(memory.addresses(self._shared), device=device)
        # Of the batch at hand: gradients, weights of other ranks' rows, and where a row has both.
        number_A = torch.empty(shape.rows, dtype=torch.int32, device=device)
        weight_UD = buffers.grad_UD.to(shape.dtype, copy=True)
        self._grads = RowGrads(number_A, None, buffers.grad_UD, buffers.pairs_U, None)
        # This rank's rows that any rank touches, and where each rank has their gradients.
        room = min(shape.shard_rows, size * most)
        self._owned = with_room(None, room, shape.shard_rows, shape, dim=0)
        own_places = torch.full((size, room), -1, dtype=torch.int32, device=device)
        places = c_struct("unique.cuh", "Places")(peers=self._peers_N, places=own_places, room=room)
        self._bind(view, weight_UD, places)
        self._losses = zeros_by_step(device, torch.float64)
        self._pairs = zeros_by_step(device, torch.int64)
        self._lists_made = self._pages = self._meetings = 0  # so far

    def _bind(self, view: View, weight_UD: Tensor, places: Any) -> None:
        """Bind what all launches share; `weight_UD` is for borrowed rows."""
        shape, rank, lists = self.kernels.shape, self._rank, self._lists
        begin = (weight_UD.data_ptr() - view.records_SR.data_ptr()) // weight_UD.element_size()
        borrowed = c_struct("gradients.cu", "Borrowed")(begin=begin, me=rank)
        self.kernels.read_peers(shape.world_size, places, borrowed)
        self._rows_borrowed = torch.zeros((), dtype=torch.int64, device=shape.device)  # so far
        self._borrow = self._kernel("borrow_from_peers").bind(
            index=self._grads.index_A,
            weights=weight_UD,
            row_width=view.records_SR.shape[1],
            dim=shape.dim,
            own=self._owned,
            borrowed=self._rows_borrowed,
            places=places,
            me=rank,
            most=self.most,
        )
        mark, following = self._kernel("mark_listed"), [*lists[1:], lists[0]]
        self._mark_listed = [
            mark.bind(rows=rows, rows_each=shape.shard_rows, next_count=later.row_count)
            for rows, later in zip(lists, following, strict=True)
        ]
        self._meet_to_step = self._kernel("meet_to_step").bind(peers=self._peers_N, me=rank)
        self._mark_blocks, self._borrow_blocks = blocks_for(self.most), blocks_for(4 * self.most)

    def _kernel(self, name: str) -> Kernel:
        shape = self.kernels.shape
        element, wide = ELEMENTS[shape.dtype], 1 if shape.dim % 4 else 4
        return kernel("peers.cu", name, RANKS=shape.world_size, ELEMENT=element, WIDE=wide)

    def plan(self, page: Sequence[Batch]) -> list[PlannedBatch]:
        self._pages += 1
        marks_NA = None
        if self._marks is not None:
            marks_NA = self._marks[self._pages % 2].zero_()
        return [PlannedBatch(batch, self._list(batch, marks_NA)) for batch in page]

    def _list(self, batch: Batch, marks_NA: Tensor | None) -> int:
        """List the unique rows of a batch; return the slot of the list."""
        slot = self._lists_made % len(self._lists)
        self._lists_made += 1
        self.kernels.list_unique(batch, self._lists[slot])
        self._mark_listed[slot](self._mark_blocks, marks=marks_NA)
        return slot

    def mark(self, page: list[PlannedBatch], marks_A: Tensor) -> None:
        # One block waits for the other ranks. More could fill this GPU and hold up its steps, for
        # which the others wait.
        self._kernel("meet_to_plan")(1, peers=self._peers_N, me=self._rank, turn=self._pages)
        self._kernel("gather_marks")(
            blocks_for(marks_A.shape[0]),
            peers=self._peers_N,
            me=self._rank,
            page=self._pages % 2,
            rows_each=self.kernels.shape.shard_rows,
            rows=marks_A.shape[0],
            marks=marks_A,
        )

    def borrow(self, planned: PlannedBatch, view: View) -> tuple[Grads, View]:
        # Waits until all ranks have stepped their rows. Also lists the rows of this rank that any
        # rank's batch touches.
        self._meetings += 1
        self._borrow(self._borrow_blocks, slot=planned.rows, turn=self._meetings)
        return Grads(self._grads, next(self._losses), next(self._pairs)), view

    def reduce(self, grads: Grads) -> Grads:
        # Gradients stay where they are, for `optimizer_step` to read.
        self._meetings += 1
        fault = self.state.fault
        self._meet_to_step(1, fault=fault, loss=grads.loss, pairs=grads.pairs, turn=self._meetings)
        return grads._replace(rows=self._owned)

    @property
    def bytes_sent(self) -> int:
        # A weight comes for each gradient that goes.
        shape = self.kernels.shape
        return int(self._rows_borrowed) * shape.dim * (shape.dtype.itemsize + 4)


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
