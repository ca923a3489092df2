"""A sparse-embedding word2vec trainer: tables in pinned CPU memory, rows paged onto the GPU, any row-separable optimizer."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`from w2v import Word2Vec`; torch and gensim are imported only then."""
    if name == "Word2Vec":
        from w2v.api.word2vec import Word2Vec

        return Word2Vec
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
