"""Write vectors in the formats of gensim, word2vec and fastText."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from w2v.system.files import TEMPORARY_SUFFIX, hash_file, sync
from w2v.vectors import convert, fasttext, manifest
from w2v.vectors.load import ARRAY, NGRAMS, OWN, SUBWORD_CLASS, VOCAB, VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.config import Config
    from w2v.distributed.ranks import Ranks
    from w2v.rows.table import Table
    from w2v.text.vocab import Vocab
    from w2v.word2vec.subwords import Subwords

FASTTEXT = "vectors.fasttext.bin"
BLOCK_BYTES = 8 << 20  # of vectors on their way from the tables to the files
EXPORT_BYTES = 4 * BLOCK_BYTES  # most memory of an export, but for the words


class Composed(NamedTuple):
    """What the vectors of a run are composed of."""

    subwords: Subwords
    table: Table
    config: Config


def blocks_of(table: Table, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield the weights of rows [first, last) in float32 [n, D] blocks."""
    block = max(1, BLOCK_BYTES // (4 * table.dim))
    for start in range(first, last, block):
        part_nD = table["weight"][start : min(start + block, last)]
        yield part_nD.float().cpu().contiguous().numpy()


def in_order(table: Table, ranks: Ranks, rows: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yield the weights of rows [first, rows) of a sharded table on rank 0.

    They come in float32 [n, D] blocks. All ranks must exhaust the iterator; ranks other than 0 send
    and yield nothing. Row v of the table is row v // size of the shard of rank v % size.
    """
    if ranks.size == 1:
        yield from blocks_of(table, first, rows)
        return
    begins = [len(range(rank, first, ranks.size)) for rank in range(ranks.size)]
    ends = [len(range(rank, rows, ranks.size)) for rank in range(ranks.size)]
    block = max(1, BLOCK_BYTES // (4 * table.dim * ranks.size))
    most = max(end - begin for begin, end in zip(begins, ends, strict=True))
    for start in range(0, most, block):
        starts = [begin + start for begin in begins]
        sizes = [max(0, min(block, end - at)) for end, at in zip(ends, starts, strict=True)]
        at = starts[ranks.rank]
        mine_nD = table["weight"][at : at + sizes[ranks.rank]].float().cpu().contiguous()
        sent = [len(mine_nD)] + [0] * (ranks.size - 1)
        if ranks.rank:
            sizes = [0] * ranks.size
        received_nD = ranks.all_to_all(mine_nD, sent, sizes)
        if ranks.rank == 0:
            block_nD = np.empty(received_nD.shape, np.float32)
            for rank, part_nD in enumerate(received_nD.split(sizes)):
                block_nD[(rank - first) % ranks.size :: ranks.size] = part_nD.numpy()
            yield block_nD


def save_run(
    vocab: Vocab,
    dim: int,
    blocks: Iterator[np.ndarray],
    folder: Path,
    formats: Sequence[str],
    step: int | None = None,
    composed: Composed | None = None,
) -> None:
    """Write the vectors of a run, its words and the manifest, without gensim.

    vectors.kv holds the words, and .npy files beside it the vectors, float32 [n, D] in blocks.
    An error is raised after the last block, as other ranks wait until theirs are received. Files
    of earlier steps are removed.
    """
    try:
        with _new_files(folder) as new:
            _write_array(new / ARRAY, len(vocab.words), dim, blocks)
            (new / "vectors.kv").write_bytes(_pickled(vocab, dim, composed))
            if composed:
                _write_subwords(new, vocab, composed, "fasttext" in formats)
            if "bin" in formats:
                vectors_VD = np.load(new / ARRAY, mmap_mode="r")
                with open(new / "vectors.bin", "wb") as file:
                    file.writelines(_binary(vocab.words, vectors_VD))
            vocab.save(new / VOCAB)
            sums = {path.name: hash_file(path) for path in new.iterdir()}
            manifest.remove_derived(folder)
            for path in folder.glob(manifest.VECTORS):
                path.unlink()
        manifest.write(folder, step, sums)
    finally:
        for _ in blocks:  # what other ranks still send
            pass


def _write_array(path: Path, rows: int, dim: int, blocks: Iterator[np.ndarray]) -> None:
    """Write blocks of float32 [n, D] as an .npy file."""
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, header)
        file.writelines(block_nD.data for block_nD in blocks)


def _write_subwords(folder: Path, vocab: Vocab, composed: Composed, as_fasttext: bool) -> None:
    """Write what composes vectors of unseen words."""
    subwords, table, config = composed
    min_n, max_n, buckets = subwords.limits
    words, first, last = subwords.words, subwords.first, subwords.first + subwords.rows
    _write_array(folder / OWN, words, table.dim, blocks_of(table, first, first + words))
    # Buckets that are not in use have zero vectors.
    shape, done = (buckets, table.dim), 0
    buckets_BD = np.lib.format.open_memmap(folder / NGRAMS, "w+", np.float32, shape)
    for block_nD in blocks_of(table, first + words, last):
        buckets_BD[subwords.used_B[done : done + len(block_nD)]] = block_nD
        done += len(block_nD)
    buckets_BD.flush()
    if as_fasttext:
        ngrams = fasttext.Ngrams(min_n, max_n, np.load(folder / OWN, mmap_mode="r"), buckets_BD)
        _, outputs = table.interleaved("input", "output")
        with open(folder / FASTTEXT, "wb") as file:
            fasttext.write(file, config, vocab, ngrams, blocks_of(outputs, 0, words))


def _pickled(vocab: Vocab, dim: int, composed: Composed | None = None) -> bytes:
    """Return the pickle of a KeyedVectors whose vectors are in `ARRAY`.

    Its class is named by hand, as the import of gensim takes a second.
    """
    words = vocab.words
    state: dict[str, Any] = {
        "vector_size": dim,
        "index_to_key": words,
        "key_to_index": {word: row for row, word in enumerate(words)},
        "next_index": len(words),
        "expandos": {"count": np.array(vocab.counts, np.int64)},
        "norms": None,
        "mapfile_path": None,
        "lifecycle_events": [],
        "__numpys": ["vectors"],
        "__scipys": [],
        "__ignoreds": [],
        "__recursive_saveloads": [],
    }
    name = "gensim.models.keyedvectors KeyedVectors"
    if composed:
        name = SUBWORD_CLASS
        min_n, max_n, buckets = composed.subwords.limits
        state |= {"min_n": min_n, "max_n": max_n, "bucket": buckets, "buckets_word": None}
        state |= {"compatible_hash": True}
        state["__numpys"] = ["vectors", "vectors_vocab", "vectors_ngrams"]
    made = pickle.GLOBAL + name.replace(" ", "\n").encode() + b"\n"
    made += pickle.EMPTY_TUPLE + pickle.NEWOBJ
    pickled = pickle.dumps(state, protocol=3)
    start = len(pickle.PROTO) + 1
    return pickled[:start] + made + pickled[start:-1] + pickle.BUILD + pickle.STOP


def _binary(words: Sequence[str], vectors_VD: np.ndarray) -> Iterator[bytes]:
    """Yield the parts of word2vec's binary format."""
    rows, dim = vectors_VD.shape
    yield f"{rows} {dim}\n".encode()
    block = max(1, BLOCK_BYTES // (4 * dim))
    for first in range(0, rows, block):
        block_nD = np.ascontiguousarray(vectors_VD[first : first + block])
        rows_n = block_nD.view(f"V{4 * dim}")[:, 0].tolist()
        pairs = zip(words[first : first + block], rows_n, strict=True)
        yield b"".join(f"{word} ".encode() + row for word, row in pairs)


def save(kv: KeyedVectors, folder: str | Path, formats: Sequence[str]) -> list[Path]:
    """Write vectors.kv, .bin, .txt or `manifest.FILES`; return their paths.

    Words keep their order if counts fall; otherwise gensim sorts .bin and .txt by count.
    """
    if set(formats) - {"kv"}:
        for word in kv.index_to_key:
            if word.split() != [word]:
                problem = f"the word {word!r} is empty or holds white space"
                raise VectorsError(f"{problem}, which only .kv can store; use kv")
    folder = Path(folder)
    step, sums = manifest.read(folder)
    with _new_files(folder) as new:
        for name in formats:
            path = str(new / f"vectors.{name}")
            if name in manifest.FILES:
                convert.write(name, kv.index_to_key, kv.vectors, new)
            elif name == "kv":
                kv.save(path, separately=["vectors"])
            else:
                kv.save_word2vec_format(path, binary=name == "bin")
        written = [path.name for path in new.iterdir() if path.is_file()]
        if (new / manifest.STATIC).exists():
            shutil.rmtree(folder / manifest.STATIC, ignore_errors=True)
        (folder / manifest.SUMS).unlink(missing_ok=True)  # wrong until all files are in place
    if sums:
        # Only new files are hashed, as the others may have been damaged since.
        sums |= {name: hash_file(folder / name) for name in written}
        if "kv" in formats:
            sums.pop(VOCAB, None)  # the words of other vectors
        known = {name: sums[name] for name in sums if (folder / name).exists()}
        manifest.write(folder, step, known)
    return [folder / manifest.FILES.get(name, f"vectors.{name}") for name in formats]


@contextlib.contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files then replace those of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(TEMPORARY_SUFFIX, ".vectors.", folder) as temporary:
        new = Path(temporary)
        yield new
        for path in new.iterdir():
            sync(path)
        if (new / "vectors.kv").exists():
            # A reader never finds vectors.kv beside .npy files of another save.
            (folder / "vectors.kv").unlink(missing_ok=True)
            for path in folder.glob("vectors.kv.*.npy"):
                path.unlink()
        # vectors.kv is the last one, as it names the arrays beside it.
        for path in sorted(new.iterdir(), key=lambda path: path.name == "vectors.kv"):
            os.replace(path, folder / path.name)
    sync(folder)
