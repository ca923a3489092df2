"""Small embeddings and row stores in every kind of storage."""

import pytest
import torch

from w2v import PagedEmbedding, PagedOptimizer, RowStore

ROWS, DIM = 9, 6


def places(*names):
    """Return storages and devices by their names, as params of a test."""
    marks = {name: pytest.mark.gpu if name.endswith("cuda") else () for name in names}
    return [pytest.param(*name.split("-"), marks=marks[name], id=name) for name in names]


STORED = places("cpu-cpu", "mmap-cpu", "cpu-cuda", "mmap-cuda", "pinned-cuda", "cuda-cuda")
CACHED = places("cpu cached-cpu", "cpu cached-cuda", "pinned cached-cuda")  # room for all rows
EVERYWHERE = STORED + CACHED
SOMEWHERE = places("cpu-cpu", "mmap-cpu", "cpu cached-cpu", "cuda-cuda", "pinned cached-cuda")
stored = pytest.mark.parametrize("storage, device", STORED)
everywhere = pytest.mark.parametrize("storage, device", EVERYWHERE)
somewhere = pytest.mark.parametrize("storage, device", SOMEWHERE)


def embedding(tmp_path, storage="cpu", device="cpu", rows=ROWS, kind=PagedEmbedding, **settings):
    """Return a module without an optimizer."""
    storage, _, cached = storage.partition(" ")
    path = tmp_path / "embedding" if storage == "mmap" else None
    settings = {"seed": 1, "gpu_bytes": "100%" if cached else 0} | settings
    return kind(rows, DIM, storage=storage, device=device, path=path, **settings)


def trainable(tmp_path, storage="cpu", device="cpu", optimizer="Adamax", lr=0.1, **settings):
    """Return a module and its optimizer."""
    step = settings.pop("step", "table")
    table = embedding(tmp_path, storage, device, **settings)
    return table, PagedOptimizer(table, optimizer, lr=lr, step=step)


def weights(table):
    """Return all weights on the CPU."""
    return table.store.get(range(table.num_embeddings)).cpu()


def optimizer_state(table):
    """Return copies of all states and scalars on the CPU."""
    return {name: value.cpu().clone() for name, value in table._table.state().items()}


def batches(steps=5, count=40):
    """Yield ids [2, n] with every row, some twice, and targets for them."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        every = torch.randperm(ROWS, generator=generator)
        more = torch.randint(ROWS, (count - ROWS,), generator=generator)
        target = torch.randn(2, count // 2, generator=generator)
        yield torch.cat([every, more]).view(2, -1), target


def train_step(table, optimizer, ids, target):
    """Step the rows of ids."""
    optimizer.zero_grad()
    vectors = table(ids)
    (vectors.sum(-1) * target.to(vectors.device)).sum().backward()
    optimizer.step()


def row_store(tmp_path, storage="cpu", device="cpu", **settings):
    path = tmp_path / "rows" if storage == "mmap" else None
    return RowStore(ROWS, DIM, storage=storage, device=device, path=path, **settings)
