"""Decide how a run trains; the plan is data, from which `build` makes it.

A choice that this machine does not have is a `ConfigError` with the remedy; a slower one that takes
its place is a warning.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import w2v
from w2v.config import Config, ConfigError, flat_config
from w2v.distributed import launcher
from w2v.distributed.ranks import SINGLE, ProcessGroup, Ranks
from w2v.rows.launch import INSTALL_CUPY
from w2v.rows.moves import MOST_ROWS
from w2v.rows.optim import RowOptimizer
from w2v.system.process import cores, git_commit
from w2v.system.resources import format_bytes, free_disk_bytes
from w2v.text import open_corpus
from w2v.text.corpus import Corpus
from w2v.text.vocab import Vocab
from w2v.training.memory import Machine, Plan, fitting_batch_size
from w2v.word2vec import auto
from w2v.word2vec.cuda import MOST_CBOW_DIM
from w2v.word2vec.subwords import Subwords

log = logging.getLogger("w2v")
KERNELS = {  # as the plan names them
    "reference": "plain torch",
    "cpu": "compiled by numba",
    "sequential": "compiled by numba, each center a step of its own",
    "cuda": "fused",
}
ENGINES = "resident", "mapped", "staged"  # by what they need of a machine, most first
FEWEST_STEPS = 100  # of a run that learns anything
LEAST_OF_GPUS = 16_384  # centers of a step that several GPUs train faster than one
SHOWN_PHRASES = 3  # examples
FLOAT16_EPS = 2.5e-4  # the root of float16's smallest number


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


def open_together(config: Config, ranks: Ranks) -> tuple[Vocab, Corpus]:
    """Open the corpus on all ranks; rank 0 encodes it if necessary."""
    opened = None
    with ranks.reraise():
        if ranks.rank == 0:
            opened = open_corpus(config)
    return opened or open_corpus(config)  # the others find it in the cache


def common_facts(config: Config) -> dict[str, Any]:
    """Return what all ranks must have in common."""
    program = f"{w2v.__version__} ({git_commit()})"
    facts = {"the program's version": program, "torch": torch.__version__}
    return facts | flat_config(config)


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
    with ranks.reraise():
        machine = Machine.here(ranks)
        # This refuses what cannot be computed, before anything is read.
        kernels = choose_kernels(config, machine, ranks)
    ranks.require_equal({"the choice of kernels": kernels}, "set train.kernels=reference")
    if "fasttext" in config.run.formats and not (config.model.subwords and config.model.negative):
        needs = "model.subwords=true and model.negative above 0"
        raise ConfigError(f"run.formats={config.run.formats} needs {needs}")
    vocab, corpus = opened or open_together(config, ranks)
    given = Plan(
        config=config,
        machine=machine,
        vocab=vocab,
        corpus=corpus,
        optimizer=RowOptimizer(config.optimizer),
        device=choose_device(config, machine),
        kernels=kernels,
        ranks=ranks,
        free=free_bytes(config, machine, run),
    )
    check_rows(given)
    plan = resolve(given)
    check_cache(plan)
    while plan.is_paged:
        size = plan.config.train.batch_size
        fits = fitting_batch_size(plan, ranks.size * plan.slots)
        if fits == size:
            break
        few = f"has room for {plan.slots:,} rows, too few for a batch of {size:,}"
        if run:  # whose position in the text is counted in batches
            raise ConfigError(f"transfer.gpu_bytes {few}, which a resumed run keeps; raise it")
        log.warning(f"transfer.gpu_bytes {few}: using train.batch_size={fits}")
        # Planned again, so that automatic settings suit the smaller batch.
        smaller = replace(config, train=replace(config.train, batch_size=fits))
        plan = resolve(replace(given, config=smaller))
    # Not before the plan is final, or a warning would be repeated.
    warn_of_machine(plan)
    # A resumed run keeps its batch size, given or chosen: its user cannot change it any more.
    warn_of_settings(plan, batch_is_given=config.train.batch_size > 0 and run is None)
    return plan


def resolve(plan: Plan) -> Plan:
    """Choose what is `auto`, the engine, and the capacity of its cache."""
    kernels = plan.kernels if plan.has_own_step else "reference"
    gpus = plan.ranks.size if plan.on_gpu else 1
    sentences = len(plan.corpus.offsets) - 1
    config, chosen = auto.choose(plan.config, plan.vocab, kernels, sentences, gpus)
    centers = float(plan.vocab.kept_counts(config.model.sample).sum())
    optimizer = RowOptimizer(config.optimizer)
    plan = replace(plan, config=config, optimizer=optimizer, centers=centers)
    if (model := config.model).subwords and not plan.subwords:
        limits = model.min_n, model.max_n, model.buckets
        plan = replace(plan, subwords=Subwords.of(plan.vocab.words, limits, plan.vectors))
        check_rows(plan)
    # All ranks page alike: as the one with the least room, and with the smallest cache.
    with plan.ranks.reraise():
        choice = choose_engine(plan)
    choices = plan.ranks.all_gather(choice)
    engine, reason = max(choices, key=lambda choice: ENGINES.index(choice[0]))
    plan = replace(plan, engine=engine, reason=reason)
    plan = replace(plan, slots=min(plan.ranks.all_gather(plan.capacity())))
    config, shared = auto.share_negatives(config, plan.is_paged)
    return replace(plan, config=config, chosen=chosen | shared)


def choose_device(config: Config, machine: Machine) -> torch.device:
    """Return where steps are computed."""
    wanted = config.train.device
    if wanted == "cpu" or not (machine.gpu or wanted == "cuda"):
        return torch.device("cpu")
    if machine.gpu:
        return torch.device("cuda")
    why = "no usable NVIDIA GPU" if machine.cuda_torch else "this torch is a CPU build"
    remedy = "set train.device=cpu, or run `make setup` where nvidia-smi works"
    raise ConfigError(f"train.device=cuda, but {why}; {remedy}")


def choose_kernels(config: Config, machine: Machine, ranks: Ranks = SINGLE) -> str:
    """Return the name of the kernels, one of `KERNELS`.

    On the CPU, fused kernels are numba's, for float32. On a GPU they are CUDA's, which
    add gradients in no fixed order, and so are not for runs that must repeat bit for bit.
    """
    train = config.train
    optimizer = RowOptimizer(config.optimizer)
    obstacle = ""
    if choose_device(config, machine).type == "cpu":
        if train.precision != "float32":
            obstacle = f"train.precision={train.precision} needs plain torch on the CPU"
        fused = "cpu"
        if optimizer.is_plain_sgd and ranks.size == 1 and not config.model.subwords:
            fused = "sequential"
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


def free_bytes(config: Config, machine: Machine, run: Path | None) -> dict[str, float]:
    """Return the bytes that are free for a run, by place."""
    disk = free_disk_bytes(Path(config.run.dir))
    if run:  # a resumed run removes its old checkpoints as it writes new ones
        disk += sum(file.stat().st_size for file in run.glob("checkpoints/**/*.safetensors"))
    return {
        "host": machine.host_free_bytes,
        "locked": machine.lockable_bytes,
        "gpu": machine.gpu_free_bytes,
        "disk": disk,
        "files": free_disk_bytes(Path(config.transfer.table_dir)),
    }


def check_rows(plan: Plan) -> None:
    """Raise `ConfigError` if there are too many rows to number, or too few."""
    words = plan.words
    rows = plan.shape.rows
    if rows > MOST_ROWS:
        many = f"{words:,} words need {rows:,} rows, more than {MOST_ROWS:,}"
        remedy = f"set vocab.max_final_vocab={MOST_ROWS * words // rows}"
        least = plan.config.vocab.min_count
        raise ConfigError(f"{many}; {remedy} or raise vocab.min_count={least}")
    if words < plan.ranks.size:
        few = f"{words} words are too few for {plan.ranks.size} ranks"
        raise ConfigError(f"{few}, of which each holds some; start fewer")


def check_cache(plan: Plan) -> None:
    """Raise `ConfigError` if the GPU memory for rows has no room for one."""
    gpu_bytes = plan.config.transfer.gpu_bytes
    is_small = plan.cache_bytes is not None and plan.cache_bytes < plan.record_bytes
    if plan.is_hosted and is_small and re.search("[1-9]", gpu_bytes):  # 0 has none on purpose
        row = format_bytes(plan.record_bytes)
        remedy = "give 0, or a size with its unit such as 20GiB or 50%"
        raise ConfigError(
            f"transfer.gpu_bytes={gpu_bytes} has no room for a row of {row}; {remedy}"
        )


def choose_engine(plan: Plan) -> tuple[str, str]:
    """Return the engine for a plan, which has none yet, and the reason."""
    machine = plan.machine
    transfer = plan.config.transfer
    wanted, folder = transfer.engine, transfer.table_dir
    if not plan.on_gpu:
        if wanted in ("mapped", "staged"):
            pages = f"transfer.engine={wanted} pages rows onto a GPU, but the run is on the CPU"
            raise ConfigError(f"{pages}; set transfer.engine=resident")
        return "resident", "the CPU computes where the tables are"
    if wanted == "mapped" and not machine.cuda_cupy:
        missing = "transfer.engine=mapped needs CuPy, which cannot be imported"
        raise ConfigError(f"{missing}; {INSTALL_CUPY}, or set transfer.engine=staged")
    if folder and wanted in ("mapped", "resident"):
        remedy = "set transfer.engine=staged or transfer.table_dir="
        raise ConfigError(f"transfer.engine={wanted} cannot read tables in files; {remedy}")
    if folder:
        return "staged", f"tables in files in {folder}"
    room = plan.cache_bytes
    is_paged = room is not None and room < plan.table_bytes
    if is_paged and wanted == "resident":
        both = f"transfer.engine=resident and transfer.gpu_bytes={transfer.gpu_bytes}"
        raise ConfigError(f"{both} exclude each other, as rows are paged then; leave one out")
    if wanted in ("resident", "staged"):
        return wanted, "as configured"
    fit = f"tables of {format_bytes(plan.table_bytes)}"
    if room is not None and is_paged:
        fit += f", {format_bytes(room)} for rows on the GPU"
    else:
        fit += f", {format_bytes(machine.gpu_free_bytes)} free on the GPU"
    if wanted == "auto" and not is_paged and "gpu" not in plan.lacking():
        return "resident", f"{fit}; force paging with transfer.gpu_bytes=50%"
    if not machine.cuda_cupy:
        return "staged", f"{fit}, so rows are copied from CPU memory, through the CPU without CuPy"
    if "locked" in replace(plan, engine="mapped").lacking():
        few = f"only {format_bytes(machine.lockable_bytes)} of memory may be locked"
        return "staged", f"{fit}, and {few}"
    if wanted == "mapped":
        return "mapped", "as configured"
    return "mapped", f"{fit}, so rows are paged"


# Warn.


def warn_of_machine(plan: Plan) -> None:
    """Warn of what a machine with a GPU lacks, so that the run is slow."""
    machine = plan.machine
    transfer = plan.config.transfer
    if not plan.on_gpu:
        return
    if not machine.cuda_cupy:
        missing = "CuPy cannot be imported, so neither the fused kernels nor transfer.engine=mapped"
        log.warning(f"{missing} can be used; {INSTALL_CUPY}")
        return
    if machine.cuda_cupy.split(".")[0] != machine.cuda_torch.split(".")[0]:
        differ = f"torch is built for CUDA {machine.cuda_torch}, CuPy for {machine.cuda_cupy}"
        log.warning(f"{differ}: kernels may fail to load; {INSTALL_CUPY} instead")
    if plan.engine == "staged" and transfer.engine != "staged" and not transfer.table_dir:
        raise_limit = "ulimit -l, or --ulimit memlock=-1 for a container"
        log.warning(f"{plan.reason} ({raise_limit}): using transfer.engine=staged, which is slower")


def warn_of_settings(plan: Plan, batch_is_given: bool) -> None:
    """Warn of settings with which a run is slow or learns little."""
    train, model = plan.config.train, plan.config.model
    for name in ("min_n", "max_n", "buckets"):
        if getattr(model, name) > 0 and not model.subwords:
            log.warning(f"model.{name} has no effect without model.subwords=true")
    size = train.batch_size
    steps = train.epochs * plan.centers / size
    if batch_is_given and plan.kernels != "sequential" and steps < FEWEST_STEPS:
        remedy = "set train.batch_size=auto" if size > 1 else "more text is needed"
        few = f"{steps:.0f} optimizer steps, too few to learn from"
        log.warning(f"train.batch_size={size} leaves {few}; {remedy}")
    eps = plan.optimizer.arguments.get("eps", FLOAT16_EPS)
    if train.precision == "fp16" and eps < FLOAT16_EPS:
        log.warning(
            "train.precision=fp16 rounds squared gradients under 6e-8 to 0, and "
            f"{plan.config.optimizer.name} then divides by its eps, {eps:g}; set "
            f"optimizer.args.eps={FLOAT16_EPS:g} or more, or train.precision=bf16"
        )
    if plan.kernels == "cuda" and train.precision == "amp":
        unused = "train.precision=amp changes nothing, as the fused kernels have no matrix products"
        log.warning(f"{unused}; leave it out, or set train.precision=bf16")
    if not plan.on_gpu and train.precision != "float32":
        slow = f"train.precision={train.precision} on a CPU uses plain torch"
        log.warning(f"{slow}, about 60 times slower than float32; leave it out")
    if plan.ranks.size > 1 and not plan.on_gpu:
        slow = f"{plan.ranks.size} ranks without GPUs are slower than one process with all cores"
        log.warning(f"{slow}; leave out --gpus or torchrun")
    elif plan.ranks.size > 1 and plan.kernels == "cuda" and size < LEAST_OF_GPUS:
        slow = f"train.batch_size={size} is too small to be faster on {plan.ranks.size} GPUs"
        log.warning(f"{slow}; set train.batch_size={auto.LARGEST} or more, or use one GPU")


# Describe.


def describe(plan: Plan) -> str:
    """Return the plan in at most nine lines."""
    config = plan.config
    size = config.model.vector_size
    record = ", ".join(["weights", *plan.optimizer.states(size)])
    tables = f"2 tables of {plan.words:,} words x {size} numbers ({record})"
    takes = plan.takes()
    if plan.subwords:
        tables += f" and {plan.subwords.rows:,} of subwords"
    lines = {
        "machine": str(plan.machine),
        "corpus": _describe_text(plan),
        "tables": f"{tables}: {format_bytes(plan.table_bytes)}",
        "optimizer": _describe_steps(plan),
        "kernels": _describe_kernels(plan),
        "engine": f"tables {plan.engine} on {plan.device}: {plan.reason}",
        "memory": ", ".join(f"{place} {plan.total(place, n)}" for place, n in takes.items()),
        "auto": "; ".join(f"{key.split('.')[1]} {why}" for key, why in plan.chosen.items()),
    }
    if plan.is_hosted:
        lines["engine"] += f"; cache of {plan.slots:,} rows"
    if plan.ranks.size > 1:
        rows = plan.ranks.shard_rows(plan.words)
        lines["ranks"] = f"{plan.ranks.size}, each with {rows:,} rows of a table"
    return "\n".join(f"{name:9} {line}" for name, line in lines.items() if line)


def describe_bytes(plan: Plan) -> str:
    """Return a line for each place: bytes by purpose, sum, and what is free."""
    lines = []
    for place, parts in plan.takes().items():
        summed = " + ".join(f"{purpose} {format_bytes(n)}" for purpose, n in parts.items() if n)
        lines.append(f"{place:9} {summed} = {plan.total(place, parts)}")
    return "\n".join([*lines, f"saving    {_describe_saving(plan)}"])


def _describe_text(plan: Plan) -> str:
    corpus = plan.corpus
    size = f"{corpus.raw_words:,} words in {len(corpus.offsets) - 1:,} lines"
    kept = f"{plan.words:,} of {plan.vocab.raw_types:,} distinct words kept"
    kept += f" (min_count {plan.config.vocab.min_count})"
    parts = [f"{plan.config.corpus.paths}: {size}", kept, corpus.tokenized]
    is_joined = plan.config.corpus.phrases > 0
    if phrases := [word for word in plan.vocab.words if is_joined and "_" in word]:
        shown = ", ".join(phrases[:SHOWN_PHRASES])
        parts.append(f"{len(phrases):,} phrases, such as {shown}")
    return "; ".join(filter(None, parts))


def _describe_steps(plan: Plan) -> str:
    optimizer, train = plan.config.optimizer, plan.config.train
    parts = [f"{optimizer.name}, learning rate {optimizer.lr:g} ({optimizer.schedule})"]
    parts += [f"{train.epochs} epochs in steps of {train.batch_size:,} words"]
    parts += [f"{name} {value}" for name, value in optimizer.args.items()]
    return ", ".join(parts)


def _describe_kernels(plan: Plan) -> str:
    model = plan.config.model
    parts = [KERNELS[plan.kernels], f"numbers in {plan.config.train.precision}"]
    if not plan.optimizer.formula:
        parts.append("steps by torch")
    if model.architecture == "cbow":
        parts.append("CBOW")
    if model.hs:
        parts.append("hierarchical softmax")
    if model.subwords:
        parts.append(f"n-grams of {model.min_n} to {model.max_n} in {model.buckets:,} buckets")
    return ", ".join(parts)


def _describe_saving(plan: Plan) -> str:
    """Return whether training waits while a checkpoint is written, and why."""
    run = plan.config.run
    if not run.checkpoint_minutes:
        end = "when training is over" if run.final_checkpoint else "if a signal ends training"
        return f"one checkpoint, {end}"
    if plan.copies:
        return "checkpoints are written while training goes on, from a copy of the tables"
    room = f"memory has no room for a copy of {format_bytes(plan.table_bytes)}"
    why = "small tables are written faster than copied" if plan.is_small else room
    return f"checkpoints are written while training waits: {why}"
