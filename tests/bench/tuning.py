"""Scores of many short runs: what the automatic settings are fitted to.

    python tests/bench/tuning.py cases.jsonl --texts wiki=wiki100.txt books=books45.txt --to FILE

Each line of cases.jsonl is a run: {"text": "wiki:4", "set": ["optimizer.lr=.05", ...]}, where 4 is
the number of millions of words (none: all) from the beginning of the text, or with "wiki:4@.5" from
its middle. "graph:5x200-1" are random walks in a graph of GRAPHS with seed 1, scored by how well
the communities are found. "B" and "lr" are factors of the automatic batch size and rate. A line
with "gensim": {"alpha": .05} trains gensim instead. Worker processes share the GPU, as short runs
wait for the CPU. Each run adds a line to the file of results as soon as it ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np
import torch
from torch import Tensor

from w2v.config import load_config
from w2v.text import open_corpus
from w2v.training import plan
from w2v.vectors import datasets

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


def purity(words: list[str], vectors_VD: Tensor) -> float:
    """Return the share of nodes that are in their cluster's largest group."""
    from scipy.cluster.vq import kmeans2

    group_V = np.array([int(word.partition("/")[0]) for word in words])
    groups = group_V.max() + 1
    unit_VD = torch.nn.functional.normalize(vectors_VD.double()).cpu().numpy()
    best, right = np.inf, 0  # by k-means on unit vectors
    for seed in range(10):
        means_GD, cluster_V = kmeans2(unit_VD, groups, iter=50, minit="++", seed=seed)
        spread = ((unit_VD - means_GD[cluster_V]) ** 2).sum()
        if spread < best:
            clusters = (group_V[cluster_V == cluster] for cluster in range(groups))
            best, right = spread, sum(np.bincount(c).max() for c in clusters if len(c))
    return right / len(words)


class Scorer:
    """Scores vectors of a vocabulary on all data sets, with matrix products."""

    def __init__(self, words: list[str], device: torch.device, further: datasets.Further):
        self._device = device
        self._nodes = words if "/" in words[0] else None
        row = {word.upper(): number for number, word in reversed(list(enumerate(words)))}
        self._questions = {
            datasets.set_name(file or "google"): self._ids(file, row, device)
            for file in (None, *further.questions)
        }
        self._pairs = {
            datasets.set_name(name): self._judged(name, row, device)
            for name in (*datasets.PAIR_SETS, *further.pairs)
        }

    @staticmethod
    def _ids(file: str | None, row: dict[str, int], device: torch.device) -> Tensor:
        asked = [four for _, part in datasets.read_questions(file) for four in part]
        known = [[row[word] for word in four] for four in asked if row.keys() >= set(four)]
        return torch.tensor(known, dtype=torch.long, device=device).reshape(-1, 4)

    @staticmethod
    def _judged(name: str, row: dict[str, int], device: torch.device) -> tuple[Tensor, np.ndarray]:
        pairs = datasets.judged_pairs(name)
        known = [(row[a], row[b], score) for a, b, score in pairs if a in row and b in row]
        ids = torch.tensor([pair[:2] for pair in known], dtype=torch.long, device=device)
        return ids.reshape(-1, 2), np.array([pair[2] for pair in known])

    @property
    def counts(self) -> dict[str, int]:
        """Known questions and pairs of each set."""
        counts = {name: len(ids) for name, ids in self._questions.items()}
        return counts | {name: len(human) for name, (_, human) in self._pairs.items()}

    def __call__(self, vectors_VD: Tensor) -> dict[str, float]:
        if self._nodes:
            return {"purity": round(purity(self._nodes, vectors_VD), 4)}
        unit_VD = torch.nn.functional.normalize(vectors_VD.to(self._device).float())
        scores = {}
        for name, ids_Q4 in self._questions.items():
            correct = sum(int(answered(unit_VD, ids).sum()) for ids in ids_Q4.split(2048))
            scores[name] = correct / max(1, len(ids_Q4))
        for name, (ids_P2, human_P) in self._pairs.items():
            if len(human_P) > 2:
                cosine_P = (unit_VD[ids_P2[:, 0]] * unit_VD[ids_P2[:, 1]]).sum(1).cpu().numpy()
                scores[name] = float(np.corrcoef(ranks(cosine_P), ranks(human_P))[0, 1])
        return {name: round(value, 4) for name, value in scores.items()}


def answered(unit_VD: Tensor, ids_Q4: Tensor) -> Tensor:
    """Return which questions are answered by the nearest word, bool [Q]."""
    a_QD, b_QD, c_QD, _ = (unit_VD[ids] for ids in ids_Q4.unbind(1))
    cosine_QV = (b_QD - a_QD + c_QD) @ unit_VD.T
    cosine_QV.scatter_(1, ids_Q4[:, :3], -torch.inf)
    return cosine_QV.argmax(1) == ids_Q4[:, 3]


def ranks(values_P: np.ndarray) -> np.ndarray:
    """Return ranks from 1; equal values share their mean rank."""
    _, place_P, count = np.unique(values_P, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place_P]


def train(opened, case: dict[str, Any], scorer: Scorer) -> dict[str, Any]:
    """Train once; return the scores, the settings and how long it took."""
    config = load_config([], [*BASE, *case["set"]])
    config = plan.make_plan(config, opened).config
    size = max(1, round(config.train.batch_size * case.get("B", 1)))
    lr = config.optimizer.lr * case.get("lr", 1)
    config = replace(
        config,
        train=replace(config.train, batch_size=size),
        optimizer=replace(config.optimizer, lr=lr),
    )
    loop = plan.build(plan.make_plan(config, opened))
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
    return {
        "scores": scorer(loop.step.inputs["weight"].detach()),
        "lr used": lr,
        "batch used": size,
        "steps": steps,
        "seconds": round(seconds, 3),
        "loss": round(loss, 4),
        "rows read": round(read / used, 4) if read else 0,
    }


def stretch(paths: dict[str, Path], text: str, folder: Path) -> Path:
    """Return the file of a text, or of a stretch of its words."""
    name, _, part = text.partition(":")
    if name == "graph":
        file = folder / f"{part}.txt"
        if not file.exists():
            write_walks(part, file)
        return file
    path = paths[name]
    if not part:
        return path
    cut = folder / f"{path.stem}-{part}M.txt"
    if not cut.exists():
        millions, _, place = part.partition("@")
        lines = path.read_text().splitlines(keepends=True)
        words_L = np.cumsum([0] + [line.count(" ") + 1 for line in lines])
        first = np.searchsorted(words_L, float(place or 0) * words_L[-1])
        last = np.searchsorted(words_L, words_L[first] + float(millions) * 1e6)
        cut.write_text("".join(lines[first:last]))
    return cut


def train_gensim(case: dict[str, Any], text: Path, device: torch.device, args) -> dict[str, Any]:
    """Train gensim once; return the scores and how long it took."""
    from gensim.models import Word2Vec

    given = {"vector_size": 128, "sample": 1e-4, "epochs": 5, "sg": 1, "min_count": 5}
    given["workers"] = args.gensim_workers
    began = time.monotonic()
    model = Word2Vec(corpus_file=str(text), **(given | case["gensim"]))
    seconds = time.monotonic() - began
    scorer = Scorer(model.wv.index_to_key, device, args.further)
    scores = scorer(torch.from_numpy(model.wv.vectors))
    return {"scores": scores, "seconds": round(seconds, 2), "counts": scorer.counts}


def work(number: int, tasks, args, folder: Path, deadline: float) -> None:
    """Take cases until there are none, or until the deadline."""
    logging.getLogger("w2v").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    opened: dict[str, Any] = {}
    out = args.to.with_suffix(f".{number}.jsonl").open("a")
    while time.time() < deadline and (case := tasks.get()):
        began = time.monotonic()
        try:
            text = stretch(args.paths, case["text"], folder)
            if "gensim" in case:
                result = train_gensim(case, text, device, args)
            else:
                if case["text"] not in opened:
                    corpus = load_config([], [f"corpus.path={text}", f"corpus.data_dir={folder}"])
                    pair = open_corpus(corpus)
                    opened[case["text"]] = pair, Scorer(pair[0].words, device, args.further)
                pair, scorer = opened[case["text"]]
                result = train(pair, case, scorer) | {"counts": scorer.counts}
        except Exception as error:  # a run that diverged must not end the others
            result = {"error": " ".join(str(error).split())[:300]}
            if "diverged" not in result["error"]:
                traceback.print_exc()
        result["total"] = round(time.monotonic() - began, 2)
        out.write(json.dumps(case | result) + "\n")
        out.flush()
        gc.collect()  # pinned tables of the run
        torch.cuda.empty_cache() if device.type == "cuda" else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--questions", nargs="+", default=[], help="further files of analogies")
    parser.add_argument("--pairs", nargs="+", default=[], help="further files of judged word pairs")
    parser.add_argument("--workers", type=int, default=4, help="processes beside gensim's")
    parser.add_argument("--gensim-workers", type=int, default=8, help="threads of gensim")
    parser.add_argument("--seconds", type=float, default=1e6, help="begin no run after this")
    args = parser.parse_args()
    deadline = time.time() + args.seconds
    args.paths = {name: Path(path) for name, _, path in (t.partition("=") for t in args.texts)}
    args.further = datasets.Further(args.questions, args.pairs)
    cases = [json.loads(line) for line in args.cases.read_text().splitlines() if line.strip()]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        own, gensims = context.Queue(), context.Queue()
        processes = [
            context.Process(target=work, args=(n, own, args, Path(folder), deadline))
            for n in range(args.workers)
        ]
        is_gensim = any("gensim" in case for case in cases)
        if is_gensim:
            processes.append(
                context.Process(target=work, args=(99, gensims, args, Path(folder), deadline))
            )
        for process in processes:
            process.start()
        logging.getLogger("w2v").setLevel(logging.ERROR)
        texts = dict.fromkeys(case["text"] for case in cases)
        for text in texts:
            path = stretch(args.paths, text, Path(folder))
            open_corpus(load_config([], [f"corpus.path={path}", f"corpus.data_dir={folder}"]))
        print(f"texts ready {time.time() - deadline + args.seconds:.1f} s", flush=True)
        for case in cases:
            (gensims if "gensim" in case else own).put(case)
        for _ in range(args.workers):
            own.put(None)
        gensims.put(None)
        for process in processes:
            process.join(max(1.0, deadline + 20 - time.time()))
            if process.is_alive():
                process.terminate()
    print(f"done {time.time() - deadline + args.seconds:.1f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # queues may hold cases that nobody takes


if __name__ == "__main__":
    main()
