"""Write vectors in the formats of gensim, word2vec and fastText."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from w2v.system.files import TEMPORARY_SUFFIX, hash_file, sync, synced_file, write_synced
from w2v.system.process import map_in_order
from w2v.vectors import convert, fasttext, manifest
from w2v.vectors.load import ARRAY, NGRAMS, OWN, SUBWORD_CLASS, VOCAB, VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors
    from torch import Tensor

    from w2v.config import Config
    from w2v.distributed.ranks import Ranks
    from w2v.rows.table import Table
    from w2v.text.vocab import Vocab
    from w2v.word2vec.subwords import Subwords

FASTTEXT = "vectors.fasttext.bin"
BLOCK_BYTES = 8 << 20  # of vectors on their way from the tables to the files
EXPORT_BYTES = 8 * BLOCK_BYTES  # most memory of an export, but for the words


class Composed(NamedTuple):
    """What the vectors of a run are composed of.

    Blocks are float32 [n, D], as of `in_order`: own vectors of words, those of the buckets in use,
    and output vectors, which files of fastText have.
    """

    subwords: Subwords
    config: Config
    own: Iterator[np.ndarray]
    buckets: Iterator[np.ndarray]
    outputs: Iterator[np.ndarray]

    @classmethod
    def of(cls, subwords: Subwords, table: Table, config: Config, ranks: Ranks) -> Composed:
        """Return those of a table, or of its shards on all ranks."""
        first, middle = subwords.first, subwords.first + subwords.words
        outputs = table.interleaved("input", "output")[1]["weight"]
        count = subwords.words if "fasttext" in config.run.formats else 0
        return cls(
            subwords,
            config,
            own=_rows_in_order(table, ranks, first, middle),
            buckets=_rows_in_order(table, ranks, middle, subwords.first + subwords.rows),
            outputs=in_order(outputs, ranks, count),
        )

    @property
    def blocks(self) -> Iterator[np.ndarray]:
        """What is left of all blocks."""
        return chain(self.own, self.buckets, self.outputs)


def blocks_of(rows_VX: Tensor, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield rows [first, last) in float32 [n, X] blocks."""
    block = max(1, BLOCK_BYTES // (4 * rows_VX.shape[1:].numel()))
    for start in range(first, last, block):
        yield rows_VX[start : min(start + block, last)].float().cpu().contiguous().numpy()


def in_order(rows_VX: Tensor, ranks: Ranks, last: int, first: int = 0) -> Iterator[np.ndarray]:
    """Yield rows [first, last) of all ranks on rank 0, of this rank's rows.

    They come in float32 [n, X] blocks. All ranks must exhaust the iterator; ranks other than 0 send
    and yield nothing. Row v is row v // size of rank v % size.
    """
    if ranks.size == 1:
        yield from blocks_of(rows_VX, first, last)
        return
    begins = [len(range(rank, first, ranks.size)) for rank in range(ranks.size)]
    ends = [len(range(rank, last, ranks.size)) for rank in range(ranks.size)]
    block = max(1, BLOCK_BYTES // (4 * rows_VX.shape[1:].numel() * ranks.size))
    most = max(end - begin for begin, end in zip(begins, ends, strict=True))
    for start in range(0, most, block):
        starts = [begin + start for begin in begins]
        sizes = [max(0, min(block, end - at)) for end, at in zip(ends, starts, strict=True)]
        at = starts[ranks.rank]
        mine_nX = rows_VX[at : at + sizes[ranks.rank]].float().cpu().contiguous()
        sent = [len(mine_nX)] + [0] * (ranks.size - 1)
        if ranks.rank:
            sizes = [0] * ranks.size
        received_nX = ranks.all_to_all(mine_nX, sent, sizes, group="export")
        if ranks.rank == 0:
            block_nX = np.empty(received_nX.shape, np.float32)
            for rank, part_nX in enumerate(received_nX.split(sizes)):
                block_nX[(rank - first) % ranks.size :: ranks.size] = part_nX.numpy()
            yield block_nX


def _rows_in_order(table: Table, ranks: Ranks, first: int, last: int) -> Iterator[np.ndarray]:
    """Yield weights of rows [first, last), of which ranks have pairs."""
    pairs_V2D, done = table["weight"].unflatten(0, (-1, 2)), first // 2 * 2
    for block_n2D in in_order(pairs_V2D, ranks, -(-last // 2), first // 2):
        rows_nD = block_n2D.reshape(-1, table.dim)
        yield rows_nD[max(0, first - done) : last - done]
        done += len(rows_nD)


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
        with _new_files(folder) as new, ThreadPoolExecutor(1) as thread:
            writing = thread.submit(_write_words, new, vocab, dim, composed)
            sums = _write_vectors(new, vocab.words, dim, blocks, "bin" in formats)
            writing.result()
            if composed:
                _write_subwords(new, vocab, dim, composed, "fasttext" in formats)
            others = [path for path in new.iterdir() if path.name not in sums]
            sums |= {path.name: hash_file(path) for path in others}
            manifest.remove_derived(folder)
            for path in folder.glob(manifest.VECTORS):
                path.unlink()
        manifest.write(folder, step, sums)
    finally:
        deque(blocks, 0)  # what other ranks still send
        deque(composed.blocks if composed else (), 0)


def _write_vectors(
    folder: Path, words: Sequence[str], dim: int, blocks: Iterable[np.ndarray], as_binary: bool
) -> dict[str, str]:
    """Write blocks of float32 [n, D] to `ARRAY`, and in word2vec's format.

    Returns SHA-256 checksums by file name.
    """
    sums: dict[str, str] = {}
    with contextlib.ExitStack() as files:
        write_array = files.enter_context(_hashed_file(folder / ARRAY, sums))
        write_array(_array_header(len(words), dim))
        if as_binary:
            write_binary = files.enter_context(_hashed_file(folder / "vectors.bin", sums))
            write_binary(f"{len(words)} {dim}\n".encode())
            remaining = iter(words)

            def write_rows(block_nD: np.ndarray) -> np.ndarray:
                write_binary(_binary_rows(list(islice(remaining, len(block_nD))), block_nD))
                return block_nD

            # In a thread, while this one writes the array.
            blocks = files.enter_context(contextlib.closing(map_in_order(1, write_rows, blocks)))
        for block_nD in blocks:
            write_array(block_nD.data)
    return sums


@contextlib.contextmanager
def _hashed_file(
    path: Path, sums: dict[str, str]
) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yield a function that writes parts; add the file's SHA-256 to `sums`."""
    digest = hashlib.sha256()
    with synced_file(path) as write:

        def write_hashed(part: bytes | memoryview) -> None:
            digest.update(part)
            write(part)

        yield write_hashed
    sums[path.name] = digest.hexdigest()


def _array_header(rows: int, dim: int) -> memoryview:
    """Return the beginning of an .npy file of float32."""
    header = io.BytesIO()
    shape = {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
    np.lib.format.write_array_header_1_0(header, shape)
    return header.getbuffer()


def _binary_rows(words: Sequence[str], block_nD: np.ndarray) -> memoryview:
    """Return each word, a space and its vector.

    NumPy joins them without the GIL, for which other threads would wait.
    """
    rows_n = block_nD.view(f"V{block_nD.shape[1] * block_nD.itemsize}")[:, 0]
    # A line feed, which no word holds, is in the place of each vector.
    text = np.frombuffer(" \n".join([*words, ""]).encode(), np.uint8)
    ends_n = np.flatnonzero(text == ord("\n"))
    before_n = np.arange(len(words)) * (rows_n.itemsize - 1)  # bytes that vectors before it add
    joined = np.empty(len(text) + len(words) * (rows_n.itemsize - 1), np.uint8)
    joined[np.arange(len(text)) + np.repeat(before_n, np.diff(ends_n, prepend=-1))] = text
    # A view of a vector from each byte on.
    windows = np.ndarray(len(joined) - rows_n.itemsize + 1, rows_n.dtype, joined, strides=(1,))
    windows[ends_n + before_n] = rows_n
    return joined.data


def _write_subwords(
    folder: Path, vocab: Vocab, dim: int, composed: Composed, as_fasttext: bool
) -> None:
    """Write what composes vectors of unseen words."""
    subwords = composed.subwords
    min_n, max_n, buckets = subwords.limits
    header = _array_header(subwords.words, dim)
    write_synced(folder / OWN, chain([header], (block_nD.data for block_nD in composed.own)))
    # Buckets that are not in use have zero vectors.
    shape, done = (buckets, dim), 0
    buckets_BD = np.lib.format.open_memmap(folder / NGRAMS, "w+", np.float32, shape)
    for block_nD in composed.buckets:
        buckets_BD[subwords.used_B[done : done + len(block_nD)]] = block_nD
        done += len(block_nD)
    buckets_BD.flush()
    if as_fasttext:
        own_VD = np.load(folder / OWN, mmap_mode="c")
        if fasttext.END in vocab.words:
            row = vocab.words.index(fasttext.END)
            own_VD[row] = np.load(folder / ARRAY, mmap_mode="r")[row]
        ngrams = fasttext.Ngrams(min_n, max_n, own_VD, buckets_BD)
        with open(folder / FASTTEXT, "wb") as file:
            fasttext.write(file, composed.config, vocab, ngrams, composed.outputs)


def _write_words(folder: Path, vocab: Vocab, dim: int, composed: Composed | None) -> None:
    """Write the words as text, and a KeyedVectors for gensim.

    Its vectors are in `ARRAY`. Its class is named by hand, as importing gensim takes a second.
    """
    vocab.save(folder / VOCAB)
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
    with open(folder / "vectors.kv", "wb") as file:
        file.write(pickle.PROTO + b"\4" + pickle.GLOBAL + name.replace(" ", "\n").encode() + b"\n")
        file.write(pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        # Written as it is made: between parts other threads run.
        pickle.dump(state, file, protocol=4)
        file.seek(-len(pickle.STOP), os.SEEK_CUR)
        file.write(pickle.BUILD + pickle.STOP)


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
                kv.save(path, separately=["vectors", "vectors_vocab", "vectors_ngrams"])
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
