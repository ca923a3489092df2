"""Training in 16 bits learns."""

import numpy as np
import pytest
import torch

from tests.support.steps import make_step, one_sentence, train
from w2v.config import ModelConfig, OptimizerConfig
from w2v.word2vec.sampler import Sampler

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
def test_losses_are_those_of_float32_within_rounding(precision, device):
    losses, _ = trained(precision=precision, device=device)
    exact, _ = trained(precision="float32", device=device)
    assert losses[-1] < 0.8 * losses[0]
    torch.testing.assert_close(losses, exact, rtol=0.03, atol=0)
