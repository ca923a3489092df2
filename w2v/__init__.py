"""A sparse-embedding word2vec trainer: tables in pinned CPU memory, rows paged onto the GPU, any row-separable optimizer."""

__version__ = "0.1.0"
