"""What training takes on machines that are not at hand: bytes of each rank, traffic and time of a step, and what limits it.

docs/planning.md has the formula, and how it compares with measured runs. Constants of time are those of an NVIDIA H200 with PCIe 5.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import torch

from w2v import budget, opening, plan
from w2v.backends import ROWS, choose_engine
from w2v.budget import GPU_RESERVE
from w2v.config import Config, ConfigError
from w2v.fleet import PLACE_BYTES, Share, Shares
from w2v.hardware import Hardware, whole
from w2v.kernels import shard
from w2v.machine import Machine
from w2v.optim import RowOptimizer
from w2v.traffic import Spectrum, Traffic
from w2v.transfer.slots import no_room

WORDS_A_ROW = 20  # of a text after Zipf's law of which only the rows are given
SLOT_BYTES = 24  # of GPU memory for a row that has room there, besides its record
SURVEY_SECONDS = 17e-12  # for a row of the shard, to plan a page
STRETCH, STRETCH_SECONDS = 2 << 20, 38e-9  # bytes of CPU memory that the GPU looks up at once; to look one up, both ways
STEP_LAUNCH, PAGE_LAUNCH, AGAIN_LAUNCH, EXCHANGE_LAUNCH = 115e-6, 210e-6, 270e-6, 600e-6  # seconds
PRODUCTS = 65_536 * 36 * 128 / 243e-6  # a second: centers times context rows times targets times dimensions
MEMORY, MEMORY_BESIDE_MOVES = 3.5e12, 1.9e12  # bytes of rows that are stepped a second, and while others come and go
UNIT = {  # of what is no size
    "gpus": " a host", "link": " GB/s each way", "memory": " GB/s each way", "peers": " GB/s", "network": " GB/s", "words": " M/s",
}  # fmt: skip
COMPUTING, MOVING = ("network", "GPU memory", "computing"), ("planning", "link")
EXCHANGES, LATENCY = 3, 20e-6  # between ranks in a step: ids, weights, gradients; seconds


class Rows(NamedTuple):
    """Expected rows of a rank in a step.

    touched: by its batch; stepped: of its shard, by the batches of all ranks; read: of these, those that come over the link. steps: of a
    page; together: whether two pages have room at once, so that rows move while the steps before are computed.
    """

    touched: float
    stepped: float
    read: float
    steps: int
    together: bool


@dataclass(frozen=True)
class Forecast:
    """Training by `config` with so many ranks. spectrum: of the vocabulary; raw_words: of the text; source: what both are taken from."""

    config: Config
    hardware: Hardware
    ranks: int
    spectrum: Spectrum
    raw_words: float
    source: str
    optimizer: RowOptimizer

    @cached_property
    def share(self) -> Share:
        """What a rank takes, with the engine that the run would choose, and no row kept on the GPU."""
        config, model = self.config, self.config.model
        element, pairs = ROWS.get(config.train.precision, torch.float32).itemsize, 2 * model.window + 1 + model.negative
        ids = int(4 * self.spectrum.words)
        share = Share(
            self.spectrum.rows, model.vector_size, self.optimizer.states, "resident", True, config.train.batch_size, pairs,
            checkpoints=config.run.checkpoint_minutes > 0, element_size=element, in_files=bool(config.transfer.table_dir),
            ranks=self.ranks, gpus=self.hardware.gpus, text_bytes=ids if plan.IDS_SHARE * ids <= self.hardware.gpu else 0,
        )  # fmt: skip
        machine = Machine(1, self.hardware.host, "GPU", self.hardware.gpu - share.known_bytes, "0", "0")
        engine, _ = choose_engine(config, machine, torch.device("cuda"), share.shard_bytes, lambda: {"mapped": (1, 1)})
        return replace(share, engine=engine)

    @cached_property
    def budget(self) -> Shares:
        """That of each rank, with the rows that its GPU needs at once or was told to keep."""
        kept = 0
        if self.paged:
            configured = self.config.transfer.gpu_bytes_of(self.share.shard_bytes)
            kept = int(self.record_bytes * self._page_rows()) if configured is None else configured
        key = "--rows=" if self.source.startswith("--rows") else "vocab.max_final_vocab="
        job = replace(self.share, kept_bytes=kept)
        return Shares(job, job.free(self.hardware), self.config.run.dir, self._lighter, self._enough, key)

    @property
    def paged(self) -> bool:
        return self.share.engine != "resident"

    @property
    def record_bytes(self) -> int:
        return self.share.table_bytes // (2 * self.share.words)

    @property
    def centers(self) -> int:
        """Of a rank's batch."""
        return -(-self.config.train.batch_size // self.ranks)

    @property
    def words(self) -> float:
        """Of the text, that a step of all ranks gets through."""
        return self.ranks * self.centers / self._traffic.kept * self.raw_words / self.spectrum.words

    @property
    def slots(self) -> int:
        """Rows of a rank's shards for which its GPU has room, or those that it needs where it has less."""
        whole, share, configured = 2 * self.share.rows, self.share, self.config.transfer.gpu_bytes_of(self.share.shard_bytes)
        if not self.paged:
            return whole
        if configured is not None:
            return min(whole, configured // self.record_bytes)
        room = self.hardware.gpu - GPU_RESERVE - share.known_bytes - PLACE_BYTES * whole
        return min(whole, max(math.ceil(self._page_rows()), room // (self.record_bytes + SLOT_BYTES)))

    @cached_property
    def rows(self) -> Rows:
        """Raises `ConfigError` where the rows of a page have no room in what transfer.gpu_bytes says."""
        traffic, slots = self._traffic, self.ranks * self.slots
        touched, stepped = traffic.page_rows(self.centers), traffic.page_rows(self.centers, self.ranks)
        if not self.paged:
            return Rows(touched, stepped, 0.0, 1, True)
        steps, lookahead = traffic.paging(self.centers, self.slots, self.ranks, self.config.transfer)
        if (needed := self._page_rows(steps)) > self.slots:
            raise no_room(self.slots, needed)
        read = traffic.read(self.centers, slots, self.ranks, steps, lookahead) / self.ranks / steps
        return Rows(touched, stepped, read, steps, traffic.rows_of_two(self.centers, self.ranks, steps) <= self.slots)

    @cached_property
    def sent(self) -> dict[str, float]:
        """Bytes of a step that a rank sends to others, and as many come."""
        size = self.config.model.vector_size
        rows = (self.rows.touched / self.ranks + shard.heads(size)) * (self.ranks - 1)
        row = {"ids": 4, "weights": self.share.element_size * size, "gradients": 4 * size}
        row |= {"pairs": 4} if self.config.optimizer.occurrence_cap else {}
        return {what: rows * count for what, count in row.items()}

    @cached_property
    def limits(self) -> dict[str, float]:
        """Seconds of a step by what takes them."""
        rows, model, machine, several = self.rows, self.config.model, self.hardware, self.ranks > 1
        near = (self.share.on_host - 1) / max(1, self.ranks - 1)  # of what is sent, to GPUs of the same host
        contexts, speed = model.window + 1 if model.shrink_windows else 2 * model.window, machine.words / Hardware.words
        stepped = rows.stepped * (2 * self.record_bytes + 8 * model.vector_size)  # bytes: records and gradients
        stepped += several * rows.touched * 24 * model.vector_size  # weights and gradients go through buffers
        alone, slowed = MEMORY * speed, MEMORY_BESIDE_MOVES * speed
        apart = min(rows.read * rows.steps, self.share.shard_bytes / STRETCH)  # stretches in which the rows of a page are
        rate = min(machine.link, machine.memory / self.share.on_host)
        link = rows.read * self.record_bytes / rate / 1e9 + self.paged * apart * STRETCH_SECONDS / rows.steps
        beside = min(stepped / slowed, link * rows.together)  # seconds
        seconds_a_gigabyte = near / machine.peers + (1 - near) / machine.network
        page_launch = self.paged * (PAGE_LAUNCH + (not rows.together) * AGAIN_LAUNCH) / rows.steps
        return {
            "network": sum(self.sent.values()) / 1e9 * seconds_a_gigabyte + several * EXCHANGES * LATENCY,
            "GPU memory": beside + (stepped - beside * slowed) / alone,
            "computing": self.centers * contexts * (model.negative + 1) * model.vector_size / PRODUCTS / speed,
            "planning": self.paged * 2 * self.share.rows * SURVEY_SECONDS / rows.steps,
            "link": link,
            "launching": STEP_LAUNCH + several * EXCHANGE_LAUNCH + page_launch,
        }

    @property
    def slowest(self) -> tuple[float, str]:
        """Seconds of a step, and what takes most of them: what is computed, moved and launched goes on at once, if there is room."""
        chains = [COMPUTING, MOVING, ("launching",)] if self.rows.together else [COMPUTING + MOVING, ("launching",)]
        longest = max(chains, key=lambda chain: sum(self.limits[name] for name in chain))
        return sum(self.limits[name] for name in longest), max(longest, key=self.limits.__getitem__)

    def __str__(self) -> str:
        job, model, rows, moving = self.budget.job, self.config.model, self.spectrum.rows, self.rows
        record = " + ".join(["weight", *self.optimizer.states(model.vector_size)])
        measured = "measured on H200s" + (", but for network" if self.hardware.network == Hardware.network else "")
        given, hosts = _described(self.hardware, assumed=False), -(-self.ranks // self.hardware.gpus)
        allowed = ", ".join(f"{what} {self.words / limit / 1e6:.4g}" for what, limit in self.limits.items() if limit)
        seconds, limit = self.slowest
        rate, epochs = self.words / seconds, self.config.train.epochs
        return "\n".join([
            f"machines  ranks={self.ranks} on hosts={hosts}" + (f", {given}" if given else ""),
            f"assumed   {_described(self.hardware, assumed=True)}; {measured}",
            f"corpus    {self.source}: {self.raw_words:,.0f} words, {rows:,} different ones in the vocabulary",
            f"tables    2 x {rows:,} x {model.vector_size}, {self.config.optimizer.name}: {record}: {budget.size(job.table_bytes)}",
            f"engine    {job.engine}: room for {self.slots:,} of a rank's {2 * job.rows:,} rows on its GPU",
            str(self.budget),
            f"saving    {self.budget.saving}",
            f"step      {self.words:,.0f} words, {self.centers:,} centers a rank, which touch {moving.touched:,.0f} rows; "
            f"those of all touch {moving.stepped:,.0f} of its own",
            f"link      {moving.read:,.0f} rows to the GPU and as many back: {budget.size(moving.read * self.record_bytes)} each way",
            f"network   sent by each rank: {' + '.join(f'{what} {budget.size(count)}' for what, count in self.sent.items())}",
            f"limits    M words/s that each allows: {allowed}",
            f"speed     {rate / 1e6:.4g} M words/s, limited by {limit}; a step takes {1e3 * seconds:.3g} ms, "
            f"{epochs} epochs {_time(epochs * self.raw_words / rate)}",
        ])  # fmt: skip

    @cached_property
    def _traffic(self) -> Traffic:
        return Traffic.of_rank(self.spectrum, self.config.model, self.ranks)

    def _page_rows(self, steps: int = 0) -> float:
        """Of a rank's shards, that so many steps touch, or the steps of a page at least."""
        steps = steps or self.config.transfer.steps_per_page or 1
        return self._traffic.page_rows(self.centers, self.ranks, steps)

    def _lighter(self) -> dict[str, Callable]:
        return {name: RowOptimizer(replace(self.config.optimizer, name=name, args={})).states for name in plan.LIGHTER}

    def _enough(self, ranks: int) -> bool:
        other = replace(self, ranks=ranks)
        return other.share.fits(self.hardware) and other.budget.job.fits(self.hardware)


def tell(config: Config, args: Namespace) -> None:
    """Print what `config` would take, by the options of hardware.py. Raises `ConfigError`, and `DoesNotFit` where it does not."""
    if not args.dry_run:
        raise ConfigError("--world-size, --rows and --machine tell what training would take on other machines; add --dry-run")
    if args.resume:
        raise ConfigError(f"--resume {args.resume} goes on with a run here; leave it out with --world-size, --rows and --machine")
    ranks = 1 if args.world_size is None else whole("--world-size", args.world_size, least=1)
    hardware = Hardware.parse(args.machine or "")
    if config.train.device == "cpu":
        raise ConfigError("train.device=cpu, but --world-size, --rows and --machine are about GPUs; leave it out")
    if args.rows is None:
        vocab, corpus = opening.open_corpus(config)
        raw_words: float
        spectrum, raw_words, source = Spectrum.of(vocab.counts, corpus.ids), corpus.raw_words, config.corpus.path
    else:
        given, colon, words = args.rows.partition(":")
        count = whole("--rows", given, least=2)
        spectrum = Spectrum.zipf(count, whole("the words of --rows", words, least=count) if colon else WORDS_A_ROW * count)
        raw_words, source = spectrum.words, f"--rows={args.rows} after Zipf's law"
    forecast = Forecast(config, hardware, ranks, spectrum, raw_words, source, RowOptimizer(config.optimizer, fused=True))
    print(forecast)
    if max(spectrum.rows, 2 * forecast.share.rows) > plan.MOST_WORDS:
        print(f"note      this version counts words, and the rows of a rank, in 32 bits: it takes at most {plan.MOST_WORDS:,}")
    if forecast.share.engine == "staged":
        print("note      the link's speed is that of transfer.engine=mapped; staged moves rows at half of it, or as fast as the disk")
    if not forecast.optimizer.fused or config.train.kernels == "reference" or config.train.deterministic:
        print("note      the speed is that of fused kernels, which these settings do not use; plain torch is ten times slower")
    forecast.budget.check()


def _described(hardware: Hardware, assumed: bool) -> str:
    """The values that are the defaults, or those that are not."""
    values = {entry.name: (getattr(hardware, entry.name), entry.default) for entry in fields(hardware)}
    shown = {key: value for key, (value, default) in values.items() if (value == default) == assumed and value < math.inf}
    return ", ".join(f"{key}={value:g}{UNIT[key]}" if key in UNIT else f"{key}={budget.size(value)}" for key, value in shown.items())


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} hours"
