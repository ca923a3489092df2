"""Every shipped config lowers the loss of held-out text."""

import math
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from w2v.config import OPTIMIZERS, load_config
from w2v.training import build, plan

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
OPTIMIZER_CONFIGS = [path for path in CONFIGS if path.parent.name == "optimizers"]
SMALL = """
    model.vector_size=32 model.sample=0 vocab.min_count=1 train.epochs=1 train.device=cpu
    train.held_out_words=1000 transfer.engine=resident
""".split()
STEPS = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write lines of 16 words of one topic, with a Zipf distribution."""
    rng = np.random.default_rng(0)
    share_W = 1 / np.arange(1, 41)
    share_W /= share_W.sum()
    topics = [[f"{topic}of{word}" for word in rng.permutation(40)] for topic in range(10)]
    lines = [" ".join(rng.choice(topics[rng.integers(10)], 16, p=share_W)) for _ in range(1300)]
    path = tmp_path_factory.mktemp("corpus") / "topics.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_learns(path, corpus, one_thread):
    base = [ROOT / "configs" / "text8.yaml"] if path in OPTIMIZER_CONFIGS else []
    settings = [*SMALL, f"corpus.path={corpus}", f"corpus.data_dir={corpus.parent}"]
    planned = plan.make_plan(load_config([*base, path], [*settings, "train.batch_size=400"]))
    loop = build.build(planned)
    weights = loop.step.inputs["weight"], loop.step.outputs["weight"]
    held_out = build.make_heldout(planned, loop)

    before = held_out.loss(*weights)
    losses = [float(done.loss) / float(done.pairs) for done in islice(loop.epoch(), STEPS)]
    after = held_out.loss(*weights)

    assert len(losses) == STEPS
    assert np.isfinite(losses).all()
    # The output vectors start at zero, so each of the 6 pairs has probability 1/2.
    assert before == pytest.approx(6 * math.log(2), rel=0.03)
    assert np.mean(losses[-10:]) < 0.995 * np.mean(losses[:3])
    assert after < 0.995 * before


def test_every_rowwise_optimizer_has_a_config_with_its_name():
    names = {path.stem: load_config([path]).optimizer.name for path in OPTIMIZER_CONFIGS}
    assert sorted(names.values()) == OPTIMIZERS
    assert all(name.lower() == stem for stem, name in names.items())
