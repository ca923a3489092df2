"""Estimates of memory and disk: whether a run fits, and what helps."""

import resource
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from w2v.config import ConfigError, load_config
from w2v.distributed.ranks import Ranks
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table, host_memory, pinning_is_limited
from w2v.text.vocab import keep_probabilities
from w2v.training import memory
from w2v.training.memory import DoesNotFit, Machine, Plan, explained
from w2v.training.plan import describe_bytes
from w2v.vectors.export import EXPORT_BYTES
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.sampler import Sampler, TrainingText

GIB = 1 << 30
PLENTY = dict.fromkeys(["host", "locked", "gpu", "disk", "files"], 1000 * GIB)
RECORD = 3 * 128 * 4  # bytes of a row of 128 floats with Adam's two states
SLOT = RECORD + 24 + RECORD // 256  # bytes of a row in the cache


class Several(Ranks):
    size = 4


def make_task(*settings, counts=1_000_000, text_words=10_000_000, **changes):
    """Return a task on the CPU; `counts`: of the words, or how many."""
    counts_V = np.arange(counts, 0, -1) if isinstance(counts, int) else counts
    given = ["model.vector_size=128", "model.sample=1e-4", "train.batch_size=1000"]
    given += ["run.dir=runs", *settings]
    config = load_config([], given)
    return Plan(
        config=config,
        machine=Machine(2, 16 * GIB, "", 1000 * GIB, "", ""),
        vocab=SimpleNamespace(counts=counts_V),
        corpus=SimpleNamespace(
            ids=np.broadcast_to(np.int32(0), (text_words,)), offsets=np.arange(3)
        ),
        centers=text_words,
        optimizer=RowOptimizer(config.optimizer),
        device=torch.device(changes.pop("device", "cpu")),
        free=PLENTY | dict(changes.pop("free", {})),
        **{"kernels": "cpu"} | changes,
    )


def with_setting(task, key, value):
    section, name = key.split(".")
    changed = replace(getattr(task.config, section), **{name: value})
    return replace(task, config=replace(task.config, **{section: changed}))


def slots(task, gpu_bytes):
    return replace(task, free=PLENTY | {"gpu": gpu_bytes}).capacity()


def make_run(*settings, **changes):
    """Return a plan whose cache takes what is left."""
    task = make_task(*settings, **changes)
    return replace(task, slots=task.capacity())


def with_cache(rows):
    """Return the setting of a cache of so many rows."""
    return f"transfer.gpu_bytes={rows * RECORD}"


@each_case("name, dim", [("Adam", 7), ("SGD", 128), ("NAdam", 33)])
def test_table_bytes_are_those_of_tables(name, dim):
    task = make_task(f"optimizer.name={name}", f"model.vector_size={dim}", counts=11)
    layout = task.optimizer.states(dim), task.optimizer.scalars, "cpu"
    table = Table("input", 11, dim, *layout, alignment=task.alignment)
    assert task.table_bytes == 2 * table.bytes


def test_needs_on_the_cpu():
    needs = make_task().needs()
    assert needs["host"]["tables"] == 2 * 1_000_000 * RECORD
    assert needs["host"]["vectors"] == EXPORT_BYTES  # they are written block by block
    assert make_task(counts=1000).needs()["host"]["vectors"] == 2 * 4 * 1000 * 128
    scored = 4 * 300_000 * 128
    assert make_task(device="cuda").needs()["host"]["vectors"] == EXPORT_BYTES + scored
    assert not needs["gpu"] and not any(needs["locked"].values())
    assert needs["disk"] == {
        "checkpoints": 3 * 2 * 1_000_000 * RECORD,
        "vectors": 2 * 512_000_000 + 32_000_000,
        "tables": 0,
    }
    last = make_task("run.checkpoint_minutes=0").needs()
    assert last["disk"]["checkpoints"] == 2_000_000 * RECORD
    assert make_task("run.formats=kv").needs()["disk"]["vectors"] == 512_000_000 + 32_000_000


def test_needs_of_each_engine():
    tables = 2 * 1_000_000 * RECORD
    resident = make_task(device="cuda").needs()
    assert resident["gpu"]["tables"] == tables and not resident["host"]["tables"]
    mapped = make_task(with_cache(100_000), device="cuda", engine="mapped").needs()
    assert mapped["host"]["tables"] == mapped["locked"]["tables"] == tables
    assert mapped["gpu"]["cache"] == 100_000 * SLOT
    staged = make_task(device="cuda", engine="staged").needs()
    assert staged["host"]["tables"] == tables
    assert staged["locked"] == {"tables": 0, "buffers": 48 << 20}
    assert staged["host"]["buffers"] == 48 << 20 and not mapped["host"]["buffers"]


def test_tables_in_files_on_a_disk_of_their_own_are_counted_there(tmp_path, monkeypatch):
    setting = f"transfer.table_dir={tmp_path}/tables"
    tables = 2 * 1_000_000 * RECORD
    monkeypatch.setattr(memory, "same_disk", lambda *folders: True)
    needs = make_task(setting).needs()
    assert needs["disk"]["tables"] == tables and not needs["files"]["tables"]
    monkeypatch.setattr(memory, "same_disk", lambda *folders: False)
    needs = make_task(setting).needs()
    assert needs["files"]["tables"] == tables and not needs["disk"]["tables"]
    make_run(setting, free={"disk": 10 * GIB}).check()
    with pytest.raises(DoesNotFit, match="disk space of transfer.table_dir: .*table_dir=FOLDER"):
        make_run(setting, free={"files": GIB}).check()


def test_needs_of_several_ranks_are_those_of_the_largest():
    alone, fourth = (
        make_task(counts=1_000_001, ranks=ranks, engine="mapped", device="cuda")
        for ranks in (Ranks(), Several())
    )
    assert fourth.table_bytes == 2 * 250_001 * RECORD
    assert fourth.needs()["gpu"]["vocabulary"] == (12 + 20) * 1_000_001 + 8 * 250_001
    assert fourth.needs()["host"]["vectors"] == alone.needs()["host"]["vectors"]
    assert fourth.needs()["disk"] == alone.needs()["disk"]  # all ranks share it


@pytest.mark.parametrize("words", [48_000_000, 80_000_000])
def test_automatic_cache_takes_what_is_left_of_a_gpu(words):
    counts_V = np.broadcast_to(np.int64(1), (words,))
    task = make_task(counts=counts_V, engine="mapped", device="cuda")
    needs = task.needs()["gpu"]
    # 8 bytes of the distribution of negatives, 4 of keep probabilities and 2 x 4 numbers of unique
    # rows; 2 x 11 of cache maps. The GPU's page tables take a 512th of the tables.
    assert needs["vocabulary"] == 20 * words and needs["cache maps"] == 22 * words
    assert needs["program"] == (512 << 20) + 2 * words * RECORD // 512
    assert needs["ids"] == 4 * 10_000_000
    rows = slots(task, 120 * GIB)
    # What is counted fits, and one row more would not.
    for more, fits in ((0, True), (1, False)):
        filled = with_setting(task, *with_cache(rows + more).split("="))
        assert (sum(filled.needs()["gpu"].values()) <= 120 * GIB) is fits


def test_a_batch_takes_no_more_than_the_text_and_the_vocabulary_have():
    for kernels in ("cpu", "cuda", "reference"):
        task = make_task(counts=np.ones(100), text_words=1000, kernels=kernels)
        larger = with_setting(task, "train.batch_size", 1_000_000)
        assert larger.batch_bytes() == task.batch_bytes() < 32 << 20
        assert with_setting(task, "model.negative", 50).batch_bytes() > task.batch_bytes()


@each_case("words, pool", [(5_000, 0), (5_000, 3_000), (150_000, 0), (5_000_000, 0)])
def test_expected_rows_are_those_of_drawn_words(words, pool):
    counts_V = 1e9 / np.arange(1, words + 1)
    task = make_task(f"model.negative_pool={pool}", counts=counts_V)
    kept_V = counts_V * keep_probabilities(counts_V, counts_V.sum(), task.config.model.sample)
    rng = np.random.default_rng(0)
    centers, negatives = (
        rng.choice(words, size, p=weights_V / weights_V.sum())
        for weights_V, size in ((kept_V, 2010), (counts_V**0.75, pool or 10_000))
    )
    inputs, outputs = task.touched(2000)
    assert inputs == pytest.approx(len({*centers}), rel=0.03)
    assert outputs == pytest.approx(len({*centers, *negatives}), rel=0.03)


@pytest.mark.parametrize("exponent, words", [(100, 1), (0, 5_000)])
def test_expected_rows_of_extreme_exponents(exponent, words):
    """Negatives are the most frequent word alone, or all words alike."""
    settings = "model.negative=1000000", f"model.ns_exponent={exponent}"
    inputs, outputs = make_task(*settings, counts=1e9 / np.arange(1, 5_001)).touched(10)
    assert max(inputs, words) <= outputs <= inputs + words


@pytest.mark.parametrize("pool", [0, 3_000])
def test_expected_rows_are_those_of_all_ranks(pool):
    words, centers = 1_000_000, 4000
    task = make_task(f"model.negative_pool={pool}", counts=np.ones(words), ranks=Several())
    ids = np.random.default_rng(0).integers(0, words, centers, np.int32)
    even = np.ones(words), np.full(words, 1 / words)
    text = TrainingText(ids, np.arange(0, centers + 1, 10), *even)
    targets = {*ids}
    for rank in range(4):
        args = text, task.config.model, centers, 1, torch.device("cpu")
        batches = Sampler(*args, rank=rank, world_size=4).epoch()
        targets.update(*(batch.negatives_BK.flatten().tolist() for batch in batches))
    assert task.touched(centers)[1] == pytest.approx(len(targets), rel=0.03)


def test_nodes_take_rows_and_paths():
    alone, both = make_task("model.hs=true", "model.negative=0"), make_task("model.hs=true")
    assert (alone.vectors, both.vectors) == (1_000_000, 1_999_999)
    assert both.needs()["host"]["tables"] == 2 * 1_999_999 * RECORD
    assert both.needs()["disk"]["checkpoints"] == 3 * 2 * 1_999_999 * RECORD
    for task in (alone, both):
        outputs = task.touched(1000)[1]
        words, negatives = 1000, 5000 if task is both else 0
        assert negatives < outputs < words * 13 + 2 * negatives
    counts_V = 1e6 / np.arange(1, 1001)
    small, tree = make_task("model.hs=true", counts=counts_V), make_tree(counts_V)
    assert small.path_lengths.sum() == pytest.approx(len(tree.nodes_P), rel=0.1)
    assert small.path_lengths.max() == pytest.approx(tree.depth, abs=1.5)
    assert replace(both, kernels="sequential").batch_bytes() < both.batch_bytes() / 2
    for kernels in ("cpu", "reference"):
        task = replace(both, kernels=kernels)
        assert task.batch_bytes() > with_setting(task, "model.hs", False).batch_bytes()


def test_cache_capacity():
    mapped = make_task(engine="mapped", device="cuda")
    assert slots(mapped, 1000 * GIB) == 2_000_000  # no more than there are
    assert slots(mapped, GIB // 2) == 0
    few = with_setting(mapped, "transfer.gpu_bytes", str(10 * RECORD + 1))
    assert slots(few, GIB) == 10
    assert slots(make_task(device="cuda"), GIB) == 2_000_000
    assert slots(make_task(), 0) == 0


def test_plan_lines():
    fits = make_run()
    fits.check()
    host, disk, _ = describe_bytes(fits).splitlines()
    assert host.startswith("host ") and " + tables 2.9 GiB + vocabulary 172 MiB + " in host
    assert disk == (
        "disk      checkpoints 8.6 GiB + vectors 1007 MiB = 9.6 GiB of 1000.0 GiB free in runs"
    )
    paged = make_run(free={"gpu": 2 * GIB}, engine="mapped", device="cuda", text_words=2_000_000)
    _, _, gpu, _, _ = describe_bytes(paged).splitlines()
    assert "vocabulary 19 MiB + cache maps 21 MiB + cache 1.4 GiB = 2.0 GiB of 2.0 GiB" in gpu


def test_checkpoint_copies_take_the_memory_that_is_left():
    """The run needs 3.5 GiB; a 16th of the free memory stays free."""
    tables = make_task().table_bytes
    copies = {gib: make_run(free={"host": gib * GIB}).copies for gib in (4, 5, 6, 7, 8)}
    assert copies == {4: 0, 5: 0, 6: 0, 7: tables, 8: tables}
    in_files = make_run("transfer.table_dir=tables", free={"host": 6 * GIB})
    assert in_files.copies == 0
    in_files = make_run("transfer.table_dir=tables", free={"host": 8 * GIB})
    assert in_files.copies == tables
    assert make_run(counts=80_000).copies == 0
    assert make_run(counts=80_000, device="cuda").copies > 0
    assert make_run("run.checkpoint_minutes=0").copies == 0


def test_plan_says_how_checkpoints_are_written():
    def saving(*settings, **changes):
        return describe_bytes(make_run(*settings, **changes)).splitlines()[-1]

    assert "while training goes on, from a copy" in saving()
    assert "waits: memory has no room for a copy of 2.9 GiB" in saving(free={"host": 5 * GIB})
    assert "+ copies 2.9 GiB = " in describe_bytes(make_run(free={"host": 8 * GIB}))
    assert "waits: small" in saving(counts=80_000)
    never = "run.checkpoint_minutes=0", "run.final_checkpoint=false"
    assert "when training is over" in saving(never[0])
    assert "if a signal ends training" in saving(*never)


@each_case(
    "free, problem, remedy",
    [
        ({"host": 3 * GIB}, "CPU memory: 3.[0-9] GiB of 3.0 GiB free", "vocab.max_final_vocab"),
        ({"disk": 9 * GIB}, "disk space: 9.6 GiB of 9.0 GiB free", "run.checkpoint_minutes=0"),
        ({"gpu": 3 * GIB}, "GPU memory: .* of 3.0 GiB free", "transfer.engine=mapped"),
        (
            {"gpu": 3 * GIB, "disk": 9 * GIB},
            "GPU memory: .* of 3.0 GiB free and disk space: 9.6 GiB",
            "transfer.engine=mapped",
        ),
    ],
)
def test_error_names_what_is_needed_what_is_free_and_remedies(free, problem, remedy):
    run = make_run(free=free, device="cuda" if "gpu" in free else "cpu")
    with pytest.raises(DoesNotFit, match=f"^not enough {problem}.*; set .*{remedy}") as stop:
        run.check()
    assert "\n" not in str(stop.value)
    if "disk" in free and "gpu" not in free:
        run.check(saves=False)


def test_limit_on_locked_memory_counts():
    run = make_run(free={"locked": 60 << 20}, engine="mapped", device="cuda")
    with pytest.raises(DoesNotFit, match="locked CPU memory: .* 60 MiB.*transfer.engine=staged"):
        run.check()


@each_case(
    "error", [MemoryError("cannot pin"), torch.OutOfMemoryError("CUDA"), OSError(12, "No memory")]
)
def test_failing_allocation_is_explained(error):
    expected = r"^CPU memory ran out \(.*\): .* GiB of 1000.0 GiB free; set a smaller vocab"
    with pytest.raises(DoesNotFit, match=expected), explained(make_run()):
        raise error


@each_case(
    "run, message, change",
    [
        (make_run(), "can't allocate memory", " transfer.table_dir=FOLDER"),
        (
            make_run("transfer.table_dir=tables"),
            "can't allocate memory",
            ", when more memory is free",
        ),
        (make_run(device="cuda"), "CUDA out of memory", " transfer.gpu_bytes=50%"),
    ],
)
def test_failing_allocation_while_training_names_a_command(run, message, change):
    expected = f"{message}.*; continue with w2v train --resume 'my run'{change}$"
    with pytest.raises(DoesNotFit, match=expected), explained(run, Path("my run")):
        raise RuntimeError(message)


@pytest.mark.parametrize(
    "allocate", [lambda count: torch.empty(count, dtype=torch.uint8), host_memory]
)
def test_real_failing_allocation_is_explained(allocate):
    expected = r"memory ran out \(.*allocate"
    with pytest.raises(DoesNotFit, match=expected), explained(make_run()):
        allocate(1 << 60)


def test_other_errors_are_not_explained():
    with pytest.raises(RuntimeError, match="a bug"), explained(make_run()):
        raise RuntimeError("a bug")


def test_machine_is_shared_by_its_ranks(monkeypatch):
    ranks = Ranks()
    ranks.local_size = 2
    alone, half = Machine.here(), Machine.here(ranks)
    assert half.cores == max(1, alone.cores // 2) and half.host_bytes == alone.host_bytes
    assert half.host_free_bytes == pytest.approx(alone.host_free_bytes / 2, rel=0.2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on a machine of 1 GPUs; .*--gpus 1"):
        Machine.here(ranks)


@pytest.mark.gpu
def test_trying_to_pin_restores_the_limit():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert pinning_is_limited() in (True, False)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
