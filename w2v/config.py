"""What a run can be told: frozen dataclasses, one sentence for each field, which refuse values out of range.

Model keys are named as in gensim, optimizer keys as in torch.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from w2v.system.files import atomic_write


class ConfigError(ValueError):
    """A setting that cannot be used; the message is one line that names the key, the value and the remedy."""


def key(default: Any, sentence: str) -> Any:
    """A dataclass field with its default and the sentence that `--help-config` prints."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": sentence})
    return field(default=default, metadata={"help": sentence})


def require(holds: bool, name: str, value: Any, remedy: str) -> None:
    """Raise a `ConfigError` that names the key, its value and what it must be, unless `holds`."""
    if not holds:
        raise ConfigError(f"{name}={value} is out of range; it must be {remedy}")


UNITS = {
    f"{prefix}{unit}": step**power
    for unit, step in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
SIZE = re.compile(rf"(\d+(?:\.\d*)?) *({'|'.join(UNITS)}|%|)")


@dataclass(frozen=True)
class CorpusConfig:
    path: str = key(
        "enwiki-sample",
        "A name (enwiki-sample, text8), a text file (.gz .bz2 .xz .zst too), a directory or a Wikipedia dump.",
    )
    lowercase: bool = key(False, "Lower-case the text before it is split into words.")
    max_sentence_length: int = key(
        10_000, "Lines of more words than this are cut into pieces of it, as gensim does."
    )
    data_dir: str = key("data", "Folder for downloaded corpora and cached ids.")

    def __post_init__(self) -> None:
        require(
            self.max_sentence_length >= 2,
            "corpus.max_sentence_length",
            self.max_sentence_length,
            "at least 2",
        )


@dataclass(frozen=True)
class VocabConfig:
    min_count: int = key(5, "Words that occur less often are dropped.")
    max_final_vocab: int | None = key(
        None, "Keep at most this many of the most frequent words; null keeps all."
    )
    max_vocab_size: int | None = key(
        None,
        "Forget rare words while counting when there are more than this, to save memory; null: never.",
    )

    def __post_init__(self) -> None:
        require(self.min_count >= 1, "vocab.min_count", self.min_count, "at least 1")
        for name in ("max_final_vocab", "max_vocab_size"):
            largest = getattr(self, name)
            require(largest is None or largest >= 2, f"vocab.{name}", largest, "null or at least 2")


@dataclass(frozen=True)
class ModelConfig:
    vector_size: int = key(100, "Numbers in a word's vector.")
    window: int = key(5, "Largest distance, in words, between a center and its context words.")
    shrink_windows: bool = key(
        True, "Draw each center's window from 1..window, so that near words weigh more."
    )
    negative: int = key(5, "Noise words drawn for each center.")
    negative_pool: int = key(
        0,
        "Pick noise words from a pool of this many, drawn before, so that fewer rows are touched; 0: no pool.",
    )
    negative_pool_steps: int = key(
        1, "Steps that pick from the same pool before a fresh one is drawn."
    )
    sample: float = key(
        1e-4, "Threshold of the frequency above which words are subsampled; 0 keeps every word."
    )
    ns_exponent: float = key(0.75, "Noise words are drawn in proportion to count ** ns_exponent.")

    def __post_init__(self) -> None:
        require(self.vector_size >= 1, "model.vector_size", self.vector_size, "at least 1")
        require(self.window >= 1, "model.window", self.window, "at least 1")
        require(
            self.negative >= 1,
            "model.negative",
            self.negative,
            "at least 1 (skip-gram here learns from negatives only)",
        )
        require(self.negative_pool >= 0, "model.negative_pool", self.negative_pool, "0 or more")
        require(
            self.negative_pool_steps >= 1,
            "model.negative_pool_steps",
            self.negative_pool_steps,
            "at least 1",
        )
        pooled = self.negative_pool > 0 or self.negative_pool_steps == 1
        require(
            pooled,
            "model.negative_pool_steps",
            self.negative_pool_steps,
            "1, or a pool to share: model.negative_pool=65536",
        )
        require(0 <= self.sample < 1, "model.sample", self.sample, "from 0 to below 1")
        require(
            math.isfinite(self.ns_exponent),
            "model.ns_exponent",
            self.ns_exponent,
            "a finite number",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = key(
        "Adamax",
        "Any torch.optim class that treats rows apart: Adamax, RMSprop, Adam, SGD, Adagrad, ...",
    )
    lr: float = key(
        0.4,
        "Learning rate at the start, or at the end of the warm-up; sparse rows want 10 to 200 times torch's defaults.",
    )
    args: dict[str, Any] = key(
        {},
        "Further arguments of the torch.optim class, passed as they are, such as {betas: [0.5, 0.99]}.",
    )
    step: Literal["table", "row"] = key(
        "table",
        "Steps that bias correction counts: the table's, as SparseAdam does, or each row's own.",
    )
    occurrence_cap: int = key(
        0,
        "A row that takes part in n pairs of a step has its summed gradient scaled by min(1, cap / n); 0: no cap.",
    )
    schedule: Literal["constant", "linear", "cosine"] = key(
        "linear", "How the learning rate falls to min_lr over the run."
    )
    warmup: float = key(0.0, "Share of the run over which the learning rate first rises from 0.")
    min_lr: float = key(0.0, "Learning rate at the end of a linear or cosine schedule.")

    def __post_init__(self) -> None:
        require(math.isfinite(self.lr) and self.lr > 0, "optimizer.lr", self.lr, "a number above 0")
        require(0 <= self.warmup < 1, "optimizer.warmup", self.warmup, "from 0 to below 1")
        require(
            self.occurrence_cap >= 0,
            "optimizer.occurrence_cap",
            self.occurrence_cap,
            "0 or more; 16 suits SGD at lr 0.1",
        )
        require(
            0 <= self.min_lr <= self.lr,
            "optimizer.min_lr",
            self.min_lr,
            f"from 0 to optimizer.lr={self.lr}",
        )


@dataclass(frozen=True)
class TransferConfig:
    engine: Literal["auto", "resident", "mapped", "staged"] = key(
        "auto",
        "Tables on the compute device (resident), or in CPU memory that the GPU reads in place (mapped) or by copies (staged).",
    )
    gpu_bytes: str = key(
        "auto",
        "GPU memory for rows of mapped or staged tables: 20GiB, 50% of the tables, 0, or auto, what is free.",
    )
    steps_per_page: int = key(
        0,
        "Steps whose rows come to the GPU together; 0: as many, up to 8, as leave room for the next page's.",
    )
    lookahead: bool = key(
        True,
        "Keep the rows on the GPU that the text uses soon, as far ahead as there is room for them; one GPU only.",
    )
    table_dir: str = key(
        "",
        "Folder for files that hold the tables while the run lasts, for those larger than memory; empty: in memory.",
    )

    def __post_init__(self) -> None:
        valid = "auto, 0, a size such as 500MB or 20GiB, or a share of the tables such as 50%"
        require(
            self.gpu_bytes == "auto" or SIZE.fullmatch(self.gpu_bytes) is not None,
            "transfer.gpu_bytes",
            self.gpu_bytes,
            valid,
        )
        require(
            self.steps_per_page >= 0, "transfer.steps_per_page", self.steps_per_page, "0 or more"
        )

    def gpu_bytes_of(self, table_bytes: int) -> int | None:
        """`gpu_bytes` as a number, for tables of that many bytes; None for auto."""
        if self.gpu_bytes == "auto":
            return None
        number, unit = SIZE.fullmatch(self.gpu_bytes).groups()
        return int(float(number) * {"": 1, "%": table_bytes / 100, **UNITS}[unit])


@dataclass(frozen=True)
class TrainConfig:
    epochs: int = key(5, "Passes over the corpus.")
    batch_size: int = key(65_536, "Centers of one optimizer step, counted after subsampling.")
    device: Literal["auto", "cpu", "cuda"] = key(
        "auto", "Where the step is computed; auto takes the GPU when there is one."
    )
    kernels: Literal["auto", "reference", "fused"] = key(
        "auto", "Arithmetic of a step: plain torch, or kernels made for it, fused."
    )
    precision: Literal["float32", "amp", "bf16", "fp16"] = key(
        "float32",
        "amp: matrix products of 16 bits; bf16, fp16: the tables' rows too, which halves what crosses the link.",
    )
    seed: int = key(1, "Seed of the initial vectors and of all sampling.")
    held_out_words: int = key(
        0,
        "Keep sentences of about this many words, spread over the text, for a loss that compares across settings.",
    )
    deterministic: bool = key(
        False,
        "Use only operations that give the same bits in every run, at some cost in speed on a GPU.",
    )

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "train.epochs", self.epochs, "at least 1")
        require(self.batch_size >= 1, "train.batch_size", self.batch_size, "at least 1")
        require(0 <= self.seed < 2**63, "train.seed", self.seed, "from 0 to 2**63 - 1")
        require(self.held_out_words >= 0, "train.held_out_words", self.held_out_words, "0 or more")


@dataclass(frozen=True)
class RunConfig:
    dir: str = key("runs", "Folder that holds the run folders.")
    name: str = key(
        "", "Ending of the run folder's name <date>-<name>; empty takes corpus and optimizer."
    )
    log_seconds: float = key(
        10.0,
        "Seconds between two lines of metrics.jsonl, and of the log when there is no terminal.",
    )
    tensorboard: bool = key(
        False,
        "Write the curve for TensorBoard too, into the run folder; needs the package tensorboard.",
    )
    wandb: str = key(
        "",
        "Project of Weights & Biases to write the curve to as well; empty: none. Needs the package wandb.",
    )
    score_epochs: bool = key(
        False, "Score the vectors on the analogies after every epoch, not only at the end."
    )
    checkpoint_minutes: float = key(
        10.0,
        "Minutes between checkpoints, which epochs end with as well; 0: one at the end of the run.",
    )

    def __post_init__(self) -> None:
        require(
            not {"/", "\0"} & set(self.name),
            "run.name",
            repr(self.name),
            "without slashes, as the folder lies in run.dir",
        )
        require(self.log_seconds > 0, "run.log_seconds", self.log_seconds, "above 0")
        require(
            0 <= self.checkpoint_minutes < math.inf,
            "run.checkpoint_minutes",
            self.checkpoint_minutes,
            "0 or more",
        )


@dataclass(frozen=True)
class Config:
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


# What other programs call our keys: word2vec.c, fastText, gensim before and after 4.0, torch.optim.
FOREIGN_NAMES = {
    "size": "model.vector_size",
    "dim": "model.vector_size",
    "ws": "model.window",
    "neg": "model.negative",
    "subsample": "model.sample",
    "t": "model.sample",
    "alpha": "optimizer.lr",
    "min_alpha": "optimizer.min_lr",
    "learning_rate": "optimizer.lr",
    "iter": "train.epochs",
    "epoch": "train.epochs",
    "minCount": "vocab.min_count",
    "batch": "train.batch_size",
    "batch_words": "train.batch_size",
    "train": "corpus.path",
    "input": "corpus.path",
    "sentences": "corpus.path",
    "corpus_file": "corpus.path",
    "output": "run.dir",
    "momentum": "optimizer.args.momentum",
    "betas": "optimizer.args.betas",
    "eps": "optimizer.args.eps",
    "weight_decay": "optimizer.args.weight_decay",
}
COMMAND_LINE = "the command line"
EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping such as {betas: [0.5, 0.99]}",
}


def load_config(files: Sequence[str | Path] = (), assignments: Sequence[str] = ()) -> Config:
    """The defaults, overlaid by each YAML file in turn and then by each `section.key=value`; a key's later value replaces
    its earlier one whole, and `optimizer.args.<name>=value` sets one entry of `optimizer.args`.

    Raises `ConfigError` for a file that cannot be read, an unknown key, a wrong type, or a value out of range.
    """
    merged = OmegaConf.structured(Config)
    for section in _sections():
        OmegaConf.set_readonly(merged[section], False)  # frozen dataclasses arrive read-only
    for path in files:
        for name, value in _read(path):
            _set(merged, name, value, source=str(path))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"{assignment!r} is neither an existing .yaml file nor section.key=value; see --help-config"
            )
        _set(merged, name, _parse(name, text), source=COMMAND_LINE)
    try:
        config: Any = OmegaConf.to_object(merged)
        return config
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key}: {_one_line(error)}; write a plain value, or a key's full name in ${{...}}"
        ) from None


def save_config(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML, aside first and then in one move; `load([path])` gives it back."""
    atomic_write(Path(path), OmegaConf.to_yaml(OmegaConf.structured(config)))


def flat_config(config: Config) -> dict[str, Any]:
    """The value of each key by its dotted name."""
    return {
        name: getattr(getattr(config, section), key)
        for name in config_keys()
        for section, key in [name.split(".")]
    }


def describe_config() -> str:
    """Every key with its default and its sentence, as YAML that can be used as a config file."""
    lines, types = [], _types()
    for section, kind in _sections().items():
        lines.append(f"{section}:")
        for entry in fields(kind):
            default = getattr(kind(), entry.name)
            choices = _choices(types[f"{section}.{entry.name}"])
            sentence = entry.metadata["help"] + (
                f" One of: {', '.join(choices)}." if choices else ""
            )
            written = default if default and isinstance(default, str) else json.dumps(default)
            lines += [f"  # {sentence}", f"  {entry.name}: {written}"]
        lines.append("")
    return "\n".join(lines)


def config_reference() -> str:
    """docs/configuration.md: a table of the keys of each section."""
    lines = [
        "# Configuration",
        "",
        "Written by `make docs` from `w2v/config.py`; `train.py --help-config` prints the same as YAML.",
        "",
    ]
    for section, kind in _sections().items():
        lines += [f"## {section}", "", "| key | default | takes | meaning |", "|---|---|---|---|"]
        for entry in fields(kind):
            name = f"{section}.{entry.name}"
            hint, default = _types()[name], getattr(kind(), entry.name)
            takes = ", ".join(_choices(hint)) or _expected(hint, None)
            lines.append(
                f"| `{name}` | `{json.dumps(default)}` | {takes} | {entry.metadata['help']} |"
            )
        lines.append("")
    return "\n".join(lines)


def config_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Which keys of `as_dict` differ, each with both values in words; one that an `old` program did not know had the default."""
    old = flat_config(Config()) | old
    differ = [name for name in new if old[name] != new[name]]
    return {
        name: f"{name}={_show(new[name])} instead of {_show(old[name])}" for name in sorted(differ)
    }


def config_keys() -> Iterator[str]:
    """The dotted names of all keys, such as `model.window`."""
    return iter(_types())


def _types() -> dict[str, Any]:
    """The type of each key by its dotted name."""
    return {
        f"{section}.{key}": hint
        for section, kind in _sections().items()
        for key, hint in get_type_hints(kind).items()
    }


def _sections() -> dict[str, Any]:
    """The class of each section by its name."""
    return get_type_hints(Config)


def _choices(hint: Any) -> tuple[str, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def _read(path: str | Path) -> Iterator[tuple[str, Any]]:
    """The dotted names of a YAML file with their values, `${...}` unresolved."""
    if not Path(path).is_file():
        near = difflib.get_close_matches(
            str(path), [str(p) for p in Path(path).parent.glob("*.yaml")], n=1, cutoff=0.5
        )
        remedy = (
            f"did you mean {near[0]}?"
            if near
            else "name a .yaml file, or set a key with section.key=value"
        )
        raise ConfigError(f"config file {path} does not exist; {remedy}")
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError, RecursionError) as error:
        raise ConfigError(
            f"config file {path} cannot be read as YAML: {_one_line(error)}"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config file {path} must hold sections such as 'model:' with keys below them; see --help-config"
        )
    if not loaded:
        raise ConfigError(
            f"config file {path} is empty; write sections such as 'model:' with keys below them, or leave it out"
        )
    for section, content in loaded.items():
        if isinstance(content, dict):
            yield from ((f"{section}.{key}", value) for key, value in content.items())
        elif (
            content is not None or section not in _sections()
        ):  # a section with every key commented out says nothing
            yield str(section), content


def _parse(name: str, text: str) -> Any:
    """The value of an argument: text as it stands for a key that takes text, YAML for every other key."""
    if _types().get(name) is str and text[:1] not in ("'", '"'):
        return text
    try:
        parsed: Any = OmegaConf.to_container(
            OmegaConf.from_dotlist([f"value={text}"]), resolve=False
        )
        return parsed["value"]
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{name}={_show(text)} (from {COMMAND_LINE}) cannot be read as YAML: {_one_line(error)}"
        ) from None


def _set(merged: Any, name: str, value: Any, source: str) -> None:
    if name in _sections():
        other = f" or {FOREIGN_NAMES[name]}" if name in FOREIGN_NAMES else ""
        raise ConfigError(
            f"{name}={_show(value)} (from {source}): '{name}' is a section; write {name}.<key>{other}, see --help-config"
        )
    hint = _types().get(name)
    parent, _, last = name.rpartition(".")
    if hint is None and not (parent == "optimizer.args" and last.isidentifier()):
        raise ConfigError(f"unknown key {name!r} (from {source}){_suggestion(name)}")
    try:
        if value == "???" or (hint is bool and type(value) is int):
            raise ValueError  # OmegaConf takes both: its own mark of a missing value, and any number as a truth value
        str(value).encode()  # a name that is not UTF-8 could not be saved with the run
        OmegaConf.update(merged, name, value, merge=False)
    except GrammarParseError as error:
        raise ConfigError(
            f"{name}={_show(value)} (from {source}) is not a valid ${{...}}: {_one_line(error)}"
        ) from None
    except (OmegaConfBaseException, ValueError, OverflowError):
        raise ConfigError(
            f"{name}={_show(value)} (from {source}) is not {_expected(hint, value)}"
        ) from None


def _expected(hint: Any, value: Any) -> str:
    """What a key takes, in words, with the nearest valid spelling of `value` where there is one."""
    if choices := _choices(hint):
        near = difflib.get_close_matches(str(value), choices, n=1)
        return f"one of {', '.join(choices)}" + (f"; did you mean {near[0]}?" if near else "")
    kinds = (
        [get_origin(kind) or kind for kind in get_args(hint) or (hint,)]
        if get_origin(hint) is not dict
        else [dict]
    )
    words = " or ".join(
        "null" if kind is type(None) else EXPECTED.get(kind, "a plain YAML value") for kind in kinds
    )
    return words + (
        f"; write {value:.0f}"
        if int in kinds and isinstance(value, float) and value.is_integer()
        else ""
    )


def _suggestion(unknown: str) -> str:
    section, _, last = unknown.replace("-", "_").lstrip("_").rpartition(".")
    near_section = difflib.get_close_matches(last, _sections(), n=1, cutoff=0.7)
    known = {name: name.rpartition(".")[2] for name in config_keys()}
    near_key = difflib.get_close_matches(last.lower(), known.values(), n=1)
    if last in FOREIGN_NAMES:
        nearest = FOREIGN_NAMES[last]
    elif near_section and not section:
        return f"; did you mean the section '{near_section[0]}'?"
    elif near_key and (
        section != "optimizer" or f"optimizer.{near_key[0]}" in known or near_key[0] == last
    ):
        nearest = difflib.get_close_matches(
            unknown, [name for name in known if known[name] == near_key[0]], n=1, cutoff=0
        )[0]
    elif section == "optimizer" and last.isidentifier():
        nearest = f"optimizer.args.{last}"
    else:
        return "; see --help-config"
    return f"; did you mean '{nearest}'?"


def _show(value: Any) -> str:
    """A value on one line of at most 80 characters, as YAML writes it."""
    text = (
        json.dumps(value)
        if value is None or isinstance(value, bool)
        else " ".join(str(value).split())
    )
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\n    full_key")[0].split())
