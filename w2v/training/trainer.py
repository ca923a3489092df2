"""The training loop, and a run: log, check, save, score, stop, export."""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from w2v.config import Config, ConfigError, flat_config
from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows import checkpoint
from w2v.rows.checkpoint import CheckpointError, Checkpoints
from w2v.rows.optim import learning_rate
from w2v.system.console import RESULTS
from w2v.system.files import as_json, atomic_write
from w2v.system.process import Signals, return_freed_memory
from w2v.system.timeline import Timeline
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import save_timer
from w2v.training.lockstep import Decision, Lockstep
from w2v.training.metrics import Curve, LinkUse, Metrics
from w2v.vectors import evaluate, export, query
from w2v.vectors.datasets import ITEMS, RESTRICT_VOCAB, read_items
from w2v.vectors.export import Composed
from w2v.word2vec.batch import Batch, Position
from w2v.word2vec.heldout import HeldOut
from w2v.word2vec.sampler import Sampler
from w2v.word2vec.step import StepResult, TrainingStep

log = logging.getLogger("w2v")
TRIAL_WARMUP = 3  # steps of a trial that do not count
TRIAL_SECONDS = 3.0


class Diverged(ValueError):
    """The loss or a row is no longer finite; names the step and remedies."""


@contextlib.contextmanager
def deterministic_mode(wanted: bool) -> Iterator[None]:
    """Use only operations that repeat bit for bit; restore torch's mode."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield  # setting even the same mode imports torch's compiler: 70 MiB
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class TrainingLoop:
    """Train epoch by epoch; the caller acts between the steps."""

    def __init__(self, config: Config, sampler: Sampler, step: TrainingStep):
        self.config = config
        self.sampler = sampler
        self.step = step
        self.epochs_done = 0.0
        self._rates: list[float] = []  # of the steps since the last check

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.config.optimizer, self.epochs_done / self.config.train.epochs)

    def epoch(self, batches: Iterable[Batch] | None = None) -> Iterator[StepResult]:
        """Train on the rest of the sampler's epoch, or on these batches of it."""
        with deterministic_mode(self.config.train.deterministic):
            if batches is None:
                batches = self.sampler.epoch()
            for planned in self.step.plan_pages(batches):
                lr = self.lr
                self._rates.append(lr)
                result = self.step(planned, lr)
                self.epochs_done = result.batch.epochs_done
                yield result

    def check_finite(self, remedy: Callable[[], str]) -> None:
        """Raise `Diverged` if kernels have noted a fault; wait for the device."""
        number, parts = self.step.state.first_fault()
        if number:
            steps_after = self.step.state.step - number
            lr = self._rates[-1 - steps_after]  # _rates[-1] is that of the last step
            where = f"step {number:,} ({self.config.optimizer.name}, lr {lr:.4g})"
            broken = f"no longer finite: {', '.join(parts)}"
            raise Diverged(f"training diverged at {where}: {broken}; {remedy()}")
        self._rates.clear()


@dataclass(eq=False)
class Trainer:
    """A run in a folder, resumed from its last checkpoint if there is one.

    All ranks make the same calls; rank 0 alone logs, scores and exports.
    """

    loop: TrainingLoop
    vocab: Vocab
    corpus: Corpus
    folder: Path
    held_out: HeldOut | None = None
    signals: Signals = field(default_factory=Signals)
    copy_bytes: int = 0  # CPU memory for copies, to write checkpoints in the background
    ranks: Ranks = SINGLE
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self.config = self.loop.config
        self._step = self.loop.step
        self._total_words = self.corpus.raw_words * self.config.train.epochs
        self._text_facts = {
            "raw_words": self.corpus.raw_words,
            "vocabulary": self.vocab.fingerprint,
            "digest": self.corpus.digest,
        }
        self.ranks.require_equal(self._text_facts)
        folder = self.folder / "checkpoints"
        self.checkpoints = Checkpoints(folder, self._step.tables, self.copy_bytes, self.ranks)
        self._save_timer = save_timer.SaveTimer(self.config.run.checkpoint_minutes)
        self._lockstep = Lockstep(self.ranks, self._vote)
        self._final: dict[str, Any] = {}  # state of the last checkpoint

    def __enter__(self) -> Trainer:
        """Resume from the last checkpoint, if there is one, and open the logs."""
        curve = self._resume()
        items_Q2 = self.corpus.held_items
        if self.ranks.rank == 0 and len(items_Q2):
            lines = ("\t".join(self.vocab.words[row] for row in pair) for pair in items_Q2)
            atomic_write(self.folder / ITEMS, "\n".join([*lines, ""]))
        file = None
        if self.ranks.rank == 0:
            file = self.folder / "metrics.jsonl"
        self.metrics = Metrics(
            file,
            self._total_words,
            self.config.run.log_seconds,
            tensorboard=self.config.run.tensorboard,
            link=self._link_use,
            saved=curve,
        )
        self._words_before = self.metrics.curve.words  # when the run was resumed
        return self

    def __exit__(self, *error: object) -> None:
        self.metrics.__exit__()

    def train(self) -> None:
        """Train to the end; at a signal save and raise SystemExit."""
        epochs = self.config.train.epochs
        sampler = self.loop.sampler
        with self.timeline.phase("training"), self.metrics.bar, self.signals.recorded():
            for epoch in range(sampler.position.epoch, epochs):
                # All ranks make equally many steps: one whose text is over gets empty batches.
                batches = self._lockstep.batches(sampler.epoch(), sampler.empty_batch(epoch))
                for done in self.loop.epoch(batches):
                    words = round(self.loop.epochs_done * self.corpus.raw_words)
                    self.metrics.update(done.loss, done.pairs, words)
                    if self.metrics.due:
                        self._check()
                        self.metrics.log(self.loop.lr)
                    # All ranks decide alike: go on, save, or save and stop.
                    decision = self._lockstep.decision()
                    if decision.status:
                        self._stop(done.batch.after, decision.status)
                    # Votes are cast several batches ahead, so several may ask for the same
                    # checkpoint; its number shows whether it was already made.
                    if decision.save > self._save_timer.saves:
                        self._save(done.batch.after)
                # Between two epochs. Of the last words, subsampling may have kept none for a batch.
                self.loop.epochs_done = epoch + 1.0
                self.metrics.end_epoch(epoch + 1, self.corpus.raw_words * (epoch + 1))
                if epoch + 1 < epochs:
                    self._score_epoch(epoch + 1)
                    # The clock of rank 0 decides for all ranks.
                    if self.ranks.all_gather(self._save_timer.due(save_timer.EPOCH_SECONDS))[0]:
                        self._save(sampler.position)
            # The end of the run.
            self._step.flush()
            self._check()
            self.metrics.log(self.loop.lr)
            self._final = self._state(sampler.position)
            # A signal after the last vote has not been acted on yet.
            if status := max(self.ranks.all_gather(self.signals.status)):
                self._stop(sampler.position, status)
        self._summarize()

    def finish(self) -> dict[str, Any]:
        """Begin to write the last checkpoint; return the results.

        Frees sampler, kernels and exchange, so no step can follow.
        """
        self.timeline.begin("exporting")
        results = self.results()
        self._step.finish()
        del self.loop.sampler  # its draws may be methods of the kernels, whose buffers are large
        return_freed_memory()
        if self.config.run.final_checkpoint:
            with self.timeline.phase("saving"):
                self.checkpoints.save(self._final, copied=False)
        if any(self.ranks.all_gather(self.signals.status)):
            self.checkpoints.wait()
        return results

    def export(self, results: dict[str, Any]) -> None:
        """Write the vectors and their scores, and wait for the checkpoint."""
        try:
            self._write_vectors(results)
        except BaseException:
            self._save_without_vectors()
            raise
        with self.timeline.phase("saving"):
            self.checkpoints.wait()
        if self.ranks.rank == 0:
            self._log_timeline()

    def results(self) -> dict[str, Any]:
        """Return losses, raw words, seconds, and memory of all ranks.

        held_out_loss is None if nothing was held out.
        """
        host = sum(table.bytes for table in self._step.tables if table.storage != "cuda")
        memory = self.ranks.all_gather((host, self._step.peak_gpu_bytes))
        return {
            "loss": self.metrics.curve.last_epoch_loss,
            "held_out_loss": self._held_out_loss(),
            "words": self.metrics.curve.words,
            "seconds": self.metrics.curve.seconds,
            "bytes_host": sum(host for host, _ in memory),
            "bytes_gpu": sum(gpu for _, gpu in memory),
        }

    # Phases of the loop.

    def _vote(self) -> Decision:
        """Return this rank's vote: continue, save, or stop."""
        timer = self._save_timer
        return Decision(self.signals.status, (timer.saves + 1) * timer.due())

    def _check(self) -> None:
        """Raise errors of writing and divergence; waits for the device."""
        self.checkpoints.raise_failure()
        self.loop.check_finite(self._remedy)

    def _remedy(self) -> str:
        """Return the remedy after the run has diverged."""
        self.checkpoints.wait()
        remedy = "there is no checkpoint yet: begin again with a smaller optimizer.lr"
        if saved := checkpoint.latest(self.checkpoints.folder):
            command = f"w2v train --resume {quote(str(self.folder))}"
            lr = f"optimizer.lr={self.config.optimizer.lr / 4:.3g}"
            remedy = f"the last good checkpoint is {saved.path}: {command} {lr}"
        return f"{remedy}, or with some optimizer.warmup or another optimizer.name in a new run"

    def _stop(self, position: Position, status: int) -> None:
        step = self.metrics.curve.step
        log.info(f"stopping at step {step:,} after a checkpoint; a second signal ends it at once")
        self._step.engine.flush()
        self.checkpoints.save(self._state(position), copied=False)
        self.checkpoints.wait()
        log.info(f"resume with   w2v train --resume {quote(str(self.folder))}")
        self.ranks.leave()
        raise SystemExit(status)

    def _save(self, position: Position) -> None:
        """Write a checkpoint, unless the last one is still being written."""
        if any(self.ranks.all_gather(self.checkpoints.busy)):
            self._save_timer.skip()  # or each step would ask all ranks until it is written
            return
        with self.timeline.phase("saving"), self._save_timer.saving():
            self._step.engine.flush()
            self.checkpoints.save(self._state(position))

    def _score_epoch(self, epoch: int) -> None:
        if not (self.config.run.score_epochs or self.held_out):
            return
        self._step.flush()
        with self.timeline.phase("scoring"), self.metrics.paused():
            scores: dict[str, Any] = {"epoch": epoch, "words": self.metrics.curve.words}
            scores["seconds"] = round(self.metrics.curve.seconds, 3)
            if self.config.run.score_epochs:
                scores["analogies"] = self._accuracy()
                log.info(f"epoch {epoch}: analogies {scores['analogies']:.1%}")
            if self.held_out:
                scores["held_out_loss"] = self._held_out_loss()
                log.info(f"epoch {epoch}: held-out loss {scores['held_out_loss']:.4f}")
            self.metrics.append(scores)
            self.metrics.send(scores)

    def _summarize(self) -> None:
        """Log throughput, loss and transfers of the run."""
        seconds = self.metrics.curve.seconds
        rate = self._total_words / seconds / 1e6
        log.info(
            f"trained {self._total_words:,} words in {seconds:.1f} s, {rate:.3f} M words/s, "
            f"loss {self.metrics.curve.last_epoch_loss:.4f} in the last epoch"
        )
        untrained = self._untrained_loss()
        if math.isnan(self.metrics.curve.mean_loss):
            log.warning("no word had another beside it: there was nothing to train on")
        elif self.metrics.curve.mean_loss > untrained:
            log.warning(
                f"the loss is above that of untrained vectors, {untrained:.4f}; "
                f"lower optimizer.lr={self.config.optimizer.lr:g}"
            )
        counts = [*self._step.engine.stats, int(self._step.state.rows_updated)]
        used, read, written, updated = np.sum(self.ranks.all_gather(counts), axis=0)
        if used:
            words = self._total_words - self._words_before
            log.info(
                f"rows moved over the link: {read:,} read ({read / used:.1%} of those used) and "
                f"{written:,} written; {read / words:.3f} reads a word, and "
                f"{updated / words:.3f} without a cache"
            )

    # Statistics.

    def _untrained_loss(self) -> float:
        """Return the mean loss of a pair where each target has probability 1/2."""
        model = self.config.model
        targets = 0.0
        if model.negative:
            targets = 1.0 + model.negative
        if tree := self.loop.sampler.text.tree:
            kept_V = self.vocab.kept_counts(model.sample)
            targets += np.average(tree.begin_V.diff().numpy(), weights=kept_V)
        return math.log(2) * targets

    def _link_use(self) -> LinkUse:
        """Return the bytes that have crossed the link, and the waits."""
        _, read, written = self._step.engine.stats
        table = self._step.inputs
        record_bytes = table.width * table.dtype.itemsize
        return LinkUse((read + written) * record_bytes, self._step.waits.seconds)

    def _accuracy(self) -> float:
        """Return the share of correct analogies, on rank 0; 0 on the others."""
        weights_ND = self._scored_vectors()
        with self.ranks.reraise():
            if self.ranks.rank:
                return 0.0
            words = self.vocab.words[: len(weights_ND)]
            return evaluate.Scorer(words, weights_ND).analogies().total.accuracy

    def _scored_vectors(self) -> Tensor:
        """Return the vectors of the words that are scored, on rank 0: [N, D]."""
        inputs, device = self._step.inputs, self._step.state.device
        words = min(RESTRICT_VOCAB, len(self.vocab.words))
        if self.ranks.size == 1:
            return inputs["weight"][:words].to(device)
        blocks = list(export.in_order(inputs["weight"], self.ranks, words))
        if not blocks:
            return torch.empty(0, inputs.dim, device=device)
        return torch.from_numpy(np.concatenate(blocks)).to(device)

    def _held_out_loss(self) -> float | None:
        if not self.held_out:
            return None
        input_VD, output_VD = (table["weight"] for table in self._step.tables)
        return self.held_out.loss(input_VD, output_VD, self.ranks)

    # Export.

    def _save_without_vectors(self) -> None:
        """Write the last checkpoint again if it failed with the vectors.

        If the disk was full, there may be room now: the unfinished vectors are removed.
        """
        try:
            self.checkpoints.wait()
        except OSError:
            if self.config.run.final_checkpoint:
                self.checkpoints.save(self._final, copied=False)
                self.checkpoints.wait()

    def _write_vectors(self, results: dict[str, Any]) -> None:
        """Write vectors, words and scores on rank 0."""
        inputs = self._step.inputs
        weights_ND = self._scored_vectors()
        words = self.vocab.words
        blocks = export.in_order(inputs["weight"], self.ranks, len(words))
        composed = None
        if subwords := self._step.subwords:
            composed = Composed.of(subwords, self._step.table, self.config, self.ranks)
        with self.ranks.reraise():
            if self.ranks.rank:  # sends this rank's rows, block by block
                deque(chain(blocks, composed.blocks if composed else ()), 0)
                return
            with ThreadPoolExecutor(1) as threads:
                items = read_items(self.folder)
                scored = words[: len(weights_ND)]
                scoring = threads.submit(evaluate.scores, scored, weights_ND, items=items)
                formats = self.config.run.formats.split(",")
                step = self._final["step"]
                export.save_run(
                    self.vocab, inputs.dim, blocks, self.folder, formats, step, composed
                )
                with self.timeline.phase("scoring"):
                    scores = scoring.result()
            shown_ND = weights_ND[: query.EXAMPLE_WORDS].float().cpu().numpy()
            self._report(scores, query.examples(words, shown_ND), results)

    def _report(
        self, scores: evaluate.Scores, examples: Iterable[str], results: dict[str, Any]
    ) -> None:
        """Write scores, and log them."""
        folder = self.folder
        last = {similarity.name: similarity.spearman for similarity in scores.similarities}
        last["analogies"] = scores.analogies.total.accuracy
        last["held_out_loss"] = results["held_out_loss"]
        self.metrics.send(last)
        content = as_json(evaluate.as_dict(scores) | results, indent=1)
        atomic_write(folder / "scores.json", content)
        sections, sums = evaluate.report(scores)
        if sections:
            log.debug(f"{sections}\n")
        log.info("\n".join(examples))
        if self.held_out:
            sums += f"\n\nheld-out loss  {results['held_out_loss']:.4f}"
        log.log(
            RESULTS,
            f"\n{sums}\n\n"
            f"run folder   {folder}\n"
            f"in gensim    KeyedVectors.load({str(folder / 'vectors.kv')!r})\n"
            f"ask it       w2v nn {quote(str(folder))} WORD ...",
        )

    def _log_timeline(self) -> None:
        """Log the seconds of each phase, whose sum is the wall time."""
        seconds = self.timeline.seconds()
        for phase, spent in seconds.items():
            self.metrics.append({"phase": phase, "seconds": round(spent, 3)})
        parts = ", ".join(f"{phase} {spent:.1f}" for phase, spent in seconds.items())
        log.info(f"time         {sum(seconds.values()):.1f} s: {parts}")

    # Checkpoints.

    def _state(self, position: Position) -> dict[str, Any]:
        """Return the state for a checkpoint, besides the tables."""
        self._check()  # numbers that are not finite are not saved
        curve = self.metrics.state(self.loop.lr)
        return {
            "step": curve.step,
            "samplers": self.ranks.all_gather(self.loop.sampler.state_dict(position)),
            "epochs_done": self.loop.epochs_done,
            "metrics": asdict(curve),
            "text": self._text_facts,
            "config": flat_config(self.config),
        }

    def _resume(self) -> Curve | None:
        """Restore the last checkpoint, if any; return the state of the metrics."""
        saved = checkpoint.latest(self.checkpoints.folder, self.ranks)
        if saved is None:
            return None
        epochs = self.config.train.epochs
        with saved.checked():
            state = saved.state
            if state["text"] != self._text_facts:
                raise CheckpointError(
                    f"{saved.path} was trained on another text or vocabulary than "
                    f"corpus.path={self.config.corpus.paths} is now; restore that text"
                )
            step = operator.index(state["step"])
            epochs_done = float(state["epochs_done"])
            curve = Curve.of(state["metrics"])
            self.loop.sampler.load_state_dict(state["samplers"])
        if epochs_done > epochs:
            done = f"{epochs_done:.4g} passes are done"
            raise ConfigError(f"train.epochs={epochs}, but {done}; give more")
        saved.load(self._step.tables, self.ranks)
        self.loop.epochs_done = epochs_done
        self._step.state.step = step
        more = ""
        if epochs_done >= epochs:
            more = "; more train.epochs would train on"
        done = f"after {step:,} steps and {epochs_done:.3g} passes over the text"
        log.info(f"resuming from {saved.path}, {done}{more}")
        return curve


class Trial(NamedTuple):
    """Throughput measured by a short trial."""

    words: float  # of the whole run
    steps: int  # that were timed
    rate: float  # words/s; 0 if there were too few steps

    @classmethod
    def of(cls, loop: TrainingLoop, raw_words: int, ranks: Ranks = SINGLE) -> Trial:
        """Train for some seconds; the loop cannot be used afterwards.

        Raises `Diverged` if the learning rate is too large for these already.
        """
        ends = math.inf  # when the time is over

        def vote() -> Decision:
            return Decision(int(time.monotonic() > ends), 0)

        lockstep = Lockstep(ranks, vote)
        steps = 0
        began = epochs_before = 0.0
        batches = lockstep.batches(loop.sampler.epoch(), loop.sampler.empty_batch(0))
        for steps, done in enumerate(loop.epoch(batches), start=1):
            if steps == TRIAL_WARMUP:
                float(done.loss)  # waits for the device
                began = time.monotonic()
                epochs_before = loop.epochs_done
                ends = began + TRIAL_SECONDS
            if lockstep.decision().status:
                break
        loop.check_finite(lambda: "set a smaller optimizer.lr")
        words = loop.config.train.epochs * raw_words
        if steps <= TRIAL_WARMUP:
            return cls(words, steps, 0.0)
        float(done.loss)
        trained = (loop.epochs_done - epochs_before) * raw_words
        return cls(words, steps - TRIAL_WARMUP, trained / (time.monotonic() - began))

    def __str__(self) -> str:
        if not self.rate:
            return f"unknown: an epoch has only {self.steps} steps"
        took = f"{self.rate / 1e6:.3g} M words/s in {self.steps} steps"
        return f"about {self.words / self.rate:.0f} s of training: {took}"
