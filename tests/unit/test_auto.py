"""Automatic settings: they fit the text, and learn its structure."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from w2v.config import ConfigError, OptimizerConfig, VocabConfig, load_config
from w2v.text.ngrams import hash_words
from w2v.text.vocab import Vocab
from w2v.training import build, plan
from w2v.word2vec import auto
from w2v.word2vec.auto import Use

SMALL = """
    vocab.min_count=1 model.vector_size=32 model.window=3 model.sample=0 train.epochs=5
    train.device=cpu
""".split()


def vocab_of(counts):
    counts = np.array(counts)
    return Vocab([str(row) for row in range(len(counts))], counts, counts.sum(), len(counts))


def topics(rng, groups, size, sentences, share_W):
    """Return sentences of ten words, each of one topic."""
    return [
        [f"{topic}x{word}" for word in rng.choice(size, 10, p=share_W / share_W.sum())]
        for topic in rng.integers(groups, size=sentences)
    ]


def walks(rng, groups, size, count):
    """Return walks in a graph whose edges are mostly inside a group of nodes."""
    nodes = np.arange(groups * size)
    sentences = []
    for node in np.tile(nodes, count):
        walk = [node]
        while len(walk) < 20:
            group = walk[-1] // size if rng.random() < 0.9 else rng.integers(groups)
            walk.append(group * size + rng.integers(size))
        sentences.append([f"{node // size}x{node % size}" for node in walk])
    return sentences


def baskets(rng, groups, size, count):
    """Return lines of three products in no order, a half of one group."""
    return [
        [f"{near if rng.random() < 0.5 else rng.integers(groups)}x{product}" for product in three]
        for near, three in zip(
            rng.integers(groups, size=count), rng.integers(size, size=(count, 3)), strict=True
        )
    ]


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("kind", ["few words", "many words", "equal counts", "short lines"])
def test_auto_learns_the_structure_of_a_text(kind, optimizer, tmp_path, one_thread):
    rng = np.random.default_rng(0)
    sentences = {
        "few words": lambda: topics(rng, 3, 10, 400, np.ones(10)),
        "many words": lambda: topics(rng, 40, 50, 2_500, 1 / np.arange(1, 51)),
        "equal counts": lambda: walks(rng, 5, 40, 5),
        "short lines": lambda: baskets(rng, 20, 20, 6_000),
    }[kind]()
    path = tmp_path / "text.txt"
    path.write_text("\n".join(map(" ".join, sentences)))
    files = f"corpus.path={path}", f"corpus.data_dir={tmp_path}", f"optimizer.name={optimizer}"
    planned = plan.make_plan(load_config([], [*SMALL, *files]))
    loop = build.build(planned)
    for _ in range(planned.config.train.epochs):
        for _ in loop.epoch():
            pass
    unit_VD = torch.nn.functional.normalize(loop.step.inputs["weight"])
    nearest_V = (unit_VD @ unit_VD.T).fill_diagonal_(-1).argmax(1).tolist()
    group_V = [word.partition("x")[0] for word in planned.vocab.words]
    hits = [group_V[near] == group for near, group in zip(nearest_V, group_V, strict=True)]
    assert np.mean(hits) > 0.9


def test_batches_leave_enough_steps_and_repeat_no_word_too_often():
    for centers in (10, 5e3, 1e6, 1e8, 1e11):
        for words, gpus in itertools.product((2, 1_000, 10**6), (1, 2, 8)):
            for name, steps in (("AdamW", auto.STEPS), *auto.SUMMED.items()):
                size = auto.batch_size(name, Use(centers, 80, 1 / words), gpus=gpus)
                assert 1 <= size <= gpus * auto.LARGEST
                assert size == 1 or centers / size >= steps / 1.5
                assert size == 1 or size / words <= gpus * auto.REPEATS * 1.5


def test_several_gpus_have_larger_batches_where_steps_are_left():
    def sizes(centers):
        return [auto.batch_size("Adam", Use(centers, 80, 0.0), gpus=gpus) for gpus in (1, 2, 4, 8)]

    assert sizes(1e9) == [65_536, 131_072, 262_144, 262_144]
    assert sizes(4e7) == [65_536] * 4


def test_batches_of_sequential_sgd_let_the_rate_fall_often():
    for centers in (10, 5e3, 1e6, 1e8, 1e11):
        size = auto.batch_size("SGD", Use(centers, 80, 0.5), sequential=True)
        assert 1 <= size <= auto.MOST_GPUS * auto.LARGEST
        assert size == 1 or centers / size >= auto.SEQUENTIAL_STEPS / 1.5


def test_rates_fall_with_pairs_dimensions_and_steps():
    def rate(median=100, pairs=6, dim=128, steps=700, **optimizer):
        use = Use(1e7, median, 0.01, pairs)
        return auto.learning_rate(OptimizerConfig(**optimizer), use, dim, steps)

    assert rate(median=80) == rate(median=40, pairs=12) == auto.RATES["Adam"] > rate()
    assert rate(pairs=12) == pytest.approx(rate() / 2**auto.FALL, rel=0.05)  # two digits are kept
    for name, usual in auto.RATES.items():
        highest = auto.HIGHEST ** (0.5 if name in auto.SUMMED else 1)
        assert rate(median=1, name=name) == pytest.approx(highest * usual, rel=0.05)
    assert rate(dim=64) > rate() > rate(dim=256) > 0
    assert rate(steps=100) == rate() > rate(steps=5_000) > 0
    assert rate(name="SGD", occurrence_cap=1_000) == 0.0032  # so that it converges
    with pytest.raises(ConfigError, match="knows no rate for optimizer.name=Mine; set one"):
        rate(name="Mine")


def zipfs_text(words=10_000, most=60_000):
    """Return counts by Zipf's law, half of them below 5."""
    return np.maximum(most // np.arange(1, words + 1), 1)


def cut(counts, **limits):
    """Return the vocabulary of a text with limits of vocab.*."""
    words = [str(word) for word in range(len(counts))]
    limits = VocabConfig(**{"min_count": 1, "max_final_vocab": None} | limits)
    return Vocab.select(
        lambda kept: [words[word] for word in kept], counts, np.arange(len(counts)), limits
    )[0]


@pytest.mark.parametrize("kernels", ["cuda", "sequential"])
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_what_the_vocabulary_drops_changes_little(kernels, name):
    counts = zipfs_text()
    config = load_config([], [f"optimizer.name={name}"])
    limits = [{"min_count": count} for count in (1, 2, 5, 20, 32, 34, 40, 50, 60, 100)]
    limits += [{"max_final_vocab": words} for words in (300, 1_000, 3_000)]
    chosen = [auto.choose(config, cut(counts, **limit), kernels).config for limit in limits]
    rates = [each.optimizer.lr for each in chosen]
    assert max(rates) <= 1.5 * min(rates)
    samples = [each.model.sample for each in chosen]
    assert max(samples) <= 1.01 * min(samples)


def test_rates_grow_with_the_root_of_the_batches_of_several_gpus():
    def chosen(gpus, *given):
        config = load_config([], ["model.sample=0", *given])
        found = auto.choose(config, vocab_of([20_000] * 10_000), "cuda", gpus=gpus).config
        return found.train.batch_size, found.optimizer.lr

    batch, rate = chosen(1)
    assert batch == 65_536
    assert chosen(2) == (131_072, pytest.approx(2**0.5 * rate, rel=0.05))  # two digits
    assert chosen(4) == (262_144, pytest.approx(2 * rate, rel=0.05))
    assert chosen(2, "train.batch_size=65536") == (65_536, rate)
    assert chosen(2, "train.batch_size=1024") == (1024, rate)
    assert chosen(2, "optimizer.name=SGD")[1] == chosen(1, "optimizer.name=SGD")[1]


def test_rates_rise_where_sentences_are_shorter_than_windows():
    def choice(words, window=5, architecture="skipgram"):
        given = f"model.window={window}", f"model.architecture={architecture}", "model.sample=0"
        vocab = vocab_of([1_000] * 400)
        return auto.choose(load_config([], given), vocab, sentences=400_000 // words)

    def rate(*given):
        return choice(*given).config.optimizer.lr

    assert rate(10) == rate(1_000)  # they fill the windows
    assert rate(2) > rate(5) > rate(10)
    assert rate(2, 5, "cbow") == rate(1_000, 5, "cbow")
    assert choice(5).reasons["optimizer.lr"].endswith("less than 7,500 pairs)")


def test_rates_rise_in_short_runs_of_rare_words():
    def rise(name, centers, median=80):
        optimizer = OptimizerConfig(name=name)
        rates = [auto.learning_rate(optimizer, Use(n, median, 0.01), 128) for n in (centers, 1e8)]
        return rates[0] / rates[1]

    for name in ("Adam", "AdamW", "SGD"):
        assert rise(name, 4e6) == 1 < rise(name, 1e6) < rise(name, 6e5)
        assert rise(name, 2e5, median=4_000) == pytest.approx(1, abs=0.11)  # two digits are kept
        assert rise(name, 1) == pytest.approx(auto.HIGHEST, rel=0.05)
    # SGD's rate is raised for rare words and in a short run, up to a limit for each.
    for name, most in (("Adam", 1), ("SGD", 1 + auto.FALL)):
        rate = auto.learning_rate(OptimizerConfig(name=name), Use(1, 1, 0.01), 128)
        assert rate == pytest.approx(auto.RATES[name] * auto.HIGHEST**most, rel=0.05)


def test_a_center_has_the_pairs_that_its_model_trains():
    def pairs(*settings, length=1_000):
        config = load_config([], ["model.sample=0", *settings])
        return Use.of(config, vocab_of([1_000] * 4096), 4_096_000 // length).pairs

    assert pairs() == 6  # a word at distance d counts (6 - d) / 5
    assert pairs(length=5) == 1.5
    assert pairs("model.window=2") == 3
    assert pairs("model.window=10") == 11
    assert pairs("model.shrink_windows=false") == 10
    tree = "model.hs=true", "model.negative=0"
    cbow = "model.architecture=cbow"
    assert pairs(cbow) == pairs(cbow, length=2) == 2
    assert pairs(*tree) == 2 * pairs()  # codes of 12 bits, instead of 5 negatives and one word
    assert pairs(cbow, *tree) == 4


def test_the_cap_of_sgd_follows_its_rate():
    config = load_config([], ["optimizer.name=SGD", "optimizer.occurrence_cap=auto"])
    for lr, shrink_by in ((0.0, "draw"), (0.01, "draw"), (0.01, "weigh")):
        optimizer = replace(config.optimizer, lr=lr)
        model = replace(config.model, shrink_by=shrink_by)
        given = replace(config, model=model, optimizer=optimizer)
        chosen = auto.choose(given, vocab_of([50] * 40))
        # The pairs of whole windows of 5 weigh .6 in the mean.
        stable = 3.2 / 0.6 if shrink_by == "weigh" else 3.2
        assert chosen.config.optimizer.occurrence_cap == int(stable / chosen.config.optimizer.lr)
    for kernels, is_capped in (("sequential", False), ("reference", True)):
        chosen = auto.choose(load_config(["cpu"]), vocab_of([50] * 40), kernels)
        assert (chosen.config.optimizer.occurrence_cap > 0) == is_capped
    # Without shrinking all weigh 1, whatever shrink_by is.
    whole = replace(given, model=replace(given.model, shrink_windows=False))
    assert auto.choose(whole, vocab_of([50] * 40)).config.optimizer.occurrence_cap == 320


@each_case(
    "kernels, settings, count, shrink_by",
    [
        ("cuda", [], 500, "weigh"),
        ("cpu", [], 10**6, "weigh"),
        ("sequential", [], 10**6, "weigh"),
        ("cpu", ["model.architecture=cbow"], 500, "draw"),
        ("cpu", ["model.shrink_windows=false"], 500, "draw"),
    ],
)
def test_windows_of_skip_gram_are_weighed(kernels, settings, count, shrink_by):
    vocab = vocab_of([count] * 40)
    chosen = auto.choose(load_config([], settings), vocab, kernels)
    assert chosen.config.model.shrink_by == shrink_by
    assert ("model.shrink_by" in chosen.reasons) == (shrink_by == "weigh")


def test_blocks_are_mixed_but_where_each_center_is_a_step():
    vocab = vocab_of([500] * 40)
    for kernels, window, words in (("cuda", 5, 128), ("sequential", 5, 0), ("cpu", 10**9, 0)):
        mixed = auto.choose(load_config([], [f"model.window={window}"]), vocab, kernels)
        assert mixed.config.train.block_words == words
        assert ("train.block_words" in mixed.reasons) == bool(words)


def test_the_rate_falls_with_steps_but_not_with_smaller_batches():
    few, many, small = (
        auto.choose(load_config([], settings), vocab_of([counts] * 400)).config
        for counts, settings in ((10**5, []), (10**6, []), (10**5, ["train.batch_size=256"]))
    )
    assert small.train.batch_size < few.train.batch_size
    assert small.optimizer.lr == few.optimizer.lr > many.optimizer.lr


@each_case(
    "counts, sample",
    [
        ([1000] * 5 + [100] * 150, 0.005),
        ([100] * 100_000, 1e-4),
        ([10**6] * 100 + [10] * 10_000, 0.00134),
        ([9, 1], 0.9),
    ],
)
def test_frequent_words_are_subsampled(counts, sample):
    chosen = auto.choose(load_config(), vocab_of(sorted(counts, reverse=True)))
    assert chosen.config.model.sample == pytest.approx(sample, rel=0.05)
    assert ("model.sample" in chosen.reasons) == (sample > auto.SAMPLE)


def test_what_is_set_by_hand_is_kept():
    vocab = vocab_of([50] * 40)
    settings = "train.batch_size=123 optimizer.lr=0.5 optimizer.name=AdamW optimizer.step=table"
    settings += " model.sample=1e-4 model.shrink_by=draw train.block_words=0"
    config = load_config([], settings.split())
    assert auto.choose(config, vocab) == (config, {})
    chosen = auto.choose(load_config(), vocab)
    model = {"model.sample", "model.shrink_by"}
    train = {"train.batch_size", "train.block_words"}
    assert chosen.reasons.keys() == model | train | {"optimizer.lr"}
    assert f"{chosen.config.train.batch_size} centers" in chosen.reasons["train.batch_size"]
    assert chosen.config.optimizer.args  # those that the rate is for
    own = load_config([], ["optimizer.name=Adam", "optimizer.args.eps=1e-4"])
    assert auto.choose(own, vocab).config.optimizer.args == own.optimizer.args
    assert own.optimizer.args["eps"] == 1e-4


@each_case(
    "name, setting, value",
    [("SGD", "occurrence_cap", 0), ("ASGD", "step", "row"), (None, "step", "table")],
)
@pytest.mark.parametrize("kernels", ["cuda", "cpu"])
def test_settings_by_hand_are_kept_where_the_rate_is_auto(kernels, name, setting, value):
    named = [f"optimizer.name={name}"] if name else []
    config = load_config([], [*named, f"optimizer.{setting}={value}"])
    chosen = auto.choose(config, vocab_of([50] * 40), kernels).config.optimizer
    assert getattr(chosen, setting) == value
    assert chosen.lr > 0


@each_case(
    "kernels, precision, step",
    [("cuda", "float32", "row"), ("cuda", "bf16", "table"), ("reference", "float32", "table")],
)
def test_rows_count_their_steps_where_they_can(kernels, precision, step):
    config = load_config([], [f"train.precision={precision}"])
    assert auto.choose(config, vocab_of([9, 9]), kernels).config.optimizer.step == step


def test_negatives_are_shared_where_rows_are_paged():
    config = load_config()
    assert auto.share_negatives(config, False).config.model.negative_pool == 0
    shared = auto.share_negatives(config, True)
    assert shared.config.model.negative_pool == auto.LARGEST
    assert shared.config.model.negative_pool_steps == 8 and shared.reasons
    tree_alone = load_config([], ["model.hs=true", "model.negative=0"])
    assert auto.share_negatives(tree_alone, True) == auto.share_negatives(tree_alone, False)
    for pool in (0, 100):
        given = replace(config, model=replace(config.model, negative_pool=pool))
        assert auto.share_negatives(given, True) == (given, {})


@pytest.mark.parametrize(
    "words, given, lengths",
    [
        (["house", "the"], [], (3, 6)),
        (["žluť", "dům"], [], (2, 5)),
        (["house", "the"], ["model.max_n=2"], (2, 2)),
        (["žluť", "dům"], ["model.min_n=7"], (7, 7)),
        (["žluť", "dům"], ["model.min_n=1", "model.max_n=4"], (1, 4)),
    ],
)
def test_ngrams_suit_the_letters_of_a_text(words, given, lengths):
    vocab = Vocab(words, np.ones(2, int), 2, 2)
    model, reasons = auto.choose_ngrams(
        load_config([], ["model.subwords=true", *given]).model, vocab
    )
    assert (model.min_n, model.max_n) == lengths
    assert ("model.max_n" in reasons) == (len(given) < 2)
    assert model.buckets == max(1, len(set(hash_words(words, *lengths)[1].tolist())))
    plain = load_config([]).model
    assert auto.choose_ngrams(plain, vocab) == (plain, {})
