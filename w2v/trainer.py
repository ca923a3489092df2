"""A run: epochs, schedule, when to log and score; and what it leaves in its folder."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from w2v import evaluation, export
from w2v.checkpoint import save_table
from w2v.config import Config
from w2v.evaluation import AnalogyScore, SimilarityScore
from w2v.heldout import HeldOut
from w2v.metrics import Metrics
from w2v.optim import learning_rate
from w2v.pipeline import Pipeline
from w2v.sampler import Sampler
from w2v.vocab import Vocab

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

log = logging.getLogger("w2v")


class Trainer:
    """Trains the pipeline on the sampler's batches and leaves the results in a run folder.

    raw_words: words of one pass over the text, those outside the vocabulary included; held_out: what the sampler leaves out, if anything.
    """

    def __init__(
        self, config: Config, vocab: Vocab, raw_words: int, sampler: Sampler, pipeline: Pipeline, folder: Path,
        held_out: HeldOut | None = None,
    ):  # fmt: skip
        self.config, self.vocab, self.sampler, self.pipeline, self.folder = config, vocab, sampler, pipeline, folder
        self.held_out = held_out
        self._total_words = raw_words * config.train.epochs
        self.metrics = Metrics(folder / "metrics.jsonl", self._total_words, config.run.log_seconds)

    def train(self) -> None:
        epochs, lr = self.config.train.epochs, learning_rate(self.config.optimizer, 0.0)
        with self.metrics:
            for epoch in range(epochs):
                for planned in self.pipeline.ahead(self.sampler.epoch()):
                    loss, pairs = self.pipeline.step(planned, lr)
                    share = planned.batch.epochs_done / epochs
                    self.metrics.update(loss, pairs, round(share * self._total_words), lr)
                    lr = learning_rate(self.config.optimizer, share)
                if (self.config.run.score_epochs or self.held_out) and epoch + 1 < epochs:
                    self._score_epoch(epoch + 1)
            self.pipeline.engine.flush()
            self.metrics.log(lr)
        seconds = self.metrics.seconds
        rate = self._total_words / seconds / 1e6
        log.info(f"trained {self._total_words:,} words in {seconds:.1f} s, {rate:.3f} M words/s, loss {self.metrics.loss:.4f}")
        engine = self.pipeline.engine
        if engine.rows_used:
            read, written = engine.rows_read, engine.rows_written
            share, per_word = read / engine.rows_used, read / self._total_words
            log.info(f"over the link came {read:,} rows, {share:.1%} of those used, {per_word:.3f} a word, and {written:,} went back")

    def _score_epoch(self, epoch: int) -> None:
        self.pipeline.engine.flush()
        with self.metrics.paused():
            scores = {"epoch": epoch, "words": self.metrics.words, "seconds": round(self.metrics.seconds, 3)}
            if self.config.run.score_epochs:
                scores["analogies"] = evaluation.analogies(self.vocab.words, self.pipeline.inputs["weight"].float()).total.accuracy
                log.info(f"epoch {epoch}: analogies {scores['analogies']:.1%}")
            if self.held_out:
                scores["held_out_loss"] = self._held_out_loss()
                log.info(f"epoch {epoch}: held-out loss {scores['held_out_loss']:.4f}")
            self.metrics.write(**scores)

    def _held_out_loss(self) -> float | None:
        return self.held_out and self.held_out.loss(self.pipeline.inputs["weight"], self.pipeline.outputs["weight"])

    def vectors(self) -> KeyedVectors:
        return export.keyed_vectors(self.vocab.words, self.vocab.counts, self.pipeline.inputs["weight"].float().cpu().numpy())

    def score(self, keyed: KeyedVectors) -> tuple[AnalogyScore, list[SimilarityScore]]:
        analogies = evaluation.analogies(self.vocab.words, self.pipeline.inputs["weight"].float())
        return analogies, [evaluation.similarity(keyed, name) for name in evaluation.PAIR_SETS]

    def took(self) -> dict[str, Any]:
        """Losses (held_out_loss is None where nothing was held out), raw words, seconds of training, and bytes of memory."""
        tables, done = (self.pipeline.inputs, self.pipeline.outputs), self.metrics
        host = sum(table.bytes for table in tables if table.storage != "cuda")
        return {"loss": done.loss, "held_out_loss": self._held_out_loss(), "words": done.words, "seconds": done.seconds,
                "bytes_host": host, "bytes_gpu": self.pipeline.bytes_gpu}  # fmt: skip

    def export(self) -> None:
        """Write the tables with their optimizer state, the vectors and their scores."""
        for table in (self.pipeline.inputs, self.pipeline.outputs):
            save_table(table, self.folder / "tables")
        self.vocab.save(self.folder / "vocab.tsv")
        keyed = self.vectors()
        export.save(keyed, self.folder)
        scores, took = self.score(keyed), self.took()
        (self.folder / "scores.json").write_text(json.dumps(evaluation.as_dict(*scores) | took, indent=1), encoding="utf-8")
        held_out = f"held-out loss  {took['held_out_loss']:.4f}\n\n" if self.held_out else ""
        log.info(
            f"{evaluation.report(*scores)}\n\n"
            f"{held_out}"
            f"run folder   {self.folder}\n"
            f"in gensim    KeyedVectors.load({str(self.folder / 'vectors.kv')!r})\n"
            f"ask it       python evaluate.py nn {self.folder} WORD ..."
        )


def new_run_folder(config: Config) -> Path:
    """Create <run.dir>/<date>-<name>, never one that exists."""
    corpus = Path(config.corpus.path).name.split(".")[0]
    name = config.run.name or f"{corpus}-{config.optimizer.name.lower()}"
    base = Path(config.run.dir) / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{name}"
    folder, number = base, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
