"""`make bench-train`, `bench-zipf` and `bench-precision`: their parts, small and on the CPU; on a GPU that they run whole."""

import csv
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.bench import plot_precision, precision, results, stages, steps, train, zipf
from tests.bench.stages import Activity
from w2v.api.compare import Opened
from w2v.config import load_config
from w2v.kernels.cuda import KERNELS
from w2v.model.optim import learning_rate
from w2v.training import plan
from w2v.training.step import StepResult

CPU = "train.device=cpu transfer.engine=resident model.vector_size=8 model.negative_pool_steps=1 train.batch_size=128".split()
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text with words that the analogies and word pairs ask for."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = "king queen man woman boy girl brother sister tiger cat dog animal bird mouse".split()
    (folder / "text.txt").write_text("\n".join(" ".join(rng.choice(words, 10)) for _ in range(300)))
    return [f"corpus.path={folder}/text.txt", f"corpus.data_dir={folder}", "model.sample=0"]


@pytest.fixture
def config(corpus):
    return load_config([], [*corpus, *CPU])


def figures(file):
    with file.open(newline="", encoding="utf-8") as handle:
        return {
            (row["benchmark"], row["case"], row["metric"]): float(row["value"])
            for row in csv.DictReader(handle)
        }


def test_steps_go_on_through_epochs_and_are_those_of_a_run(config):
    planned = plan.make_plan(config)
    made = steps.Steps(planned)
    stretch = made(24 + 12)  # 3,000 words are 24 batches
    assert stretch.words == pytest.approx(1.5 * planned.corpus.raw_words, rel=0.01)
    assert stretch.seconds > 0 and stretch.cpu > 0 and math.isfinite(stretch.loss)
    sampler, pipeline = plan.build(planned)
    for _ in range(2):
        for number, batch in enumerate(pipeline.ahead(sampler.epoch())):
            if pipeline.steps < 36:
                pipeline.step(batch, learning_rate(config.optimizer, 0.5))
            assert number < 24
    assert torch.equal(made.pipeline.inputs["weight"], pipeline.inputs["weight"])
    assert made(0).words == 0


def test_the_learning_rate_falls_over_the_steps_asked_for(config, monkeypatch):
    made, rates = steps.Steps(plan.make_plan(config), total=4), []
    zero = torch.zeros(())
    monkeypatch.setattr(
        made.pipeline, "step", lambda planned, lr: rates.append(lr) or StepResult(zero, zero)
    )
    made(1), made(3)
    assert rates == pytest.approx([config.optimizer.lr * share for share in (1, 0.75, 0.5, 0.25)])


def test_a_fault_shows_as_no_loss(config):
    made = steps.Steps(plan.make_plan(config))
    made.pipeline.outputs["weight"].fill_(math.inf)
    assert math.isnan(made(2).loss)


def test_the_link_is_told_by_the_word_and_by_the_second(config):
    pipeline = steps.Steps(plan.make_plan(config)).pipeline
    before, after = steps.Moved(100, 10, 0, 200), steps.Moved(1100, 510, 250, 4200)
    record = pipeline.inputs.bytes / pipeline.inputs.rows
    found = steps.link(after.since(before), pipeline, words=2000, seconds=0.5)
    assert {metric: value for metric, (value, _) in found.items()} == pytest.approx(
        {
            "rows read": 50,
            "read": 0.25,
            "written": 0.125,
            "stepped": 2,
            "to GPU": 1000 * record / 1e9,
            "from GPU": 500 * record / 1e9,
        }
    )
    assert (
        steps.link(after.since(after), pipeline, 2000, 0.5)
        == {}
        == steps.gpu_memory(pipeline, None)
    )


def test_gpu_memory_besides_rows_and_ids(monkeypatch):
    class Known:
        bytes_gpu = 2**30 + 1000 * 512 + 4 * 5000

        class engine:
            slots = 1000

        class inputs:
            bytes, rows = 512 * 70_000, 70_000

    found = steps.gpu_memory(Known, torch.zeros(5000, dtype=torch.int32))
    assert found["gpu memory besides rows and ids"] == (pytest.approx(1.0), "GiB")
    assert (
        steps.gpu_memory(Known, np.zeros(5000, np.int32))["gpu memory besides rows and ids"][0] > 1
    )  # ids in CPU memory take none of it


def test_every_kernel_has_a_stage():
    kernels = {
        name
        for file in KERNELS.glob("*.cu")
        for name in re.findall(r"__global__ void (?:\w+\(\d+\) )?(\w+)\(", file.read_text())
    }
    assert kernels and kernels == set(stages.STAGE_OF)


def test_stages_are_told_by_kernel_and_stream():
    computing, planning, moving = 7, 13, 14
    seen = [
        Activity("void at::native::rand(...)", planning, 0, 4),
        Activity("Memcpy DtoH (Device -> Pinned)", planning, 4, 5),
        Activity(
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<bool>>",
            planning,
            5,
            7,
        ),
        Activity("mark", planning, 7, 9),
        Activity("deal", planning, 9, 10),
        Activity("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", planning, 10, 14),
        Activity("exchange", moving, 10, 40),
        Activity(
            "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>",
            computing,
            0,
            1,
        ),
        Activity("claim", computing, 1, 3),
        Activity("skipgram", computing, 3, 23),
        Activity("collect", computing, 23, 24),
        Activity("step", computing, 24, 33),
    ]
    assert stages.by_stage(seen) == {
        "sampling": 5,
        "plan": 5,
        "moves": 30,
        "claim": 2,
        "lend": 0,
        "skip-gram": 20,
        "collect": 1,
        "optimizer": 9,
        "network": 4,
        "rest": 1,
    }
    assert stages.busy(seen) == 40
    assert (
        stages.busy([Activity("a", 1, 5, 6), Activity("b", 2, 0, 2), Activity("c", 1, 1, 3)]) == 4
    )
    assert stages.busy([]) == 0


def test_a_step_is_timed_on_the_cpu_too(config, monkeypatch):
    monkeypatch.setattr(stages, "WARM_UP", 2)
    monkeypatch.setattr(stages, "MEASURED", 4)
    found = stages.measure(steps.Steps(plan.make_plan(config)))
    assert found.keys() == {"step", "CPU"} and all(value > 0 for value, _ in found.values())


def test_generated_words_follow_zipfs_law():
    vocab, corpus = zipf.generate(1000, 50_500, 1.0, torch.device("cpu"))
    assert (
        np.array_equal(np.bincount(corpus.ids, minlength=1000), vocab.counts)
        and corpus.ids.dtype == np.int32
    )
    assert vocab.counts.min() >= 1 and (np.diff(vocab.counts) <= 0).all()
    assert vocab.counts[:100] == pytest.approx(vocab.counts[0] / np.arange(1, 101), rel=0.02)
    assert (
        vocab.raw_words
        == corpus.raw_words
        == len(corpus.ids)
        == corpus.offsets[-1]
        == pytest.approx(50_500, rel=0.01)
    )
    assert np.diff(corpus.offsets).min() >= 2 and corpus.offsets[0] == 0
    again, other = (
        zipf.generate(1000, 50_500, 1.0, torch.device("cpu"), seed)[1].ids for seed in (0, 1)
    )
    assert np.array_equal(again, corpus.ids) and not np.array_equal(other, corpus.ids)
    halves = [np.bincount(half, minlength=1000)[:20] for half in np.array_split(corpus.ids, 2)]
    assert halves[0] == pytest.approx(halves[1], rel=0.3)  # mixed
    assert (
        zipf.generate(1000, 100, 1.0, torch.device("cpu"))[0].counts.min() == 1
    )  # rarer than once is once


def test_words_are_made_when_asked_for():
    words = zipf.Numbered(10_000_000)
    assert (len(words), words[0], words[9_999_999], words[-1]) == (
        10_000_000,
        "w0",
        "w9999999",
        "w9999999",
    )
    assert list(zipf.Numbered(3)) == ["w0", "w1", "w2"]
    with pytest.raises(IndexError):
        words[10_000_000]


def test_zipf_trains_small_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "MEASURED", 4)
    file = tmp_path / "results.csv"
    sizes = "--vocabulary 500 --words 20000 --warm-up 2 --steps 4".split()
    zipf.main([*sizes, "--set", *CPU, "--results", str(file)])
    found = figures(file)
    assert {benchmark for benchmark, *_ in found} == {"zipf", "stages"}
    figure = {
        metric: value for (benchmark, _, metric), value in found.items() if benchmark == "zipf"
    }
    assert all(
        figure[metric] > 0
        for metric in [
            "words/s",
            "seconds",
            "step",
            "loss",
            "tables",
            "host memory",
            "set-up",
            "generated in",
        ]
    )


def test_what_cannot_be_run_is_said_in_a_line(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = [corpus[0].removeprefix("corpus.path="), "--set", *corpus[1:]]
    file = ["--results", str(tmp_path / "results.csv")]
    small = "--vocabulary 500 --words 2000".split()
    with pytest.raises(
        SystemExit, match="^transfer.engine=mapped pages rows onto a GPU, but the run is on the CPU"
    ):
        zipf.main([*small, *file])
    with pytest.raises(
        SystemExit, match="^bench-precision needs a CUDA GPU and CuPy, and finds no GPU$"
    ):
        precision.main(["--corpus", "text8", *file])
    with pytest.raises(
        SystemExit, match="^transfer.engine=mapped pages rows onto a GPU"
    ):  # before anything is trained
        train.main(["--corpus", *text, "--engines", "resident", "mapped:50%", *file])
    with pytest.raises(SystemExit, match="no file, no directory and no corpus name"):
        train.main(
            [
                "--corpus",
                str(tmp_path / "missing.txt"),
                "--set",
                f"corpus.data_dir={tmp_path}",
                *file,
            ]
        )
    assert not list(tmp_path.iterdir())


def test_train_writes_scores_of_all_seeds_and_the_time_of_a_step(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "MEASURED", 4)
    file = tmp_path / "results.csv"
    path = corpus[0].removeprefix("corpus.path=")
    given = [
        "--corpus",
        path,
        "--engines",
        "resident:50%",
        "--precisions",
        "float32",
        "bf16",
        "--seeds",
        "1",
        "2",
    ]
    one = [setting for setting in CPU if not setting.startswith("transfer")]
    train.main([*given, "--results", str(file), "--set", *corpus[1:], *one, "train.epochs=1"])
    found = figures(file)
    cases = {
        (benchmark, case.split(" vector")[0].split(" corpus.")[0]) for benchmark, case, _ in found
    }
    assert cases == {
        (name, f"text adamax resident:50% {kind}")
        for name in ("train", "stages")
        for kind in ("float32", "bf16")
    }
    for metric in ("words/s", "seconds", "loss", "analogies", "wordsim353"):
        assert (
            sum(m == metric for _, _, m in found)
            == sum(m == f"{metric} stdev" for _, _, m in found)
            == 2
        )
    assert train.engine_settings("mapped:50%") == [
        "transfer.engine=mapped",
        "transfer.gpu_bytes=50%",
    ]
    assert train.engine_settings("auto") == ["transfer.engine=auto"]


def test_mean_and_deviation_of_seeds():
    runs = [{"loss": (value, "x")} for value in (1.0, 3.0)]
    assert train.over_seeds(runs) == {
        "loss": (2.0, "x"),
        "loss stdev": (pytest.approx(math.sqrt(2)), "x"),
    }
    assert train.over_seeds(runs[:1]) == {"loss": (1.0, "x")}


@pytest.mark.parametrize("kind", ["float32", "amp", "bf16", "fp16"])
def test_each_precision_is_measured(config, kind):
    config = replace(config, train=replace(config.train, precision=kind))
    found = precision.measure(config, Opened(), 30)
    assert found["step"][0] > 0 and found["loss"][0] < found["first loss"][0] < 7 * math.log(2)


def test_the_plot_of_precisions_shows_the_last_figures_of_the_last_kind(tmp_path):
    file, picture = tmp_path / "results.csv", tmp_path / "precision.png"
    results.append("transfer", "contiguous 256 MB", {"both": (1.0, "GB/s")}, file)
    with pytest.raises(ValueError, match="run make bench-precision first"):
        plot_precision.read(file)
    wanted = {"step": 2.0, "gpu memory": 0.5, "loss": 2.5}
    bf16, other = "text8 bf16 fused batch 128", "text8 float32 reference batch 256"
    for case, factor in [
        (f"{bf16} 100 steps", 3),
        (f"{bf16} 500 steps", 2),
        (f"{bf16} 500 steps", 1),
        (f"{other} 500 steps", 4),
    ]:
        found = {metric: (factor * value, "") for metric, value in wanted.items()} | {
            "first loss": (4.0, "")
        }
        results.append("precision", case, found, file)
    series, where = plot_precision.read(file)
    assert series == {
        (metric, "bf16", "fused"): {128: value} for metric, value in wanted.items()
    } | {(metric, "float32", "reference"): {256: 4 * value} for metric, value in wanted.items()}
    assert where.startswith("text8, 500 steps; ")
    pytest.importorskip("matplotlib")
    plot_precision.draw(file, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and sorted(tmp_path.iterdir()) == [
        picture,
        file,
    ]


@pytest.mark.gpu
def test_stages_are_seen_and_fill_the_time_in_which_the_gpu_is_busy(tmp_path):
    file = tmp_path / "results.csv"
    zipf.main(
        [
            *"--vocabulary 20000 --words 2000000 --warm-up 16 --steps 16 --results".split(),
            str(file),
            "--set",
            "train.batch_size=4096",
            "model.negative_pool=2048",
            "transfer.gpu_bytes=40%",
        ]
    )
    found = {(benchmark, metric): value for (benchmark, _, metric), value in figures(file).items()}
    assert all(
        found["zipf", metric] > 0
        for metric in ["to GPU", "from GPU", "read", "written", "gpu memory besides rows and ids"]
    )
    assert found["zipf", "stepped"] > found["zipf", "read"]
    parts = {stage: found["stages", stage] for stage in stages.STAGES}
    between_ranks = {"lend", "collect", "network"}
    assert {stage for stage, us in parts.items() if us == 0} == between_ranks, parts
    assert sum(parts.values()) >= 0.99 * found["stages", "busy"] and found["stages", "kernels"] > 8


@pytest.mark.gpu
def test_precisions_run_on_the_gpu_and_are_drawn(corpus, tmp_path):
    file, picture = tmp_path / "results.csv", tmp_path / "precision.png"
    path = corpus[0].removeprefix("corpus.path=")
    precision.main(
        [
            "--corpus",
            path,
            "--batches",
            "128",
            "256",
            "--steps",
            "10",
            "--results",
            str(file),
            "--plot",
            str(picture),
            "--set",
            *corpus[1:],
        ]
    )
    cases = {case for _, case, _ in figures(file)}
    assert len(cases) == 2 * sum(map(len, precision.PRECISIONS.values()))
