"""Checkpoints of several ranks: written by any number of them, loaded by any other, on one disk or on several hosts."""

import json
import os
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from tests.support.joined import Pool
from tests.support.threaded import checked, raised, together
from w2v.config import OptimizerConfig
from w2v.distributed.ranks import SINGLE, RanksDiffer
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table
from w2v.training import checkpoint, shards
from w2v.training.checkpoint import CheckpointError, Checkpoints, latest

ROWS, DIM = 23, 5
ALL = 1 << 30  # bytes, room for all that there is to copy
pytestmark = pytest.mark.usefixtures("one_thread")


def dealt(ranks, filled=True, name="NAdam", rows=ROWS, dim=DIM, step="table", dtype=torch.float32):
    """This rank's shards of two tables; filled, each element is a number that its row of the whole table says."""
    optimizer = RowOptimizer(OptimizerConfig(name=name, step=step))
    made = []
    for number, table in enumerate(("input", "output")):
        made.append(
            Table(
                table,
                ranks.shard_rows(rows),
                dim,
                optimizer.states(dim),
                optimizer.scalars,
                "cpu",
                dtype,
            )
        )
        if filled:
            rows_n = ranks.global_rows(torch.arange(made[-1].rows))
            made[-1].records_VR.copy_(
                (rows_n[:, None] * 100 + torch.arange(made[-1].width) + number * 10_000).sin()
            )
            for value in made[-1].scalars.values():
                value.fill_(3 + number if value.dtype == torch.int64 else 0.1)
    return made


def written(ranks, folder, at=7, room=0, **what):
    keeper = Checkpoints(folder, dealt(ranks, **what), room, ranks)
    keeper.save({"step": at, "positions": ranks.all_gather([ranks.rank])})
    keeper.wait()


def loaded(ranks, folder, **what):
    """Whether all is here as `dealt` makes it."""
    tables, found = dealt(ranks, filled=False, **what), latest(folder, ranks)
    found.load(tables, ranks)
    for table, expected in zip(tables, dealt(ranks, **what), strict=True):
        assert (
            torch.equal(table.records_VR, expected.records_VR) and table.scalars == expected.scalars
        )
    return found.state


def side_by_side(tables):
    """The tables, their rows moved beside each other in one memory, as those of pinned tables may lie."""
    records_TVR = torch.stack([table.records_VR for table in tables], dim=1).transpose(0, 1)
    for table, table.records_VR in zip(tables, records_TVR, strict=True):
        assert not table.records_VR.is_contiguous()
    return tables


@pytest.mark.parametrize("room", [0, ALL], ids=["written as they are", "copied first"])
def test_rows_side_by_side_are_kept_as_others(tmp_path, small_files, room):
    written(SINGLE, tmp_path / "apart")
    keeper = Checkpoints(tmp_path / "beside", side_by_side(dealt(SINGLE)), room)
    keeper.save({"step": 7, "positions": [0]})
    keeper.wait()
    files = sorted(
        path.relative_to(tmp_path / "apart") for path in (tmp_path / "apart").rglob("*.safetensors")
    )
    assert len(files) > 2 and all(
        (tmp_path / "apart" / name).read_bytes() == (tmp_path / "beside" / name).read_bytes()
        for name in files
    )
    tables = side_by_side(dealt(SINGLE, filled=False))
    latest(tmp_path / "beside", SINGLE).load(tables, SINGLE)
    assert all(
        torch.equal(table.records_VR, expected.records_VR)
        for table, expected in zip(tables, dealt(SINGLE), strict=True)
    )


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 600)
    monkeypatch.setattr(shards, "CHUNK_BYTES", 300)


@pytest.mark.parametrize("now", [1, 2, 3, 4])
@pytest.mark.parametrize("saved", [1, 2, 3, 4])
def test_what_any_number_of_ranks_wrote_any_other_loads(tmp_path, small_files, saved, now):
    checked(together(saved, written, tmp_path))
    positions = [[rank] for rank in range(saved)]
    assert checked(together(now, loaded, tmp_path)) == [{"step": 7, "positions": positions}] * now


@pytest.mark.parametrize(
    "what",
    [{"step": "row"}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"rows": 4}],
    ids=str,
)
def test_all_that_records_may_be(tmp_path, small_files, what):
    def write(ranks):
        written(ranks, tmp_path, **what)

    def load(ranks):
        return loaded(ranks, tmp_path, **what)

    for saved, now in [(4, 2), (2, 3), (1, 4), (3, 3)]:
        checked(together(saved, write))
        checked(together(now, load))
        shutil.rmtree(tmp_path / "step-00000007")


def test_the_files_say_whose_they_are_and_one_rank_writes_what_it_always_did(tmp_path, small_files):
    checked(together(2, written, tmp_path))
    names = {path.name.partition("-000")[0] for path in (tmp_path / "step-00000007").iterdir()}
    assert names == {
        "manifest.json",
        *(f"{table}-rank-{rank}-of-2" for table in ("input", "output") for rank in range(2)),
    }
    manifest = json.loads((tmp_path / "step-00000007" / "manifest.json").read_text())
    assert manifest["ranks"] == 2 and manifest["tables"]["input"]["rows"] == ROWS
    assert set(manifest["files"]) == {
        path.name for path in (tmp_path / "step-00000007").glob("*.safetensors")
    }
    second = sorted((tmp_path / "step-00000007").glob("input-rank-1-*"))
    assert torch.equal(
        torch.cat([load_file(path)["records"] for path in second]),
        dealt(SINGLE)[0].records_VR[1::2],
    )
    written(SINGLE, tmp_path, 8)
    alone = json.loads((tmp_path / "step-00000008" / "manifest.json").read_text())
    assert "ranks" not in alone and not list((tmp_path / "step-00000008").glob("*rank*"))


@pytest.mark.parametrize(
    "rooms, at_once",
    [((0, 0), [6, 6]), ((0, ALL), [6, 0]), ((600, 1200), [5, 4]), ((ALL, ALL), [0, 0])],
    ids=str,
)
def test_each_rank_copies_what_it_has_room_for_and_no_change_is_saved(
    tmp_path, small_files, monkeypatch, rooms, at_once
):
    """Ranks change all rows as soon as `save` has returned, and copies are written after that."""
    go, finish = threading.Event(), Checkpoints._finish
    monkeypatch.setattr(Checkpoints, "_finish", lambda *args: go.wait(10) and finish(*args))

    def train(ranks):
        tables = dealt(ranks)
        keeper = Checkpoints(tmp_path, tables, rooms[ranks.rank], ranks)
        keeper.save({"step": 7, "positions": [ranks.rank]})
        for table in tables:
            table.records_VR.zero_()
        written = len(list((tmp_path / "step-00000007.partial").glob(f"*rank-{ranks.rank}-*")))
        ranks.all_gather(None)
        go.set()
        keeper.wait()
        return written

    assert checked(together(2, train)) == at_once
    for now in (1, 2):
        assert checked(together(now, loaded, tmp_path))[0]["positions"] == [0]


@pytest.mark.parametrize("room", [0, ALL])
def test_scalars_are_each_ranks_own(tmp_path, room):
    def written_apart(ranks):
        tables = dealt(ranks)
        tables[0].scalars["step"].fill_(ranks.rank)
        keeper = Checkpoints(tmp_path, tables, room, ranks)
        keeper.save({"step": 1})
        keeper.wait()

    def steps(ranks):
        tables = dealt(ranks, filled=False)
        latest(tmp_path, ranks).load(tables, ranks)
        return int(tables[0].scalars["step"])

    checked(together(3, written_apart))
    assert [together(now, steps) for now in (1, 2, 3, 4)] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 0]]


def test_hosts_without_a_disk_in_common_have_a_folder_each(tmp_path):
    """Four ranks on two hosts."""

    def host(ranks):
        return tmp_path / f"host{ranks.rank // 2}"

    def write(ranks):
        host(ranks).mkdir(exist_ok=True)
        for step in (1, 2, 3):
            written(ranks, host(ranks), step)

    checked(together(4, write))
    for number in range(2):
        found = sorted(os.listdir(tmp_path / f"host{number}"))
        assert found == ["step-00000002", "step-00000003"]
        tables = [
            path.name for path in (tmp_path / f"host{number}" / "step-00000003").glob("input*")
        ]
        assert sorted(tables) == [
            f"input-rank-{rank}-of-4-00000-of-00001.safetensors"
            for rank in (2 * number, 2 * number + 1)
        ]
    checked(together(4, lambda ranks: loaded(ranks, host(ranks))))
    said = r"input-rank-[23]-of-4-\S+ is missing here: each of 4 ranks wrote .*copy the files of all hosts into .*step-00000003, or start 4"
    for error in raised(together(2, loaded, tmp_path / "host0")):
        assert isinstance(error, CheckpointError)
        with pytest.raises(CheckpointError, match=said):
            raise error
    shutil.copytree(tmp_path / "host1", tmp_path / "host0", dirs_exist_ok=True)
    checked(together(2, loaded, tmp_path / "host0"))


def test_all_ranks_take_the_newest_that_all_have(tmp_path):
    """One of two hosts died before it gave the last checkpoint its name."""

    def host(ranks):
        return tmp_path / str(ranks.rank)

    def write(ranks, steps):
        host(ranks).mkdir(exist_ok=True)
        for step in steps:
            written(ranks, host(ranks), step)

    checked(together(2, write, (1, 2)))
    shutil.rmtree(tmp_path / "1" / "step-00000002")
    assert [
        state["step"] for state in checked(together(2, lambda ranks: loaded(ranks, host(ranks))))
    ] == [1, 1]
    checked(together(2, write, (2,)))
    assert [
        state["step"] for state in checked(together(2, lambda ranks: loaded(ranks, host(ranks))))
    ] == [2, 2]
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "1").mkdir()
    for error in raised(together(2, lambda ranks: latest(host(ranks), ranks))):
        assert (
            "holds step-00000001, step-00000002 for rank 0 but none for rank 1; bring it to all hosts"
            in str(error)
        )
    manifest = tmp_path / "0" / "step-00000002" / "manifest.json"
    shutil.copytree(tmp_path / "0", tmp_path / "1", dirs_exist_ok=True)
    manifest.write_text(checkpoint._sealed(json.loads(manifest.read_text()) | {"positions": []}))
    for error in raised(together(2, lambda ranks: latest(host(ranks), ranks))):
        assert isinstance(error, RanksDiffer) and "the checksum of" in str(error)


@pytest.mark.parametrize("room", [0, 1000, ALL])
@pytest.mark.parametrize("broken", ["a file of rank 1", "the manifest"])
def test_what_fails_on_one_rank_fails_on_all_and_the_last_stays_valid(
    tmp_path, monkeypatch, broken, room
):
    write = shards.write_synced

    def full(path, parts):
        here = (
            path.name == "manifest.json"
            if broken == "the manifest"
            else path.name.startswith("input-rank-1")
        )
        if here and "02.partial" in str(path):
            raise OSError(28, "No space left on device")
        return write(path, parts)

    monkeypatch.setattr(shards, "write_synced", full)
    keepers = checked(together(3, lambda ranks: Checkpoints(tmp_path, dealt(ranks), room, ranks)))

    def save(ranks, step):
        keeper = keepers[ranks.rank]
        keeper._ranks = ranks
        keeper.save({"step": step})
        keeper.wait()

    checked(together(3, save, 1))
    for error in raised(together(3, save, 2)):
        assert (
            "No space left on device, so that a checkpoint of 5,888 bytes cannot be written; --resume goes on"
            in str(error)
        )
        assert error.of == (0 if broken == "the manifest" else 1) and error.filename == str(
            tmp_path
        )
    assert os.listdir(tmp_path) == ["step-00000001"]
    checked(together(3, save, 3))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("now", [2, 3])
def test_damage_is_found_by_however_many_ranks(tmp_path, small_files, now):
    checked(together(2, written, tmp_path))
    for path in sorted((tmp_path / "step-00000007").glob("output-*")):
        whole = path.read_bytes()
        path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 4]) + whole[-2:])
        for error in raised(together(now, loaded, tmp_path)):
            assert isinstance(
                error, CheckpointError
            ) and f"{path.name} is damaged (its CRC-32 is " in str(error)
        path.write_bytes(whole)
    for error in raised(together(now, lambda ranks: loaded(ranks, tmp_path, rows=ROWS + 1))):
        assert "resume with the settings of the run" in str(error)


def test_files_are_read_a_chunk_at_a_time(tmp_path, small_files, monkeypatch):
    checked(together(2, written, tmp_path))
    largest, blocks = [], shards._blocks

    def seen(*arguments):
        for block_nR in blocks(*arguments):
            largest.append(block_nR.nbytes)
            yield block_nR

    monkeypatch.setattr(shards, "_blocks", seen)
    checked(together(3, loaded, tmp_path))
    assert len(largest) > 8 and max(largest) <= 300


def body(ranks, folder):
    """What test_processes does in each of them."""
    assert ranks.leads(folder) == (ranks.rank == 0)
    own = folder / str(ranks.rank)
    own.mkdir()
    assert ranks.leads(own) and not list(own.iterdir())
    ranks.require_equal({"seed": 1})
    with pytest.raises(
        RanksDiffer, match="train.seed is 0 for rank 0, but 1 for rank 1; start all ranks alike"
    ):
        ranks.require_equal({"train.epochs": 3, "train.seed": ranks.rank})
    with pytest.raises(FileNotFoundError) as caught, ranks.reraise():
        if ranks.rank == ranks.size - 1:
            (folder / "none").read_text()
    assert caught.value.of == ranks.size - 1 and caught.value.filename == str(folder / "none")
    for step, room in enumerate([0, ALL if ranks.rank else 0, ALL]):
        (folder / f"step{step}").mkdir(exist_ok=True)
        written(ranks, folder / f"step{step}", step, room)
        loaded(ranks, folder / f"step{step}")
    return ranks.all_gather(ranks.rank)


@pytest.mark.parametrize("size", [2, 4])
def test_processes(tmp_path, size):
    pool = Pool(size)
    assert pool.run(body, tmp_path) == [list(range(size))] * size
    pool.close()
    loaded(SINGLE, tmp_path / "step2")
