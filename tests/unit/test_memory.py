"""Budgets: whether a run fits, and what would make it fit."""

import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from w2v.config import ConfigError, OptimizerConfig
from w2v.distributed.ranks import Ranks
from w2v.model.huffman import make_tree
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table, host_memory, pinning_is_limited
from w2v.training.memory import Budget, DoesNotFit, Job, Machine, cache_rows

GIB = 1 << 30
PLENTY = dict.fromkeys(["host", "locked", "gpu", "disk"], 1000 * GIB)
RECORD = 3 * 128 * 4  # bytes of a row of 128 floats with Adam's two states
SLOT = RECORD + 24 + RECORD // 256  # bytes of a row in the cache


def states(name):
    return RowOptimizer(OptimizerConfig(name=name)).states


def make_job(**changes):
    job = Job(
        words=1_000_000,
        vector_size=128,
        states=states("Adam"),
        engine="resident",
        on_gpu=False,
        batch_size=1000,
        window=5,
        negative=5,
        counts_V=np.arange(1_000_000, 0, -1),
        text_words=10_000_000,
        centers=10_000_000,
    )
    return replace(job, **changes)


def make_budget(free=(), **changes):
    return Budget(
        job=make_job(**changes),
        free=PLENTY | dict(free),
        run_dir="runs",
        lighter=lambda: {name: states(name) for name in ("RMSprop", "SGD")},
    )


@pytest.mark.parametrize("name, dim", [("Adam", 7), ("SGD", 128), ("NAdam", 33)])
def test_table_bytes_are_those_of_tables(name, dim):
    optimizer = RowOptimizer(OptimizerConfig(name=name))
    table = Table("input", 11, dim, optimizer.states(dim), optimizer.scalars, "cpu")
    job = make_job(words=11, vector_size=dim, states=optimizer.states)
    assert job.table_bytes == 2 * table.bytes


def test_needs_on_the_cpu():
    needs = make_job().needs()
    assert needs["host"]["tables"] == 2 * 1_000_000 * RECORD
    assert needs["host"]["vectors"] == 80 << 20  # they are written block by block
    assert make_job(words=1000).needs()["host"]["vectors"] == 2 * 4 * 1000 * 128
    scored = 4 * 300_000 * 128
    assert make_job(on_gpu=True).needs()["host"]["vectors"] == (80 << 20) + scored
    assert not needs["gpu"] and not needs["locked"]
    assert needs["disk"] == {
        "checkpoints": 3 * 2 * 1_000_000 * RECORD,
        "vectors": 2 * 512_000_000 + 32_000_000,
    }
    assert make_job(checkpoints=False).needs()["disk"]["checkpoints"] == 2_000_000 * RECORD


def test_needs_of_each_engine():
    tables = 2 * 1_000_000 * RECORD
    resident = make_job(on_gpu=True).needs()
    assert resident["gpu"]["tables"] == tables and "tables" not in resident["host"]
    mapped = make_job(on_gpu=True, engine="mapped", cache_bytes=100_000 * RECORD).needs()
    assert mapped["host"]["tables"] == mapped["locked"]["tables"] == tables
    assert mapped["gpu"]["cache"] == 100_000 * SLOT
    tiny = make_job(on_gpu=True, engine="mapped", cache_bytes=10 * RECORD).needs()
    assert tiny["gpu"]["cache"] == 48 * 2_000_000  # rows are sorted by use before
    staged = make_job(on_gpu=True, engine="staged").needs()
    assert staged["host"]["tables"] == tables and staged["locked"] == {"buffers": 48 << 20}


def test_needs_of_several_ranks_are_those_of_the_largest():
    alone, fourth = (
        make_job(words=1_000_001, ranks=ranks, engine="mapped", on_gpu=True) for ranks in (1, 4)
    )
    assert fourth.rows == 250_001 and fourth.table_bytes == 2 * 250_001 * RECORD
    assert fourth.needs()["gpu"]["vocabulary"] == (12 + 20) * 1_000_001 + 8 * 250_001
    assert fourth.needs()["host"]["vectors"] == alone.needs()["host"]["vectors"]
    assert fourth.needs()["disk"] == alone.needs()["disk"]  # all ranks share it


@pytest.mark.parametrize("words", [48_000_000, 500_000_000])
def test_automatic_cache_takes_what_is_left_of_a_gpu(words):
    job = make_job(words=words, engine="mapped", on_gpu=True)
    needs = job.needs()["gpu"]
    # 8 bytes of the noise distribution, 4 of keep probabilities and 2 x 4 numbers of unique rows;
    # in both tables 15 of cache maps. The GPU's page tables take a 512th of the tables.
    assert needs["vocabulary"] == 20 * words and needs["cache maps"] == 30 * words
    assert needs["program"] == (512 << 20) + 2 * words * RECORD // 512
    rows = cache_rows(job, 120 * GIB)
    with_ids = replace(job, ids_bytes=4 * GIB)
    assert cache_rows(with_ids, 124 * GIB) == rows
    # What is counted fits, and one row more would not.
    filled = replace(job, cache_bytes=rows * RECORD)
    assert sum(filled.needs()["gpu"].values()) <= 120 * GIB
    larger = replace(job, cache_bytes=(rows + 1) * RECORD)
    assert sum(larger.needs()["gpu"].values()) > 120 * GIB


def test_a_batch_takes_no_more_than_the_text_and_the_vocabulary_have():
    small = make_job(words=100, text_words=1000, centers=1000, counts_V=np.ones(100))
    for kernels in ("cpu", "cuda", "reference"):
        job = replace(small, kernels=kernels)
        larger = replace(job, batch_size=1_000_000)
        assert larger._batch_bytes() == replace(job, batch_size=1000)._batch_bytes() < 32 << 20
        assert replace(job, negative=50)._batch_bytes() > job._batch_bytes()


def test_nodes_take_rows_and_paths():
    alone, both = make_job(hs=True, negative=0), make_job(hs=True)
    assert (alone.rows, both.rows) == (1_000_000, 1_999_999)
    # A CPU provides no memory for the rows of the input table that no word uses.
    assert both.needs()["host"]["tables"] == 2_999_999 * RECORD
    assert both.needs()["disk"]["checkpoints"] == 3 * 2 * 1_999_999 * RECORD
    for job in (alone, both):
        outputs = job.touched(1000)[1]
        words, negatives = 1000, 5000 if job.negative else 0
        assert negatives < outputs < words * 13 + 2 * negatives
    small = make_job(words=1000, counts_V=1e6 / np.arange(1, 1001), hs=True)
    tree = make_tree(small.counts_V)
    assert small.path_lengths.sum() == pytest.approx(len(tree.nodes_P), rel=0.1)
    assert small.path_lengths.max() == pytest.approx(tree.depth, abs=1.5)
    for kernels in ("cpu", "reference"):
        job = replace(both, kernels=kernels)
        assert job._batch_bytes() > replace(job, hs=False)._batch_bytes()


def test_cache_capacity():
    mapped = make_job(engine="mapped", on_gpu=True)
    assert cache_rows(mapped, 1000 * GIB) == 2_000_000  # no more than there are
    assert cache_rows(mapped, GIB // 2) == 0
    assert cache_rows(replace(mapped, cache_bytes=10 * RECORD + 1), GIB) == 10
    assert cache_rows(make_job(on_gpu=True), GIB) == 2_000_000
    assert cache_rows(make_job(), 0) == 0


def test_plan_lines():
    fits = make_budget()
    fits.check()
    host, disk = str(fits).splitlines()
    assert host.startswith("host ") and " + tables 2.9 GiB + vocabulary 172 MiB + " in host
    assert disk == (
        "disk      checkpoints 8.6 GiB + vectors 1007 MiB = 9.6 GiB of 1000.0 GiB free in runs"
    )
    _, _, gpu, _ = str(make_budget({"gpu": 2 * GIB}, engine="mapped", on_gpu=True)).splitlines()
    assert "vocabulary 19 MiB + cache maps 29 MiB + cache 1.4 GiB = 2.0 GiB of 2.0 GiB" in gpu


def test_checkpoint_copies_take_the_memory_that_is_left():
    """The run needs 3.5 GiB; a 16th of the free memory stays free."""
    tables = make_job().table_bytes
    copies = {gib: make_budget({"host": gib * GIB}).copies for gib in (4, 5, 6, 7, 8)}
    assert copies == {4: 0, 5: GIB, 6: 2 * GIB, 7: tables, 8: tables}
    assert make_budget({"host": 6 * GIB}, in_files=True).copies == 2 * GIB
    assert make_budget(words=80_000).copies == 0
    assert make_budget(words=80_000, on_gpu=True).copies > 0
    assert make_budget(checkpoints=False).copies == 0


def test_plan_says_how_checkpoints_are_written():
    assert "while training goes on, from a copy" in make_budget().saving
    assert (
        "waits: memory has room to copy 1.0 GiB of 2.9 GiB" in make_budget({"host": 5 * GIB}).saving
    )
    assert "+ copies 1.0 GiB = 4.6 GiB of 5.0 GiB free" in str(make_budget({"host": 5 * GIB}))
    assert "room to copy 0 B" in make_budget({"host": 4 * GIB}).saving
    assert "waits: small" in make_budget(words=80_000).saving
    assert "when training is over" in make_budget(checkpoints=False).saving


@pytest.mark.parametrize(
    "free, problem, remedies",
    [
        (
            {"host": 3 * GIB},
            "CPU memory would run out",
            ["vocab.max_final_vocab=804000", "model.vector_size=96", "optimizer.name=RMSprop"],
        ),
        ({"host": 1.7 * GIB}, "CPU memory would run out", ["optimizer.name=SGD"]),
        ({"disk": 9 * GIB}, "disk would run out", ["run.checkpoint_minutes=0", "run.dir=FOLDER"]),
        ({"gpu": 3 * GIB}, "GPU memory would run out", ["transfer.engine=mapped"]),
        ({"gpu": 3 * GIB, "locked": GIB}, "GPU memory would run out", ["transfer.engine=staged"]),
        ({"gpu": GIB // 2}, "GPU memory would run out", ["no single change is enough"]),
    ],
)
def test_error_names_the_place_and_the_smallest_changes(free, problem, remedies):
    budget = make_budget(free, on_gpu="gpu" in free)
    with pytest.raises(DoesNotFit, match=f"^{problem}: host program .* free.*; ") as stop:
        budget.check()
    message = str(stop.value)
    assert "\n" not in message and all(remedy in message for remedy in remedies), message


def test_limit_on_locked_memory_counts():
    budget = make_budget({"locked": 60 << 20}, engine="mapped", on_gpu=True)
    with pytest.raises(DoesNotFit, match="^locked CPU memory .* 60 MiB.*transfer.engine=staged"):
        budget.check()


@pytest.mark.parametrize("free", [{"host": 3 * GIB}, {"disk": 5 * GIB}, {"host": 900 << 20}])
def test_each_change_fits_and_a_larger_value_does_not(free):
    budget = make_budget(free)
    fields = {
        "vocab.max_final_vocab": "words",
        "model.vector_size": "vector_size",
        "train.batch_size": "batch_size",
    }
    changes = dict(change.split("=") for change in budget.changes())
    numbers = {fields[key]: int(value) for key, value in changes.items() if key in fields}
    assert numbers
    for field, value in numbers.items():
        assert not budget.lacking(replace(budget.job, **{field: value}))
        assert budget.lacking(replace(budget.job, **{field: int(value * 1.02) + 1}))


@pytest.mark.parametrize(
    "error",
    [MemoryError("cannot pin"), torch.OutOfMemoryError("CUDA"), OSError(12, "No memory")],
    ids=repr,
)
def test_failing_allocation_is_explained(error):
    expected = r"memory ran out \(.*\): host .*; it would fit with vocab.max_final_vocab=8[0-9]+ "
    with pytest.raises(DoesNotFit, match=expected), make_budget().explained():
        raise error


@pytest.mark.parametrize(
    "changes, message, resumed",
    [
        ({}, "can't allocate memory", "transfer.table_dir=FOLDER"),
        ({"in_files": True}, "can't allocate memory", ", when more memory is free"),
        ({"on_gpu": True}, "CUDA out of memory", "transfer.engine=mapped"),
        (
            {"on_gpu": True, "engine": "mapped"},
            "CUDA out of memory",
            "transfer.gpu_bytes=[0-9]+MiB",
        ),
    ],
)
def test_failing_allocation_while_training_names_a_change_for_the_run(changes, message, resumed):
    budget = make_budget({"gpu": 2 * GIB} if "engine" in changes else {}, **changes)
    expected = f"{message}.*; this run goes on with w2v train --resume 'my run'.{{0,1}}{resumed}$"
    with pytest.raises(DoesNotFit, match=expected) as stop, budget.explained(Path("my run")):
        raise RuntimeError(message)
    if kept := re.search("gpu_bytes=([0-9]+)MiB", str(stop.value)):
        slots = cache_rows(budget.job, 2 * GIB)
        assert 0.7 < (int(kept[1]) << 20) / (slots * budget.job.record_bytes) < 0.91


@pytest.mark.parametrize(
    "allocate", [lambda count: torch.empty(count, dtype=torch.uint8), host_memory]
)
def test_real_failing_allocation_is_explained(allocate):
    expected = r"memory ran out \(.*allocate"
    with pytest.raises(DoesNotFit, match=expected), make_budget().explained():
        allocate(1 << 60)


def test_other_errors_are_not_explained():
    with pytest.raises(RuntimeError, match="a bug"), make_budget().explained():
        raise RuntimeError("a bug")


def test_machine_is_shared_by_its_ranks(monkeypatch):
    ranks = Ranks()
    ranks.local_size = 2
    alone, half = Machine.here(), Machine.here(ranks)
    assert half.cores == max(1, alone.cores // 2) and half.host_bytes == alone.host_bytes
    assert half.host_free_bytes == pytest.approx(alone.host_free_bytes / 2, rel=0.2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="2 ranks on a machine of 1 GPUs; .*--nproc-per-node 1"):
        Machine.here(ranks)


@pytest.mark.gpu
def test_trying_to_pin_restores_the_limit():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert pinning_is_limited() in (True, False)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
