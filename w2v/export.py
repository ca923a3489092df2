"""Out to gensim and back in: word vectors as `KeyedVectors`, saved as .kv and in word2vec's binary and text formats."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v import durable, kvfile

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.ranks import Ranks
    from w2v.table import Table

FORMATS = ("kv", "bin", "txt")  # also the endings of the files
LARGE = 10 << 20  # numbers of an array that gensim gives a file of its own
BLOCK_BYTES = 4 << 20  # of vectors, on their way from the ranks to the file
READABLE = (".kv", ".bin", ".txt", ".vec")
SUMS = "vectors.sha256"  # as `sha256sum -c` reads it
PICKLED = {  # all that a pickle of KeyedVectors names
    ("gensim.models.keyedvectors", "KeyedVectors"), ("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
}  # fmt: skip


class VectorsError(ValueError):
    """Vectors that cannot be written, found or read; the message is one line that names the file or word and the remedy."""


def keyed_vectors(words: Sequence[str], counts: np.ndarray, vectors: np.ndarray) -> KeyedVectors:
    """gensim `KeyedVectors` of V words in the order given, each with its `count`.

    counts [V] integers; vectors [V, D], kept as float32 and not copied when they are contiguous float32 already.
    """
    from gensim.models import KeyedVectors

    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or not len(words) == len(counts) == len(vectors):
        raise VectorsError(f"{len(words)} words, {len(counts)} counts and vectors of shape {vectors.shape} do not match")
    kv = KeyedVectors(vectors.shape[1])
    kv.index_to_key = list(words)
    kv.key_to_index = _row_of(words)
    kv.vectors = vectors
    kv.next_index = len(words)
    kv.allocate_vecattrs(["count"], [np.int64])
    kv.expandos["count"][:] = counts
    return kv


def _row_of(words: Sequence[str]) -> dict[str, int]:
    row_of = {word: row for row, word in enumerate(words)}
    if len(row_of) < len(words):
        twice = next(word for row, word in enumerate(words) if row_of[word] != row)
        raise VectorsError(f"the word {twice!r} occurs twice in the vocabulary; keep one of them")
    return row_of


def in_order(table: Table, ranks: Ranks, last: int | None = None) -> Iterator[np.ndarray]:
    """The weights of a table whose rows are dealt to the ranks, float32 [n, D] a block at a time, on rank 0; `last`: only so many rows.

    All ranks have to go through it; those that only send get no block.
    """
    counts, block = ranks.gather(table.rows), max(1, BLOCK_BYTES // (4 * table.dim * ranks.size))
    wanted = [min(count, -(-((last or sum(counts)) - rank) // ranks.size)) for rank, count in enumerate(counts)]
    for start in range(0, max(wanted), block):
        sizes = [max(0, min(block, count - start)) for count in wanted]
        mine_nD = table["weight"][start : start + sizes[ranks.rank]].float().cpu().contiguous()
        none = [0] * ranks.size
        came_nD = ranks.send(mine_nD, [len(mine_nD), *none[1:]], none if ranks.rank else sizes)
        if ranks.rank == 0:
            block_nD = np.empty(came_nD.shape, np.float32)
            for rank, part_nD in enumerate(came_nD.split(sizes)):
                block_nD[rank :: ranks.size] = part_nD
            yield block_nD


def save_rows(
    words: Sequence[str], counts: np.ndarray, dim: int, blocks: Iterator[np.ndarray], folder: Path, keep: int = 0
) -> np.ndarray:
    """Write vectors.kv and vectors.bin of V words, by falling count, whose vectors come a block at a time and are never all in memory.

    As `save` writes them, but without gensim; gives the first `keep` vectors. What goes wrong is raised once all blocks have come.
    """
    try:
        _check_words(words)
        row_of, large, kept_ND = _row_of(words), len(words) * dim >= LARGE, np.empty((min(keep, len(words)), dim), np.float32)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMS).unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside, contextlib.ExitStack() as files:
            part, binary_part = Path(aside, "vectors.kv"), Path(aside, "vectors.bin")
            kv, binary = (files.enter_context(open(path, "wb")) for path in (part, binary_part))
            rows = files.enter_context(open(f"{part}.vectors.npy", "wb")) if large else kv
            if large:
                np.lib.format.write_array_header_1_0(rows, {"descr": "<f4", "fortran_order": False, "shape": (len(words), dim)})
            binary.write(f"{len(words)} {dim}\n".encode())
            with kvfile.around_rows(kv, words, row_of, counts, dim, apart=large):
                first = 0
                for block_nD in blocks:
                    rows.write(block_nD.data)
                    named = zip(words[first : first + len(block_nD)], block_nD, strict=True)
                    binary.writelines(f"{word} ".encode() + row_D.tobytes() for word, row_D in named)
                    kept_ND[first : first + len(block_nD)] = block_nD[: max(0, len(kept_ND) - first)]
                    first += len(block_nD)
            files.close()
            _replace_kv(part, folder)
            os.replace(binary_part, folder / binary_part.name)
        return kept_ND
    finally:
        for _ in blocks:  # the other ranks send all of them
            pass


def save(kv: KeyedVectors, folder: str | Path, formats: Sequence[str] = ("kv", "bin")) -> list[Path]:
    """Write vectors.kv, vectors.bin or vectors.txt into `folder`, and return their paths in the order of `formats`.

    Every file is written aside and renamed when it is whole. gensim puts arrays of 10 Mi numbers and more into files of
    their own, vectors.kv.*.npy, which belong beside vectors.kv. Words keep their order if counts fall, as in word2vec.c;
    otherwise gensim sorts the .bin and .txt by count.
    """
    for name in formats:
        if name not in FORMATS:
            raise VectorsError(f"unknown format {name!r}; choose from {' '.join(FORMATS)}")
    if set(formats) - {"kv"}:
        _check_words(kv.index_to_key)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sealed = (folder / SUMS).exists()
    (folder / SUMS).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside:
        for name in formats:
            part = Path(aside, f"vectors.{name}")
            if name == "kv":
                kv.save(str(part))
                _replace_kv(part, folder)
            else:
                kv.save_word2vec_format(str(part), binary=name == "bin")
                os.replace(part, folder / part.name)
    if sealed:
        seal(folder)
    return [folder / f"vectors.{name}" for name in formats]


def save_projector(kv: KeyedVectors, folder: str | Path, words: int) -> list[Path]:
    """Write tensor.tsv and metadata.tsv (word, count) of the first `words` for https://projector.tensorflow.org.

    And projector_config.pbtxt, by which TensorBoard finds them in a folder of its runs.
    """
    shown, folder = kv.index_to_key[:words], Path(folder)
    _check_words(shown)
    folder.mkdir(parents=True, exist_ok=True)
    rows = ("\t".join(f"{value:.6g}" for value in vector) for vector in kv.vectors[: len(shown)].tolist())
    durable.replace(folder / "tensor.tsv", "".join(f"{row}\n" for row in rows))
    durable.replace(folder / "metadata.tsv", "word\tcount\n" + _with_counts(kv, shown))
    named = 'embeddings {\n  tensor_name: "word vectors"\n  tensor_path: "tensor.tsv"\n  metadata_path: "metadata.tsv"\n}\n'
    durable.replace(folder / "projector_config.pbtxt", named)
    return [folder / name for name in ("tensor.tsv", "metadata.tsv", "projector_config.pbtxt")]


def save_safetensors(kv: KeyedVectors, folder: str | Path) -> list[Path]:
    """Write vectors.safetensors, with "vectors" [V, D], and vectors.tsv, a line of word and count for each row."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    _check_words(kv.index_to_key)
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / "vectors.safetensors", folder / "vectors.safetensors.part"
    save_file({"vectors": np.ascontiguousarray(kv.vectors)}, aside)
    os.replace(aside, path)
    durable.replace(folder / "vectors.tsv", _with_counts(kv, kv.index_to_key))
    return [path, folder / "vectors.tsv"]


def _with_counts(kv: KeyedVectors, words: Sequence[str]) -> str:
    """A line of word and count each; 0 where counts are not known, as in word2vec's formats."""
    known = "count" in kv.expandos
    return "".join(f"{word}\t{kv.get_vecattr(word, 'count') if known else 0}\n" for word in words)


def seal(folder: Path) -> None:
    """Write the SHA-256 of the vectors files in a folder, by which `load` finds damage."""
    files = sorted(path for path in folder.glob("vectors.*") if path.name.split(".")[1] in FORMATS)
    durable.replace(folder / SUMS, "".join(f"{_sha256(path)}  {path.name}\n" for path in files))


def find(run: str | Path, runs: str | Path = "runs") -> Path:
    """The vectors file that `run` names: a run folder (its vectors.kv), a file, or `latest`, the newest vectors.kv in `runs`."""
    if str(run) == "latest":
        saved = sorted(Path(runs).glob("*/vectors.kv"), key=lambda path: (path.stat().st_mtime_ns, path))
        if not saved:
            raise VectorsError(f"no folder in {runs} holds vectors.kv; train first, or name a run folder or a vectors file")
        return saved[-1]
    path = Path(run)
    if path.is_dir():
        if not (path / "vectors.kv").is_file():
            raise VectorsError(f"{run} holds no vectors.kv; name a finished run, a file ({' '.join(READABLE)}) or latest")
        return path / "vectors.kv"
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "name a run folder, a vectors file or latest"
        raise VectorsError(f"{run} does not exist; {hint}")
    if path.suffix not in READABLE:
        raise VectorsError(f"{run} is not a vectors file that can be read; the endings are {' '.join(READABLE)}")
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
        kv = _load_kv(path) if path.suffix == ".kv" else KeyedVectors.load_word2vec_format(str(path), binary=path.suffix == ".bin")
    except VectorsError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        kind = {".kv": "a gensim KeyedVectors file", ".bin": "word2vec's binary format"}.get(path.suffix, "word2vec's text format")
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise VectorsError(f"{path} is not {kind} or is damaged ({reason}); export it again") from error
    if not isinstance(kv, KeyedVectors):
        raise VectorsError(f"{path} holds a {type(kv).__name__}, not gensim's KeyedVectors; export it again")
    return kv


class _Unpickler(pickle.Unpickler):
    path: Path

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("gensim.models.") and (module, name) not in PICKLED:
            raise VectorsError(f"{self.path} holds a gensim {name}, not KeyedVectors; save its .wv instead")
        if (module, name) not in PICKLED:
            raise VectorsError(f"{self.path} is no plain KeyedVectors file: it names {module}.{name}, which could run any code")
        return super().find_class(module, name)


def _load_kv(path: Path) -> Any:
    """What KeyedVectors.load does, but for what the pickle may name."""
    from gensim.models import KeyedVectors

    with open(path, "rb") as file:
        unpickler = _Unpickler(file, encoding="latin1")
        unpickler.path = path
        kv = unpickler.load()
    if isinstance(kv, KeyedVectors):
        kv._load_specials(str(path), None, *KeyedVectors._adapt_by_suffix(str(path)))  # the arrays in files of their own
        _check_whole(kv)
    return kv


def _check_whole(kv: KeyedVectors) -> None:
    """Raise an exception unless words, vectors and counts agree; a damaged pickle may load and lack some of them."""
    words, columns = kv.index_to_key, kv.expandos.values()
    kv.norms = None  # gensim works them out
    if not np.issubdtype(kv.vectors.dtype, np.floating) or kv.vectors.shape != (len(words), kv.vector_size):
        raise ValueError(f"{len(words)} words, vectors {kv.vectors.dtype}{list(kv.vectors.shape)}")
    if kv.key_to_index != {word: number for number, word in enumerate(words)} or any(len(column) != len(words) for column in columns):
        raise ValueError("words do not agree with their numbers or counts")
    "".join(words).encode()  # raises what words that are no text raise


def _check_sums(path: Path) -> None:
    """Compare a vectors file and its side files with the checksums beside them, if there are any."""
    try:
        sums = [line.split("  ", 1) for line in (path.parent / SUMS).read_text(encoding="utf-8").splitlines()]
        differing = [name for sum_, name in sums if f"{name}.".startswith(f"{path.name}.") and _sha256(path.parent / name) != sum_]
    except FileNotFoundError:
        return
    except ValueError:
        raise VectorsError(f"{path.parent / SUMS} is no list of checksums; remove it, or export the vectors again") from None
    if differing:
        again = f"export it again, or remove {path.parent / SUMS} if you have changed it yourself"
        raise VectorsError(f"{path.parent / differing[0]} is damaged: its SHA-256 is not that in {SUMS}; {again}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _check_words(words: Sequence[str]) -> None:
    """Text and binary files end a word at white space, so a word that holds some would be read back as another."""
    for word in words:
        if word.split() != [word]:
            raise VectorsError(f"the word {word!r} holds white space or is empty, which .bin and .txt cannot tell apart; use kv")


def _replace_kv(part: Path, folder: Path) -> None:
    """Move vectors.kv and its side files into place so that no reader sees a new part beside an old one."""
    final = folder / part.name
    old_sides = set(folder.glob(f"{part.name}.*.npy"))
    new_sides = {folder / side.name: side for side in part.parent.glob(f"{part.name}.*.npy")}
    if old_sides or new_sides:
        final.unlink(missing_ok=True)
    for side in old_sides - new_sides.keys():
        side.unlink()
    for side, aside in new_sides.items():
        os.replace(aside, side)
    os.replace(part, final)
