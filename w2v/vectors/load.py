"""Load word vectors from a run folder or a file."""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from w2v.system.files import refused
from w2v.vectors import manifest, runs
from w2v.vectors.manifest import VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

READABLE = (".kv", ".bin", ".txt", ".vec")  # gensim's KeyedVectors, word2vec's binary and text
ARRAY = "vectors.kv.vectors.npy"  # beside vectors.kv, as gensim names it
VOCAB = "vocab.tsv"
KEYED_VECTORS = "gensim.models.keyedvectors KeyedVectors"
PICKLED = {  # all names in a pickle of KeyedVectors
    KEYED_VECTORS,
    "numpy ndarray",
    "numpy dtype",
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
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
CODES = [getattr(pickle, name)[0] for name in OPCODES.split()]
PythonUnpickler: Any = pickle._Unpickler  # the one in C makes dictionaries of any keys
KINDS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"}  # of arrays

log = logging.getLogger("w2v")


def find(run: str | Path) -> Path:
    """Return the vectors file of a run folder, of "latest", or `run` itself."""
    path = Path(run)
    if not path.is_file():
        return runs.find(run, "vectors.kv") / "vectors.kv"
    if path.suffix not in READABLE:
        suffixes = f"the suffixes are {' '.join(READABLE)}; of a Word2Vec model, save model.wv"
        raise VectorsError(f"{run} is not a vectors file; {suffixes}")
    if path.suffix in (".txt", ".vec"):  # a text to train on is a common mistake
        with open(path, "rb") as file:
            first = file.readline(1000).split()
        if len(first) != 2 or not all(number.isdigit() for number in first):
            problem = f"{run} is text, not vectors: its first line is not two numbers"
            remedy = "insert words and dimensions if it is GloVe's, or train on it: w2v train"
            raise VectorsError(f"{problem}; {remedy} {run}")
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
    ):
        self.vectors = vectors
        self.index_to_key = list(words)
        self.key_to_index = {word: row for row, word in enumerate(words)}
        self.expandos = dict(expandos or {})
        self.norms: np.ndarray | None = None  # computed on demand


def load(run: str | Path) -> KeyedVectors:
    """Load the vectors that `run` names, see `find`, as gensim's class.

    gensim's own `load` runs any code that a .kv file, a pickle, names; this does not.
    """
    from gensim.models import KeyedVectors

    words = load_words(run)
    kv = KeyedVectors(words.vectors.shape[1])
    kv.index_to_key = words.index_to_key
    kv.key_to_index = words.key_to_index
    kv.next_index = len(words.index_to_key)
    kv.expandos = words.expandos
    kv.vectors = np.array(words.vectors)  # in memory, where it can be written
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
    is_run = path.name == "vectors.kv" and VOCAB in sums
    if is_run:
        names.append(VOCAB)
    manifest.check(folder, names, sums)
    problem = f"{path} does not hold vectors in the format of {path.suffix} files, or is damaged"
    with refused(VectorsError, problem, "export it again"):
        if is_run:
            return _read_run(folder)
        if path.suffix == ".kv":
            return _read_kv(path)
        return _read_word2vec(path)


def _read_run(folder: Path) -> Words:
    """Read the vectors of a run, without any pickle."""
    text = (folder / VOCAB).read_bytes().decode()
    _, _, text = text.partition("\n")
    cells = text.rstrip("\n").replace("\n", "\t").split("\t")
    counts = np.array(cells[1::2], np.int64)
    return _checked(cells[::2], _map_rows(folder / ARRAY), {"count": counts})


def _read_kv(path: Path) -> Words:
    """Read what KeyedVectors.save has written."""
    made = Decoder(io.BytesIO(path.read_bytes())).load()
    state = made.state
    if made.name != KEYED_VECTORS:
        raise ValueError(f"it holds {made.name}")
    if state.get("__scipys") or state.get("__recursive_saveloads"):
        raise ValueError("it names other files, which gensim would unpickle")
    # gensim lists the arrays that are in files of their own.
    if "vectors" in state.get("__numpys", ()):
        vectors_VD = _map_rows(Path(f"{path}.vectors.npy"))
    else:
        vectors_VD = _array(state["vectors"])
    expandos = {name: _array(column) for name, column in state["expandos"].items()}
    words = _checked(state["index_to_key"], vectors_VD, expandos)
    if state["key_to_index"] != words.key_to_index or state["vector_size"] != vectors_VD.shape[1]:
        raise ValueError("words, their numbers and vectors do not match")
    return words


def _read_word2vec(path: Path) -> Words:
    """Read a file of word2vec; keep the first vector of a repeated word."""
    from gensim.models import KeyedVectors

    kv = KeyedVectors.load_word2vec_format(str(path), binary=path.suffix == ".bin")
    known = kv.next_index  # gensim has places without a word behind
    if repeated := len(kv) - known:
        log.warning(f"repeated words in {path}: {repeated:,}; the first vector of each is kept")
    expandos = {name: column[:known] for name, column in kv.expandos.items()}
    if not kv.vectors.size:
        raise ValueError(f"{len(kv)} words of {kv.vector_size} dimensions")
    return _checked(kv.index_to_key[:known], kv.vectors[:known], expandos)


def _checked(words: list[str], vectors: np.ndarray, expandos: Mapping[str, np.ndarray]) -> Words:
    """Return words and columns; raise `ValueError` if they do not match."""
    if type(words) is not list or set(map(type, words)) - {str}:
        raise ValueError("a word is not text")
    matches = vectors.ndim == 2 and vectors.dtype in (np.float16, np.float32, np.float64)
    matches &= all(len(column) == len(words) for column in [vectors, *expandos.values()])
    found = Words(words, vectors, expandos)
    if not matches or len(found.key_to_index) != len(words):
        raise ValueError("words, vectors and counts do not match")
    "".join(words).encode()  # raises if a word is not valid text
    return found


def _map_rows(path: Path) -> np.ndarray:
    """Return the rows of an .npy file, copied where they are written."""
    if not path.is_file():  # a FIFO would block
        raise ValueError(f"there is no file {path.name}")
    return np.lib.format.open_memmap(path, mode="c")


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
    """Dictionary whose keys are text."""

    def __setitem__(self, key: str, value: Any) -> None:
        # As a key, a million tuples in each other would exhaust C's stack.
        if type(key) is not str:
            raise ValueError("a key is not a word")
        super().__setitem__(key, value)


class Decoder(PythonUnpickler):
    """Unpickler of plain values; each object becomes a `Made`.

    A pickle is a program that may import and call any function. Nothing is called here: opcodes
    that gensim and NumPy write, in protocols 2 to 4, fill lists and dictionaries. `load` raises
    exceptions of any kind for other opcodes and names, and for damage.
    """

    dispatch: ClassVar = {code: PythonUnpickler.dispatch[code] for code in CODES}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.append(Keyed())
    dispatch[pickle.FROZENSET[0]] = PythonUnpickler.load_tuple  # nothing is hashed

    def find_class(self, module: str, name: str) -> type[Made]:
        """Return a class whose instances are `Made`; import nothing."""
        called = f"{module} {name}"
        if called not in PICKLED:  # a whole model is a common mistake
            code = f"it names {module}.{name}, which could run any code"
            raise ValueError(f"{code}; save the .wv of a gensim model")
        return type(name, (Made,), {"name": called})


def _array(made: Made) -> np.ndarray:
    """Return a pickled array: of numbers, or of arrays of numbers."""
    _, shape, dtype, _, content = made.state
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
    _, shape, dtype, in_columns, content = made.state
    kind = dtype.arguments[0]
    if kind not in KINDS:
        raise ValueError("an array does not hold numbers")
    if isinstance(content, Made):  # bytes in protocol 2
        content = content.arguments[0].encode("latin1")
    order: Literal["C", "F"] = "C"
    if in_columns is True:
        order = "F"
    found = np.ndarray(shape, np.dtype(kind).newbyteorder(dtype.state[1]), content, order=order)
    if found.nbytes != len(content):
        raise ValueError(f"an array of {len(content):,} bytes does not have its size")
    return found.astype(kind)  # a copy in this machine's byte order, which can be written
