"""Reads config, machine and corpus, says what the run will use and take, and builds its objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import w2v
from w2v.config import Config, ConfigError, ModelConfig, flat_config
from w2v.distributed import launcher as torchrun
from w2v.distributed.exchange import ShardedPipeline
from w2v.distributed.ranks import SINGLE, ProcessGroup, Ranks
from w2v.kernels import cuda
from w2v.kernels.batch import CHUNK_BATCHES
from w2v.model import heldout
from w2v.model.heldout import HeldOut
from w2v.model.optim import RowOptimizer
from w2v.model.sampler import Inversion, Sampler
from w2v.model.table import Storage, Table, record_width, side_by_side, uniform
from w2v.system import versions as environment
from w2v.system.process import cores, return_freed_memory
from w2v.text import opening
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training import memory as budget
from w2v.training.backends import (
    LINKS,
    PRODUCTS,
    ROWS,
    aligned,
    choose_device,
    choose_engine,
    choose_kernels,
    link_rates,
)
from w2v.training.machine import Machine, why_no_numba
from w2v.training.memory import GPU_RESERVE, Budget, Job
from w2v.training.paging import MOST_STEPS, Paging, Spectrum, Traffic
from w2v.training.step import FusedPipeline, Pipeline
from w2v.transfer.cache import Cached
from w2v.transfer.cache_mapped import CachedMapped
from w2v.transfer.engine import Engine
from w2v.transfer.mapped import Mapped
from w2v.transfer.paged import Paged
from w2v.transfer.resident import Resident
from w2v.transfer.sharded import Sharded

log = logging.getLogger("w2v")
FEWEST_STEPS = 100
FLOAT16_EPS = 2.5e-4  # the root of float16's smallest number
MOST_WORDS = 2**31 - 1  # ids are int32
NOISE_WORDS, NOISE_STEPS = (
    1 << 16,
    8,
)  # a pool, and for how many steps of as many centers, with which Adam and AdamW learn as much
LIGHTER = ("RMSprop", "Adagrad", "SGD")  # of less state than Adam's and Adamax's, in that order
IDS_SHARE, IDS_AT_ONCE = (
    16,
    1 << 26,
)  # of the GPU's free memory, at most that part is for the corpus


@dataclass(frozen=True)
class Plan:
    """What a run will do: the chosen device and engine, and why; bytes of both tables with their optimizer state."""

    config: Config
    machine: Machine
    vocab: Vocab
    corpus: Corpus
    optimizer: RowOptimizer
    device: torch.device
    engine: str
    reason: str
    table_bytes: int
    fused: bool  # whether kernels made for it compute the step, rather than plain torch
    slots: int  # rows of paged tables for which there is room on the GPU
    budget: Budget
    ranks: Ranks = SINGLE  # those that train together; bytes and slots are of this one

    def __str__(self) -> str:
        states = self.optimizer.states(self.config.model.vector_size)
        words, size = len(self.vocab.words), self.config.model.vector_size
        fields = " + ".join(["weight", *states])
        room = (
            f"; room for {self.slots:,} rows there, steps_per_page={self.paging.steps}"
            if self.engine in LINKS
            else ""
        )
        if self.paging.lookahead:
            room += f", those stay that the next {self.paging.lookahead * CHUNK_BATCHES * self._centers:,} words use"
        return "\n".join(
            [
                f"machine   {self.machine}",
                f"corpus    {self.config.corpus.path}: {self.corpus.raw_words:,} words in {len(self.corpus.offsets) - 1:,} sentences",
                f"words     {words:,} kept of {self.vocab.raw_types:,} (min_count {self.config.vocab.min_count})",
                *(
                    [
                        f"ranks     {self.ranks.size}, each with {self.ranks.shard_rows(words):,} rows of a table"
                    ]
                    if self.ranks.size > 1
                    else []
                ),
                f"tables    2 x {words:,} x {size}, {self.config.optimizer.name}: {fields}: {budget.size(self.table_bytes)}",
                f"kernels   {self._kernels()}, precision {self.config.train.precision}",
                f"engine    {self.engine} on {self.device}: {self.reason}{room}",
                *self._link(),
                str(self.budget),
                f"saving    {self.budget.saving}",
            ]
        )

    @cached_property
    def paging(self) -> Paging:
        """How rows come and stay: as configured, or what suits how many rows have room."""
        if self.slots in (
            0,
            2 * self.ranks.shard_rows(len(self.vocab.words)),
        ):  # what is true of any text need not be worked out
            return Paging(self.config.transfer.steps_per_page or (MOST_STEPS if self.slots else 1))
        return self._paging(self._traffic(self.config.model))

    def _paging(self, traffic: Traffic) -> Paging:
        transfer = replace(
            self.config.transfer, lookahead=self.config.transfer.lookahead and self.engine in LINKS
        )
        return traffic.paging(self._centers, self.slots, self.ranks.size, transfer)

    @property
    def _centers(self) -> int:
        """Of a rank's batch."""
        return -(-self.config.train.batch_size // self.ranks.size)

    @cached_property
    def _spectrum(self) -> Spectrum:
        return Spectrum.of(self.vocab.counts, self.corpus.ids)

    def _traffic(self, model: ModelConfig) -> Traffic:
        return Traffic.of_rank(self._spectrum, model, self.ranks.size)

    def _link(self) -> list[str]:
        """How many rows are expected to move where not all have room on the GPU, and what would make them fewer."""
        if self.engine not in LINKS or self.slots == 2 * self.ranks.shard_rows(
            len(self.vocab.words)
        ):
            return []
        model, steps = self.config.model, NOISE_STEPS * NOISE_WORDS // self.config.train.batch_size
        rows, hint = self._rows_read(self._traffic(model), self.paging), ""
        if steps:
            shared = self._traffic(
                replace(model, negative_pool=NOISE_WORDS, negative_pool_steps=steps)
            )
            if (fewer := self._rows_read(shared, self._paging(shared))) < rows / 2:
                pool = f"model.negative_pool={NOISE_WORDS} model.negative_pool_steps={steps}"
                hint = f"; {fewer:.2g} with {pool}, with which Adam learns as much"
        return [
            f"link      about {rows:.2g} rows a word of the text come over it, and as many go back{hint}"
        ]

    def _rows_read(self, traffic: Traffic, paging: Paging) -> float:
        """By all ranks, for a word of the text."""
        size = self.ranks.size
        words = (
            paging.steps
            * size
            * self._centers
            / traffic.kept
            * self.corpus.raw_words
            / self._spectrum.words
        )
        return traffic.read(self._centers, size * self.slots, size, *paging) / words

    def _kernels(self) -> str:
        if not self.fused:
            missing = why_no_numba() if self.device.type == "cpu" else ""
            return "plain torch" + (f", numba cannot be imported ({missing})" if missing else "")
        if self.device.type != "cpu":
            return "fused"
        return "compiled by numba" + (
            ", each center a step of its own" if self.optimizer.descends else ""
        )


def join(config: Config) -> Ranks:
    """The ranks that torchrun has started, each with its device and its share of the cores; or this process alone."""
    if not torchrun.started():
        return SINGLE
    if torch.cuda.is_available():  # before anything else takes memory of the first GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    ranks = ProcessGroup("cpu" if choose_device(config, Machine.here()).type == "cpu" else "cuda")
    torch.set_num_threads(max(1, cores() // ranks.local_size))
    return ranks


def must_be_alike(config: Config) -> dict[str, Any]:
    """What all ranks have to agree about: program, libraries and settings."""
    return {
        "the program's version": f"{w2v.__version__} ({environment.commit()})",
        "torch": torch.__version__,
    } | flat_config(config)


def make_plan(
    config: Config,
    opened: tuple[Vocab, Corpus] | None = None,
    run: Path | None = None,
    ranks: Ranks = SINGLE,
) -> Plan:
    """Decide where and how to train; raises `ConfigError` where the config asks for what this machine cannot do.

    opened: what `opening.open_corpus` gave for these settings, to spare reading it again; run: the folder of the run that goes on, whose
    checkpoints will make room.
    """
    machine = Machine.here(ranks)
    device = choose_device(config, machine)
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    kernels = choose_kernels(config, machine, device, ranks)
    optimizer = RowOptimizer(config.optimizer, kernels)
    vocab, corpus = opened or opening.open_together(config, ranks)
    if len(vocab.words) > MOST_WORDS:
        many = f"{len(vocab.words):,} words are more than the {MOST_WORDS:,} rows that a table may have"
        raise ConfigError(
            f"{many}; set vocab.max_final_vocab={MOST_WORDS} or raise vocab.min_count={config.vocab.min_count}"
        )
    if not (device.type == "cpu" and optimizer.descends):  # each center a step of its own
        warn_of_few_steps(config, vocab)
    warn_of_small_eps(config, optimizer)
    words = ranks.shard_rows(len(vocab.words))
    if not words:
        raise ConfigError(
            f"{len(vocab.words)} words are too few for {ranks.size} ranks, of which each holds some; start fewer"
        )
    size = config.model.vector_size
    dtype = ROWS.get(config.train.precision, torch.float32)
    width = record_width(size, optimizer.states(size), dtype.itemsize, aligned(device, dtype))
    table_bytes = 2 * words * width * dtype.itemsize
    engine, reason = choose_engine(
        config, machine, device, table_bytes, lambda: link_rates(width, config, device)
    )
    room = config.transfer.gpu_bytes_of(table_bytes)
    slots = min(
        2 * words,
        max(
            0,
            int(
                2
                * words
                * (machine.gpu_free_bytes - GPU_RESERVE if room is None else room)
                / table_bytes
            ),
        ),
    )
    fused = (
        kernels if device.type == "cpu" else optimizer.fused and (engine not in LINKS or slots > 0)
    )
    if config.train.kernels == "fused" and not fused:
        why = (
            f"optimizer.name={config.optimizer.name} with these args has none"
            if slots
            else "transfer.gpu_bytes=0 leaves them no rows"
        )
        raise ConfigError(f"train.kernels=fused, but {why}; set train.kernels=auto")
    budgeted = make_budget(config, machine, words, optimizer, engine, device, run)
    return Plan(
        config,
        machine,
        vocab,
        corpus,
        optimizer,
        device,
        engine,
        reason,
        table_bytes,
        fused,
        slots,
        budgeted,
        ranks,
    )


def make_budget(
    config: Config,
    machine: Machine,
    words: int,
    optimizer: RowOptimizer,
    engine: str,
    device: torch.device,
    run: Path | None,
) -> Budget:
    """What the run takes and what is free for it; `check` says whether it fits."""
    model, on_gpu, run_dir = config.model, device.type == "cuda", Path(config.run.dir)
    pairs = 2 * model.window + 1 + model.negative
    job = Job(
        words, model.vector_size, optimizer.states, engine, on_gpu, config.train.batch_size, pairs
    )
    kept = config.transfer.gpu_bytes_of(job.table_bytes) or 0 if engine in LINKS else 0
    dtype = ROWS.get(config.train.precision, torch.float32)
    job = replace(
        job,
        kept_bytes=kept,
        checkpoints=config.run.checkpoint_minutes > 0,
        element_size=dtype.itemsize,
        in_files=bool(config.transfer.table_dir),
        aligned=aligned(device, dtype),
    )
    written = (
        sum(file.stat().st_size for file in (run / "checkpoints").rglob("*.safetensors"))
        if run
        else 0
    )
    free = {
        "host": machine.host_free_bytes,
        "locked": machine.lockable_bytes,
        "disk": budget.free_disk_bytes(run_dir) + written,
    }

    def lighter() -> dict[str, Callable]:
        return {
            name: RowOptimizer(replace(config.optimizer, name=name, args={})).states
            for name in LIGHTER
        }

    return Budget(
        job, free | ({"gpu": machine.gpu_free_bytes} if on_gpu else {}), config.run.dir, lighter
    )


def expected_centers(config: Config, vocab: Vocab) -> float:
    """How many centers a run will have, in the mean."""
    return (
        float((vocab.counts * vocab.keep_probabilities(config.model.sample)).sum())
        * config.train.epochs
    )


def warn_of_few_steps(config: Config, vocab: Vocab) -> None:
    """Say so when the text is too small for the batch size to be learned from."""
    train = config.train
    centers = expected_centers(config, vocab)
    if centers < FEWEST_STEPS * train.batch_size:
        smaller = max(1, int(centers / (10 * FEWEST_STEPS)))
        remedy = (
            f"try train.batch_size={smaller} with a smaller optimizer.lr"
            if smaller < train.batch_size
            else "more text is needed"
        )
        steps = centers / train.batch_size
        log.warning(
            f"train.batch_size={train.batch_size} leaves {steps:.0f} optimizer steps, too few to learn from; {remedy}"
        )


def warn_of_small_eps(config: Config, optimizer: RowOptimizer) -> None:
    """Say so when squares that float16 keeps as 0 leave a step nothing else to divide by."""
    if (
        config.train.precision == "fp16"
        and optimizer.eps is not None
        and optimizer.eps < FLOAT16_EPS
    ):
        log.warning(
            f"train.precision=fp16 keeps squares of gradients under 6e-8 as 0, and {config.optimizer.name} then divides by its eps, "
            f"{optimizer.eps:g}; set optimizer.args.eps={FLOAT16_EPS:g} or more, or train.precision=bf16"
        )


def build(plan: Plan) -> tuple[Sampler, Pipeline]:
    """The objects of the run, tables initialised as word2vec does it: inputs uniform in +-0.5 / D, outputs zero."""
    model, train = plan.config.model, plan.config.train
    resident: Storage = "cuda" if plan.device.type == "cuda" else "cpu"
    link, storage = LINKS.get(plan.engine, (None, resident))
    size, states, scalars = (
        model.vector_size,
        plan.optimizer.states(model.vector_size),
        plan.optimizer.scalars,
    )
    ranks, rows, dtype = (
        plan.ranks,
        plan.ranks.shard_rows(len(plan.vocab.words)),
        ROWS.get(train.precision, torch.float32),
    )
    files: list[Path | None] = [None, None]
    if folder := plan.config.transfer.table_dir:
        storage, files = (
            "mmap",
            [Path(folder) / f"{os.getpid()}-{name}.records" for name in ("input", "output")],
        )
        Path(folder).mkdir(parents=True, exist_ok=True)
    padded = aligned(plan.device, dtype)
    pinned: Sequence[Tensor | None] = (None, None)
    together = (
        plan.paging.lookahead > 0
    )  # both rows of a word, which then come and go at much the same time
    if storage == "pinned" and together:
        pinned = side_by_side(
            2, rows, record_width(size, states, dtype.itemsize, padded), dtype
        ).unbind()
    inputs, outputs = (
        Table(name, rows, size, states, scalars, storage, dtype, file, padded, pinned_VR)
        for name, file, pinned_VR in zip(("input", "output"), files, pinned, strict=True)
    )
    values = uniform(size, 0.5 / size, train.seed)
    inputs.initialise(lambda rows_n: values(ranks.global_rows(rows_n)), plan.device)
    on_gpu = ShardedPipeline if ranks.size > 1 else FusedPipeline
    make, inversion = (
        _compiled()
        if plan.fused and plan.device.type == "cpu"
        else (on_gpu if plan.fused else Pipeline, None)
    )
    vocab, offsets = plan.vocab, plan.corpus.offsets
    sampler = Sampler(
        corpus_ids(plan),
        offsets,
        vocab.keep_probabilities(model.sample),
        vocab.noise_distribution(model.ns_exponent),
        model,
        train.batch_size,
        train.seed,
        plan.device,
        heldout.choose(offsets, train.held_out_words),
        inversion,
        cuda.draw if plan.fused and plan.device.type == "cuda" else None,
        ranks,
        plan.paging.lookahead,
    )
    engine: Engine
    if link is None:
        engine = Resident()
    elif plan.slots:
        held = [inputs, outputs], plan.slots, plan.device, expected_uses(plan, apart=not together)
        engine = CachedMapped(*held) if link is Mapped else Cached(link(), *held)
    else:
        engine = Paged(link())
    if ranks.size > 1 and not plan.fused:
        engine = Sharded(engine, ranks)
    product = None if plan.fused else PRODUCTS.get(train.precision)
    return_freed_memory()
    return sampler, make(
        inputs,
        outputs,
        engine,
        plan.optimizer,
        plan.device,
        plan.paging.steps,
        product,
        ranks,
        len(vocab.words),
    )


def corpus_ids(plan: Plan) -> np.ndarray | Tensor:
    """The ids on the GPU, if they take little of it, else where they are: they then come chunk by chunk."""
    ids_N = plan.corpus.ids
    if plan.device.type == "cpu" or IDS_SHARE * ids_N.nbytes > plan.machine.gpu_free_bytes:
        return ids_N
    on_gpu = torch.empty(len(ids_N), dtype=torch.int32, device=plan.device)
    for start in range(0, len(ids_N), IDS_AT_ONCE):
        part = np.array(ids_N[start : start + IDS_AT_ONCE])
        on_gpu[start : start + len(part)] = torch.from_numpy(part)
    return on_gpu


def expected_uses(plan: Plan, apart: bool) -> Tensor:
    """How often an epoch uses each row of this rank's shards of both tables: float64 [2, V] on the compute device.

    apart: whether to count noise words too, so that a word's rows differ.
    """
    model, vocab = plan.config.model, plan.vocab
    kept_V = vocab.counts * vocab.keep_probabilities(model.sample)
    noise_V = apart * model.negative * kept_V.sum() * vocab.noise_distribution(model.ns_exponent)
    uses_TV = np.stack([kept_V, kept_V + noise_V])
    return torch.from_numpy(uses_TV[:, plan.ranks.rank :: plan.ranks.size].copy()).to(plan.device)


def held_out(plan: Plan) -> HeldOut | None:
    """What the sampler that `build` makes leaves out, for its loss; None where that is nothing."""
    corpus, vocab, model = plan.corpus, plan.vocab, plan.config.model
    chosen = heldout.choose(corpus.offsets, plan.config.train.held_out_words)
    keep_V, noise_V = (
        vocab.keep_probabilities(model.sample),
        vocab.noise_distribution(model.ns_exponent),
    )
    return (
        HeldOut(corpus.ids, corpus.offsets, chosen, keep_V, noise_V, model, plan.device)
        if len(chosen)
        else None
    )


def _compiled() -> tuple[type[Pipeline], Inversion]:
    """What numba compiles for the CPU; imported here, since that takes half a second."""
    from w2v.kernels.cpu import inversion
    from w2v.training.step_cpu import CompiledPipeline

    return CompiledPipeline, inversion
