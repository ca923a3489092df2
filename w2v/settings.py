"""A config from YAML files and then from key=value arguments, later wins; back to YAML; and described key by key.

Errors are one line that names the key, its value and the nearest spelling. A value may refer to another key as ${model.window}.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from yaml import YAMLError

from w2v.config import Config, ConfigError
from w2v.system import files as durable

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


def load(files: Sequence[str | Path] = (), assignments: Sequence[str] = ()) -> Config:
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


def save(config: Config, path: str | Path) -> None:
    """Write the resolved config as YAML, aside first and then in one move; `load([path])` gives it back."""
    durable.replace(Path(path), OmegaConf.to_yaml(OmegaConf.structured(config)))


def as_dict(config: Config) -> dict[str, Any]:
    """The value of each key by its dotted name."""
    return {
        name: getattr(getattr(config, section), key)
        for name in names()
        for section, key in [name.split(".")]
    }


def describe() -> str:
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


def reference() -> str:
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


def changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Which keys of `as_dict` differ, each with both values in words; one that an `old` program did not know had the default."""
    old = as_dict(Config()) | old
    differ = [name for name in new if old[name] != new[name]]
    return {
        name: f"{name}={_show(new[name])} instead of {_show(old[name])}" for name in sorted(differ)
    }


def names() -> Iterator[str]:
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
    known = {name: name.rpartition(".")[2] for name in names()}
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
