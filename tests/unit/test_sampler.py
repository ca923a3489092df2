"""Batches follow their distributions; seed and position fix every draw."""

import json
import re
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.support.each_case import each_case
from tests.support.steps import expand_words
from w2v.config import ConfigError, ModelConfig
from w2v.word2vec import cuda, reference
from w2v.word2vec.batch import BatchSeed, Pool, StepShape
from w2v.word2vec.cpu import CpuKernels
from w2v.word2vec.sampler import (
    CHUNK_PIECES,
    Position,
    Sampler,
    TrainingText,
    negative_distribution,
    own_one_in,
)

CPU = torch.device("cpu")
COUNTS = np.array([9000.0, 900.0, 100.0])


def even_text(ids, offsets, vocabulary):
    """A text without subsampling, whose negatives are drawn uniformly."""
    return TrainingText(ids, offsets, np.ones(vocabulary), np.full(vocabulary, 1 / vocabulary))


def make_sampler(
    sentences,
    vocabulary,
    batch_size=64,
    seed=1,
    keep=None,
    probabilities=None,
    in_thread=False,
    blocks=0,
    **model,
):
    ids = np.concatenate(sentences).astype(np.int32)
    offsets = np.cumsum([0, *map(len, sentences)])
    keep = np.ones(vocabulary) if keep is None else keep
    probabilities = np.full(vocabulary, 1 / vocabulary) if probabilities is None else probabilities
    text = TrainingText(ids, offsets, keep, probabilities)
    how = {"draws_in_thread": in_thread, "block_words": blocks}
    return Sampler(text, ModelConfig(**model), batch_size, seed, CPU, **how)


@each_case("exponent", [0.75, 0.0, 1.0, -0.5])
def test_negative_distribution(exponent):
    weights = COUNTS**exponent
    found = negative_distribution(COUNTS, exponent)
    np.testing.assert_allclose(found, weights / weights.sum(), rtol=1e-13)


@pytest.mark.parametrize(("exponent", "row"), [(1e4, 0), (-1e4, 2)])
def test_no_exponent_of_negatives_overflows(exponent, row):
    probabilities = negative_distribution(COUNTS, exponent)
    assert probabilities.sum() == 1 and probabilities[row] == 1


@each_case("counts", [[1, 0], [0.5, float("nan")]])
def test_a_distribution_that_is_not_finite_is_refused(counts):
    with pytest.raises(ConfigError, match="model.ns_exponent=-0.75 is out of range"):
        negative_distribution(np.array(counts), -0.75)


def random_sentences():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 30, length) for length in rng.integers(1, 60, 60)]


def positive_pairs(batches):
    """All (center, context) pairs."""
    found = []
    for pairs in map(expand_words, batches):
        rows = zip(pairs.targets_BT[:, 0], pairs.contexts_BC, pairs.context_mask_BC, strict=True)
        for center, contexts, mask in rows:
            found += [(int(center), int(context)) for context in contexts[mask]]
    return found


def centers(batches):
    return [int(word) for batch in batches for word in expand_words(batch).targets_BT[:, 0]]


def is_equal(batches, others):
    """Whether the batches are equal in every field."""
    return len(batches) == len(others) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for batch, other in zip(batches, others, strict=True)
        for a, b in zip(batch, other, strict=True)
    )


@each_case("batch_size", [1, 3, 64])
def test_full_windows_hold_exactly_the_neighbours_in_the_sentence(batch_size):
    sentences = [[0, 1, 2, 3], [4], [5, 6]]
    sampler = make_sampler(sentences, 7, batch_size, window=2, shrink_windows=False)
    expected = [
        (a, b)
        for line in sentences
        for i, a in enumerate(line)
        for j, b in enumerate(line)
        if 0 < abs(i - j) <= 2
    ]
    assert sorted(positive_pairs(sampler.epoch())) == sorted(expected)


def test_windows_never_cross_sentences_or_chunks():
    lengths = np.random.default_rng(0).integers(1, 40, 200)
    batches = list(make_sampler([[s] * n for s, n in enumerate(lengths)], 200, 4).epoch())
    assert batches[-1].after.chunk > 10
    found = positive_pairs(batches)
    assert len(found) > 1000
    assert all(center == context for center, context in found)


def test_every_kept_word_is_a_center_once_and_batches_are_nearly_equal():
    sentences = [np.random.default_rng(i).integers(0, 50, 97) for i in range(40)]
    batches = list(make_sampler(sentences, 50, batch_size=100).epoch())
    assert centers(batches) == np.concatenate(sentences).tolist()
    assert all(90 <= len(batch.windows_B) <= 100 for batch in batches)


@each_case("words", [5, 400, 4_003])
def test_batches_mix_blocks_whose_words_stay_together(words):
    text = [np.arange(0, words // 3), np.arange(words // 3, words)]
    sampler = make_sampler(text, words, 100, blocks=10, window=2, shrink_windows=False)
    batches = list(sampler.epoch())
    assert sorted(centers(batches)) == list(range(words))
    pairs = positive_pairs(batches)
    assert all(0 < abs(a - b) <= 2 for a, b in pairs)
    first = words // 3  # no window crosses the sentences
    assert all((a < first) == (b < first) for a, b in pairs)
    assert len(pairs) >= 0.8 * (4 * words - 12)  # blocks lose those at their edges
    if words == 400:  # one chunk of four batches, ten blocks in each
        assert [max(centers([batch])) - min(centers([batch])) for batch in batches] == [369] * 4


def test_weighed_windows_are_whole():
    text = [np.arange(50)]
    whole, weighed = (
        list(make_sampler(text, 50, window=4, **model).epoch())
        for model in ({"shrink_windows": False}, {"shrink_by": "weigh"})
    )
    assert positive_pairs(whole) == positive_pairs(weighed)
    assert whole[0].objective.weighted == 0
    weights_d = weighed[0].objective.weights(4)
    assert weights_d[1:].tolist() == [1, 0.75, 0.5, 0.25]


def test_shrinking_windows_weigh_by_distance():
    """A context at distance d is used with probability (W - d + 1) / W."""
    sampler = make_sampler([np.arange(20_000)], 20_000, batch_size=5_000, window=4)
    distances = np.abs([a - b for a, b in positive_pairs(sampler.epoch())])
    counts = np.bincount(distances, minlength=5)[1:]
    assert chisquare(counts, np.array([4, 3, 2, 1]) / 10 * counts.sum()).pvalue > 1e-3


def cpu_kernels(threads):
    return CpuKernels(StepShape(2, 4, torch.float32, CPU), threads)


IN_ORDER = 0, 1  # batches are consecutive text


@pytest.mark.parametrize("kernels", [reference, cpu_kernels(3)], ids=["reference", "cpu"])
def test_subsampling_keeps_words_by_their_probability(kernels):
    keep_V = np.array([0.1, 0.5, 0.9, 1.0])
    words_N = torch.arange(4, dtype=torch.int32).repeat(10_000)
    edges_S = np.array([0, 3, 3, 20_000, 20_001, 40_000])
    trained_S = np.array([True, True, False, True, True])
    keep = torch.from_numpy(keep_V).float()
    words_n, sentences_n = kernels.subsample(
        2**64 - 5, words_N, edges_S, keep, trained_S, *IN_ORDER
    )
    assert words_n.dtype == sentences_n.dtype == torch.int32
    assert set(sentences_n.tolist()) <= {0, 3, 4} and (sentences_n.diff() >= 0).all()
    deviation = np.sqrt(5_000 * keep_V * (1 - keep_V))
    assert np.all(np.abs(np.bincount(words_n) - 5_000 * keep_V) <= 4 * deviation + 1)
    assert all(0 <= word < 3 for word in words_n[sentences_n == 0])  # the words of the sentence


def test_subsampling_does_not_depend_on_the_number_of_threads():
    text = torch.arange(1000, dtype=torch.int32) % 7, np.array([0, 10, 900, 1000])
    chances = torch.full((7,), 0.5), np.ones(3, np.bool_)
    results = [
        cpu_kernels(threads).subsample(3, *text, *chances, *IN_ORDER) for threads in (1, 2, 5)
    ]
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


@pytest.mark.gpu
@settings(max_examples=100, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=30),
    keep=st.sampled_from([0.0, 0.3, 1.0]),
    held_out=st.booleans(),
    block_words=st.sampled_from([0, 1, 7, 64]),
    batch_size=st.sampled_from([1, 50, 5000]),
)
def test_a_gpu_keeps_the_words_that_a_cpu_keeps(
    key, lengths, keep, held_out, block_words, batch_size
):
    rng = np.random.default_rng(len(lengths))
    edges_S = np.cumsum([0, *lengths])
    words_N = torch.from_numpy(rng.integers(0, 9, edges_S[-1]).astype(np.int32))
    keep_V = torch.full((9,), keep)
    trained_S = rng.random(len(lengths)) < (0.5 if held_out else 2)
    rest = trained_S, block_words, batch_size
    expected = cpu_kernels(2).subsample(key, words_N, edges_S, keep_V, *rest)
    found = cuda.subsample(key, words_N.cuda(), edges_S, keep_V.cuda(), *rest)
    assert all(map(torch.equal, (part.cpu() for part in found), expected))


@pytest.mark.parametrize("pool", [0, 512])
def test_negatives_follow_their_distribution(pool):
    probabilities = np.array([1, 2, 3, 4, 10.0]) / 20
    model = {"negative": 5, "negative_pool": pool}
    sentences = [np.zeros(40_000, dtype=int)]
    batches = list(make_sampler(sentences, 5, 256, probabilities=probabilities, **model).epoch())
    drawn_BK = torch.cat([batch.negatives_BK for batch in batches])
    counts = np.bincount(drawn_BK.flatten(), minlength=5)
    assert chisquare(counts, probabilities * counts.sum()).pvalue > 1e-3
    # A negative that is the center itself, here word 0, does not count.
    counted_BK = torch.cat([expand_words(batch).target_mask_BT[:, 1:] for batch in batches])
    assert torch.equal(counted_BK, drawn_BK != 0)


@each_case("size", [2, 3, 7])
@pytest.mark.parametrize("pool", [0, 4_000])
def test_ranks_draw_more_negatives_of_their_own_and_all_from_the_whole_distribution(size, pool):
    noise = negative_distribution(np.arange(1000, 0, -1), 0.75)
    drawn = drawn_by_ranks(noise, 20_000, size, negative=15, negative_pool=size * pool)
    share = 1 / own_one_in(size)
    for rank, words in enumerate(drawn):
        assert np.mean(words % size == rank) == pytest.approx(share + (1 - share) / size, rel=0.05)
    counts_V = np.bincount(np.concatenate(drawn), minlength=len(noise))
    assert np.abs(np.cumsum(counts_V / counts_V.sum() - noise)).max() < 0.01


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_pick_negatives_of_others_from_pools_of_each_batch(size):
    pools = []
    for rank, words in enumerate(drawn_by_ranks(np.full(10**6, 1e-6), 1000, size, negative=9)):
        share = 1 / own_one_in(size)
        assert len(words) == 9000
        pools.append(set(words[words % size != rank]))
        assert len(pools[-1]) == pytest.approx(1000 * (1 - share) * (size - 1) / size, rel=0.1)
        assert len({*words}) > 0.9 * 9000 * share
    assert len(set().union(*pools)) > 0.9 * sum(map(len, pools))


def drawn_by_ranks(noise, centers, size, **model):
    """Return the negatives of a batch of so many centers of each rank."""
    edges, keep = np.arange(0, size * centers + 1, 10), np.ones(len(noise))
    text = TrainingText(np.zeros(size * centers, np.int32), edges, keep, noise)
    shared = text, ModelConfig(**model), size * centers, 1, CPU
    samplers = (Sampler(*shared, rank=rank, world_size=size) for rank in range(size))
    return [next(sampler.epoch()).negatives_BK.flatten().numpy() for sampler in samplers]


def test_ranks_take_turns_at_the_text_and_read_another_part_in_each_epoch():
    # 16 / 2 centers a batch: a chunk has 256 words.
    for sampler in rank_samplers([1] * 2048, 2):
        expected = [word for word in range(2048) if word // 256 % 2 == sampler.rank]
        assert centers(sampler.epoch()) == expected
    for sampler in rank_samplers([1] * 60, 3):
        read = [word for _ in range(3) for word in centers(sampler.epoch())]
        assert sorted(read) == list(range(60))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_pool_bounds_the_negatives_of_its_steps(steps):
    model = {"negative_pool": 32, "negative_pool_steps": steps}
    sampler = make_sampler([np.zeros(5_000, dtype=int)], 10_000, 100, **model)
    pools = []
    for _ in range(2):
        drawn = [set(batch.negatives_BK.unique().tolist()) for batch in sampler.epoch()]
        assert len(drawn) == 50
        pools += [set().union(*drawn[begin : begin + steps]) for begin in range(0, 50, steps)]
    assert all(28 <= len(pool) <= 32 for pool in pools)
    assert all(len(pool & other) < 8 for pool, other in pairwise(pools))


def test_a_pool_is_a_stratified_sample():
    probabilities = np.array([1, 2, 5, 8]) / 16
    model = {"negative": 1_000, "negative_pool": 16}
    sampler = make_sampler([np.zeros(64, dtype=int)], 4, probabilities=probabilities, **model)
    counts = np.bincount(next(sampler.epoch()).negatives_BK.flatten(), minlength=4)
    assert chisquare(counts, probabilities * counts.sum()).pvalue > 1e-3


def test_equal_seeds_draw_equal_batches_and_epochs_differ():
    samplers = [make_sampler(random_sentences(), 30, 16, seed) for seed in (1, 1, 2)]
    first, second, other = ([list(s.epoch()), list(s.epoch())] for s in samplers)
    assert is_equal(first[0], second[0])
    assert is_equal(first[1], second[1])
    assert not is_equal(first[0], first[1])
    assert not is_equal(first[0], other[0])


def test_a_thread_that_draws_early_changes_nothing():
    samplers = [make_sampler(random_sentences(), 30, 4, in_thread=its) for its in (False, True)]
    alone, in_thread = ([batch for _ in range(2) for batch in s.epoch()] for s in samplers)
    assert is_equal(alone, in_thread)
    assert samplers[0].position == samplers[1].position == Position(2)


def test_an_error_of_the_thread_that_draws_early_is_raised():
    sampler = make_sampler(random_sentences(), 30, 4, in_thread=True)
    batches = sampler.epoch()
    next(batches)
    sampler.draw = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        list(batches)


@pytest.mark.parametrize("pool", [{}, {"negative_pool": 8, "negative_pool_steps": 5}])
def test_a_position_continues_anywhere(pool):
    settings = {"keep": np.full(30, 0.7), **pool}
    whole = make_sampler(random_sentences(), 30, 4, **settings)
    seen = [(whole.position, batch) for _ in range(2) for batch in whole.epoch()]
    assert len({position.chunk for position, _ in seen}) > 3
    for number in range(0, len(seen) - 1, 199):
        continued = make_sampler(random_sentences(), 30, 4, **settings)
        continued.position = seen[number][0]
        rest = [batch for _ in range(2 - continued.position.epoch) for batch in continued.epoch()]
        assert is_equal(rest, [batch for _, batch in seen[number + 1 :]])


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@settings(max_examples=30)
@given(
    key=st.integers(0, 2**64 - 1),
    sizes=st.lists(st.integers(1, 3000), max_size=4),
    negative=st.integers(1, 9),
    window=st.integers(1, 20),
    pool=st.integers(0, 9),
    own=st.integers(0, 8),
    fresh=st.booleans(),
    part=st.integers(0, 4),
    parts=st.integers(1, 5),
    words=st.integers(1, 1000),
    shrinks=st.booleans(),
)
def test_kernels_draw_what_the_reference_draws(
    kernels, key, sizes, negative, window, pool, own, fresh, part, parts, words, shrinks
):
    generator = torch.Generator().manual_seed(words)
    cdf_V = torch.rand(words * parts, generator=generator, dtype=torch.float64).cumsum(0)
    cdf_V /= cdf_V[-1].clone()
    picked = Pool(pool, own % max(1, pool), fresh, part % parts, parts)
    seeds = [BatchSeed(size, key ^ 2 * n, key ^ (2 * n + 1)) for n, size in enumerate(sizes)]
    args = seeds, (1 if shrinks else window, window), negative, picked
    on_cpu = cpu_kernels(threads=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "DRAWN_AT_ONCE", 2 * max(sizes, default=1))
        drawn = on_cpu.draw(*args, cdf_V) if kernels == "cpu" else cuda.draw(*args, cdf_V.cuda())
        batches = list(drawn)
    for batch, expected in zip(batches, reference.draw(*args, cdf_V), strict=True):
        assert all(map(torch.equal, (numbers.cpu() for numbers in batch), expected))


def test_progress_reaches_each_epoch_exactly():
    sampler = make_sampler(random_sentences(), 30, 16)
    done = [batch.epochs_done for batch in sampler.epoch()]
    assert done == sorted(done)
    assert done[0] > 0
    assert done[-1] == 1.0
    assert sampler.position == Position(1)
    assert [batch.epochs_done for batch in sampler.epoch()][-1] == 2.0


LINES = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(any)


def rank_samplers(lengths, world_size, seed=1, blocks=0):
    """The samplers of all ranks, for a text in which every word occurs once."""
    words = sum(lengths)
    text = even_text(np.arange(words, dtype=np.int32), np.cumsum([0, *lengths]), words)
    return [
        Sampler(
            text,
            ModelConfig(window=2),
            16,
            seed,
            CPU,
            rank=rank,
            world_size=world_size,
            block_words=blocks,
        )
        for rank in range(world_size)
    ]


@settings(max_examples=30)
@given(lengths=LINES, world_size=st.integers(1, 5))
def test_ranks_share_the_text(lengths, world_size):
    samplers = rank_samplers(lengths, world_size)
    parts = [list(sampler.epoch()) for sampler in samplers]
    assert sorted(word for part in parts for word in centers(part)) == list(range(sum(lengths)))
    stretches = max(len(sampler._spans(0)) for sampler in samplers)
    most = sum(lengths) / world_size + stretches * max(lengths)
    assert max(map(len, map(centers, parts))) <= most
    assert all(part[-1].epochs_done == pytest.approx(1.0) for part in parts if part)
    assert all(sampler.position == Position(1) for sampler in samplers)
    largest = max(len(batch.windows_B) for part in parts for batch in part)
    assert largest <= -(-16 // world_size)


def test_parts_of_a_batch_are_rounded_up():
    samplers = rank_samplers([8] * 40, 3)  # whose batches have 16 words
    assert [max(len(batch.windows_B) for batch in its.epoch()) for its in samplers] == [6] * 3


@settings(max_examples=30)
@given(
    lengths=LINES,
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 12),
    more=st.integers(0, 6),
    blocks=st.sampled_from([0, 3]),
)
def test_another_number_of_ranks_reads_what_is_left(lengths, before, after, steps, more, blocks):
    first = rank_samplers(lengths, before, blocks=blocks)
    read = [centers(islice(sampler.epoch(), steps)) for sampler in first]
    states = json.loads(json.dumps([s.state_dict(s.position) for s in first]))
    if any(state["position"][0] for state in states):
        return  # the trainer keeps all ranks in one epoch
    second = rank_samplers(lengths, after, blocks=blocks)
    for sampler in second:
        sampler.load_state_dict(states)
    read += [centers(islice(sampler.epoch(), more)) for sampler in second]
    # A second interruption, which keeps the number of ranks.
    last = rank_samplers(lengths, after, blocks=blocks)
    for sampler, other in zip(last, second, strict=True):
        sampler.load_state_dict([s.state_dict(s.position) for s in second])
        assert sampler.position == other.position
    if not any(sampler.position.epoch for sampler in second):
        read += [centers(sampler.epoch()) for sampler in last]
        # Chunks that were being read are read again.
        assert {*np.concatenate(read).astype(int)} == {*range(sum(lengths))}


@settings(max_examples=20)
@given(
    lookahead=st.integers(1, 3),
    words=st.integers(60, 400),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1),
)
def test_lookahead_finds_the_words_after_a_batch(lookahead, words, seed, epoch):
    """The rest of the chunk, to within a piece, and the chunks after it."""
    ids = np.random.default_rng(seed).integers(0, 40, words, dtype=np.int32)
    text = even_text(ids, np.append(np.arange(0, words, 7), words), 40)
    sampler = Sampler(text, ModelConfig(), 2, 1, CPU, lookahead=lookahead)
    chunks = [ids[slice(*text.offsets_S[list(span)])] for span in sampler._chunks(0)]
    sampler.position = Position(epoch)
    for batch in sampler.epoch():
        found = {*(torch.nonzero(batch.lookahead.soon_A).flatten() // 2).tolist()}
        _, number, batches_read, _ = batch.after
        chunk, read, piece = chunks[number], 2 * batches_read, len(chunks[number]) / CHUNK_PIECES
        later = [chunks[(number + 1 + n) % len(chunks)] for n in range(lookahead)]
        # Of 16 pieces that differ by a word, the longer come first: they end up to 4 words late.
        certain = chunk[read + 4 :]
        possible = chunk[max(0, int(read - piece) - 3) :]
        assert {*np.concatenate([certain, *later])} <= found
        assert found <= {*np.concatenate([possible, *later])}


def test_ranks_draw_differently_and_as_their_seed_says():
    draws = [
        [batch.negatives_BK for batch in sampler.epoch()]
        for seed in (1, 1, 2)
        for sampler in rank_samplers([40] * 20, 2, seed)
    ]
    same = [[all(map(torch.equal, a, b)) for a in draws] for b in draws]
    assert np.array_equal(same, np.kron([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.eye(2)))


def test_pages_of_a_mapped_file_are_dropped_after_reading(tmp_path):
    ids = np.random.default_rng(1).integers(0, 50, 4 << 20).astype(np.int32)
    ids.tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", np.int32, "r")
    offsets = np.arange(0, len(ids) + 1, 64)
    even = np.full(50, 0.02)

    def drawn(ids):
        sampler = Sampler(TrainingText(ids, offsets, even, even), ModelConfig(), 4096, 1, CPU)
        return [batch.words_n for batch in sampler.epoch()]

    assert all(map(torch.equal, drawn(ids), drawn(mapped)))
    mappings = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/ids\n")[1]
    assert int(re.search(r"Rss: +(\d+) kB", mappings)[1]) < 64
    assert mapped[-1] == ids[-1]
