"""Load word vectors from a run folder or a file."""

from __future__ import annotations

import io
import itertools
import logging
import operator
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from w2v.system.files import one_line, refused
from w2v.system.resources import require_memory
from w2v.text.formats import packing_of, unpacked
from w2v.vectors import fasttext, manifest, runs
from w2v.vectors.fasttext import Ngrams
from w2v.vectors.manifest import VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

READABLE = (".kv", ".bin", ".txt", ".vec")  # gensim's KeyedVectors, word2vec's binary and text
UTF16 = "is UTF-16 text; convert it: iconv -f UTF-16 -t UTF-8"
OTHERS = {  # first bytes of files that are known and hold no vectors, or none that are read here
    b"PK\x03\x04": "is a zip archive; unzip it first",
    b"\xff\xfe": UTF16,
    b"\xfe\xff": UTF16,
}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
HEADER = re.compile(rb"[ \t]*(\d{1,18})[ \t]+(\d{1,18})[ \t]*\r?")  # words and dimensions
NO_TEXT = re.compile(rb"[\x00-\x08\x0e-\x1f]")
BLOCK_BYTES = 1 << 20  # read at a time
LONGEST = 1 << 26  # bytes of a line, or of a word and its vector
SAMPLE_LINES = 100  # from which the number of dimensions is told
# Beside vectors.kv, as gensim names them: vectors, and of subwords own ones and those of n-grams.
ARRAY, OWN, NGRAMS = (f"vectors.kv.vectors{part}.npy" for part in ("", "_vocab", "_ngrams"))
VOCAB = "vocab.tsv"
SUBWORD_CLASS = "gensim.models.fasttext FastTextKeyedVectors"
KEYED_CLASSES = {
    SUBWORD_CLASS,
    "gensim.models.keyedvectors KeyedVectors",
    "gensim.models.keyedvectors Word2VecKeyedVectors",  # of gensim 3
}
NUMPY = "multiarray _reconstruct", "multiarray scalar", "numeric _frombuffer"
PICKLED = {  # all names in a pickle of KeyedVectors
    *KEYED_CLASSES,
    "gensim.models.keyedvectors Vocab",
    "numpy ndarray",
    "numpy dtype",
    *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in NUMPY),
    "_codecs encode",
    "__builtin__ frozenset",
    "builtins frozenset",
}
OPCODES = (  # of values, lists and dictionaries
    "PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE "
    "BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES "
    "SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 "
    "TUPLE2 TUPLE3 GLOBAL STACK_GLOBAL NEWOBJ REDUCE BUILD"
)
KEYS = (str, int, float, bytes)  # types of words
AGAIN = "download or export it again, as .kv, .bin or .txt"
SAVE_WV = "save the .wv of a gensim model by .save_word2vec_format('vectors.bin', binary=True)"
CODES = [getattr(pickle, name)[0] for name in OPCODES.split()]
PythonUnpickler: Any = pickle._Unpickler  # the one in C makes dictionaries of any keys
KINDS = re.compile("b1|[iu][1248]|f[248]|U[0-9]{1,6}")  # of arrays: numbers, and NumPy's text

log = logging.getLogger("w2v")


def find(run: str | Path) -> Path:
    """Return the vectors file of a run folder, of "latest", or `run` itself."""
    path = Path(run)
    if not path.is_file():
        return runs.find(run, "vectors.kv") / "vectors.kv"
    return path


class Words:
    """Words and vectors as in KeyedVectors, without importing gensim.

    Functions that take Words take gensim's KeyedVectors too.
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: np.ndarray,
        expandos: Mapping[str, np.ndarray] | None = None,  # further columns, such as "count"
        ngrams: Ngrams | None = None,  # for vectors of other words
    ):
        self.vectors = vectors
        self.index_to_key = list(words)
        self.key_to_index = {word: row for row, word in enumerate(words)}
        self.expandos = dict(expandos or {})
        self.ngrams = ngrams
        self.norms: np.ndarray | None = None  # computed on demand


def load(run: str | Path | Words) -> KeyedVectors:
    """Load the vectors that `run` names, see `find`, as gensim's class.

    gensim's own `load` runs any code that a .kv file, a pickle, names; this does not.
    """
    from gensim.models import KeyedVectors

    words = run if isinstance(run, Words) else load_words(run)
    dim, ngrams = words.vectors.shape[1], words.ngrams
    kv = KeyedVectors(dim)
    if ngrams:
        from gensim.models.fasttext import FastTextKeyedVectors

        kv = FastTextKeyedVectors(dim, ngrams.min_n, ngrams.max_n, len(ngrams.buckets_BD))
        kv.vectors_vocab, kv.vectors_ngrams = np.array(ngrams.own_VD), np.array(ngrams.buckets_BD)
    # Copies, which can be written, if others have these words too.
    kv.index_to_key = list(words.index_to_key)
    kv.key_to_index = dict(words.key_to_index)
    kv.next_index = len(words.index_to_key)
    kv.expandos = dict(words.expandos)
    kv.vectors = words.vectors
    if isinstance(run, Words) or isinstance(kv.vectors, np.memmap):
        kv.vectors = np.array(kv.vectors)
    if ngrams:
        kv.recalc_char_ngram_buckets()
    return kv


def load_words(run: str | Path) -> Words:
    """Load the vectors that `run` names; compare their checksums, if present.

    Raises `VectorsError` if they are damaged, or older than the run in whose folder they are.
    """
    path = find(run)
    folder = path.parent
    manifest.require_current(folder)
    _, sums = manifest.read(folder)
    names = [name for name in sums if name == path.name or name.startswith(f"{path.name}.")]
    is_run = path.name == "vectors.kv" and VOCAB in sums and NGRAMS not in sums
    if is_run:
        names.append(VOCAB)
    manifest.check(folder, names, sums)
    problem = f"{path} cannot be read as vectors"
    with refused(VectorsError, problem, AGAIN), np.errstate(over="raise", invalid="ignore"):
        if is_run:
            return _read_run(folder)
        with unpacked(path, packing_of(path)) as file:
            return _read(path, file)


def _read_run(folder: Path) -> Words:
    """Read the vectors of a run, without any pickle."""
    text = (folder / VOCAB).read_bytes().decode()
    _, _, text = text.partition("\n")
    cells = text.rstrip("\n").replace("\n", "\t").split("\t")
    counts = np.array(cells[1::2], np.int64)
    return _checked(folder, cells[::2], _map_rows(folder / ARRAY), {"count": counts})


def _read(path: Path, file: io.BufferedIOBase) -> Words:
    """Read vectors in the format that the first bytes tell."""
    head = file.read(BLOCK_BYTES)
    for magic, problem in OTHERS.items():
        if head.startswith(magic):
            raise VectorsError(f"{path} {problem}")
    if head.startswith(pickle.PROTO):
        file.seek(0)
        content = io.BytesIO()
        while block := file.read(BLOCK_BYTES):
            require_memory()
            content.write(block)
        content.seek(0)
        return _read_kv(path, content)
    if head.startswith(fasttext.MAGIC):
        file.seek(0)
        words, counts, ngrams = fasttext.read(file)
        return _checked(path, words, ngrams.compose_all(words), {"count": counts}, ngrams)
    head = head.removeprefix(BYTE_ORDER_MARK) + file.readline(LONGEST)  # whole lines
    first, _, body = head.partition(b"\n")
    header = HEADER.fullmatch(first)
    if not header:
        return _read_glove(path, head, file)
    count, dim = map(int, header.groups())
    says = f"the header says {count:,} words of {dim:,} dimensions"
    if not count or not 0 < dim <= LONGEST // 4:
        raise ValueError(says)
    numbers = _numbers_of_lines(body)
    # Text with a wrong line is not taken for binary vectors, so that the line is named.
    is_text = ".bin" not in path.suffixes and not NO_TEXT.search(body)
    if not is_text and (not numbers or numbers[0] < dim):
        blocks = itertools.chain([body], iter(lambda: file.read(BLOCK_BYTES), b""))
        return _fill(path, _binary_rows(blocks, dim), dim, count, says)
    # Else the numbers too many would be taken for parts of words with spaces.
    if numbers and min(numbers) > dim:
        raise ValueError(f"{says}, lines end in {min(numbers):,} numbers")
    return _fill(path, _text_rows(body, file, dim, 2), dim, count, says)


def _read_glove(path: Path, head: bytes, file: io.BufferedIOBase) -> Words:
    """Read text without a header: most lines tell the number of dimensions."""
    found = Counter(_numbers_of_lines(head))
    dim = max(found, key=lambda numbers: (found[numbers], -numbers), default=0)
    if not dim and (NO_TEXT.search(head) or not head):
        raise ValueError("it is of no format of gensim, word2vec, GloVe or fastText since 0.1")
    if not dim:
        problem = "is text, not vectors: its lines do not end in numbers"
        raise VectorsError(f"{path} {problem}; to train on it: w2v train {quote(str(path))}")
    rows = _text_rows(head, file, dim, 1)
    return _fill(path, rows, dim, None, f"most lines end in {dim:,}")


def _numbers_of_lines(text: bytes) -> list[int]:
    """Return how many numbers each of the first lines ends in, after a word."""
    lines = itertools.islice(io.BytesIO(text), SAMPLE_LINES)
    return [_numbers_at_end(line) for line in lines if line.strip()]


def _numbers_at_end(line: bytes) -> int:
    """Return how many numbers a line ends in; the first field is a word."""
    fields = line.split()
    if not line[:1].isspace():
        fields = fields[1:]
    for place, field in enumerate(reversed(fields)):
        try:
            float(field)
        except ValueError:
            return place
    return len(fields)


Row = tuple[int, bytes, Any]  # the number of its line, the word, the numbers


def _text_rows(head: bytes, file: io.BufferedIOBase, dim: int, first_line: int) -> Iterator[Row]:
    """Yield the rows of a text, from its head on; words may hold spaces."""
    lines = itertools.chain(io.BytesIO(head), iter(lambda: file.readline(LONGEST), b""))
    for number, line in enumerate(lines, first_line):
        word, *numbers = line.rsplit(None, dim) or [b""]
        if len(numbers) == dim - 1 and line[:1].isspace():
            word, numbers = b"", [word, *numbers]
        if b"\r" in word:
            raise ValueError(f"line {number:,} has a carriage return that ends no line")
        if line.strip():
            yield number, word, numbers


def _binary_rows(blocks: Iterator[bytes], dim: int) -> Iterator[Row]:
    """Yield the rows of word2vec's binary format: word, space, float32."""
    rest = b""
    for block in blocks:
        content = rest + block
        start = 0
        while 0 <= (space := content.find(b" ", start)) < len(content) - 4 * dim:
            # word2vec.c ends each vector with a line end, others do not.
            word = content[start:space].lstrip(b"\n")
            yield 0, word, np.frombuffer(content, "<f4", dim, space + 1)
            start = space + 1 + 4 * dim
        rest = content[start:]
        if len(rest) > LONGEST + 4 * dim:
            raise ValueError(f"a word has over {LONGEST:,} bytes")


def _fill(path: Path, rows: Iterator[Row], dim: int, count: int | None, says: str) -> Words:
    """Return the first `count` rows, or all, as an array that grows with them."""
    # A header may say anything, so no memory is taken for what it says.
    vectors = np.empty((max(1, BLOCK_BYTES // (4 * dim)), dim), np.float32)
    words: list[str] = []
    broken = 0
    for number, word, row in rows:
        if len(words) == count:
            log.warning(f"{path}: {says}, but there are more; they are not read")
            break
        if len(word) > BLOCK_BYTES or len(words) == len(vectors):
            require_memory()
        if len(words) == len(vectors):
            vectors.resize((len(vectors) + len(vectors) // 16 + 1, dim), refcheck=False)
        try:
            if len(row) < dim:
                raise ValueError  # NumPy would repeat a single number
            vectors[len(words)] = row
        except FloatingPointError:
            raise ValueError(f"line {number:,} has a number above 3.4e38") from None
        except ValueError:
            found = _numbers_at_end(b" ".join([word, *row]))
            raise ValueError(f"line {number:,} ends in {found:,} numbers, but {says}") from None
        try:
            words.append(word.decode())
        except UnicodeDecodeError:
            broken += 1
            words.append(word.decode(errors="replace"))
    if len(words) < (count or 1):
        raise ValueError(f"{says}, the file has {len(words):,}")
    vectors.resize((len(words), dim), refcheck=False)
    if broken > len(words) // 2:
        raise ValueError(f"{says}, but {broken:,} of {len(words):,} words are not UTF-8")
    if broken:
        log.warning(f"words that are not UTF-8 in {path}: {broken:,}; U+FFFD replaces the bytes")
    # Falling, as gensim does: its files are sorted by count.
    return _checked(path, words, vectors, {"count": np.arange(len(words), 0, -1)})


def _read_kv(path: Path, content: io.BytesIO) -> Words:
    """Read what KeyedVectors.save has written."""
    decoder = Decoder(content)
    decoder.path = path
    made = decoder.load()
    if not isinstance(made, Made) or made.name not in KEYED_CLASSES:
        raise VectorsError(f"{path} is a pickle of other objects than KeyedVectors; {SAVE_WV}")
    state = made.state
    if state.get("__scipys") or state.get("__recursive_saveloads"):
        raise ValueError("it names other files, which gensim would unpickle")
    # gensim lists the arrays that are in files of their own.
    apart = state.get("__numpys", ())

    def rows(name: str) -> np.ndarray:
        return _map_rows(Path(f"{path}.{name}.npy")) if name in apart else _array(state[name])

    keys = state.get("index_to_key", state.get("index2word"))  # gensim 4 and 3
    words = [_text(key) for key in keys]
    expandos = {name: _array(column) for name, column in state.get("expandos", {}).items()}
    ngrams = None
    if made.name == SUBWORD_CLASS:
        min_n, max_n = (operator.index(state[name]) for name in ("min_n", "max_n"))
        ngrams = Ngrams(min_n, max_n, rows("vectors_vocab"), rows("vectors_ngrams"))
    if ngrams and "vectors" not in {*state, *apart}:  # as gensim saves it
        if len(ngrams.own_VD) != len(words):
            raise ValueError(f"{len(words):,} words do not match {len(ngrams.own_VD):,} vectors")
        vectors_VD = ngrams.compose_all(words)
    else:
        vectors_VD = rows("vectors")
    found = _checked(path, words, vectors_VD, expandos, ngrams)
    # Documents that gensim's Doc2Vec has numbered are in the list alone.
    for key, row in state.get("key_to_index", {}).items():
        if type(row) is not int or row < 0 or words[row] != _text(key):
            raise ValueError("index_to_key and key_to_index do not match")
    if state["vector_size"] not in (found.vectors.shape[1], None):
        raise ValueError(f"vector_size is {state['vector_size']}, vectors {found.vectors.shape}")
    return found


def _text(key: Any) -> str:
    """Return a key as text: words may be numbers, from NumPy too."""
    if isinstance(key, Made):
        key = _numbers(key).item()
    if type(key) not in KEYS:
        raise ValueError(f"a word is a {type(key).__name__}, not text")
    return str(key)


def _checked(
    path: Path,
    words: list[str],
    vectors: np.ndarray,
    expandos: Mapping[str, np.ndarray],
    ngrams: Ngrams | None = None,
) -> Words:
    """Return words and columns that match; keep a repeated word's first row."""
    if vectors.ndim != 2 or vectors.dtype not in (np.float16, np.float32, np.float64):
        raise ValueError(f"vectors are {vectors.dtype} {list(vectors.shape)}, not rows of floats")
    columns = {"vectors": vectors} | dict(expandos)
    if ngrams:
        columns["own vectors"] = ngrams.own_VD
        is_whole = vectors.shape[1] == ngrams.own_VD.shape[1] == ngrams.buckets_BD.shape[1]
        if not is_whole or ngrams.buckets_BD.dtype.kind != "f":
            raise ValueError("vectors of words and of n-grams do not match")
    for name, column in columns.items():
        if len(column) != len(words):
            raise ValueError(f"{len(words):,} words do not match {len(column):,} {name}")
    "".join(words).encode()  # raises if a word is not valid text
    found = Words(words, vectors, expandos, ngrams)
    if repeated := len(words) - len(found.key_to_index):
        log.warning(f"repeated words in {path}: {repeated:,}; the first vector of each is kept")
        rows = sorted({word: row for row, word in reversed([*enumerate(words)])}.values())
        columns = {name: column[rows] for name, column in expandos.items()}
        if ngrams:
            ngrams = ngrams._replace(own_VD=ngrams.own_VD[rows])
        return Words([words[row] for row in rows], vectors[rows], columns, ngrams)
    return found


def _map_rows(path: Path) -> np.ndarray:
    """Map rows of an .npy file: copied where written, or of other byte order."""
    if not path.is_file():  # a FIFO would block
        raise ValueError(f"there is no file {path.name}")
    rows = np.lib.format.open_memmap(path, mode="c")
    return rows.astype(rows.dtype.newbyteorder("="), copy=False)


class Made:
    """An object that a pickle would make: what it would call, and the state."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> Made:
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Keyed(dict):
    """Dictionary whose keys are text, numbers or `Made`."""

    def __setitem__(self, key: Any, value: Any) -> None:
        # As a key, a million tuples in each other would exhaust C's stack.
        if type(key) not in KEYS and not isinstance(key, Made):
            raise ValueError(f"a word is a {type(key).__name__}, not text")
        super().__setitem__(key, value)


class Dispatch(dict):
    """Functions by opcode."""

    def __missing__(self, code: int) -> Any:
        raise ValueError(f"it has opcode {code}, which gensim does not write")


class Decoder(PythonUnpickler):
    """Unpickler of plain values; each object becomes a `Made`.

    A pickle is a program that may import and call any function. Nothing is called here: opcodes
    that gensim and NumPy write, in protocols 2 to 5, fill lists and dictionaries. `load` raises
    exceptions of any kind for other opcodes and names, and for damage.
    """

    path: Path  # for messages
    dispatch: ClassVar = Dispatch((code, PythonUnpickler.dispatch[code]) for code in CODES)
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Keyed())
    dispatch[pickle.FROZENSET[0]] = PythonUnpickler.load_tuple  # nothing is hashed
    dispatch[pickle.BYTEARRAY8[0]] = PythonUnpickler.load_binbytes8  # not of any size

    def find_class(self, module: str, name: str) -> type[Made]:
        """Return a class whose instances are `Made`; import nothing."""
        called = f"{module} {name}"
        if called not in PICKLED:  # a whole model is a common mistake
            code = f"it names {one_line(f'{module}.{name}')[:80]}, which could run any code"
            raise VectorsError(f"{self.path}: {code}; {SAVE_WV}")
        return type(name, (Made,), {"name": called})


def _array(made: Made) -> np.ndarray:
    """Return a pickled array: of numbers, or of arrays of numbers."""
    _, shape, dtype, _, content = _array_state(made)
    if dtype.arguments[0] != "O8":
        return _numbers(made)
    column = np.empty(len(content), object)
    for place, value in enumerate(content):
        # One level only: of arrays in arrays in arrays, a small file could hold billions.
        column[place] = value
        if isinstance(value, Made):
            column[place] = _numbers(value)
    return column.reshape(shape)


def _numbers(made: Made) -> np.ndarray:
    """Return a pickled array of numbers; raise unless its parts match."""
    _, shape, dtype, in_columns, content = _array_state(made)
    kind = dtype.arguments[0]
    if not KINDS.fullmatch(kind):
        raise ValueError("an array does not hold numbers")
    if isinstance(content, Made):  # protocol 2 writes bytes as text
        content = content.arguments[0].encode("latin1")
    order: Literal["C", "F"] = "C"
    if in_columns is True:
        order = "F"
    found = np.ndarray(shape, np.dtype(kind).newbyteorder(dtype.state[1]), content, order=order)
    if found.nbytes != len(content):
        raise ValueError(f"an array of {len(content):,} bytes does not have its size")
    return found.astype(kind)  # a copy in this machine's byte order, which can be written


def _array_state(made: Made) -> tuple[Any, ...]:
    """Return version, shape, dtype, order by columns, and content."""
    if made.name.endswith(" scalar"):
        dtype, content = made.arguments
        return None, (), dtype, False, content
    if made.name.endswith(" _frombuffer"):  # protocol 5
        content, dtype, shape, order = made.arguments
        return None, shape, dtype, order == "F", content
    return made.state
