"""A run: epochs, schedule, when to log, score and save; how it goes on from a checkpoint; and what it leaves in its folder."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from w2v.config import Config, ConfigError, flat_config
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.kernels.batch import Batch, Position
from w2v.model.heldout import HeldOut
from w2v.model.optim import learning_rate
from w2v.model.sampler import Sampler
from w2v.model.table import Table
from w2v.system.files import atomic_write
from w2v.system.process import return_freed_memory
from w2v.system.signals import Signals
from w2v.text.vocab import Vocab
from w2v.training import checkpoint, loggers
from w2v.training.checkpoint import CheckpointError, Checkpoints
from w2v.training.metrics import Diverged, Metrics
from w2v.training.pace import Pace
from w2v.training.step import FAULTS, Pipeline
from w2v.vectors import card, export
from w2v.vectors import evaluate as evaluation
from w2v.vectors.datasets import ASKED
from w2v.vectors.evaluate import AnalogyScore, SimilarityScore

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

log = logging.getLogger("w2v")
AGREED_AHEAD = 8  # batches for which ranks agree before the first of them is used


class Trainer:
    """Trains the pipeline on the sampler's batches and leaves the results in a run folder; goes on from its last checkpoint, if any.

    raw_words: words of one pass over the text, those outside the vocabulary included; held_out: what the sampler leaves out, if anything;
    room: bytes of CPU memory for the copies of `Checkpoints`. Where several `ranks` train together, all of them do the same, and the
    first alone logs, scores and exports.
    """

    def __init__(
        self,
        config: Config,
        vocab: Vocab,
        raw_words: int,
        sampler: Sampler,
        pipeline: Pipeline,
        folder: Path,
        held_out: HeldOut | None = None,
        signals: Signals | None = None,
        room: int = 0,
        ranks: Ranks = SINGLE,
    ):
        self.config, self.vocab, self.sampler, self.pipeline, self.folder = (
            config,
            vocab,
            sampler,
            pipeline,
            folder,
        )
        self.held_out, self._signals, self._ranks = held_out, signals or Signals(), ranks
        self._total_words = raw_words * config.train.epochs
        self._text = {"raw_words": raw_words, "vocabulary": vocab.fingerprint}
        self._moved_before = [0, 0, 0, 0]
        self._agreed: deque[tuple[int, int]] = (
            deque()
        )  # the wishes of all ranks, for each batch that was drawn
        self._epochs_done, self._rates = (
            0.0,
            [0.0],
        )  # the learning rate of each step since the last look, and before it
        run, tables = config.run, [pipeline.inputs, pipeline.outputs]
        ranks.require_equal(self._text)
        self.checkpoints = Checkpoints(folder / "checkpoints", tables, room, ranks)
        curve = self._go_on(tables)
        begun = int(curve["step"]) if curve else 0
        self._loggers = (
            loggers.opened(run, folder, begun, flat_config(config)) if ranks.rank == 0 else []
        )
        log_to = (
            folder / "metrics.jsonl" if ranks.rank == 0 else None,
            self._total_words,
            run.log_seconds,
        )
        self._link_rate = pipeline.link_rate()
        link = self._bytes_moved, lambda: pipeline.engine.waited, self._link_rate
        self.metrics = Metrics(*log_to, self._look, curve, self._loggers, *link)
        self._first_step, self._before = self.metrics.step, self.metrics.seconds
        self._pace = Pace(run.checkpoint_minutes)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        for logger in self._loggers:
            logger.close()

    def train(self) -> None:
        """Train to the end, or until a signal: then what was trained is saved, and `SystemExit` raised."""
        epochs, run = self.config.train.epochs, self.config.run
        lr = learning_rate(self.config.optimizer, self._epochs_done / epochs)
        with self.metrics, self._signals.held():
            for epoch in range(self.sampler.position.epoch, epochs):
                for planned in self.pipeline.ahead(self._together(epoch)):
                    loss, pairs = self.pipeline.step(planned, lr)
                    self._rates.append(lr)
                    self._epochs_done = planned.batch.epochs_done
                    share = self._epochs_done / epochs
                    self.metrics.update(loss, pairs, round(share * self._total_words), lr)
                    lr = learning_rate(self.config.optimizer, share)
                    status, save = self._agreed.popleft() if self._agreed else self._wishes()
                    if status:
                        self._stop(lr, planned.batch.after, status)
                    if save > self._pace.saves:
                        self._save(lr, planned.batch.after)
                if epoch + 1 < epochs:
                    if run.score_epochs or self.held_out:
                        self._score_epoch(epoch + 1)
                    if run.checkpoint_minutes:
                        self._save(lr, self.sampler.position)
            self.pipeline.engine.flush()
            self.metrics.log(lr)
            self._final = self._state(lr, self.sampler.position)
            if status := max(self._ranks.all_gather(self._signals.status)):
                self._stop(lr, self.sampler.position, status)
        seconds = self.metrics.seconds
        rate = self._total_words / seconds / 1e6
        log.info(
            f"trained {self._total_words:,} words in {seconds:.1f} s, {rate:.3f} M words/s, loss {self.metrics.loss:.4f}"
        )
        self._pace.sum_up()
        if self._ranks.size > 1:
            for rank, carried in enumerate(self._ranks.all_gather(self._carried())):
                log.info(f"rank {rank}    {carried}")
        used, read, written, stepped = self._final["rows"]
        if used:
            log.info(
                f"over the link came {read:,} rows, {read / used:.1%} of those used, and {written:,} went back: "
                f"{read / self._total_words:.3f} a word, against {stepped / self._total_words:.3f} if every step fetched its own"
            )

    def _carried(self) -> str:
        """What has gone over this rank's link and to other ranks."""
        seconds = max(self.metrics.seconds - self._before, 1e-9)
        link, sent = self._bytes_moved() / seconds, self._ranks.bytes_sent / seconds
        share = (
            f"{link / 1e9:.1f} GB/s over its link ({link / self._link_rate:.0%} of its most), "
            if self._link_rate
            else ""
        )
        return f"{share}{sent / 1e9:.3g} GB/s sent to the others"

    def _together(self, epoch: int) -> Iterator[Batch]:
        """This rank's batches of the epoch, as many as any rank has, with what is agreed among them for each."""
        batches = self.sampler.epoch()
        drawn: deque[tuple[Batch | None, Callable[[], list[list[float]]]]] = deque()
        while self._ranks.size > 1:
            while (
                len(drawn) < AGREED_AHEAD
            ):  # what it takes to hear of the other ranks passes beside the steps
                batch = next(batches, None)
                done = batch.epochs_done if batch else epoch + 1
                drawn.append(
                    (batch, self._ranks.all_gather_async(batch is not None, done, *self._wishes()))
                )
            batch, agreed = drawn.popleft()
            some, of_ranks, status, save = zip(*agreed(), strict=True)
            if not any(some):
                break
            self._agreed.append((int(max(status)), int(save[0])))
            yield (batch or self.sampler.no_batch(epoch))._replace(
                epochs_done=sum(of_ranks) / len(of_ranks)
            )
        for _, agreed in drawn:
            agreed()
        yield from batches

    def _wishes(self) -> tuple[int, int]:
        """The status to stop with, 0 to go on; and the number of the checkpoint that is due, if one is, counted from 1 in this run."""
        return self._signals.status, self._pace.saves + 1 if self._pace.due else 0

    def _moved(self) -> list[int]:
        """How many rows were used, came over the link and went back, and how many steps had; before a resume too."""
        engine = self.pipeline.engine
        moved = engine.rows_used, engine.rows_read, engine.rows_written, self.pipeline.rows_stepped
        return [a + b for a, b in zip(self._moved_before, moved, strict=True)]

    def _score_epoch(self, epoch: int) -> None:
        self.pipeline.engine.flush()
        with self.metrics.paused():
            scores = {
                "epoch": epoch,
                "words": self.metrics.words,
                "seconds": round(self.metrics.seconds, 3),
            }
            if self.config.run.score_epochs:
                scores["analogies"] = self._accuracy()
                log.info(f"epoch {epoch}: analogies {scores['analogies']:.1%}")
            if self.held_out:
                scores["held_out_loss"] = self._held_out_loss()
                log.info(f"epoch {epoch}: held-out loss {scores['held_out_loss']:.4f}")
            self.metrics.write(**scores)

    def _accuracy(self) -> float:
        """On the analogies, found by the first rank for all."""
        inputs, accuracy = self.pipeline.inputs, 0.0
        blocks = export.in_order(inputs, self._ranks, ASKED)
        with self._ranks.reraise():
            if self._ranks.rank == 0:
                weights = np.concatenate(list(blocks)) if self._ranks.size > 1 else inputs["weight"]
                accuracy = evaluation.analogies(
                    self.vocab.words[: len(weights)], weights
                ).total.accuracy
            else:
                deque(blocks, 0)
        return accuracy

    def _held_out_loss(self) -> float | None:
        shards = self.pipeline.inputs["weight"], self.pipeline.outputs["weight"]
        return self.held_out.loss(*shards, self._ranks) if self.held_out else None

    def vectors(self) -> KeyedVectors:
        return export.keyed_vectors(
            self.vocab.words,
            self.vocab.counts,
            self.pipeline.inputs["weight"].float().cpu().numpy(),
        )

    def score(self) -> tuple[AnalogyScore, list[SimilarityScore]]:
        return self._scored(self.pipeline.inputs["weight"])

    def _scored(self, weights: Tensor | np.ndarray) -> tuple[AnalogyScore, list[SimilarityScore]]:
        words = self.vocab.words[: len(weights)]
        return evaluation.analogies(words, weights), evaluation.similarities(words, weights)

    def took(self) -> dict[str, Any]:
        """Losses (held_out_loss is None where nothing was held out), raw words, seconds of training, and bytes of all ranks' memory."""
        tables, done = (self.pipeline.inputs, self.pipeline.outputs), self.metrics
        host = sum(table.bytes for table in tables if table.storage != "cuda")
        host, gpu = (
            sum(of_ranks)
            for of_ranks in zip(
                *self._ranks.all_gather((host, self.pipeline.bytes_gpu)), strict=True
            )
        )
        return {
            "loss": done.loss,
            "held_out_loss": self._held_out_loss(),
            "words": done.words,
            "seconds": done.seconds,
            "bytes_host": host,
            "bytes_gpu": gpu,
        }

    def export(self) -> None:
        """Write the last checkpoint, the vectors and their scores."""
        self.checkpoints.save(self._final, wait=True)
        took = self.took()
        self.pipeline.finish()
        return_freed_memory()
        inputs, kept = self.pipeline.inputs, ASKED if self._ranks.size > 1 else 0
        blocks = export.in_order(inputs, self._ranks)
        with self._ranks.reraise():
            if self._ranks.rank == 0:
                most_frequent = export.save_rows(
                    self.vocab.words, self.vocab.counts, inputs.dim, blocks, self.folder, kept
                )
                self._report(most_frequent if kept else inputs["weight"], took)
            else:
                deque(blocks, 0)

    def _report(self, weights: Tensor | np.ndarray, took: dict[str, Any]) -> None:
        """Write all else that the vectors come with: words, checksums, scores and the model card; and say where it is."""
        self.vocab.save(self.folder / "vocab.tsv")
        export.seal(self.folder)
        scores = self._scored(weights)
        last = {"analogies": scores[0].total.accuracy} | {
            similarity.name: similarity.spearman for similarity in scores[1]
        }
        self.metrics.tell(held_out_loss=took["held_out_loss"], **last)
        atomic_write(
            self.folder / "scores.json", json.dumps(evaluation.as_dict(*scores) | took, indent=1)
        )
        card.write(self.folder)
        held_out = f"held-out loss  {took['held_out_loss']:.4f}\n\n" if self.held_out else ""
        log.info(
            f"{evaluation.report(*scores)}\n\n"
            f"{held_out}"
            f"run folder   {self.folder}\n"
            f"model card   {self.folder / 'README.md'}\n"
            f"in gensim    KeyedVectors.load({str(self.folder / 'vectors.kv')!r})\n"
            f"ask it       python evaluate.py nn {quote(str(self.folder))} WORD ..."
        )

    def _bytes_moved(self) -> int:
        """Over the link to the GPU, both ways."""
        engine, table = self.pipeline.engine, self.pipeline.inputs
        return (engine.rows_read + engine.rows_written) * table.width * table.dtype.itemsize

    def _look(self) -> None:
        """Raise what has gone wrong since the last look; called where the device has been waited for anyway."""
        self.checkpoints.raise_failure()
        if fault := int(self.pipeline.fault):
            raise Diverged(self._what_diverged(fault))
        del self._rates[:-1]

    def _what_diverged(self, fault: int) -> str:
        step, parts = (
            fault >> len(FAULTS),
            [name for bit, name in enumerate(FAULTS) if fault >> bit & 1],
        )
        optimizer, lr = self.config.optimizer, self._rates[step - self.pipeline.steps - 1]
        remedy = "there is no checkpoint yet: begin anew with a smaller optimizer.lr"
        self.checkpoints.wait()
        if saved := checkpoint.latest(self.checkpoints.folder):
            again = f"python train.py --resume {quote(str(self.folder))} optimizer.lr={optimizer.lr / 4:.3g}"
            remedy = f"the last good checkpoint is {saved.path}: {again}"
        return (
            f"training diverged at step {self._first_step + step:,} ({optimizer.name}, lr {lr:.4g}): no longer finite: {', '.join(parts)}; "
            f"no such number was written; {remedy}, or with some optimizer.warmup or another optimizer.name in a new run"
        )

    def _stop(self, lr: float, position: Position, status: int) -> None:
        log.info(
            f"stopping at step {self.metrics.step:,}, once a checkpoint is written; a second signal ends it at once"
        )
        self.pipeline.engine.flush()
        self.checkpoints.save(self._state(lr, position), wait=True)
        log.info(f"go on with   python train.py --resume {quote(str(self.folder))}")
        self._ranks.leave()
        raise SystemExit(status)

    def _save(self, lr: float, position: Position) -> None:
        """Write a checkpoint, unless the last one is still being written."""
        if any(self._ranks.all_gather(self.checkpoints.busy)):
            return
        with self._pace.saving():
            self.pipeline.engine.flush()
            self.checkpoints.save(self._state(lr, position))

    def _state(self, lr: float, position: Position) -> dict[str, Any]:
        curve = self.metrics.state(lr)
        samplers, moved = zip(
            *self._ranks.all_gather((self.sampler.state(position), self._moved())), strict=True
        )
        where = {"step": curve["step"], "samplers": samplers, "epochs_done": self._epochs_done}
        about = {
            "metrics": curve,
            "rows": [sum(counts) for counts in zip(*moved, strict=True)],
            "text": self._text,
        }
        return where | about | {"config": flat_config(self.config)}

    def _go_on(self, tables: list[Table]) -> dict[str, float] | None:
        """Take up the last checkpoint of the folder and give its curve; None where there is none."""
        saved = checkpoint.latest(self.checkpoints.folder, self._ranks)
        if saved is None:
            return None
        state = saved.state
        if state["text"] != self._text:
            text = f"corpus.path={self.config.corpus.path}"
            raise CheckpointError(
                f"{saved.path} was trained on another text or vocabulary than {text} is now; bring that text back"
            )
        if state["epochs_done"] > self.config.train.epochs:
            raise ConfigError(
                f"train.epochs={self.config.train.epochs}, but {state['epochs_done']:.4g} passes are done; give more"
            )
        saved.load(tables, self._ranks)
        self.sampler.go_on(
            state.get("samplers") or [{"position": state["position"]}]
        )  # as one rank wrote it when there was but one
        self._epochs_done = state["epochs_done"]
        if self._ranks.rank == 0:
            self._moved_before = state["rows"]
        log.info(
            f"going on from {saved.path}, after {state['step']:,} steps and {state['epochs_done']:.3g} passes over the text"
        )
        return state["metrics"]
