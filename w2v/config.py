"""Configuration of a run: dataclasses, YAML files and section.key=value.

Each key has one help sentence and a range. Model keys are named as in gensim, optimizer keys as in
torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import yaml

from w2v.system.files import atomic_write, nearest, one_line, refused

# configs/ of a checkout, which an installed package holds as w2v/configs.
PACKAGE = Path(str(package_files("w2v")))
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
# Row-separable classes of torch.optim, each with a file in configs/optimizers, and the others.
OPTIMIZERS = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()
NOT_ROWWISE = "Adafactor LBFGS Muon SparseAdam".split()
# Keys that go back to their defaults with another optimizer, before its own settings are taken.
PER_OPTIMIZER = [f"optimizer.{name}" for name in ("lr", "args", "step", "occurrence_cap", "warmup")]
FOLDERS = "run.dir", "transfer.table_dir"  # others are expanded where they are opened
SHOWN_CHARACTERS = 60  # of a value in a message

SIZE_UNITS: dict[str, float] = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(rf"(\d+(?:\.\d*)?) *({'|'.join(SIZE_UNITS)}|%|)")


class ConfigError(ValueError):
    """A bad setting; one line names the key, the value and the remedy."""


def require(holds: bool, name: str, value: Any, must_be: str) -> None:
    """Raise a `ConfigError` about the value of a key, unless `holds`."""
    if not holds:
        raise ConfigError(f"{name}={value} is out of range; it must be {must_be}")


def key(default: Any, help_: str, auto: float | None = None, **limits: float) -> Any:
    """Declare a key with its default, its help sentence and its `LIMITS`.

    `auto` is the number that stands for the value `auto`, which the plan replaces.
    """
    metadata = {"help": help_, "limits": limits, "auto": auto}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


TOKENIZERS = ("auto", "whitespace", "words", "icu")
CODE = re.compile(r"[\w.]+:[\w.]+")  # module:function
LARGEST = 2**31  # of integers, as kernels count in int32
LIMITS = {"at_least": operator.ge, "above": operator.gt, "below": operator.lt}


def range_in_words(metadata: Mapping[str, Any], value: Any) -> str:
    """Return the range of a key in words, such as "at least 0"."""
    rules = [f"{name.replace('_', ' ')} {limit}" for name, limit in metadata["limits"].items()]
    if isinstance(value, float):
        rules.append("finite")
    words = " and ".join(rules)
    if metadata["auto"] is not None:
        words += " or auto"
    return words


class Section:
    """Base of the sections; refuses values out of range."""

    def __post_init__(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            limits = entry.metadata["limits"].items()
            holds = value is None or value == entry.metadata["auto"]
            holds = holds or all(LIMITS[name](value, limit) for name, limit in limits)
            if isinstance(value, float):
                holds = holds and math.isfinite(value)
            self.check(entry.name, holds, range_in_words(entry.metadata, value))
            if type(value) is int and "below" not in entry.metadata["limits"]:
                self.check(entry.name, value < LARGEST, f"below {LARGEST}")

    def check(self, name: str, holds: bool, must_be: str) -> None:
        """Raise a `ConfigError` about the value of a key, unless `holds`."""
        section = type(self).__name__.removesuffix("Config").lower()
        require(holds, f"{section}.{name}", getattr(self, name), must_be)


@dataclass(frozen=True)
class CorpusConfig(Section):
    """Text to train on."""

    path: tuple[str, ...] = key(
        ("enwiki-sample",), "Text, table, folder or dump, text8, or a list such as [a.txt, b.csv]."
    )
    field: str = key("text", "Field or column with the text: JSON, CSV, Parquet, Arrow.")
    encoding: str = key("utf-8", "Encoding of the text: any of Python's, such as latin-1.")
    tokenize: str = key("auto", "One of auto, whitespace, words, icu, or your own module:function.")
    emoji: bool = key(False, "Take emoji as words of their own.")
    lowercase: bool = key(False, "Convert the text to lower case.")
    phrases: int = key(0, "Passes that join frequent pairs, such as new_york.", at_least=0)
    phrases_threshold: float = key(10.0, "Score that joins a pair, as gensim's Phrases.", above=0)
    max_sentence_length: int = key(10_000, "Words after which a long line is split.", at_least=2)
    data_dir: str = key("data", "Folder for downloaded corpora and for the word ids of texts.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenize not in TOKENIZERS and not CODE.fullmatch(self.tokenize):
            near = nearest(self.tokenize, TOKENIZERS)
            hint = f"; did you mean {near}?" if near else ""
            known = f"{', '.join(TOKENIZERS)} or module:function"
            raise ConfigError(f"corpus.tokenize={self.tokenize} is not one of {known}{hint}")
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError):
            known = "a text encoding that Python knows; write utf-8, latin-1, cp1251, big5, ..."
            raise ConfigError(f"corpus.encoding={self.encoding} is not {known}") from None

    @property
    def paths(self) -> str:
        """The texts in one line, for people."""
        return ", ".join(self.path)


@dataclass(frozen=True)
class VocabConfig(Section):
    """Words that get a vector."""

    min_count: int = key(5, "Drop words that occur fewer times than this.", at_least=1)
    max_final_vocab: int | None = key(None, "Keep only the most frequent (null: all).", at_least=2)


@dataclass(frozen=True)
class ModelConfig(Section):
    """What is learned: skip-gram or CBOW, and by which softmax."""

    architecture: Literal["skipgram", "cbow"] = key(
        "skipgram", "Predict a center from each context word (skipgram), or from all (cbow)."
    )
    cbow_mean: bool = key(True, "CBOW predicts from the mean of the context words, or their sum.")
    vector_size: int = key(100, "Dimension of the word vectors.", at_least=1)
    window: int = key(5, "Maximum distance of a context word from its center word.", at_least=1)
    shrink_windows: bool = key(True, "Give near words more weight, as windows of 1 to window do.")
    shrink_by: Literal["draw", "weigh", "auto"] = key(
        "auto", "Sample window sizes (draw), or use full windows with distance weights (weigh)."
    )
    hs: bool = key(False, "Hierarchical softmax, alone with negative=0, or beside negatives.")
    negative: int = key(5, "Negative samples drawn for each center word (0: hs).", at_least=0)
    negative_pool: int = key(-1, "Words of a pool of negatives (0: none).", auto=-1, at_least=0)
    negative_pool_steps: int = key(1, "Steps before a new pool is drawn.", at_least=1)
    sample: float = key(
        -1.0, "Subsample words above this share (0: off).", auto=-1, at_least=0, below=1
    )
    ns_exponent: float = key(
        0.75, "Negatives are drawn in proportion to count ** ns_exponent.", above=-1000, below=1000
    )
    subwords: bool = key(False, "Compose word vectors of those of character n-grams, as fastText.")
    min_n: int = key(
        -1, "Least characters of an n-gram; < and > at the ends count.", auto=-1, at_least=1
    )
    max_n: int = key(-1, "Most characters of an n-gram.", auto=-1, at_least=1, below=256)
    buckets: int = key(
        -1, "Vectors that share all n-grams (auto: one each, up to 2 M).", auto=-1, at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = self.max_n < 0 or self.max_n >= self.min_n
        self.check("max_n", holds, f"at least model.min_n={self.min_n}, or auto")
        holds = self.negative_pool_steps == 1 or self.negative_pool != 0
        without = "1 without a pool to share; set model.negative_pool=65536"
        self.check("negative_pool_steps", holds, without)
        holds = self.architecture == "skipgram" or self.shrink_by != "weigh"
        self.check("shrink_by", holds, "draw or auto with model.architecture=cbow")
        self.check("negative", self.hs or self.negative > 0, "at least 1 without model.hs=true")

    @property
    def weighs_windows(self) -> bool:
        """Whether near words get more weight by a factor, not by drawn windows."""
        return self.shrink_windows and self.shrink_by == "weigh"

    def distinct_negatives(self, centers: int, steps: int = 1) -> int:
        """Return the most different negatives of the centers of some steps."""
        drawn = centers * self.negative
        pools = 1 + -(-(steps - 1) // self.negative_pool_steps)  # which steps may begin anywhere
        return min(drawn, pools * max(0, self.negative_pool) or drawn)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """Optimizer and learning rate."""

    name: str = key("Adam", "Row-separable class of torch.optim: Adam, Adamax, RMSprop, ...")
    lr: float = key(0.0, "Peak learning rate (auto: as the text needs).", auto=0, above=0)
    args: dict[str, Any] = key({}, "Other arguments, such as {betas: [0.5, 0.99]}.")
    step: Literal["table", "row", "auto"] = key(
        "table", "Correct bias by the steps of the table, or by those of each row."
    )
    occurrence_cap: int = key(
        0, "Scale gradients of n pairs by min(1, cap/n) (0: off).", auto=-1, at_least=0
    )
    schedule: Literal["constant", "linear", "cosine"] = key("linear", "Decay of lr to min_lr.")
    warmup: float = key(0.0, "Share of the run in which lr rises from 0.", at_least=0, below=1)
    min_lr: float = key(0.0, "Final learning rate of a linear or cosine schedule.")

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = 0 <= self.min_lr <= (self.lr or math.inf)  # 0: auto
        self.check("min_lr", holds, f"from 0 to optimizer.lr={self.lr or 'auto'}")
        must_be = "names and values, with a space after each colon"
        self.check("args", all(str(name).isidentifier() for name in self.args), must_be)
        # torch takes any text for true, and that of a number, such as 010, for no number.
        holds = self.name not in OPTIMIZERS or not _holds_text([*self.args.values()])
        self.check("args", holds, "of numbers, true, false or null, as torch takes no text")


def _holds_text(value: Any) -> bool:
    """Return whether a value of optimizer.args is text, or a list with text."""
    if isinstance(value, (list, tuple)):
        return any(map(_holds_text, value))
    return isinstance(value, str)


@dataclass(frozen=True)
class TransferConfig(Section):
    """Placement of the tables, and transfer of rows between CPU and GPU."""

    engine: Literal["auto", "resident", "mapped", "staged"] = key(
        "auto", "Tables on the device, or in CPU memory, read in place (mapped) or copied (staged)."
    )
    gpu_bytes: str = key("auto", "GPU memory for cached rows: 20GiB, 50% of the tables, 0, auto.")
    steps_per_page: int = key(0, "Steps whose rows move together (0: up to 8).", at_least=0)
    lookahead: bool = key(True, "Read the text ahead, to keep rows that are used soon (one GPU).")
    table_dir: str = key("", "Folder for tables that exceed memory (empty: in memory).")

    def __post_init__(self) -> None:
        super().__post_init__()
        valid = self.gpu_bytes == "auto" or SIZE.fullmatch(self.gpu_bytes) is not None
        must_be = "auto, 0, a size such as 20GiB, or a share of the tables such as 50%"
        self.check("gpu_bytes", valid, must_be)

    def gpu_bytes_of(self, table_bytes: int) -> int | None:
        """Return `gpu_bytes` as a number, for tables of this size; None for auto."""
        size = SIZE.fullmatch(self.gpu_bytes)
        if size is None:
            return None
        number, unit = size.groups()
        units = SIZE_UNITS | {"": 1, "%": table_bytes / 100}
        return int(float(number) * units[unit])


@dataclass(frozen=True)
class TrainConfig(Section):
    """Training loop."""

    epochs: int = key(5, "Passes over the corpus.", at_least=1)
    batch_size: int = key(0, "Centers of a step, after subsampling.", auto=0, at_least=1)
    block_words: int = key(
        -1, "Words of a block; each batch mixes many (0: none).", auto=-1, at_least=0
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where to compute; auto: a GPU if any.")
    kernels: Literal["auto", "reference", "fused"] = key("auto", "Plain torch or fused kernels.")
    precision: Literal["float32", "amp", "bf16", "fp16"] = key(
        "float32", "16-bit products of plain torch (amp), or tables of half the size (bf16, fp16)."
    )
    seed: int = key(1, "Seed of the initial vectors and of all sampling.", at_least=0, below=2**63)
    held_out_words: int = key(0, "Words held out to measure the loss on (0: none).", at_least=0)
    deterministic: bool = key(False, "Give the same bits in every run; slower on a GPU.")


@dataclass(frozen=True)
class RunConfig(Section):
    """Run folder, logs and checkpoints."""

    dir: str = key("runs", "Parent of the run folders.")
    name: str = key("", "Suffix of the run folder <date>-<name> (empty: corpus and optimizer).")
    log_seconds: float = key(10.0, "Seconds between lines of metrics.jsonl and the log.", above=0)
    tensorboard: bool = key(False, "Log to TensorBoard too; needs the package tensorboard.")
    held_out_items: bool = key(
        False, "Hold out the last item of each line; score its hit rate and MRR at 10."
    )
    score_epochs: bool = key(False, "Score the analogies after every epoch, not only at the end.")
    checkpoint_minutes: float = key(
        10.0, "Minutes between checkpoints (0: one at the end).", at_least=0
    )
    final_checkpoint: bool = key(True, "Write a checkpoint at the end, to train on from later.")
    formats: Literal["kv,bin", "kv", "kv,bin,fasttext", "kv,fasttext"] = key(
        "kv,bin", "Files: gensim's .kv, word2vec's .bin, fastText's (of subwords)."
    )
    report: bool = key(True, "Write report.html: scores, curves and a map; needs plotly.")

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be = "without slashes, as the folder is created in run.dir"
        require(not {"/", "\0"} & set(self.name), "run.name", repr(self.name), must_be)
        self.check("dir", self.dir != "", "a folder; . is the present one")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    vocab: VocabConfig = field(default_factory=VocabConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)


# Keys by dotted name, and other spellings of keys and values.

COMMAND_LINE = "the command line"
SECTIONS: dict[str, Any] = get_type_hints(Config)  # dataclass of each section
TYPES = {
    f"{section}.{name}": hint
    for section, kind in SECTIONS.items()
    for name, hint in get_type_hints(kind).items()
}
# Keys that take `auto`, a number that stands for it.
AUTO = {
    f"{section}.{entry.name}": entry.metadata
    for section, kind in SECTIONS.items()
    for entry in fields(kind)
    if entry.metadata["auto"] is not None
}
TYPE_NAMES = {
    int: "a whole number",
    int | None: "a whole number or null",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a text, or a list such as [a.txt, b.txt]",
    dict[str, Any]: "a mapping such as {betas: [0.5, 0.99]}",
    None: "a plain YAML value",  # of an entry of optimizer.args
}
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")  # not 010, which is 8 in YAML and 10 elsewhere
NUMBER = re.compile(r"[-+]?((0|[1-9][0-9_]*)(\.[0-9]*)?|\.[0-9]+)(e[-+]?[0-9]+)?", re.IGNORECASE)
BOOLS = dict.fromkeys(("true", "yes", "on", "1"), True)
BOOLS |= dict.fromkeys(("false", "no", "off", "0"), False)
# What word2vec.c, fastText, gensim (before and after 4.0) and torch.optim call these keys.
FOREIGN_NAMES = {
    "corpus.path": ("input", "text", "sentences", "corpus_file"),
    "model.architecture": ("cbow", "sg"),
    "model.hs": ("hs",),
    "model.vector_size": ("size", "dim", "dims", "dimension", "embedding_dim"),
    "model.window": ("ws",),
    "model.negative": ("neg",),
    "model.sample": ("subsample", "t"),
    "model.min_n": ("minn",),
    "model.max_n": ("maxn",),
    "model.buckets": ("bucket",),
    "optimizer.name": ("optim",),
    "optimizer.lr": ("alpha", "learning_rate"),
    "optimizer.min_lr": ("min_alpha",),
    "train.epochs": ("iter",),
    "train.batch_size": ("batch", "batch_words", "bs"),
    "train.device": ("gpu", "cuda"),
    "run.dir": ("output", "out", "save"),
    **{f"optimizer.args.{name}": (name,) for name in ("betas", "eps", "momentum", "weight_decay")},
}
FOREIGN_VALUES = {"gpu": "cuda", "fp32": "float32", "bfloat16": "bf16", "float16": "fp16"}
YAML_SUFFIXES = (".yaml", ".yml")


# Reading and writing: YAML files, assignments, names of shipped files.


def load_config(
    files: Sequence[str | Path] = (), assignments: Sequence[str] = (), *, trains: bool = True
) -> Config:
    """Return the defaults, overlaid by YAML files, then by assignments.

    A later value of a key replaces the earlier one as a whole; `optimizer.args.<name>=value` sets
    one entry of `optimizer.args`. Another `optimizer.name` takes the settings of that optimizer in
    configs/optimizers, which what is set beside it overrides. Settings without a name are those of
    the default optimizer, beside its others.

    A name that is imported, such as optimizer.name=package.Class, must be an assignment: a file,
    such as the config of another's run, may only repeat it. So must corpus.tokenize=module:f.
    Without `trains`, for a config that is only compared with others, files may have one.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is wrong.
    """
    values: dict[str, Any] = {}
    set_in: dict[str, str] = {}  # where a key was set last
    optimizer = None
    sources = [(str(path), [*_read_yaml(find_config(path))]) for path in files]
    for source, entries in [*sources, (COMMAND_LINE, [*map(_parse, assignments)])]:
        given = dict(entries)
        if optimizer is None and any(name.startswith("optimizer.") for name in given):
            given.setdefault("optimizer.name", OptimizerConfig.name)
        name = given.get("optimizer.name", optimizer)
        if name != optimizer and isinstance(name, str):
            for key_name in PER_OPTIMIZER:
                values.pop(key_name, None)
            entries = [*_shipped(name, given), *entries]
            optimizer = name
        set_in |= dict.fromkeys(given, source)
        for key_name, value in entries:
            _set(values, key_name, value, source)
    for key_name, mark in (("optimizer.name", "."), ("corpus.tokenize", ":")):
        code = values.get(key_name, "")
        if mark in code and set_in[key_name] != COMMAND_LINE and trains:
            where = f"{key_name}={code} (from {set_in[key_name]})"
            remedy = f"add {key_name}={code} to the command line if you trust it"
            raise ConfigError(f"{where} is code, which would be run; {remedy}")
    given_in = _by_section(values)
    sections = {name: kind(**given_in[name]) for name, kind in SECTIONS.items()}
    return Config(**sections)  # whose ranges are checked


def _by_section(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return values by dotted name as mappings by section."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        section, _, its_key = name.partition(".")
        sections[section][its_key] = value
    return sections


def save_config(config: Config, path: str | Path) -> None:
    """Write the config as YAML; `load_config([path])` returns an equal one."""
    content = _by_section(flat_config(config))
    atomic_write(path, yaml.safe_dump(content, allow_unicode=True, sort_keys=False))


def flat_config(config: Config) -> dict[str, Any]:
    """Return the value of each key by its dotted name."""
    return {
        f"{section}.{name}": _spelled(f"{section}.{name}", value)
        for section, values in asdict(config).items()
        for name, value in values.items()
    }


def config_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Describe the keys that differ between two flat configs.

    A key that is missing in `old`, which an earlier version saved, had its default.
    """
    old = flat_config(Config()) | old
    differing = sorted(name for name in new if old[name] != new[name])
    return {name: f"{name}={_show(new[name])} instead of {_show(old[name])}" for name in differing}


def describe_config() -> str:
    """Return every key with its default and help, as a YAML config file."""
    lines = []
    for section, kind in SECTIONS.items():
        lines += ["", f"{section}:"]
        for entry in fields(kind):
            lines.append(f"  # {entry.metadata['help']}")
            if choices := _choices(TYPES[f"{section}.{entry.name}"]):
                lines[-1] += f" One of: {', '.join(choices)}."
            default = _spelled(f"{section}.{entry.name}", getattr(kind(), entry.name))
            is_text = default and isinstance(default, str)
            lines.append(f"  {entry.name}: {default if is_text else json.dumps(default)}")
    return "\n".join(lines[1:]) + "\n"


def find_config(name: str | Path) -> Path:
    """Return the file of a config: a path, or a name such as adam or text8.

    Raises `ConfigError`, with the nearest name, if there is none.
    """
    path = Path(os.path.expanduser(name))
    if path.is_file():
        return path
    if found := shipped_config(str(name)):
        return found
    near = nearest(str(path), map(str, path.parent.glob("*.yaml")), cutoff=0.5)
    remedy = "name a .yaml file, or set section.key=value"
    if near := near or nearest_config(path.stem):
        remedy = f"did you mean {near}?"
    raise ConfigError(f"config file {name} does not exist; {remedy}")


def shipped_config(name: str) -> Path | None:
    """Return the shipped file of a name: adam or Adam, adam.yaml, text8."""
    if name in OPTIMIZERS:
        name = name.lower()
    short = name.removeprefix("configs/").removesuffix(".yaml")
    files = (CONFIGS / f"{short}.yaml", CONFIGS / "optimizers" / f"{short}.yaml")
    return next((file for file in files if file.is_file()), None)


def nearest_config(name: str, cutoff: float = 0.6) -> str:
    """Return the shipped file whose name is most similar, or nothing."""
    known = {file.stem: str(file.relative_to(CONFIGS.parent)) for file in CONFIGS.rglob("*.yaml")}
    return known.get(nearest(name.lower(), known, cutoff), "")


def check_optimizer(name: str) -> None:
    """Raise `ConfigError` unless it is a known optimizer or `package.Class`."""
    if name in OPTIMIZERS or "." in name:
        return
    where = f"optimizer.name={_show(name)}"
    known = " ".join(OPTIMIZERS)
    if name.lower() == "sparseadam":
        raise ConfigError(f"{where} is Adam here, which steps the same rows; choose one of {known}")
    if name.lower() in map(str.lower, NOT_ROWWISE):
        raise ConfigError(f"{where} mixes rows, so it cannot be paged; choose one of {known}")
    lower = {other.lower(): other for other in OPTIMIZERS}
    hint = f"choose one of {known}, or package.Class"
    if near := nearest(name.lower(), lower, cutoff=0.5):
        hint = f"did you mean {lower[near]}?"
    raise ConfigError(f"{where} is not a known optimizer; {hint}")


def _shipped(name: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the shipped settings of an optimizer; one's own class has none."""
    check_optimizer(name)
    if name in OPTIMIZERS:
        yield from _read_yaml(CONFIGS / "optimizers" / f"{name.lower()}.yaml")
    elif "optimizer.lr" not in given:
        raise ConfigError(f"optimizer.name={_show(name)} has no shipped rate; set optimizer.lr too")


def _spelled(name: str, value: Any) -> Any:
    """Return a value as it is written, such as `auto`."""
    if name in AUTO and value == AUTO[name]["auto"]:
        return "auto"
    if isinstance(value, tuple):
        return list(value) if len(value) > 1 else value[0]
    return value


class _TextLoader(yaml.SafeLoader):
    """Loader of YAML whose scalars stay text, but for null."""

    # YAML 1.1 reads 010 as 8 and 1:30 as 90: the type of the key decides instead.
    yaml_implicit_resolvers: ClassVar = {
        first: [rule for rule in rules if rule[0] == "tag:yaml.org,2002:null"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):  # a few of them make a file of any size
            raise yaml.YAMLError("it has an alias (*name); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        if len(mapping) < len(node.value):
            raise yaml.YAMLError(f"a key is repeated: {', '.join(map(str, mapping))}")
        return mapping


for _tag in ("bool", "float", "int", "timestamp"):  # such as !!int 010
    _TextLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", yaml.SafeLoader.construct_yaml_str)


def parse_yaml(content: str | bytes) -> Any:
    """Return YAML as mappings and lists of text and None."""
    loader = _TextLoader(content)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _read_yaml(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and values of a YAML file."""
    problem = f"config file {path} cannot be read as YAML"
    with refused(ConfigError, problem, "see --help-config"):
        loaded = parse_yaml(path.read_bytes())
    if not isinstance(loaded, dict) or not loaded:
        sections = "sections such as 'model:' with keys below them; see --help-config"
        raise ConfigError(f"config file {path} holds no keys; write {sections}")
    for section, content in loaded.items():
        if isinstance(content, dict):
            for name, value in content.items():
                yield f"{section}.{name}", value
        elif content is not None or section not in SECTIONS:  # a section may be empty
            yield str(section), content


def as_assignment(name: str, value: Any) -> str:
    """Return section.key=value, as `load_config` takes it."""
    return f"{name}={json.dumps(value, ensure_ascii=False, default=str)}"


def _parse(assignment: str) -> tuple[str, Any]:
    """Parse section.key=value, the value as YAML unless the key takes text."""
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        expected = "not section.key=value, without spaces; see --help-config"
        raise ConfigError(f"{_show(assignment)!r} is {expected}")
    # Text needs no quotes: a path may hold what YAML reads as a comment or a mapping.
    kind = TYPES.get(name)
    is_list = kind is not str and text[:1] + text[-1:] == "[]"
    if kind in (str, tuple[str, ...]) and not is_list and text[:1] not in ("'", '"'):
        return name, text
    try:
        return name, parse_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = one_line(error)
        if text.count("{") + text.count("[") > text.count("}") + text.count("]"):
            reason = "a bracket is open; quote what has spaces: 'section.key={name: value}'"
        where = f"{_show(name)}={_show(text)} (from {COMMAND_LINE})"
        raise ConfigError(f"{where} cannot be read as YAML: {reason}") from None


def _set(values: dict[str, Any], name: str, value: Any, source: str) -> None:
    """Set a key, or raise a `ConfigError` that says what is expected."""
    where = f"{name}={_show(value)} (from {source})"
    if name in SECTIONS:
        remedy = f"write {name}.<key>, see --help-config"
        raise ConfigError(f"{where}: '{name}' is a section; {remedy}")
    parent, _, last = name.rpartition(".")
    is_argument = parent == "optimizer.args" and last.isidentifier()
    if name not in TYPES and not is_argument:
        raise ConfigError(f"unknown key {_show(name)!r} (from {source}); {_suggestion(name)}")
    try:
        str(value).encode()  # text that is not valid UTF-8 could not be saved with the run
        if is_argument:
            values[parent] = values.get(parent, {}) | {last: plain_values(value)}
        elif value == "auto" and name in AUTO:
            values[name] = AUTO[name]["auto"]
        else:
            values[name] = _convert(TYPES[name], value)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not {_expected(name, value)}") from None
    if name in AUTO and value != "auto":  # only `auto` itself may say so
        holds = values[name] != AUTO[name]["auto"]
        require(holds, name, values[name], range_in_words(AUTO[name], values[name]))
    if name in FOLDERS:  # shells expand ~ only where a word begins
        values[name] = os.path.expanduser(values[name])


def _convert(hint: Any, value: Any) -> Any:
    """Return text as a value of this type; raise `ValueError` if it is none."""
    if hint == dict[str, Any] and isinstance(value, dict):
        return plain_values(value)
    if hint == int | None and value is None:
        return None
    if hint == tuple[str, ...]:
        texts = value if isinstance(value, list) else [value]
        if texts and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    if isinstance(value, str):
        if hint is str or value in _choices(hint):
            return value
        if hint is bool and value.lower() in BOOLS:
            return BOOLS[value.lower()]
        if hint in (int, int | None) and WHOLE.fullmatch(value):
            return int(value)
        if hint is float and NUMBER.fullmatch(value):
            return float(value)
    raise ValueError


def plain_values(value: Any) -> Any:
    """Return text, or lists and mappings of text, as plain values."""
    if isinstance(value, list):
        return [plain_values(element) for element in value]
    if isinstance(value, dict):
        return {str(name): plain_values(element) for name, element in value.items()}
    for hint in (int, float, bool, str):
        with contextlib.suppress(ValueError):
            return _convert(hint, value)
    if value is None:
        return None
    raise ValueError  # a date, bytes or a set


# Answers to mistakes: what a key takes, and what an unknown name probably means.


def _choices(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return ()


def _expected(name: str, value: Any) -> str:
    """Describe what a key takes, with the nearest valid spelling."""
    hint = TYPES.get(name)
    if choices := _choices(hint):
        words = f"one of {', '.join(choices)}"
        near = FOREIGN_VALUES.get(str(value).lower(), "")
        if near not in choices:
            near = nearest(str(value), choices)
        if near:
            words += f"; did you mean {near}?"
        return words
    words = TYPE_NAMES[hint]
    if name in AUTO:
        words += " or auto"
    with contextlib.suppress(ValueError):
        number = float(str(value))
        if hint in (int, int | None, float) and number.is_integer() and abs(number) < LARGEST:
            words += f"; write {number:.0f}"  # not 010 or 1e1
    return words


def _suggestion(unknown: str) -> str:
    """Return the remedy for an unknown key: the nearest one, if any."""
    if near := nearest_key(unknown):
        return f"did you mean '{near}'?"
    section, _, last = unknown.rpartition(".")
    if not section and (near := nearest(last.lower(), SECTIONS, cutoff=0.7)):
        return f"did you mean the section '{near}'?"
    return "see --help-config"


def nearest_key(unknown: str) -> str:
    """Return the key that a name of this or another program means, if any."""
    unknown = unknown.replace("-", "_").lstrip("_").lower()
    section, _, last = unknown.rpartition(".")
    for name, foreign_names in FOREIGN_NAMES.items():
        if last in foreign_names:
            return name
    if unknown in SECTIONS:  # --optimizer Adam
        return next(name for name in TYPES if name.startswith(f"{unknown}."))
    if not section and nearest(last, SECTIONS, cutoff=0.7):
        return ""
    # Compare the last parts first: a key in the wrong section is the most common mistake.
    names = list(TYPES)
    if section == "optimizer":  # the key of another section only if it is spelled exactly
        names = [name for name in names if name.startswith("optimizer.") or name.endswith(last)]
    if near := nearest(last, [name.split(".")[1] for name in names]):
        names = [name for name in names if name.endswith(f".{near}")]
        return nearest(unknown, names, cutoff=0)
    if section == "optimizer" and last.isidentifier():
        return f"optimizer.args.{last}"
    return ""


def _show(value: Any) -> str:
    """Return a value as in YAML, on one line of at most 60 characters."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = one_line(value)
    if len(text) > SHOWN_CHARACTERS:
        text = text[: SHOWN_CHARACTERS - 3] + "..."
    return text
