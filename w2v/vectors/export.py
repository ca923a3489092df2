"""Export vectors for gensim, word2vec, safetensors and TensorBoard."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import TEMPORARY_SUFFIX, apply_umask, atomic_write, hash_file, sync
from w2v.vectors.load import SUMS, VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.distributed.ranks import Ranks
    from w2v.model.table import Table

FORMATS = ("kv", "bin", "txt")  # also the suffixes of the files
LARGE = 10 << 20  # elements of an array for which gensim writes a .npy file of its own
BLOCK_BYTES = 4 << 20  # of vectors on their way from the ranks to the file
PROJECTOR_CONFIG = """embeddings {
  tensor_name: "word vectors"
  tensor_path: "tensor.tsv"
  metadata_path: "metadata.tsv"
}
"""


def keyed_vectors(words: Sequence[str], counts: np.ndarray, vectors: np.ndarray) -> KeyedVectors:
    """Return gensim `KeyedVectors` of V words in this order, with counts.

    vectors [V, D] become float32; contiguous float32 vectors are not copied.
    """
    from gensim.models import KeyedVectors

    # KeyedVectors.add_vectors would copy the vectors.
    kv = KeyedVectors(vectors.shape[1])
    vars(kv).update(_attributes(words, counts, vectors.shape[1]))
    kv.vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    return kv


def _attributes(words: Sequence[str], counts: np.ndarray, dim: int) -> dict[str, Any]:
    """Return the attributes of `KeyedVectors`, except for its vectors."""
    return {
        "vector_size": dim,
        "index_to_key": list(words),
        "key_to_index": {word: row for row, word in enumerate(words)},
        "next_index": len(words),
        "expandos": {"count": np.array(counts, np.int64)},
    }


def in_order(table: Table, ranks: Ranks, last: int | None = None) -> Iterator[np.ndarray]:
    """Yield the weights of a sharded table, in row order, on rank 0.

    They come in float32 [n, D] blocks. All ranks must exhaust the iterator; ranks other
    than 0 send and yield nothing. Row v of the table is row v // size of the shard of rank
    v % size. `last`: only so many rows.
    """
    total = sum(ranks.all_gather(table.rows))
    wanted = range(min(total, last or total))
    counts = [len(wanted[rank :: ranks.size]) for rank in range(ranks.size)]
    block = max(1, BLOCK_BYTES // (4 * table.dim * ranks.size))
    for start in range(0, counts[0], block):
        sizes = [max(0, min(block, count - start)) for count in counts]
        mine_nD = table["weight"][start : start + sizes[ranks.rank]].float().cpu().contiguous()
        nothing = [0] * ranks.size
        sent = [len(mine_nD), *nothing[1:]]
        received_nD = ranks.all_to_all(mine_nD, sent, nothing if ranks.rank else sizes)
        if ranks.rank == 0:
            block_nD = np.empty(received_nD.shape, np.float32)
            for rank, part_nD in enumerate(received_nD.split(sizes)):
                block_nD[rank :: ranks.size] = part_nD
            yield block_nD


def save_rows(
    words: Sequence[str],
    counts: np.ndarray,
    dim: int,
    blocks: Iterator[np.ndarray],
    folder: Path,
    keep: int = 0,
) -> np.ndarray:
    """Write vectors.kv and vectors.bin from blocks, without gensim.

    The V words are sorted by falling count. The blocks are float32 [n, D]; only small
    vectors are ever whole in memory. Return the first `keep` vectors. An error is raised
    after all blocks have come, as other ranks send them.
    """
    try:
        large = len(words) * dim >= LARGE
        # Small vectors are inside the pickle, which is written last, so all of them are kept.
        kept_ND = np.empty((min(keep, len(words)) if large else len(words), dim), np.float32)
        with _new_files(folder) as new, ExitStack() as files:
            binary = files.enter_context(open(new / "vectors.bin", "wb"))
            binary.write(f"{len(words)} {dim}\n".encode())
            if large:
                array = files.enter_context(open(new / "vectors.kv.vectors.npy", "wb"))
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(words), dim)}
                np.lib.format.write_array_header_1_0(array, header)
            first = 0
            for block_nD in blocks:
                end = first + len(block_nD)
                for word, row_D in zip(words[first:end], block_nD, strict=True):
                    binary.write(f"{word} ".encode() + row_D.tobytes())
                if large:
                    array.write(block_nD.data)
                kept_ND[first:end] = block_nD[: max(0, len(kept_ND) - first)]
                first = end
            attributes = _attributes(words, counts, dim)
            _write_kv(new / "vectors.kv", attributes, None if large else kept_ND)
            (folder / SUMS).unlink(missing_ok=True)
        return kept_ND[:keep]
    finally:
        for _ in blocks:
            pass


def save(
    kv: KeyedVectors, folder: str | Path, formats: Sequence[str] = ("kv", "bin")
) -> list[Path]:
    """Write vectors.kv, vectors.bin or vectors.txt; return their paths.

    gensim writes large arrays to files of their own, vectors.kv.*.npy. Words keep their
    order if counts fall; otherwise gensim sorts .bin and .txt by count.
    """
    if set(formats) - {"kv"}:
        _check_words(kv.index_to_key)
    sums = Path(folder, SUMS)
    sealed = sums.exists()
    with _new_files(Path(folder)) as new:
        for name in formats:
            path = str(new / f"vectors.{name}")
            if name == "kv":
                kv.save(path)
            else:
                kv.save_word2vec_format(path, binary=name == "bin")
        sums.unlink(missing_ok=True)  # wrong until all files are in place
    if sealed:
        seal(sums.parent)
    return [Path(folder, f"vectors.{name}") for name in formats]


def save_projector(kv: KeyedVectors, folder: str | Path, words: int) -> list[Path]:
    """Write the first `words` vectors for TensorBoard's projector."""
    names = ("tensor.tsv", "metadata.tsv", "projector_config.pbtxt")
    # TensorBoard reads the .pbtxt; projector.tensorflow.org takes the two tables.
    with _new_files(Path(folder)) as new:
        np.savetxt(new / names[0], kv.vectors[:words], "%.6g", "\t")
        (new / names[1]).write_text("word\tcount\n" + _word_counts(kv, words), encoding="utf-8")
        (new / names[2]).write_text(PROJECTOR_CONFIG)
    return [Path(folder, name) for name in names]


def save_safetensors(kv: KeyedVectors, folder: str | Path) -> list[Path]:
    """Write vectors.safetensors ("vectors" [V, D]) and vectors.tsv (words)."""
    from safetensors.numpy import save_file

    names = ("vectors.safetensors", "vectors.tsv")
    with _new_files(Path(folder)) as new:
        (new / names[1]).write_text(_word_counts(kv), encoding="utf-8")
        save_file({"vectors": np.ascontiguousarray(kv.vectors)}, new / names[0])
        apply_umask(new / names[0])
    return [Path(folder, name) for name in names]


def seal(folder: Path) -> None:
    """Write SHA-256 checksums of the vectors files, which `load` compares."""
    files = sorted(path for path in folder.glob("vectors.*") if path.name.split(".")[1] in FORMATS)
    lines = [f"{hash_file(path, hashlib.sha256())}  {path.name}\n" for path in files]
    atomic_write(folder / SUMS, "".join(lines))


def _check_words(words: Sequence[str]) -> None:
    """Raise if a word holds white space, which only .kv can store."""
    for word in words:
        if word.split() != [word]:
            raise VectorsError(
                f"the word {word!r} is empty or holds white space, which only .kv can store; use kv"
            )


def _word_counts(kv: KeyedVectors, words: int | None = None) -> str:
    """Return lines "word<tab>count" of the first words; 0 if unknown."""
    shown = kv.index_to_key[:words]
    _check_words(shown)
    counts = kv.expandos.get("count", np.zeros(len(kv), np.int64)).tolist()
    return "".join(f"{word}\t{count}\n" for word, count in zip(shown, counts, strict=False))


@contextlib.contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files then replace those of the folder.

    A reader never finds vectors.kv beside .npy files of another save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(TEMPORARY_SUFFIX, ".vectors.", folder) as temporary:
        new = Path(temporary)
        yield new
        for path in new.iterdir():
            sync(path)
        if (new / "vectors.kv").exists():
            old_arrays = list(folder.glob("vectors.kv.*.npy"))
            if old_arrays or any(new.glob("vectors.kv.*.npy")):
                (folder / "vectors.kv").unlink(missing_ok=True)
            for path in old_arrays:
                path.unlink()
        # vectors.kv comes last.
        for path in sorted(new.iterdir(), key=lambda path: path.name == "vectors.kv"):
            os.replace(path, folder / path.name)
    sync(folder)


def _write_kv(path: Path, attributes: dict[str, Any], vectors: np.ndarray | None) -> None:
    """Pickle `KeyedVectors` without gensim; vectors in a .npy file are None."""
    inline = {} if vectors is None else {"vectors": vectors}
    state = {
        **attributes,
        **inline,
        "norms": None,
        "mapfile_path": None,
        "lifecycle_events": [],
        "__numpys": [] if inline else ["vectors"],
        "__scipys": [],
        "__ignoreds": [],
        "__recursive_saveloads": [],
    }
    with open(path, "wb") as file:
        # An empty object of the class, then its attributes, as pickle itself writes them;
        # but pickle would import gensim, which takes 50 MiB.
        file.write(pickle.PROTO + b"\x03" + pickle.GLOBAL)
        file.write(b"gensim.models.keyedvectors\nKeyedVectors\n")
        file.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        pickle.dump(state, file, protocol=3)
        file.seek(-len(pickle.STOP), os.SEEK_END)
        file.write(pickle.BUILD + pickle.STOP)
