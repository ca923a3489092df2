"""gensim's own Word2Vec on the same ids with the same model settings, as a row to compare with."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from w2v.config import Config, OptimizerConfig, save_config
from w2v.model.heldout import HeldOut
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.vectors import evaluate as evaluation
from w2v.vectors import export


def as_config(config: Config, alpha: float) -> Config:
    """The config that stands for such a run in a table: the same model, gensim's optimizer."""
    optimizer = OptimizerConfig(name="gensim SGD", lr=alpha)
    return replace(config, optimizer=optimizer, train=replace(config.train, batch_size=1))


def train(
    config: Config,
    vocab: Vocab,
    corpus: Corpus,
    left_out: Iterable[int],
    held_out: HeldOut | None,
    workers: int,
    folder: Path,
) -> None:
    """Train `as_config`'s run with so many threads and leave config.yaml, metrics.jsonl, vectors.kv and scores.json in the folder."""
    from gensim.models import Word2Vec
    from gensim.models.callbacks import CallbackAny2Vec

    model, optimizer, epochs = config.model, config.optimizer, config.train.epochs
    trained = Word2Vec(
        vector_size=model.vector_size,
        window=model.window,
        shrink_windows=model.shrink_windows,
        sg=1,
        hs=0,
        negative=model.negative,
        ns_exponent=model.ns_exponent,
        sample=model.sample,
        alpha=optimizer.lr,
        min_alpha=optimizer.min_lr,
        min_count=1,
        seed=config.train.seed,
        workers=workers,
    )
    trained.build_vocab_from_freq(dict(zip(vocab.words, vocab.counts.tolist(), strict=True)))
    order = [
        trained.wv.key_to_index[word] for word in vocab.words
    ]  # gensim may order words of equal count in its own way

    def state(epoch: int, seconds: float) -> dict[str, float | None]:
        vectors = [
            torch.from_numpy(values[order]) for values in (trained.wv.vectors, trained.syn1neg)
        ]
        accuracy = evaluation.analogies(vocab.words, vectors[0]).total.accuracy
        loss = held_out.loss(vectors[0], vectors[1]) if held_out else None
        return {
            "epoch": epoch,
            "words": corpus.raw_words * epoch,
            "seconds": seconds,
            "analogies": accuracy,
            "held_out_loss": loss,
        }

    class Epochs(CallbackAny2Vec):
        done, away = 0, 0.0

        def on_epoch_end(self, _: Word2Vec) -> None:
            self.done += 1
            if self.done < epochs:
                now = time.monotonic()
                with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(state(self.done, now - began - self.away)) + "\n")
                self.away += time.monotonic() - now

    save_config(config, folder / "config.yaml")
    (folder / "metrics.jsonl").touch()
    with TemporaryDirectory() as scratch:
        text = Path(scratch, "text.txt")
        _write_text(vocab, corpus, set(left_out), text)
        callback, began = Epochs(), time.monotonic()
        trained.train(
            corpus_file=str(text), total_words=len(corpus.ids), epochs=epochs, callbacks=[callback]
        )
        seconds = time.monotonic() - began - callback.away
    keyed = export.keyed_vectors(vocab.words, vocab.counts, trained.wv.vectors[order])
    export.save(keyed, folder, ("kv",))
    last = state(epochs, seconds)
    took = {
        "held_out_loss": last["held_out_loss"],
        "words": last["words"],
        "seconds": seconds,
        "bytes_gpu": 0,
        "bytes_host": trained.wv.vectors.nbytes + trained.syn1neg.nbytes,
    }
    found = (
        evaluation.analogies(vocab.words, keyed.vectors),
        evaluation.similarities(vocab.words, keyed.vectors),
    )
    scores = evaluation.as_dict(*found) | took
    (folder / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")


def _write_text(vocab: Vocab, corpus: Corpus, left_out: set[int], path: Path) -> None:
    words = np.array(vocab.words, dtype=object)
    with path.open("w", encoding="utf-8") as file:
        for sentence, (start, end) in enumerate(
            zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True)
        ):
            if sentence not in left_out:
                file.write(" ".join(words[corpus.ids[start:end]]) + "\n")
