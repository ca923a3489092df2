"""Trained word vectors: export, load, evaluate, query and plot."""
