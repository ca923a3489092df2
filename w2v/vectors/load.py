"""Files of vectors, found by what a user names, read without running what a pickle may name, and compared with their checksums."""

from __future__ import annotations

import difflib
import hashlib
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import newest_file

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

READABLE = (".kv", ".bin", ".txt", ".vec")
SUMS = "vectors.sha256"  # as `sha256sum -c` reads it
PICKLED = {  # all that a pickle of KeyedVectors names
    ("gensim.models.keyedvectors", "KeyedVectors"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}


class VectorsError(ValueError):
    """Vectors that cannot be written, found or read; the message is one line that names the file or word and the remedy."""


def find(run: str | Path, runs: str | Path = "runs") -> Path:
    """The vectors file that `run` names: a run folder (its vectors.kv), a file, or `latest`, the newest vectors.kv in `runs`."""
    if str(run) == "latest":
        saved = newest_file(Path(runs), "vectors.kv")
        if saved is None:
            raise VectorsError(
                f"no folder in {runs} holds vectors.kv; train first, or name a run folder or a vectors file"
            )
        return saved
    path = Path(run)
    if path.is_dir():
        if not (path / "vectors.kv").is_file():
            raise VectorsError(
                f"{run} holds no vectors.kv; name a finished run, a file ({' '.join(READABLE)}) or latest"
            )
        return path / "vectors.kv"
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = (
            f"did you mean {path.parent / near[0]}?"
            if near
            else "name a run folder, a vectors file or latest"
        )
        raise VectorsError(f"{run} does not exist; {hint}")
    if path.suffix not in READABLE:
        raise VectorsError(
            f"{run} is not a vectors file that can be read; the endings are {' '.join(READABLE)}"
        )
    return path


def load(run: str | Path, runs: str | Path = "runs") -> KeyedVectors:
    """Read the vectors that `run` names, see `find`; .bin is word2vec's binary format, .txt and .vec its text format.

    A .kv file is gensim's own pickle. gensim's `load` runs whatever code a pickle names; here one that names anything but words and
    arrays is refused. Files of a run are compared with their checksums.
    """
    from gensim.models import KeyedVectors

    path = find(run, runs)
    _check_sums(path)
    try:
        kv = (
            _load_kv(path)
            if path.suffix == ".kv"
            else KeyedVectors.load_word2vec_format(str(path), binary=path.suffix == ".bin")
        )
    except VectorsError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        kind = {".kv": "a gensim KeyedVectors file", ".bin": "word2vec's binary format"}.get(
            path.suffix, "word2vec's text format"
        )
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise VectorsError(
            f"{path} is not {kind} or is damaged ({reason}); export it again"
        ) from error
    if not isinstance(kv, KeyedVectors):
        raise VectorsError(
            f"{path} holds a {type(kv).__name__}, not gensim's KeyedVectors; export it again"
        )
    return kv


class _Unpickler(pickle.Unpickler):
    path: Path

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("gensim.models.") and (module, name) not in PICKLED:
            raise VectorsError(
                f"{self.path} holds a gensim {name}, not KeyedVectors; save its .wv instead"
            )
        if (module, name) not in PICKLED:
            raise VectorsError(
                f"{self.path} is no plain KeyedVectors file: it names {module}.{name}, which could run any code"
            )
        return super().find_class(module, name)


def _load_kv(path: Path) -> Any:
    """What KeyedVectors.load does, but for what the pickle may name."""
    from gensim.models import KeyedVectors

    with open(path, "rb") as file:
        unpickler = _Unpickler(file, encoding="latin1")
        unpickler.path = path
        kv = unpickler.load()
    if isinstance(kv, KeyedVectors):
        kv._load_specials(
            str(path), None, *KeyedVectors._adapt_by_suffix(str(path))
        )  # the arrays in files of their own
        _check_whole(kv)
    return kv


def _check_whole(kv: KeyedVectors) -> None:
    """Raise an exception unless words, vectors and counts agree; a damaged pickle may load and lack some of them."""
    words, columns = kv.index_to_key, kv.expandos.values()
    kv.norms = None  # gensim works them out
    if not np.issubdtype(kv.vectors.dtype, np.floating) or kv.vectors.shape != (
        len(words),
        kv.vector_size,
    ):
        raise ValueError(f"{len(words)} words, vectors {kv.vectors.dtype}{list(kv.vectors.shape)}")
    if kv.key_to_index != {word: number for number, word in enumerate(words)} or any(
        len(column) != len(words) for column in columns
    ):
        raise ValueError("words do not agree with their numbers or counts")
    "".join(words).encode()  # raises what words that are no text raise


def _check_sums(path: Path) -> None:
    """Compare a vectors file and its side files with the checksums beside them, if there are any."""
    try:
        sums = [
            line.split("  ", 1)
            for line in (path.parent / SUMS).read_text(encoding="utf-8").splitlines()
        ]
        differing = [
            name
            for sum_, name in sums
            if f"{name}.".startswith(f"{path.name}.") and sha256(path.parent / name) != sum_
        ]
    except FileNotFoundError:
        return
    except ValueError:
        raise VectorsError(
            f"{path.parent / SUMS} is no list of checksums; remove it, or export the vectors again"
        ) from None
    if differing:
        again = f"export it again, or remove {path.parent / SUMS} if you have changed it yourself"
        raise VectorsError(
            f"{path.parent / differing[0]} is damaged: its SHA-256 is not that in {SUMS}; {again}"
        )


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
