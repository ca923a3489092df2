"""Build what a plan decides: tables, kernels, cache, sampler and step.

Shapes: V vectors of a kind, A rows of this rank, N ids of the text, n ids of a chunk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.cache import Engine, RowCache
from w2v.rows.file import nameless_records
from w2v.rows.table import Storage, Table, uniform
from w2v.system.process import on_threads, return_freed_memory, reuse_freed_memory
from w2v.training.memory import MOST_STEPS, ROW_TYPES, explained
from w2v.training.plan import Plan
from w2v.training.trainer import TrainingLoop
from w2v.word2vec import heldout
from w2v.word2vec.batch import Batch, StepState, Tree, chunk_words, max_rows
from w2v.word2vec.cuda import CudaKernels, TorchStepKernels
from w2v.word2vec.exchange import Exchange, RankExchange
from w2v.word2vec.heldout import HeldOut
from w2v.word2vec.kernels import Kernels
from w2v.word2vec.peers import PeerExchange, PeerMemory
from w2v.word2vec.reference import ReferenceKernels
from w2v.word2vec.sampler import Sampler, TrainingText, negative_distribution
from w2v.word2vec.step import TrainingStep
from w2v.word2vec.subwords import SubwordKernels
from w2v.word2vec.subwords_cuda import CudaSubwordKernels

log = logging.getLogger("w2v")
PRODUCT_TYPES = ROW_TYPES | {"amp": torch.bfloat16}  # of matrix products in plain torch
STORAGE: dict[str, Storage] = {"mapped": "pinned", "staged": "cpu"}  # of paged tables, by engine
IDS_AT_ONCE = 1 << 22  # ids that a thread copies to the GPU at a time
# Share of the cache for rows of the lookahead window; with more, rows are evicted too early.
LOOKAHEAD_SHARE = 7 / 8


def build(plan: Plan, draws_vectors: bool = True) -> TrainingLoop:
    """Allocate the table and make the objects of a run.

    Vectors begin as in word2vec.c: inputs uniform in +-0.5 / D, unless the caller sets them, and
    outputs zero.
    """
    if plan.config.train.deterministic:
        # cuBLAS repeats its bits only in a workspace of fixed size, set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with plan.ranks.reraise(), explained(plan):  # before ranks wait for each other
        text = make_text(plan)
        paging = make_paging(plan, text)
        table = make_table(plan, draws_vectors)
    if plan.is_hosted:
        pages = f"pages     {paging.steps} steps each"
        if paging.lookahead:
            words = paging.lookahead * chunk_words(plan.config.train.batch_size)
            pages += f", lookahead window of {words:,} words"
        log.info(pages)
    kernels = make_kernels(plan)
    sampler = make_sampler(plan, text, kernels, plan.ranks, paging.lookahead)
    planning = torch.cuda.Stream(plan.device, priority=-1) if plan.on_gpu else None
    state = StepState(plan.device)
    engine = make_engine(plan, table)
    exchange = Exchange(kernels, paging.steps)
    if peers := find_peers(plan):
        assert isinstance(kernels, CudaKernels)
        most = most_batch_rows(plan, text.tree)
        exchange = PeerExchange(kernels, paging.steps, state, peers, engine.view, most)
    elif plan.ranks.size > 1:
        exchange = RankExchange(kernels, paging.steps, state, plan.ranks, table)
    how = plan.optimizer, state, planning, plan.subwords, plan.ranks
    step = TrainingStep(table, kernels, engine, exchange, *how)
    return_freed_memory()
    if not plan.on_gpu and (plan.ranks.size > 1 or not plan.has_own_step):
        reuse_freed_memory()
    return TrainingLoop(plan.config, sampler, step)


def make_text(plan: Plan) -> TrainingText:
    """Return the text and the distributions that batches are drawn from."""
    model = plan.config.model
    counts_V = plan.vocab.counts
    tree = None
    if model.hs:
        from w2v.word2vec.huffman import make_tree  # numba takes half a second

        tree = make_tree(counts_V, first_node=len(counts_V) * (model.negative > 0))
    return TrainingText(
        ids_N=load_ids(plan),
        offsets_S=plan.corpus.offsets,
        keep_V=plan.vocab.keep_probabilities(model.sample),
        negative_prob_V=negative_distribution(counts_V, model.ns_exponent),
        held_out=heldout.choose(plan.corpus.offsets, plan.config.train.held_out_words),
        tree=tree,
    )


def load_ids(plan: Plan) -> np.ndarray | Tensor:
    """Return the ids of the text, on the GPU if the plan has room there."""
    ids_N = plan.corpus.ids
    if not plan.ids_on_gpu:
        return ids_N
    on_gpu = torch.empty(len(ids_N), dtype=torch.int32, device=plan.device)

    def copy(start: int) -> None:
        part = np.array(ids_N[start : start + IDS_AT_ONCE])
        on_gpu[start : start + len(part)] = torch.from_numpy(part)

    on_threads(copy, range(0, len(ids_N), IDS_AT_ONCE), torch.get_num_threads())
    return on_gpu


def make_table(plan: Plan, draws_vectors: bool) -> Table:
    """Return this rank's rows, with drawn vectors or zeros."""
    size = plan.config.model.vector_size
    dtype = plan.shape.dtype
    states = plan.optimizer.states(size)
    rows = 2 * plan.ranks.shard_rows(plan.shape.vectors)
    storage: Storage = "cpu"
    if plan.is_hosted:
        storage = STORAGE[plan.engine]
    elif plan.on_gpu:
        storage = "cuda"
    memory_VR = None
    if folder := plan.config.transfer.table_dir:
        Path(folder).mkdir(parents=True, exist_ok=True)
        memory_VR = nameless_records(folder, rows, plan.record_bytes // dtype.itemsize, dtype)
    table = Table(
        "vectors",
        rows,
        size,
        states,
        plan.optimizer.scalars,
        storage,
        dtype,
        alignment=plan.alignment,
        memory_VR=memory_VR,
    )
    if draws_vectors:
        values = uniform(size, 0.5 / size, plan.config.train.seed)

        def vectors(rows_n: Tensor) -> Tensor:
            vectors_nD = torch.zeros(len(rows_n), size, device=rows_n.device)
            first = int(rows_n[0]) % 2  # the first row of an input vector
            words = rows_n[first::2] // 2
            vectors_nD[first::2] = values(plan.ranks.global_rows(words))
            if plan.subword_rows:
                rows_n1 = (2 * plan.ranks.global_rows(rows_n // 2) + rows_n % 2)[:, None]
                return torch.where(rows_n1 < 2 * plan.vectors, vectors_nD, values(rows_n1[:, 0]))
            return vectors_nD

        threads = 1 if storage == "cuda" else torch.get_num_threads()  # a GPU fills by itself
        # Memory of rows that no word uses is not touched, so a CPU does not provide it.
        last_row = rows if plan.subword_rows else 2 * plan.ranks.shard_rows(plan.words)
        table.initialise(vectors, plan.device, threads, last_row=last_row)
    return table


def find_peers(plan: Plan) -> PeerMemory | None:
    """Return the memory of all ranks' GPUs, if ranks can read each other's."""
    if plan.ranks.size == 1 or plan.kernels != "cuda" or plan.subwords:
        return None
    peers = PeerMemory(plan.ranks)
    if why := peers.obstacle(plan.device):
        log.info(f"ranks send rows by NCCL: {why}")
        return None
    log.info("ranks read each other's memory")
    return peers


def most_batch_rows(plan: Plan, tree: Tree | None) -> int:
    """Return the most rows that a rank's batch touches."""
    model = plan.config.model
    centers = -(-plan.config.train.batch_size // plan.ranks.size)
    depth = tree.depth if tree else 0
    negatives = model.distinct_negatives(centers)
    rows = max_rows(centers, negatives, model.window, depth, plan.words)
    return sum(min(plan.vectors, count) for count in rows)


def make_kernels(plan: Plan) -> Kernels:
    """Return the kernels of the plan."""
    kernels, subwords = make_word_kernels(plan), plan.subwords
    if not subwords:
        return kernels
    if plan.kernels == "cuda" and plan.optimizer.formula:
        return CudaSubwordKernels(kernels, subwords, plan.shape)
    if plan.kernels == "cpu" and plan.optimizer.formula and plan.ranks.size == 1:
        from w2v.word2vec.subwords_cpu import CpuSubwordKernels  # as above

        return CpuSubwordKernels(kernels, subwords, plan.shape)
    return SubwordKernels(kernels, subwords, plan.shape)


def make_word_kernels(plan: Plan) -> Kernels:
    """Return kernels of the plan for vectors of words."""
    if plan.kernels == "cuda":
        if plan.optimizer.formula:
            return CudaKernels(plan.shape)
        return TorchStepKernels(plan.shape)
    if plan.kernels == "reference":
        return ReferenceKernels(plan.shape, PRODUCT_TYPES.get(plan.config.train.precision))
    from w2v.word2vec import cpu  # numba takes half a second

    if plan.kernels == "cpu":
        return cpu.CpuKernels(plan.shape, plan.threads)
    # Threads overtake each other in sequential SGD, so that only one is deterministic.
    threads = 1 if plan.config.train.deterministic else plan.threads
    return cpu.SequentialSgdKernels(plan.shape, threads)


def make_sampler(
    plan: Plan, text: TrainingText, kernels: Kernels, ranks: Ranks, lookahead: int
) -> Sampler:
    """Return a sampler of a rank's share of the text, by the plan's settings."""
    train = plan.config.train
    return Sampler(
        text,
        plan.config.model,
        train.batch_size,
        train.seed,
        plan.device,
        rank=ranks.rank,
        world_size=ranks.size,
        lookahead=lookahead,
        block_words=train.block_words,
        draw=kernels.draw,
        subsample=kernels.subsample,
        draws_in_thread=plan.kernels in ("cpu", "sequential") and plan.threads > 1,
    )


def make_engine(plan: Plan, table: Table) -> Engine:
    """Return the engine of the plan."""
    if not plan.is_hosted:
        return Engine(table)
    return RowCache(table, plan.slots, plan.device)


def make_heldout(plan: Plan, loop: TrainingLoop) -> HeldOut | None:
    """Return the held-out sentences; None if there are none."""
    text = replace(loop.sampler.text, ids_N=plan.corpus.ids)
    if not len(text.held_out):
        return None
    return HeldOut(text, plan.config.model, plan.device)


# Size of a page and of the lookahead window, found by counting the rows of the text's first pages.


class Paging(NamedTuple):
    """Size of a page and of the lookahead window."""

    steps: int  # batches of a page, whose rows come to the GPU together
    lookahead: int = 0  # chunks of text after the current one whose rows are evicted last


def make_paging(plan: Plan, text: TrainingText) -> Paging:
    """Choose the steps that share a page, and the lookahead window."""
    transfer = plan.config.transfer
    if not plan.is_paged:
        # Long pages cost nothing where rows do not move, and save launches or exchanges of ids. But
        # where torch steps, the gradients of all batches of a page are kept.
        saves = plan.slots or plan.ranks.size > 1  # only a GPU has slots
        steps = MOST_STEPS if saves and plan.has_own_step else 1
        return Paging(transfer.steps_per_page or steps)
    # Batches of all ranks are drawn, to count how many of them find room in the caches.
    kernels = make_kernels(plan)
    sampler = make_sampler(plan, text, kernels, SINGLE, lookahead=0)
    zeros_A = torch.zeros(plan.shape.rows, dtype=torch.bool, device=plan.device)
    slots = plan.ranks.size * plan.slots
    paging, marks_A = choose_paging(
        sampler.epoch(), kernels, zeros_A, slots, transfer.steps_per_page
    )
    # Several ranks do not look ahead: each would need the others' text. Nor does hierarchical
    # softmax, as the text does not name its nodes.
    looks_ahead = transfer.lookahead and plan.ranks.size == 1 and not plan.config.model.hs
    if not looks_ahead or marks_A is None:
        return paging
    words = chunk_words(plan.config.train.batch_size)
    lookahead = choose_lookahead(text.ids_N, words, marks_A, plan.slots, kernels)
    return paging._replace(lookahead=lookahead)


def choose_paging(
    batches: Iterable[Batch], kernels: Kernels, marks_A: Tensor, slots: int, steps: int = 0
) -> tuple[Paging, Tensor | None]:
    """Choose the most steps a page for which two pages fit into the cache.

    The rows of the first batches are marked in `marks_A`, bool [A], which is False before.
    `slots` is the capacity of the caches of all ranks together, in rows. `steps` is given if
    configured. Returns also the marks of two pages, if they fit.
    """
    chosen: tuple[Paging, Tensor | None] = Paging(steps or 1), None
    counted = [2 * steps] if steps else [2, 4, 8, 2 * MOST_STEPS]
    for number, batch in enumerate(islice(batches, counted[-1]), start=1):
        kernels.mark(batch, marks_A)
        if number in counted:
            if int(marks_A.sum()) > slots:
                break
            chosen = Paging(number // 2), marks_A.clone()
    return chosen


def choose_lookahead(
    ids_N: np.ndarray | Tensor, chunk_words: int, page_marks_A: Tensor, slots: int, kernels: Kernels
) -> int:
    """Return the longest lookahead window whose rows fit into the cache.

    A row stays on the GPU between two uses at most a window apart. The text is read from its
    beginning forward, and from its end backward, as one epoch follows the other: a word last used
    `past` chunks ago, and used next in `future` chunks, stays if past + future is in the window.
    The rows in `page_marks_A`, those of two pages, are on the GPU anyway. `slots` is the capacity
    of the cache in rows.
    """
    device = page_marks_A.device
    chunks = len(ids_N) // chunk_words
    vectors = page_marks_A.shape[0] // 2
    future_V = torch.full((vectors,), 2 * chunks + 2, dtype=torch.int32, device=device)
    past_V = future_V.clone()

    def note_uses(uses_V: Tensor, chunk: int, distance: int) -> None:
        part = ids_N[chunk * chunk_words : (chunk + 1) * chunk_words]
        if isinstance(part, np.ndarray):
            part = torch.from_numpy(np.array(part))
        words_n = part.to(device).long()
        uses_V[words_n] = uses_V[words_n].clamp(max=distance)

    for window in range(1, chunks):
        note_uses(future_V, window - 1, window - 1)
        note_uses(past_V, chunks - window, window)
        stays_V = past_V + future_V <= window
        stays_A = kernels.with_subwords(stays_V.repeat_interleave(2))
        if int((page_marks_A | stays_A).sum()) > LOOKAHEAD_SHARE * slots:
            return window - 1
    return max(0, chunks - 1)
