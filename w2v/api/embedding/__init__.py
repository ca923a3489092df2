"""Embedding tables larger than the memory of the GPU, and their optimizer."""

from w2v.api.embedding.modules import PagedEmbedding, PagedEmbeddingBag
from w2v.api.embedding.optimizer import PagedOptimizer
from w2v.api.embedding.row_store import RowStore

__all__ = ["PagedEmbedding", "PagedEmbeddingBag", "PagedOptimizer", "RowStore"]
