"""Damaged files of the cache are noticed and made anew.

`make test-faults` damages the ids of a text 500 times.
"""

import random

import numpy as np

from tests.support.damage import DAMAGES, damage
from tests.support.tiny import tiny_arguments
from w2v.config import load_config
from w2v.text import open_corpus


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
