"""gensim's own Word2Vec on the same ids, as a row to compare with."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from w2v.config import Config, OptimizerConfig
from w2v.model import heldout
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import plan
from w2v.vectors import evaluate, export
from w2v.vectors.datasets import NOTHING_FURTHER, Further

NAME = "gensim SGD"  # in the column of optimizers


def as_config(config: Config, lr: float) -> Config:
    """Return the config that stands for gensim's run in a table."""
    train = replace(config.train, batch_size=1)
    return replace(config, optimizer=OptimizerConfig(name=NAME, lr=lr), train=train)


def train(
    config: Config, vocab: Vocab, corpus: Corpus, folder: Path, further: Further = NOTHING_FURTHER
) -> dict[str, Any]:
    """Train with gensim and return the scores, as in scores.json.

    metrics.jsonl and vectors.kv are written to the folder.
    """
    from gensim.models import Word2Vec
    from gensim.models.callbacks import CallbackAny2Vec

    # The plan says what is held out, and needs the name of a torch optimizer.
    planned = plan.make_plan(replace(config, optimizer=OptimizerConfig()), (vocab, corpus))
    held_out = plan.make_heldout(planned)
    epochs = config.train.epochs
    # The model's keys are named as in gensim, but for the pool of negatives.
    arguments = asdict(config.model)
    del arguments["negative_pool"], arguments["negative_pool_steps"]
    model = Word2Vec(
        **arguments,
        alpha=config.optimizer.lr,
        min_alpha=config.optimizer.min_lr,
        sg=1,
        min_count=1,
        sorted_vocab=0,  # keep the order of `vocab`
        seed=config.train.seed,
        workers=planned.machine.cores,
    )
    model.build_vocab_from_freq(dict(zip(vocab.words, vocab.counts.tolist(), strict=True)))

    def held_out_loss() -> float | None:
        vectors_VD = torch.from_numpy(model.wv.vectors), torch.from_numpy(model.syn1neg)
        return held_out.loss(*vectors_VD) if held_out else None

    class ScoreEpochs(CallbackAny2Vec):
        """Writes a line of metrics.jsonl after each epoch but the last."""

        epoch = 0
        paused = 0.0  # seconds of scoring, which are not training

        def on_epoch_end(self, _: Word2Vec) -> None:
            self.epoch += 1
            if self.epoch == epochs:  # scores.json holds the last one
                return
            now = time.monotonic()
            line = {
                "epoch": self.epoch,
                "words": corpus.raw_words * self.epoch,
                "seconds": now - start - self.paused,
                "analogies": evaluate.analogies(vocab.words, model.wv.vectors).total.accuracy,
                "held_out_loss": held_out_loss(),
            }
            with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.paused += time.monotonic() - now

    (folder / "metrics.jsonl").touch()
    with TemporaryDirectory() as scratch:
        text = Path(scratch, "text.txt")
        _write_text(text, vocab, corpus, config.train.held_out_words)
        callback = ScoreEpochs()
        start = time.monotonic()
        words = len(corpus.ids)
        model.train(corpus_file=str(text), total_words=words, epochs=epochs, callbacks=[callback])
        seconds = time.monotonic() - start - callback.paused
    kv = export.keyed_vectors(vocab.words, vocab.counts, model.wv.vectors)
    export.save(kv, folder, ("kv",))
    scores = evaluate.scores(vocab.words, model.wv.vectors, *further)
    return evaluate.as_dict(*scores) | {
        "held_out_loss": held_out_loss(),
        "words": corpus.raw_words * epochs,
        "seconds": seconds,
        "bytes_gpu": 0,
        "bytes_host": model.wv.vectors.nbytes + model.syn1neg.nbytes,
    }


def _write_text(path: Path, vocab: Vocab, corpus: Corpus, held_out_words: int) -> None:
    """Write one sentence per line, without those that are held out."""
    words = np.array(vocab.words, dtype=object)
    held_out = set(heldout.choose(corpus.offsets, held_out_words).tolist())
    with path.open("w", encoding="utf-8") as file:
        for sentence, (start, end) in enumerate(pairwise(corpus.offsets)):
            if sentence not in held_out:
                file.write(" ".join(words[corpus.ids[start:end]]) + "\n")
