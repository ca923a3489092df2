"""Settings that suit a text: batch size, learning rate, shared negatives.

The constants were fitted to sweeps over texts of two domains and many sizes: docs/dev/tuning.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from w2v.config import CONFIGS, Config, ConfigError, OptimizerConfig, load_config
from w2v.text.vocab import Vocab

# Batch size, in centers of a step.
LARGEST = 65_536  # for each GPU; with more, it gains little
MOST_GPUS = 4  # for which batches grow: scores of larger ones were not measured
REPEATS = 32  # how often a batch has the word of one of its centers, at most
STEPS = 700  # optimizer steps of a run
MORE_STEPS = {"SGD": 5_000, "ASGD": 5_000}  # their steps are as long as a row's summed gradients
LARGEST_SEQUENTIAL = 262_144  # where a batch is only what threads train between two waits
SEQUENTIAL_STEPS = 200  # such batches of a run: as often the learning rate falls
# Peak learning rates of runs with STEPS, CENTERS and DIM, by optimizer.
RATES = {
    "AdamW": 0.075,
    "Adam": 0.1,
    "Adamax": 0.24,
    "RMSprop": 0.1,
    "SGD": 0.05,
    "Adagrad": 0.3,
    "Adadelta": 1.0,
    "NAdam": 0.05,
    "RAdam": 0.05,
    "ASGD": 0.05,
    "Rprop": 0.0006,
}
SUMMED = {"SGD", "ASGD"}  # optimizers that do not divide by the size of the gradients
RISING = {*SUMMED, "Adam", "Adamax"}  # optimizers that gain by higher rates in short runs
CENTERS = 80  # of the median word in a run
DIM = 128  # of the vectors
# Exponents with which a rate falls as these grow, or rises as a short run gets shorter.
FALL_WITH_CENTERS = 0.55
FALL_WITH_DIM = 0.25
FALL_WITH_STEPS = 0.25
RISE_WHERE_SHORT = 0.2
CBOW = 2.0  # times that CBOW's rate is higher, as it has one prediction for each center
WEIGHED = 1.2  # times that rates are higher with weighted windows, so that steps vary less
HIGHEST = 2.0  # times that a rate is raised, at most
HIGHEST_OF_SUMS = 1.5  # times that it is raised for rare words, of optimizers in SUMMED
SHORT = 4e6  # centers of a short run, at most; SGD on a CPU trains them in seconds
STABLE = 3.2  # learning rate times cap on occurrences at which SGD still converges
# Subsampling, blocks and pools of negatives.
SAMPLE = 1e-4  # share of a text above which a word is subsampled, at least
FEW_KEPT = 0.4  # share of a text that subsampling should keep; of running text it is about half
KEPT = 0.6  # share that it keeps where it would be less
BLOCK_WINDOWS = 16  # words of a block over window + 3: its edges then cut 2 % of the pairs
SHARED_POOL = 65_536  # words that negatives are picked from, where rows are paged
SHARED_STEPS = 8  # steps that share a pool


class Use(NamedTuple):
    """How a run uses its text, on average."""

    centers: float  # of all epochs
    median: float  # centers of the median word
    repeat: float  # probability that two centers are the same word
    cbow: bool = False  # with negative sampling alone; hierarchical softmax needs no higher rate
    weighed: bool = False  # whether windows are full and weighted by distance
    fill: float = 1.0  # words of a mean sentence over those of a window, at most 1

    @classmethod
    def of(cls, config: Config, vocab: Vocab, sentences: int = 1) -> Use:
        """Return the use of a vocabulary in so many sentences, after subsampling."""
        model = config.model
        kept_V = vocab.kept_counts(model.sample)
        kept = float(kept_V.sum())
        fill = 1.0
        if model.architecture == "skipgram":  # a center of CBOW has one prediction in any sentence
            fill = min(1.0, kept / max(sentences, 1) / (2 * model.window))
        return cls(
            centers=kept * config.train.epochs,
            median=float(np.median(kept_V)) * config.train.epochs,
            repeat=float((kept_V**2).sum()) / max(kept, 1.0) ** 2,
            cbow=model.architecture == "cbow" and not model.hs,
            weighed=model.weighs_windows,
            fill=fill,
        )


class Choice(NamedTuple):
    """A config without `auto`, and what was chosen."""

    config: Config
    reasons: dict[str, str]  # by key


def choose(
    config: Config, vocab: Vocab, kernels: str = "cpu", sentences: int = 1, gpus: int = 1
) -> Choice:
    """Choose windows, batches and optimizer settings that are `auto`.

    `kernels` are the plan's: with "sequential", each center is a step of its own. Raises
    `ConfigError` if the learning rate is auto and the optimizer has none.
    """
    sequential = kernels == "sequential"
    model, optimizer, train = config.model, config.optimizer, config.train
    reasons: dict[str, str] = {}
    if model.sample < 0:
        model = replace(model, sample=subsampling(vocab))
        if model.sample > SAMPLE:
            kept = vocab.kept_counts(model.sample).sum() / vocab.counts.sum()
            keeps = f"keeps the median word and {kept:.0%} of the text"
            reasons["model.sample"] = f"{model.sample:.2g} ({keeps})"
    if model.shrink_by == "auto":
        # Pairs of full windows take time beside the rest only where each center is a step.
        centers = vocab.kept_counts(model.sample).sum() * train.epochs
        has_time = not sequential or centers <= SHORT
        if model.architecture == "skipgram" and model.shrink_windows and has_time:
            model = replace(model, shrink_by="weigh")
            reasons["model.shrink_by"] = "weigh (full windows, weighted by distance)"
        else:
            model = replace(model, shrink_by="draw")
    use = Use.of(replace(config, model=model), vocab, sentences)
    if not train.batch_size:
        size = batch_size(optimizer.name, use, sequential, gpus)
        train = replace(train, batch_size=size)
        steps = max(1, use.centers / size)
        reasons["train.batch_size"] = f"{size:,} centers ({steps:,.0f} steps)"
    if not optimizer.lr:
        # Smaller batches, as for a small cache, need no lower rate: one of 1,024 is as good.
        alone = batch_size(optimizer.name, use)  # of one GPU
        grown = min(train.batch_size, batch_size(optimizer.name, use, gpus=gpus)) / alone
        one_gpu_steps = None
        if not sequential:
            optimizer = shipped(optimizer)
            one_gpu_steps = use.centers / alone
        dim = model.vector_size
        lr = learning_rate(optimizer, use, dim, one_gpu_steps, max(1.0, grown))
        optimizer = replace(optimizer, lr=lr)
        reason = f"half of the words are trained fewer than {use.median:,.0f} times"
        if use.fill < 1:
            reason += f"; a sentence fills {use.fill:.2g} of a window"
        reasons["optimizer.lr"] = f"{lr:g} ({reason})"
    if optimizer.step == "auto":
        optimizer = replace(optimizer, step="row")
        # Plain torch is slow at it, and rows of 16 bits cannot count so far.
        if kernels not in ("cpu", "cuda") or train.precision in ("bf16", "fp16"):
            optimizer = replace(optimizer, step="table")
    if optimizer.occurrence_cap < 0:
        cap = 0
        if not sequential:
            stable = STABLE
            if use.weighed:  # the sum of a gradient's weights counts; their mean is (W + 1) / 2W
                stable *= 2 * model.window / (model.window + 1)
            cap = max(1, int(stable / optimizer.lr))
            reasons["optimizer.occurrence_cap"] = f"{cap} (lr times cap is {stable:.2g})"
        optimizer = replace(optimizer, occurrence_cap=cap)
    if train.block_words < 0:
        # A word that one page of a book repeats is then in several steps.
        words = BLOCK_WINDOWS * (model.window + 3)
        if sequential or words >= LARGEST:
            words = 0
        else:
            reasons["train.block_words"] = f"{words}: each batch mixes blocks of {words} words"
        train = replace(train, block_words=words)
    return Choice(replace(config, model=model, optimizer=optimizer, train=train), reasons)


def shipped(optimizer: OptimizerConfig) -> OptimizerConfig:
    """Return an optimizer without arguments with those that its rate is for."""
    file = CONFIGS / "optimizers" / f"{optimizer.name.lower()}.yaml"
    if optimizer.args or not file.exists():
        return optimizer
    ours = load_config([file]).optimizer
    # Other settings are as shipped already, or as the user has set them; see `load_config`.
    if optimizer.step == "table":
        optimizer = replace(optimizer, step=ours.step)
    return replace(optimizer, args=ours.args)


def subsampling(vocab: Vocab) -> float:
    """Return the share of a text above which a word is subsampled.

    The median word is kept, such as a node of a small graph. Where most words are frequent, such as
    in a log, so is KEPT of the text.
    """
    total = vocab.counts.sum()
    share = max(SAMPLE, float(np.median(vocab.counts) / total))
    if vocab.kept_counts(share).sum() < FEW_KEPT * total:
        while vocab.kept_counts(share).sum() < KEPT * total:
            share *= 1.05
    return share


def batch_size(name: str, use: Use, sequential: bool = False, gpus: int = 1) -> int:
    """Return the centers of a step for an optimizer, a power of two.

    There are enough steps for rare words to move. For each of up to MOST_GPUS, a batch has at most
    LARGEST centers and the same word about REPEATS times: its gradients are taken at one point,
    where a step for each would see what the others have done.
    """
    if sequential:
        size = min(use.centers / SEQUENTIAL_STEPS, LARGEST_SEQUENTIAL)
    else:
        most = min(LARGEST, REPEATS / max(use.repeat, REPEATS / LARGEST))
        size = min(use.centers / MORE_STEPS.get(name, STEPS), min(gpus, MOST_GPUS) * most)
    return 2 ** max(0, round(math.log2(max(size, 1))))


def learning_rate(
    optimizer: OptimizerConfig, use: Use, dim: int, steps: float | None = None, grown: float = 1.0
) -> float:
    """Return the peak learning rate of an optimizer.

    It falls with what adds up: the centers of the median word, the dimensions of a dot product, and
    the steps, where each is about as long as the rate. `steps` is None for a step per center. Of
    optimizers in RISING it is higher in a short run, the more so the rarer the median word is.
    `grown` is how many times larger a batch is than that of one GPU, whose steps are given: the
    rate grows with its root (Malladi et al. 2022, arXiv 2205.10287).
    """
    name = optimizer.name
    if name not in RATES:
        raise ConfigError(f"optimizer.lr=auto knows no rate for optimizer.name={name}; set one")
    rareness = CENTERS / max(use.median, 1.0)
    factor = rareness**FALL_WITH_CENTERS
    if factor < 1:  # a center in a short sentence has fewer pairs to add up
        factor = min(1.0, factor / use.fill)
    if use.weighed:
        factor *= WEIGHED
    if name in SUMMED:
        factor = min(factor, HIGHEST_OF_SUMS)
    factor *= (DIM / dim) ** FALL_WITH_DIM
    if use.cbow:
        factor *= CBOW
    if name in RISING:
        power = RISE_WHERE_SHORT * min(1.0, rareness)
        factor *= max(1.0, SHORT / max(use.centers, 1.0)) ** power
    if steps and name not in SUMMED:
        factor *= min(1.0, STEPS / steps) ** FALL_WITH_STEPS * grown**0.5
    rate = RATES[name] * min(factor, HIGHEST)
    if optimizer.occurrence_cap > 0 and name in SUMMED:
        rate = min(rate, STABLE / optimizer.occurrence_cap)
    return float(f"{rate:.2g}")


def share_negatives(config: Config, is_paged: bool) -> Choice:
    """Choose the pool of negatives, where it is `auto`.

    Negatives are most of the rows of a step. Shared by several steps, they cross the link once.
    """
    model = config.model
    if model.negative_pool >= 0:
        return Choice(config, {})
    if not (is_paged and model.negative):
        return Choice(replace(config, model=replace(model, negative_pool=0)), {})
    steps = model.negative_pool_steps
    if steps == 1:
        steps = SHARED_STEPS
    model = replace(model, negative_pool=SHARED_POOL, negative_pool_steps=steps)
    reason = f"{SHARED_POOL:,} negatives shared by {steps} steps, as rows are paged"
    return Choice(replace(config, model=model), {"model.negative_pool": reason})
