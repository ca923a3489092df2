"""Embedding tables, batches of text, and optimizers."""
