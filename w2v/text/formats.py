"""Recognize formats of texts by their first bytes; read lines of UTF-8."""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedIOBase
from itertools import chain, count
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from w2v.config import SECTIONS, CorpusConfig
from w2v.system.files import one_line, refused

HEAD_BYTES = 1 << 16  # of a file, to recognize its format
CHUNK = 1 << 20  # characters
TOKEN_END = "\x1f"  # between the tokens of a list: white space that a text seldom has
MOST_MISSING = 100  # entries without the field before the first one that has it
MARKUP_SHARE = 0.01  # of the tokens of a text: tags
FLAGS = re.DOTALL | re.IGNORECASE
DEFAULT = CorpusConfig()
UNREADABLE = "is it complete, of this encoding, and the package installed that reads it?"
log = logging.getLogger("w2v")

PACKED = {  # first bytes by the ending that smart_open knows
    ".gz": rb"\x1f\x8b\x08",
    ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    ".xz": rb"\xfd7zXZ\0",
    ".zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    ".lz4": rb"\x04\x22\x4d\x18",
}
MARKS = {  # byte order marks; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
ENCODINGS = "cp1252 cp1251 koi8_r cp1253 cp1255 cp1256 big5 gb18030 cp932 euc_jp cp949".split()
COLUMNS = {rb"PAR1": "parquet", rb"ARROW1\0\0": "arrow", rb"\xff{4}.{3}\0": "stream"}
PANDOC = "pandoc -t plain {path} -o {stem}.txt"
UNTAG = "sed 's/<[^>]*>/ /g' {path} > {stem}.txt"
UNTIME = r"sed -E '/-->|^[0-9]+\r?$/d' {path} > {stem}.txt"
NOT_TEXT = [  # first bytes, what they begin, and the command that helps
    (rb"PK\x03\x04.{26}mimetypeapplication/epub", "an EPUB book", PANDOC),
    (rb"PK\x03\x04.{26}mimetypeapplication/vnd.oasis", "an OpenDocument file", PANDOC),
    (rb"PK\x03\x04.*(word/|\[Content_Types\])", "an Office document", PANDOC),
    (rb"PK(\x03\x04|\x05\x06)", "a zip archive", "unzip {path}"),
    (rb"7z\xbc\xaf", "a 7z archive", "7z x {path}"),
    (rb"Rar!\x1a\x07", "a RAR archive", "unrar x {path}"),
    (rb".{257}ustar", "a tar archive", "tar xf {path}"),
    (rb"%PDF-", "a PDF document", "pdftotext {path}"),
    (rb"\{\\rtf", "an RTF document", PANDOC),
    (rb"\xd0\xcf\x11\xe0\xa1\xb1", "an Office document", "soffice --convert-to txt {path}"),
    (rb"\x89PNG|\xff\xd8\xff|GIF8[79]a|RIFF.{4}WEBP|II\*\0|MM\0\*|BM.{4}\0{4}", "an image", ""),
    (rb"SQLite format 3\0", "an SQLite database", "sqlite3 {path} 'select text from ...'"),
    (rb"\x89HDF|\x93NUMPY|\x80[\2-\5][c}\]\x95]", "a file of Python data", "write JSON lines"),
    (rb"Obj\x01\x04|ORC[\1-\x08\x0e-\x1f]", "an Avro or ORC table", "write it as Parquet"),
]
HTML = "html|head|body|p|div|span|h[1-6]|table|ul|ol|li|a|b|i|br|center|font|img|article|section"
MARKED_UP = [  # the same for characters
    (rf"\s*(<!--((?!-->).)*-->\s*)*<(!doctype html|({HTML})\b[^<]*>)", "HTML", f"{PANDOC} -f html"),
    (r'\s*<(\?xml|[\w:.-]+(\s+[\w:.-]+="[^"<]*")+\s*/?>)', "XML", UNTAG),
    (r"\s*(\d+\s+[\d:]+[,.]\d+ --> |WEBVTT\b)", "a file of subtitles", UNTIME),
    (r"(\d+ \d+\s+)?\S+( -?\d*\.\d+(e[-+]?\d+)?){5,}\s", "a file of vectors", "w2v nn {path} WORD"),
]
# Of HTML and others; </s> ends a sentence of plain text.
TAGS = re.compile(r"</(?!s>)[A-Za-z][\w:.-]*>|<br ?/?>|<!--|&(?:amp|nbsp|lt|gt|quot|#\d+);")
DUMP = re.compile(r"\s*(<\?xml[^>]*>\s*)?<mediawiki\b")
STRING = r'"(?:[^"\\\0-\x1f]|\\.)*'  # without its last quote, as it may be cut
JSON = re.compile(
    rf'\s*((\[\s*)?\{{\s*{STRING}(\\?\Z|"\s*:)'
    rf'|\[\s*(\[\s*)?{STRING}(\\?\Z|"\s*(\]\s*([][,]|\Z)|,\s*("|\Z))))',
    re.DOTALL,
)
DELIMITERS = "\t,;|"
CONFIG = [("", "a config", "leave it out; settings are section.key=value or a .yaml file")]


class CorpusError(ValueError):
    """An unusable corpus; the message names the file and the remedy."""


class Format(NamedTuple):
    """How a file is read."""

    kind: str  # text, lines (of JSON), json, csv, parquet, arrow, stream (of Arrow), dump
    packing: str = ""  # the ending of packed files
    encoding: str = "utf-8"
    dialect: Mapping[str, Any] = {}  # of csv

    @property
    def is_utf8(self) -> bool:
        """Whether the unpacked bytes are the text."""
        return self.kind in ("text", "dump") and self.encoding in ("utf-8", "utf-8-sig")

    @property
    def is_plain(self) -> bool:
        """Whether the bytes of the file are the text."""
        return self.is_utf8 and not self.packing


def packing_of(path: Path) -> str:
    """Return the ending of packed files that begin as this one, or ""."""
    with open(path, "rb") as file:
        head = file.read(HEAD_BYTES)
    return next((ending for ending, first in PACKED.items() if re.match(first, head)), "")


def recognize(path: Path, settings: CorpusConfig = DEFAULT) -> Format:
    """Return the format of a file; raise `CorpusError` if it is no text."""
    with refused(CorpusError, f"{path} cannot be read", UNREADABLE):
        packing = packing_of(path)
        with unpacked(path, packing) as file:
            head = file.read(HEAD_BYTES)
        return _recognize(path, head, settings)._replace(packing=packing)


def _recognize(path: Path, head: bytes, settings: CorpusConfig) -> Format:
    """Return the format of an unpacked file that begins with these bytes."""
    for pattern, kind in COLUMNS.items():
        if re.match(pattern, head, re.DOTALL):
            return Format(kind)
    _refuse(path, head, NOT_TEXT)
    encoding = codecs.lookup(settings.encoding).name
    if encoding.startswith("utf"):
        encoding = next((name for mark, name in MARKS.items() if head.startswith(mark)), encoding)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head)
    if "\0" in text:
        order = "le" if head[1::2].count(0) >= head[::2].count(0) else "be"
        raise binary_error(path, f"a NUL byte; corpus.encoding=utf-16-{order} if it is UTF-16")
    if DUMP.match(text):
        return Format("dump", encoding=encoding)
    _refuse(path, text, MARKED_UP)
    endings = [ending for ending in path.name.lower().split(".")[1:] if "." + ending not in PACKED]
    ending = endings[-1] if endings else ""
    if ending in ("toml", "ini", "cfg", "yaml", "yml"):
        _refuse(path, text, CONFIG)
    is_whole = len(head) < HEAD_BYTES
    if ending in ("jsonl", "ndjson", "jl"):
        return Format("lines", encoding=encoding)
    if ending == "json" or JSON.match(text + "\n" * is_whole):  # where nothing is cut, lines end
        return Format(_kind_of_json(path, text, settings.field, is_whole), encoding=encoding)
    is_table = ending in ("csv", "tsv", "tab") or settings.field.isdecimal()
    if dialect := _dialect(text, settings.field, is_table, is_whole):
        return Format("csv", encoding=encoding, dialect=dialect)
    tags = TAGS.findall(text)
    if len(tags) > MARKUP_SHARE * (1 + len(text.split())):
        _refuse(path, text, [("", f"text with tags ({tags[0]})", f"{PANDOC} -f html")])
    return Format("text", encoding=encoding)


def _refuse(path: Path, head: Any, known: Iterable[tuple[Any, str, str]]) -> None:
    """Raise `CorpusError` if a file begins as one that is no text."""
    for pattern, what, command in known:
        if re.match(pattern, head, FLAGS):
            remedy = command.format(path=quote(str(path)), stem=quote(path.stem)) or "leave it out"
            raise CorpusError(f"{path} is {what}, not plain text; {remedy}")


def binary_error(path: Path, reason: str) -> CorpusError:
    """Return the error of a file that holds no words."""
    remedy = "use text with spaces between words, plain or as .gz .bz2 .xz .zst"
    return CorpusError(f"{path} looks binary ({reason}); {remedy}")


def guess_encoding(path: Path) -> str:
    """Return "=NAME" for the probable encoding, if a package can tell."""
    with suppress(ImportError), unpacked(path, packing_of(path)) as file:
        from charset_normalizer import from_bytes

        if guess := from_bytes(file.read(HEAD_BYTES), cp_isolation=ENCODINGS).best():
            return f"={guess.encoding} (a guess)"
    return "=NAME, such as latin-1"


def _kind_of_json(path: Path, text: str, field: str, is_whole: bool) -> str:
    """Return "lines" if each line is a value, else "json".

    Raises `CorpusError` for a config, unless it has the field of the text.
    """
    first, _, rest = text.strip().partition("\n")
    for part, kind in ((text, "json"), (first, "lines")):
        with suppress(json.JSONDecodeError):
            value = json.loads(part)
            names = {name.partition(".")[0] for name in value} if isinstance(value, dict) else {""}
            is_config = names and names <= SECTIONS.keys()
            if is_config and field.partition(".")[0] not in names:
                _refuse(path, text, CONFIG)
            return kind
    is_long_line = not (is_whole or rest or first.startswith("["))
    return "lines" if is_long_line else "json"


def _dialect(text: str, field: str, is_table: bool, is_whole: bool) -> dict[str, Any]:
    """Return arguments of csv.reader for a table, and none for other text."""
    first = re.split(r"[\r\n]", text.lstrip(), maxsplit=1)[0]
    marks = [mark for mark in DELIMITERS if mark in first]
    named = [mark for mark in marks if field in next(csv.reader([first], delimiter=mark))]
    if not (named or is_table):
        return {}
    most = "\t" if "\t" in marks else max(",;|", key=first.count)
    delimiter = (named or [most])[0]
    dialect: dict[str, Any] = {"delimiter": delimiter, "strict": True}
    if '\\"' in text and '""' not in text:
        dialect["escapechar"] = "\\"
    rows = csv.reader(io.StringIO(text, newline=""), **dialect)
    widths: list[int] = []
    is_regular = True
    try:
        widths.extend(len(row) for row in rows if row)
    except csv.Error:  # also where the head ends within quotes
        is_regular = not is_whole and rows.line_num >= text.count("\n")
    is_regular &= len(set(widths if is_whole else widths[:-1])) == 1
    # Prose may begin with a list of words, but has spaces after commas.
    if not is_table and (delimiter + " " in first or not is_regular or len(widths) < 2):
        return {}
    if delimiter == "\t" and not (is_regular and re.search(r'^"|\t"', text, re.MULTILINE)):
        dialect["quoting"] = csv.QUOTE_NONE  # where quotes are characters as others
    return dialect


def unpacked(path: Path, packing: str) -> BufferedIOBase:
    """Open a file, unpacked."""
    if not packing:
        return open(path, "rb")
    import smart_open  # takes 50 ms

    return smart_open.open(path, "rb", compression=packing)  # type: ignore[return-value]


@contextmanager
def opened(
    path: Path, settings: CorpusConfig = DEFAULT, known: Format | None = None
) -> Iterator[BufferedIOBase]:
    """Open a file as UTF-8 text, whatever its format; every error names it."""
    found = known or recognize(path, settings)
    with (
        refused(CorpusError, f"{path} cannot be read", UNREADABLE),
        unpacked(path, found.packing) as file,
    ):
        yield file if found.is_utf8 else as_file(_texts(file, found, path, settings.field))


def as_file(parts: Iterable[str]) -> BufferedIOBase:
    """Return a file that holds texts one after another, in UTF-8."""
    encoded = (part.encode("utf-8", BROKEN) for part in parts)
    return io.BufferedReader(_JoinedParts(encoded))


class _JoinedParts(io.RawIOBase):
    """A file that holds parts one after another."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts = parts
        self._rest = b""  # of a part that was read in part

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or next(filter(None, self._parts), b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def _broken(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace what cannot be decoded by one surrogate, and that by one byte."""
    if isinstance(error, UnicodeDecodeError):
        return "\udcff", error.end
    assert isinstance(error, UnicodeEncodeError)
    return b"\xff" * (error.end - error.start), error.end


BROKEN = "w2v.broken"  # so that words are broken in UTF-8 too, and counted
codecs.register_error(BROKEN, _broken)

Entry = tuple[str, Any]  # a place, such as "line 4", and what JSON can hold there


def _texts(file: BufferedIOBase, found: Format, path: Path, field: str) -> Iterator[str]:
    """Yield the text of a file in parts."""
    if found.kind in COLUMNS.values():
        yield from _lines(_rows(file, found.kind, path, field), path, field)
        return
    text = io.TextIOWrapper(file, found.encoding, BROKEN, newline="")  # type: ignore[type-var]
    if found.kind == "lines":
        yield from _lines(_json_lines(text, path), path, field)
    elif found.kind == "json":
        yield from _lines(_json_values(text, path), path, field)
    elif found.kind == "csv":
        yield from _lines(_column(text, found, path, field), path, field)
    else:
        yield from iter(lambda: text.read(CHUNK), "")


def _json_lines(text: io.TextIOBase, path: Path) -> Iterator[Entry]:
    """Yield the value of each line."""
    for number, line in enumerate(text, 1):
        if not line.isspace():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise _no_json(path, f"line {number}", error) from None


def _json_values(text: io.TextIOBase, path: Path) -> Iterator[Entry]:
    """Yield the elements of an array, or values one after another."""
    decode = json.JSONDecoder().raw_decode
    buffer = text.read(CHUNK).lstrip()
    at = int(buffer.startswith("["))
    is_closed = not at
    separators = re.compile(r"[\s,\]]*" if at else r"\s*")
    number = 1
    while True:
        between = separators.match(buffer, at)
        assert between is not None
        at = between.end()
        is_closed |= "]" in between[0]
        try:
            value, at = decode(buffer, at)
            yield f"entry {number}", value
            number += 1
        except json.JSONDecodeError as error:
            # Twice as much each time, as a value that was cut is read again from its start.
            if more := text.read(max(CHUNK, len(buffer) - at)):
                buffer, at = buffer[at:] + more, 0
            elif at < len(buffer) or not is_closed:
                raise _no_json(path, f"entry {number}", error) from None
            else:
                return


def _no_json(path: Path, where: str, error: Exception) -> CorpusError:
    return CorpusError(f"{path} {where} is not JSON ({error}); correct it")


def _column(text: io.TextIOBase, found: Format, path: Path, field: str) -> Iterator[Entry]:
    """Yield the cells of a column: a name in the first row, or a number."""
    csv.field_size_limit(2**31 - 1)
    rows = csv.reader(text, **found.dialect)
    filled: Iterator[list[str]] = filter(None, rows)
    first = next(filled, [])
    if field in first:
        column = first.index(field)
    elif field.isdecimal() and 0 < int(field) <= len(first):
        column = int(field) - 1
        filled = chain([first], filled)  # there are no names
    else:
        names = one_line(" | ".join(first))[:80]
        remedy = "set corpus.field=NAME, or a number if the columns have no names: 1, 2, ..."
        raise CorpusError(f"{path} has no column {field!r} (its first line: {names}); {remedy}")
    try:
        for row in filled:
            if not column < len(row) <= len(first):
                raise csv.Error(f"it has {len(row)} columns instead of {len(first)}")
            yield f"line {rows.line_num}", row[column]
    except csv.Error as error:
        where = f"{path} line {rows.line_num} cannot be read as columns ({error})"
        raise CorpusError(f"{where}; quote texts as CSV does") from None


def _rows(file: BufferedIOBase, kind: str, path: Path, field: str) -> Iterator[Entry]:
    """Yield a column of a Parquet or Arrow file, as entries with one field."""
    try:
        from pyarrow import ipc, parquet
    except ImportError:
        needs = "is Parquet or Arrow, which needs a package"
        raise CorpusError(f"{path} {needs}; pip install pyarrow") from None
    open_table = {"parquet": parquet.ParquetFile, "arrow": ipc.open_file, "stream": ipc.open_stream}
    table = open_table[kind](file)
    schema = table.schema_arrow if kind == "parquet" else table.schema
    column = field if field in schema.names else field.partition(".")[0]
    if column not in schema.names:
        has = one_line(", ".join(f"{each.name}: {each.type}" for each in schema))[:80]
        raise CorpusError(f"{path} has no column {field!r} (it has {has}); set corpus.field=NAME")
    batches = table
    if kind == "parquet":
        batches = table.iter_batches(columns=[column])
    elif kind == "arrow":
        batches = map(table.get_batch, range(table.num_record_batches))
    numbers = count(1)
    for batch in batches:
        cells = batch.column(column)
        cells.validate(full=True)  # of a damaged file, it could address any memory
        for value in cells.to_pylist():
            yield f"row {next(numbers)}", {column: value}


def _lines(entries: Iterable[Entry], path: Path, field: str) -> Iterator[str]:
    """Yield the text in a field of each entry, or an entry that is a text."""
    first: Entry | None = None  # of those without the field
    missing = found = 0
    for where, entry in entries:
        values = list(_values(entry, field)) if isinstance(entry, dict) else [entry]
        values = [value for value in values if value is not None]
        if not values:
            first = first or (where, entry)
            missing += 1
            if missing == MOST_MISSING and not found:
                break
            continue
        try:
            text = "".join(f"{_line(value)}\n" for value in values)
        except TypeError:
            raise _no_text(path, where, entry, field) from None
        if "\0" in text:  # refused in any text, but here the line is known
            raise CorpusError(f"{path} {where} has \\u0000 in the field {field!r}; remove it")
        found += 1
        yield text
    if first and not found:
        raise _no_text(path, first[0], first[1], field)
    if first:
        without = f"{missing:,} of {found + missing:,} entries have no text"
        log.warning(f"{path}: {without} in the field {field!r}, first {first[0]}")


def _values(entry: Any, field: str) -> Iterator[Any]:
    """Yield what is in a field, or below it if its name has dots."""
    name, _, rest = field.partition(".")
    if isinstance(entry, list):
        for each in entry:
            yield from _values(each, field)
    elif isinstance(entry, dict) and field in entry:
        yield entry[field]
    elif isinstance(entry, dict) and rest:
        yield from _values(entry.get(name), rest)


def _line(value: Any) -> str:
    """Return a text, or the line or lines of a list."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise TypeError
    if any(isinstance(each, list) for each in value):
        return "\n".join(map(_line, value))
    words = [_words(each) for each in value]
    long = [parts for parts in words if len(parts) > 5 or (parts[1:] and parts[-1][-1] in ".!?")]
    if len(long) > len(words) / 2:  # sentences
        return "\n".join(map(" ".join, words))
    return "".join("_".join(parts) + TOKEN_END for parts in words)  # new_york


def _words(value: Any) -> list[str]:
    """Return the words of a text or number, such as a product."""
    if isinstance(value, int) and not isinstance(value, bool):
        return [str(value)]
    if not isinstance(value, str):
        raise TypeError
    return value.split()


def _no_text(path: Path, where: str, entry: Any, field: str) -> CorpusError:
    """Return the error of an entry without text, which says what it has."""
    found = type(entry).__name__
    if isinstance(entry, dict):
        found = ", ".join(f"{key}: {type(value).__name__}" for key, value in entry.items())
    reason = f"has no text in the field {field!r} (it has {one_line(found)[:80]})"
    return CorpusError(f"{path} {where} {reason}; set corpus.field=NAME")
