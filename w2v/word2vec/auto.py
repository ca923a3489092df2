"""Settings that suit a text: batch size, learning rate, shared negatives.

The constants were fitted to sweeps over texts of two domains and many sizes: docs/dev/tuning.md.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from w2v.config import CONFIGS, Config, ConfigError, ModelConfig, OptimizerConfig, load_config
from w2v.text.ngrams import buckets_of, lengths_of
from w2v.text.vocab import Vocab, keep_probabilities

# Constants, and the runs that they were fitted to: [22-3] is in tests/bench/results/ the file
# tuning-2026-11-22-3.csv.gz, [27] is settings-2026-11-27.csv.gz. `tests/bench/settings.py fit`
# prints best rates beside those of this module.
LARGEST = 65_536  # [22] centers of a batch, for each GPU; with more, it gains little
MOST_GPUS = 4  # for which batches grow: scores of larger ones were not measured
REPEATS = 32  # [23] how often a batch has the word of one of its centers, at most
STEPS = 700  # [22] optimizer steps of a run
SEQUENTIAL_STEPS = 200  # [23-6] where a batch is only what threads train between two waits
PAIRS = 5_400  # [22] of the median word in a run, times the root of the dimensions, for RATES
FALL = 0.55  # [22, 23-6, 27] exponent by which rates fall with pairs
# [23-6, 27, 27-2] times that a rate is raised at most; of SUMMED for a short run, and for rareness
HIGHEST = 1.7
SHORT = 4e6  # [23-6] centers of a short run, at most
STABLE = 3.2  # [22] learning rate times cap on occurrences at which SGD still converges
SAMPLE = 1e-4  # [23-6] share of a text above which a word is subsampled, at least
KEPT = 0.5  # [23-6, 27] share of a text that subsampling keeps, at least
BLOCK_WINDOWS = 16  # [23-2] words of a block over window + 3: its edges then cut 2 % of the pairs
SHARED_STEPS = 8  # [22] steps that share a pool of negatives, where rows are paged
# [22, 23-2, 23-7] Peak learning rates for PAIRS, by optimizer.
RATES = {
    "AdamW": 0.09,
    "Adam": 0.12,
    "Adamax": 0.29,
    "RMSprop": 0.12,
    "SGD": 0.06,
    "Adagrad": 0.36,
    "Adadelta": 1.2,
    "NAdam": 0.06,
    "RAdam": 0.06,
    "ASGD": 0.06,
    "Rprop": 0.00072,
}
# [23-3] Steps of optimizers that do not divide by the size of the gradients, which are summed.
SUMMED = {"SGD": 5_000, "ASGD": 5_000}


class Use(NamedTuple):
    """How a run uses its text, on average."""

    centers: float  # of all epochs
    median: float  # centers of the text's median word, whatever vocabulary is kept
    repeat: float  # probability that two centers are the same word
    pairs: float = 6.0  # of a center; with a tree, those that would train as many rows; see `pairs`
    dropped: float = 0.0  # centers that words outside of the vocabulary would be

    @classmethod
    def of(cls, config: Config, vocab: Vocab, sentences: int = 1) -> Use:
        """Return the use of a vocabulary in so many sentences, after subsampling."""
        model, epochs = config.model, config.train.epochs
        kept_V = vocab.kept_counts(model.sample)
        kept = max(float(kept_V.sum()), 1.0)
        share_V = kept_V / kept
        keep = keep_probabilities(np.array([vocab.median]), vocab.counts.sum(), model.sample)
        return cls(
            centers=kept * epochs,
            median=vocab.median * float(keep[0]) * epochs,
            repeat=float((share_V**2).sum()),
            pairs=pairs(model, share_V, kept / max(sentences, 1)),
            dropped=max(vocab.raw_words - float(vocab.counts.sum()), 0.0) * epochs,
        )


def pairs(model: ModelConfig, share_V: np.ndarray, length: float) -> float:
    """Return the pairs of a center, for sentences of a mean length.

    Words are counted after subsampling.

    A pair of a distant word counts by its weight, and pairs of short sentences by the share of a
    window that these fill, as baskets need it [23-4]. CBOW has two: a center trains one pair, but
    all of its context words [27-2]. With a tree, a pair trains as many nodes as a word has bits in
    its code, about the entropy of words; with 5 negatives it trains 6 rows. 3 negatives have the
    same best rate.
    """
    found = 2.0
    if model.architecture == "skipgram":
        window = 2.0 * model.window
        found = model.window + 1 if model.shrink_windows else window
        found *= min(1.0, length / window) ** 2
    if model.hs:
        share_V = share_V[share_V > 0]
        found *= max(1.0, -float((share_V * np.log2(share_V)).sum()) / 6)
    return found


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
            reasons["model.sample"] = f"{model.sample:.2g} (trains on {kept:.0%} of the words)"
    model, of_windows = choose_windows(model)
    model, of_ngrams = choose_ngrams(model, vocab)
    reasons |= of_windows | of_ngrams
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
        if not sequential:
            optimizer = shipped(optimizer)
        dim = model.vector_size
        lr = learning_rate(optimizer, use, dim, use.centers / alone, max(1.0, grown))
        optimizer = replace(optimizer, lr=lr)
        few = f"half of the words are trained by less than {use.median * use.pairs:,.0f} pairs"
        reasons["optimizer.lr"] = f"{lr:g} ({few})"
    if optimizer.step == "auto":
        optimizer = replace(optimizer, step="row")
        # Plain torch is slow at it, and rows of 16 bits cannot count so far.
        if kernels not in ("cpu", "cuda") or train.precision in ("bf16", "fp16"):
            optimizer = replace(optimizer, step="table")
    if optimizer.occurrence_cap < 0:
        cap = 0
        if not sequential:
            stable = STABLE
            if model.weighs_windows:  # weights add up; their mean is (W + 1) / 2W
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


def choose_windows(model: ModelConfig) -> tuple[ModelConfig, dict[str, str]]:
    """Choose whether windows are drawn, or full ones weighted by distance."""
    if model.shrink_by != "auto":
        return model, {}
    if model.architecture == "skipgram" and model.shrink_windows:
        reason = "weigh (full windows, weighted by distance)"
        return replace(model, shrink_by="weigh"), {"model.shrink_by": reason}
    return replace(model, shrink_by="draw"), {}


def choose_ngrams(model: ModelConfig, vocab: Vocab) -> tuple[ModelConfig, dict[str, str]]:
    """Choose the lengths of n-grams, and as many buckets as there are n-grams."""
    reasons = {}
    if model.subwords and min(model.min_n, model.max_n) < 0:
        (least, most), share = lengths_of(vocab.words)
        if model.max_n > 0:
            least = min(least, model.max_n)
        least = model.min_n if model.min_n > 0 else least
        most = model.max_n if model.max_n > 0 else max(most, least)
        model = replace(model, min_n=least, max_n=most)
        lengths = f"{model.min_n} to {model.max_n}"
        reasons["model.max_n"] = f"{lengths} ({share:.0%} of the letters are not a to z)"
    if model.subwords and model.buckets < 0:
        buckets, distinct = buckets_of(vocab.words, model.min_n, model.max_n)
        model = replace(model, buckets=buckets)
        reasons["model.buckets"] = f"{buckets:,} (the words have {distinct:,} n-grams)"
    return model, reasons


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

    It is the smallest, but SAMPLE at least, that keeps all of the text's median word, such as a
    node of a small graph, and KEPT of the text, where most words are frequent, such as in a log.
    Words that the vocabulary drops count as kept, so that they change little.
    """
    total = max(vocab.raw_words, int(vocab.counts.sum()))

    def keeps(share: float) -> bool:
        skipped_V = vocab.counts * (1 - keep_probabilities(vocab.counts, total, share))
        return bool(skipped_V.sum() <= (1 - KEPT) * total)

    least, most = max(SAMPLE, vocab.median / total), 1.0
    if keeps(least):
        return least
    while most > 1.001 * least:
        middle = math.sqrt(least * most)
        least, most = (least, middle) if keeps(middle) else (middle, most)
    return most


def batch_size(name: str, use: Use, sequential: bool = False, gpus: int = 1) -> int:
    """Return the centers of a step for an optimizer, a power of two.

    There are enough steps for rare words to move. For each of up to MOST_GPUS, a batch has at most
    LARGEST centers and the same word about REPEATS times: its gradients are taken at one point,
    where a step for each would see what the others have done.
    """
    if sequential:
        size = min(use.centers / SEQUENTIAL_STEPS, MOST_GPUS * LARGEST)
    else:
        most = REPEATS / max(use.repeat, REPEATS / LARGEST)
        size = min(use.centers / SUMMED.get(name, STEPS), min(gpus, MOST_GPUS) * most)
    return 2 ** max(0, round(math.log2(max(size, 1))))


def learning_rate(
    optimizer: OptimizerConfig, use: Use, dim: int, steps: float = STEPS, grown: float = 1.0
) -> float:
    """Return the peak learning rate of an optimizer.

    It falls with what adds up: the pairs of the median word and, half as fast, the dimensions of a
    dot product and steps that are each about as long as the rate. It rises in a short run, the more
    so the rarer the median word is. `grown` is how many times larger a batch is than that of one
    GPU, whose steps are given: the rate grows with its root (Malladi et al. 2022, arXiv
    2205.10287).
    """
    name = optimizer.name
    if name not in RATES:
        raise ConfigError(f"optimizer.lr=auto knows no rate for optimizer.name={name}; set one")
    rareness = PAIRS / max(use.median * use.pairs * dim**0.5, 1.0)
    short = SHORT / max(use.centers + use.dropped, 1.0)
    rise = max(1.0, short) ** (FALL / 2 * min(1.0, rareness))
    if name in SUMMED:
        factor = min(rareness, HIGHEST) ** FALL * min(rise, HIGHEST)
    else:
        slow = min(1.0, STEPS / steps) ** (FALL / 2) * grown**0.5
        factor = min(rareness**FALL * rise * slow, HIGHEST)
    rate = RATES[name] * factor
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
    model = replace(model, negative_pool=LARGEST, negative_pool_steps=steps)
    reason = f"{LARGEST:,} negatives shared by {steps} steps, as rows are paged"
    return Choice(replace(config, model=model), {"model.negative_pool": reason})
