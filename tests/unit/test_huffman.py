"""The Huffman tree of words: gensim's, and of the least total length."""

import heapq
import itertools
import logging

import numpy as np
from gensim.models import KeyedVectors, word2vec

from tests.support.each_case import each_case
from w2v.word2vec.huffman import make_tree


def gensims_paths(counts):
    """Return the nodes and codes that gensim gives to each word."""
    kv = KeyedVectors(1, count=len(counts), dtype=np.float32)
    kv.index_to_key = list(range(len(counts)))
    kv.key_to_index = {word: word for word in kv.index_to_key}
    kv.expandos["count"] = np.array(counts)
    logging.getLogger("gensim").setLevel(logging.WARNING)
    word2vec._assign_binary_codes(kv)
    return [
        (list(kv.get_vecattr(word, "point")), list(kv.get_vecattr(word, "code")))
        for word in kv.index_to_key
    ]


def paths_of(tree):
    """Return the rows and codes of each word's path."""
    return [
        (tree.nodes_P[begin:end].tolist(), tree.codes_P[begin:end].tolist())
        for begin, end in itertools.pairwise(tree.begin_V.tolist())
    ]


# Many equal counts, whose order heapq decides; more than 2,500, which it sorts block by block.
@each_case("words, largest", [(2, 9), (3, 9), (7, 2), (500, 5), (4000, 50)])
def test_tree_is_gensims(words, largest):
    counts = np.random.default_rng(words).integers(1, largest, words)
    assert paths_of(make_tree(counts)) == gensims_paths(counts)


def test_shares_give_the_tree_of_counts():
    counts = np.random.default_rng(1).integers(1, 50, 500)
    assert paths_of(make_tree(counts / 1024)) == paths_of(make_tree(counts))


def test_rows_of_nodes_begin_where_they_shall():
    counts = [5, 4, 3, 2, 1]
    first, second = make_tree(counts), make_tree(counts, first_node=5)
    assert (second.nodes_P - first.nodes_P == 5).all()
    assert sorted(set(first.nodes_P.tolist())) == [0, 1, 2, 3]
    assert first.depth == first.begin_V.diff().max() == 3


def test_paths_have_the_least_total_length():
    counts = np.random.default_rng(1).zipf(1.5, 300).clip(max=10**6)
    lengths = make_tree(counts).begin_V.diff().numpy()
    heap, least = counts.tolist(), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        least += joined
        heapq.heappush(heap, joined)
    assert (lengths * counts).sum() == least


def test_one_word_has_an_empty_path():
    tree = make_tree([7])
    assert tree.begin_V.tolist() == [0, 0]
    assert tree.depth == len(tree.nodes_P) == 0
