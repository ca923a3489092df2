"""Damaged files of the cache are noticed and made anew.

`make test-faults` damages the ids of a text 500 times.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import DAMAGES, damage
from tests.support.tiny import tiny_arguments
from w2v.config import load_config
from w2v.text import open_corpus

ROOT = Path(__file__).parents[2]


def test_damaged_ids_are_made_anew(tmp_path, caplog):
    config = load_config([], tiny_arguments(tmp_path))
    vocab, corpus = open_corpus(config)
    ids, offsets = np.array(corpus.ids), np.array(corpus.offsets)  # as the files will change
    cache = tmp_path / "data" / "cache"
    rng = random.Random(DAMAGES)
    for number in range(DAMAGES):
        names = ["corpus.json", "ids.bin", "offsets.bin", "words.txt", "counts.bin"]
        name = names[number % len(names)]
        [path] = cache.rglob(name)
        before = path.read_bytes()
        damage(path, rng)
        damaged = name != "corpus.json" and (not path.exists() or path.read_bytes() != before)
        caplog.clear()
        found_vocab, found = open_corpus(config)
        assert damaged <= any("is damaged" in message for message in caplog.messages)
        assert found_vocab.words == vocab.words
        assert np.array_equal(found_vocab.counts, vocab.counts)
        assert np.array_equal(found.ids, ids) and np.array_equal(found.offsets, offsets)
        assert (found.raw_words, found.digest) == (corpus.raw_words, corpus.digest)


DRAW = """
import torch
from w2v.kernels.batch import BatchSeed, Pool
from w2v.kernels.cuda import draw
cdf_V = torch.linspace(0.1, 1, 10, dtype=torch.float64, device="cuda")
[(_, negatives_BK)] = draw([BatchSeed(4, 1)], (1, 5), 3, Pool(), cdf_V)
print(negatives_BK.tolist())
"""


@pytest.mark.gpu
def test_damaged_cuda_kernels_are_compiled_anew(tmp_path):
    rng = random.Random(DAMAGES)
    folder = tmp_path / "kernels"
    environment = os.environ | {"CUPY_CACHE_DIR": str(folder)}

    def run():
        command = [sys.executable, "-c", DRAW]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout, "is damaged" in done.stderr

    expected, _ = run()
    for _ in range(4):
        [path] = folder.glob("*.cubin")
        before = path.read_bytes()
        damage(path, rng)
        is_damaged = path.exists() and path.read_bytes() != before
        assert run() == (expected, is_damaged)
    assert run() == (expected, False) and folder.stat().st_mode & 0o777 == 0o700
