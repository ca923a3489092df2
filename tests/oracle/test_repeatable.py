"""Whole runs: two in deterministic mode are equal bit for bit, and all precisions stay finite for long; on a GPU for every engine."""

import pytest
import torch

from tests.bench import zipf
from w2v.config import load_config
from w2v.training import plan

GPU = pytest.mark.gpu
SETTINGS = """
corpus.path=generated vocab.min_count=1 model.vector_size=24 model.sample=1e-3 train.batch_size=500 optimizer.lr=0.01
run.checkpoint_minutes=0
""".split()
ENGINES = [
    ["train.device=cpu"],
    pytest.param(["transfer.engine=resident"], marks=GPU),
    *(
        pytest.param(
            [
                f"transfer.engine={link}",
                f"transfer.gpu_bytes={room}",
                f"transfer.steps_per_page={steps}",
            ],
            marks=GPU,
        )
        for link in ("mapped", "staged")
        for room, steps in ((0, 1), ("60%", 1), ("100%", 3))
    ),
]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def as_it_was():
    """Deterministic mode is torch's own, of the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


def train(words, *assignments):
    """The losses of a run over so many generated words, and the records of both tables at its end."""
    config = load_config([], [*SETTINGS, *assignments])
    made = plan.make_plan(config, zipf.generate(2000, words, 1.0, torch.device("cpu")))
    sampler, pipeline = plan.build(made)
    lr = config.optimizer.lr
    losses = [
        pipeline.step(planned, lr).loss
        for _ in range(config.train.epochs)
        for planned in pipeline.ahead(sampler.epoch())
    ]
    pipeline.engine.flush()
    assert not int(pipeline.fault)
    return (
        torch.stack(losses).cpu(),
        [table.records_VR.cpu().clone() for table in (pipeline.inputs, pipeline.outputs)],
        made,
    )


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
@pytest.mark.parametrize("engine", ENGINES, ids=" ".join)
def test_two_deterministic_runs_are_equal(engine, optimizer, as_it_was):
    run = (
        20_000,
        "train.deterministic=true",
        "train.epochs=2",
        f"optimizer.name={optimizer}",
        *engine,
    )
    (losses, tables, made), (others, other_tables, _) = train(*run), train(*run)
    assert made.fused == (made.device.type == "cpu") and len(losses) > 20
    assert torch.equal(losses, others) and all(map(torch.equal, tables, other_tables))


PAGED = "transfer.engine=mapped transfer.gpu_bytes=60% train.kernels="


@pytest.mark.parametrize(
    "place",
    [
        "train.device=cpu",
        *(pytest.param(PAGED + kernels, marks=GPU) for kernels in ("fused", "reference")),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "amp", "bf16", "fp16"])
def test_losses_are_finite_over_twenty_epochs(precision, place):
    """With Adam; an eps of its own for float16, as the warning says."""
    eps = 1e-3 if precision == "fp16" else 1e-8
    run = (
        "train.epochs=20",
        f"train.precision={precision}",
        "optimizer.name=Adam",
        f"optimizer.args.eps={eps}",
    )
    losses, tables, _ = train(10_000, *run, *place.split())
    assert losses.isfinite().all() and all(table.isfinite().all() for table in tables)
    assert losses[-10:].mean() < 0.97 * losses[:10].mean()
