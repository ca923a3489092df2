"""Choice of device, engine, kernels and pages, and its errors."""

import re
import socket
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.rank_threads import Threads, together
from tests.support.zipf import zipf_text
from w2v.config import ConfigError, load_config
from w2v.distributed.launcher import NUMBERS, require_environment
from w2v.distributed.ranks import SINGLE, RanksDiffer
from w2v.rows.cache import Engine, RowCache
from w2v.rows.launch import INSTALL_CUPY
from w2v.rows.optim import RowOptimizer
from w2v.text.sources import CorpusError
from w2v.text.vocab import Vocab
from w2v.training import plan
from w2v.training.build import build, make_kernels, make_paging, make_text, most_batch_rows
from w2v.training.memory import Machine, Plan
from w2v.training.plan import choose_device, choose_engine, choose_kernels, describe, make_plan
from w2v.word2vec.cpu import CpuKernels, SequentialSgdKernels
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.sampler import Sampler

CPU, GPU = torch.device("cpu"), torch.device("cuda")
CPU_ONLY = Machine(cores=2, host_bytes=2**34, gpu="", gpu_free_bytes=0, cuda_torch="", cuda_cupy="")
WITH_GPU = Machine(
    cores=16,
    host_bytes=2**37,
    gpu="NVIDIA H200",
    gpu_free_bytes=100 * 2**30,
    cuda_torch="13.0",
    cuda_cupy="13.0",
)
WITHOUT_CUPY = replace(WITH_GPU, cuda_cupy="")
HUGE = 2**50  # bytes of tables that fit on no GPU


@pytest.fixture(autouse=True)
def warnings_are_logged(caplog):
    """Record warnings, whatever level an earlier test has set."""
    caplog.set_level("WARNING", "w2v")


def configured(*assignments):
    return load_config([], assignments)


def zipf_plan(rows, words, *assignments):
    """Plan a run on the CPU over a text by Zipf's law."""
    config = configured("vocab.min_count=1", "train.device=cpu", *assignments)
    return make_plan(config, zipf_text(rows, words))


@each_case(
    "given, missing",
    [
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE, RANK"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "MASTER_PORT",
        ),
    ],
)
def test_variables_of_torchrun_that_are_missing_are_named(monkeypatch, given, missing):
    for name in NUMBERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=f"WORLD_SIZE={given['WORLD_SIZE']} .*: {missing}.*torchrun"
    ):
        plan.join_ranks(load_config([], []))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert plan.join_ranks(load_config([], [])) is SINGLE


RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@each_case(
    "wrong, message",
    [
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK=3 must be below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK=0 must be below LOCAL_WORLD_SIZE=0"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; start ranks with torchrun"),
    ],
)
def test_rank_that_does_not_exist_is_refused_at_once(monkeypatch, wrong, message):
    for name, value in (RANK_0 | {"MASTER_PORT": "1"} | wrong).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        require_environment()


def test_port_in_use_is_named(monkeypatch):
    with socket.create_server(("localhost", 0)) as other:
        port = other.getsockname()[1]
        for name, value in (RANK_0 | {"MASTER_ADDR": "localhost"}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is in use"):
            plan.join_ranks(configured("train.device=cpu"))


def test_device():
    assert choose_device(configured(), CPU_ONLY).type == "cpu"
    assert choose_device(configured(), WITH_GPU).type == "cuda"
    assert choose_device(configured("train.device=cpu"), WITH_GPU).type == "cpu"
    wanted = configured("train.device=cuda")
    with pytest.raises(ConfigError, match="train.device=cuda.* CPU build.*train.device=cpu"):
        choose_device(wanted, CPU_ONLY)
    with pytest.raises(ConfigError, match="train.device=cuda.* no usable NVIDIA GPU"):
        choose_device(wanted, replace(CPU_ONLY, cuda_torch="13.0"))


@pytest.mark.parametrize("negative, rows", [(0, 5), (3, 9)])
def test_nodes_are_rows_of_the_output_table(negative, rows, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a b c d e a b c d a b c a b a\n" * 20)
    paths = f"corpus.path={text}", f"corpus.data_dir={tmp_path}", "train.device=cpu"
    model = "model.hs=true", f"model.negative={negative}", "vocab.min_count=1", "model.sample=0"
    made = make_plan(configured(*paths, *model))
    assert made.shape.vectors == rows
    loop = build(made)
    assert loop.step.inputs.rows == loop.step.outputs.rows == rows
    assert loop.step.inputs["weight"][:5].any(1).all()
    assert not loop.step.inputs["weight"][5:].any()
    for _ in loop.epoch():
        pass
    assert not loop.step.inputs["weight"][5:].any()
    trained = loop.step.outputs["weight"].any(1)
    assert trained[: 4 if not negative else rows].all()


@pytest.mark.parametrize(
    "machine, warned",
    [
        (replace(WITH_GPU, cuda_cupy="12.9"), ["13.0", "12.9", INSTALL_CUPY]),
        (WITHOUT_CUPY, ["CuPy cannot be imported", INSTALL_CUPY]),
        (
            replace(WITH_GPU, gpu_free_bytes=2**28, lockable_bytes=2**20),
            ["only 1 MiB", "ulimit -l", "--ulimit memlock=-1", "transfer.engine=staged"],
        ),
    ],
)
@pytest.mark.parametrize("gpu_bytes", ["80%", "10%"])
def test_what_a_machine_lacks_is_warned_of_once(machine, warned, gpu_bytes, monkeypatch, caplog):
    """Even where all is planned again for a smaller batch."""
    monkeypatch.setattr(Machine, "here", lambda ranks: machine)
    settings = "vocab.min_count=1", "train.batch_size=4096", f"transfer.gpu_bytes={gpu_bytes}"
    engine = "auto" if machine.gpu_free_bytes < 2**30 else "staged"
    text = zipf_text(20_000, 800_000)
    made = make_plan(configured(*settings, f"transfer.engine={engine}"), text)
    assert made.engine == "staged"
    assert (made.config.train.batch_size < 4096) == (gpu_bytes == "10%")
    [warning] = [said for said in caplog.messages if "transfer.gpu_bytes" not in said]
    assert all(part in warning for part in warned)
    assert len(caplog.messages) == 1 + (gpu_bytes == "10%")


@each_case(
    "settings, machine, ranks, kernels",
    [
        ([], CPU_ONLY, 1, "cpu"),
        (["train.kernels=fused"], CPU_ONLY, 1, "cpu"),
        (["train.deterministic=true"], CPU_ONLY, 1, "cpu"),
        (["train.kernels=reference"], CPU_ONLY, 1, "reference"),
        (["train.precision=bf16"], CPU_ONLY, 1, "reference"),
        ([], CPU_ONLY, 2, "cpu"),
        (["optimizer.name=SGD", "optimizer.occurrence_cap=0"], CPU_ONLY, 2, "cpu"),
        (["optimizer.name=SGD", "optimizer.occurrence_cap=0"], CPU_ONLY, 1, "sequential"),
        (["optimizer.name=SGD", "optimizer.occurrence_cap=8"], CPU_ONLY, 1, "cpu"),
        (["optimizer.name=NAdam"], CPU_ONLY, 1, "cpu"),
        ([], WITH_GPU, 1, "cuda"),
        (["train.precision=bf16"], WITH_GPU, 2, "cuda"),
        (["optimizer.name=SGD"], WITH_GPU, 1, "cuda"),
        (["optimizer.name=NAdam"], WITH_GPU, 1, "cuda"),
        (["optimizer.name=NAdam"], WITH_GPU, 2, "reference"),
        (["train.kernels=reference"], WITH_GPU, 1, "reference"),
        (["train.deterministic=true"], WITH_GPU, 1, "reference"),
        ([], WITHOUT_CUPY, 1, "reference"),
    ],
)
def test_kernels(settings, machine, ranks, kernels):
    ranks = Threads(0, ranks, None)
    assert choose_kernels(configured(*settings), machine, ranks) == kernels


@each_case(
    "setting, machine, ranks, obstacle",
    [
        ("train.precision=amp", CPU_ONLY, 1, "train.precision=amp"),
        ("optimizer.name=NAdam", WITH_GPU, 2, "optimizer.name=NAdam"),
        ("train.deterministic=true", WITH_GPU, 1, "train.deterministic=true"),
        ("train.epochs=1", WITHOUT_CUPY, 1, "CuPy"),
    ],
)
def test_fused_kernels_that_cannot_be_had_are_an_error(setting, machine, ranks, obstacle):
    config = configured("train.kernels=fused", setting)
    with pytest.raises(ConfigError, match=f"{obstacle}.*set train.kernels=auto"):
        choose_kernels(config, machine, Threads(0, ranks, None))


def test_cbow_vectors_longer_than_shared_memory_are_refused_before_the_text_is_read(monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda *_: WITH_GPU)
    cbow = "model.architecture=cbow", "corpus.path=no-such-text.txt"
    with pytest.raises(ConfigError, match="vector_size=12288 .*12,287.*train.kernels=reference"):
        make_plan(configured(*cbow, "model.vector_size=12288"))
    for others in (["model.vector_size=12287"], ["train.kernels=reference"], ["train.device=cpu"]):
        with pytest.raises(CorpusError, match="no-such-text"):
            make_plan(configured(*cbow, "model.vector_size=12288", *others))


def engine_of(config, machine, device, table_bytes):
    """Choose the engine for tables of so many bytes, which have rows of 1 KiB."""
    model = replace(config.model, vector_size=256)
    sgd = replace(config.optimizer, name="SGD", args={})
    task = Plan(
        config=replace(config, model=model, train=replace(config.train, batch_size=1024)),
        machine=machine,
        vocab=SimpleNamespace(counts=np.broadcast_to(1, max(1, table_bytes >> 11))),
        corpus=SimpleNamespace(ids=np.zeros(10**6, np.int32), offsets=np.arange(2)),
        centers=10**6,
        optimizer=RowOptimizer(sgd),
        device=device,
        kernels="cuda",
        free={
            "host": HUGE,
            "locked": machine.lockable_bytes,
            "gpu": machine.gpu_free_bytes,
            "disk": HUGE,
            "files": HUGE,
        },
    )
    return choose_engine(task)


@each_case("gib, engine", [(1, "resident"), (98, "resident"), (99, "mapped")])
def test_tables_stay_on_the_gpu_if_they_fit(gib, engine):
    chosen, reason = engine_of(configured(), WITH_GPU, GPU, gib * 2**30)
    assert chosen == engine
    assert f"{gib}.0 GiB" in reason and "100.0 GiB free" in reason


@each_case("room, engine", [("50%", "mapped"), ("0", "mapped"), ("1GiB", "resident")])
def test_tables_that_exceed_the_memory_given_are_paged(room, engine):
    given = configured(f"transfer.gpu_bytes={room}")
    assert engine_of(given, WITH_GPU, GPU, 2**30)[0] == engine
    assert engine_of(given, CPU_ONLY, CPU, 2**30)[0] == "resident"


def test_configured_engine():
    mapped, resident = (configured(f"transfer.engine={name}") for name in ("mapped", "resident"))
    assert engine_of(mapped, WITH_GPU, GPU, 1)[0] == "mapped"
    assert engine_of(resident, WITH_GPU, GPU, HUGE)[0] == "resident"
    with pytest.raises(ConfigError, match="transfer.engine=mapped.*transfer.engine=resident"):
        engine_of(mapped, CPU_ONLY, CPU, 1)
    part, whole = (f"transfer.gpu_bytes={room}" for room in ("10%", "100%"))
    with pytest.raises(ConfigError, match="engine=resident and .*gpu_bytes=10% exclude each other"):
        engine_of(configured("transfer.engine=resident", part), WITH_GPU, GPU, 2**30)
    both = configured("transfer.engine=resident", whole)
    assert engine_of(both, WITH_GPU, GPU, 2**30)[0] == "resident"


def test_without_cupy_rows_are_staged():
    assert engine_of(configured(), WITHOUT_CUPY, GPU, HUGE)[0] == "staged"
    mapped = configured("transfer.engine=mapped")
    remedy = re.escape(f"{INSTALL_CUPY}, or set transfer.engine=staged")
    with pytest.raises(ConfigError, match=f"mapped needs CuPy, .*; {remedy}"):
        engine_of(mapped, WITHOUT_CUPY, GPU, 1)


@pytest.mark.parametrize("wanted", ["auto", "mapped"])
def test_rows_are_staged_where_little_memory_may_be_locked(wanted):
    machine = replace(WITH_GPU, lockable_bytes=2**26)
    config = configured(f"transfer.engine={wanted}")
    engine, reason = engine_of(config, machine, GPU, HUGE)
    assert engine == "staged" and "64 MiB" in reason


def test_tables_in_files(tmp_path):
    in_files = f"transfer.table_dir={tmp_path}"
    assert engine_of(configured(in_files), WITH_GPU, GPU, 1)[0] == "staged"
    assert engine_of(configured(in_files), CPU_ONLY, CPU, 1)[0] == "resident"
    mapped = configured(in_files, "transfer.engine=mapped")
    with pytest.raises(ConfigError, match="mapped cannot read.*transfer.engine=staged"):
        engine_of(mapped, WITH_GPU, GPU, 1)


def test_runs_share_a_folder_of_tables_in_files(tmp_path):
    """Even two of one process, or of the same process id in two containers."""
    planned = zipf_plan(200, 2000, f"transfer.table_dir={tmp_path}")
    first, second = (build(planned).step.inputs for _ in range(2))
    before = second.records_VR.clone()
    first.records_VR.fill_(7)
    assert torch.equal(second.records_VR, before)


def test_tables_in_files_are_gone_when_the_process_is_killed(tmp_path):
    """The files have no name, so that nothing can be left of them."""
    loop = build(zipf_plan(200, 2000, f"transfer.table_dir={tmp_path}"))
    mapped = Path("/proc/self/maps").read_text().count(str(tmp_path))
    assert mapped == 1 and not any(tmp_path.iterdir())
    del loop


def task_on_gpu(*settings, centers):
    config = configured(*settings)
    return SimpleNamespace(
        config=config,
        centers=centers,
        optimizer=RowOptimizer(config.optimizer),
        kernels="cuda",
        on_gpu=True,
        ranks=SINGLE,
    )


def test_text_too_small_for_the_batch_size_is_warned_of(caplog):
    vocab = Vocab(["a", "b"], np.array([6000, 4000]), raw_words=10_000, raw_types=2)

    def warning(*assignments):
        caplog.clear()
        centers = vocab.kept_counts(configured(*assignments).model.sample).sum()
        plan.warn_of_settings(task_on_gpu(*assignments, centers=centers), batch_is_given=True)
        return caplog.text

    enough = "model.sample=0", "train.epochs=10"
    assert not warning(*enough, "train.batch_size=1000")
    few = warning(*enough, "train.batch_size=4000")
    assert "train.batch_size=4000 leaves 25 " in few and "train.batch_size=auto" in few
    none = warning("model.sample=1e-6", "train.epochs=1", "train.batch_size=1")
    assert "train.batch_size=1 " in none and "more text" in none


def test_a_resumed_run_keeps_its_batch_size_without_a_warning(tmp_path, caplog, monkeypatch):
    config = configured("vocab.min_count=1", "train.device=cpu", "train.batch_size=1000")
    for run, warned in ((None, True), (tmp_path, False)):
        caplog.clear()
        make_plan(config, zipf_text(200, 2000), run)
        assert ("set train.batch_size=auto" in caplog.text) == warned
    monkeypatch.setattr(Machine, "here", lambda ranks: WITH_GPU)
    little = "vocab.min_count=1", "train.batch_size=1000", "transfer.gpu_bytes=100KiB"
    assert make_plan(configured(*little), zipf_text(2000, 9000)).config.train.batch_size < 1000
    with pytest.raises(ConfigError, match="batch of 1,000, which a resumed run keeps; raise it"):
        make_plan(configured(*little), zipf_text(2000, 9000), tmp_path)


@pytest.mark.parametrize(
    "precision, settings, warned",
    [
        ("fp16", ["optimizer.args={eps: 1e-8}"], "1e-08.*optimizer.args.eps=0.00025"),
        ("fp16", ["optimizer.name=Adagrad", "optimizer.args={lr_decay: 0}"], "Adagrad .*1e-10"),
        ("fp16", ["optimizer.name=Adam", "optimizer.args.eps=0.001"], None),
        ("fp16", ["optimizer.name=SGD"], None),
        ("bf16", ["optimizer.name=Adam"], None),
    ],
)
def test_eps_too_small_for_float16_is_warned_of(precision, settings, warned, caplog):
    settings = [f"train.precision={precision}", "train.batch_size=1000", *settings]
    plan.warn_of_settings(task_on_gpu(*settings, centers=1e9), batch_is_given=True)
    assert re.search(warned, caplog.text) if warned else not caplog.text


@pytest.mark.parametrize("kernels, warned", [("cuda", True), ("reference", False)])
def test_16_bit_products_that_no_kernel_makes_are_warned_of(kernels, warned, caplog):
    task = task_on_gpu("train.precision=amp", "train.batch_size=1000", centers=1e9)
    task.kernels = kernels
    plan.warn_of_settings(task, batch_is_given=True)
    assert ("train.precision=amp" in caplog.text) == ("precision=bf16" in caplog.text) == warned


@each_case("given", ["20", "0.5", "0.001%"])
def test_a_cache_without_room_for_a_row_is_refused_unless_it_is_0(given, monkeypatch):
    monkeypatch.setattr(Machine, "here", lambda ranks: WITH_GPU)
    text, settings = zipf_text(100, 10_000), ("vocab.min_count=1", "transfer.engine=staged")
    with pytest.raises(ConfigError, match=f"gpu_bytes={given} .*room for a row.*such as 20GiB"):
        make_plan(configured(*settings, f"transfer.gpu_bytes={given}"), text)
    for zero in ("0", "0%"):
        plan = make_plan(configured(*settings, f"transfer.gpu_bytes={zero}"), text)
        assert sum(plan.touched(plan.config.train.batch_size)) <= plan.slots  # for one page
    pool = "model.negative=20", "model.negative_pool=30", "train.batch_size=4", "model.window=1"
    several = *settings, *pool, "transfer.steps_per_page=4", "transfer.gpu_bytes=0"
    plan = make_plan(configured(*several), zipf_text(2000, 10_000))
    assert plan.slots >= 16 + 4 * 30  # steps of a page may each have a pool of their own
    make_plan(
        configured("vocab.min_count=1", f"transfer.gpu_bytes={given}", "train.device=cpu"), text
    )


def test_plan_in_words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n" * 50)
    paths = f"corpus.path={text}", f"corpus.data_dir={tmp_path}", "train.device=cpu"
    made = make_plan(configured(*paths, "optimizer.lr=0.4"))
    words = describe(made)
    assert len(words.splitlines()) <= 9
    for part in (
        "200 words in 50 lines",
        "4 of 4 distinct words kept",
        "2 tables of 4 words x 100 numbers (weights, exp_avg_sq, step)",
        "Adam, learning rate 0.4 (linear), 5 epochs in steps of 2 words, betas [0.0, 0.99],",
        "auto      sample 0.25 (trains on 100% of the words)",
        "; batch_size 2 centers",
        "tables resident on cpu",
        "compiled by numba, numbers in float32",
    ):
        assert part in words
    sgd = "optimizer.name=SGD", "optimizer.occurrence_cap=0"
    assert "each center a step" in describe(make_plan(configured(*paths, *sgd)))
    plain = make_plan(configured(*paths, "train.kernels=reference", "train.precision=bf16"))
    assert "plain torch, numbers in bf16" in describe(plain)
    text.write_text("One two, three four.\n" * 50)
    assert "50 % of the tokens end in punctuation" in describe(make_plan(configured(*paths)))


class Many(Threads):
    """One of several ranks, which all know the same."""

    def all_gather(self, fact, group="main"):
        return [fact] * self.size


@pytest.mark.parametrize("batch, warned", [(4096, True), (65_536, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_too_small_for_several_gpus_are_warned_of(
    monkeypatch, caplog, batch, warned, ranks
):
    monkeypatch.setattr(Machine, "here", lambda ranks: WITH_GPU)
    settings = "transfer.engine=resident", "vocab.min_count=1", f"train.batch_size={batch}"
    made = make_plan(configured(*settings), zipf_text(2000, 80_000), ranks=Many(0, ranks, None))
    assert ("faster on 2 GPUs" in caplog.text) == (warned and ranks == 2)
    assert ("2, each with 1,000 rows" in describe(made)) == (ranks == 2)


def test_automatic_arguments_have_an_eps_for_float16(caplog):
    settings = "train.device=cpu", "train.precision=fp16", "optimizer.args={}"
    made = make_plan(configured(*settings), zipf_text(2000, 80_000))
    assert made.config.optimizer.args["eps"] == 1
    assert not any("divides by its eps" in message for message in caplog.messages)


def test_ranks_without_gpus_are_warned_of(caplog):
    make_plan(configured("train.device=cpu"), zipf_text(2000, 80_000), ranks=Many(0, 2, None))
    assert any("2 ranks without GPUs" in message for message in caplog.messages)


def test_ranks_plan_alike_and_hear_of_errors_of_one(monkeypatch):
    """Though they have other machines."""

    def planned(machines, text, *settings):
        monkeypatch.setattr(Machine, "here", lambda ranks: machines[ranks.rank])
        config = configured("vocab.min_count=1", *settings)
        return together(len(machines), lambda ranks: make_plan(config, text, ranks=ranks))

    small = replace(WITH_GPU, gpu_free_bytes=1200 * 2**20)
    plans = planned([WITH_GPU, small], zipf_text(2000, 80_000), "model.vector_size=12000")
    assert plans[0].engine == plans[1].engine == "mapped" and plans[0].slots == plans[1].slots
    assert plans[0].config == plans[1].config
    text = zipf_text(3, 1000)
    for machines, settings, message in (
        ([WITH_GPU] * 4, ["train.device=cpu"], "3 words.*4 ranks"),
        ([WITH_GPU, WITHOUT_CUPY], ["transfer.engine=mapped"], "CuPy|choice of kernels"),
        ([WITH_GPU, CPU_ONLY], ["train.device=cuda"], "train.device=cuda, but"),
    ):
        errors = planned(machines, text, *settings)
        assert {type(error) for error in errors} <= {ConfigError, RanksDiffer}, errors
        assert all(re.search(message, str(error)) for error in errors)


def paging_of(planned, **changes):
    changed = replace(planned, **changes)
    return make_paging(changed, make_text(changed))


def test_pages_have_as_many_steps_as_there_is_room_for():
    made = zipf_plan(900, 8000, "train.batch_size=50")
    paged = replace(made, engine="mapped")
    slots = 1800, 1799, 900, 300, 0
    found = [paging_of(paged, slots=number).steps for number in slots]
    assert found == sorted(found, reverse=True)
    assert found[0] == 8 and found[2] in (2, 4) and found[-1] == 1
    three = configured("transfer.steps_per_page=3").transfer
    wanted = replace(paged.config, transfer=three)
    assert {paging_of(paged, slots=number, config=wanted).steps for number in slots} == {3}


@pytest.mark.parametrize("settings", [["optimizer.lr=0.1"], [], ["transfer.steps_per_page=2"]])
def test_batch_too_large_for_the_cache_is_made_smaller(settings, monkeypatch, caplog):
    monkeypatch.setattr(Machine, "here", lambda ranks: WITH_GPU)
    settings = [*settings, "vocab.min_count=1", "transfer.engine=staged", "train.batch_size=4096"]
    text = zipf_text(20_000, 800_000)
    most, tenth = (
        make_plan(configured(*settings, f"transfer.gpu_bytes={share}"), text)
        for share in ("80%", "10%")
    )
    assert most.config.train.batch_size == 4096 > tenth.config.train.batch_size
    [warning] = caplog.messages
    assert f"batch of 4,096: using train.batch_size={tenth.config.train.batch_size}" in warning
    # The first pages fit; a batch twice as large has more rows.
    on_cpu = replace(tenth, device=CPU, kernels="cpu")
    kernels, config = make_kernels(on_cpu), on_cpu.config
    draws = {"subsample": kernels.subsample, "draw": kernels.draw}
    sampler = Sampler(make_text(on_cpu), config.model, config.train.batch_size, 1, CPU, **draws)
    marks_A = torch.zeros(2 * 20_000, dtype=torch.bool)
    rows = []
    steps = max(1, config.transfer.steps_per_page)
    for batch in islice(sampler.epoch(), 2 * steps):
        kernels.mark(batch, marks_A)
        rows.append(int(marks_A.sum()))
    assert rows[steps - 1] <= tenth.slots < rows[-1]


def test_lookahead_where_rows_are_paged():
    made = zipf_plan(20_000, 800_000, "train.batch_size=256", "model.negative_pool=256")
    paged = replace(made, engine="mapped", slots=25_000)
    unpaged = made, replace(made, slots=25_000), replace(paged, slots=40_000)
    assert not any(paging_of(one).lookahead for one in unpaged)
    found = paging_of(paged)
    assert 0 < paging_of(paged, slots=14_000).lookahead < found.lookahead < 800_000 / 32 / 256
    assert "cache of 25,000 rows" in describe(paged)
    off = configured("transfer.lookahead=false").transfer
    assert paging_of(paged, config=replace(made.config, transfer=off)) == (found.steps, 0)


def test_build_names_the_pages(caplog):
    caplog.set_level("INFO", "w2v")
    build(replace(zipf_plan(2_000, 8_000, "train.batch_size=64"), engine="staged", slots=3_000))
    assert re.search("^pages .* steps each, lookahead window of [0-9,]+ words", caplog.messages[-1])


def test_build_makes_the_planned_parts():
    small = "model.vector_size=4", "train.batch_size=50"
    made = zipf_plan(200, 2000, *small)
    staged = replace(made, engine="staged", slots=300)
    for planned, engine, kernels in (
        (made, Engine, CpuKernels),
        (replace(made, kernels="sequential"), Engine, SequentialSgdKernels),
        (replace(staged, kernels="reference"), RowCache, ReferenceKernels),
    ):
        step = build(planned).step
        assert type(step.engine) is engine and type(step.kernels) is kernels
        weights = step.inputs["weight"]
        assert 0 < weights.abs().max() <= 0.5 / 4 and weights.unique().numel() > 700
        assert not step.outputs["weight"].any()


def test_rows_count_their_own_steps_where_kernels_step_them():
    for name, step in (("Adam", "row"), ("NAdam", "table")):  # torch is slow at it
        given = f"optimizer.name={name}", "optimizer.step=auto"
        made = zipf_plan(200, 2000, *given)
        assert made.config.optimizer.step == step
        assert ("steps by torch" in describe(made)) == (name == "NAdam")


def test_lookahead_changes_no_bit_and_reads_fewer_rows(one_thread):
    model = "model.vector_size=4", "model.negative_pool=128", "model.negative_pool_steps=8"
    steps = "optimizer.name=Adam", "optimizer.lr=0.01", "train.batch_size=128"
    made = zipf_plan(5_000, 40_000, *model, *steps, "train.kernels=reference", "train.epochs=1")
    paged = replace(made, engine="staged", slots=3_750)
    off = replace(made.config.transfer, lookahead=False)
    blind = replace(paged, config=replace(made.config, transfer=off))
    rows_read = []
    tables = []
    for planned in (made, paged, blind):
        loop = build(planned)
        list(loop.epoch())
        loop.step.engine.flush()
        rows_read.append(loop.step.engine.stats.rows_read)
        tables.append([loop.step.table.records_VR])
    for others in tables[1:]:
        assert all(map(torch.equal, others, tables[0]))
    assert paging_of(paged).lookahead > 1 and paging_of(blind).lookahead == 0
    assert rows_read[0] == 0 < rows_read[1] < 0.9 * rows_read[2]


@each_case("centers, threads", [(16, 1), (512, 1), (700, 2), (65536, 4)])
def test_small_steps_take_few_threads(centers, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    config = configured(f"train.batch_size={centers}", "model.vector_size=100", "model.window=5")
    made = replace(zipf_plan(200, 2000), config=config)
    assert made.threads == threads


def test_lists_for_peers_have_room_for_the_pool_of_a_batch():
    planned = SimpleNamespace(
        config=load_config(
            [], ["train.batch_size=40", "model.negative=9", "model.negative_pool=32"]
        ),
        ranks=SimpleNamespace(size=2),
        words=1_000,
        vectors=1_000,
    )
    assert most_batch_rows(planned, None) == (20 + 2 * 5) + (20 + 32)


def test_subwords_are_planned():
    words = zipf_plan(300, 20_000)
    made = zipf_plan(300, 20_000, "model.subwords=true", "model.min_n=1", "optimizer.name=SGD")
    assert made.kernels == "cpu"  # and not a step at each center
    assert made.config.model.buckets >= len(made.subwords.used_B) > 0
    more = 2 * made.shape.vectors - 2 * words.shape.vectors
    assert more - made.subwords.rows in (0, 1)
    assert f"{made.subwords.rows:,} of subwords" in describe(made)
    assert f"in {made.config.model.buckets:,} buckets" in describe(made)
    given = zipf_plan(300, 20_000, "model.subwords=true", "model.buckets=7")
    assert given.config.model.buckets == 7 == len(given.subwords.used_B)
    size, dim = given.words, given.config.model.vector_size
    for formats, rows in (("kv,bin", 3 * size + 7), ("kv,bin,fasttext", 5 * size + 14)):
        run = replace(given.config.run, formats=formats)
        written = replace(given, config=replace(given.config, run=run)).needs()["disk"]["vectors"]
        assert written == 4 * dim * rows + 32 * size
    built = build(given)
    weight_AD = built.step.table["weight"]
    first = given.subwords.first
    assert (weight_AD[first : first + given.subwords.rows] != 0).all(1).all()
    assert not built.step.outputs["weight"][:300].any()


def test_what_subwords_cannot_do_is_refused(caplog):
    unused = task_on_gpu("model.min_n=3", "train.batch_size=9", centers=1e9)
    plan.warn_of_settings(unused, batch_is_given=True)
    assert "model.min_n has no effect without model.subwords=true" in caplog.text
    settings = "train.device=cpu", "model.subwords=true"
    for others in (["model.subwords=false"], ["model.hs=true", "model.negative=0"]):
        with pytest.raises(ConfigError, match="formats=kv,fasttext needs model.subwords=true"):
            make_plan(configured(*settings, "run.formats=kv,fasttext", *others))
    with pytest.raises(ConfigError, match="model.max_n=2 .* at least model.min_n=3"):
        configured("model.max_n=2", "model.min_n=3")
