"""gensim's Word2Vec with this program's training: the same vocabulary, vectors, files and methods, and any row-separable optimizer.

    model = Word2Vec(sentences, vector_size=100, epochs=5, optimizer="Adamax")
    model.wv.most_similar("world")   # gensim's KeyedVectors

Vocabulary and initial vectors are made by gensim itself. Shapes: V words, D dimensions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from gensim.models import word2vec
from gensim.models.callbacks import CallbackAny2Vec

from w2v.api.compare import TUNED_WORDS, fitted, with_batch
from w2v.config import Config, ConfigError, ModelConfig, load_config, require
from w2v.model.optim import RowOptimizer, learning_rate
from w2v.model.table import Table
from w2v.text.corpus import Corpus, NoKnownWords, encoded
from w2v.text.vocab import Vocab
from w2v.training import metrics, plan
from w2v.training.backends import choose_device, choose_kernels
from w2v.training.machine import Machine
from w2v.training.step import Pipeline

log = logging.getLogger("w2v")
LOOK_SECONDS = 1.0  # between two looks at whether all numbers are finite
FAR = 3  # times as large as a learning rate that suits, or as small, is one that is remarked upon
CONFIGS = Path(__file__).parents[2] / "configs"
TUNED, DESCENT = (
    CONFIGS / "optimizers",
    CONFIGS / "cpu.yaml",
)  # settings of each optimizer; of gensim's own, without a GPU
FURTHER = (  # keys that `settings` may hold: all that are not arguments
    "model.negative_pool",
    "optimizer.step",
    "optimizer.occurrence_cap",
    "optimizer.schedule",
    "optimizer.warmup",
    "train.kernels",
    "train.precision",
    "train.deterministic",
    "transfer.",
)
ONLY = {  # arguments of gensim's that can have one value here
    "sg": (1, "skip-gram is what is trained here, and CBOW is not; leave it out"),
    "hs": (0, "only negative sampling is trained here; leave it out"),
    "cbow_mean": (1, "it is for CBOW, which is not trained here; leave it out"),
    "null_word": (
        0,
        "it is for sums of concatenated words, which are not trained here; leave it out",
    ),
    "hashfxn": (hash, "initial vectors depend on the seed alone; set seed"),
    "batch_words": (10_000, "a step takes batch_size centers; set that"),
    "word_count": (0, "each call begins with no words done; leave it out"),
}


class Word2Vec(word2vec.Word2Vec):
    """A model with gensim's arguments, in gensim's order, and by name: `optimizer` and `optimizer_args`, any row-separable torch.optim
    class; `batch_size`, centers of a step; `device`, as train.device; `settings`, further `section.key=value` as train.py takes them.

    alpha is the optimizer's learning rate and min_alpha that of the end; without alpha, and without a batch size, both suit the text.
    workers is taken and has no meaning: torch.set_num_threads says how many threads compute. Raises `ValueError` for what cannot be.
    """

    def __init__(
        self,
        sentences=None,
        corpus_file=None,
        vector_size=100,
        alpha=None,
        window=5,
        min_count=5,
        max_vocab_size=None,
        sample=1e-3,
        seed=1,
        workers=3,
        min_alpha=None,
        sg=1,
        hs=0,
        negative=5,
        ns_exponent=0.75,
        cbow_mean=1,
        hashfxn=hash,
        epochs=5,
        null_word=0,
        trim_rule=None,
        sorted_vocab=1,
        batch_words=10_000,
        compute_loss=False,
        callbacks=(),
        comment=None,
        max_final_vocab=None,
        shrink_windows=True,
        *,
        optimizer: str = "Adamax",
        optimizer_args: dict[str, Any] | None = None,
        batch_size: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        settings: Sequence[str] = (),
    ):
        _refuse(
            sg=sg,
            hs=hs,
            cbow_mean=cbow_mean,
            null_word=null_word,
            hashfxn=hashfxn,
            batch_words=batch_words,
        )
        _check_callbacks(callbacks)
        require(
            batch_size is None or batch_size >= 1, "batch_size", batch_size, "None or at least 1"
        )
        self.optimizer, self.optimizer_args, self.batch_size = optimizer, optimizer_args, batch_size
        self.device, self.settings, self._given_alpha = device, list(settings), alpha
        model = ModelConfig(
            vector_size, window, shrink_windows, negative, sample=sample, ns_exponent=ns_exponent
        )
        config = self._config(model, epochs, seed, alpha, min_alpha)
        RowOptimizer(config.optimizer)  # which refuses what cannot be trained with
        self._states: dict[
            str, dict[str, np.ndarray]
        ] = {}  # by table: those of rows [V, n], and scalars []
        super().__init__(
            sentences,
            corpus_file,
            vector_size,
            config.optimizer.lr,
            window,
            min_count,
            max_vocab_size,
            sample,
            seed,
            workers,
            config.optimizer.min_lr,
            sg,
            hs,
            negative,
            ns_exponent,
            cbow_mean,
            hashfxn,
            epochs,
            null_word,
            trim_rule,
            sorted_vocab,
            batch_words,
            compute_loss,
            callbacks,
            comment,
            max_final_vocab,
            shrink_windows,
        )

    def train(
        self,
        corpus_iterable=None,
        corpus_file=None,
        total_examples=None,
        total_words=None,
        epochs=None,
        start_alpha=None,
        end_alpha=None,
        word_count=0,
        queue_factor=2,
        report_delay=1.0,
        compute_loss=False,
        callbacks=(),
    ):
        """Train on the text, going on from the vectors and the optimizer state that are there; gives words trained and words read.

        total_examples or total_words must be given, as gensim wants it; the text is counted anyway. The text is read once, whatever
        the epochs. get_latest_training_loss() is the mean over the positive pairs of the last epoch.
        """
        _refuse(word_count=word_count)
        _check_callbacks(callbacks)
        self._check_training_sanity(
            epochs=epochs, total_examples=total_examples, total_words=total_words
        )
        self._check_corpus_sanity(corpus_iterable=corpus_iterable, corpus_file=corpus_file)
        if np.any(self.wv.vectors_lockf != 1):
            raise ConfigError(
                "wv.vectors_lockf other than 1 is not supported: all words are trained; set it to numpy.ones(1)"
            )
        fits = self._given_alpha is None and start_alpha in (None, self.alpha)
        start_alpha = None if fits else start_alpha or self.alpha
        end_alpha = self.min_alpha if end_alpha is None else end_alpha
        model = ModelConfig(
            self.vector_size,
            self.window,
            self.shrink_windows,
            self.negative,
            sample=self.sample,
            ns_exponent=self.ns_exponent,
        )
        config = self._config(model, epochs, self.seed + self.train_count, start_alpha, end_alpha)
        self.alpha, self.min_alpha, self.epochs, self.compute_loss = (
            start_alpha or self.alpha,
            end_alpha,
            epochs,
            compute_loss,
        )
        sentences = (
            word2vec.LineSentence(corpus_file) if corpus_iterable is None else corpus_iterable
        )
        with TemporaryDirectory(prefix="w2v-") as folder:
            try:
                corpus = Corpus.write(
                    Path(folder, "ids"), encoded(map(list, sentences), self.wv.key_to_index)
                )
            except NoKnownWords as nothing:  # which gensim trains on too, in vain
                log.warning(f"{nothing}; nothing is trained")
                return 0, nothing.raw_words * epochs
            counts = np.array(
                [self.wv.get_vecattr(word, "count") for word in self.wv.index_to_key], np.int64
            )
            vocab = Vocab(self.wv.index_to_key, counts, corpus.raw_words, len(counts))
            config = _fitted(config, vocab, self.batch_size, start_alpha is None)
            if start_alpha is not None and self._tuned.exists():
                suited = _fitted(
                    self._config(model, epochs, self.seed, None, None), vocab, self.batch_size, True
                )
                _warn_of_rate(config, suited)
            began = time.monotonic()
            trained = self._train_on(config, vocab, corpus, callbacks)
        self.total_train_time += time.monotonic() - began
        self.train_count += 1
        for callback in callbacks:
            callback.on_train_end(self)
        return trained, corpus.raw_words * epochs

    def _config(
        self,
        model: ModelConfig,
        epochs: int,
        seed: int,
        alpha: float | None,
        min_alpha: float | None,
    ) -> Config:
        own = [line for line in self.settings if not line.startswith(FURTHER)]
        if own:
            raise ConfigError(
                f"settings: {own[0]!r} is none that can be set here; those begin with {' '.join(FURTHER)}"
            )
        tuned = self._tuned
        if alpha is None and not tuned.exists():
            raise ConfigError(
                f"optimizer={self.optimizer!r} has no settings in {TUNED}; spell it as torch.optim does, or give alpha"
            )
        further = [*self.settings, f"train.device={self.device}"]
        config = load_config([tuned] if tuned.exists() else [], further)
        if self.optimizer == "SGD" and not self.optimizer_args and self._compiled(config):
            config = load_config([DESCENT], further)
        optimizer = replace(
            config.optimizer,
            name=self.optimizer,
            lr=config.optimizer.lr if alpha is None else alpha,
        )
        if self.optimizer_args is not None:
            optimizer = replace(optimizer, args=self.optimizer_args)
        train = replace(config.train, epochs=epochs, seed=seed)
        model = replace(
            model,
            negative_pool=config.model.negative_pool,
            negative_pool_steps=config.model.negative_pool_steps,
        )
        return replace(
            config, model=model, optimizer=replace(optimizer, min_lr=min_alpha or 0.0), train=train
        )

    @property
    def _tuned(self) -> Path:
        return TUNED / f"{self.optimizer.lower()}.yaml"

    def _compiled(self, config: Config) -> bool:
        """Whether kernels for the CPU will train, which make SGD's steps as gensim does, one for each center."""
        machine = Machine.here()
        device = choose_device(config, machine)
        return device.type == "cpu" and choose_kernels(config, machine, device)

    def _train_on(
        self, config: Config, vocab: Vocab, corpus: Corpus, callbacks: Sequence[CallbackAny2Vec]
    ) -> int:
        """Train and take over what was learned; gives the number of centers."""
        planned = plan.make_plan(config, (vocab, corpus))
        replace(
            planned.budget, free={**planned.budget.free, "disk": float("inf")}
        ).check()  # nothing is written to disk
        with planned.budget.explained():
            sampler, pipeline = plan.build(planned)
        self._give(pipeline)
        for callback in callbacks:
            callback.on_train_begin(self)
        trained, lr, looked = 0, learning_rate(config.optimizer, 0.0), time.monotonic()
        for epoch in range(1, config.train.epochs + 1):
            for callback in callbacks:
                callback.on_epoch_begin(self)
            loss = pairs = torch.zeros((), device=planned.device, dtype=torch.float64)
            began = time.monotonic()
            for ahead in pipeline.ahead(sampler.epoch()):
                result = pipeline.step(ahead, lr)
                loss, pairs, trained = (
                    loss + result.loss,
                    pairs + result.pairs,
                    trained + len(ahead.batch.windows_B),
                )
                lr = learning_rate(config.optimizer, ahead.batch.epochs_done / config.train.epochs)
                if time.monotonic() - looked > LOOK_SECONDS:
                    looked = _look(pipeline, config)
            looked = _look(pipeline, config)
            self.running_training_loss = float(loss) / max(1.0, float(pairs))
            self.min_alpha_yet_reached = lr
            rate = corpus.raw_words / (looked - began) / 1e6
            log.info(
                f"epoch {epoch} of {config.train.epochs}: loss {self.running_training_loss:.4f}, {rate:.3f} M words/s"
            )
            if callbacks or epoch == config.train.epochs:
                self._take(pipeline)
            for callback in callbacks:
                callback.on_epoch_end(self)
        return trained

    def _give(self, pipeline: Pipeline) -> None:
        """Put the vectors and the optimizer state into the tables, whose rows beyond those known stay as they are."""
        for table, vectors_VD in (
            (pipeline.inputs, self.wv.vectors),
            (pipeline.outputs, self.syn1neg),
        ):
            table["weight"].copy_(torch.from_numpy(vectors_VD))
            for name, values in self._states.get(table.name, {}).items():
                place = table.scalars[name] if name in table.scalars else table[name][: len(values)]
                place.copy_(torch.from_numpy(values))

    def _take(self, pipeline: Pipeline) -> None:
        """Bring what the tables hold into gensim's arrays, in place."""
        pipeline.engine.flush()
        for table, vectors_VD in (
            (pipeline.inputs, self.wv.vectors),
            (pipeline.outputs, self.syn1neg),
        ):
            np.copyto(vectors_VD, table["weight"].float().cpu().numpy())
            self._states[table.name] = _states_of(table)
        self.wv.norms = None


def _states_of(table: Table) -> dict[str, np.ndarray]:
    rows = {
        name: table[name].float().cpu().numpy().copy() for name in table.columns if name != "weight"
    }
    return rows | {name: value.cpu().numpy().copy() for name, value in table.scalars.items()}


def _fitted(config: Config, vocab: Vocab, batch_size: int | None, fit_rate: bool) -> Config:
    """The config with a batch size that suits the text, unless one was given, and with the learning rate for it, if wanted."""
    if batch_size is None:
        fit = fitted(config, vocab)
    else:
        oftener = min(
            TUNED_WORDS / len(vocab.words), max(1.0, config.train.batch_size / batch_size)
        )
        fit = with_batch(config, batch_size, oftener)
    return fit if fit_rate else replace(fit, optimizer=config.optimizer)


def _warn_of_rate(config: Config, suited: Config) -> None:
    """Say so where the learning rate is far from the one that suits optimizer, batch and text, as gensim's is for most."""
    name, lr, better = config.optimizer.name, config.optimizer.lr, suited.optimizer.lr
    if not better / FAR <= lr <= better * FAR:
        other = "" if name == "SGD" else ", or take optimizer='SGD'"
        log.warning(
            f"alpha={lr:g} is {name}'s learning rate here, and {better:.2g} would suit it; leave alpha out{other}"
        )


def _look(pipeline: Pipeline, config: Config) -> float:
    """Raise `Diverged` if numbers are no longer finite; gives the time."""
    if int(pipeline.fault):
        lr = config.optimizer.lr
        raise metrics.Diverged(
            f"training diverged ({config.optimizer.name}, alpha {lr:.4g}): no longer finite; give alpha={lr / 4:.3g}"
        )
    return time.monotonic()


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        only, why = ONLY[name]
        if value != only:
            raise ConfigError(f"{name}={value!r} is not supported: {why}")


def _check_callbacks(callbacks: Iterable[Any]) -> None:
    for callback in callbacks:
        if not isinstance(callback, CallbackAny2Vec):
            raise ConfigError(
                f"callback {type(callback).__name__} is not supported; derive it from gensim's CallbackAny2Vec"
            )
