"""Checkpoints: the tables in shards, and a manifest in JSON.

    checkpoints/step-00001234/
        input-00000-of-00002.safetensors              "records" [n, R]: n rows, without padding
        input-rank-1-of-4-00000-of-00002.safetensors  rank 1 of 4: row j of its shard is row 1 + 4 j
        manifest.json                                 where training stood, fields and scalars of
                                                      the tables, size and CRC-32 of each file

Nothing is pickled. A checkpoint is written to a folder `*.partial`, synced and then renamed. The
last two are kept. Any number of ranks reads the files of any other number. All content is checked
by CRC-32, at 4 GB/s a core: it finds every flipped bit, and misses other damage once in four
billion times.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.rows.table import Table, host_memory
from w2v.system.files import refused, sealed, sync, unsealed, write_synced

FORMAT = 7  # of the manifest; others are not read
KEPT = 2
MOST_RANKS = 1 << 16
FILE_BYTES = 1 << 30  # records of one file, at most
CHUNK_BYTES = 4 << 20  # copied from the tables' device, summed and written at a time
THREADS = 8  # files written or read at once
# Names in safetensors.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Entries = dict[str, dict[str, int]]  # of each file: its "bytes" and "crc32"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the file and the remedy."""


class Checkpoints:
    """Write the checkpoints of a run, one at a time.

    All ranks make the same calls. `save` returns when the tables may change again: their records
    are copied, or on disk. A thread writes copies. Its error, on any rank, is raised by the next
    call.

    copy_bytes: CPU memory for copies; nothing is copied if the tables are larger.
    """

    def __init__(
        self, folder: Path, tables: Sequence[Table], copy_bytes: int, ranks: Ranks = SINGLE
    ):
        self.folder = folder
        self._tables = tables
        self._ranks = ranks
        folder.mkdir(exist_ok=True)
        own_bytes = sum(
            records_nR.nbytes for records_nR in record_files(self._tables, self._ranks).values()
        )
        self._bytes = sum(ranks.all_gather(own_bytes))
        self._can_copy = own_bytes <= copy_bytes
        self._memory: dict[str, Tensor] = {}  # for copies, by file; allocated once
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future | None = None

    @property
    def busy(self) -> bool:
        """True while the last checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def save(self, state: dict[str, Any], copied: bool = True) -> None:
        """Write the tables and rank 0's state, which JSON can hold.

        `copied` is False if the tables stay as they are until `wait`: nothing is copied, and all is
        written in the background.
        """
        self.wait()
        path = self.folder / f"step-{state['step']:08d}"
        if self._ranks.all_gather(path.exists())[0]:  # all do as rank 0, which makes folders
            self._remove_old()  # a process killed before it did so may have written it
            return
        manifest = {"format": FORMAT, **state, "ranks": self._ranks.size}
        manifest["tables"] = _describe(self._tables, self._ranks)
        files = record_files(self._tables, self._ranks)
        entries: Entries = {}
        with self._removed_on_failure(path), self._ranks.reraise():
            partial = _partial(path)
            partial.mkdir(exist_ok=True)
            if copied and self._can_copy:
                files = {name: self._copy(name, files[name]) for name in files}
            elif copied:
                entries = write_files(partial, files)
                files = {}
        self._writing = self._writer.submit(self._finish, path, manifest, entries, files)

    def raise_failure(self) -> None:
        """Raise the error of the last checkpoint, if it has failed by now."""
        try:
            if not self.busy:
                self.wait()
        except OSError as error:
            failed: Any = error
            failed.failed_rank = None  # ranks call this at different times, so each reports it
            raise

    def wait(self) -> None:
        """Return when the last checkpoint is on disk."""
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.result()

    def _copy(self, name: str, records_nR: Tensor) -> Tensor:
        """Copy the records of a file to CPU memory."""
        if name not in self._memory:
            self._memory[name] = torch.from_numpy(host_memory(records_nR.nbytes))
        copy_nR = self._memory[name].view(records_nR.dtype).view(records_nR.shape)
        parts_nR = _chunks(records_nR)  # a GPU packs each first
        for to_nR, part_nR in zip(_chunks(copy_nR), parts_nR, strict=True):
            to_nR.copy_(part_nR)
        return copy_nR

    def _finish(
        self, path: Path, manifest: dict[str, Any], entries: Entries, files: Mapping[str, Tensor]
    ) -> None:
        """Write the files and, when all ranks are done, the manifest."""
        partial = _partial(path)
        ranks = self._ranks
        with self._removed_on_failure(path):
            with ranks.reraise(group="background"):
                entries |= write_files(partial, files)
                sync(partial)
            of_ranks = ranks.all_gather(entries, group="background")
            # The manifest is written last: a folder with a manifest is complete.
            with ranks.reraise(group="background"):
                if ranks.rank == 0:
                    files = {name: entry for part in of_ranks for name, entry in part.items()}
                    text = sealed(manifest | {"files": files})
                    write_synced(partial / "manifest.json", [text.encode()])
                    sync(partial)
                    os.replace(partial, path)
                    sync(path.parent)
        self._remove_old()

    def _remove_old(self) -> None:
        if self._ranks.rank:
            return
        for old in _saved(self.folder)[:-KEPT]:
            # A folder with the name of a checkpoint is complete, even while another is removed.
            removed = Path(f"{old}.old.partial")
            os.replace(old, removed)
            shutil.rmtree(removed, ignore_errors=True)

    @contextlib.contextmanager
    def _removed_on_failure(self, path: Path) -> Iterator[None]:
        """Remove the checkpoint if the disk fails, and say how much it needs."""
        try:
            yield
        except OSError as error:
            if self._ranks.rank == 0:
                shutil.rmtree(_partial(path), ignore_errors=True)
            error.strerror = (
                f"{error.strerror or error}, so that a checkpoint of {self._bytes:,} bytes cannot "
                "be written; any before it are still there"
            )
            error.filename = str(path.parent)
            raise


class Checkpoint:
    """A checkpoint on disk.

    ranks: number of ranks that wrote it; state: that of rank 0 in `Checkpoints.save`.

    Raises:
        CheckpointError: if the manifest is damaged or of another format.
    """

    def __init__(self, path: Path):
        self.path = path
        file = path / "manifest.json"
        older = [other.name for other in _saved(path.parent) if other != path]
        rest = "start anew, as there is no older checkpoint"
        if older:
            rest = f"go on from {older[-1]}"
        self._remedy = f"restore it, or remove {path} to {rest}"
        with self.checked():
            if not file.is_file():  # a FIFO would block
                raise ValueError("there is no such file")
            manifest = unsealed(file.read_text(encoding="utf-8"))
            # Only an undamaged manifest tells its format.
            if manifest["format"] != FORMAT:
                other = f"{file} is of format {manifest['format']}"
                remedy = "go on with the version that wrote it"
                raise CheckpointError(f"{other}, and this version reads format {FORMAT}; {remedy}")
            self.ranks = operator.index(manifest.pop("ranks"))
            if not 0 < self.ranks <= MOST_RANKS:
                raise ValueError(f"{self.ranks} ranks")
            self._tables = manifest.pop("tables")
            self._files = {
                name: {key: operator.index(entry[key]) for key in ("bytes", "crc32")}
                for name, entry in manifest.pop("files").items()
            }
        del manifest["format"], manifest["checksum"]
        self.state: dict[str, Any] = manifest

    def checked(self) -> AbstractContextManager:
        """Raise errors of a block that reads the manifest as damage."""
        file = self.path / "manifest.json"
        return refused(CheckpointError, f"{file} is damaged", self._remedy)

    def load(self, tables: Sequence[Table], ranks: Ranks = SINGLE) -> None:
        """Fill the tables, on any number of ranks.

        Raises:
            CheckpointError: if rows, fields or dtype differ from those saved, or a file is
                damaged; the tables are then undefined.
        """
        wanted = _describe(tables, ranks)
        with ranks.reraise():
            scalars = []  # each with its value
            with self.checked():
                for name in wanted | self._tables:
                    saved, here = self._tables.get(name), wanted.get(name)
                    if not (saved and here) or _layout(saved) != _layout(here):
                        differs = f"holds the table {saved}, but this run's is {here}"
                        remedy = "resume with the settings of the run"
                        raise CheckpointError(f"{self.path} {differs}; {remedy}")
                for table in tables:
                    # Ranks that were not there before take the scalars of one that was.
                    values = self._tables[table.name]["scalars"][ranks.rank % self.ranks]
                    for name, scalar in table.scalars.items():
                        scalars.append((scalar, torch.full_like(scalar, values[name])))
            records = {table.name: (wanted[table.name]["rows"], table.saved_VR) for table in tables}
            try:
                read_files(self.path, self._files, records, self.ranks, ranks)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {self._remedy}") from None
        for scalar, value in scalars:
            scalar.copy_(value)


def latest(folder: Path, ranks: Ranks = SINGLE) -> Checkpoint | None:
    """Return the newest checkpoint in a folder, or None without any.

    Raises `CheckpointError` if it cannot be used, and `RanksDiffer` if ranks see different ones.
    """
    saved = _saved(folder)
    seen = {f"the newest checkpoint in {folder}": [path.name for path in saved[-1:]]}
    ranks.require_equal(seen, "put run.dir on storage that all hosts share")
    with ranks.reraise():
        return next((Checkpoint(path) for path in saved[-1:]), None)


def _saved(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    saved = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(saved, key=lambda path: int(path.name[5:]))


def _partial(path: Path) -> Path:
    return Path(f"{path}.partial")


def _describe(tables: Sequence[Table], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """Return the layout of each whole table, and the scalars of each rank."""
    described = {}
    for table in tables:
        scalars = {name: value.item() for name, value in table.scalars.items()}
        of_ranks = ranks.all_gather((table.rows, scalars))
        described[table.name] = {
            "rows": sum(rows for rows, _ in of_ranks),
            "dtype": DTYPES[table.dtype],
            "fields": [[name, part.stop - part.start] for name, part in table.columns.items()],
            "scalars": [scalars for _, scalars in of_ranks],
        }
    return described


def _layout(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a description that a loaded table must match."""
    # The names of the scalars belong to the layout, their values do not.
    return {**described, "scalars": sorted(described["scalars"][0])}


# Files of records.


def record_files(tables: Sequence[Table], ranks: Ranks) -> dict[str, Tensor]:
    """Return views of the tables' rows by the name of their file."""
    views: dict[str, Tensor] = {}
    for table in tables:
        records_VR = table.saved_VR
        parts = _parts(table.name, len(records_VR), records_VR, ranks.rank, ranks.size)
        views |= {file: records_VR[rows.start : rows.stop] for file, rows in parts.items()}
    return views


def write_files(folder: Path, files: Mapping[str, Tensor]) -> Entries:
    """Write and sync the records [n, R] of each file, not the folder."""
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: _write_file(folder / name, files[name]), files)
        return dict(zip(files, entries, strict=True))


def read_files(
    folder: Path,
    entries: Entries,
    tables: Mapping[str, tuple[int, Tensor]],
    saved: int,
    ranks: Ranks,
) -> None:
    """Fill this rank's tables from the files of `saved` ranks.

    Tables are given by name as (rows of all ranks, records of this one). If the number of ranks
    differs, each reads all files that hold a row of its own.

    Raises:
        CheckpointError: A file is missing or damaged; the tables are then undefined.
    """
    common = math.gcd(saved, ranks.size)
    file_step, shard_step = ranks.size // common, saved // common

    def read_part(file: str, part: range, rank: int, records_VR: Tensor) -> None:
        first = part.start
        chunks_nR = _read_file(folder / file, len(part), entries.get(file, {}), records_VR)
        for chunk_nR in chunks_nR:
            # Row j of the file's shard is row (j * saved + rank) of the table. Every `file_step`-th
            # of them is ours, from `skipped` on; they are `shard_step` rows apart in our shard.
            rows = [(first + skipped) * saved + rank for skipped in range(file_step)]
            skipped = [row % ranks.size for row in rows].index(ranks.rank)
            mine_mR = chunk_nR[skipped::file_step]
            records_VR[rows[skipped] // ranks.size :: shard_step][: len(mine_mR)].copy_(mine_mR)
            first += len(chunk_nR)

    with ThreadPoolExecutor(THREADS) as pool:
        reads = []
        for name, (rows, records_VR) in tables.items():
            # Other saved shards have no row in common with ours.
            for rank in range(ranks.rank % common, saved, common):
                shard_rows = -(-(rows - rank) // saved)
                for file, part in _parts(name, shard_rows, records_VR, rank, saved).items():
                    reads.append(pool.submit(read_part, file, part, rank, records_VR))
        for done in reads:
            done.result()


def _row_bytes(records_VR: Tensor) -> int:
    """Return the bytes of a row in a file."""
    return records_VR.shape[1] * records_VR.element_size()


def _chunks(records_VR: Tensor) -> tuple[Tensor, ...]:
    """Split records into parts of CHUNK_BYTES."""
    return records_VR.split(_chunk_rows(records_VR))


def _parts(table: str, rows: int, like_VR: Tensor, rank: int, ranks: int) -> dict[str, range]:
    """Return the files of a rank's shard, and the rows of each."""
    file_rows = max(1, FILE_BYTES // _row_bytes(like_VR))
    owner = ""
    if ranks > 1:
        owner = f"-rank-{rank}-of-{ranks}"
    count = -(-rows // file_rows)
    parts = {}
    for number in range(count):
        file = f"{table}{owner}-{number:05d}-of-{count:05d}.safetensors"
        parts[file] = range(rows)[number * file_rows : (number + 1) * file_rows]
    return parts


def _write_file(path: Path, records_nR: Tensor) -> dict[str, int]:
    crc32 = 0

    def summed() -> Iterator[bytes | memoryview]:
        nonlocal crc32
        for part in _contents(records_nR):
            crc32 = zlib.crc32(part, crc32)
            yield part

    write_synced(path, summed())
    return {"bytes": path.stat().st_size, "crc32": crc32}


def _contents(records_nR: Tensor) -> Iterator[bytes | memoryview]:
    """Yield the parts of a safetensors file."""
    yield _header(len(records_nR), records_nR)
    if records_nR.is_contiguous() and not records_nR.is_cuda:
        yield from map(_bytes, _chunks(records_nR))
        return
    # One buffer, as new memory for each chunk takes longer than the copy.
    parts_nR = _chunks(records_nR)
    buffer_nR = torch.empty(parts_nR[0].shape, dtype=records_nR.dtype)
    for part_nR in parts_nR:
        yield _bytes(buffer_nR[: len(part_nR)].copy_(part_nR))


def _read_file(
    file: Path, rows: int, entry: Mapping[str, int], like_VR: Tensor
) -> Iterator[Tensor]:
    """Yield the records in chunks; an error follows if they are damaged."""
    try:
        size = file.stat().st_size
        expected = entry.get("bytes", 0)
        if size != expected:
            raise CheckpointError(f"{file} is damaged ({size:,} bytes instead of {expected:,})")
        with open(file, "rb") as opened:
            crc32 = zlib.crc32(opened.read(expected - rows * _row_bytes(like_VR)))
            for start in range(0, rows, _chunk_rows(like_VR)):
                count = min(_chunk_rows(like_VR), rows - start)
                chunk_nR = torch.empty(count, like_VR.shape[1], dtype=like_VR.dtype)
                opened.readinto(_bytes(chunk_nR))
                crc32 = zlib.crc32(_bytes(chunk_nR), crc32)
                yield chunk_nR
    except OSError as error:
        raise CheckpointError(f"{file} is damaged ({error.strerror or error})") from None
    if crc32 != entry["crc32"]:
        found = f"its CRC-32 is {crc32:08x} instead of {entry['crc32']:08x}"
        raise CheckpointError(f"{file} is damaged ({found})")


def _header(rows: int, like_VR: Tensor) -> bytes:
    """Return the beginning of a safetensors file of that many such records."""
    tensor = {
        "dtype": DTYPES[like_VR.dtype],
        "shape": [rows, like_VR.shape[1]],
        "data_offsets": [0, rows * _row_bytes(like_VR)],
    }
    text = json.dumps({"records": tensor}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunk_rows(records_VR: Tensor) -> int:
    return max(1, CHUNK_BYTES // _row_bytes(records_VR))


def _bytes(records_nR: Tensor) -> memoryview:
    return memoryview(records_nR.view(torch.uint8).numpy()).cast("B")
