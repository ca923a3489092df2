"""Whether a run fits is known before it begins, and what would make it fit."""

import os
import resource
from dataclasses import replace

import pytest
import torch

from w2v.config import OptimizerConfig
from w2v.model.optim import RowOptimizer
from w2v.model.table import Table, host_memory
from w2v.training import memory as budget
from w2v.training.memory import Budget, DoesNotFit, Job, free_host_bytes

GIB = 1 << 30
PLENTY = {"host": 1000 * GIB, "locked": 1000 * GIB, "gpu": 1000 * GIB, "disk": 1000 * GIB}


def states(name):
    return RowOptimizer(OptimizerConfig(name=name)).states


def made(free=(), **job):
    given = dict(
        words=1_000_000,
        vector_size=128,
        states=states("Adam"),
        engine="resident",
        on_gpu=False,
        batch_size=1000,
        pairs=16,
    )
    return Budget(
        Job(**given | job),
        PLENTY | dict(free),
        "runs",
        lambda: {name: states(name) for name in ("RMSprop", "SGD")},
    )


@pytest.mark.parametrize("name, dim", [("Adam", 7), ("SGD", 128), ("NAdam", 33)])
def test_the_bytes_of_tables_are_those_that_tables_take(name, dim):
    optimizer = RowOptimizer(OptimizerConfig(name=name))
    tables = [
        Table(part, 11, dim, optimizer.states(dim), optimizer.scalars, "cpu")
        for part in ("input", "output")
    ]
    assert made(words=11, vector_size=dim, states=optimizer.states).job.table_bytes == sum(
        table.bytes for table in tables
    )


def test_purposes_and_places():
    tables = 2 * 1_000_000 * 1536
    on_cpu, resident, mapped, staged = (
        made(engine=engine, on_gpu=on_gpu, kept_bytes=5).job.needs()
        for engine, on_gpu in [
            ("resident", False),
            ("resident", True),
            ("mapped", True),
            ("staged", True),
        ]
    )
    assert on_cpu["host"]["tables"] == tables and not on_cpu["gpu"] and not on_cpu["locked"]
    assert resident["gpu"]["tables"] == tables and "tables" not in resident["host"]
    assert (
        mapped["host"]["tables"] == mapped["locked"]["tables"] == tables
        and mapped["gpu"]["rows"] == 5
    )
    assert staged["host"]["tables"] == tables and staged["locked"] == {"buffers": 48 << 20}
    assert on_cpu["disk"] == {"checkpoints": 3 * tables, "vectors": 2 * 512_000_000 + 32_000_000}
    assert made(checkpoints=False).job.needs()["disk"]["checkpoints"] == tables


def test_what_fits_is_said_with_its_bytes():
    fits = made()
    fits.check()
    assert (
        "disk      checkpoints 8.6 GiB + vectors 1007 MiB = 9.6 GiB of 1000.0 GiB free in runs"
        in str(fits)
    )
    assert "host      program 400 MiB + tables 2.9 GiB" in str(fits)
    made({"host": 4 * GIB}).check()


def test_what_memory_is_left_is_for_copies_of_the_tables():
    """Program, tables and vectors take 3.7 GiB, and a sixteenth of what is free is left alone."""
    tables = made().job.table_bytes
    copies = {host: made({"host": host * GIB}).copies for host in (4, 5, 6, 7, 8)}
    assert copies == {4: 0, 5: 0, 6: GIB, 7: 2 * GIB, 8: tables} and made().copies == tables
    assert "while training goes on, from a copy of the tables" in made().saving
    part = made({"host": 6 * GIB})
    assert (
        "while training waits, except for up to 1.0 GiB of 2.9 GiB, as many files as memory has room to copy"
        in part.saving
    )
    assert "+ copies 1.0 GiB = 4.7 GiB of 6.0 GiB free" in str(part) and "copies" not in str(
        made({"host": 5 * GIB})
    )
    assert "while training waits: no room" in made({"host": 4 * GIB}).saving
    small = made(words=80_000)
    assert (
        not small.copies
        and "while training waits: small" in small.saving
        and made(words=80_000, on_gpu=True).copies
    )
    assert (
        not made(checkpoints=False).copies
        and "when training is over" in made(checkpoints=False).saving
    )


def test_tables_in_files_keep_the_memory_that_their_cache_would_use():
    assert made({"host": 7 * GIB}, in_files=True).copies == made({"host": 7 * GIB}).copies


@pytest.mark.parametrize(
    "short, what, remedies",
    [
        (
            {"host": 3 * GIB},
            "CPU memory would run out: host",
            "vocab.max_final_vocab=781000 model.vector_size=96 optimizer.name=RMSprop",
        ),
        ({"host": 2 * GIB}, "CPU memory would run out", "optimizer.name=SGD"),
        ({"disk": 9 * GIB}, "disk would run out", "run.checkpoint_minutes=0 run.dir=FOLDER"),
        ({"gpu": 3 * GIB}, "GPU memory would run out", "transfer.engine=mapped"),
        ({"gpu": 3 * GIB, "locked": GIB}, "GPU memory would run out", "transfer.engine=staged"),
        (
            {"gpu": GIB},
            "GPU memory would run out",
            "no single change is enough: take a larger machine",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_smallest_changes(short, what, remedies):
    budgeted = made(short, on_gpu="gpu" in short)
    with pytest.raises(DoesNotFit, match=f"^{what}.*") as stop:
        budgeted.check()
    said = str(stop.value)
    assert "\n" not in said
    for remedy in remedies.split() if "=" in remedies else [remedies]:
        assert remedy in said, said


def test_lockable_memory_counts():
    said = r"^locked CPU memory would run out: .*locked tables 2.9 GiB = 2.9 GiB of 60 MiB free.*transfer.engine=staged"
    with pytest.raises(DoesNotFit, match=said):
        made({"locked": 60 << 20}, engine="mapped", on_gpu=True).check()


@pytest.mark.parametrize("short", [{"host": 3 * GIB}, {"disk": 5 * GIB}, {"host": 900 << 20}])
def test_each_change_makes_it_fit_and_a_larger_one_does_not(short):
    budgeted = made(short)
    settings = {
        "vocab.max_final_vocab": "words",
        "model.vector_size": "vector_size",
        "train.batch_size": "batch_size",
    }
    for change in budgeted.changes():
        name, value = change.split("=")
        if name in settings:
            number = int(value)
            assert not budgeted.lacking(replace(budgeted.job, **{settings[name]: number}))
            assert budgeted.lacking(
                replace(budgeted.job, **{settings[name]: int(number * 1.02) + 1})
            )


def machine(root, cgroup="", **files):
    system = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {1 << 24} kB\n",
        "proc/self/cgroup": cgroup,
    }
    for name, text in (system | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_memory_that_is_free(tmp_path):
    assert free_host_bytes(machine(tmp_path / "plain")) == 1 << 34


def group(folder, names, limit, used, stat):
    return dict(
        zip(
            [f"sys/fs/cgroup/{folder}{name}" for name in (*names, "memory.stat")],
            map(str, (limit, used, stat)),
            strict=True,
        )
    )


V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")


@pytest.mark.parametrize(
    "cgroup, files, free",
    [
        (
            "0::/a/gone\n",
            group("a/", V2, "max", 5, "inactive_file 1")
            | group("", V2, 8000, 5000, "x 1\ninactive_file 700"),
            3700,
        ),
        (
            "5:cpu:/\n4:memory:/docker/1\n",
            group("memory/docker/1/", V1, 9000, 9500, "total_inactive_file 600"),
            100,
        ),
        ("4:memory:/\n", group("memory/", V1, 2**63 - 4096, 1, ""), 1 << 34),
    ],
)
def test_memory_that_control_groups_leave(tmp_path, cgroup, files, free):
    assert free_host_bytes(machine(tmp_path, cgroup, **files)) == free


def test_disk_is_that_of_the_folder_to_be(tmp_path):
    there = os.statvfs(tmp_path)
    assert budget.free_disk_bytes(tmp_path / "not" / "yet") == pytest.approx(
        there.f_bavail * there.f_frsize, rel=0.1
    )


@pytest.mark.parametrize(
    "error",
    [MemoryError("cannot pin"), torch.OutOfMemoryError("CUDA"), OSError(12, "No memory")],
    ids=repr,
)
def test_an_allocation_that_fails_anyway_says_the_same(error):
    with (
        pytest.raises(
            DoesNotFit,
            match=r"memory ran out \(.*\): host program .* free.*; (it would fit|no single)",
        ),
        made().explained(),
    ):
        raise error
    with pytest.raises(RuntimeError, match="a bug"), made().explained():
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    "allocate",
    [lambda count: torch.empty(count, dtype=torch.uint8), host_memory],
    ids=["torch", "mmap"],
)
def test_real_allocations_that_fail_say_the_same(allocate):
    said = r"memory ran out \(.*allocate.*\): host program .* free.*; (it would fit with|no single)"
    with pytest.raises(DoesNotFit, match=said), made().explained():
        allocate(1 << 60)


def test_the_programs_own_limit_counts(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 33, 1 << 33))
    assert 0 < free_host_bytes() < 1 << 33


@pytest.mark.gpu
def test_whether_pinning_is_limited_is_found_out_and_the_limit_put_back():
    from w2v.model.table import pinning_is_limited

    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert pinning_is_limited() in (True, False)
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
