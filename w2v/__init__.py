"""Train word2vec on GPUs or CPUs, with any row-separable torch optimizer."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from w2v.api.word2vec import Word2Vec
    from w2v.rows.embedding import PagedEmbedding, PagedEmbeddingBag
    from w2v.rows.optimizer import PagedOptimizer
    from w2v.rows.store import RowStore

__all__ = [
    "PagedEmbedding",
    "PagedEmbeddingBag",
    "PagedOptimizer",
    "RowStore",
    "Word2Vec",
    "__version__",
]
__version__ = "0.1.0"

PUBLIC = {
    "Word2Vec": "w2v.api.word2vec",
    "PagedEmbedding": "w2v.rows.embedding",
    "PagedEmbeddingBag": "w2v.rows.embedding",
    "PagedOptimizer": "w2v.rows.optimizer",
    "RowStore": "w2v.rows.store",
}


def __getattr__(name: str) -> Any:
    """Import a public class on first use, as its module loads torch."""
    if name not in PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(PUBLIC[name]), name)
