"""gensim's Word2Vec, trained with any row-separable torch optimizer.

    model = Word2Vec(sentences, vector_size=100, epochs=5, optimizer="Adamax")
    model.wv.most_similar("world")  # gensim's KeyedVectors

gensim itself builds the vocabulary and the initial vectors. Shapes: V words, D dimensions.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import operator
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from gensim.models import word2vec
from gensim.models.callbacks import CallbackAny2Vec
from torch import Tensor

from w2v.config import COMMAND_LINE, CONFIGS, TYPES, Config, ConfigError, load_config, require
from w2v.rows.optim import RowOptimizer, optimizer_name
from w2v.rows.table import Table
from w2v.system.files import as_list
from w2v.system.process import cores
from w2v.text.corpus import Corpus, NoKnownWords
from w2v.text.encode import encode_sentences
from w2v.text.vocab import Vocab, median_count
from w2v.training import build, plan
from w2v.training.memory import Machine, explained
from w2v.training.trainer import TrainingLoop
from w2v.word2vec import auto
from w2v.word2vec.batch import output_vectors
from w2v.word2vec.step import TrainingStep

log = logging.getLogger("w2v")
CPU_SGD = CONFIGS / "cpu.yaml"  # gensim's own training: SGD on the CPU, one step per center
ON_CPU = "cpu", "sequential"  # compiled kernels
SETTINGS = (  # prefixes of the assignments that `settings` takes; other keys are arguments
    "model.negative_pool model.shrink_by optimizer.step optimizer.occurrence_cap "
    "optimizer.schedule optimizer.warmup train.block_words train.kernels train.precision "
    "train.deterministic transfer."
)
MODEL = "vector_size window shrink_windows hs negative sample ns_exponent cbow_mean".split()
ARGUMENTS = {  # by key of the config, for messages: the argument that sets it
    "optimizer.lr": "alpha",
    "optimizer.min_lr": "min_alpha",
    "optimizer.name": "optimizer",
    "optimizer.args": "optimizer_args",
    "model.hs=true": "hs=1",
    **{f"model.{name}": name for name in [*MODEL, "min_n", "max_n"]},
    "model.buckets": "bucket",
    **{f"train.{name}": name for name in ("batch_size", "device", "epochs", "seed")},
    "model.architecture=cbow": "sg=0",
}
SENTENCES = (  # what to give in place of texts and tables
    "give [text.split() for text in texts], of a table table['text'].str.split(), of a dataset "
    "[row['text'].split() for row in dataset], of a file corpus_file=FILE"
)
TEXTS = str, bytes, Mapping  # iterables that are no sentences
RESIDENT = 'add "transfer.engine=resident" to settings'  # else the GPU keeps rows of its own
KEY = re.compile(rf"\b({'|'.join(map(re.escape, ARGUMENTS))})\b")
WHOLE = "max_final_vocab max_vocab_size min_count null_word sorted_vocab workers".split()


class Word2Vec(word2vec.Word2Vec):
    """gensim's Word2Vec with any row-separable torch optimizer.

    Arguments that are not listed mean what they mean in gensim. Sentences of more than 10,000 words
    are trained whole.

    Args:
        alpha: Learning rate of the optimizer. By default it suits the optimizer and the text.
        min_alpha: Learning rate at the end of training, 0 by default.
        sg: 1 for skip-gram, 0 for CBOW.
        hs: 1 for hierarchical softmax; beside negative sampling, unless negative is 0.
        workers: Number of threads, by default torch's. SGD on a CPU is repeatable only with 1.
        batch_words: Has no effect; see `batch_size`.
        hashfxn: Has no effect, as in gensim 4.
        optimizer: Row-separable optimizer: a class, or the name of one in torch.optim. The default
            is Adam, or SGD if `alpha` is given, as gensim's rates are for SGD.
        optimizer_args: Arguments of that class; by default, or if empty without `alpha`, those in
            configs/optimizers/.
        batch_size: Centers per step; by default it suits the text.
        device: Where to train, as train.device.
        settings: More settings as `section.key=value`, such as "train.precision=bf16".

    Raises:
        ValueError: If an argument is out of range.
    """

    loss_per_pair = math.nan  # mean over the positive pairs of the last epoch
    GENSIMS: type = word2vec.Word2Vec  # the class that this one replaces
    LOCKS: tuple[str, ...] = ("vectors_lockf",)  # factors of updates in `wv`
    steps_at_centers = True  # whether plain SGD on a CPU makes a step at each center
    # State by optimizer and `Part`: row states [V, n] and scalars [].
    _states: dict[tuple[str, str], dict[str, np.ndarray]]
    _median = 0.0  # `median_count` of the text that the vocabulary was chosen from, if known

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
        workers=None,
        min_alpha=None,
        sg=0,
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
        optimizer: str | type[torch.optim.Optimizer] | None = None,
        optimizer_args: dict[str, Any] | None = None,
        batch_size: int | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        settings: Sequence[str] = (),
    ):
        self._begin(dict(locals()))

    def _begin(self, given: dict[str, Any]) -> None:
        """Check all arguments by name, and give gensim's constructor its own."""
        alpha = given["alpha"]
        if given["optimizer"] is None:
            given["optimizer"] = Config().optimizer.name if alpha is None else "SGD"
        self.optimizer = optimizer_name(given["optimizer"])
        self.optimizer_args = given["optimizer_args"]
        self.batch_size = given["batch_size"]
        self.device = given["device"]
        self.settings = as_list(given["settings"])
        config = self._config(given, given["epochs"], given["seed"], alpha, given["min_alpha"])
        with _naming_arguments():
            RowOptimizer(config.optimizer)  # refuses an optimizer that is not row-separable
        # While alpha has this value, a text gets one that suits it.
        self._default_alpha = None
        if alpha is None:
            self._default_alpha = auto.RATES[self.optimizer]
        given["alpha"] = self._default_alpha or config.optimizer.lr
        given["min_alpha"] = config.optimizer.min_lr
        if given["workers"] is None:
            given["workers"] = torch.get_num_threads()
        given.update({name: getattr(config.model, name) for name in MODEL if name != "sample"})
        for name in WHOLE:
            if given[name] is not None or name == "min_count":
                given[name] = _number(int, name, given[name])
        require(given["workers"] > 0, "workers", given["workers"], "at least 1, or left out")
        given["sg"] = _number(bool, "sg", given["sg"])
        if isinstance(given["sample"], str):
            given["sample"] = _number(float, "sample", given["sample"])
        # gensim's constructor calls `train` where it is given a text, so it comes last.
        arguments = inspect.signature(self.GENSIMS).parameters
        super().__init__(**{name: given[name] for name in arguments})

    @classmethod
    def load(cls, *args, **named):
        """Load a model that this class or gensim's own has saved.

        A saved model is a full pickle, which may run any code: load files that you trust. Vectors
        of others are safer as .kv files, which `w2v.load` reads without running any. Models of
        gensim's class train on with SGD, at their alpha; those of derived classes keep their class.
        """
        model = super().load(*args, **named)
        if type(model) is cls.GENSIMS:
            model.__class__ = cls
            vars(model).update(optimizer="SGD", optimizer_args=None, batch_size=None)
            vars(model).update(device="auto", settings=[], _default_alpha=None, _states={})
        return model

    def build_vocab_from_freq(self, word_freq, *args, **named):
        """Build the vocabulary from counts of words, or from their shares.

        With shares of a text, such as 0.05, no word is frequent: they need min_count=0.
        """
        counts, word_freq = {}, dict(word_freq)
        for word, count in word_freq.items():
            name = f"word_freq[{word!r}]"
            if number := _number(float, name, count):
                require(0 < number < math.inf, name, count, "finite and not below 0")
                counts[word] = number
        if all(map(float.is_integer, counts.values())) and sum(counts.values()) < 2**63:
            counts = {word: int(word_freq[word]) for word in counts}
        else:
            if self.max_final_vocab is not None:  # gensim would raise min_count above 1
                raise ConfigError("max_final_vocab takes whole counts; give word_freq fewer words")
            # gensim sorts by counts as int64, and the last first where they are equal.
            scale = min(1.0, 2**62 / max(counts.values()))
            words = sorted(counts, key=counts.__getitem__) if self.sorted_vocab else counts
            counts = {word: counts[word] * scale for word in words}
        super().build_vocab_from_freq(counts, *args, **named)

    def scan_vocab(self, corpus_iterable=None, *args, **named):
        """Count words as gensim does; raise at what is not a list of words."""
        if corpus_iterable is not None:
            corpus_iterable = _sentences(corpus_iterable)
        return super().scan_vocab(corpus_iterable, *args, **named)

    def _check_corpus_sanity(self, corpus_iterable=None, corpus_file=None, passes=1):
        """Refuse what gensim does, and whatever gives its sentences only once."""
        if isinstance(corpus_iterable, Iterator) and passes > 1:
            once = f"a {type(corpus_iterable).__name__} gives its sentences only once"
            raise TypeError(f"{once}, and they are read twice; give a list: list(sentences)")
        super()._check_corpus_sanity(corpus_iterable, corpus_file, passes)

    def prepare_vocab(self, *args, **named):
        """Choose the words as gensim does; they may be more than before."""
        given = inspect.signature(super().prepare_vocab).bind(*args, **named).arguments
        update = given.get("update")
        counted = self.wv.expandos.get("count", np.zeros(0, np.int64)).dtype
        if update and (counted.kind == "f" or float in map(type, self.raw_vocab.values())):
            raise ConfigError("update=True adds whole counts; build a new vocabulary of shares")
        if not (update or given.get("dry_run")):
            self.wv.vectors = self.wv.vectors[:0]  # gensim would order them as the new words
            self._median = median_count(np.fromiter(self.raw_vocab.values(), float))
        report = super().prepare_vocab(*args, **named)
        if not (self.wv.index_to_key or given.get("dry_run")):
            log.warning(f"min_count={self.min_count} keeps no word; lower it (to 0 for shares)")
        return report

    def init_weights(self):
        """Reset the vectors as gensim does, and the optimizer's state with them."""
        super().init_weights()
        self._states = {}

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
        """Train further from the present vectors and optimizer state.

        As in gensim, total_examples or total_words must be given, although words are counted
        anyway. The text is read once, whatever the number of epochs. `loss_per_pair` is the mean
        over the positive pairs of the last epoch.

        Returns:
            The number of words trained on and the number of words read, over all epochs.
        """
        self._check_training_sanity(epochs, total_examples, total_words)
        self._check_corpus_sanity(corpus_iterable=corpus_iterable, corpus_file=corpus_file)
        size = self._trained_words
        shape = self.wv.vectors.shape
        is_built = 0 < size <= shape[0] and shape[1] == self.vector_size
        if not is_built or "sample_int" not in self.wv.expandos:
            found = f"wv, of shape {shape}, is not from this model's build_vocab"
            raise ConfigError(f"{found}; call that of a new model, and write into its wv.vectors")
        self._lock_factors()  # refuses what it cannot use
        alpha = start_alpha or self.alpha
        min_alpha = end_alpha or self.min_alpha
        # The learning rate suits the text unless the user has chosen one, here or before. gensim's
        # constructor gives its own as `start_alpha`.
        is_given = bool(start_alpha) and start_alpha is not self.alpha
        chosen = None if alpha == self._default_alpha and not is_given else alpha
        seed = None if self.seed is None else self.seed + self.train_count
        # As in gensim, words that were added to `wv` after `build_vocab` are not trained.
        words = self.wv.index_to_key[:size]
        counts = self.wv.expandos["count"][:size]
        config = self._config(vars(self), epochs, seed, chosen, min_alpha, counts.sum())
        if chosen is not None:
            self._default_alpha = None
        self.alpha = alpha
        self.min_alpha = min_alpha
        self.epochs = epochs
        self.compute_loss = compute_loss
        self.running_training_loss = 0.0
        epochs = config.train.epochs
        self.add_lifecycle_event(
            "train",
            msg=f"training model with {self.workers} workers on {len(self.wv)} vocabulary and "
            f"{self.layer1_size} features, using sg={self.sg} hs={self.hs} sample={self.sample} "
            f"negative={self.negative} window={self.window} shrink_windows={self.shrink_windows}",
        )
        start = time.monotonic()
        if corpus_iterable is None:
            corpus_iterable = word2vec.LineSentence(corpus_file)
        counter = itertools.count()  # of sentences
        sentences = _sentences(corpus_iterable)
        counted = (sentence for sentence, _ in zip(sentences, counter, strict=False))
        corpus = None
        try:
            index = {word: row for row, word in enumerate(words)}
            corpus = Corpus.temporary(encode_sentences(counted, index))
            raw_words = corpus.raw_words
            if counts.dtype.kind == "f":  # shares, or counts of another text
                counts = counts * (raw_words / counts.sum())
        except NoKnownWords as error:  # gensim does not raise here either
            raw_words = error.raw_words
            reason = f"no sentence has two known words, of {raw_words:,} words"
            if not raw_words:
                reason = "there is no sentence, or an iterator is read again"
            log.warning(f"{reason}; nothing is trained")
        examples = next(counter)

        log_epoch = functools.partial(
            self._log_epoch_end,
            example_count=examples,
            total_examples=total_examples,
            raw_word_count=raw_words,
            total_words=total_words,
            is_corpus_file_mode=corpus_file is not None,
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(max(1, min(self.workers, cores())))
        try:
            if corpus is None:
                trained = 0
                for hook in ["on_train_begin", *["on_epoch_begin", "on_epoch_end"] * epochs]:
                    self._call(callbacks, hook)
            else:
                sample_ints = self.wv.expandos["sample_int"][:size]
                median = 0.0 if counts.dtype.kind == "f" else self._median
                names = list(map(str, words))  # gensim's may be numbers
                vocab = GensimsVocab(names, counts, raw_words, size, sample_ints, median=median)
                trained = self._train_on(config, vocab, corpus, callbacks, log_epoch)
        finally:
            torch.set_num_threads(threads)
        seconds = time.monotonic() - start
        self._log_train_end(raw_words * epochs, trained, seconds, job_tally=0)
        self.total_train_time += seconds
        self.train_count += 1
        self._call(callbacks, "on_train_end")
        return trained, raw_words * epochs

    def _config(
        self, given: Mapping[str, Any], epochs, seed, alpha=None, min_alpha=None, words=np.inf
    ) -> Config:
        """Return the config of a run, in which alpha is auto by default.

        `given` has the arguments of MODEL; a `sample` of 1 or more is a count, out of `words`.
        """
        for setting in self.settings:
            if not str(setting).startswith(tuple(SETTINGS.split())):
                raise ConfigError(f"settings: {setting!r} cannot be set here, only {SETTINGS}")
        given = {**given, "sample": _share(given["sample"], words)}
        model = {name: _number(TYPES[f"model.{name}"], name, given[name]) for name in MODEL}
        model |= self._subword_settings(given)
        epochs = _number(operator.index, "epochs", epochs)
        batch_size = _number(operator.index, "batch_size", self.batch_size or 0)
        seed = secrets.randbits(60) if seed is None else _number(operator.index, "seed", seed)
        min_lr = _number(float, "min_alpha", min_alpha or 0.0)
        model["architecture"] = ("cbow", "skipgram")[_number(bool, "sg", given["sg"])]
        with _naming_arguments():
            config = self._base_config(is_auto=alpha is None)
            lr = 0.0  # auto
            if alpha is not None:
                lr = _number(float, "alpha", alpha)
                require(lr > 0, "alpha", alpha, "above 0")
                lr = max(lr, min_lr)  # gensim never goes below min_alpha
            optimizer = config.optimizer
            if self.optimizer_args is not None:
                optimizer = replace(optimizer, args=self.optimizer_args)
            optimizer = replace(optimizer, lr=lr, min_lr=min_lr)
            train = replace(config.train, epochs=epochs, seed=seed, batch_size=batch_size)
            model_config = replace(config.model, **model)
            return replace(config, model=model_config, optimizer=optimizer, train=train)

    def _subword_settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of subwords, by key of the section model."""
        return {}

    def _base_config(self, is_auto: bool) -> Config:
        """Return the shipped settings of the optimizer, and the user's.

        For plain SGD on a CPU these are gensim's. The learning rate is 0 (auto), or 1 until it is
        replaced.
        """
        settings = [*self.settings, f"optimizer.name={self.optimizer}"]
        settings.append(f"train.device={self.device}")
        if not is_auto:
            settings.append("optimizer.lr=1")
        config = load_config([], settings)
        if self.optimizer != "SGD" or self.optimizer_args or not self.steps_at_centers:
            return config
        like_gensims = load_config([CPU_SGD], settings)
        if plan.choose_kernels(like_gensims, Machine.here()) in ON_CPU:
            return like_gensims
        return config

    def _call(self, callbacks: Sequence[CallbackAny2Vec], hook: str) -> None:
        """Call a method of each callback."""
        for callback in callbacks:
            getattr(callback, hook)(self)

    def _train_on(
        self,
        config: Config,
        vocab: Vocab,
        corpus: Corpus,
        callbacks: Sequence[CallbackAny2Vec],
        log_epoch: Callable[..., None],
    ) -> int:
        """Train all epochs and return the number of words trained on."""
        with _naming_arguments():
            planned = plan.make_plan(config, (vocab, corpus))
            # No checkpoint and no vectors are written to run.dir. Tables in files there, with
            # transfer.table_dir, fail by themselves where the disk is full.
            planned.check(saves=False)
            if planned.kernels in ON_CPU:
                # More threads would only wait for small batches, which costs CPU time too.
                torch.set_num_threads(planned.threads)
            with explained(planned):
                loop = build.build(planned, draws_vectors=False)  # but gensim's
        self._call(callbacks, "on_train_begin")
        trained = 0
        self.min_alpha_yet_reached: float = loop.lr
        for epoch in range(1, config.train.epochs + 1):
            self._call(callbacks, "on_epoch_begin")
            if epoch == 1 or callbacks:
                self._copy_to(loop.step, is_first=epoch == 1)
            start = time.monotonic()
            scale_updates = self._update_scaler(loop.step, planned.kernels)
            trained_here = self._train_epoch(loop, scale_updates)
            log_epoch(epoch - 1, trained_word_count=trained_here, elapsed=time.monotonic() - start)
            log.info(f"epoch {epoch} of {config.train.epochs}: loss {self.loss_per_pair:.4f}")
            trained += trained_here
            if callbacks or epoch == config.train.epochs:
                self._copy_from(loop.step)
            self._call(callbacks, "on_epoch_end")
        return trained

    def _lock_factors(self) -> list[np.ndarray]:
        """Return the factors of updates, which gensim repeats for all rows."""
        found = []
        for name in self.LOCKS:  # gensim's `reset_from` leaves none
            factors = np.asarray(getattr(self.wv, name, [1]), np.float32)
            if factors.ndim != 1 or not len(factors) or not np.isfinite(factors).all():
                takes = "give a finite number for each of its vectors, or one for all"
                raise ConfigError(f"wv.{name} has shape {factors.shape}; {takes}")
            found.append(factors)
        return found

    def _update_scaler(self, step: TrainingStep, kernels: str) -> Callable[[], object]:
        """Return a function that scales the last step's updates of words.

        The factors are gensim's LOCKS. Sequential SGD scales updates itself.
        """
        words, *of_buckets = self._lock_factors()
        factors_V = np.resize(words, self._trained_words)
        weight_VD = step.inputs["weight"]
        if subwords := step.subwords:
            factors_B = np.resize(of_buckets[0], len(self.wv.vectors_ngrams))
            factors_V = np.concatenate([factors_V, factors_B[subwords.used_B]])
            weight_VD = step.table["weight"][subwords.first :]
        scaled = np.flatnonzero(factors_V != 1)
        if kernels == "sequential":
            step.kernels.input_factors = factors_V  # type: ignore[attr-defined]
        if kernels == "sequential" or not len(scaled):
            return lambda: None
        if step.engine.moves_rows:
            raise ConfigError(f"wv.{self.LOCKS[0]} locks vectors that are paged; {RESIDENT}")
        rows_L = torch.from_numpy(scaled).to(weight_VD.device)
        factors_L1 = torch.from_numpy(factors_V[scaled, None]).to(weight_VD)
        before_LD = weight_VD[rows_L]  # the weights before the next step

        def scale() -> None:
            before_LD.lerp_(weight_VD[rows_L], factors_L1)
            weight_VD[rows_L] = before_LD

        return scale

    def _train_epoch(self, loop: TrainingLoop, scale_updates: Callable[[], object]) -> int:
        """Train one epoch and return the number of centers."""
        loss: Tensor | float = 0.0
        pairs: Tensor | float = 0.0
        centers = 0
        for done in loop.epoch():
            scale_updates()
            loss = loss + done.loss  # on the device, so that no step waits for it
            pairs = pairs + done.pairs
            centers += done.batch.windows_B.shape[0]  # len() of a tensor takes 7 us
        loop.check_finite(lambda: f"give alpha={loop.config.optimizer.lr / 4:.3g}")
        self.loss_per_pair = float(loss) / max(1.0, float(pairs))
        if self.compute_loss:
            self.running_training_loss += float(loss)
        self.min_alpha_yet_reached = loop.lr
        return centers

    def _copy_to(self, step: TrainingStep, is_first: bool) -> None:
        """Copy the vectors into the tables, and the optimizer state at first.

        Later there are only changes that a callback has made.
        """
        for name, table, rows, vectors_VD, picked in self._parts(step):
            if not vectors_VD.flags.writeable:
                raise ConfigError(f"the {name} vectors are read-only; load without mmap='r'")
            weight_VD, vectors_VD = table["weight"][rows], vectors_VD[picked]
            if not is_first and np.array_equal(vectors_VD, weight_VD.float().cpu().numpy()):
                continue
            if not is_first and step.engine.moves_rows:
                raise ConfigError(f"a callback has changed vectors that are paged; {RESIDENT}")
            weight_VD.copy_(torch.from_numpy(vectors_VD))
            saved = self._states.get((self.optimizer, name), {})
            states = _states(table, rows)
            # Arguments that need other states than before begin with new ones.
            is_same = all(key in saved and saved[key].ndim == states[key].ndim for key in states)
            if is_first and is_same:
                for key, state in states.items():
                    # Words that are new since the last call keep their initial state.
                    values = torch.from_numpy(saved[key])
                    (state[: len(values)] if values.ndim else state).copy_(values)

    def _copy_from(self, step: TrainingStep) -> None:
        """Copy vectors (in place) and optimizer state out of the tables."""
        step.flush()
        self._states = {}
        for name, table, rows, vectors_VD, picked in self._parts(step):
            vectors_VD[picked] = table["weight"][rows].float().cpu().numpy()
            self._states[self.optimizer, name] = {
                key: (state.float() if state.ndim else state).cpu().numpy().copy()
                for key, state in _states(table, rows).items()
            }
        self.wv.norms = None  # gensim computes them again

    @property
    def _trained_words(self) -> int:
        """The number of words that have output vectors or a path in the tree."""
        return len(vars(self).get("syn1neg" if self.negative else "syn1", ()))

    def _parts(self, step: TrainingStep) -> list[Part]:
        """Return the parts of the tables that are arrays of gensim's."""
        words = slice(self._trained_words)
        parts = [Part("input", step.inputs, words, self.wv.vectors[words])]
        if self.negative:
            parts.append(Part("output", step.outputs, words, self.syn1neg))
        if self.hs:  # gensim's array has a last row that is no node
            last = output_vectors(words.stop, self.hs, self.negative)
            nodes = slice(words.stop if self.negative else 0, last)
            syn1 = self.syn1[: nodes.stop - nodes.start]
            parts.append(Part("nodes", step.outputs, nodes, syn1))
        return parts


@dataclass(frozen=True, eq=False)
class GensimsVocab(Vocab):
    """Words that are subsampled as gensim has decided when it counted them.

    After `build_vocab(update=True)`, its probabilities are those of the counts in the last text.
    """

    sample_ints: np.ndarray  # uint32, shares of 2 ** 32 - 1

    def keep_probabilities(self, sample: float) -> np.ndarray:
        """Return the probability that an occurrence of each word is kept."""
        return self.sample_ints / (2**32 - 1) if sample else np.ones(len(self.words))


class Part(NamedTuple):
    """Rows of a table, and gensim's array of their weights [V, D].

    picked: which rows of that array.
    """

    name: str
    table: Table
    rows: slice
    vectors_VD: np.ndarray
    picked: slice | np.ndarray = slice(None)


def _states(table: Table, rows: slice) -> dict[str, Tensor]:
    """Return views of the optimizer's state: of rows [V, n], and scalars []."""
    return {name: table[name][rows] for name in table.columns if name != "weight"} | table.scalars


def _share(sample: float | None, words: float) -> float:
    """Return gensim's `sample` as a share of the words: 1 or more is a count."""
    sample = _number(float, "sample", sample or 0)
    require(0 <= sample < math.inf, "sample", sample, "at least 0 and finite")
    if sample < 1:
        return sample
    share = int(sample * (3 + 5**0.5) / 2) / words
    if share >= 1:  # no word is more frequent than that
        return 0.0
    return share


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Name arguments in place of the config's keys in errors of the block."""
    try:
        yield
    except (ValueError, MemoryError) as error:
        named = KEY.sub(lambda found: ARGUMENTS[found[0]], str(error))
        error.args = (named.replace(f" (from {COMMAND_LINE})", ""),)
        raise


def _sentences(sentences: Iterable[Any]) -> Iterator[Any]:
    """Yield sentences; raise at one that is not a list of words."""
    if hasattr(sentences, "columns"):  # pandas would give their names, polars whole columns
        raise TypeError(f"a {type(sentences).__name__} is a table, not lists of words; {SENTENCES}")
    for number, sentence in enumerate(sentences):
        is_list = isinstance(sentence, (list, tuple))  # nearly always; more checks take longer
        if not is_list and (isinstance(sentence, TEXTS) or not isinstance(sentence, Iterable)):
            found = f"sentence {number} of a {type(sentences).__name__} is {str(sentence)[:30]!r}"
            raise TypeError(f"{found}, not a list of words; {SENTENCES}")
        yield sentence


def _number(kind: Callable[[Any], Any], name: str, value: Any) -> Any:
    """Convert an argument to a number without loss, from text or NumPy's too."""
    try:
        if kind is bool and isinstance(value, str):
            value = int(value)  # any text is true
        number = kind(value)
        if kind is int and not isinstance(value, str) and number != value:
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}={value!r} is not such a number as gensim takes") from None
