"""Files of a checkpoint: records of each rank as safetensors.

    input-00000-of-00002.safetensors              "records" [n, R]: n rows, without padding
    input-rank-1-of-4-00000-of-00002.safetensors  rank 1 of 4: row j of its shard is row 1 + 4 j

Any number of ranks reads the files of any other number. All content is checked by CRC-32, at 4 GB/s
a core: it finds every flipped bit, and misses other damage once in four billion times.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from w2v.distributed.ranks import Ranks
from w2v.system.files import write_synced

FILE_BYTES = 1 << 30  # records of one file, at most
CHUNK_BYTES = 4 << 20  # copied from the tables' device, summed and written at a time
THREADS = 8  # files written or read at once
# Names in safetensors.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
Entries = dict[str, dict[str, int]]  # of each file: its "bytes" and "crc32"


class Damaged(ValueError):
    """A file that is missing or whose checksum is wrong."""


def files(tables: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return views of the tables' rows by the name of their file."""
    views: dict[str, Tensor] = {}
    for name, records_VR in tables.items():
        parts = _parts(name, len(records_VR), records_VR, ranks.rank, ranks.size)
        views |= {file: records_VR[rows.start : rows.stop] for file, rows in parts.items()}
    return views


def write(folder: Path, files: Mapping[str, Tensor]) -> Entries:
    """Write and sync the records [n, R] of each file, not the folder."""
    with ThreadPoolExecutor(THREADS) as pool:
        entries = pool.map(lambda name: _write_file(folder / name, files[name]), files)
        return dict(zip(files, entries, strict=True))


def read(
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
        Damaged: the tables are then undefined.
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


def row_bytes(records_VR: Tensor) -> int:
    """Return the bytes of a row in a file."""
    return records_VR.shape[1] * records_VR.element_size()


def chunks(records_VR: Tensor) -> tuple[Tensor, ...]:
    """Split records into parts of CHUNK_BYTES."""
    return records_VR.split(_chunk_rows(records_VR))


def _parts(table: str, rows: int, like_VR: Tensor, rank: int, ranks: int) -> dict[str, range]:
    """Return the files of a rank's shard, and the rows of each."""
    file_rows = max(1, FILE_BYTES // row_bytes(like_VR))
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
        yield from map(_bytes, chunks(records_nR))
        return
    # One buffer, as new memory for each chunk takes longer than the copy.
    parts_nR = chunks(records_nR)
    buffer_nR = torch.empty(parts_nR[0].shape, dtype=records_nR.dtype)
    for part_nR in parts_nR:
        yield _bytes(buffer_nR[: len(part_nR)].copy_(part_nR))


def _read_file(
    file: Path, rows: int, entry: Mapping[str, int], like_VR: Tensor
) -> Iterator[Tensor]:
    """Yield the records in chunks; raise `Damaged` at the end if they are."""
    try:
        size = file.stat().st_size
        expected = entry.get("bytes", 0)
        if size != expected:
            raise Damaged(f"{file} is damaged ({size:,} bytes instead of {expected:,})")
        with open(file, "rb") as opened:
            crc32 = zlib.crc32(opened.read(expected - rows * row_bytes(like_VR)))
            for start in range(0, rows, _chunk_rows(like_VR)):
                count = min(_chunk_rows(like_VR), rows - start)
                chunk_nR = torch.empty(count, like_VR.shape[1], dtype=like_VR.dtype)
                opened.readinto(_bytes(chunk_nR))
                crc32 = zlib.crc32(_bytes(chunk_nR), crc32)
                yield chunk_nR
    except OSError as error:
        raise Damaged(f"{file} is damaged ({error.strerror or error})") from None
    if crc32 != entry["crc32"]:
        found = f"its CRC-32 is {crc32:08x} instead of {entry['crc32']:08x}"
        raise Damaged(f"{file} is damaged ({found})")


def _header(rows: int, like_VR: Tensor) -> bytes:
    """Return the beginning of a safetensors file of that many such records."""
    tensor = {
        "dtype": DTYPES[like_VR.dtype],
        "shape": [rows, like_VR.shape[1]],
        "data_offsets": [0, rows * row_bytes(like_VR)],
    }
    text = json.dumps({"records": tensor}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunk_rows(records_VR: Tensor) -> int:
    return max(1, CHUNK_BYTES // row_bytes(records_VR))


def _bytes(records_nR: Tensor) -> memoryview:
    return memoryview(records_nR.view(torch.uint8).numpy()).cast("B")
