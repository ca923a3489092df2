"""Training steps by names of kernels and engines; texts and batches."""

from dataclasses import replace

import numpy as np
import torch

from w2v.config import ModelConfig
from w2v.distributed.ranks import SINGLE
from w2v.rows.cache import Engine, RowCache
from w2v.rows.moves import TorchPlanner
from w2v.rows.optim import RowOptimizer
from w2v.rows.table import Table, uniform
from w2v.word2vec.batch import Batch, Objective, StepShape, StepState, output_vectors
from w2v.word2vec.cpu import CpuKernels, SequentialSgdKernels, ThreadGrads, Threads
from w2v.word2vec.cuda import CudaKernels, TorchStepKernels
from w2v.word2vec.exchange import Exchange, RankExchange
from w2v.word2vec.huffman import make_tree
from w2v.word2vec.peers import PeerExchange, PeerMemory
from w2v.word2vec.reference import ReferenceKernels, expand
from w2v.word2vec.sampler import Sampler, TrainingText
from w2v.word2vec.step import TrainingStep
from w2v.word2vec.subwords import SubwordKernels
from w2v.word2vec.subwords_cpu import CpuSubwordKernels
from w2v.word2vec.subwords_cuda import CudaSubwordKernels

DTYPE = torch.float32
MODEL = ModelConfig(negative=5)


def make_step(
    config,
    rows,
    dim,
    kernels="reference",
    device="cpu",
    engine="resident",
    storage=None,
    *,
    dtype=DTYPE,
    slots=0,
    steps_per_page=1,
    threads=1,
    product=None,
    ranks=SINGLE,
    peers=False,
    folder=None,
):
    """Return a `TrainingStep` on `rows` input and output vectors.

    Kernels and engine are named as in `make_kernels` and `make_engine`. Tables are stored on the
    device, or pinned for an engine that pages, unless `storage` says where; "mmap" needs a folder.
    Ranks with `peers` read each other's GPUs.
    """
    optimizer = RowOptimizer(config)
    paged_storage = "pinned" if device == "cuda" else "cpu"
    storage = storage or (device if engine == "resident" else paged_storage)
    table = make_table(optimizer, rows, dim, storage, dtype, ranks, folder)
    device = torch.device(device)
    shape = StepShape(rows, dim, dtype, device, config.occurrence_cap > 0, ranks.size)
    if kernels == "reference":
        kernels = ReferenceKernels(shape, product)
    elif kernels == "cuda" and not optimizer.formula:
        kernels = TorchStepKernels(shape)
    else:
        kernels = make_kernels(kernels, shape, threads)
    planning = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    state = StepState(device)
    engine = make_engine(engine, table, slots, device)
    exchange = Exchange(kernels, steps_per_page)
    if peers:
        memory = PeerMemory(ranks)
        assert not memory.obstacle(device)
        exchange = PeerExchange(kernels, steps_per_page, state, memory, engine.view, 2 * rows)
    elif ranks is not SINGLE:
        exchange = RankExchange(kernels, steps_per_page, state, ranks, table)
    return TrainingStep(table, kernels, engine, exchange, optimizer, state, planning)


def make_subword_step(config, subwords, dim, kernels="reference", ranks=SINGLE, **how):
    """Return a step on vectors that are composed of subwords."""
    vectors = subwords.vectors + -(-subwords.rows // 2)
    step = make_step(config, vectors, dim, kernels, ranks=ranks, **how)
    kinds = {CpuKernels: CpuSubwordKernels, CudaKernels: CudaSubwordKernels}
    if ranks.size > 1 or not step.optimizer.formula:
        del kinds[CpuKernels]
    kind = kinds.get(type(step.kernels), SubwordKernels)
    count_pairs = config.occurrence_cap > 0
    shape = StepShape(vectors, dim, step.table.dtype, step.state.device, count_pairs, ranks.size)
    step.kernels = step.exchange.kernels = kind(step.kernels, subwords, shape)
    step.subwords, step.ranks = subwords, ranks
    return step


def make_kernels(name, shape, threads=1):
    """Return kernels by name, or of a given class."""
    match name:
        case "reference":
            return ReferenceKernels(shape)
        case "cpu":
            return CpuKernels(shape, threads)
        case "sequential":
            return SequentialSgdKernels(shape, threads)
        case "cuda":
            return CudaKernels(shape)
    return name(shape)


def make_table(optimizer, rows, dim, storage="cpu", dtype=DTYPE, ranks=SINGLE, folder=None):
    """Return this rank's rows; weights are in [-0.5, 0.5)."""
    rows, states = ranks.shard_rows(rows), optimizer.states(dim)
    path = folder and folder / "vectors.records"
    table = Table("vectors", 2 * rows, dim, states, optimizer.scalars, storage, dtype, path)
    for seed, view in enumerate(table.interleaved("input", "output")):
        weights = uniform(dim, 0.5, seed)
        view.initialise(lambda rows_n, weights=weights: weights(ranks.global_rows(rows_n)))
    return table


def make_engine(name, table, slots, device):
    """Return an engine by name: "resident", "cache" or "torch cache"."""
    if name == "resident":
        return Engine(table)
    return RowCache(table, slots, device, planner=TorchPlanner if name == "torch cache" else None)


def records(step):
    """Return copies of both tables' records on the CPU."""
    return [table.records_VR.cpu().clone() for table in step.tables]


def train(step, batches, lr):
    """Train on the batches; return the loss and the pairs of each: [n], [n]."""
    results = [step(planned, lr) for planned in step.plan_pages(batches)]
    step.engine.flush()
    _, *sums = zip(*results, strict=True)
    losses, pairs = (torch.stack(column).cpu() for column in sums)
    return losses, pairs


def train_on_text(config, kernels="reference", device="cpu", model=MODEL, **how):
    """Train three epochs of a small text; return the step and the losses."""
    rows, dim = 300, 48
    vectors = output_vectors(rows, model.hs, model.negative)
    step = make_step(config, vectors, dim, kernels, device, **how)
    rng = np.random.default_rng(3)
    offsets = np.cumsum([0, *rng.integers(1, 60, 60)])
    ids = (rng.zipf(1.3, offsets[-1]) % rows).astype(np.int32)
    text = TrainingText(ids, offsets, np.ones(rows), rng.dirichlet(np.ones(rows)))
    if model.hs:
        tree = make_tree(np.bincount(ids, minlength=rows), rows if model.negative else 0)
        text = replace(text, tree=tree)
    draws = {"draw": step.kernels.draw, "subsample": step.kernels.subsample}
    where = torch.device(device)
    sampler = Sampler(text, model, 64, 1, where, **draws)
    losses = [train(step, sampler.epoch(), config.lr)[0] for _ in range(3)]
    return step, torch.cat(losses)


def one_sentence(ids, rows):
    """Return a text of one sentence, with equally frequent negatives."""
    ids = np.asarray(ids, np.int32)
    return TrainingText(ids, np.array([0, len(ids)]), np.ones(rows), np.full(rows, 1 / rows))


def problem(seed, centers, window, negative, rows, dim=1, sentence=12, spread=1.0):
    """Return a batch in a text of random words, and weights of both tables."""
    g = torch.Generator().manual_seed(seed)
    length = centers + int(torch.randint(0, 3 * window, (), generator=g))
    words = torch.randint(rows, (length,), generator=g, dtype=torch.int32)
    sentences = torch.cumsum(torch.rand(length, generator=g) < 1 / sentence, 0).int()
    windows = torch.randint(1, window + 1, (centers,), generator=g, dtype=torch.int32)
    negatives = torch.randint(rows, (centers, negative), generator=g, dtype=torch.int32)
    first = int(torch.randint(0, length - centers + 1, (), generator=g))
    weights_TVD = spread * torch.randn(2, rows, dim, generator=g) / dim**0.25
    return Batch(words, sentences, first, windows, negatives, window, 0.0), weights_TVD


def with_tree(batch, weights_TVD, alone):
    """Add hierarchical softmax to a problem, alone or beside negatives.

    Words get random counts, and the tables rows for the nodes.
    """
    words, dim = weights_TVD.shape[1:]
    g = torch.Generator().manual_seed(int(batch.words_n.sum()))
    counts = torch.randint(1, 9, (words,), generator=g).numpy() ** 3
    tree = make_tree(counts, 0 if alone else words)
    if alone:
        batch = batch._replace(negatives_BK=batch.negatives_BK[:, :0])
    else:
        nodes_TND = torch.randn(2, words - 1, dim, generator=g) * weights_TVD.std()
        weights_TVD = torch.cat([weights_TVD, nodes_TND], 1)
    return batch._replace(objective=batch.objective._replace(tree=tree)), weights_TVD


def part_of(batch, begin, end):
    """Return the batch of centers [begin, end) of a batch."""
    drawn = {"windows_B": batch.windows_B[begin:end], "negatives_BK": batch.negatives_BK[begin:end]}
    return batch._replace(first=batch.first + begin, **drawn)


def moved(batch, device):
    """Return the batch with its tensors on a device."""
    kinds = (torch.Tensor, Objective)
    return Batch(*(part.to(device) if isinstance(part, kinds) else part for part in batch))


def sorted_grads(grads):
    """Return a table's unique rows, sorted, their gradients and pairs."""
    if isinstance(grads, ThreadGrads):
        grads = grads.merge(Threads(len(grads.of_thread)))
    count = len(grads.rows_U) if grads.row_count is None else int(grads.row_count)
    assert not grads.grad_UD[count:].any()
    rows_U, order_U = grads.rows_U[:count].long().sort()
    return rows_U.cpu(), grads.grad_UD[order_U].cpu(), grads.pairs_U[order_U].long().cpu()


def expand_words(batch):
    """Return the pairs of a batch as words and nodes, not as rows."""
    pairs = expand(batch)
    return pairs._replace(contexts_BC=pairs.contexts_BC // 2, targets_BT=pairs.targets_BT // 2)
