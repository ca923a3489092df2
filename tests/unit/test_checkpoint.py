"""Checkpoints are loaded as saved, or refused, on any number of ranks."""

import json
import os
import random
import threading

import pytest
import torch

from tests.support.each_case import each_case
from tests.support.rank_processes import Pool
from tests.support.rank_threads import checked, raised, together
from tests.support.tables import make_tables, same
from w2v.distributed.ranks import RanksDiffer
from w2v.rows import checkpoint
from w2v.rows.checkpoint import CheckpointError, Checkpoints, latest

NONE, SOME, ALL = 0, 500, 1 << 30  # bytes for copies; the six files of two tables have 2,760
INPUT = "input-00000-of-00003.safetensors"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    """Let each table have three files."""
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 500)


def save(folder, step=1, room=NONE, tables=None, **state):
    keeper = Checkpoints(folder, tables or make_tables(), room)
    keeper.save({"step": step, **state})
    keeper.wait()
    return keeper


@each_case("room", [NONE, SOME, ALL])
def test_round_trip(tmp_path, room):
    state = {"lr": 0.1 + 0.2, "words": ["é\n", None]}
    save(tmp_path, 12, room, **state)
    found, loaded = latest(tmp_path), make_tables(filled=False)
    assert found.path.name == "step-00000012" and found.state == {"step": 12, **state}
    found.load(loaded)
    assert same(loaded, make_tables())


def test_nothing_is_pickled(tmp_path):
    save(tmp_path)
    folder = tmp_path / "step-00000001"
    assert {path.suffix for path in folder.iterdir()} == {".json", ".safetensors"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in folder.glob("*.safetensors")}


def test_last_two_are_kept_and_none_is_written_twice(tmp_path):
    keeper = Checkpoints(tmp_path, make_tables(), NONE)
    for step in (5, 10, 10, 99_999_999, 100_000_000):
        keeper.save({"step": step})
    keeper.wait()
    assert sorted(os.listdir(tmp_path)) == ["step-100000000", "step-99999999"]
    assert latest(tmp_path).state["step"] == 100_000_000


def test_oldest_is_removed_later_if_the_process_was_killed(tmp_path, monkeypatch):
    with monkeypatch.context() as killed:
        killed.setattr(Checkpoints, "_remove_old", lambda self: None)
        for step in (1, 2, 3):
            save(tmp_path, step)
    assert len(os.listdir(tmp_path)) == 3
    save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("rooms, at_once", [((NONE, NONE), [4, 4]), ((SOME, ALL), [4, 0])])
def test_training_may_change_the_tables_after_save(tmp_path, monkeypatch, rooms, at_once):
    """Copies are written after ranks have changed all rows."""
    go, finish = threading.Event(), Checkpoints._finish
    monkeypatch.setattr(Checkpoints, "_finish", lambda *args: go.wait(10) and finish(*args))

    def train(ranks):
        tables = make_tables(ranks)
        keeper = Checkpoints(tmp_path, tables, rooms[ranks.rank], ranks)
        keeper.save({"step": 7})
        assert keeper.busy and latest(tmp_path) is None
        for table in tables:
            table.records_VR.zero_()
            table.scalars["step"] += 1
        written = len(list((tmp_path / "step-00000007.partial").glob(f"*rank-{ranks.rank}-*")))
        ranks.all_gather(None)
        go.set()
        keeper.wait()
        assert not keeper.busy
        return written

    assert checked(together(2, train)) == at_once
    loaded = make_tables(filled=False)
    latest(tmp_path).load(loaded)
    assert same(loaded, make_tables())


@pytest.mark.parametrize("room", [NONE, ALL])
def test_scalars_are_saved_for_each_rank(tmp_path, room):
    def write(ranks):
        tables = make_tables(ranks)
        tables[0].scalars["step"].fill_(ranks.rank)
        keeper = Checkpoints(tmp_path, tables, room, ranks)
        keeper.save({"step": 1})
        keeper.wait()

    def read(ranks):
        tables = make_tables(ranks, filled=False)
        latest(tmp_path, ranks).load(tables, ranks)
        return int(tables[0].scalars["step"])

    checked(together(3, write))
    assert [checked(together(size, read)) for size in (1, 2, 4)] == [[0], [0, 1], [0, 1, 2, 0]]


@each_case("room", [NONE, SOME, ALL])
@pytest.mark.parametrize("broken", ["input-rank-1", "manifest"])
def test_failure_on_one_rank_is_raised_on_all_and_leaves_nothing(
    tmp_path, monkeypatch, room, broken
):
    write = checkpoint.write_synced
    failing = threading.Event()

    def full(path, parts):
        if failing.is_set() and path.name.startswith(broken):
            raise OSError(28, "No space left on device")
        return write(path, parts)

    monkeypatch.setattr(checkpoint, "write_synced", full)
    keepers = checked(
        together(2, lambda ranks: Checkpoints(tmp_path, make_tables(ranks), room, ranks))
    )

    def save_again(ranks, step):
        keeper = keepers[ranks.rank]
        keeper._ranks = ranks
        keeper.save({"step": step})
        keeper.wait()

    checked(together(2, save_again, 1))
    failing.set()
    expected = "No space left on device, so that a checkpoint of 2,760 bytes cannot be written"
    for error in raised(together(2, save_again, 2)):
        assert expected in str(error) and error.filename == str(tmp_path)
        assert error.failed_rank == (0 if broken == "manifest" else 1)
    assert os.listdir(tmp_path) == ["step-00000001"]
    failing.clear()
    checked(together(2, save_again, 3))
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_failure_in_the_background_is_raised_when_asked_for(tmp_path, monkeypatch):
    keeper = Checkpoints(tmp_path, make_tables(), ALL)

    def full(path, parts):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_synced", full)
    keeper.save({"step": 1})
    while keeper.busy:
        pass
    with pytest.raises(OSError, match="No space left") as stop:
        keeper.raise_failure()
    assert stop.value.failed_rank is None
    keeper.raise_failure()


def save_and_load(ranks, folder):
    tables = make_tables(ranks, filled=False)
    for step, room in enumerate([NONE, ALL if ranks.rank else NONE, ALL]):
        keeper = Checkpoints(folder, make_tables(ranks), room, ranks)
        keeper.save({"step": step})
        keeper.wait()
        latest(folder, ranks).load(tables, ranks)
        assert same(tables, make_tables(ranks))


def test_ranks_in_processes(tmp_path):
    pool = Pool(2)
    pool.run(save_and_load, tmp_path)
    pool.close()


def test_ranks_that_do_not_share_the_folder_are_refused(tmp_path):
    def find(ranks):
        folder = tmp_path / str(ranks.rank)
        if ranks.rank == 0:
            save(folder)
        return latest(folder, ranks)

    for error in raised(together(2, find)):
        assert isinstance(error, RanksDiffer)
        assert f"the newest checkpoint in {tmp_path}" in str(error) and "run.dir" in str(error)


@each_case(
    "other",
    [{"name": "Adamax"}, {"rows": 8}, {"dim": 6}, {"step": "row"}, {"dtype": torch.float16}],
)
def test_tables_of_another_model_are_refused_unchanged(tmp_path, other):
    save(tmp_path)
    with pytest.raises(CheckpointError, match="but this run's is None; resume with the settings"):
        latest(tmp_path).load(make_tables()[:1])
    tables, expected = make_tables(**other), make_tables(**other)
    with pytest.raises(CheckpointError, match="but this run's is .*the settings of the run"):
        latest(tmp_path).load(tables)
    assert same(tables, expected)


def test_every_flipped_bit_is_found(tmp_path):
    """Flip 100 bits at the beginning, middle and end of all files."""
    save(tmp_path, text="some words")
    rng, loaded = random.Random(0), make_tables(filled=False)
    files = sorted((tmp_path / "step-00000001").iterdir())
    for number in range(100):
        file = files[number % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        end = len(whole)
        first, last = rng.choice([(0, 16), (0, end), (end - 16, end)])
        damaged[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{file.name} is (damaged|of format)"):
            latest(tmp_path).load(loaded)
        file.write_bytes(whole)
    latest(tmp_path).load(loaded)
    assert same(loaded, make_tables())


@pytest.mark.parametrize("name", ["manifest.json", INPUT])
@each_case("damage", ["missing", "empty", "truncated", "longer", "a folder"])
def test_damaged_file_is_named_with_the_remedy(tmp_path, name, damage):
    save(tmp_path, 1)
    save(tmp_path, 2)
    file = tmp_path / "step-00000002" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes({"empty": b"", "truncated": data[:-1], "longer": data + b"\n"}[damage])
    remedy = "restore it, or remove .*step-00000002 to go on from step-00000001$"
    with pytest.raises(CheckpointError, match=rf"{name} is damaged \(.*\); {remedy}"):
        latest(tmp_path).load(make_tables())


def test_another_format_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "FORMAT", 6)
        save(tmp_path)
    with pytest.raises(CheckpointError, match="is of format 6, and this version reads format 7"):
        latest(tmp_path)
