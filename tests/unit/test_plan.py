"""Which device and engine are chosen, and what is said where a choice cannot be had."""

import logging
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from tests.bench import zipf
from tests.oracle.test_cached import HostLink
from w2v.config import ConfigError, load_config
from w2v.text import opening
from w2v.training import backends, plan
from w2v.transfer import timing

CPU_ONLY = plan.Machine(
    cores=2, host_bytes=2**34, gpu="", gpu_free_bytes=0, cuda_torch="", cuda_cupy=""
)
WITH_GPU = plan.Machine(16, 2**37, "NVIDIA H200", 100 * 2**30, "13.0", "13.0")
GPU = torch.device("cuda")


def configured(*assignments):
    return load_config([], assignments)


def test_kernels_on_the_cpu(monkeypatch):
    cpu = torch.device("cpu")

    def chosen(*assignments):
        return backends.choose_kernels(configured(*assignments), CPU_ONLY, cpu)

    assert (
        chosen()
        and chosen("train.kernels=fused")
        and chosen("train.deterministic=true")
        and not chosen("train.kernels=reference")
    )
    assert not chosen("train.precision=bf16")
    with pytest.raises(
        ConfigError, match="train.precision=amp is plain torch's on the CPU; set train.kernels=auto"
    ):
        chosen("train.kernels=fused", "train.precision=amp")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert not chosen()
    with pytest.raises(
        ConfigError,
        match="train.kernels=fused needs numba on the CPU .*; pip install numba, or set train.kernels=auto",
    ):
        chosen("train.kernels=fused")


def test_device():
    assert backends.choose_device(configured(), CPU_ONLY).type == "cpu"
    assert backends.choose_device(configured(), WITH_GPU).type == "cuda"
    assert backends.choose_device(configured("train.device=cpu"), WITH_GPU).type == "cpu"
    with pytest.raises(
        ConfigError, match="train.device=cuda, but this torch is a CPU build; set train.device=cpu"
    ):
        backends.choose_device(configured("train.device=cuda"), CPU_ONLY)
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        backends.choose_device(
            configured("train.device=cuda"), replace(CPU_ONLY, cuda_torch="13.0")
        )


def test_cuda_versions_that_differ_are_warned_of(caplog):
    caplog.set_level(logging.WARNING, "w2v")
    logging.getLogger("w2v").propagate = True
    backends.choose_device(configured(), replace(WITH_GPU, cuda_cupy="12.9"))
    assert (
        "torch is built for CUDA 13.0, CuPy for CUDA 12.9" in caplog.text
        and "cupy-cuda13x" in caplog.text
    )


@pytest.mark.parametrize("gib, engine", [(1, "resident"), (97, "resident"), (99, "mapped")])
def test_auto_keeps_tables_on_the_gpu_when_they_fit(gib, engine):
    chosen, reason = backends.choose_engine(configured(), WITH_GPU, GPU, gib * 2**30)
    assert chosen == engine and f"tables of {gib}.0 GiB, 100.0 GiB free" in reason


def test_configured_engine():
    assert (
        backends.choose_engine(configured("transfer.engine=mapped"), WITH_GPU, GPU, 1)[0]
        == "mapped"
    )
    assert (
        backends.choose_engine(configured("transfer.engine=resident"), WITH_GPU, GPU, 2**50)[0]
        == "resident"
    )
    with pytest.raises(
        ConfigError, match="transfer.engine=mapped pages rows onto a GPU, but the run is on the CPU"
    ):
        backends.choose_engine(
            configured("transfer.engine=mapped"), CPU_ONLY, torch.device("cpu"), 1
        )


def test_room_on_the_gpu():
    tables = 1000 * 2**20
    sizes = {
        "auto": None,
        "0": 0,
        "12": 12,
        "50%": tables // 2,
        "2GiB": 2 * 2**30,
        "1.5 KB": 1500,
        "100MB": 10**8,
    }
    assert {
        text: configured(f"transfer.gpu_bytes={text}").transfer.gpu_bytes_of(tables)
        for text in sizes
    } == sizes
    for text in ("-1", "many", "5XB", "1e9"):
        with pytest.raises(ConfigError, match=f"transfer.gpu_bytes={text} is out of range.*20GiB"):
            configured(f"transfer.gpu_bytes={text}")


def test_without_cupy_it_says_how_to_install_it(caplog):
    caplog.set_level(logging.WARNING, "w2v")
    logging.getLogger("w2v").propagate = True
    bare = replace(WITH_GPU, cuda_cupy="")
    assert backends.choose_engine(configured(), bare, GPU, 2**50)[0] == "staged"
    assert "pip install 'cupy-cuda13x'" in caplog.text
    with pytest.raises(
        ConfigError, match="mapped needs CuPy.*pip install 'cupy-cuda13x'.*transfer.engine=staged"
    ):
        backends.choose_engine(configured("transfer.engine=mapped"), bare, GPU, 1)


def test_corpus_is_read_once(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("b a b c a b\nc b a b\n" * 3)
    config = configured(
        f"corpus.path={text}", f"corpus.data_dir={tmp_path / 'data'}", "vocab.min_count=1"
    )
    vocab, corpus = opening.open_corpus(config)
    assert vocab.words == ["b", "a", "c"] and vocab.counts.tolist() == [15, 9, 6]
    assert corpus.ids[:10].tolist() == [0, 1, 0, 2, 1, 0, 2, 0, 1, 0] and corpus.offsets[
        :3
    ].tolist() == [0, 6, 10]
    monkeypatch.setattr(opening.Vocab, "count", None)  # a second reading would call it
    again_vocab, again = opening.open_corpus(config)
    assert (
        again_vocab.words == vocab.words
        and np.array_equal(again.ids, corpus.ids)
        and again.raw_words == 30
    )
    monkeypatch.undo()
    fewer = configured(
        f"corpus.path={text}", f"corpus.data_dir={tmp_path / 'data'}", "vocab.min_count=8"
    )
    assert opening.open_corpus(fewer)[0].words == ["b", "a"]


def test_runs_that_begin_at_once_read_a_text_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "text").write_text("b a b c a b\nc b a b\n" * 3)
    config = configured(
        f"corpus.path={tmp_path / 'text'}",
        f"corpus.data_dir={tmp_path / 'data'}",
        "vocab.min_count=1",
    )
    reads, read = [], opening._read

    def slowly(*arguments):
        reads.append(arguments)
        time.sleep(0.3)
        return read(*arguments)

    monkeypatch.setattr(opening, "_read", slowly)
    with caplog.at_level("INFO", "w2v"), ThreadPoolExecutor(3) as pool:
        opened = list(pool.map(opening.open_corpus, [config] * 3))
    assert (
        len(reads) == 1 and caplog.messages.count("waiting for another run that reads a text") == 2
    )
    assert all(
        vocab.words == ["b", "a", "c"] and corpus.raw_words == 30 for vocab, corpus in opened
    )


def test_a_text_too_small_for_the_batch_is_warned_of(caplog):
    caplog.set_level(logging.WARNING, "w2v")
    logging.getLogger("w2v").propagate = True
    vocab = plan.Vocab(["a", "b"], np.array([6000, 4000]), raw_words=10_000, raw_types=2)
    plan.warn_of_few_steps(
        configured("model.sample=0", "train.epochs=10", "train.batch_size=1000"), vocab
    )
    assert not caplog.text
    plan.warn_of_few_steps(
        configured("model.sample=0", "train.epochs=10", "train.batch_size=4000"), vocab
    )
    assert (
        "train.batch_size=4000 leaves 25 optimizer steps, too few to learn from; try train.batch_size=100"
        in caplog.text
    )
    plan.warn_of_few_steps(
        configured("model.sample=1e-6", "train.epochs=1", "train.batch_size=1"), vocab
    )
    assert (
        "train.batch_size=1 leaves " in caplog.text
        and "too few to learn from; more text is needed" in caplog.text
    )


@pytest.mark.parametrize(
    "settings, warned",
    [
        (
            ["train.precision=fp16", "optimizer.name=Adam"],
            "Adam then divides by its eps, 1e-08; set optimizer.args.eps=0.00025 or more",
        ),
        (
            ["train.precision=fp16", "optimizer.name=Adagrad"],
            "Adagrad then divides by its eps, 1e-10",
        ),
        (["train.precision=fp16", "optimizer.name=Adam", "optimizer.args.eps=0.001"], ""),
        (["train.precision=fp16", "optimizer.name=SGD"], ""),
        (["train.precision=bf16", "optimizer.name=Adam"], ""),
    ],
)
def test_an_eps_too_small_for_float16_is_warned_of(settings, warned, caplog):
    caplog.set_level(logging.WARNING, "w2v")
    logging.getLogger("w2v").propagate = True
    config = configured(*settings)
    plan.warn_of_small_eps(config, plan.RowOptimizer(config.optimizer))
    assert warned in caplog.text if warned else not caplog.text


def test_plan_is_said_in_words(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four\n" * 50)
    assignments = f"corpus.path={text}", f"corpus.data_dir={tmp_path}", "train.device=cpu"
    said = str(plan.make_plan(configured(*assignments)))
    for part in (
        "200 words in 50 sentences",
        "4 kept of 4",
        "2 x 4 x 100, Adamax: weight + exp_avg + exp_inf",
        "resident on cpu",
    ):
        assert part in said
    assert "kernels   compiled by numba, precision float32" in said
    descending = configured(*assignments, "optimizer.name=SGD")
    assert "compiled by numba, each center a step of its own" in str(plan.make_plan(descending))
    plain = plan.make_plan(configured(*assignments, "train.kernels=reference"))
    assert "kernels   plain torch, precision" in str(plain)


def test_pages_serve_as_many_steps_as_there_is_room_for(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "\n".join(
            " ".join(f"w{(7 * n + step * step) % 900}" for step in range(40)) for n in range(200)
        ),
        encoding="utf-8",
    )
    planned = plan.make_plan(
        configured(
            f"corpus.path={text}",
            f"corpus.data_dir={tmp_path}",
            "vocab.min_count=1",
            "train.batch_size=50",
        )
    )
    both = 2 * len(planned.vocab.words)
    found = [
        replace(planned, slots=slots).paging.steps
        for slots in (both, both - 1, both // 2, both // 6, 0)
    ]
    assert (
        found == sorted(found, reverse=True)
        and found[0] == 8
        and found[2] in (2, 4)
        and found[-1] == 1
    )
    asked = load_config([], ["transfer.steps_per_page=3"])
    assert (
        replace(
            planned, slots=0, config=replace(planned.config, transfer=asked.transfer)
        ).paging.steps
        == 3
    )


def test_rows_that_are_used_soon_stay_where_rows_are_paged():
    opened = zipf.generate(100_000, 4_000_000, 1.0, torch.device("cpu"))
    planned = plan.make_plan(
        configured("vocab.min_count=1", "train.batch_size=1024", "model.negative_pool=1024"), opened
    )
    paged = replace(planned, engine="mapped", slots=120_000)
    assert not any(
        one.paging.lookahead
        for one in (planned, replace(planned, slots=120_000), replace(paged, slots=200_000))
    )
    said = re.search(
        r"room for 120,000 rows there, steps_per_page=8, those stay that the next (.+) words use\n",
        str(paged),
    ).group(1)
    assert int(said.replace(",", "")) == paged.paging.lookahead * 32 * 1024
    assert (
        0
        < replace(paged, slots=60_000).paging.lookahead
        < paged.paging.lookahead
        < 4_000_000 / 32 / 1024
    )
    off = load_config([], ["transfer.lookahead=false"])
    assert replace(paged, config=replace(planned.config, transfer=off.transfer)).paging == (
        paged.paging.steps,
        0,
    )


def test_looking_ahead_changes_no_bit_and_brings_fewer_rows(monkeypatch, one_thread):
    """What `build` makes trains as in memory, whatever stays on the GPU, for which CPU memory stands here."""
    monkeypatch.setitem(plan.LINKS, "staged", (HostLink, "cpu"))
    opened = zipf.generate(20_000, 300_000, 1.0, torch.device("cpu"))
    model = [
        "model.vector_size=4",
        "model.negative_pool=512",
        "model.negative_pool_steps=8",
        "vocab.min_count=1",
    ]
    steps = [
        "optimizer.name=Adam",
        "optimizer.lr=0.01",
        "train.batch_size=512",
        "train.kernels=reference",
    ]
    planned = plan.make_plan(configured(*model, *steps), opened)
    blind = replace(planned.config, transfer=replace(planned.config.transfer, lookahead=False))
    paged = replace(planned, engine="staged", slots=15_000)
    rows_read, tables = [], []
    for one in (planned, paged, replace(paged, config=blind)):
        sampler, pipeline = plan.build(one)
        batches = (batch for _ in range(2) for batch in sampler.epoch())
        for step in islice(pipeline.ahead(batches), 400):
            pipeline.step(step, 0.01)
        pipeline.engine.flush()
        rows_read.append(pipeline.engine.rows_read)
        tables.append([table.records_VR for table in (pipeline.inputs, pipeline.outputs)])
    assert all(
        torch.equal(ours, theirs)
        for other in tables[1:]
        for ours, theirs in zip(other, tables[0], strict=True)
    )
    assert paged.paging.lookahead > 1 and rows_read[0] == 0 < rows_read[1] < 0.8 * rows_read[2]


def test_what_moves_is_said_and_how_to_make_it_less():
    opened = zipf.generate(400_000, 2_000_000, 1.0, torch.device("cpu"))
    planned = plan.make_plan(configured("vocab.min_count=1", "train.batch_size=65536"), opened)
    few, paged = replace(planned, slots=350_000), replace(planned, engine="mapped", slots=350_000)
    assert not any(
        "link      about" in str(one) for one in (planned, few, replace(paged, slots=2 * 400_000))
    )
    line = re.compile(
        r"link      about (.+) rows a word of the text come over it, and as many go back(?:; (.+) with (.+) (.+), .+)?\n"
    )
    rows, fewer, *keys = line.search(str(paged)).groups()
    shared = replace(paged, config=load_config([], ["train.batch_size=65536", *keys]))
    found = line.search(str(shared)).groups()
    assert keys == ["model.negative_pool=65536", "model.negative_pool_steps=8"] and found == (
        fewer,
        None,
        None,
        None,
    )
    fetched = line.search(str(replace(paged, slots=0))).group(1)
    assert 0 < 2 * float(fewer) < float(rows) < float(fetched)
    assert " with " not in line.search(
        str(replace(paged, config=load_config([], ["train.batch_size=1000000"])))
    ).group(0)


def test_a_trial_decides_between_the_links():
    trial = {"mapped": (40e9, 40e9), "staged": (10e9, 5e9)}
    chosen, reason = backends.choose_engine(configured(), WITH_GPU, GPU, 2**50, lambda: trial)
    assert chosen == "mapped" and "mapped 40.0 / 40.0, staged 10.0 / 5.0" in reason
    assert (
        backends.choose_engine(
            configured(), WITH_GPU, GPU, 2**50, lambda: trial | {"mapped": (3e9, 50e9)}
        )[0]
        == "staged"
    )


@pytest.mark.parametrize("wanted", ["auto", "mapped"])
def test_too_little_lockable_memory_is_said_aloud(wanted, caplog):
    machine = replace(WITH_GPU, lockable_bytes=2**26)
    chosen, _ = backends.choose_engine(configured(f"transfer.engine={wanted}"), machine, GPU, 2**50)
    assert (
        chosen == "staged"
        and "64 MiB" in caplog.text
        and "ulimit -l, or --ulimit memlock=-1 for a container" in caplog.text
    )


def test_tables_in_files(tmp_path):
    in_files = f"transfer.table_dir={tmp_path}"
    assert backends.choose_engine(configured(in_files), WITH_GPU, GPU, 1)[0] == "staged"
    assert (
        backends.choose_engine(configured(in_files), CPU_ONLY, torch.device("cpu"), 1)[0]
        == "resident"
    )
    with pytest.raises(
        ConfigError,
        match="transfer.engine=mapped cannot read tables in files; set transfer.engine=staged",
    ):
        backends.choose_engine(configured(in_files, "transfer.engine=mapped"), WITH_GPU, GPU, 1)


def test_rates_of_a_link_are_measured(monkeypatch):
    class Copy:
        def read(self, table, rows_U, records_SR, slots_U=None):
            records_SR.copy_(table.records_VR[rows_U])

        def write(self, table, rows_U, records_SR, slots_U=None):
            table.records_VR[rows_U] = records_SR

    monkeypatch.setattr(timing, "SECONDS", 0.01)
    monkeypatch.setattr(timing, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(timing, "MOVED_BYTES", 1 << 16)
    to, back = timing.rates(Copy(), "cpu", 96, torch.float32, torch.device("cpu"))
    assert 1e6 < to < 1e12 and 1e6 < back < 1e12
