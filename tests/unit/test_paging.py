"""Sizes of pages and lookahead windows: they fit into the cache."""

from itertools import islice

import numpy as np
import pytest
import torch

from tests.support.each_case import each_case
from tests.support.pairwise import pairwise
from tests.support.zipf import zipf_text
from w2v.config import ModelConfig
from w2v.rows.cache import RowCache
from w2v.rows.moves import WantedRows
from w2v.rows.table import Table
from w2v.training.build import LOOKAHEAD_SHARE, choose_lookahead, choose_paging
from w2v.training.memory import MOST_STEPS
from w2v.word2vec.batch import CHUNK_BATCHES, StepShape
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.sampler import Sampler, TrainingText, negative_distribution

CPU = torch.device("cpu")
VECTORS, CENTERS = 5_000, 500
ROWS = 2 * VECTORS
MODEL = ModelConfig(sample=1e-3, negative_pool=500)
KERNELS = ReferenceKernels(StepShape(VECTORS, 4, torch.float32, CPU))


@pytest.fixture(scope="module")
def text():
    vocab, corpus = zipf_text(VECTORS, 20 * VECTORS)
    keep_V = vocab.keep_probabilities(MODEL.sample)
    prob_V = negative_distribution(vocab.counts, 0.75)
    return TrainingText(corpus.ids, corpus.offsets, keep_V, prob_V)


@pytest.fixture(scope="module")
def batches(text):
    return list(Sampler(text, MODEL, CENTERS, 1, CPU).epoch())


def marks(batches):
    """Return which rows the batches touch."""
    marks_A = torch.zeros(ROWS, dtype=torch.bool)
    for batch in batches:
        KERNELS.mark(batch, marks_A)
    return marks_A


def rows_of_two_pages(batches, steps, first=0):
    return int(marks(batches[first : first + 2 * steps]).sum())


@pairwise({"steps": [1, 2, 4, 8], "ranks": [1, 4], "spare": [-1, 0]})
def test_page_has_the_most_steps_that_leave_room_for_the_next_page(batches, steps, ranks, spare):
    slots = -(-rows_of_two_pages(batches, steps) // ranks) + spare
    paging, marks_A = choose_paging(iter(batches), KERNELS, marks([]), ranks * slots)
    fitting = steps if spare == 0 else steps // 2
    assert paging == (max(1, fitting), 0)
    if fitting:
        assert torch.equal(marks_A, marks(batches[: 2 * fitting]))
        # Later pages touch about as many rows.
        later = rows_of_two_pages(batches, fitting, first=40)
        assert later == pytest.approx(int(marks_A.sum()), rel=0.1)
    else:
        assert marks_A is None


@each_case("number", [0, 1, 2, 5])
def test_text_of_few_batches_gets_pages_of_few_steps(batches, number):
    paging, _ = choose_paging(iter(batches[:number]), KERNELS, marks([]), ROWS)
    assert paging.steps == max(1, {5: 4}.get(number, number) // 2) <= MOST_STEPS


def test_configured_steps_are_kept_and_their_rows_counted_if_they_fit(batches):
    for slots, fits in ((ROWS, True), (50, False)):
        paging, marks_A = choose_paging(iter(batches), KERNELS, marks([]), slots, steps=3)
        assert paging.steps == 3
        assert torch.equal(marks_A, marks(batches[:6])) if fits else marks_A is None


def rows_that_stay(chunks, page_marks_A, window):
    """Count the rows kept on the GPU at the end of an epoch.

    Rows are kept if a page has them or if they are used again within the window.
    A word stays if its last use, some chunks before the end, and its first use in the next epoch
    are at most `window` chunks apart.
    """
    stays_V = torch.zeros(VECTORS, dtype=torch.bool)
    for past in range(1, window + 1):
        stays_V[np.intersect1d(chunks[-past], chunks[: window - past + 1])] = True
    page_marks_VT = page_marks_A.view(VECTORS, 2)
    return int((page_marks_VT | stays_V[:, None]).sum())


@each_case("slots", [2_500, 4_000, 6_000, 8_000, ROWS])
def test_rows_of_the_lookahead_window_fit_into_their_share_of_the_cache(text, batches, slots):
    size = 5_000
    chunks = text.ids_N[: len(text.ids_N) // size * size].reshape(-1, size)
    page_marks_A = marks(batches[:2])
    window = choose_lookahead(text.ids_N, size, page_marks_A, slots, KERNELS)
    on_gpu = torch.from_numpy(text.ids_N)
    assert choose_lookahead(on_gpu, size, page_marks_A, slots, KERNELS) == window
    room = LOOKAHEAD_SHARE * slots
    assert 0 <= window < len(chunks)
    assert window == 0 or rows_that_stay(chunks, page_marks_A, window) <= room
    if window < len(chunks) - 1:
        assert rows_that_stay(chunks, page_marks_A, window + 1) > room


def misses(text, lookahead, slots, pages):
    """Return how many rows a cache reads for so many pages, once it is full."""
    cache = RowCache(Table("vectors", ROWS, 1, {}, {}, "cpu", alignment=4), slots, CPU)
    sampler = Sampler(text, MODEL, CENTERS, 1, CPU, lookahead=lookahead)
    batches = (batch for _ in range(9) for batch in sampler.epoch())
    read = []
    for batch in islice(batches, 2 * pages):
        soon_A = None if batch.lookahead is None else batch.lookahead.soon_A
        cache.prefetch(WantedRows(marks([batch]), soon_A))
        cache.wait()
        read.append(cache.stats.rows_read)
    return read[-1] - read[pages]


def test_lookahead_saves_misses(text, batches, one_thread):
    slots = 7_000
    page_marks_A = marks(batches[:2])
    lookahead = choose_lookahead(text.ids_N, CHUNK_BATCHES * CENTERS, page_marks_A, slots, KERNELS)
    found = {chunks: misses(text, chunks, slots, 100) for chunks in (0, lookahead, 5)}
    assert found[lookahead] < 0.9 * min(found[0], found[5])
