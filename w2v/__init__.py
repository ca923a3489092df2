"""Train word2vec on GPUs or CPUs, with any row-separable torch optimizer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w2v.api.compare import compare
    from w2v.api.fasttext import FastText
    from w2v.api.train import train
    from w2v.api.vectors import Vectors, load
    from w2v.api.word2vec import Word2Vec
    from w2v.rows.embedding import PagedEmbedding, PagedEmbeddingBag, page, unpage
    from w2v.rows.optim import RowwiseAdagrad, RowwiseAdam
    from w2v.rows.optimizer import PagedOptimizer, optimizer
    from w2v.rows.store import RowStore

__all__ = [
    "FastText",
    "PagedEmbedding",
    "PagedEmbeddingBag",
    "PagedOptimizer",
    "RowStore",
    "RowwiseAdagrad",
    "RowwiseAdam",
    "Vectors",
    "Word2Vec",
    "__version__",
    "compare",
    "load",
    "optimizer",
    "page",
    "train",
    "unpage",
]
__version__ = "0.1.0"

PUBLIC = {
    "FastText": "w2v.api.fasttext",
    "Word2Vec": "w2v.api.word2vec",
    "PagedEmbedding": "w2v.rows.embedding",
    "PagedEmbeddingBag": "w2v.rows.embedding",
    "PagedOptimizer": "w2v.rows.optimizer",
    "RowStore": "w2v.rows.store",
    "RowwiseAdagrad": "w2v.rows.optim",
    "RowwiseAdam": "w2v.rows.optim",
    "optimizer": "w2v.rows.optimizer",
    "page": "w2v.rows.embedding",
    "unpage": "w2v.rows.embedding",
}
COMMANDS = {  # what the commands call
    "Vectors": "w2v.api.vectors",
    "compare": "w2v.api.compare",
    "load": "w2v.api.vectors",
    "train": "w2v.api.train",
}


def __dir__() -> list[str]:
    """Return the public names, which editors complete."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name on first use, as its module loads torch."""
    if module := (PUBLIC | COMMANDS).get(name):
        return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
