"""Small embeddings and row stores in every kind of storage."""

import pytest

from w2v.api.embedding import Embedding, RowStore

ROWS, DIM = 9, 6
PLACES = [  # storage, device
    ("cpu", "cpu"),
    ("mmap", "cpu"),
    *(
        pytest.param(storage, "cuda", marks=pytest.mark.gpu)
        for storage in ("cpu", "mmap", "pinned", "cuda")
    ),
]
everywhere = pytest.mark.parametrize("storage, device", PLACES)


def embedding(tmp_path, storage="cpu", device="cpu", rows=ROWS, **settings):
    settings = {"optimizer": "Adamax", "lr": 0.1} | settings
    path = tmp_path / "embedding" if storage == "mmap" else None
    return Embedding(rows, DIM, storage=storage, device=device, path=path, **settings)


def row_store(tmp_path, storage="cpu", device="cpu", **settings):
    path = tmp_path / "rows" if storage == "mmap" else None
    return RowStore(ROWS, DIM, storage=storage, device=device, path=path, **settings)
