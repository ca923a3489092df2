"""Training in 16 bits: it learns, it is saved and resumed with its loss scale, and float16's overflows leave steps out."""

import numpy as np
import pytest
import torch

from w2v.config import ModelConfig, OptimizerConfig
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler
from w2v.model.skipgram import LossScale
from w2v.model.table import Table, uniform
from w2v.training.step import Pipeline
from w2v.transfer.resident import Resident

CASES = [
    ("float32", torch.float32, None),
    ("amp", torch.float32, torch.bfloat16),
    ("bf16", torch.bfloat16, torch.bfloat16),
    ("fp16", torch.float16, torch.float16),
]


def train(dtype, product, device="cpu", epochs=3, rows=60, dim=32):
    ids = (np.arange(3000) * 7 % 11 + np.arange(3000) % 5 * 11).astype(
        np.int32
    )  # a text with a pattern
    optimizer = RowOptimizer(OptimizerConfig(name="Adagrad", lr=0.1))
    tables = [
        Table(name, rows, dim, optimizer.states(dim), optimizer.scalars, device, dtype)
        for name in ("input", "output")
    ]
    tables[0].initialise(uniform(dim, 0.5, 1))
    sampler = Sampler(
        ids,
        np.array([0, len(ids)]),
        np.ones(rows),
        np.full(rows, 1 / rows),
        ModelConfig(window=2),
        500,
        1,
        torch.device(device),
    )
    pipeline = Pipeline(*tables, Resident(), optimizer, torch.device(device), product=product)
    losses = [
        float(pipeline.step(planned, 0.1).loss)
        for _ in range(epochs)
        for planned in pipeline.ahead(sampler.epoch())
    ]
    assert not pipeline.fault
    return losses, tables


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name, dtype, product", CASES, ids=[case[0] for case in CASES])
def test_losses_are_those_of_float32_but_for_rounding(name, dtype, product, device, monkeypatch):
    monkeypatch.setattr(LossScale, "FIRST", 2.0**8)  # so that no step is left out
    (losses, _), (exact, _) = train(dtype, product, device), train(torch.float32, None, device)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, exact, rtol=0.03)


def test_a_step_that_overflows_is_left_out(monkeypatch):
    monkeypatch.setattr(
        LossScale, "FIRST", 2.0**40
    )  # too large for any step: halved until they fit
    losses, tables = train(torch.float16, torch.float16, epochs=12)
    scale = float(tables[0].scalars["loss_scale"])
    assert 2.0**4 < scale < 2.0**18 and len(set(losses[:5])) == 5
    weights = train(torch.float16, torch.float16, epochs=1)[1][0]["weight"]
    initial = train(torch.float16, torch.float16, epochs=0)[1][0]["weight"]
    assert torch.equal(weights, initial)  # nothing of six steps was kept
