"""Benchmarks of training run on the CPU and write a file of results."""

import json
import logging
import math

import numpy as np
import pytest

from tests.bench import plot, precision, ranks, stages, steps, train, zipf
from tests.bench.results import Results
from tests.bench.stages import Activity
from tests.support.zipf import zipf_text
from w2v.config import load_config
from w2v.text import open_corpus

CPU = ["train.device=cpu", "model.vector_size=8", "train.batch_size=128"]
RESIDENT = ["transfer.engine=resident", "model.negative_pool_steps=1"]
HEADER = {"benchmark", "date", "gpu", "cpu", "torch", "cupy", "commit", "command", "figures"}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def logger():
    """Undo what the programs do to the logger, for other tests."""
    log = logging.getLogger("w2v")
    level, handlers = log.level, log.handlers[:]
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Settings for a text with words of the analogies and of the word pairs."""
    folder = tmp_path_factory.mktemp("corpus")
    words = "king queen man woman boy girl brother sister tiger cat dog animal bird mouse".split()
    drawn = np.random.default_rng(0).choice(words, (300, 10))
    (folder / "text.txt").write_text("\n".join(" ".join(line) for line in drawn))
    return [f"corpus.path={folder}/text.txt", f"corpus.data_dir={folder}", "model.sample=0"]


def read_only_file(folder):
    """Return the figures of the one file of results in a folder."""
    (file,) = folder.iterdir()
    content = json.loads(file.read_text())
    assert content.keys() == HEADER
    return content["figures"]


def test_steps_continue_over_epochs(corpus):
    made = steps.Steps(steps.make_plan(load_config([], [*corpus, *CPU, *RESIDENT])))
    stretch = made(24 + 12)  # 3,000 words are 24 batches
    assert stretch.words == pytest.approx(4500, rel=0.01)
    assert stretch.seconds > 0 and math.isfinite(stretch.loss)
    assert made(0).words == 0


def test_zipf_and_ranks_write_their_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "MEASURED", 4)
    sizes = "--vocabulary 500 --words 20000 --warm-up 2 --steps 4 --results".split()
    zipf.main([*sizes, str(tmp_path / "zipf"), "--set", *CPU, *RESIDENT])
    ranks.main([*sizes, str(tmp_path / "ranks"), "--set", *CPU, *RESIDENT])
    for benchmark in ("zipf", "ranks"):
        (figures,) = read_only_file(tmp_path / benchmark).values()
        assert all(figures[name] > 0 for name in ("words/s", "step [ms]", "loss", "step [us]"))


def test_generated_words_follow_zipfs_law():
    vocab, corpus = zipf_text(1000, 50_500)
    assert np.array_equal(np.bincount(corpus.ids, minlength=1000), vocab.counts)
    expected = vocab.counts[0] / np.arange(1, 101)
    assert vocab.counts[:100] == pytest.approx(expected, rel=0.02)
    assert vocab.raw_words == len(corpus.ids) == corpus.offsets[-1]


def test_train_writes_scores_of_all_seeds(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "MEASURED", 4)
    path = corpus[0].removeprefix("corpus.path=")
    options = ["--corpus", path, "--engines", "resident:50%", "--seeds", "1", "2"]
    train.main([*options, "--results", str(tmp_path), "--set", *corpus[1:], *CPU, "train.epochs=1"])
    ((case, figures),) = read_only_file(tmp_path).items()
    assert case.startswith("text adamax resident:50% float32") and figures["seeds"] == 2
    for name in ("words/s", "loss", "analogies stdev [%]", "wordsim353", "step [us]"):
        assert math.isfinite(figures[name])


def test_precision_runs_and_is_plotted(corpus, tmp_path):
    config = load_config([], [*corpus, *CPU])
    figures = precision.measure(config, open_corpus(config), 30)
    assert figures["loss"] < figures["first loss"] < 7 * math.log(2)
    found = Results("precision", tmp_path)
    for batch in (128, 256):
        found.add(f"text float32 fused batch {batch} 30 steps", figures | {"gpu memory [GiB]": 1})
    plot.draw(found.path, tmp_path / "precision.png")
    assert (tmp_path / "precision.png").read_bytes().startswith(b"\x89PNG")


def test_stages_are_told_apart_by_kernel_and_stream():
    on_gpu = [Activity("skipgram", 1, 0, 10), Activity("torch_sum", 1, 10, 11)]
    on_gpu += [Activity("exchange", 2, 5, 20), Activity("torch_rand", 3, 30, 34)]
    found = {stage: us for stage, us in stages.by_stage(on_gpu).items() if us}
    assert found == {"skip-gram": 10, "rest": 1, "moves": 15, "sampling": 4}
    assert stages.busy(on_gpu) == 24
