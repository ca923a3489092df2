"""The processes that train one model together, one a GPU, as torchrun starts them: which one this is, and what they tell each other.

Rows are dealt in turn: row `v` of a table is row `v // size` of the shard that rank `v % size` holds. Facts that the CPU has go through
Gloo; tensors go through NCCL where they are on a GPU, on torch's current stream.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from w2v.distributed import launcher as torchrun
from w2v.distributed.launcher import RankLost

PATIENCE = timedelta(seconds=60)  # with a rank that does not answer while all of them train
LONG_PATIENCE = timedelta(hours=4)  # with the one that scores or writes for all
BEAT_SECONDS = 1.0  # after which all ranks hear of each other again


class RanksDiffer(ValueError):
    """What must be the same on all ranks is not; the message is one line that names it, its values and the ranks."""


class Ranks:
    """This process among those that train together; by itself, a process alone, for which nothing has to be sent.

    rank: this one's number, from 0; size: how many there are; local_rank, local_size: the same among those of this host.
    """

    rank, size, local_rank, local_size = 0, 1, 0, 1
    bytes_sent = 0  # of rows, to other ranks

    def all_gather(self, fact: Any, behind: bool = False) -> list[Any]:
        """What each rank gives, in their order; all ranks wait for each other.

        behind: for the thread that works behind the training, whose calls have an order of their own.
        """
        return [fact]

    def all_gather_async(self, *numbers: float) -> Callable[[], list[list[float]]]:
        """As `gather`, for a few numbers of each step; only the call of what it gives waits for the other ranks."""
        return lambda: [list(numbers)]

    def all_to_all(
        self, rows_NX: Tensor, sent: Sequence[int], received: Sequence[int], ahead: bool = False
    ) -> Tensor:
        """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, ...; give what came, `received[0]` rows from rank 0, ...

        ahead: for what is sent while the steps before are computed, beside what these send.
        """
        return rows_NX

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a small tensor, which becomes it."""
        return numbers

    def shard_rows(self, total: int) -> int:
        """How many of a table's `total` rows this rank holds."""
        return -(-(total - self.rank) // self.size)

    def global_rows(self, rows_n: Tensor) -> Tensor:
        """Which rows of the whole table those of this rank's shard are."""
        return rows_n * self.size + self.rank

    def fetch_rows(self, shard_nX: Tensor, rows_U: Tensor) -> Tensor:
        """These rows of a whole table, float32, whoever holds them; all ranks ask for the same."""
        rows_U = rows_U.to(shard_nX.device)
        mine_U = rows_U % self.size == self.rank
        picked_UX = torch.zeros(len(rows_U), *shard_nX.shape[1:], device=shard_nX.device)
        picked_UX[mine_U] = shard_nX[rows_U[mine_U] // self.size].float()
        return self.all_reduce(picked_UX)

    @contextmanager
    def reraise(self, behind: bool = False) -> Iterator[None]:
        """An error that a user can mend, in the block of any rank, is raised by all: the first one's, which then says `of` which rank it
        is. No rank may wait for others in the block."""
        mine: Exception | None = None
        try:
            yield
        except (ValueError, MemoryError, OSError) as error:
            mine = error
        for rank, theirs in enumerate(self.all_gather(mine, behind)):
            if theirs is not None:
                failed: Any = mine if rank == self.rank else theirs
                failed.of = rank
                raise failed

    def require_equal(
        self, facts: Mapping[str, Any], remedy: str = "start all ranks alike"
    ) -> None:
        """Raise `RanksDiffer` where a fact is not the same on all ranks."""
        of_ranks = self.all_gather(dict(facts))
        for name in dict.fromkeys(name for known in of_ranks for name in known):
            values = [known.get(name) for known in of_ranks]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                differ: Any = RanksDiffer(
                    f"{name} is {values[0]} for rank 0, but {values[other]} for rank {other}; {remedy}"
                )
                differ.of = 0
                raise differ

    def leads(self, folder: Path) -> bool:
        """Whether this is the first of the ranks that see this very folder, of all or of a host; where none can write, of its host."""
        return True

    def leave(self) -> None:
        """Need each other no more; all ranks say so, when what they do together is done."""


SINGLE = Ranks()


class ProcessGroup(Ranks):
    """The ranks that torchrun has started, on CPUs or each with a GPU of its own. Raises `RankLost` where another one is gone."""

    def __init__(self, device: str):
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank, self.local_size = (
            int(os.environ["LOCAL_RANK"]),
            int(os.environ["LOCAL_WORLD_SIZE"]),
        )
        how: dict[str, Any] = {"rank": self.rank, "world_size": self.size, "timeout": PATIENCE}
        if (
            device == "cuda"
        ):  # after its timeout NCCL shall end the process, and not first wait to give back what the GPU still uses
            os.environ |= {
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
                "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
            }
        with torchrun.ended_by_signals(), self._answering():
            store, *_ = next(dist.rendezvous("env://", timeout=PATIENCE))
            # What torchrun starts again would find the addresses of ranks that are gone: its store outlives them.
            store = dist.PrefixStore(f"start {torchrun.starts()}", store)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, **how
            )
            self._facts = dist.new_group(backend="gloo", timeout=LONG_PATIENCE)
            self._behind = dist.new_group(backend="gloo", timeout=LONG_PATIENCE)
            self._ahead = dist.new_group(timeout=PATIENCE)
            self._beats = dist.new_group(backend="gloo", timeout=LONG_PATIENCE)
        self._parting = threading.Event()
        self._watching = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watching.start()

    def all_gather(self, fact: Any, behind: bool = False) -> list[Any]:
        facts: list[Any] = [None] * self.size
        with self._answering():
            dist.all_gather_object(facts, fact, group=self._behind if behind else self._facts)
        return facts

    def leads(self, folder: Path) -> bool:
        token = self.all_gather(uuid4().hex)[0]
        marks = [folder / f".rank-{token}-{rank}" for rank in range(self.size)]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            marks[
                self.rank
            ].touch()  # a name that nobody has looked for, so that no network file system remembers that it is missing
        self.all_gather(None)
        first = next((rank for rank, mark in enumerate(marks) if mark.exists()), None)
        self.all_gather(None)
        with contextlib.suppress(OSError):
            marks[self.rank].unlink()
        return first == self.rank or (first is None and self.local_rank == 0)

    def all_gather_async(self, *numbers: float) -> Callable[[], list[list[float]]]:
        mine = torch.tensor(numbers, dtype=torch.float64)
        all_of_them = torch.empty(self.size, len(numbers), dtype=torch.float64)
        with self._answering():
            told = dist.all_gather(list(all_of_them), mine, async_op=True)

        def agreed() -> list[list[float]]:
            with self._answering():
                told.wait()
            return all_of_them.tolist()

        return agreed

    def all_to_all(
        self, rows_NX: Tensor, sent: Sequence[int], received: Sequence[int], ahead: bool = False
    ) -> Tensor:
        came = rows_NX.new_empty(sum(received), *rows_NX.shape[1:])
        self.bytes_sent += (
            (sum(sent) - sent[self.rank]) * math.prod(rows_NX.shape[1:]) * rows_NX.element_size()
        )
        with self._answering():
            dist.all_to_all_single(
                came, rows_NX, list(received), list(sent), group=self._ahead if ahead else None
            )
        return came

    def all_reduce(self, numbers: Tensor) -> Tensor:
        with self._answering():
            dist.all_reduce(numbers)
        return numbers

    def leave(self) -> None:
        self._parting.set()
        self._watching.join()  # until all ranks part; without one of them it does not return
        dist.destroy_process_group()

    def _watch(self) -> None:
        """Hear that a rank has died, even while the main thread waits for a GPU that waits for that rank; until all of them part."""
        parting = torch.zeros(1)
        try:
            with self._answering():
                while parting < self.size:
                    parting.fill_(self._parting.wait(BEAT_SECONDS))
                    dist.all_reduce(parting, group=self._beats)
        except RankLost as lost:
            torchrun.give_up(lost)

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            what = " ".join(str(error).split())[:200]
            raise RankLost(f"another of {self.size} ranks is lost: {what}") from error
