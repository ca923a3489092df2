"""Checkpoint files are written and read by any numbers of ranks."""

import math
import re

import pytest
import torch
from safetensors.torch import load_file

from tests.support.each_case import each_case
from tests.support.rank_threads import checked, raised, together
from tests.support.tables import make_tables, same
from w2v.distributed.ranks import SINGLE
from w2v.rows import checkpoint

ROWS = 23
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 280)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 140)


def write(ranks, folder, tables=None, **what):
    """Write all ranks' tables and return the entries of all files."""
    files = checkpoint.record_files(tables or make_tables(ranks, **what), ranks)
    entries = {}
    for part in ranks.all_gather(checkpoint.write_files(folder, files)):
        entries.update(part)
    return entries


def read(ranks, folder, entries, saved, rows=ROWS, **what):
    """Return this rank's tables as read from the files of `saved` ranks."""
    tables = make_tables(ranks, filled=False, rows=rows, **what)
    wanted = {table.name: (rows, table.saved_VR) for table in tables}
    checkpoint.read_files(folder, entries, wanted, saved, ranks)
    for table, expected in zip(tables, make_tables(ranks, rows=rows, **what), strict=True):
        table.scalars = expected.scalars  # which are in the manifest
    return tables


def assert_read(ranks, folder, entries, saved, **what):
    assert same(read(ranks, folder, entries, saved, **what), make_tables(ranks, **what))


@each_case("now", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_the_files_of_any_other(tmp_path, saved, now):
    entries, *_ = checked(together(saved, write, tmp_path))
    checked(together(now, assert_read, tmp_path, entries, saved))


@each_case(
    "what, saved, now",
    [
        ({"step": "row"}, 4, 2),
        ({"dtype": torch.bfloat16}, 2, 3),
        ({"dtype": torch.float64}, 1, 4),
        ({"rows": 4}, 2, 3),
        ({"rows": 4}, 3, 4),
    ],
)
def test_any_layout_and_dtype(tmp_path, what, saved, now):
    entries, *_ = checked(together(saved, lambda ranks: write(ranks, tmp_path, **what)))
    checked(together(now, lambda ranks: assert_read(ranks, tmp_path, entries, saved, **what)))


def test_files_do_not_depend_on_padding_or_strides_in_memory(tmp_path):
    padded, packed, interleaved = (make_tables(alignment=size) for size in (128, 4, 128))
    # Pinned tables may have their rows side by side in one memory.
    records_TVR = torch.stack([table.records_VR for table in interleaved], dim=1).transpose(0, 1)
    for table, table.records_VR in zip(interleaved, records_TVR, strict=True):
        assert not table.records_VR.is_contiguous()
    contents = []
    for number, tables in enumerate((padded, packed, interleaved)):
        folder = tmp_path / str(number)
        folder.mkdir()
        entries = write(SINGLE, folder, tables)
        contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert_read(SINGLE, folder, entries, 1, alignment=4)
        assert_read(SINGLE, folder, entries, 1, alignment=128)
    assert contents[0] == contents[1] == contents[2]


def test_file_names_and_content(tmp_path):
    checked(together(2, write, tmp_path))
    names = {path.name.partition("-000")[0] for path in tmp_path.iterdir()}
    assert names == {
        f"{table}-rank-{rank}-of-2" for table in ("input", "output") for rank in (0, 1)
    }
    second = sorted(tmp_path.glob("input-rank-1-*"))
    found = torch.cat([load_file(path)["records"] for path in second])
    assert torch.equal(found, make_tables()[0].saved_VR[1::2])
    write(SINGLE, tmp_path)
    assert (tmp_path / "input-00000-of-00006.safetensors").exists()


@pytest.mark.parametrize("now", [2, 3])
def test_damage_is_found_by_any_number_of_ranks(tmp_path, now):
    entries, *_ = checked(together(2, write, tmp_path))
    for path in sorted(tmp_path.glob("output-*")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 4]) + whole[-2:])
        answers = together(now, read, tmp_path, entries, 2)
        # Only the ranks that own rows of the file read it.
        rank = int(re.search("rank-([01])", path.name)[1])
        readers = [other for other in range(now) if (other - rank) % math.gcd(2, now) == 0]
        for error in raised([answers[reader] for reader in readers]):
            assert isinstance(error, checkpoint.CheckpointError)
            assert f"{path.name} is damaged (its CRC-32 is " in str(error)
        path.write_bytes(whole)


def test_files_are_read_in_chunks(tmp_path, monkeypatch):
    entries, *_ = checked(together(2, write, tmp_path))
    sizes, read_file = [], checkpoint._read_file

    def measured(*arguments):
        for chunk_nR in read_file(*arguments):
            sizes.append(chunk_nR.nbytes)
            yield chunk_nR

    monkeypatch.setattr(checkpoint, "_read_file", measured)
    checked(together(3, assert_read, tmp_path, entries, 2))
    assert len(sizes) > 8 and max(sizes) <= 140
