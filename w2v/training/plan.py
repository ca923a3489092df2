"""Decide what a run uses, print it, and build it.

Planning decides and changes nothing; `build` allocates the tables. A choice that this machine does
not have is a `ConfigError` with the remedy; a slower one that takes its place is a warning.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import w2v
from w2v.config import Config, ConfigError
from w2v.distributed import launcher
from w2v.distributed.exchange import Exchange, LocalExchange, RankExchange
from w2v.distributed.peers import PeerExchange, PeerMemory
from w2v.distributed.ranks import SINGLE, ProcessGroup, Ranks
from w2v.kernels import Kernels
from w2v.kernels.batch import StepState, chunk_words, max_rows
from w2v.kernels.cuda import MOST_CBOW_DIM, CudaKernels, TorchStepKernels
from w2v.kernels.cuda_shard import CudaPeerKernels, CudaShardKernels
from w2v.kernels.reference import ReferenceKernels
from w2v.model import auto, heldout
from w2v.model.heldout import HeldOut
from w2v.model.optim import RowOptimizer
from w2v.model.row_file import nameless_records
from w2v.model.sampler import Sampler, TrainingText, negative_distribution
from w2v.model.table import Storage, Table, record_width, side_by_side, uniform
from w2v.system.process import (
    cores,
    git_commit,
    on_threads,
    return_freed_memory,
    reuse_freed_memory,
)
from w2v.system.resources import format_bytes, free_disk_bytes
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training.memory import ROW_TYPES, Budget, Machine, Task, fitting_batch_size
from w2v.training.paging import MOST_STEPS, Paging, choose_lookahead, choose_paging
from w2v.training.step import TrainingStep
from w2v.training.trainer import TrainingLoop
from w2v.transfer.cache import MappedCache, TorchCache
from w2v.transfer.engine import Engine, Paged
from w2v.transfer.links import MappedLink, link_between

log = logging.getLogger("w2v")
PRODUCT_TYPES = ROW_TYPES | {"amp": torch.bfloat16}  # of matrix products in plain torch
KERNELS = {  # as the plan names them
    "reference": "plain torch",
    "cpu": "compiled by numba",
    "sequential": "compiled by numba, each center a step of its own",
    "cuda": "fused",
}
STORAGE: dict[str, Storage] = {"mapped": "pinned", "staged": "cpu"}  # of paged tables, by engine
# Batch size, and words/s of two GPUs over those of one (docs/dev/performance.md).
TWO_OVER_ONE = ((8_192, 0.8), (16_384, 1.2), (65_536, 1.6), (131_072, 1.7))
TWO_OVER_ONE_PAGED = 1.5  # where rows are paged, with batches of auto.LARGEST or more
LEAST_GAIN = 1.1  # of two GPUs; with less, one is enough
FEWEST_STEPS = 100  # of a run that learns anything
FLOAT16_EPS = 2.5e-4  # the root of float16's smallest number
MOST_ROWS = 2**31 - 1  # ids are int32
PRODUCTS_PER_THREAD = 1 << 20  # of a step on the CPU; with fewer, threads cost more than they gain
IDS_AT_ONCE = 1 << 22  # ids that a thread copies to the GPU at a time


@dataclass(frozen=True, kw_only=True)
class Plan(Task):
    """What a run will use, and why.

    `ids`, `text` and `paging`, which take time and GPU memory, are made when they are first used.
    """

    reason: str  # why this engine
    slots: int  # rows of paged tables that the GPU has room for
    budget: Budget
    chosen: dict[str, str]  # for `auto`, by key: what, and why

    def log(self) -> None:
        """Log the plan; its details are shown by -v."""
        log.info(self.describe())
        log.debug(f"{self.budget}\nsaving    {self.budget.saving}")

    def describe(self) -> str:
        """Return what the run does, in at most nine lines; choose the paging."""
        model, optimizer, train = self.config.model, self.config.optimizer, self.config.train
        record = " + ".join(["weight", *self.optimizer.states(model.vector_size)])
        text = [
            f"{self.config.corpus.path}: {self.corpus.raw_words:,} words in "
            f"{len(self.corpus.offsets) - 1:,} sentences; {self.words:,} kept of "
            f"{self.vocab.raw_types:,} distinct (min_count {self.config.vocab.min_count})",
            self.corpus.tokenized,
            self.corpus.phrases,
        ]
        step = [optimizer.name, f"lr {optimizer.lr:g}", optimizer.schedule]
        step += [f"{name} {value}" for name, value in optimizer.args.items()]
        step += [f"batches of {train.batch_size:,}", f"{train.epochs} epochs"]
        kernels = [KERNELS[self.kernels], f"precision {train.precision}"]
        kernels.append("" if self.optimizer.formula else "steps by torch")
        kernels.append("CBOW" if model.architecture == "cbow" else "")
        kernels.append("hierarchical softmax" if model.hs else "")
        rows = f"{self.ranks.shard_rows(self.words):,} rows of a table"
        shards = f"{self.ranks.size}, each with {rows}"
        size = f"2 x {self.words:,} x {model.vector_size}"
        lines = {
            "machine": str(self.machine),
            "corpus": "; ".join(filter(None, text)),
            "tables": f"{size}: {record}: {format_bytes(self.table_bytes)}",
            "ranks": f"{shards}{self._describe_gain()}" if self.ranks.size > 1 else "",
            "optimizer": ", ".join(step),
            "kernels": ", ".join(filter(None, kernels)),
            "engine": f"{self.engine} on {self.device}: {self.reason}{self._describe_paging()}",
            "memory": self.budget.totals,
            "auto": "; ".join(f"{key.split('.')[1]} {why}" for key, why in self.chosen.items()),
        }
        return "\n".join(f"{name:9} {line}" for name, line in lines.items() if line)

    @property
    def is_paged(self) -> bool:
        """Whether some rows have no room on the GPU."""
        return self.is_hosted and self.slots < 2 * self.shape.stride

    @cached_property
    def ids(self) -> np.ndarray | Tensor:
        """The ids of the text, on the GPU if there is room; else where they are."""
        ids_N = self.corpus.ids
        if not self.ids_on_gpu:
            return ids_N
        on_gpu = torch.empty(len(ids_N), dtype=torch.int32, device=self.device)

        def copy(start: int) -> None:
            part = np.array(ids_N[start : start + IDS_AT_ONCE])
            on_gpu[start : start + len(part)] = torch.from_numpy(part)

        on_threads(copy, range(0, len(ids_N), IDS_AT_ONCE), torch.get_num_threads())
        return on_gpu

    @cached_property
    def text(self) -> TrainingText:
        """The text and the distributions that batches are drawn from."""
        model = self.config.model
        counts_V = self.vocab.counts
        tree = None
        if model.hs:
            from w2v.model.huffman import make_tree  # numba takes half a second

            tree = make_tree(counts_V, first_row=len(counts_V) if model.negative else 0)
        return TrainingText(
            ids_N=self.ids,
            offsets_S=self.corpus.offsets,
            keep_V=self.vocab.keep_probabilities(model.sample),
            negative_prob_V=negative_distribution(counts_V, model.ns_exponent),
            held_out=heldout.choose(self.corpus.offsets, self.config.train.held_out_words),
            tree=tree,
        )

    @cached_property
    def paging(self) -> Paging:
        """Steps that share a page, and the lookahead window."""
        transfer = self.config.transfer
        if not self.is_paged or not self.slots:
            # With all rows on the GPU, long pages cost nothing and save CPU time. But where torch
            # steps, the gradients of all batches of a page are kept.
            is_long = self.slots > 0 and self.has_own_step
            return Paging(transfer.steps_per_page or (MOST_STEPS if is_long else 1))
        # Batches of all ranks are drawn, to count how many of them find room in the caches.
        kernels = make_kernels(self)
        sampler = make_sampler(self, kernels, SINGLE, lookahead=0)
        zeros_TV = torch.zeros(2, self.rows, dtype=torch.bool, device=self.device)
        slots = self.ranks.size * self.slots
        steps = transfer.steps_per_page
        paging, marks_TV = choose_paging(sampler.epoch(), kernels, zeros_TV, slots, steps)
        # Several ranks do not look ahead: each would need the others' text. Nor does hierarchical
        # softmax, as the text does not name its nodes.
        looks_ahead = transfer.lookahead and self.ranks.size == 1 and not self.config.model.hs
        if not looks_ahead or marks_TV is None:
            return paging
        words = chunk_words(self.config.train.batch_size)
        chunks = choose_lookahead(self.ids, words, marks_TV, self.slots)
        return paging._replace(lookahead=chunks)

    def _describe_gain(self) -> str:
        """Return how fast several GPUs are beside one, as measured with two."""
        if self.kernels != "cuda":
            return ""
        batch = self.config.train.batch_size
        if self.is_paged and batch < auto.LARGEST:
            return "; with such batches paging was not measured: one GPU may be as fast"
        alone = replace(self.budget.task, engine="resident", ranks=SINGLE)
        if not self.is_paged and "gpu" in self.budget.lacking(alone):
            return "; one GPU would have to page rows"
        gain = TWO_OVER_ONE_PAGED
        if not self.is_paged:
            sizes, gains = zip(*TWO_OVER_ONE, strict=True)
            gain = float(np.interp(math.log2(batch), np.log2(sizes), gains))
        text = f"; with such batches 2 GPUs are about {gain:.1f} times as fast as one"
        if gain < LEAST_GAIN:
            text += f": one is enough, several gain with train.batch_size={auto.LARGEST} or more"
        return text

    def _describe_paging(self) -> str:
        """Return the size of the cache, of a page and of the lookahead window."""
        if not self.is_hosted:
            return ""
        text = f"; cache of {self.slots:,} rows there, steps_per_page={self.paging.steps}"
        if self.paging.lookahead:
            window = self.paging.lookahead * chunk_words(self.config.train.batch_size)
            text += f", lookahead window of {window:,} words"
        return text


# Before the plan: ranks, text, and what they must have in common.


def join_ranks(config: Config) -> Ranks:
    """Join the ranks that torchrun has started, with a share of the cores."""
    if not launcher.started():
        return SINGLE
    launcher.require_environment()
    if torch.cuda.is_available():  # before anything else takes memory of the first GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    ranks = ProcessGroup(choose_device(config, Machine.here()).type)
    torch.set_num_threads(max(1, cores() // ranks.local_size))
    return ranks


def open_together(config: Config, ranks: Ranks, checked: bool = False) -> tuple[Vocab, Corpus]:
    """Open the corpus on all ranks; rank 0 encodes it if necessary."""
    with ranks.reraise():
        opened = open_corpus(config, checked) if ranks.rank == 0 else None
    return opened or open_corpus(config)  # the others find it in the cache


def common_facts(config: Config) -> dict[str, Any]:
    """Return what all ranks must have in common."""
    program = f"{w2v.__version__} ({git_commit()})"
    facts = {"the program's version": program, "torch": torch.__version__}
    return facts | w2v.config.flat_config(config)


# Decide, in this order.


def make_plan(
    config: Config,
    opened: tuple[Vocab, Corpus] | None = None,
    run: Path | None = None,
    ranks: Ranks = SINGLE,
) -> Plan:
    """Decide where and how to train.

    `opened` is the corpus, if it is open. `run` is the folder of a run that is resumed: the disk
    space of its old checkpoints counts as free. Raises `ConfigError` if this machine cannot do what
    is asked for.
    """
    machine = Machine.here(ranks)
    # This refuses what cannot be paged or computed, before anything is read.
    kernels = choose_kernels(config, machine, ranks)
    vocab, corpus = opened or open_together(config, ranks)
    task = Task(
        config=config,
        machine=machine,
        vocab=vocab,
        corpus=corpus,
        optimizer=RowOptimizer(config.optimizer),
        device=choose_device(config, machine),
        kernels=kernels,
        ranks=ranks,
    )
    check_rows(task)
    plan = plan_task(task, run)
    check_cache(plan)
    while plan.is_paged and plan.slots:
        size = plan.config.train.batch_size
        fits = fitting_batch_size(plan, ranks.size * plan.slots)
        if fits == size:
            break
        few = f"has room for {plan.slots:,} rows, too few for a batch of {size:,}"
        log.warning(f"transfer.gpu_bytes {few}: using train.batch_size={fits}")
        # Planned again, so that automatic settings suit the smaller batch.
        smaller = replace(config, train=replace(config.train, batch_size=fits))
        plan = plan_task(replace(task, config=smaller), run)
    # Not before the plan is final, or a warning would be repeated.
    warn_of_machine(plan)
    # A resumed run keeps its batch size, given or chosen: its user cannot change it any more.
    warn_of_settings(plan, batch_is_given=config.train.batch_size > 0 and run is None)
    return plan


def plan_task(task: Task, run: Path | None) -> Plan:
    """Choose what is `auto`, the engine, and the capacity of its cache."""
    sentences = len(task.corpus.offsets) - 1
    kernels = task.kernels if task.has_own_step else "reference"
    gpus = task.ranks.size if task.on_gpu else 1
    config, chosen = auto.choose(task.config, task.vocab, kernels, sentences, gpus)
    optimizer = RowOptimizer(config.optimizer)
    centers = float(task.vocab.kept_counts(config.model.sample).sum())
    task = replace(task, config=config, optimizer=optimizer, centers=centers)
    budget = make_budget(task, run)
    engine, reason = choose_engine(budget)
    task = replace(task, engine=engine)
    budget = replace(budget, task=task)
    # All ranks page alike, with the smallest cache that any can have.
    slots = min(task.ranks.all_gather(budget.slots))
    plan = Plan(**vars(task), reason=reason, slots=slots, budget=budget, chosen=chosen)
    config, shared = auto.share_negatives(config, plan.is_paged)
    return replace(plan, config=config, chosen=chosen | shared)


def choose_device(config: Config, machine: Machine) -> torch.device:
    """Return where steps are computed."""
    wanted = config.train.device
    if wanted == "cuda" and not machine.gpu:
        why = "no usable NVIDIA GPU" if machine.cuda_torch else "this torch is a CPU build"
        remedy = "set train.device=cpu, or run `make setup` where nvidia-smi works"
        raise ConfigError(f"train.device=cuda, but {why}; {remedy}")
    return torch.device("cuda" if wanted != "cpu" and machine.gpu else "cpu")


def choose_kernels(config: Config, machine: Machine, ranks: Ranks = SINGLE) -> str:
    """Return the name of the kernels, one of `KERNELS`.

    On the CPU, fused kernels are numba's, for one rank and float32. On a GPU they are CUDA's, which
    add gradients in no fixed order, and so are not for runs that must repeat bit for bit.
    """
    train = config.train
    optimizer = RowOptimizer(config.optimizer)
    obstacle = ""
    if choose_device(config, machine).type == "cpu":
        if ranks.size > 1:
            obstacle = f"numba's kernels are for one rank, and there are {ranks.size}"
        elif train.precision != "float32":
            obstacle = f"train.precision={train.precision} is plain torch's on the CPU"
        fused = "sequential" if optimizer.is_plain_sgd else "cpu"
    else:
        if not machine.cuda_cupy:
            obstacle = "CuPy cannot be imported"
        elif train.deterministic:
            obstacle = "they sum in no fixed order, which train.deterministic=true forbids"
        elif ranks.size > 1 and not optimizer.formula:
            steps = f"optimizer.name={config.optimizer.name} with these args is stepped by torch"
            obstacle = f"{steps}, and there are {ranks.size} ranks"
        fused = "cuda"
    if train.kernels == "fused" and obstacle:
        raise ConfigError(f"train.kernels=fused, but {obstacle}; set train.kernels=auto")
    if obstacle or train.kernels == "reference":
        return "reference"
    size = config.model.vector_size
    if fused == "cuda" and config.model.architecture == "cbow" and size > MOST_CBOW_DIM:
        most = f"more than the {MOST_CBOW_DIM:,} of the GPU's kernel for CBOW"
        remedy = "set train.kernels=reference, which is slower, or train.device=cpu"
        raise ConfigError(f"model.vector_size={size} is {most}; {remedy}")
    return fused


def check_rows(task: Task) -> None:
    """Raise `ConfigError` if there are too many rows to number, or too few."""
    words = task.words
    if task.rows > MOST_ROWS:
        many = f"{words:,} words need {task.rows:,} rows, more than {MOST_ROWS:,}"
        remedy = f"set vocab.max_final_vocab={MOST_ROWS * words // task.rows}"
        least = task.config.vocab.min_count
        raise ConfigError(f"{many}; {remedy} or raise vocab.min_count={least}")
    if not task.ranks.shard_rows(words):
        few = f"{words} words are too few for {task.ranks.size} ranks"
        raise ConfigError(f"{few}, of which each holds some; start fewer")


def check_cache(plan: Plan) -> None:
    """Raise `ConfigError` if the GPU memory for rows has no room for one."""
    gpu_bytes = plan.config.transfer.gpu_bytes
    if plan.is_hosted and not plan.slots and re.search("[1-9]", gpu_bytes):
        row = format_bytes(plan.record_bytes)
        remedy = "give 0, or a size with its unit such as 20GiB or 50%"
        raise ConfigError(
            f"transfer.gpu_bytes={gpu_bytes} has no room for a row of {row}; {remedy}"
        )


def make_budget(task: Task, run: Path | None) -> Budget:
    """Return what the run needs, and what is free for it."""
    machine = task.machine
    # A resumed run removes its old checkpoints as it writes new ones.
    saved = (run / "checkpoints").rglob("*.safetensors") if run else ()
    old_bytes = sum(file.stat().st_size for file in saved)
    free = {
        "host": machine.host_free_bytes,
        "locked": machine.lockable_bytes,
        "gpu": machine.gpu_free_bytes,
        "disk": free_disk_bytes(Path(task.config.run.dir)) + old_bytes,
        "files": free_disk_bytes(Path(task.config.transfer.table_dir)),
    }
    return Budget(task, free)


def choose_engine(budget: Budget) -> tuple[str, str]:
    """Return the engine's name and the reason for it.

    The budget is that of resident tables.
    """
    task = budget.task
    machine = task.machine
    wanted, folder = task.config.transfer.engine, task.config.transfer.table_dir
    if not task.on_gpu:
        if wanted in STORAGE:
            pages = f"transfer.engine={wanted} pages rows onto a GPU, but the run is on the CPU"
            raise ConfigError(f"{pages}; set transfer.engine=resident")
        return "resident", "the CPU computes where the tables are"
    if wanted == "mapped" and not machine.cuda_cupy:
        missing = "transfer.engine=mapped needs CuPy, which cannot be imported"
        raise ConfigError(f"{missing}; {machine.install_cupy}, or set transfer.engine=staged")
    if folder and wanted in ("mapped", "resident"):
        remedy = "set transfer.engine=staged or transfer.table_dir="
        raise ConfigError(f"transfer.engine={wanted} cannot read tables in files; {remedy}")
    if folder:
        return "staged", f"tables in files in {folder}"
    free = format_bytes(machine.gpu_free_bytes)
    tables = f"tables of {format_bytes(task.table_bytes)}"
    fit = f"{tables}, {free} free on the GPU"
    room = task.cache_bytes
    is_paged = room is not None and room < task.table_bytes
    if is_paged and wanted == "resident":
        both = f"transfer.engine=resident and transfer.gpu_bytes={task.config.transfer.gpu_bytes}"
        raise ConfigError(f"{both} exclude each other, as rows are paged then; leave one out")
    if wanted in ("resident", "staged"):
        return wanted, "as configured"
    if is_paged:
        fit = f"{tables}, {format_bytes(room)} for rows on the GPU"
    elif wanted == "auto" and "gpu" not in budget.lacking(task):
        return "resident", f"{fit}; force paging with transfer.gpu_bytes=50%"
    if not machine.cuda_cupy:
        return "staged", f"{fit}, so rows are copied from CPU memory, through the CPU without CuPy"
    if "locked" in budget.lacking(replace(task, engine="mapped")):
        few = f"only {format_bytes(machine.lockable_bytes)} of memory may be locked"
        return "staged", f"{fit}, and {few}"
    return "mapped", "as configured" if wanted == "mapped" else f"{fit}, so rows are paged"


def warn_of_machine(plan: Plan) -> None:
    """Warn of what a machine with a GPU lacks, so that the run is slow."""
    machine = plan.machine
    transfer = plan.config.transfer
    if not plan.on_gpu:
        return
    if not machine.cuda_cupy:
        missing = "CuPy cannot be imported, so neither the fused kernels nor transfer.engine=mapped"
        log.warning(f"{missing} can be used; {machine.install_cupy}")
        return
    if machine.cuda_cupy.split(".")[0] != machine.cuda_torch.split(".")[0]:
        differ = f"torch is built for CUDA {machine.cuda_torch}, CuPy for {machine.cuda_cupy}"
        log.warning(f"{differ}: kernels may fail to load; {machine.install_cupy} instead")
    if plan.engine == "staged" and transfer.engine != "staged" and not transfer.table_dir:
        raise_limit = "ulimit -l, or --ulimit memlock=-1 for a container"
        log.warning(f"{plan.reason} ({raise_limit}): using transfer.engine=staged, which is slower")


def warn_of_settings(task: Task, batch_is_given: bool) -> None:
    """Warn of settings with which a run is slow or learns little."""
    train = task.config.train
    size = train.batch_size
    steps = train.epochs * task.centers / size
    if batch_is_given and task.kernels != "sequential" and steps < FEWEST_STEPS:
        remedy = "set train.batch_size=auto" if size > 1 else "more text is needed"
        few = f"{steps:.0f} optimizer steps, too few to learn from"
        log.warning(f"train.batch_size={size} leaves {few}; {remedy}")
    eps = task.optimizer.arguments.get("eps", FLOAT16_EPS)
    if train.precision == "fp16" and eps < FLOAT16_EPS:
        log.warning(
            "train.precision=fp16 rounds squared gradients under 6e-8 to 0, and "
            f"{task.config.optimizer.name} then divides by its eps, {eps:g}; set "
            f"optimizer.args.eps={FLOAT16_EPS:g} or more, or train.precision=bf16"
        )
    if task.kernels == "cuda" and train.precision == "amp":
        unused = "train.precision=amp changes nothing, as the fused kernels have no matrix products"
        log.warning(f"{unused}; leave it out, or set train.precision=bf16")
    if not task.on_gpu and train.precision != "float32":
        slow = f"train.precision={train.precision} on a CPU is plain torch's"
        log.warning(f"{slow}, about 60 times slower than float32; leave it out")
    if not task.on_gpu and task.ranks.size > 1:
        slow = f"{task.ranks.size} ranks without GPUs are slower than one process with all cores"
        log.warning(f"{slow}; leave out --gpus or torchrun")


# Build what was decided, in this order.


def build(plan: Plan, draws_vectors: bool = True) -> TrainingLoop:
    """Allocate the tables and make the objects of a run.

    Vectors begin as in word2vec.c: inputs uniform in +-0.5 / D, unless the caller sets them, and
    outputs zero.
    """
    if plan.config.train.deterministic:
        # cuBLAS repeats its bits only in a workspace of fixed size, set before its first use.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    inputs, outputs = make_tables(plan, draws_vectors)
    peers = find_peers(plan)
    kernels: Any = make_kernels(plan, peers)  # `ShardKernels` or peers' where the exchange needs it
    sampler = make_sampler(plan, kernels, plan.ranks, plan.paging.lookahead)
    planning = torch.cuda.Stream(plan.device, priority=-1) if plan.on_gpu else None
    state = StepState(plan.device)
    engine = make_engine(plan, [inputs, outputs])
    steps = plan.paging.steps
    exchange: Exchange = LocalExchange(kernels, steps)
    if peers:
        exchange = PeerExchange(kernels, steps, state, peers, engine.page())
    elif plan.ranks.size > 1:
        exchange = RankExchange(kernels, steps, state, plan.ranks, plan.shape, planning)
    step = TrainingStep(inputs, outputs, kernels, engine, exchange, plan.optimizer, state, planning)
    return_freed_memory()
    if not (plan.on_gpu or plan.has_own_step):
        reuse_freed_memory()
    return TrainingLoop(plan.config, sampler, step)


def make_tables(plan: Plan, draws_vectors: bool) -> tuple[Table, Table]:
    """Return this rank's rows of both tables, with drawn vectors or zeros."""
    size = plan.config.model.vector_size
    dtype = plan.shape.dtype
    states = plan.optimizer.states(size)
    rows = plan.ranks.shard_rows(plan.shape.rows)
    width = record_width(size, states, dtype.itemsize, plan.alignment)
    storage: Storage = "cuda" if plan.on_gpu else "cpu"
    if plan.is_hosted:
        storage = STORAGE[plan.engine]
    memory: Sequence[Tensor | None] = (None, None)
    if folder := plan.config.transfer.table_dir:
        Path(folder).mkdir(parents=True, exist_ok=True)
        memory = [nameless_records(folder, rows, width, dtype) for _ in range(2)]
    elif storage == "pinned" and plan.paging.lookahead:
        # Both rows of a word then move at much the same time, so they lie side by side.
        memory = side_by_side(2, rows, width, dtype).unbind()

    def table(name: str, memory_VR: Tensor | None) -> Table:
        layout = rows, size, states, plan.optimizer.scalars, storage, dtype
        return Table(name, *layout, alignment=plan.alignment, memory_VR=memory_VR)

    inputs, outputs = map(table, ("input", "output"), memory)
    if not draws_vectors:
        return inputs, outputs
    values = uniform(size, 0.5 / size, plan.config.train.seed)
    threads = 1 if storage == "cuda" else torch.get_num_threads()  # a GPU fills by itself
    # Memory of rows that no word uses is not touched, so a CPU does not provide it.
    words = plan.ranks.shard_rows(plan.words)
    inputs.initialise(
        lambda rows_n: values(plan.ranks.global_rows(rows_n)), plan.device, threads, last_row=words
    )
    return inputs, outputs


def find_peers(plan: Plan) -> PeerMemory | None:
    """Return the memory of all ranks' GPUs, if ranks can read each other's."""
    is_in_place = plan.slots or not plan.is_hosted  # records have one address in all pages
    if plan.ranks.size == 1 or plan.kernels != "cuda" or not is_in_place:
        return None
    peers = PeerMemory(plan.ranks)
    why = peers.obstacle(plan.device)
    log.info(f"ranks send rows by NCCL: {why}" if why else "ranks read each other's memory")
    return None if why else peers


def make_kernels(plan: Plan, peers: PeerMemory | None = None) -> Kernels:
    """Return the kernels of the plan; those for peers if there are some."""
    if peers:
        model = plan.config.model
        centers = -(-plan.config.train.batch_size // plan.ranks.size)
        depth = plan.text.tree.depth if plan.text.tree else 0
        negatives = model.distinct_negatives(centers)
        most = max_rows(centers, negatives, model.window, depth, plan.words)
        return CudaPeerKernels(plan.shape, most, plan.paging.steps, plan.is_hosted)
    if plan.kernels == "cuda":
        if plan.ranks.size > 1:
            return CudaShardKernels(plan.shape)
        return (CudaKernels if plan.optimizer.formula else TorchStepKernels)(plan.shape)
    if plan.kernels == "reference":
        return ReferenceKernels(plan.shape, PRODUCT_TYPES.get(plan.config.train.precision))
    from w2v.kernels.cpu import CpuKernels, SequentialSgdKernels  # numba takes half a second

    # Threads overtake each other in sequential SGD, so that only one is deterministic.
    if plan.kernels == "sequential":
        one = plan.config.train.deterministic
        return SequentialSgdKernels(plan.shape, 1 if one else useful_threads(plan.config))
    return CpuKernels(plan.shape, useful_threads(plan.config))


def useful_threads(config: Config) -> int:
    """Return how many of torch's threads the steps of a run keep busy."""
    model = config.model
    pairs = config.train.batch_size * model.window * (1 + model.negative)
    return max(1, min(torch.get_num_threads(), pairs * model.vector_size // PRODUCTS_PER_THREAD))


def make_sampler(plan: Plan, kernels: Kernels, ranks: Ranks, lookahead: int) -> Sampler:
    """Return a sampler of a rank's share of the text, by the plan's settings."""
    train = plan.config.train
    return Sampler(
        plan.text,
        plan.config.model,
        train.batch_size,
        train.seed,
        plan.device,
        rank=ranks.rank,
        world_size=ranks.size,
        lookahead=lookahead,
        block_words=train.block_words,
        draw=kernels.draw,
        subsample=kernels.subsample,
        draws_in_thread=plan.kernels in ("cpu", "sequential") and useful_threads(plan.config) > 1,
    )


def make_engine(plan: Plan, tables: list[Table]) -> Engine:
    """Return the engine of the plan."""
    if not plan.is_hosted:
        return Engine(tables)
    link = link_between(tables[0], plan.device)
    if not plan.slots:
        return Paged(link, tables, plan.device)
    uses_TV = expected_uses(plan)
    if isinstance(link, MappedLink):
        return MappedCache(tables, plan.slots, plan.device, uses_TV)
    return TorchCache(link, tables, plan.slots, plan.device, uses_TV)


def expected_uses(plan: Plan) -> Tensor:
    """Return the expected uses of this rank's rows an epoch: float64 [2, V]."""
    model = plan.config.model
    kept_V = plan.vocab.kept_counts(model.sample)
    words = len(kept_V)
    uses_TV = np.zeros((2, plan.shape.rows))
    uses_TV[0, :words] = kept_V
    if model.negative:
        uses_TV[1, :words] = kept_V
    if model.negative and not plan.paging.lookahead:
        # With lookahead, both rows of a word have the same rank, so that they move together.
        uses_TV[1, :words] += plan.text.negative_prob_V * (model.negative * kept_V.sum())
    if tree := plan.text.tree:  # a node is used by all words below it
        uses_P = np.repeat(kept_V, np.diff(tree.begin_V.numpy()))
        uses_TV[1] += np.bincount(tree.nodes_P.numpy(), uses_P, minlength=plan.shape.rows)
    return torch.from_numpy(uses_TV[:, plan.ranks.rank :: plan.ranks.size].copy()).to(plan.device)


def make_heldout(plan: Plan) -> HeldOut | None:
    """Return the held-out sentences; None if there are none."""
    text = replace(plan.text, ids_N=plan.corpus.ids)
    return HeldOut(text, plan.config.model, plan.device) if len(text.held_out) else None
