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


def make_tree(counts_V: np.ndarray, first_node: int = 0) -> Tree:
    """Return the tree that gensim builds of the words' counts.

    Its inner nodes are numbered from `first_node` on.
    """
    words = len(counts_V)
    nodes = 2 * words - 1  # words, then inner nodes in the order in which they are made
    count_N = np.zeros(nodes, np.asarray(counts_V).dtype)
    count_N[:words] = counts_V
    parent_N, depth_N = np.zeros((2, nodes), np.int64)
    code_N = np.zeros(nodes, np.uint8)
    _join(words, np.arange(words), count_N, parent_N, code_N, depth_N)
    begin_V = np.concatenate([[0], depth_N[:words].cumsum()])
    nodes_P = np.empty(begin_V[-1], np.int32)
    codes_P = np.empty(begin_V[-1], np.uint8)
    _list_paths(begin_V, parent_N, code_N, first_node - words, nodes_P, codes_P)
    tensor = torch.from_numpy
    return Tree(tensor(begin_V), tensor(nodes_P), tensor(codes_P), int(depth_N.max()))


# numba compiles loops over arrays that NumPy has made in a quarter of the time.


@compiled
def _join(words, heap, count_N, parent_N, code_N, depth_N):
    """Join the two rarest nodes until one is left; set the depth of all."""
    nodes = len(count_N)
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
    for node in range(nodes - 2, -1, -1):  # parents come after their children
        depth_N[node] = depth_N[parent_N[node]] + 1


@compiled
def _list_paths(begin_V, parent_N, code_N, shift, nodes_P, codes_P):
    """Set nodes and codes of all paths, from the root to each word."""
    for word in range(len(begin_V) - 1):
        node = word
        for place in range(begin_V[word + 1] - 1, begin_V[word] - 1, -1):
            codes_P[place] = code_N[node]
            node = parent_N[node]
            nodes_P[place] = node + shift


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
