"""Every config that ships: it builds, trains 50 steps on the CPU, and what it says of words it has not seen gets better."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from w2v.api.compare import with_batch
from w2v.config import load_config
from w2v.model.optim import learning_rate, rowwise_optimizers
from w2v.training import plan

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
SMALL = """
model.vector_size=32 model.sample=0 vocab.min_count=1 train.epochs=1 train.device=cpu train.held_out_words=1000 transfer.engine=resident
""".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Ten topics of 40 words, some frequent and most rare, with 16 words of one topic a line."""
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, 41)
    words = [[f"{topic}of{word}" for word in rng.permutation(40)] for topic in range(10)]
    lines = [
        " ".join(rng.choice(words[rng.integers(10)], 16, p=shares / shares.sum()))
        for _ in range(1300)
    ]
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_learns(path, corpus):
    base = [] if path.parent.name == "configs" else [ROOT / "configs" / "text8.yaml"]
    config = load_config(
        [*base, path], [*SMALL, f"corpus.path={corpus}", f"corpus.data_dir={corpus.parent}"]
    )
    config = with_batch(config, 400)
    torch.set_num_threads(1)  # quickest for so small steps
    planned = plan.make_plan(config)
    sampler, pipeline = plan.build(planned)
    held_out = plan.held_out(planned)
    before = held_out.loss(pipeline.inputs["weight"], pipeline.outputs["weight"])
    losses = []
    for batch in islice(pipeline.ahead(sampler.epoch()), 50):
        loss, pairs = pipeline.step(batch, learning_rate(config.optimizer, batch.batch.epochs_done))
        losses.append(float(loss) / float(pairs))
    after = held_out.loss(pipeline.inputs["weight"], pipeline.outputs["weight"])
    assert len(losses) == 50 and np.isfinite(losses).all()
    assert before == pytest.approx(6 * math.log(2), rel=0.03)  # the outputs are zero
    assert np.mean(losses[-10:]) < 0.995 * np.mean(losses[:3]) and after < 0.995 * before, (
        losses[:3],
        losses[-3:],
        before,
        after,
    )


def test_every_rowwise_optimizer_has_a_config_named_after_it():
    ours = {
        load_config([path]).optimizer.name: path.stem
        for path in CONFIGS
        if path.parent.name == "optimizers"
    }
    assert set(ours) == set(rowwise_optimizers())
    assert all(name.lower() == stem for name, stem in ours.items())
