"""The files of a checkpoint: the records of each rank in safetensors files, checked as they are read, and dealt to any number of ranks.

    input-00000-of-00002.safetensors              "records" [n, P]: n rows of weight, states, and zeros up to 128 bytes
    input-rank-1-of-4-00000-of-00002.safetensors  those of rank 1 of 4: row j of its shard is row 1 + 4 * j of the table

What is read is checked: CRC-32 finds every flip of a bit and misses other damage once in four billion times, at 4 GB/s a core where
blake2b makes 0.8.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from w2v.distributed.ranks import Ranks
from w2v.model.table import FILE_BYTES, padded
from w2v.system.files import write_synced

CHUNK_BYTES = 1 << 20  # copied from the tables' device, summed and written at a time
WRITERS = 4  # files written or read at once
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}  # names in safetensors
Entries = Mapping[str, Mapping[str, int]]  # of each file: its "bytes" and "crc32"


class Damaged(ValueError):
    """A file that is missing, or holds something else than was written."""

    def __init__(self, file: Path, why: str, missing: bool = False):
        super().__init__(f"{file} is damaged ({why})")
        self.file, self.why, self.missing = file, why, missing


class Part(NamedTuple):
    """A file, and which rows of a rank's shard it holds."""

    file: str
    first: int
    last: int


def files(tables: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What each file is to hold of this rank's records of each table [V, R]: a view [n, R] of some rows."""
    held = {}
    for name, records_VR in tables.items():
        for part in _parts(name, len(records_VR), row_bytes(records_VR), ranks.rank, ranks.size):
            held[part.file] = records_VR[part.first : part.last]
    return held


def write(folder: Path, files: Mapping[str, Tensor]) -> Entries:
    """Write the records [n, R] of each file into the folder; they are on disk, and their names after `sync_folder`."""
    with ThreadPoolExecutor(WRITERS) as pool:
        entries = pool.map(lambda name: _write_shard(folder / name, files[name]), files)
        return dict(zip(files, entries, strict=True))


def read(
    folder: Path,
    entries: Entries,
    tables: Mapping[str, tuple[int, Tensor]],
    saved: int,
    ranks: Ranks,
) -> None:
    """Fill this rank's records of each table, given as (rows of all ranks, records), from the files of `saved` ranks; raises `Damaged`.

    Where the number of ranks is another, all files that hold a row of this rank are read through, a chunk at a time.
    """
    wanted = []
    for name, (rows, records_VR) in tables.items():
        for rank in range(saved):
            if (ranks.rank - rank) % math.gcd(
                saved, ranks.size
            ) == 0:  # else its rows and ours have no remainder in common
                shard_rows = -(-(rows - rank) // saved)
                wanted += [
                    (part, rank, records_VR)
                    for part in _parts(name, shard_rows, row_bytes(records_VR), rank, saved)
                ]

    def read_part(part: Part, rank: int, records_VR: Tensor) -> None:
        start = part.first
        for block_nR in _blocks(
            folder / part.file, entries.get(part.file, {}), part.last - part.first, records_VR
        ):
            end = start + len(block_nR)
            if saved == ranks.size:
                records_VR[start:end].copy_(block_nR)
            else:
                rows_n = torch.arange(start, end) * saved + rank
                mine_n = rows_n % ranks.size == ranks.rank
                places_m = (rows_n[mine_n] // ranks.size).to(records_VR.device)
                records_VR.index_copy_(0, places_m, block_nR[mine_n].to(records_VR.device))
            start = end

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda want: read_part(*want), wanted))


def _parts(table: str, rows: int, row_bytes: int, rank: int, ranks: int) -> list[Part]:
    """The files of a rank's shard of so many rows."""
    at_once = max(1, FILE_BYTES // row_bytes)
    starts = range(0, rows, at_once)
    whose = f"-rank-{rank}-of-{ranks}" if ranks > 1 else ""
    return [
        Part(
            f"{table}{whose}-{number:05d}-of-{len(starts):05d}.safetensors",
            start,
            min(start + at_once, rows),
        )
        for number, start in enumerate(starts)
    ]


def _write_shard(path: Path, records_nR: Tensor) -> dict[str, int]:
    missing = _width(records_nR) - records_nR.shape[1]
    blocks = (part_nR.cpu().contiguous() for part_nR in records_nR.split(_rows_at_once(records_nR)))
    parts = (_bytes(pad(block_nR, (0, missing)) if missing else block_nR) for block_nR in blocks)
    crc32 = write_synced(path, chain([_header(len(records_nR), records_nR)], parts))
    return {"bytes": path.stat().st_size, "crc32": crc32}


def _blocks(file: Path, entry: Mapping[str, int], rows: int, like_VR: Tensor) -> Iterator[Tensor]:
    """The records of a file of so many rows, a chunk at a time; what was given is sound if no `Damaged` follows."""
    try:
        if file.stat().st_size != entry.get("bytes"):
            raise Damaged(
                file, f"{file.stat().st_size:,} bytes instead of {entry.get('bytes', 0):,}"
            )
        with open(file, "rb") as opened:
            header = _header(rows, like_VR)
            if opened.read(len(header)) != header:
                raise Damaged(file, "its header differs")
            found = zlib.crc32(header)
            for start in range(0, rows, _rows_at_once(like_VR)):
                block_nP = torch.empty(
                    min(_rows_at_once(like_VR), rows - start), _width(like_VR), dtype=like_VR.dtype
                )
                opened.readinto(_bytes(block_nP))
                found = zlib.crc32(_bytes(block_nP), found)
                yield block_nP[:, : like_VR.shape[1]]
    except OSError as error:
        raise Damaged(
            file, error.strerror or str(error), isinstance(error, FileNotFoundError)
        ) from None
    if found != entry["crc32"]:
        raise Damaged(file, f"its CRC-32 is {found:08x} instead of {entry['crc32']:08x}")


def _header(rows: int, like_VR: Tensor) -> bytes:
    """How a safetensors file of so many such records begins."""
    end = rows * row_bytes(like_VR)
    about = {
        "records": {
            "dtype": DTYPES[like_VR.dtype],
            "shape": [rows, _width(like_VR)],
            "data_offsets": [0, end],
        }
    }
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _width(records_VR: Tensor) -> int:
    """Elements of a row in a file: as many wherever the records are."""
    return padded(records_VR.shape[1], records_VR.element_size())


def row_bytes(records_VR: Tensor) -> int:
    """Of a row in a file."""
    return _width(records_VR) * records_VR.element_size()


def _rows_at_once(records_VR: Tensor) -> int:
    return max(1, CHUNK_BYTES // row_bytes(records_VR))


def _bytes(records_nR: Tensor) -> memoryview:
    return memoryview(records_nR.view(torch.uint8).numpy()).cast("B")
