"""Engines against the plain tensor operations that they stand for."""

import pytest
import torch

from w2v.model.table import RowState, Table
from w2v.transfer import staged, streams, timing
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident
from w2v.transfer.timing import Waits


def engine_for(storage):
    if storage == "pinned":
        return Paged(Mapped())
    return Resident()


@pytest.mark.parametrize(
    "storage",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.gpu),
        pytest.param("pinned", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dim, states", [(32, 0), (100, 2), (128, 2), (300, 1), (1, 0)])
@pytest.mark.parametrize("count", [0, 1, 37, 5000])
def test_fetch_and_write_back_move_exactly_the_rows_asked_for(storage, dim, states, count):
    device = "cpu" if storage == "cpu" else "cuda"
    table = Table(
        "input", 5000, dim, {f"state{i}": RowState(dim, 0.0) for i in range(states)}, {}, storage
    )
    before = torch.randn(table.records_VR.shape, generator=torch.Generator().manual_seed(0))
    table.records_VR.copy_(before)
    rows = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:count].sort().values
    engine = engine_for(storage)

    page = engine.fetch(table, rows.to(device))
    assert page.records_UR.device.type == device
    assert torch.equal(page.records_UR.cpu(), before[rows])
    assert torch.equal(page["weight"].cpu(), before[rows, :dim])

    page.records_UR.mul_(2)
    engine.flush()
    assert torch.equal(table.records_VR.cpu(), before)  # nothing is written before write_back
    engine.write_back(page)
    engine.flush()
    before[rows] *= 2
    assert torch.equal(table.records_VR.cpu(), before)


class Copies:
    """Stands for the CUDA event of a buffer: a copy is under way from `record` until it is waited for."""

    under_way = False

    def record(self):
        assert not self.under_way, "the buffer was used again while its last copy was under way"
        self.under_way = True

    def synchronize(self):
        self.under_way = False


def test_staged_buffers_are_used_again_only_when_their_last_copy_is_done(monkeypatch):
    """Reads and writes in turn, of more records than the ring has room for; without a GPU the copies themselves are immediate."""
    table = Table("input", 100, 32, {}, {}, "cpu")
    before = torch.randn(100, 32, generator=torch.Generator().manual_seed(0))
    table["weight"].copy_(before)
    monkeypatch.setattr(staged, "BUFFER_BYTES", 4 * 128)  # of four records
    link, records = staged.Staged(), torch.zeros(60, 32)
    link._ring = [
        (torch.empty(staged.BUFFER_BYTES, dtype=torch.uint8), Copies()) for _ in range(staged.RING)
    ]
    rows, slots = torch.arange(3, 93, 3), torch.arange(59, 29, -1)
    for _ in range(2):
        link.read(table, rows, records, slots)
        assert torch.equal(records[slots], before[rows])
        records[slots] *= 2
        link.write(table, rows, records, slots)
        before[rows] *= 2
        assert torch.equal(table["weight"], before)


class Mark:
    """An event of a stream that has come as far as `passed`, a millisecond for each event."""

    made, passed = 0, 0

    def record(self, stream):
        Mark.made += 1
        self.at = Mark.made

    def query(self):
        return self.at <= Mark.passed

    def elapsed_time(self, after):
        assert after.query()
        return after.at - self.at


def test_waits_count_once_they_are_over_and_no_one_waits_for_that(monkeypatch):
    monkeypatch.setattr(Mark, "made", 0)
    created = []
    waits = Waits(lambda: created.append(Mark()) or created[-1])
    for passed, seconds in ((0, 0), (0, 0), (5, 0.002), (8, 0.004), (8, 0.004), (12, 0.006)):
        monkeypatch.setattr(Mark, "passed", passed)
        with waits.counted(stream=None):
            pass
        assert waits.seconds == pytest.approx(seconds)
    assert len(created) < 12  # those that have passed are used again


def test_copies_are_as_fast_as_they_are(monkeypatch):
    monkeypatch.setattr(timing, "MOVED_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "SECONDS", 0.01)
    assert 1e8 < timing.copies(torch.device("cpu")) < 1e12


@pytest.mark.gpu
def test_the_current_stream_is_the_one_that_work_goes_to():
    own = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    for stream in (torch.cuda.default_stream(), *own, own[0]):
        with streams.on(stream):
            assert streams.current() == torch.cuda.current_stream() == stream
            assert streams.current().cuda_stream == stream.cuda_stream


@pytest.mark.gpu
def test_a_stream_waits_as_long_as_its_moves_take():
    table = Table("input", 1 << 20, 128, {}, {}, "pinned")
    engine, rows = Paged(Mapped()), torch.arange(1 << 20, device="cuda")
    page = engine.fetch(table, rows)
    engine.flush()
    read, rate = engine.waited, timing.copies(torch.device("cuda"))
    assert rate > 1e9 and 0.2 < read * rate / table.bytes < 20
    engine.write_back(page)
    engine.flush()
    assert engine.waited > 1.2 * read
