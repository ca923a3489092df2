"""Programs embed graphs with w2v.Word2Vec: `make test-clients`."""

import importlib
import random

import gensim
import numpy as np
import pytest

import w2v

pytestmark = pytest.mark.filterwarnings("ignore")
networkx = pytest.importorskip("networkx")
GROUPS, SIZE = 4, 16
CLASSES = [gensim.models.Word2Vec, w2v.Word2Vec]


@pytest.fixture
def graph():
    """Return nodes in groups that have few edges between them."""
    return networkx.planted_partition_graph(GROUPS, SIZE, 0.6, 0.02, seed=1)


def share_in_group(vectors_VD):
    """Return the share of nearest neighbors in a node's own group."""
    vectors_VD = np.array(vectors_VD, dtype=np.float64)
    vectors_VD /= np.linalg.norm(vectors_VD, axis=1, keepdims=True)
    scores_VV = vectors_VD @ vectors_VD.T
    np.fill_diagonal(scores_VV, -np.inf)
    group_V = np.arange(GROUPS * SIZE) // SIZE
    nearest = scores_VV.argsort(axis=1)[:, -5:]
    return (group_V[nearest] == group_V[:, None]).mean()


def assert_as_good(vectors):
    """Compare vectors of gensim with those of w2v."""
    gensims, own = vectors
    assert np.shape(own) == np.shape(gensims)
    assert share_in_group(gensims) > 0.9  # by chance .24
    assert share_in_group(own) > share_in_group(gensims) - 0.05


@pytest.mark.parametrize("name", ["DeepWalk", "Node2Vec", "Walklets"])
def test_karateclub_embeds_nodes(name, graph, monkeypatch):
    pytest.importorskip("karateclub")
    module = importlib.import_module(f"karateclub.node_embedding.neighbourhood.{name.lower()}")
    vectors = []
    for word2vec in CLASSES:
        monkeypatch.setattr(module, "Word2Vec", word2vec)
        model = getattr(module, name)(walk_number=5, dimensions=16, epochs=3, workers=1)
        model.fit(graph)
        vectors.append(model.get_embedding())
    assert_as_good(vectors)


def test_node2vec_embeds_nodes_and_edges(graph, monkeypatch):
    node2vec = pytest.importorskip("node2vec")
    edges = pytest.importorskip("node2vec.edges")
    random.seed(1)
    walks = node2vec.Node2Vec(graph, dimensions=16, walk_length=20, num_walks=20, quiet=True)
    vectors = []
    for word2vec in CLASSES:
        monkeypatch.setattr(gensim.models, "Word2Vec", word2vec)
        model = walks.fit(window=5, min_count=1, batch_words=4, epochs=3, seed=1)
        assert isinstance(model, word2vec)
        vectors.append([model.wv[str(node)] for node in graph])
        of_edges = edges.HadamardEmbedder(keyed_vectors=model.wv, quiet=True)
        assert np.array_equal(of_edges["1", "2"], model.wv["1"] * model.wv["2"])
    assert_as_good(vectors)


def test_pyrdf2vec_embeds_entities_and_loads_them_again(graph, tmp_path, monkeypatch):
    pyrdf2vec = pytest.importorskip("pyrdf2vec")
    from pyrdf2vec import embedders, graphs, walkers

    of_gensim = importlib.import_module("pyrdf2vec.embedders.word2vec")
    entities = [f"http://node/{node}" for node in graph]
    vectors = []
    for word2vec in CLASSES:
        monkeypatch.setattr(of_gensim, "W2V", word2vec)
        facts = graphs.KG()
        for start, end in networkx.DiGraph(graph).edges:
            subject, target = (graphs.Vertex(entities[node]) for node in (start, end))
            link = graphs.Vertex("http://link", predicate=True, vprev=subject, vnext=target)
            facts.add_walk(subject, link, target)
        transformer = pyrdf2vec.RDF2VecTransformer(
            embedders.Word2Vec(vector_size=16, sg=1, epochs=20, workers=1, seed=1),
            walkers=[walkers.RandomWalker(4, 40, md5_bytes=None, random_state=1)],
        )
        found, _ = transformer.fit_transform(facts, entities)
        transformer.save(str(tmp_path / "transformer"))
        loaded = pyrdf2vec.RDF2VecTransformer.load(str(tmp_path / "transformer"))
        again, _ = loaded.transform(facts, entities)
        assert np.array_equal(found, again)
        vectors.append(found)
    assert_as_good(vectors)
