"""Rows stay on the GPU while there is room; what the next steps add comes over the link, and what has to go goes back, meanwhile.

A store of S slots on the GPU holds records of all tables, each row in one slot at most: that slot owns the row until it is written
back, so a row is never in two places and overlap changes no result. Three kinds of work run beside the computation:

    plan     which rows are missing, which slots they get, which rows must go (the caller's stream)
    reads    missing rows, CPU memory -> slots
    writes   rows that go, slots -> CPU memory

Steps `t` compute while the rows of steps `t + 1` are read. Rows of either are never written back then, so reads and writes touch
different rows and run at once. What orders them: reads wait for the writes planned before, whose rows and slots they may take up; the
computation waits for its reads; and a plan waits for the computation before the current one, whose rows it may send away.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from w2v.batch import Held, Page
from w2v.config import ConfigError
from w2v.table import Table
from w2v.transfer import Link, Wanted


class Cached:
    """Moves rows over `link` only when they are not in one of the `slots` on the `device`.

    G numbers the rows of all tables, one table after another; S as a slot means "not on the GPU".
    """

    pages = True

    def __init__(self, link: Link, tables: Sequence[Table], slots: int, device: torch.device):
        assert len({table.width for table in tables}) == 1, "the slots of a store hold records of one width"
        self.link, self.tables, self.slots = link, list(tables), slots
        self.rows_read = self.rows_written = 0
        firsts = [sum(table.rows for table in tables[:i]) for i in range(len(tables) + 1)]
        self._firsts = torch.tensor(firsts, device=device)  # where each table's rows begin in G, and the end
        self._first = dict(zip(map(id, tables), firsts, strict=False))
        self._records_SR = torch.empty(slots, tables[0].width, dtype=tables[0].records_VR.dtype, device=device)
        self._slot_of_G = torch.full((firsts[-1],), slots, dtype=torch.int32, device=device)
        self._row_of_S = torch.full((slots,), -1, device=device)  # in G; -1 where the slot is free
        self._plan_of_S = torch.zeros(slots + 1, dtype=torch.int32, device=device)  # the last plan that wanted the slot's row
        self._free = torch.arange(slots, device=device)  # free slots, the longest free first
        self._plan = 0
        self._reads, self._writes = (torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None for _ in range(2))
        self._planned = None if self._reads is None else torch.cuda.current_stream().record_event()
        self._waiting: Wanted = ()  # rows for which there was no room beside those in use
        self._held: deque[tuple[Tensor, ...]] = deque(maxlen=3)  # tensors of the last plans, which other streams may still use

    def prefetch(self, wanted: Wanted) -> None:
        """Plan on the current stream, and start the moves, for the steps after those that compute now."""
        self._plan += 1
        if not self._bring(wanted, in_use=self._plan - 1):
            self._waiting = wanted

    def hold(self, table: Table) -> Held:
        if self._waiting:
            self._bring_at_last()
        if self._reads:
            torch.cuda.current_stream().wait_stream(self._reads)
        first = self._first[id(table)]
        return Held(self._records_SR, self._slot_of_G[first : first + table.rows])

    def fetch(self, table: Table, rows_U: Tensor) -> Page:
        slots_U = self.hold(table).slot_of_V[rows_U].long()
        return Page(table, rows_U, self._records_SR.index_select(0, slots_U).float(), table.columns, slots_U=slots_U)

    def write_back(self, page: Page) -> None:
        self._records_SR.index_copy_(0, page.slots_U, page.table.encode(page.rows_U, page.records_UR))

    def flush(self) -> None:
        self._join()
        here = torch.nonzero(self._row_of_S >= 0).flatten()
        rows, order = self._row_of_S[here].sort()
        (by_table,) = self._by_table(rows)
        for table, part in by_table:
            self.link.write(table, rows[part] - self._first[id(table)], self._records_SR, here[order][part])
        if self._reads:
            torch.cuda.current_stream().synchronize()

    def _bring_at_last(self) -> None:
        """Bring the rows that found no room beside those of the steps before, which have been computed by now."""
        self._join()
        wanted, self._waiting = self._waiting, ()
        if not self._bring(wanted, in_use=self._plan):
            rows = sum(len(rows) for _, rows in wanted)
            raise ConfigError(
                f"transfer.gpu_bytes has room for {self.slots:,} rows on the GPU, but {rows:,} are needed at once; "
                "raise it, or lower train.batch_size, transfer.steps_per_page or model.negative_pool"
            )

    def _bring(self, wanted: Wanted, in_use: int) -> bool:
        """Give each wanted row a slot and start the moves; False, with all as it was, where there is no room.

        Slots whose rows a plan numbered `in_use` or higher wants are not emptied.
        """
        if self._planned:
            torch.cuda.current_stream().wait_event(self._planned)
        rows = torch.cat([rows_U + self._first[id(table)] for table, rows_U in wanted])
        slots = self._slot_of_G[rows].long()
        self._plan_of_S.index_fill_(0, slots, self._plan)
        coming = rows[slots == self.slots]
        self._held.append((rows, slots, coming))
        if not len(coming):
            return True
        lacking = len(coming) - len(self._free)
        # Where it must empty slots, it empties as many again: the next plan then has free ones and its reads need not wait.
        leaving = self._leaving(lacking + len(coming), in_use) if lacking + len(coming) > 0 else coming[:0]
        if len(leaving) < lacking:
            return False
        left = self._slot_of_G[leaving].long()
        self._slot_of_G.index_fill_(0, leaving, self.slots)
        self._row_of_S.index_fill_(0, left, -1)
        available = torch.cat([self._free, left])
        taken, self._free = available[: len(coming)], available[len(coming) :]
        self._slot_of_G[coming] = taken.int()
        self._row_of_S[taken] = coming
        self._plan_of_S.index_fill_(0, taken, self._plan)
        self._move(coming, taken, leaving, left, reads_wait=lacking > 0)
        self.rows_read, self.rows_written = self.rows_read + len(coming), self.rows_written + len(leaving)
        return True

    def _leaving(self, count: int, in_use: int) -> Tensor:
        """At most `count` rows to send away, sorted: of those not in use the least frequent, which have the highest row numbers."""
        rows = self._row_of_S[(self._row_of_S >= 0) & (self._plan_of_S[:-1] < in_use)]
        in_table = rows - self._firsts[torch.bucketize(rows, self._firsts, right=True) - 1]
        return rows[in_table.topk(min(count, len(rows)), sorted=False).indices].sort().values

    def _move(self, coming: Tensor, taken: Tensor, leaving: Tensor, left: Tensor, reads_wait: bool) -> None:
        """Start to write back `leaving` rows from their slots `left` and to read `coming` ones into slots `taken`."""
        reads, writes = self._by_table(coming, leaving)
        self._held[-1] += (taken, leaving, left)
        if self._reads:
            self._planned = torch.cuda.current_stream().record_event()
            self._reads.wait_stream(self._writes)  # the writes planned before this
            self._reads.wait_event(self._planned)
            self._writes.wait_event(self._planned)
        with _on(self._writes):
            for table, part in writes:
                self.link.write(table, leaving[part] - self._first[id(table)], self._records_SR, left[part])
        if self._reads and reads_wait:
            self._reads.wait_stream(self._writes)
        with _on(self._reads):
            for table, part in reads:
                self.link.read(table, coming[part] - self._first[id(table)], self._records_SR, taken[part])

    def _by_table(self, *rows: Tensor) -> list[list[tuple[Table, slice]]]:
        """Which part of the rows, sorted and in G, belongs to each table; for each tensor of rows."""
        all_cuts = torch.stack([torch.searchsorted(some, self._firsts) for some in rows]).tolist()
        return [
            [(table, slice(*cut)) for table, cut in zip(self.tables, pairwise(cuts), strict=True) if cut[0] < cut[1]] for cuts in all_cuts
        ]

    def _join(self) -> None:
        """Have the current stream wait for all plans and moves."""
        if self._reads:
            current = torch.cuda.current_stream()
            current.wait_event(self._planned)
            current.wait_stream(self._reads)
            current.wait_stream(self._writes)


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return torch.cuda.stream(stream) if stream else contextlib.nullcontext()
