"""Write vectors in the formats of gensim (.kv) and word2vec (.bin, .txt)."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import TEMPORARY_SUFFIX, atomic_write, hash_file, start_writeback, sync
from w2v.vectors.load import SUMS, VectorsError

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

    from w2v.distributed.ranks import Ranks
    from w2v.model.table import Table

LARGE = 10 << 20  # elements of an array for which gensim writes a .npy file of its own
ARRAY = "vectors.kv.vectors.npy"  # its name
BLOCK_BYTES = 8 << 20  # of vectors on their way from the tables to the files
BLOCKS_AHEAD = 3  # blocks that wait for the thread of a file
PICKLED_WORDS = 1 << 16  # at a time
FIRST_NUMBER = 1 << 10  # of words in a pickle, after those of other values
EXPORT_BYTES = 2 * 4 * LARGE  # most memory of an export: blocks of 2 files


def in_order(table: Table, ranks: Ranks, rows: int) -> Iterator[np.ndarray]:
    """Yield the weights of the first rows of a sharded table on rank 0.

    They come in float32 [n, D] blocks. All ranks must exhaust the iterator; ranks other than 0 send
    and yield nothing. Row v of the table is row v // size of the shard of rank v % size.
    """
    counts = [len(range(rank, rows, ranks.size)) for rank in range(ranks.size)]
    block = max(1, BLOCK_BYTES // (4 * table.dim * ranks.size))
    for start in range(0, counts[0], block):
        sizes = [max(0, min(block, count - start)) for count in counts]
        mine_nD = table["weight"][start : start + sizes[ranks.rank]].float().cpu().contiguous()
        if ranks.size == 1:
            yield mine_nD.numpy()
            continue
        nothing = [0] * ranks.size
        sent = [len(mine_nD), *nothing[1:]]
        received_nD = ranks.all_to_all(mine_nD, sent, nothing if ranks.rank else sizes)
        if ranks.rank == 0:
            block_nD = np.empty(received_nD.shape, np.float32)
            for rank, part_nD in enumerate(received_nD.split(sizes)):
                block_nD[rank :: ranks.size] = part_nD.numpy()
            yield block_nD


class _File:
    """A new file that a thread of its own writes and hashes, part by part."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._digest = hashlib.sha256()
        self._is_linked = path.name == ARRAY  # by a checkpoint, which compares CRC-32
        self.crc32 = 0
        self._thread = ThreadPoolExecutor(1, path.name)
        self._writing: deque[Future] = deque()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._file.close()

    def write(self, parts: Iterable[bytes | memoryview]) -> None:
        """Have the thread make and write these parts; wait if it is far behind."""
        if len(self._writing) == BLOCKS_AHEAD:
            self._writing.popleft().result()
        self._writing.append(self._thread.submit(self._write, parts))

    def sync(self) -> None:
        """Have the thread wait, after the last part, until all is on disk."""
        self._writing.append(self._thread.submit(os.fsync, self._file.fileno()))

    def checksum(self) -> str:
        """Return the SHA-256 when the thread has done all."""
        for writing in self._writing:
            writing.result()
        return self._digest.hexdigest()

    def _write(self, parts: Iterable[bytes | memoryview]) -> None:
        for part in parts:
            self._file.write(part)
            self._file.flush()
            start_writeback(self._file.fileno(), len(part))
            self._digest.update(part)
            if self._is_linked:
                self.crc32 = zlib.crc32(part, self.crc32)


def has_array(words: int, dim: int) -> bool:
    """Return whether vectors.kv has a file for the vectors, `ARRAY`."""
    return words * dim >= LARGE


def save_rows(
    words: Sequence[str],
    counts: np.ndarray,
    dim: int,
    blocks: Iterator[np.ndarray],
    folder: Path,
    formats: Sequence[str],
) -> int:
    """Write vectors.kv, perhaps vectors.bin, and checksums, without gensim.

    The V words are sorted by falling count. The blocks are float32 [n, D]. An error is raised after
    the last block, as other ranks wait until theirs are received. Return the CRC-32 of `ARRAY`, 0
    if there is no such file.
    """
    shape = len(words), dim
    try:
        with _new_files(folder) as new, contextlib.ExitStack() as stack:
            names = ["vectors.bin"] * ("bin" in formats) + [ARRAY] * has_array(*shape)
            names.append("vectors.kv")
            files = {name: stack.enter_context(_File(new / name)) for name in names}
            kv = files["vectors.kv"]
            kv.write(_pickled(words, counts, dim, ARRAY not in files))
            if ARRAY in files:
                files[ARRAY].write([_npy_header(shape)])
            if "vectors.bin" in files:
                files["vectors.bin"].write(["{} {}\n".format(*shape).encode()])
            first = 0
            for block_nD in blocks:
                end = first + len(block_nD)
                if "vectors.bin" in files:
                    files["vectors.bin"].write(_binary_rows(words[first:end], block_nD))
                files.get(ARRAY, kv).write([block_nD.data.cast("B")])
                first = end
            if ARRAY not in files:
                kv.write([pickle.TUPLE + pickle.BUILD + pickle.SETITEM])
            kv.write([pickle.BUILD + pickle.STOP])
            for file in files.values():
                file.sync()
            sums = {name: file.checksum() for name, file in files.items()}
            (folder / SUMS).unlink(missing_ok=True)  # wrong until all files are in place
        _write_sums(folder, sums)
        return files[ARRAY].crc32 if ARRAY in files else 0
    finally:
        for _ in blocks:  # what other ranks still send
            pass


def _npy_header(shape: tuple[int, int]) -> bytes:
    """Return the beginning of a .npy file of float32."""
    file = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def _binary_rows(words: Sequence[str], block_nD: np.ndarray) -> Iterator[memoryview]:
    """Yield a word, a space and its vector, for each word."""
    rows_n = block_nD.view(f"V{block_nD.shape[1] * block_nD.itemsize}")[:, 0]
    yield _with_records(*_lines(words, " "), rows_n)


def _lines(words: Sequence[str], end: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Return lines of words in UTF-8, and the places of the line feeds."""
    # Words are read from lines, and so hold no line feed.
    lines = np.frombuffer(f"{end}\n".join([*words, ""]).encode(), np.uint8)
    return lines, np.flatnonzero(lines == ord("\n"))


def _with_records(lines: np.ndarray, ends_n: np.ndarray, records_n: np.ndarray) -> memoryview:
    """Return the lines with a record, of bytes, in place of each line feed.

    NumPy does so without the GIL, for which other threads wait.
    """
    size = records_n.itemsize
    # Bytes go one place on from that before, but from a line feed by the size of its record.
    places = np.ones(len(lines), np.intp)
    places[0] = 0
    places[ends_n[:-1] + 1] = size
    np.cumsum(places, out=places)
    joined = np.empty(len(lines) + len(ends_n) * (size - 1), np.uint8)
    joined[places] = lines
    # A view of a record from each byte on.
    windows = np.ndarray(len(joined) - size + 1, records_n.dtype, joined, strides=(1,))
    windows[places[ends_n]] = records_n
    return joined.data


def save(kv: KeyedVectors, folder: str | Path, formats: Sequence[str]) -> list[Path]:
    """Write vectors.kv, vectors.bin or vectors.txt; return their paths.

    gensim writes large arrays to files of their own, vectors.kv.*.npy. Words keep their
    order if counts fall; otherwise gensim sorts .bin and .txt by count.
    """
    if set(formats) - {"kv"}:
        _check_words(kv.index_to_key)
    folder = Path(folder)
    sums = folder / SUMS
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    with _new_files(folder) as new:
        for name in formats:
            path = str(new / f"vectors.{name}")
            if name == "kv":
                kv.save(path)
            else:
                kv.save_word2vec_format(path, binary=name == "bin")
        written = [path.name for path in new.iterdir()]
        sums.unlink(missing_ok=True)  # wrong until all files are in place
    if lines:
        # Only new files are hashed, as the others may have been damaged since.
        known = {name: checksum for checksum, _, name in (line.partition("  ") for line in lines)}
        known |= {name: hash_file(folder / name, hashlib.sha256()) for name in written}
        _write_sums(folder, {name: known[name] for name in known if (folder / name).exists()})
    return [folder / f"vectors.{name}" for name in formats]


def _write_sums(folder: Path, sums: dict[str, str]) -> None:
    """Write SHA-256 checksums of files by name, which `load` compares."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(sums.items())]
    atomic_write(folder / SUMS, "".join(lines))


def _check_words(words: Sequence[str]) -> None:
    """Raise if a word holds white space, which only .kv can store."""
    for word in words:
        if word.split() != [word]:
            raise VectorsError(
                f"the word {word!r} is empty or holds white space, which only .kv can store; use kv"
            )


@contextlib.contextmanager
def _new_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files then replace those of the folder."""
    # A reader never finds vectors.kv beside .npy files of another save.
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
        # vectors.kv is the last one, as it names the arrays beside it.
        for path in sorted(new.iterdir(), key=lambda path: path.name == "vectors.kv"):
            os.replace(path, folder / path.name)
    sync(folder)


def _pickled(
    words: Sequence[str], counts: np.ndarray, dim: int, inline: bool
) -> Iterator[bytes | memoryview]:
    """Yield a pickle of `KeyedVectors`, up to the vectors if they are inline.

    `pickle.dump` would write the same operations, but import gensim, which takes 50 MiB, and take
    many times as long for words, with the GIL.
    """
    state = {
        "vector_size": dim,
        "next_index": len(words),
        "expandos": {"count": np.array(counts, np.int64)},
        "norms": None,
        "mapfile_path": None,
        "lifecycle_events": [],
        "__numpys": [] if inline else ["vectors"],
        "__scipys": [],
        "__ignoreds": [],
        "__recursive_saveloads": [],
    }
    # An empty object of the class, then its attributes.
    parts = [pickle.PROTO + b"\x03" + pickle.GLOBAL, b"gensim.models.keyedvectors\nKeyedVectors\n"]
    parts += [pickle.EMPTY_TUPLE, pickle.NEWOBJ, pickle.EMPTY_DICT]
    for name, value in state.items():
        parts += [_operations(name), _operations(value), pickle.SETITEM]
    # Words get numbers (LONG_BINPUT), by which the keys of the dictionary name them again.
    parts += [_operations("index_to_key"), pickle.EMPTY_LIST, pickle.MARK]
    yield b"".join(parts)
    blocks = np.split(np.arange(len(words)), range(PICKLED_WORDS, len(words), PICKLED_WORDS))
    for rows_n in blocks:
        lines, ends_n = _lines(words[rows_n[0] : rows_n[-1] + 1])
        # Before a word is its length, after it its number and the length of the next; the last
        # record has the length of the first.
        lengths_n = np.diff(ends_n, prepend=-1) - 1
        next_n = _operation(pickle.BINUNICODE, np.roll(lengths_n, -1))
        numbers_n = _operation(pickle.LONG_BINPUT, FIRST_NUMBER + rows_n)
        records_n = np.stack([numbers_n, next_n], axis=1).view("V10")[:, 0]
        yield next_n[-1].tobytes()
        yield _with_records(lines, ends_n, records_n)[: -next_n.itemsize]
    parts = [pickle.APPENDS, pickle.SETITEM]
    yield b"".join([*parts, _operations("key_to_index"), pickle.EMPTY_DICT, pickle.MARK])
    for rows_n in blocks:
        numbers_n = _operation(pickle.LONG_BINGET, FIRST_NUMBER + rows_n)
        yield np.stack([numbers_n, _operation(pickle.BININT, rows_n)], axis=1).tobytes()
    parts = [pickle.SETITEMS, pickle.SETITEM]
    if inline:
        array: Any = np.empty(0, np.float32)
        make, arguments, (version, _, dtype, in_columns, _) = array.__reduce__()
        parts += [_operations("vectors"), *map(_operations, (make, arguments)), pickle.REDUCE]
        shape = len(words), dim
        parts += [pickle.MARK, *map(_operations, (version, shape, dtype, in_columns))]
        parts.append(_operation(pickle.BINBYTES, [4 * len(words) * dim]).tobytes())
    yield b"".join(parts)


def _operations(value: Any) -> bytes:
    """Return the pickle of a value without its begin and end."""
    return pickle.dumps(value, protocol=3)[2:-1]


def _operation(code: bytes, operands: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return an operation for each operand of 4 bytes, as raw bytes."""
    operations = np.empty(len(operands), [("code", "S1"), ("operand", "<u4")])
    operations["code"] = code
    operations["operand"] = operands
    return operations.view("V5")
