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

MODULES = {  # of the public names
    "w2v.api.compare": "compare",
    "w2v.api.fasttext": "FastText",
    "w2v.api.train": "train",
    "w2v.api.vectors": "Vectors load",
    "w2v.api.word2vec": "Word2Vec",
    "w2v.rows.embedding": "PagedEmbedding PagedEmbeddingBag page unpage",
    "w2v.rows.optim": "RowwiseAdagrad RowwiseAdam",
    "w2v.rows.optimizer": "PagedOptimizer optimizer",
    "w2v.rows.store": "RowStore",
}


def __dir__() -> list[str]:
    """Return the public names, which editors complete."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name on first use, as its module loads torch."""
    for module, names in MODULES.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
