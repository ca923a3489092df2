"""The rows that steps are expected to touch and to move are those that the program's own sampler draws and its own engine moves."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import zipf
from tests.oracle.test_cached import HostLink
from w2v.config import ModelConfig, OptimizerConfig, TransferConfig
from w2v.model import skipgram
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Sampler
from w2v.model.table import Table
from w2v.training.paging import MOST_STEPS, Spectrum, Traffic
from w2v.training.step import Pipeline
from w2v.transfer.cache import Cached

CPU = torch.device("cpu")
ROWS, CENTERS = 20_000, 2_000
MODELS = [
    ModelConfig(sample=1e-3),
    ModelConfig(sample=1e-3, negative_pool=1500),
    ModelConfig(sample=0, negative=2, window=1),
    ModelConfig(sample=1e-3, negative_pool=20_000, negative_pool_steps=4),
]


@pytest.fixture(scope="module")
def text():
    return zipf.generate(ROWS, 20 * ROWS, 1.0, CPU)


def sampler(text, model, seed=1, lookahead=0):
    vocab, corpus = text
    keep_V, noise_V = (
        vocab.keep_probabilities(model.sample),
        vocab.noise_distribution(model.ns_exponent),
    )
    return Sampler(
        corpus.ids, corpus.offsets, keep_V, noise_V, model, CENTERS, seed, CPU, lookahead=lookahead
    )


def spectrum(text):
    return Spectrum(*np.unique(text[0].counts, return_counts=True))


@pytest.mark.parametrize("model", MODELS)
def test_rows_that_the_samplers_batches_touch(text, model):
    drawn = [
        skipgram.find_slots(skipgram.expand(batch), ROWS)
        for batch in islice(sampler(text, model).epoch(), 40)
    ]
    size = np.mean([len(slots.target_mask_BT) for slots in drawn])
    inputs, outputs = np.mean(
        [(len(slots.input_rows_U), len(slots.output_rows_V)) for slots in drawn], axis=0
    )
    traffic = Traffic(spectrum(text), model)
    expected = (traffic.touched(size) * traffic.words_G).sum(1)
    assert expected == pytest.approx([inputs, outputs], rel=0.01)


@pytest.mark.parametrize(
    "model, ranks, steps", [(1, 4, 1), (1, 1, 3), (1, 2, 2), (3, 1, 2), (3, 1, 4), (3, 1, 8)]
)
def test_rows_of_several_ranks_and_steps(text, model, ranks, steps):
    model = MODELS[model]
    batches = list(islice(sampler(text, model).epoch(), 24))
    slots = [skipgram.find_slots(skipgram.expand(batch), ROWS) for batch in batches]
    groups = [slots[start : start + ranks * steps] for start in range(0, 24, ranks * steps)]
    inputs, outputs = (
        [len(torch.unique(torch.cat([one[table] for one in group]))) for group in groups]
        for table in (0, 3)
    )
    found = np.mean(inputs) + np.mean(outputs)
    traffic, centers = (
        Traffic(spectrum(text), model),
        np.mean([len(batch.windows_B) for batch in batches]),
    )
    assert traffic.rows(traffic.touched(centers, ranks, steps)) == pytest.approx(found, rel=0.01)


def brought(model, slots, steps, first, pages, batches, uses_TV=None):
    """How many rows the engine brings for each of so many pages after the first ones, and the mean size of a batch."""
    optimizer = RowOptimizer(OptimizerConfig())
    inputs, outputs = (
        Table(name, ROWS, 4, optimizer.states(4), optimizer.scalars, "cpu")
        for name in ("input", "output")
    )
    engine = Cached(HostLink(), [inputs, outputs], slots, CPU, uses_TV)
    pipeline = Pipeline(inputs, outputs, engine, optimizer, CPU, steps)
    before, sizes = [], []
    for number, planned in enumerate(pipeline.ahead(batches)):
        if number % steps == 0 and number // steps in (first, first + pages):
            before.append(engine.rows_read)
        if len(before) == 2:
            break
        pipeline.step(planned, 0.01)
        sizes.append(len(planned.batch.windows_B))
    return (before[1] - before[0]) / pages, np.mean(sizes)


@pytest.mark.parametrize(
    "model, slots, steps, warm_up",
    [
        (0, 30_000, 1, 150),
        (0, 12_000, 1, 20),
        (0, 8_000, 1, 20),
        (0, 12_000, 2, 10),
        (3, 20_000, 1, 40),
        (3, 9_000, 1, 20),
        (3, 20_000, 2, 72),
        (3, 16_000, 4, 20),
    ],
)
def test_rows_that_the_engine_brings(text, model, slots, steps, warm_up, one_thread):
    model, vocab = MODELS[model], text[0]
    kept_V = vocab.counts * vocab.keep_probabilities(model.sample)
    uses_TV = np.stack(
        [
            kept_V,
            kept_V + model.negative * kept_V.sum() * vocab.noise_distribution(model.ns_exponent),
        ]
    )
    batches = (
        batch for seed in range(3) for batch in islice(sampler(text, model, seed).epoch(), 144)
    )  # whole pages
    found, size = brought(model, slots, steps, warm_up, 40, batches, torch.from_numpy(uses_TV))
    expected = Traffic(spectrum(text), model).read(size, slots, steps=steps)
    assert found == pytest.approx(expected, rel=0.025), (found, expected)


@pytest.mark.parametrize("model, steps", [(1, 1), (1, 2), (3, 1)])
def test_rows_that_come_where_those_used_soon_stay(text, model, steps, one_thread):
    """What is expected is about what comes; fewer than without looking ahead, and than farther ahead, where they leave too early."""
    model, slots = MODELS[model], 28_000
    traffic = Traffic(spectrum(text), model)
    paging = traffic.paging(CENTERS, slots, 1, TransferConfig(steps_per_page=steps))
    assert paging.steps == steps and paging.lookahead in (1, 2)
    assert traffic.paging(
        CENTERS, slots, 1, TransferConfig(steps_per_page=steps, lookahead=False)
    ) == (steps, 0)
    found = {}
    for lookahead in (0, paging.lookahead, 5):
        one = sampler(text, model, lookahead=lookahead)
        batches = (batch for _ in range(9) for batch in one.epoch())
        found[lookahead], size = brought(model, slots, steps, 100 // steps, 120 // steps, batches)
    best = found.pop(paging.lookahead)
    assert best == pytest.approx(
        traffic.read(size, slots, 1, *paging), rel=0.1
    ) and best < 0.9 * min(found.values())


def test_groups_of_words_stand_for_the_words():
    rows, words, model = 300_000, 6_000_000, ModelConfig(negative_pool=8192, negative_pool_steps=2)
    grouped = Spectrum.zipf(rows, words)
    share_V = 1 / np.arange(1, rows + 1)
    single = Spectrum(np.maximum(1, words * share_V / share_V.sum()), np.ones(rows))
    assert grouped.rows == rows and grouped.words == pytest.approx(single.words)
    found = []
    for one in (grouped, single):
        traffic = Traffic(one, model)
        page = traffic.touched(65_536, ranks=2)
        found.append([traffic.kept, traffic.rows(page), traffic.read(65_536, 100_000, ranks=2)])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("rows", [2, 100, 1 << 16, (1 << 16) + 1, (1 << 16) + 2, 10**7, 10**10])
def test_no_array_is_as_long_as_a_large_vocabulary(rows):
    spectrum = Spectrum.zipf(rows, 20 * rows)
    assert spectrum.rows == rows and len(spectrum.words_G) <= min(rows, 70_000)
    assert (
        20 * rows <= spectrum.words * 1.000001 < 21 * rows
        and (np.diff(spectrum.counts_G) <= 0).all()
    )
    traffic = Traffic(spectrum, ModelConfig())
    touched = [traffic.rows(traffic.touched(centers)) for centers in (1, 1000, 65_536)]
    assert touched == sorted(touched) and touched[-1] <= min(2 * rows, 7 * 65_536)
    assert traffic.read(1000, 2 * rows) == pytest.approx(0, abs=1e-3)


def test_words_in_clumps_are_fewer(text):
    """A text that says each stretch of three words twice has clumps of two."""
    counts, ids = text[0].counts, text[1].ids
    by_chance = Spectrum.of(counts, ids)
    clumped = Spectrum.of(
        2 * counts,
        np.concatenate([np.tile(three, 2) for three in np.array_split(ids, len(ids) // 3)]),
    )
    assert (
        by_chance.words == counts.sum()
        and by_chance.rows == ROWS
        and by_chance.clumps == pytest.approx(1, abs=0.02)
    )
    assert clumped.clumps == pytest.approx(2, rel=0.02)
    assert Spectrum.of(counts, ids[: len(ids) // 8]).clumps == pytest.approx(
        1, abs=0.02
    )  # of words that were counted in more text
    clumped, scattered = Traffic(clumped, ModelConfig()), Traffic(by_chance, ModelConfig())
    assert (clumped.touched(CENTERS) <= scattered.touched(CENTERS)).all()
    assert clumped.rows(clumped.touched(CENTERS)) < 0.99 * scattered.rows(
        scattered.touched(CENTERS)
    )


@given(st.integers(1, 20_000), st.floats(0, 2 * ROWS), st.integers(1, 4))
def test_pages_have_as_many_steps_as_leave_room_for_the_next(centers, slots, ranks):
    traffic = Traffic(Spectrum.zipf(ROWS, 20 * ROWS), ModelConfig())
    steps = traffic.steps_of_page(centers, slots, ranks)
    of_two_pages = {
        number: traffic.rows(traffic.touched(centers, ranks, 2 * number)) / ranks
        for number in (1, 2, 4, 8, 16)
    }
    assert steps in (1, 2, 4, MOST_STEPS) and (steps == 1 or of_two_pages[steps] <= slots)
    assert steps == MOST_STEPS or of_two_pages[2 * steps] > slots
