"""Deterministic runs repeat bit for bit; every precision stays finite."""

import pytest
import torch

from tests.support.each_case import each_case
from tests.support.steps import records
from tests.support.zipf import zipf_text
from w2v.config import load_config
from w2v.training import plan
from w2v.training.build import build as build_plan

GPU = pytest.mark.gpu
SETTINGS = """
corpus.path=generated vocab.min_count=1 model.vector_size=24 model.sample=1e-3
train.batch_size=500 optimizer.lr=0.01 run.checkpoint_minutes=0
""".split()
PAGED = [
    f"transfer.engine={link} transfer.gpu_bytes={room} transfer.steps_per_page={steps}"
    for link in ("mapped", "staged")
    for room, steps in (("0", 1), ("60%", 1), ("100%", 3))
]
ON_GPU = [pytest.param(engine, marks=GPU) for engine in ("transfer.engine=resident", *PAGED)]
pytestmark = pytest.mark.usefixtures("one_thread")


def build(words, *assignments):
    """Return the plan and the loop of a run over so many words."""
    config = load_config([], [*SETTINGS, *assignments])
    planned = plan.make_plan(config, zipf_text(2000, words))
    return planned, build_plan(planned)


def train(words, *assignments):
    """Return losses and final records of a run, and the kernels' name."""
    planned, loop = build(words, *assignments)
    epochs = range(loop.config.train.epochs)
    losses = [done.loss for _ in epochs for done in loop.epoch()]
    loop.step.engine.flush()
    assert not int(loop.step.state.fault)
    return torch.stack(losses).cpu(), records(loop.step), planned.kernels


@pytest.mark.parametrize("engine", ["train.device=cpu", *ON_GPU])
@each_case("optimizer", ["Adam", "RMSprop"])
def test_two_deterministic_runs_are_equal(engine, optimizer):
    name = f"optimizer.name={optimizer}"
    run = 20_000, "train.deterministic=true", "train.epochs=2", name, *engine.split()
    losses, tables, kernels = train(*run)
    same_losses, same_tables, _ = train(*run)
    assert kernels == ("cpu" if "cpu" in engine else "reference")
    assert len(losses) > 20
    assert torch.equal(losses, same_losses)
    assert all(map(torch.equal, tables, same_tables))


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_mode_gives_sequential_sgd_one_thread(deterministic):
    torch.set_num_threads(3)
    settings = f"train.deterministic={deterministic} optimizer.name=SGD train.device=cpu"
    settings += " optimizer.occurrence_cap=0 train.batch_size=65536"  # which 3 threads are for
    planned, loop = build(20_000, *settings.split())
    assert planned.kernels == "sequential"
    assert loop.step.kernels.threads.count == (1 if deterministic else 3)
    assert not torch.are_deterministic_algorithms_enabled()  # only while an epoch runs


@pytest.mark.parametrize(
    "place",
    [
        "train.device=cpu",
        pytest.param("transfer.gpu_bytes=60% train.kernels=fused", marks=GPU),
        pytest.param("transfer.gpu_bytes=60% train.kernels=reference", marks=GPU),
    ],
)
@each_case("precision", ["float32", "amp", "bf16", "fp16"])
def test_losses_are_finite_over_twenty_epochs(precision, place):
    eps = 1e-3 if precision == "fp16" else 1e-8  # as the warning says
    optimizer = f"optimizer.name=Adam optimizer.args.eps={eps} train.precision={precision}"
    engine = "" if "cpu" in place else "transfer.engine=mapped"
    run = f"train.epochs=20 {optimizer} {engine} {place}"
    losses, tables, _ = train(2_500, *run.split())
    assert losses.isfinite().all() and all(table.isfinite().all() for table in tables)
    assert losses[-10:].mean() < 0.97 * losses[:10].mean()
