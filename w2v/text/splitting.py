"""Choose how a text is split into words, and split it by functions."""

from __future__ import annotations

import hashlib
import importlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedIOBase
from pathlib import Path

from w2v.config import CorpusConfig
from w2v.system.files import one_line
from w2v.text.formats import TOKEN_END, CorpusError, Format, as_file, opened

SAMPLE_BYTES = 1_000_000  # read to recognize raw text
SAMPLE_FILES = 8
RAW_SHARE = 0.03  # of the tokens; in raw text more of them end in punctuation
SPACELESS_SHARE = 0.1  # of the characters
# Letters of scripts without spaces, and the mean length from which a run of them is no word.
SPACELESS = {
    "Chinese or Japanese": (
        "[\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
        "\uff66-\uff9f\U00020000-\U0003ffff]+",
        3.5,
    ),
    "Thai, Lao, Khmer or Burmese": (
        "[\u0e01-\u0eff\u1000-\u109f\u1780-\u17d3\ua9e0-\ua9fe\uaa60-\uaa7f]+",
        10.0,
    ),
}
PICTURE = "[\u231a\u231b\u23e9-\u23f3\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001faff]"
SKIN = "[\U0001f3fb-\U0001f3ff]?"
# Flags, and pictures joined to one.
EMOJI = re.compile(
    f"[\U0001f1e6-\U0001f1ff]{{2}}|{PICTURE}\ufe0f?{SKIN}(?:\u200d{PICTURE}\ufe0f?{SKIN})*"
)

Splitter = Callable[[str], Iterable[str]]


def tokenize_mode(files: list[Path], settings: CorpusConfig) -> tuple[str, str]:
    """Return how to split a text, and why if `corpus.tokenize` is auto.

    In raw text, many tokens end in punctuation, here in a megabyte from the beginning of some
    files. Tokens of punctuation alone do not count, as they come from a tokenizer.

    Raises `CorpusError` for a script without spaces between words.
    """
    if settings.tokenize not in ("auto", "words"):
        return settings.tokenize, ""
    some = files[:: -(-len(files) // SAMPLE_FILES)]
    sample = b""
    for path in some:
        with opened(path, settings) as file:
            sample += file.read(SAMPLE_BYTES // len(some))
    text = sample.decode(errors="replace")
    tokens = text.split()
    if settings.tokenize == "auto" and text.count(TOKEN_END) > len(tokens) / 2:
        return "whitespace", ""
    if len(sample) > (1 + SPACELESS_SHARE) * len(text):  # such letters take three bytes or more
        _require_spaces(" ".join(map(str, some)), text)
    if settings.tokenize == "words":
        return "words", ""
    ending = [token for token in tokens if unicodedata.category(token[-1])[0] == "P"]
    raw = sum(any(map(str.isalnum, token)) for token in ending)
    share = raw / (len(tokens) or 1)
    if share <= RAW_SHARE:
        return "whitespace", ""
    return "words", f"{100 * share:.0f} % of the tokens end in punctuation: tokenize=words"


def _require_spaces(paths: str, text: str) -> None:
    """Raise `CorpusError` if words of the text are not separated."""
    size = len("".join(text.split()))
    for script, (letters, longest) in SPACELESS.items():
        runs = re.findall(letters, text)
        found = sum(map(len, runs))
        if found > SPACELESS_SHARE * size and found > longest * len(runs):
            share = f"{100 * found / size:.0f} % of {paths} is {script} without spaces"
            remedy = "set corpus.tokenize=icu (pip install icu4py) or module:function"
            raise CorpusError(f"{share}; {remedy}, or whitespace if it is split already")


def splitter(settings: CorpusConfig) -> Splitter | None:
    """Return the function that splits a line, or None for compiled ones."""
    name = settings.tokenize
    if name == "icu":
        return _icu(settings.emoji)
    module, colon, function = name.partition(":")
    if not colon:
        return None
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        remedy = "install it, or start where its file is"
        raise CorpusError(f"corpus.tokenize={name} is not found ({error}); {remedy}") from None
    except Exception as error:  # whatever a user's module raises
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise CorpusError(f"corpus.tokenize={name} fails ({reason}); correct it") from error
    if not callable(found):
        raise CorpusError(f"corpus.tokenize={name} is not a function; name one")
    return found


def source_of(settings: CorpusConfig) -> str:
    """Return a hash of the module that splits the text, for the cache."""
    found = splitter(settings)
    module = importlib.import_module(found.__module__) if found and found.__module__ else None
    file = getattr(module, "__file__", None)
    return hashlib.blake2b(Path(file).read_bytes()).hexdigest() if file else ""


def _icu(with_emoji: bool) -> Splitter:
    """Return a function that finds words of any script, in lower case."""
    try:
        from icu4py.breakers import WordBreaker
    except ImportError:
        raise CorpusError("corpus.tokenize=icu needs a package; pip install icu4py") from None

    def words(line: str) -> Iterator[str]:
        for word in WordBreaker(line.lower().replace("\ufe0f", ""), "en"):
            if any(map(str.isalnum, word)) or (with_emoji and EMOJI.match(word)):
                yield word

    return words


@contextmanager
def opened_words(path: Path, settings: CorpusConfig, known: Format) -> Iterator[BufferedIOBase]:
    """Open a file as UTF-8, its lines split if the settings name a function."""
    split = splitter(settings)
    with opened(path, settings, known) as file:
        yield as_file(_split_lines(file, split, path, settings.tokenize)) if split else file


def _split_lines(file: BufferedIOBase, split: Splitter, path: Path, name: str) -> Iterator[str]:
    """Yield each line as words and spaces."""
    for number, line in enumerate(file, 1):
        try:
            words = split(line.decode("utf-8", "surrogateescape").rstrip("\r\n"))
            yield (words if isinstance(words, str) else " ".join(words)) + "\n"
        except Exception as error:  # whatever a user's function raises
            reason = f"{type(error).__name__}: {one_line(error)}"
            problem = f"corpus.tokenize={name} fails at line {number} of {path} ({reason})"
            raise CorpusError(f"{problem}; it must return a list of words") from error
