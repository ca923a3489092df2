"""Links against plain indexing of the tables, and their measured rates."""

import pytest
import torch

from tests.support.each_case import each_case
from w2v.rows import link as links
from w2v.rows.link import Link, MappedLink, StagedLink, link_between
from w2v.rows.table import RowState, Table

ROWS = 5000
GPU = pytest.mark.gpu
# Storage of the table, and the compute device.
PLACES = {
    "cpu": ("cpu", "cpu", Link),
    "cuda": ("cuda", "cuda", Link),
    "mapped": ("pinned", "cuda", MappedLink),
    "staged": ("cpu", "cuda", StagedLink),
}
LINKS = ["cpu", *(pytest.param(name, marks=GPU) for name in ("cuda", "mapped", "staged"))]


def random_table(storage, dim=32, states=0, rows=ROWS):
    """Return a table and a copy of its random records."""
    states = {f"state{i}": RowState(dim, 0.0) for i in range(states)}
    table = Table("input", rows, dim, states, {}, storage)
    records = torch.randn(table.records_VR.shape, generator=torch.Generator().manual_seed(0))
    table.records_VR.copy_(records)
    return table, records


def random_rows(count, most=ROWS, seed=1):
    return torch.randperm(most, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("place", LINKS)
@pytest.mark.parametrize("with_slots", [False, True])
@each_case(
    "dim, states, count",
    [
        (dim, states, count)
        for dim, states in [(32, 0), (100, 2), (128, 2), (300, 1), (1, 0)]
        for count in (0, 1, 37, ROWS)
    ],
)
def test_read_and_write_move_exactly_the_given_rows(place, with_slots, dim, states, count):
    storage, device, kind = PLACES[place]
    table, expected = random_table(storage, dim, states)
    link = link_between(table, torch.device(device))
    assert type(link) is kind
    rows = random_rows(count).sort().values
    slots = random_rows(count, count + 9, seed=2) if with_slots else torch.arange(count)
    given = slots.to(device) if with_slots else None
    buffer = torch.full((count + 9 * with_slots, table.width), -1.0, device=device)

    link.read(rows.to(device), buffer, given)
    assert torch.equal(buffer.cpu()[slots], expected[rows])
    assert (buffer == -1).all(1).sum() == len(buffer) - count

    buffer.mul_(2)
    link.write(rows.to(device), buffer, given)
    if device == "cuda":
        torch.cuda.synchronize()
    expected[rows] *= 2
    assert torch.equal(table.records_VR.cpu(), expected)


class Copy:
    """Fake CUDA event: a copy is pending from `record` to `synchronize`."""

    under_way = False

    def record(self):
        assert not self.under_way, "the buffer was reused while its last copy was under way"
        self.under_way = True

    def synchronize(self):
        self.under_way = False


def test_staged_buffers_are_reused_only_after_their_last_copy(monkeypatch):
    # More records than the ring has room for; without a GPU the copies themselves are immediate.
    monkeypatch.setattr(links, "BUFFER_BYTES", 4 * 128)
    table, expected = random_table("cpu", rows=100)
    link, buffer = StagedLink(table.records_VR), torch.zeros(60, 32)
    link._ring = [(torch.empty(4 * 128, dtype=torch.uint8), Copy()) for _ in range(links.RING)]
    rows, slots = torch.arange(3, 93, 3), torch.arange(59, 29, -1)
    for _ in range(2):
        link.read(rows, buffer, slots)
        assert torch.equal(buffer[slots], expected[rows])
        buffer[slots] *= 2
        link.write(rows, buffer, slots)
        expected[rows] *= 2
        assert torch.equal(table.records_VR, expected)
