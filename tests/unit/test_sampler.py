"""Windows, subsampling and noise against their formulas; and that a seed, or a position, fixes every draw."""

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

from w2v.config import ModelConfig
from w2v.distributed.ranks import Ranks
from w2v.kernels import cuda, reference
from w2v.model.sampler import CHUNK_PIECES, Position, Sampler
from w2v.model.skipgram import expand

CPU = torch.device("cpu")


def sampler(
    sentences, vocabulary, batch_size=64, seed=1, keep=None, noise=None, draw=None, **model
):
    ids = np.concatenate(sentences).astype(np.int32)
    offsets = np.cumsum([0, *map(len, sentences)])
    keep = np.ones(vocabulary) if keep is None else keep
    noise = np.full(vocabulary, 1 / vocabulary) if noise is None else noise
    return Sampler(
        ids, offsets, keep, noise, ModelConfig(**model), batch_size, seed, CPU, draw=draw
    )


def pairs(batches):
    """All (center, context) pairs."""
    return [
        (int(center), int(context))
        for written in map(expand, batches)
        for center, contexts, mask in zip(
            written.centers_B, written.contexts_BC, written.context_mask_BC, strict=True
        )
        for context in contexts[mask]
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_full_windows_hold_exactly_the_neighbours_in_the_sentence(batch_size):
    sentences = [[0, 1, 2, 3], [4], [5, 6]]
    s = sampler(sentences, 7, batch_size, window=2, shrink_windows=False)
    expected = [
        (a, b)
        for line in sentences
        for i, a in enumerate(line)
        for j, b in enumerate(line)
        if 0 < abs(i - j) <= 2
    ]
    assert sorted(pairs(s.epoch())) == sorted(expected)


def test_windows_never_cross_sentences_or_chunks():
    sentences = [
        [sentence] * length
        for sentence, length in enumerate(np.random.default_rng(0).integers(1, 40, 200))
    ]
    s = sampler(sentences, 200, batch_size=4)
    assert len(s._chunks(0)) > 10
    found = pairs(s.epoch())
    assert len(found) > 1000 and all(center == context for center, context in found)


def test_every_kept_word_is_a_center_once_and_batches_are_nearly_equal():
    sentences = [np.random.default_rng(i).integers(0, 50, 97) for i in range(40)]
    batches = list(sampler(sentences, 50, batch_size=100).epoch())
    assert torch.equal(
        torch.cat([expand(b).centers_B for b in batches]),
        torch.from_numpy(np.concatenate(sentences)),
    )
    sizes = [len(b.windows_B) for b in batches]
    assert max(sizes) <= 100 and min(sizes) >= 90


DRAWS = pytest.mark.parametrize(
    "draw", [None, reference.draw], ids=["torch's generator", "counters"]
)


@DRAWS
def test_shrinking_windows_weigh_by_distance(draw):
    """A context at distance d is in the window with probability (W - d + 1) / W."""
    s = sampler([np.arange(20_000)], 20_000, batch_size=5_000, window=4, draw=draw)
    distance = np.abs([a - b for a, b in pairs(s.epoch())])
    counts = np.bincount(distance, minlength=5)[1:]
    assert chisquare(counts, np.array([4, 3, 2, 1]) / 10 * counts.sum()).pvalue > 1e-3


def test_subsampling_keeps_words_by_their_probability():
    keep = np.array([0.1, 0.5, 0.9, 1.0])
    s = sampler([np.tile(np.arange(4), 5_000)], 4, batch_size=1_000, keep=keep)
    counts = np.bincount(torch.cat([expand(b).centers_B for b in s.epoch()]), minlength=4)
    spread = np.sqrt(5_000 * keep * (1 - keep))
    assert counts[3] == 5_000 and np.all(np.abs(counts - 5_000 * keep) <= 4 * spread)


@DRAWS
@pytest.mark.parametrize("pool", [0, 512])
def test_noise_follows_its_distribution(pool, draw):
    noise = np.array([1, 2, 3, 4, 10.0]) / 20
    s = sampler(
        [np.zeros(40_000, dtype=int)],
        5,
        batch_size=256,
        noise=noise,
        negative=5,
        negative_pool=pool,
        draw=draw,
    )
    batches = list(s.epoch())
    drawn = torch.cat([b.negatives_BK.flatten() for b in batches])
    counts = np.bincount(drawn, minlength=5)
    assert chisquare(counts, noise * counts.sum()).pvalue > 1e-3
    assert not torch.cat([expand(b).negative_mask_BK for b in batches])[
        drawn.view(-1, 5) == 0
    ].any()


@DRAWS
@pytest.mark.parametrize("steps", [1, 3])
def test_pool_bounds_the_noise_words_of_its_steps(draw, steps):
    s = sampler(
        [np.zeros(5_000, dtype=int)],
        10_000,
        batch_size=100,
        negative_pool=32,
        negative_pool_steps=steps,
        draw=draw,
    )
    drawn = [set(batch.negatives_BK.unique().tolist()) for _ in range(2) for batch in s.epoch()]
    pools = [
        set().union(*drawn[begin : min(begin + steps, epoch + 50)])
        for epoch in (0, 50)
        for begin in range(epoch, epoch + 50, steps)
    ]
    assert len(drawn) == 100 and all(28 <= len(pool) <= 32 for pool in pools)
    assert all(len(pool & other) < 8 for pool, other in pairwise(pools))


@DRAWS
def test_pool_has_each_word_as_often_as_it_should(draw):
    noise = np.array([1, 2, 5, 8]) / 16
    s = sampler(
        [np.zeros(64, dtype=int)],
        4,
        batch_size=64,
        noise=noise,
        negative=1_000,
        negative_pool=16,
        draw=draw,
    )
    counts = np.bincount(next(s.epoch()).negatives_BK.flatten(), minlength=4)
    assert chisquare(counts, noise * counts.sum()).pvalue > 1e-3


def corpus():
    rng = np.random.default_rng(5)
    return [rng.integers(0, 30, length) for length in rng.integers(1, 60, 100)]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        a is b or torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for x, y in zip(ours, theirs, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@DRAWS
def test_same_seed_same_batches_and_epochs_differ(draw):
    first, second, other = (sampler(corpus(), 30, 16, seed, draw=draw) for seed in (1, 1, 2))
    epoch_0, epoch_1 = list(first.epoch()), list(first.epoch())
    assert equal(epoch_0, list(second.epoch())) and equal(epoch_1, list(second.epoch()))
    assert not equal(epoch_0, epoch_1) and not equal(epoch_0, list(other.epoch()))


@pytest.mark.parametrize("pool", [{}, {"negative_pool": 8, "negative_pool_steps": 5}])
def test_position_resumes_anywhere(pool):
    keep = np.full(30, 0.7)
    whole = sampler(corpus(), 30, 4, keep=keep, **pool)
    seen = [(whole.position, batch) for _ in range(2) for batch in whole.epoch()]
    assert len({position.chunk for position, _ in seen}) > 3
    for number in range(0, len(seen) - 1, 37):
        resumed = sampler(corpus(), 30, 4, keep=keep, **pool)
        resumed.position = seen[number][0]
        rest = [batch for _ in range(2 - resumed.position.epoch) for batch in resumed.epoch()]
        assert equal(rest, [batch for _, batch in seen[number + 1 :]])


@pytest.mark.gpu
@settings(max_examples=60)
@given(
    key=st.integers(0, 2**64 - 1),
    centers=st.integers(1, 3000),
    noise=st.integers(1, 9),
    widest=st.integers(1, 20),
    pool=st.integers(0, 9),
    words=st.integers(1, 5000),
    shrinks=st.booleans(),
)
def test_the_kernel_draws_what_plain_torch_draws(key, centers, noise, widest, pool, words, shrinks):
    cdf_V = torch.rand(
        words, generator=torch.Generator().manual_seed(words), dtype=torch.float64
    ).cumsum(0)
    args = key, centers, 1 if shrinks else widest, widest, noise, pool, key ^ 1
    for ours, plain in zip(
        cuda.draw(*args, (cdf_V / cdf_V[-1]).cuda()),
        reference.draw(*args, cdf_V / cdf_V[-1]),
        strict=True,
    ):
        assert torch.equal(ours.cpu(), plain)


def test_progress_reaches_each_epoch_exactly():
    s = sampler(corpus(), 30, 16)
    shares = [batch.epochs_done for batch in s.epoch()]
    assert shares == sorted(shares) and shares[0] > 0 and shares[-1] == 1.0
    assert s.position == Position(1)
    assert [batch.epochs_done for batch in s.epoch()][-1] == 2.0


class One(Ranks):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


LINES = st.lists(st.integers(0, 30), min_size=1, max_size=60).filter(any)


def of_ranks(lengths, size, seed=1):
    """The samplers of so many ranks, over a text whose words are all different."""
    words, ones = sum(lengths), np.ones(sum(lengths))
    text = (
        np.arange(words, dtype=np.int32),
        np.cumsum([0, *lengths]),
        ones,
        ones / words,
        ModelConfig(window=2),
        16,
        seed,
        CPU,
    )
    return [Sampler(*text, ranks=One(rank, size)) for rank in range(size)]


def centers(batches):
    return [int(word) for batch in batches for word in expand(batch).centers_B]


@settings(max_examples=60)
@given(lengths=LINES, size=st.integers(1, 5))
def test_ranks_share_the_text(lengths, size):
    samplers = of_ranks(lengths, size)
    parts = [list(s.epoch()) for s in samplers]
    assert sorted(word for part in parts for word in centers(part)) == list(range(sum(lengths)))
    assert max(map(len, map(centers, parts))) <= sum(lengths) / size + max(lengths)
    ended = [part[-1].epochs_done if part else 1.0 for part in parts]
    assert ended == pytest.approx([1.0] * size) and all(s.position == Position(1) for s in samplers)
    assert max((len(batch.windows_B) for part in parts for batch in part), default=0) <= -(
        -16 // size
    )


@settings(max_examples=60)
@given(
    lengths=LINES,
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(0, 12),
    more=st.integers(0, 6),
)
def test_other_ranks_read_what_is_left(lengths, before, after, steps, more):
    """Twice interrupted; with the same number of ranks not a draw changes."""
    first = of_ranks(lengths, before)
    read = [centers(islice(s.epoch(), steps)) for s in first]
    states = json.loads(json.dumps([s.state(s.position) for s in first]))
    if states[0]["position"][0] != states[-1]["position"][0]:
        return  # the trainer keeps all ranks in one epoch
    second = of_ranks(lengths, after)
    for s in second:
        s.go_on(states)
    read += [centers(islice(s.epoch(), more)) for s in second]
    last = of_ranks(lengths, after)
    for s, other in zip(last, second, strict=True):
        s.go_on([s.state(s.position) for s in second])
        assert s.position == other.position
    epoch = second[0].position.epoch
    read += [centers(s.epoch()) for s in last]
    counts = np.bincount(
        np.concatenate([np.array(part, int) for part in read]), minlength=sum(lengths)
    )
    if epoch == 0 and states[0]["position"][0] == 0:
        assert counts.min() == 1 and counts.sum() <= sum(lengths) + (before + after) * max(lengths)


@settings(max_examples=80)
@given(
    lookahead=st.integers(1, 3),
    words=st.integers(60, 400),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1),
)
def test_words_of_the_text_after_a_batch(lookahead, words, seed, epoch):
    """All words of the chunks after it and of the rest of its own, but that a piece of a chunk more or less may count."""
    ids = np.random.default_rng(seed).integers(0, 40, words, dtype=np.int32)
    text = ids, np.append(np.arange(0, words, 7), words), np.ones(40), np.full(40, 1 / 40)
    one = Sampler(*text, ModelConfig(), 2, 1, CPU, lookahead=lookahead)
    chunks = [ids[one._offsets_S[first] : one._offsets_S[last]] for first, last in one._chunks(0)]
    one.position = Position(epoch)
    for batch in one.epoch():
        found = {*torch.nonzero(batch.ahead.last_piece_V >= batch.ahead.next).flatten().tolist()}
        _, number, parts, _ = batch.after
        its, later = (
            chunks[number],
            [chunks[after % len(chunks)] for after in range(number + 1, number + 1 + lookahead)],
        )
        done, piece = 2 * parts, len(its) / CHUNK_PIECES + 1
        surely, perhaps = its[int(done + piece) + 1 :], its[max(0, int(done - piece) - 2) :]
        assert {*np.concatenate([surely, *later])} <= found <= {*np.concatenate([perhaps, *later])}


def test_ranks_draw_differently_and_as_their_seed_says():
    lengths = [40] * 20
    draws = [
        [batch.negatives_BK for batch in s.epoch()]
        for seed in (1, 1, 2)
        for s in of_ranks(lengths, 2, seed)
    ]
    same = [[all(map(torch.equal, a, b)) for a in draws] for b in draws]
    assert np.array_equal(same, np.kron([[1, 1, 0], [1, 1, 0], [0, 0, 1]], np.eye(2)))


def test_ids_in_a_file_leave_this_process_again(tmp_path):
    ids = np.random.default_rng(1).integers(0, 50, 4 << 20).astype(np.int32)
    ids.tofile(tmp_path / "ids")
    mapped = np.memmap(tmp_path / "ids", np.int32, "r")
    offsets, even = np.arange(0, len(ids) + 1, 64), np.full(50, 0.02)

    def drawn(ids):
        return [
            batch.words_n
            for batch in Sampler(ids, offsets, even, even, ModelConfig(), 4096, 1, CPU).epoch()
        ]

    assert all(torch.equal(a, b) for a, b in zip(drawn(ids), drawn(mapped), strict=True))
    mappings = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/ids\n")[1]
    assert int(re.search(r"Rss: +(\d+) kB", mappings)[1]) < 64
    assert mapped[-1] == ids[-1]
