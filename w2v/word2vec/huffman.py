"""Huffman tree of words, for hierarchical softmax.

The path from the root to a word is the sequence of decisions that predicts it. Frequent words have
short paths (Mikolov et al. 2013, arXiv 1301.3781).

Shapes: V words, P nodes of all paths together.
"""

from __future__ import annotations

import numpy as np
import torch

from w2v.system.jit import compiled
from w2v.word2vec.batch import Tree


def make_tree(counts_V: np.ndarray, first_row: int = 0) -> Tree:
    """Return the tree that gensim builds of the words' counts.

    Its inner nodes are rows of the output table, from `first_row` on.
    """
    begin_V, nodes_P, codes_P, depth = _paths(np.asarray(counts_V), first_row)
    begin_V, nodes_P, codes_P = map(torch.from_numpy, (begin_V, nodes_P, codes_P))
    return Tree(begin_V, nodes_P, codes_P, depth)


@compiled
def _paths(counts_V, first_row):
    """Join the two rarest nodes until one is left; return a tree's parts."""
    words = len(counts_V)
    nodes = 2 * words - 1  # words, then inner nodes in the order in which they are made
    count_N = np.zeros(nodes, counts_V.dtype)
    count_N[:words] = counts_V
    parent_N = np.zeros(nodes, np.int32)
    code_N = np.zeros(nodes, np.uint8)
    heap = np.arange(words)
    for place in range(words // 2 - 1, -1, -1):
        _sift(heap, words, place, count_N)
    for node in range(words, nodes):
        size = nodes - node  # of the heap, once a node is taken
        left = _pop(heap, size, count_N)
        right = heap[0]
        # The new node takes the place at the end, as if the second were popped before it comes.
        if size > 1:
            _pop(heap, size - 1, count_N)
        count_N[node] = count_N[left] + count_N[right]
        parent_N[left] = parent_N[right] = node
        code_N[right] = 1
        heap[size - 1] = node
        _rise(heap, 0, size - 1, count_N)

    depth_N = np.zeros(nodes, np.int64)
    for node in range(nodes - 2, -1, -1):  # parents come after their children
        depth_N[node] = depth_N[parent_N[node]] + 1
    begin_V = np.zeros(words + 1, np.int64)
    for word in range(words):
        begin_V[word + 1] = begin_V[word] + depth_N[word]
    nodes_P = np.empty(begin_V[words], np.int32)
    codes_P = np.empty(begin_V[words], np.uint8)
    for word in range(words):
        node = word
        for place in range(begin_V[word + 1] - 1, begin_V[word] - 1, -1):
            codes_P[place] = code_N[node]
            node = parent_N[node]
            nodes_P[place] = node - words + first_row
    return begin_V, nodes_P, codes_P, depth_N.max()


# Python's heapq step by step, so that nodes of equal counts are joined in gensim's order.


@compiled
def _pop(heap, size, count_N):
    """Take the first node of a heap, which has `size` nodes afterwards."""
    first = heap[0]
    heap[0] = heap[size]
    _sift(heap, size, 0, count_N)
    return first


@compiled
def _sift(heap, size, start, count_N):
    """Move the node at `start` to a leaf, smaller children up; let it rise."""
    node, place = heap[start], start
    child = 2 * place + 1
    while child < size:
        if child + 1 < size and not count_N[heap[child]] < count_N[heap[child + 1]]:
            child += 1
        heap[place] = heap[child]
        place = child
        child = 2 * place + 1
    heap[place] = node
    _rise(heap, start, place, count_N)


@compiled
def _rise(heap, start, place, count_N):
    """Move a node up to its place, at most to `start`."""
    node = heap[place]
    while place > start and count_N[node] < count_N[heap[(place - 1) >> 1]]:
        heap[place] = heap[(place - 1) >> 1]
        place = (place - 1) >> 1
    heap[place] = node
