"""Load word vectors from a run folder or a file."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import hash_file, refused
from w2v.vectors import runs

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

READABLE = (".kv", ".bin", ".txt", ".vec")  # gensim's KeyedVectors, word2vec's binary and text
SUMS = "vectors.sha256"  # in the format of `sha256sum -c`
PICKLED = {  # all names in a pickle of KeyedVectors
    ("gensim.models.keyedvectors", "KeyedVectors"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}

log = logging.getLogger("w2v")


class VectorsError(ValueError):
    """Vectors that cannot be saved or loaded; one line with the remedy."""


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

    What takes Words takes gensim's KeyedVectors too.
    """

    vectors: np.ndarray
    index_to_key: list[str]
    key_to_index: dict[str, int]
    vector_size: int
    expandos: dict[str, Any]
    norms: np.ndarray | None = None

    def __init__(self, words: Sequence[str], vectors: np.ndarray):
        self.vectors = vectors
        self.index_to_key = list(words)
        self.key_to_index = {word: row for row, word in enumerate(words)}


def load(run: str | Path) -> KeyedVectors:
    """Load the vectors that `run` names, see `find`.

    gensim's own `load` runs any code that a .kv file, a pickle, names. Here, a pickle that
    names anything but KeyedVectors and arrays is refused. Checksums are compared if present.
    """
    from gensim.models import KeyedVectors

    words = load_words(run)
    if isinstance(words, KeyedVectors):
        return words
    kv = KeyedVectors(words.vector_size)
    # Large arrays are read into memory, where they can be written.
    vars(kv).update(vars(words), vectors=np.array(words.vectors))
    return kv


def load_words(run: str | Path) -> Words:
    """Load vectors as `load` does, but those of a .kv file as `Words`."""
    path = find(run)
    _check_sums(path)  # before anything is unpickled
    problem = f"{path} does not hold vectors in the format of {path.suffix} files, or is damaged"
    with refused(VectorsError, problem, "export it again"):
        if path.suffix == ".kv":
            return _load_kv(path)
        from gensim.models import KeyedVectors

        kv = KeyedVectors.load_word2vec_format(str(path), binary=path.suffix == ".bin")
        # gensim keeps the first vector of a repeated word, and then has places without a word.
        if repeated := len(kv) - kv.next_index:
            log.warning(f"repeated words in {path}: {repeated:,}; the first vector of each is kept")
            del kv.index_to_key[kv.next_index :]
            kv.vectors = kv.vectors[: len(kv)]
            kv.expandos = {name: column[: len(kv)] for name, column in kv.expandos.items()}
        if not kv.vectors.size:
            raise ValueError(f"{len(kv)} words of {kv.vector_size} dimensions")
        return kv


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PICKLED:
            return Words if name == "KeyedVectors" else super().find_class(module, name)
        # A whole model is a common mistake.
        code = f"it names {module}.{name}, which could run any code; save the .wv of a gensim model"
        raise pickle.UnpicklingError(code)


def _load_kv(path: Path) -> Words:
    """Do what KeyedVectors.load does, with a restricted unpickler."""
    with open(path, "rb") as file:
        kv: Any = _Unpickler(file, encoding="latin1").load()
    if vars(kv).get("__scipys") or vars(kv).get("__recursive_saveloads"):
        raise ValueError("it names other files, which gensim would unpickle")
    for name in vars(kv).get("__numpys", ()):  # gensim's name for arrays in files of their own
        # Copied where it is written: torch warns of arrays that cannot be written.
        setattr(kv, name, np.load(f"{path}.{name}.npy", mmap_mode="c"))
    kv.norms = None  # computed on demand
    words = kv.index_to_key
    matches = np.issubdtype(kv.vectors.dtype, np.floating)
    matches &= kv.vectors.shape == (len(words), kv.vector_size)
    matches &= kv.key_to_index == {word: row for row, word in enumerate(words)}
    if not matches or any(len(column) != len(words) for column in kv.expandos.values()):
        raise ValueError("words, vectors and counts do not match")
    "".join(words).encode()  # raises if a word is no valid text
    return kv


def _check_sums(path: Path) -> None:
    """Compare a vectors file and its .npy files with checksums, if any."""
    sums = path.parent / SUMS
    if not sums.exists():
        return
    problem = f"{path} cannot be compared with {sums}"
    with refused(VectorsError, problem, "export the vectors again, or remove the checksums"):
        for line in sums.read_text(encoding="utf-8").splitlines():
            expected, name = line.split("  ", 1)
            # "vectors.kv" stands for "vectors.kv.vectors.npy" too.
            ours = name == path.name or name.startswith(f"{path.name}.")
            if ours and hash_file(path.parent / name, hashlib.sha256()) != expected:
                raise VectorsError(
                    f"{path.parent / name} is damaged: its SHA-256 is not that in {SUMS}; "
                    f"export it again, or remove {sums} if you have changed it yourself"
                )
