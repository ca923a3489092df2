"""The state of a run goes to disk and comes back as it was, or is refused: whatever bit of whatever file is another."""

import json
import os
import random
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from w2v.config import OptimizerConfig
from w2v.model import table_file as tablefile
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table
from w2v.training import checkpoint, shards
from w2v.training.checkpoint import Checkpoint, CheckpointError, Checkpoints, latest

NONE, PART, ALL = ROOMS = [0, 700, 1 << 30]  # bytes; a table of two_tables() has 1,152


def random_table(
    name="NAdam", rows=9, dim=5, step="table", table="input", dtype=torch.float32, aligned=True
):
    optimizer = RowOptimizer(OptimizerConfig(name=name, step=step))
    made = Table(
        table, rows, dim, optimizer.states(dim), optimizer.scalars, "cpu", dtype, aligned=aligned
    )
    for field in made.columns:
        made[field].normal_()
    for value in made.scalars.values():
        value.fill_(3 if value.dtype == torch.int64 else 0.1)
    return made


def two_tables(**what):
    return [random_table(table=name, **what) for name in ("input", "output")]


def same(saved, loaded):
    return all(
        torch.equal(a.records_VR, b.records_VR) and a.scalars == b.scalars
        for a, b in zip(saved, loaded, strict=True)
    )


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("what", [{}, {"step": "row"}, {"dtype": torch.bfloat16}], ids=str)
def test_round_trip_in_shards(tmp_path, monkeypatch, room, what):
    monkeypatch.setattr(shards, "FILE_BYTES", 1000)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 300)
    saved, loaded = two_tables(**what), two_tables(**what)
    keeper = Checkpoints(tmp_path, saved, room)
    keeper.save({"step": 12, "lr": 0.1 + 0.2, "words": ["é\n", None]})
    keeper.wait()
    found = latest(tmp_path)
    assert found.path.name == "step-00000012" and found.state == {
        "step": 12,
        "lr": 0.1 + 0.2,
        "words": ["é\n", None],
    }
    found.load(loaded)
    assert same(saved, loaded)
    files = sorted(found.path.glob("input-*.safetensors"))
    assert len(files) > 1 and torch.equal(
        torch.cat([load_file(path)["records"] for path in files]), saved[0].records_VR
    )


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("aligned", [True, False])
def test_what_a_gpu_machine_wrote_is_read_without_one_and_the_other_way(
    tmp_path, monkeypatch, room, aligned
):
    monkeypatch.setattr(shards, "FILE_BYTES", 1000)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 300)
    saved, alike, loaded = (
        two_tables(aligned=aligned),
        two_tables(aligned=True),
        two_tables(aligned=not aligned),
    )
    for table, other in zip(saved, alike, strict=True):
        for field in table.columns:
            other[field].copy_(table[field])
    for folder, tables in (("here", saved), ("there", alike)):
        keeper = Checkpoints(tmp_path / folder, tables, room)
        keeper.save({"step": 1})
        keeper.wait()
    written = {
        path.name: path.read_bytes()
        for path in (tmp_path / "here" / "step-00000001").glob("*.safetensors")
    }
    assert written == {
        path.name: path.read_bytes()
        for path in (tmp_path / "there" / "step-00000001").glob("*.safetensors")
    }
    latest(tmp_path / "here").load(loaded)
    assert {table.width for table in saved} != {table.width for table in loaded}
    assert all(
        torch.equal(a[field], b[field])
        for a, b in zip(saved, loaded, strict=True)
        for field in a.columns
    )


def test_the_last_two_are_kept_and_none_is_written_twice(tmp_path):
    keeper = Checkpoints(tmp_path, two_tables(), NONE)
    for step in (5, 10, 10, 99_999_999, 100_000_000):
        keeper.save({"step": step})
    keeper.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-100000000", "step-99999999"]
    assert latest(tmp_path).state["step"] == 100_000_000


def test_one_that_was_killed_before_it_removed_the_oldest_is_made_up_for(tmp_path, monkeypatch):
    tables = two_tables()
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint, "_remove", lambda path: None)
        for step in (1, 2, 3):
            Checkpoints(tmp_path, tables, 0).save({"step": step}, wait=True)
    assert len(list(tmp_path.iterdir())) == 3
    Checkpoints(tmp_path, tables, 0).save({"step": 3}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("room, at_once", [(NONE, 6), (PART, 5), (1000, 4), (ALL, 0)])
def test_what_is_saved_are_the_tables_as_they_were_though_training_goes_on(
    tmp_path, monkeypatch, room, at_once
):
    """What has no room is on disk when `save` returns; then all rows change before the copies of the others are written."""
    monkeypatch.setattr(shards, "FILE_BYTES", 500)  # three files for each table
    tables, go, finish = two_tables(), threading.Event(), Checkpoints._finish
    before = [table.records_VR.clone() for table in tables]
    monkeypatch.setattr(Checkpoints, "_finish", lambda *args: go.wait(10) and finish(*args))
    keeper = Checkpoints(tmp_path, tables, room)
    keeper.save({"step": 1})
    assert keeper.busy and latest(tmp_path) is None
    assert len(os.listdir(tmp_path / "step-00000001.partial")) == at_once
    for table in tables:
        table.records_VR.zero_()
        table.scalars["step"] += 1
    go.set()
    keeper.wait()
    assert not keeper.busy
    latest(tmp_path).load(tables)
    assert all(
        torch.equal(table.records_VR, records)
        for table, records in zip(tables, before, strict=True)
    )
    assert tables[0].scalars["step"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "room, broken, behind",
    [
        (NONE, "input", False),
        (PART, "output", False),
        (PART, "input-00000", True),
        (ALL, "output", True),
    ],
)
def test_what_fails_is_raised_and_leaves_nothing_whenever_it_is_written(
    tmp_path, monkeypatch, room, broken, behind
):
    monkeypatch.setattr(shards, "FILE_BYTES", 500)
    write_shard, keeper = shards._write_shard, Checkpoints(tmp_path, two_tables(), room)
    keeper.save({"step": 1})
    keeper.wait()

    def full(path, records_nR):
        if path.name.startswith(broken):
            raise OSError(28, "No space left on device")
        return write_shard(path, records_nR)

    monkeypatch.setattr(shards, "_write_shard", full)
    if behind:
        keeper.save({"step": 2})
    with pytest.raises(
        OSError,
        match=r"No space left on device, so that a checkpoint of [\d,]+ bytes cannot be written; --resume",
    ):
        keeper.wait() if behind else keeper.save({"step": 2})
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert latest(tmp_path).state["step"] == 1
    monkeypatch.undo()
    keeper.save({"step": 3}, wait=True)
    assert latest(tmp_path).state["step"] == 3


@pytest.mark.parametrize(
    "other",
    [{"name": "Adamax"}, {"rows": 8}, {"dim": 6}, {"step": "row"}, {"dtype": torch.float16}],
    ids=str,
)
def test_tables_of_another_model_are_refused_before_any_is_loaded(tmp_path, other):
    Checkpoints(tmp_path, two_tables(), NONE).save({"step": 1}, wait=True)
    tables = two_tables(**other)
    before = tables[0].records_VR.clone()
    with pytest.raises(
        CheckpointError,
        match=r"step-00000001 holds the table .* but this run's is .*resume with the settings of the run",
    ):
        latest(tmp_path).load(tables)
    assert torch.equal(tables[0].records_VR, before)


def test_every_flipped_bit_is_found(tmp_path):
    """500 bits, over all files and the beginning, middle and end of each."""
    saved = two_tables()
    Checkpoints(tmp_path, saved, NONE).save({"step": 1, "text": "some words"}, wait=True)
    rng, loaded, path = random.Random(0), two_tables(), tmp_path / "step-00000001"
    files = sorted(path.iterdir())
    for number in range(500):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        start, end = rng.choice([(0, 16), (0, len(data)), (len(data) - 16, len(data))])
        data[rng.randrange(start, end)] ^= 1 << rng.randrange(8)
        whole = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"{file.name} is (damaged|of format)"):
            latest(tmp_path).load(loaded)
        file.write_bytes(whole)
    latest(tmp_path).load(loaded)
    assert same(saved, loaded)


@pytest.mark.parametrize("name", ["manifest.json", "input-00000-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "a folder"])
def test_damaged_files_are_named_with_what_to_do(tmp_path, name, damage):
    keeper = Checkpoints(tmp_path, two_tables(), NONE)
    keeper.save({"step": 1})
    keeper.save({"step": 2}, wait=True)
    file = tmp_path / "step-00000002" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"empty": b"", "truncated": data[:-1], "longer": data + b"\n"}[damage])
    said = rf"{name} is damaged \(.*\); restore it, or remove .*step-00000002 to go on from step-00000001$"
    with pytest.raises(CheckpointError, match=said):
        latest(tmp_path).load(two_tables())


def test_another_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 1)
    Checkpoints(tmp_path, two_tables(), NONE).save({"step": 1}, wait=True)
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError,
        match="manifest.json is of format 1, and this version reads 2; go on with the version",
    ):
        latest(tmp_path)


def test_nothing_is_unpickled(tmp_path):
    Checkpoints(tmp_path, two_tables(), NONE).save({"step": 1}, wait=True)
    assert {path.suffix for path in (tmp_path / "step-00000001").iterdir()} == {
        ".json",
        ".safetensors",
    }
    assert not {"pickle", "torch.load", "eval("} & set(
        Path(checkpoint.__file__).read_text().split()
    )
    json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())
    assert isinstance(Checkpoint(tmp_path / "step-00000001").state, dict)


@pytest.mark.parametrize("step", ["table", "row"])
def test_one_table_in_one_file(tmp_path, step):
    saved, loaded = random_table(step=step), random_table(step=step)
    tablefile.save(saved, tmp_path / "tables" / "input.safetensors")
    tablefile.load(loaded, tmp_path / "tables" / "input.safetensors")
    assert all(torch.equal(saved[name], loaded[name]) for name in saved.columns)
    assert saved.scalars == loaded.scalars
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["input.safetensors"]


@pytest.mark.parametrize("other", [{"name": "Adamax"}, {"rows": 8}, {"dim": 6}, {"step": "row"}])
def test_one_table_of_another_model_is_refused_and_nothing_is_loaded(tmp_path, other):
    tablefile.save(random_table(), tmp_path / "input.safetensors")
    table = random_table(**other)
    before = table.records_VR.clone()
    with pytest.raises(
        ValueError,
        match=r"input.safetensors holds .*weight 9x5.* but the table has .*; make one like the file",
    ):
        tablefile.load(table, tmp_path / "input.safetensors")
    assert torch.equal(table.records_VR, before)
