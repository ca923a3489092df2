"""Out to gensim: word vectors as `KeyedVectors`, saved as .kv and in word2vec's binary and text formats."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from w2v.system.files import apply_umask, atomic_write
from w2v.vectors import kv_file as kvfile
from w2v.vectors.load import SUMS, VectorsError, sha256

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.distributed.ranks import Ranks
    from w2v.model.table import Table

FORMATS = ("kv", "bin", "txt")  # also the endings of the files
LARGE = 10 << 20  # numbers of an array that gensim gives a file of its own
BLOCK_BYTES = 4 << 20  # of vectors, on their way from the ranks to the file


def keyed_vectors(words: Sequence[str], counts: np.ndarray, vectors: np.ndarray) -> KeyedVectors:
    """gensim `KeyedVectors` of V words in the order given, each with its `count`.

    counts [V] integers; vectors [V, D], kept as float32 and not copied when they are contiguous float32 already.
    """
    from gensim.models import KeyedVectors

    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or not len(words) == len(counts) == len(vectors):
        raise VectorsError(
            f"{len(words)} words, {len(counts)} counts and vectors of shape {vectors.shape} do not match"
        )
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
    counts, block = (
        ranks.all_gather(table.rows),
        max(1, BLOCK_BYTES // (4 * table.dim * ranks.size)),
    )
    wanted = [
        min(count, -(-((last or sum(counts)) - rank) // ranks.size))
        for rank, count in enumerate(counts)
    ]
    for start in range(0, max(wanted), block):
        sizes = [max(0, min(block, count - start)) for count in wanted]
        mine_nD = table["weight"][start : start + sizes[ranks.rank]].float().cpu().contiguous()
        none = [0] * ranks.size
        came_nD = ranks.all_to_all(
            mine_nD, [len(mine_nD), *none[1:]], none if ranks.rank else sizes
        )
        if ranks.rank == 0:
            block_nD = np.empty(came_nD.shape, np.float32)
            for rank, part_nD in enumerate(came_nD.split(sizes)):
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
    """Write vectors.kv and vectors.bin of V words, by falling count, whose vectors come a block at a time and are never all in memory.

    As `save` writes them, but without gensim; gives the first `keep` vectors. What goes wrong is raised once all blocks have come.
    """
    try:
        _check_words(words)
        row_of, large, kept_ND = (
            _row_of(words),
            len(words) * dim >= LARGE,
            np.empty((min(keep, len(words)), dim), np.float32),
        )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SUMS).unlink(missing_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as aside,
            contextlib.ExitStack() as files,
        ):
            part, binary_part = Path(aside, "vectors.kv"), Path(aside, "vectors.bin")
            kv, binary = (files.enter_context(open(path, "wb")) for path in (part, binary_part))
            rows = files.enter_context(open(f"{part}.vectors.npy", "wb")) if large else kv
            if large:
                np.lib.format.write_array_header_1_0(
                    rows, {"descr": "<f4", "fortran_order": False, "shape": (len(words), dim)}
                )
            binary.write(f"{len(words)} {dim}\n".encode())
            with kvfile.around_rows(kv, words, row_of, counts, dim, apart=large):
                first = 0
                for block_nD in blocks:
                    rows.write(block_nD.data)
                    named = zip(words[first : first + len(block_nD)], block_nD, strict=True)
                    binary.writelines(
                        f"{word} ".encode() + row_D.tobytes() for word, row_D in named
                    )
                    kept_ND[first : first + len(block_nD)] = block_nD[
                        : max(0, len(kept_ND) - first)
                    ]
                    first += len(block_nD)
            files.close()
            _replace_kv(part, folder)
            os.replace(binary_part, folder / binary_part.name)
        return kept_ND
    finally:
        for _ in blocks:  # the other ranks send all of them
            pass


def save(
    kv: KeyedVectors, folder: str | Path, formats: Sequence[str] = ("kv", "bin")
) -> list[Path]:
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
    rows = (
        "\t".join(f"{value:.6g}" for value in vector)
        for vector in kv.vectors[: len(shown)].tolist()
    )
    atomic_write(folder / "tensor.tsv", "".join(f"{row}\n" for row in rows))
    atomic_write(folder / "metadata.tsv", "word\tcount\n" + _with_counts(kv, shown))
    named = 'embeddings {\n  tensor_name: "word vectors"\n  tensor_path: "tensor.tsv"\n  metadata_path: "metadata.tsv"\n}\n'
    atomic_write(folder / "projector_config.pbtxt", named)
    return [folder / name for name in ("tensor.tsv", "metadata.tsv", "projector_config.pbtxt")]


def save_safetensors(kv: KeyedVectors, folder: str | Path) -> list[Path]:
    """Write vectors.safetensors, with "vectors" [V, D], and vectors.tsv, a line of word and count for each row."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    _check_words(kv.index_to_key)
    folder.mkdir(parents=True, exist_ok=True)
    path, aside = folder / "vectors.safetensors", folder / "vectors.safetensors.part"
    save_file({"vectors": np.ascontiguousarray(kv.vectors)}, aside)
    apply_umask(aside)
    os.replace(aside, path)
    atomic_write(folder / "vectors.tsv", _with_counts(kv, kv.index_to_key))
    return [path, folder / "vectors.tsv"]


def _with_counts(kv: KeyedVectors, words: Sequence[str]) -> str:
    """A line of word and count each; 0 where counts are not known, as in word2vec's formats."""
    known = "count" in kv.expandos
    return "".join(f"{word}\t{kv.get_vecattr(word, 'count') if known else 0}\n" for word in words)


def seal(folder: Path) -> None:
    """Write the SHA-256 of the vectors files in a folder, by which `load` finds damage."""
    files = sorted(path for path in folder.glob("vectors.*") if path.name.split(".")[1] in FORMATS)
    atomic_write(folder / SUMS, "".join(f"{sha256(path)}  {path.name}\n" for path in files))


def _check_words(words: Sequence[str]) -> None:
    """Text and binary files end a word at white space, so a word that holds some would be read back as another."""
    for word in words:
        if word.split() != [word]:
            raise VectorsError(
                f"the word {word!r} holds white space or is empty, which .bin and .txt cannot tell apart; use kv"
            )


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
