"""Training in 16 bits learns, and steps that overflow float16 are skipped."""

import numpy as np
import pytest
import torch

from tests.support.steps import make_step, one_sentence, train
from w2v.config import ModelConfig, OptimizerConfig
from w2v.kernels.reference import LossScale
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler

ROWS, WORDS = 60, np.arange(3000)
TEXT = one_sentence(WORDS * 7 % 11 + WORDS % 5 * 11, ROWS)  # a pattern
# Precision: type of the tables, and of matrix products.
PRECISIONS = {
    "float32": (torch.float32, None),
    "amp": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
}


def trained(precision="fp16", device="cpu", epochs=3, name="Adagrad", lr=0.1):
    """Return the losses and the step."""
    dtype, product = PRECISIONS[precision]
    config = OptimizerConfig(name=name, lr=lr)
    step = make_step(config, ROWS, 32, device=device, dtype=dtype, product=product)
    step.outputs["weight"].zero_()
    sampler = Sampler(TEXT, ModelConfig(window=2), 500, 1, torch.device(device))
    losses = [train(step, sampler.epoch(), lr)[0] for _ in range(epochs)]
    assert not step.state.fault
    return torch.cat(losses), step


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_those_of_float32_within_rounding(precision, device, monkeypatch):
    monkeypatch.setattr(LossScale, "FIRST", 2.0**8)  # small enough for every step
    losses, _ = trained(precision=precision, device=device)
    exact, _ = trained(precision="float32", device=device)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(losses, exact, rtol=0.03, atol=0)


def test_step_that_overflows_is_skipped(monkeypatch):
    monkeypatch.setattr(LossScale, "FIRST", 2.0**40)  # too large for any step, until it is halved
    losses, step = trained(epochs=12)
    assert 2.0**4 < float(step.inputs.scalars["loss_scale"]) < 2.0**18
    assert len(set(losses[:5].tolist())) == 5
    _, skipped = trained(epochs=1)
    assert float(skipped.inputs.scalars["loss_scale"]) == 2.0**34  # six steps, none of them kept
    assert not skipped.outputs["weight"].any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "NAdam", "ASGD"])
def test_a_skipped_step_does_not_count(name, device, monkeypatch):
    """Bias corrections and averages go by the steps that were made."""
    first = RowOptimizer(OptimizerConfig(name=name)).scalars
    for scale, made in ((2.0**40, 0), (2.0**8, 6)):
        monkeypatch.setattr(LossScale, "FIRST", scale)
        _, step = trained(device=device, epochs=1, name=name, lr=1e-3)
        for table in (step.inputs, step.outputs):
            scalars = {key: table.scalars[key].cpu() for key in first}
            assert scalars.pop("step") == made
            assert made or all(scalars[key] == first[key] for key in scalars)
            assert all(table.scalars[key].device.type == device for key in first)
