"""What other programs use: Word2Vec, Embedding, comparisons, sweeps."""
