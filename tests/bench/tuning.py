"""Scores of many short runs: what the automatic settings are fitted to.

    python tests/bench/tuning.py cases.jsonl --texts wiki=wiki100.txt books=books45.txt --to FILE

Each line of cases.jsonl is a run: {"text": "wiki:4", "set": ["optimizer.lr=.05", ...]}. 4 is the
number of millions of words (by default all) from the beginning of the text; "wiki:4@.5" starts in
its middle. "graph:5x200-1" stands for random walks with seed 1 in a graph of GRAPHS, scored by how
well clusters find its groups, "baskets:60000-1" and "logs:50000-1" for so many lines by seed 1,
scored by the share of words' ten nearest ones that are of their group. "B" and "lr" are factors of
the automatic batch size and rate. A line with "gensim": {"alpha": .05} trains gensim instead.
Worker processes share the GPU, as short runs wait for the CPU. Each run adds a line to FILE when it
ends.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from w2v.config import load_config
from w2v.system.process import cores
from w2v.text import Corpus, Vocab, open_corpus
from w2v.training import build, plan
from w2v.vectors import datasets, evaluate

# Block models: groups, nodes of each, and the probability of an edge inside and between them.
GRAPHS = {"4x40": (4, 40, 0.2, 0.03), "8x50": (8, 50, 0.2, 0.05), "5x200": (5, 200, 0.04, 0.0085)}
# Edges of Zachary's karate club, and the members that stayed with Mr. Hi.
KARATE = (
    "2 1 3 1 3 2 4 1 4 2 4 3 5 1 6 1 7 1 7 5 7 6 8 1 8 2 8 3 8 4 9 1 9 3 10 3 11 1 11 5 11 6 12 "
    "1 13 1 13 4 14 1 14 2 14 3 14 4 17 6 17 7 18 1 18 2 20 1 20 2 22 1 22 2 26 24 26 25 28 3 "
    "28 24 28 25 29 3 30 24 30 27 31 2 31 9 32 1 32 25 32 26 32 29 33 3 33 9 33 15 33 16 33 19 "
    "33 21 33 23 33 24 33 30 33 31 33 32 34 9 34 10 34 14 34 15 34 16 34 19 34 20 34 21 34 23 "
    "34 24 34 27 34 28 34 29 34 30 34 31 34 32 34 33 "
)
MR_HI = {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 17, 18, 20, 22}
WALKS, STEPS = 10, 40  # from each node, and nodes of a walk
BASE = ["model.vector_size=128", "model.sample=1e-4", "train.epochs=5"]


def zipf(rng: np.random.Generator, values: int, size: int, power: float = 0.8) -> np.ndarray:
    """Return random numbers below `values`, by Zipf's law with an exponent."""
    share_V = 1 / np.arange(1, values + 1) ** power
    return rng.choice(values, size, p=share_V / share_V.sum())


def write_baskets(baskets: str, file: Path) -> None:
    """Write shopping baskets, whose words are "category/product".

    There are 12 baskets for each product, and 50 products in a category. A basket has at most 30
    products in no order, three quarters of them from a few categories, the others from any.
    """
    lines, _, seed = baskets.partition("-")
    rng = np.random.default_rng(int(seed))
    size = 50
    categories = max(2, int(lines) // 12 // size)
    with file.open("w") as out:
        for products in np.minimum(2 + rng.geometric(1 / 7, int(lines)), 30):
            few = zipf(rng, categories, 1 + products // 3)
            near_P = rng.random(products) < 0.75
            category_P = np.where(
                near_P, rng.choice(few, products), zipf(rng, categories, products)
            )
            product_P = zipf(rng, size, products)
            pairs = dict.fromkeys(zip(category_P.tolist(), product_P.tolist(), strict=True))
            out.write(" ".join(f"{category}/{product}" for category, product in pairs) + "\n")


def write_logs(logs: str, file: Path) -> None:
    """Write lines of a log by 60 templates, whose words are "field/value".

    Constant words of the templates are values of field 0.
    """
    lines, _, seed = logs.partition("-")
    rng = np.random.default_rng(int(seed))
    values_F = np.array([200, 5, 8, 12, 25, 40, 60, 100, 200, 400, 800, 1600])
    # Templates begin with a level; of their other words, four of ten vary.
    templates = []
    for length in rng.integers(5, 20, 60):
        varies_W = rng.random(length) < 0.4
        field_W = np.where(varies_W, rng.integers(2, len(values_F), length), 0)
        field_W[0] = 1
        templates.append((field_W, zipf(rng, values_F[0], length, 1)))
    with file.open("w") as out:
        for template in zipf(rng, len(templates), int(lines), 1):
            field_W, word_W = templates[template]
            # About as frequent as by Zipf's law: powers of the number of values.
            value_W = (values_F[field_W] ** rng.random(len(field_W))).astype(int) - 1
            value_W = np.where(field_W, value_W, word_W)
            pairs = zip(field_W.tolist(), value_W.tolist(), strict=True)
            out.write(" ".join(f"{field}/{value}" for field, value in pairs) + "\n")


def write_walks(graph: str, file: Path) -> None:
    """Write random walks, whose words are "group/node"."""
    kind, _, seed = graph.partition("-")
    rng = np.random.default_rng(int(seed))
    if kind == "karate":
        edges_E2 = np.array(KARATE.split(), int).reshape(-1, 2) - 1
        group_V = np.array([int(node + 1 in MR_HI) for node in range(34)])
        near_VV = np.zeros((34, 34), bool)
        near_VV[tuple(edges_E2.T)] = True
    else:
        groups, size, inside, between = GRAPHS[kind]
        group_V = np.repeat(np.arange(groups), size)
        share_VV = np.where(group_V[:, None] == group_V, inside, between)
        near_VV = np.triu(rng.random(share_VV.shape) < share_VV, 1)
    near_V = [np.flatnonzero(row) for row in near_VV | near_VV.T]
    lines = []
    for node in np.concatenate([rng.permutation(len(group_V)) for _ in range(WALKS)]):
        walk = [node]
        while len(walk) < STEPS and len(near_V[walk[-1]]):
            walk.append(rng.choice(near_V[walk[-1]]))
        lines.append(" ".join(f"{group_V[node]}/{node}" for node in walk))
    file.write_text("\n".join(lines) + "\n")


def nearest(group_V: np.ndarray, vectors_VD: Tensor) -> float:
    """Return the share of words' ten nearest ones that are of their group."""
    unit_VD = torch.nn.functional.normalize(vectors_VD.float()).cpu()
    near = [(unit_bD @ unit_VD.T).topk(11).indices[:, 1:] for unit_bD in unit_VD.split(2048)]
    return float((group_V[torch.cat(near).numpy()] == group_V[:, None]).mean())


def purity(group_V: np.ndarray, vectors_VD: Tensor) -> float:
    """Return the share of nodes that are in their cluster's largest group."""
    from sklearn.cluster import KMeans

    groups = group_V.max() + 1
    unit_VD = torch.nn.functional.normalize(vectors_VD.double()).cpu().numpy()
    cluster_V = KMeans(groups, n_init=10, random_state=0).fit_predict(unit_VD)
    largest = (np.bincount(group_V[cluster_V == cluster]).max() for cluster in range(groups))
    return sum(largest) / len(group_V)


def score(words: Sequence[str], vectors_VD: Tensor, further: datasets.Further) -> dict[str, Any]:
    """Return the scores, and the questions and pairs that were counted."""
    if "/" in words[0]:
        group_V = np.array([int(word.partition("/")[0]) for word in words])
        scores = {"near": nearest(group_V, vectors_VD)}
        if group_V.max() < 10:  # k-means with more takes minutes
            scores["purity"] = purity(group_V, vectors_VD)
        return {"scores": {name: round(value, 4) for name, value in scores.items()}}
    google, similarities, others = evaluate.scores(words, vectors_VD, *further)
    totals = {name: found.total for name, found in {"google": google, **others}.items()}
    scores = {name: total.accuracy for name, total in totals.items()}
    scores |= {found.name: found.spearman for found in similarities if found.spearman is not None}
    counts = {name: total.counted for name, total in totals.items()}
    return {
        "scores": {name: round(value, 4) for name, value in scores.items()},
        "counts": counts | {found.name: found.pairs for found in similarities},
    }


@functools.cache
def open_text(path: Path, folder: Path, *cuts: str) -> tuple[Vocab, Corpus]:
    """Open a text with settings of its vocabulary, once."""
    places = [f"corpus.path={path}", f"corpus.data_dir={folder}"]
    return open_corpus(load_config([], [*places, *cuts]))


def cuts(case: dict[str, Any]) -> list[str]:
    """Return the settings of a case that its vocabulary depends on."""
    return [setting for setting in case.get("set", []) if setting.startswith("vocab.")]


def train(case: dict[str, Any], path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the scores, the settings and how long it took."""
    opened = open_text(path, args.folder, *cuts(case))
    config = load_config([], [*BASE, *case["set"]])
    config = plan.make_plan(config, opened).config
    size = max(1, round(config.train.batch_size * case.get("B", 1)))
    lr = config.optimizer.lr * case.get("lr", 1)
    config = replace(
        config,
        train=replace(config.train, batch_size=size),
        optimizer=replace(config.optimizer, lr=lr),
    )
    loop = build.build(plan.make_plan(config, opened))
    steps, began = 0, time.monotonic()
    for _ in range(config.train.epochs):
        loss, pairs = 0.0, 0.0
        for done in loop.epoch():
            steps += 1
            loss, pairs = loss + done.loss, pairs + done.pairs
    loop.step.engine.flush()
    loss = float(loss) / max(1.0, float(pairs))
    seconds = time.monotonic() - began
    loop.check_finite(lambda: "")
    used, read, *_ = loop.step.engine.stats
    return score(opened[0].words, loop.step.inputs["weight"], args.further) | {
        "lr used": lr,
        "batch used": size,
        "steps": steps,
        "seconds": round(seconds, 3),
        "loss": round(loss, 4),
        "rows read": round(read / used, 4) if read else 0,
    }


def train_gensim(case: dict[str, Any], path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train gensim once; return the scores and how long it took."""
    from gensim.models import Word2Vec

    given = {"vector_size": 128, "sample": 1e-4, "epochs": 5, "sg": 1, "workers": cores()}
    began = time.monotonic()
    model = Word2Vec(corpus_file=str(path), **(given | case["gensim"]))
    seconds = time.monotonic() - began
    vectors_VD = torch.from_numpy(model.wv.vectors)
    return score(model.wv.index_to_key, vectors_VD, args.further) | {"seconds": round(seconds, 2)}


def run(case: dict[str, Any], path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train a case in a worker process; return it with its results."""
    logging.getLogger("w2v").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    began = time.monotonic()
    try:
        result = (train_gensim if "gensim" in case else train)(case, path, args)
    except (ValueError, MemoryError, RuntimeError) as error:  # it must not end the other runs
        result = {"error": " ".join(str(error).split())[:300]}
    gc.collect()  # pinned tables of the run
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return case | result | {"total": round(time.monotonic() - began, 2)}


@functools.cache
def read_lines(path: Path) -> tuple[list[str], np.ndarray]:
    """Return the L lines of a text, and how many words are before each."""
    lines = path.read_text().splitlines(keepends=True)
    return lines, np.cumsum([0] + [line.count(" ") + 1 for line in lines])


def text_file(paths: dict[str, Path], text: str, folder: Path) -> Path:
    """Return the file of a text, or of a stretch of its words."""
    name, _, part = text.partition(":")
    if write := {"graph": write_walks, "baskets": write_baskets, "logs": write_logs}.get(name):
        file = folder / f"{name}-{part}.txt"
        if not file.exists():
            write(part, file)
        return file
    path = paths[name]
    if not part:
        return path
    cut = folder / f"{path.stem}-{part}M.txt"
    if not cut.exists():
        millions, _, place = part.partition("@")
        lines, words_L = read_lines(path)
        first = np.searchsorted(words_L, float(place or 0) * words_L[-1])
        last = np.searchsorted(words_L, words_L[first] + float(millions) * 1e6)
        cut.write_text("".join(lines[first:last]))
    return cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--texts", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--questions", nargs="+", default=[], help="further files of analogies")
    parser.add_argument("--pairs", nargs="+", default=[], help="further files of judged word pairs")
    parser.add_argument("--workers", type=int, default=4, help="processes beside gensim's")
    args = parser.parse_args()
    args.further = datasets.Further(args.questions, args.pairs)
    texts = {name: Path(path) for name, _, path in (text.partition("=") for text in args.texts)}
    cases = [json.loads(line) for line in args.cases.read_text().splitlines() if line.strip()]
    logging.getLogger("w2v").setLevel(logging.ERROR)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        args.to.open("a") as out,
        ProcessPoolExecutor(args.workers, spawn) as ours,
        ProcessPoolExecutor(1, spawn) as gensims,
    ):
        args.folder = Path(folder)
        files = {text: text_file(texts, text, args.folder) for text in {c["text"] for c in cases}}
        for case in cases:  # encoded once for all processes
            open_text(files[case["text"]], args.folder, *cuts(case))
        runs = [
            (gensims if "gensim" in case else ours).submit(run, case, files[case["text"]], args)
            for case in cases
        ]
        for done in tqdm(as_completed(runs), total=len(runs)):
            print(json.dumps(done.result()), file=out, flush=True)


if __name__ == "__main__":
    main()
