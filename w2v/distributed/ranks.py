"""Ranks: the processes, one per GPU, that train one model together.

Row `v` of a table is row `v // size` of the shard of rank `v % size`.
Python objects and numbers travel through Gloo; tensors on a GPU through NCCL, on torch's current
stream, or through Gloo where ranks share a GPU, which NCCL does not do.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from w2v.distributed import launcher
from w2v.distributed.launcher import RankLost
from w2v.system.files import one_line
from w2v.system.process import ended_by_signals

TIMEOUT = timedelta(seconds=60)  # for a rank that does not answer while all train
LONG_TIMEOUT = timedelta(hours=4)  # while one rank scores or writes files for all
HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TIMEOUT = timedelta(seconds=20)  # a machine that is cut off closes no connection


class RanksDiffer(ValueError):
    """A setting differs between ranks; the message names its values."""


class Ranks:
    """A single process, and the interface of several."""

    rank, size = 0, 1  # number of this process, and how many there are
    local_size = 1  # processes on this host
    bytes_sent = 0  # of rows, to other ranks

    def all_gather(self, fact: Any, group: str = "main") -> list[Any]:
        """Return the objects of all ranks, by rank; all wait for each other.

        The thread that writes checkpoints passes group="background": its calls have an order of
        their own.
        """
        return [fact]

    def all_gather_async(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        """Start to gather numbers; the result waits and returns them by rank."""
        return lambda: [list(numbers)]

    def all_to_all(
        self, rows_NX: Tensor, sent: Sequence[int], received: Sequence[int], group: str = "main"
    ) -> Tensor:
        """Send rows to all ranks and return those received, in rank order.

        sent[r] rows go to rank r, received[r] come from it. Calls that run beside the training
        steps pass group="prefetch"; those between which a rank writes files, group="export".
        """
        return rows_NX

    def all_to_all_tensors(
        self,
        tensors: Sequence[Tensor],
        sent: Sequence[Sequence[int]],
        received: Sequence[Sequence[int]],
        group: str = "main",
    ) -> list[Tensor]:
        """Do as `all_to_all` for the rows of several tensors at once.

        They may have rows of different sizes.
        """
        if len(tensors) == 1:
            return [self.all_to_all(tensors[0].contiguous(), sent[0], received[0], group)]
        widths = [math.prod(tensor.shape[1:]) for tensor in tensors]
        sent, received = (
            [[n * width for n in rows] for rows, width in zip(counts, widths, strict=True)]
            for counts in (sent, received)
        )
        # By rank first, then by tensor, as the all-to-all wants it; and back.
        parts = [tensor.flatten().split(sizes) for tensor, sizes in zip(tensors, sent, strict=True)]
        numbers = torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])
        sent, received = (list(zip(*counts, strict=True)) for counts in (sent, received))
        sums = list(map(sum, sent)), list(map(sum, received))
        pieces = self.all_to_all(numbers, sums[0], sums[1], group).split([*chain(*received)])
        return [
            torch.cat(pieces[n :: len(tensors)]).view((-1, *tensor.shape[1:])).to(tensor.dtype)
            for n, tensor in enumerate(tensors)
        ]

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Sum a small tensor over all ranks, in place."""
        return numbers

    def shard_rows(self, total: int) -> int:
        """Return how many of a table's `total` rows this rank owns."""
        return -(-(total - self.rank) // self.size)

    def global_rows(self, rows_n: Tensor) -> Tensor:
        """Return the rows of the whole table that rows of this rank's shard are."""
        return rows_n * self.size + self.rank

    def fetch_rows(self, shard_nX: Tensor, rows_U: Tensor) -> Tensor:
        """Return float32 rows of the whole table; all ranks pass equal ids."""
        rows_U = rows_U.to(shard_nX.device)
        mine_U = rows_U % self.size == self.rank
        # The owner fills in a row; all others add zeros to it.
        rows_UX = torch.zeros((len(rows_U), *shard_nX.shape[1:]), device=shard_nX.device)
        rows_UX[mine_U] = shard_nX[rows_U[mine_U] // self.size].float()
        return self.all_reduce(rows_UX)

    @contextmanager
    def reraise(self, group: str = "main") -> Iterator[None]:
        """Re-raise on every rank the first rank's user error from the block.

        The error's `failed_rank` is that rank. The block must not wait for other ranks.
        """
        own: Exception | None = None
        # A rank that fails must still gather, or the others would wait for it.
        try:
            yield
        except (ValueError, MemoryError, OSError) as error:
            own = error
        for rank, copy in enumerate(self.all_gather(own, group)):
            if copy is not None:
                # A copy has lost its traceback: raise the error itself on its own rank.
                failure: Any = own if rank == self.rank else copy
                failure.failed_rank = rank
                raise failure

    def require_equal(self, facts: Mapping, remedy: str = "start all ranks alike") -> None:
        """Raise `RanksDiffer` if a fact differs between ranks."""
        of_ranks = self.all_gather(dict(facts))
        # Ranks may not even know the same names.
        for name in dict.fromkeys(name for known in of_ranks for name in known):
            values = [known.get(name) for known in of_ranks]
            for rank, value in enumerate(values):
                if value != values[0]:
                    error: Any = RanksDiffer(
                        f"{name} is {values[0]} for rank 0, but {value} for rank {rank}; {remedy}"
                    )
                    error.failed_rank = 0
                    raise error

    def leave(self) -> None:
        """Leave the group, once all ranks call this."""


SINGLE = Ranks()


class ProcessGroup(Ranks):
    """The ranks that torchrun has started, on CPUs or on one GPU each.

    All methods raise `RankLost` when another rank has exited or does not answer in time.
    """

    def __init__(self, device: str):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_size = int(os.environ["LOCAL_WORLD_SIZE"])
        if device == "cuda":
            # After a timeout NCCL ends the process without waiting for the GPU to finish.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
            os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "1000"
        with ended_by_signals(), self._raising_rank_lost():
            store = self._store()
            # torchrun's store outlives a restart: keep the addresses of lost ranks apart.
            store = dist.PrefixStore(f"start {launcher.restarts()}", store)
            by_nccl = device == "cuda" and self.local_size <= torch.cuda.device_count()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if by_nccl else "gloo",
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=TIMEOUT,
            )
            # One group per thread or stream: all ranks must make a group's calls in one order.
            self._object_groups = {
                name: dist.new_group(backend="gloo", timeout=LONG_TIMEOUT)
                for name in ("main", "background")
            }
            self._row_groups = {"main": None, "export": self._object_groups["main"]}
            self._row_groups["prefetch"] = dist.new_group(timeout=TIMEOUT)
            self._heartbeats = dist.new_group(backend="gloo", timeout=HEARTBEAT_TIMEOUT)
        self._leaving = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def _store(self) -> dist.Store:
        """Connect to the store by which the ranks find each other."""
        try:
            return next(dist.rendezvous("env://", timeout=TIMEOUT))[0]
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            port = f"MASTER_PORT={launcher.number('MASTER_PORT')}"
            raise ValueError(
                f"{port} is in use on this host; set another port for all ranks"
            ) from error

    def all_gather(self, fact: Any, group: str = "main") -> list[Any]:
        facts: list[Any] = [None] * self.size
        with self._raising_rank_lost():
            dist.all_gather_object(facts, fact, group=self._object_groups[group])
        return facts

    def all_gather_async(self, numbers: Sequence[float]) -> Callable[[], list[list[float]]]:
        own = torch.tensor(numbers, dtype=torch.float64)
        of_ranks = torch.empty(self.size, len(numbers), dtype=torch.float64)
        with self._raising_rank_lost():
            gathering = dist.all_gather(list(of_ranks), own, async_op=True)

        def gathered() -> list[list[float]]:
            with self._raising_rank_lost():
                gathering.wait()
            return of_ranks.tolist()

        return gathered

    def all_to_all(
        self, rows_NX: Tensor, sent: Sequence[int], received: Sequence[int], group: str = "main"
    ) -> Tensor:
        # What a rank sends to itself does not count.
        row_bytes = math.prod(rows_NX.shape[1:]) * rows_NX.element_size()
        self.bytes_sent += (sum(sent) - sent[self.rank]) * row_bytes
        received_MX = rows_NX.new_empty((sum(received), *rows_NX.shape[1:]))
        among = self._row_groups[group]
        with self._raising_rank_lost():
            dist.all_to_all_single(received_MX, rows_NX, list(received), list(sent), group=among)
        return received_MX

    def all_reduce(self, numbers: Tensor) -> Tensor:
        with self._raising_rank_lost():
            dist.all_reduce(numbers)
        return numbers

    def leave(self) -> None:
        self._leaving.set()
        self._watcher.join()  # until all ranks leave, or one is lost and this process exits
        dist.destroy_process_group()

    def _watch(self) -> None:
        """Exchange heartbeats until all ranks leave; exit if one is lost.

        The main thread may not notice the loss: it may wait for a GPU that waits for that rank.
        """
        leaving = torch.zeros(1)
        try:
            with self._raising_rank_lost():
                while leaving < self.size:
                    leaving.fill_(self._leaving.wait(HEARTBEAT_SECONDS))
                    dist.all_reduce(leaving, group=self._heartbeats)
        except RankLost as error:
            # A main thread that notices the loss, or has failed itself, reports it and exits first.
            time.sleep(2 * launcher.PAUSE_SECONDS)
            launcher.report_error(error, str(error))
            launcher.exit_now(2)

    @contextmanager
    def _raising_rank_lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            cause = one_line(error)[:200]
            if "connectFullMesh" in cause:  # such as where a host's name is that of its loopback
                cause += "; name the network that the hosts share in GLOO_SOCKET_IFNAME"
            raise RankLost(f"another of {self.size} ranks is lost: {cause}") from error


class JoinedGroup(ProcessGroup):
    """The ranks of a process group that another program has made, and leaves."""

    def __init__(self, group: dist.ProcessGroup):
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._row_groups = {"main": group}
        # Checkpoints are written while the program waits for them, so that one group will do.
        self._object_groups = {"main": group, "background": group}
        self._gpu = torch.cuda.current_device() if torch.cuda.is_available() else -1

    def all_gather(self, fact: Any, group: str = "main") -> list[Any]:
        with torch.cuda.device(self._gpu):  # each thread has a GPU of its own, at first the first
            return super().all_gather(fact, group)
