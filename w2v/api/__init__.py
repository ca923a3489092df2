"""What users call: the command w2v, Word2Vec, PagedEmbedding, RowStore."""
