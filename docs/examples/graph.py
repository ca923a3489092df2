"""Embeddings of the nodes of a graph, by random walks (DeepWalk).

    python docs/examples/graph.py --nodes 10000000 --dim 100 --storage pinned
    python docs/examples/graph.py --with word2vec --nodes 10000000 --dim 100

Nodes of a generated graph are in communities and mostly linked within them. Random walks are
sentences of node ids (Perozzi et al., 2014). They train skip-gram with negative sampling, either
in torch with two paged embeddings, or by `w2v.Word2Vec`.
"""

import argparse

import torch
import torch.nn.functional as F

from w2v import PagedEmbedding, PagedOptimizer, Word2Vec
from w2v.rows.table import uniform

COMMUNITY = 50  # nodes
DEGREE = 10  # edges that begin at a node
INSIDE = 0.9  # share of the edges that stay in the community
LENGTH = 20  # nodes of a walk


def random_graph(nodes):
    """Return the neighbors of each node: int32 [V, DEGREE]."""
    neighbors = torch.empty(nodes, DEGREE, dtype=torch.int32)
    for node_ids in torch.arange(nodes).split(1 << 20):
        first = node_ids // COMMUNITY * COMMUNITY
        near = first[:, None] + torch.randint(COMMUNITY, (len(node_ids), DEGREE))
        far = torch.randint(nodes, near.shape)
        chosen = torch.where(torch.rand(near.shape) < INSIDE, near.clamp_(max=nodes - 1), far)
        neighbors[node_ids] = chosen.int()
    return neighbors


def random_walks(neighbors, batch):
    """Yield walks [B, LENGTH] that begin once at each node, in random order."""
    for node_ids in torch.randperm(len(neighbors)).split(batch):
        walk = [node_ids]
        for _ in range(LENGTH - 1):
            edge = torch.randint(DEGREE, walk[-1].shape)
            walk.append(neighbors[walk[-1], edge].long())
        yield torch.stack(walk, dim=1)


class Sentences:
    """Random walks as lists of words, new ones at each pass."""

    def __init__(self, neighbors, batch):
        self.neighbors = neighbors
        self.batch = batch

    def __iter__(self):
        for walks in random_walks(self.neighbors, self.batch):
            for walk in walks.tolist():
                yield [str(node) for node in walk]


def train_word2vec(neighbors, options):
    """Return the vectors [V, D] that Word2Vec learns."""
    model = Word2Vec(
        Sentences(neighbors, options.batch),
        vector_size=options.dim,
        window=options.window,
        negative=options.negative,
        epochs=options.epochs,
        min_count=1,
        sample=0,
        sg=1,  # skip-gram, as DeepWalk
    )
    rows = [model.wv.key_to_index[str(node)] for node in range(len(neighbors))]
    return torch.from_numpy(model.wv.vectors[rows])


def train_library(neighbors, options):
    """Return the vectors [V, D] that skip-gram in torch learns."""
    nodes, dim = len(neighbors), options.dim
    places = {"storage": options.storage}
    centers = PagedEmbedding(nodes, dim, init=uniform(dim, 0.5 / dim, 1), **places)
    contexts = PagedEmbedding(nodes, dim, init=lambda rows: torch.zeros(len(rows), dim), **places)
    paged = PagedOptimizer([centers, contexts], "Adam", lr=0.05)
    for epoch in range(options.epochs):
        for walks in random_walks(neighbors, options.batch):
            # Pairs of nodes at most `window` apart; the distance is drawn once a batch.
            apart = int(torch.randint(1, options.window + 1, ()))
            center = centers(walks[:, :-apart])  # [B, L, D]
            negatives = torch.randint(nodes, (*center.shape[:2], options.negative))
            positive = (center * contexts(walks[:, apart:])).sum(-1)
            negative = (contexts(negatives) @ center[..., None]).squeeze(-1)
            loss = -F.logsigmoid(positive).mean() - F.logsigmoid(-negative).sum(-1).mean()
            paged.zero_grad()
            loss.backward()
            paged.step()
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    return centers.weight.detach().cpu()


def main(arguments=None):
    """Train, and return how often linked nodes are closer than others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--with", dest="trainer", default="library", choices=["library", "word2vec"]
    )
    parser.add_argument("--nodes", type=int, default=1_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--window", type=int, default=5)
    parser.add_argument("--negative", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=250, help="walks")
    parser.add_argument("--storage", default="cpu", choices=["cpu", "pinned", "cuda"])
    options = parser.parse_args(arguments)
    torch.manual_seed(0)

    neighbors = random_graph(options.nodes)
    train = train_word2vec if options.trainer == "word2vec" else train_library
    vectors = train(neighbors, options)
    left = torch.randint(options.nodes, (10_000,))
    linked = neighbors[left, torch.randint(DEGREE, left.shape)].long()
    others = torch.randint(options.nodes, left.shape)
    closeness = [F.cosine_similarity(vectors[left], vectors[right]) for right in (linked, others)]
    score = float((closeness[0] > closeness[1]).float().mean())
    print(f"{score:.1%} of edges are closer than random pairs")
    return score


if __name__ == "__main__":
    main()
