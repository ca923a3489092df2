"""The state of a run on disk: its tables in shards and a manifest that says the rest. safetensors and JSON, nothing that unpickles.

    checkpoints/step-00001234/
        input-00000-of-00002.safetensors    "records" [n, R]: n rows of the table as they lie in memory, weight, states, padding
        ...
        manifest.json                       where training stood, the fields of a record, the tables' scalars, each file's size and CRC-32

A checkpoint is written aside, synced, and gets its name when it is whole; the last two are kept. What is read is checked: CRC-32 finds
every flip of a bit and misses other damage once in four billion times, at 4 GB/s a core where blake2b makes 0.8.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from w2v import durable
from w2v.table import Table, host_memory

FORMAT = 2
KEPT = 2
SHARD_BYTES = 1 << 30
CHUNK_BYTES = 16 << 20  # copied from the tables' device, summed and written at a time
WRITERS = 4  # files written or read at once
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # names in safetensors


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line that names the file and the remedy."""


class Checkpoints:
    """Writes the checkpoints of one run into `folder`, one at a time.

    With a `shadow`, memory for a second copy of the tables, `save` returns once that copy is made, and a thread writes it out; without
    one, when all is on disk. What failed in the thread is raised by the next call.
    """

    def __init__(self, folder: Path, tables: Sequence[Table], shadow: bool):
        self.folder, self._tables = folder, tables
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._copies = self._writer.submit(lambda: [_memory_like(table.records_VR) for table in tables]) if shadow else None
        self._writing: Future | None = None

    @property
    def busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._writing is not None and not self._writing.done()

    def save(self, state: dict[str, Any], wait: bool = False) -> None:
        """Write the tables as they are now, and `state` (JSON; its "step" names the checkpoint); `wait` until all is on disk."""
        self.wait()
        name = f"step-{state['step']:08d}"
        if (self.folder / name).exists():
            return
        tables = {table.name: _describe(table) for table in self._tables}
        manifest = {"format": FORMAT, **state, "tables": tables}
        if self._copies and not wait:
            for copy, table in zip(self._copies.result(), self._tables, strict=True):
                copy.copy_(table.records_VR)
            self._writing = self._writer.submit(_write, self.folder / name, manifest, self._copies.result())
        else:
            _write(self.folder / name, manifest, [table.records_VR for table in self._tables])

    def raise_failure(self) -> None:
        """Raise what has made the last one fail."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        """Return when the last one is on disk."""
        if self._writing is not None:
            done, self._writing = self._writing, None
            done.result()



class Checkpoint:
    """One that was written: `state` is what `Checkpoints.save` was given."""

    def __init__(self, path: Path):
        self.path = path
        file = path / "manifest.json"
        try:
            text = file.read_text(encoding="utf-8")
            manifest = json.loads(text)
            version = manifest["format"]
            whole = text == _sealed(manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(self._damaged(file, " ".join(f"{type(error).__name__}: {error}".split())[:100])) from None
        if whole and version != FORMAT:
            raise CheckpointError(f"{file} is of format {version}, and this version reads {FORMAT}; go on with the version that wrote it")
        if not whole:
            raise CheckpointError(self._damaged(file, "its checksum differs"))
        self._files, self._tables = manifest["files"], manifest["tables"]
        self.state: dict[str, Any] = {key: manifest[key] for key in manifest.keys() - {"format", "tables", "files", "checksum"}}

    def load(self, tables: Sequence[Table]) -> None:
        """Fill the tables, whose rows, fields and dtype must be those saved; on a `CheckpointError` they hold nothing of use."""
        for table in tables:
            saved, here = self._tables.get(table.name), _describe(table)
            if saved is None or saved | {"scalars": sorted(saved["scalars"])} != here | {"scalars": sorted(here["scalars"])}:
                raise CheckpointError(f"{self.path} holds the table {saved}, but this run's is {here}; resume with the settings of the run")
        shards = [shard for table in tables for shard in _shards(table.name, table.records_VR)]
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(lambda shard: self._read(*shard), shards))
        for table in tables:
            for name, value in self._tables[table.name]["scalars"].items():
                table.scalars[name].fill_(value)

    def _read(self, name: str, records_nR: Tensor) -> None:
        file, entry, found = self.path / name, self._files.get(name, {}), 0
        try:
            if file.stat().st_size != entry.get("bytes"):
                raise CheckpointError(self._damaged(file, f"{file.stat().st_size:,} bytes instead of {entry.get('bytes', 0):,}"))
            with open(file, "rb") as opened:
                header = _header(records_nR)
                if opened.read(len(header)) != header:
                    raise CheckpointError(self._damaged(file, "its header differs"))
                found = zlib.crc32(header)
                for part_nR in records_nR.split(_rows_at_once(records_nR)):
                    read_nR = torch.empty(part_nR.shape, dtype=part_nR.dtype)
                    opened.readinto(_bytes(read_nR))
                    found = zlib.crc32(_bytes(read_nR), found)
                    part_nR.copy_(read_nR)
        except OSError as error:
            raise CheckpointError(self._damaged(file, error.strerror or str(error))) from None
        if found != entry["crc32"]:
            raise CheckpointError(self._damaged(file, f"its CRC-32 is {found:08x} instead of {entry['crc32']:08x}"))

    def _damaged(self, file: Path, why: str) -> str:
        older = [path.name for path in _saved(self.path.parent) if path != self.path]
        rest = f"go on from {older[-1]}" if older else "start anew, as there is no older checkpoint"
        return f"{file} is damaged ({why}); restore it, or remove {self.path} to {rest}"


def latest(folder: Path) -> Checkpoint | None:
    """The newest one in a folder, and None where there is none. Raises `CheckpointError` where it cannot be used."""
    saved = _saved(folder)
    return Checkpoint(saved[-1]) if saved else None


def clean(folder: Path) -> None:
    """Remove what a process that was killed left half-written."""
    for path in folder.glob("*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _write(path: Path, manifest: dict[str, Any], records: Sequence[Tensor]) -> None:
    """Write one checkpoint aside, give it its name, and remove those that are too old."""
    path.parent.mkdir(exist_ok=True)
    aside = Path(f"{path}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        shards = [shard for name, table_VR in zip(manifest["tables"], records, strict=True) for shard in _shards(name, table_VR)]
        with ThreadPoolExecutor(WRITERS) as pool:
            files = dict(pool.map(lambda shard: (shard[0], _write_shard(aside / shard[0], shard[1])), shards))
        durable.write(aside / "manifest.json", [_sealed(manifest | {"files": files}).encode()])
        durable.sync_folder(aside)
        os.replace(aside, path)
        durable.sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        needed = sum(table_VR.numel() * table_VR.element_size() for table_VR in records)
        why = f"{error.strerror or error}, so that a checkpoint of {needed:,} bytes cannot be written; --resume goes on from the last"
        raise OSError(error.errno, why, str(path.parent)) from None
    for old in _saved(path.parent)[:-KEPT]:
        gone = Path(f"{old}.partial")  # first another name, so that what bears the name of a checkpoint is whole
        os.replace(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _write_shard(path: Path, records_nR: Tensor) -> dict[str, int]:
    parts = (_bytes(part_nR.cpu()) for part_nR in records_nR.split(_rows_at_once(records_nR)))
    crc32 = durable.write(path, chain([_header(records_nR)], parts))
    return {"bytes": path.stat().st_size, "crc32": crc32}


def _shards(name: str, records_VR: Tensor) -> list[tuple[str, Tensor]]:
    """Views of a table's records, each with the name of its file."""
    parts = records_VR.split(max(1, SHARD_BYTES // (records_VR.shape[1] * records_VR.element_size())))
    return [(f"{name}-{number:05d}-of-{len(parts):05d}.safetensors", part) for number, part in enumerate(parts)]


def _header(records_nR: Tensor) -> bytes:
    """How a safetensors file of these records begins."""
    end = records_nR.numel() * records_nR.element_size()
    about = {"records": {"dtype": DTYPES[records_nR.dtype], "shape": list(records_nR.shape), "data_offsets": [0, end]}}
    text = json.dumps(about).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sealed(manifest: dict[str, Any]) -> str:
    """The text of a manifest, with the checksum of all else that it says."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    checksum = hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=1, sort_keys=True) + "\n"


def _describe(table: Table) -> dict[str, Any]:
    fields = [[name, part.stop - part.start] for name, part in table.columns.items()]  # in the order of a record
    scalars = {name: value.item() for name, value in table.scalars.items()}
    return {"rows": table.rows, "dtype": DTYPES[table.dtype], "fields": fields, "scalars": scalars}


def _memory_like(records_VR: Tensor) -> Tensor:
    nbytes = records_VR.numel() * records_VR.element_size()
    return host_memory(nbytes).view(records_VR.dtype).view(records_VR.shape)


def _rows_at_once(records_nR: Tensor) -> int:
    return max(1, CHUNK_BYTES // (records_nR.shape[1] * records_nR.element_size()))


def _bytes(records_nR: Tensor) -> memoryview:
    return memoryview(records_nR.view(torch.uint8).numpy()).cast("B")


def save_table(table: Table, folder: Path) -> Path:
    """Write `<name>.safetensors`: "weight" [V, D], the optimizer's states [V, D] or [V, 1], and its scalars; in the table's dtype.

    Written aside and renamed, so that no half-written file is ever seen under its name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{table.name}.safetensors"
    fields = {name: table[name].cpu().contiguous() for name in table.columns}
    save_file(fields | {f"scalar.{name}": value.cpu() for name, value in table.scalars.items()}, f"{path}.partial")
    os.replace(f"{path}.partial", path)
    return path


def load_table(table: Table, folder: Path) -> None:
    """Fill the table from the file that `save_table` wrote; its fields and shapes must be the same."""
    path = folder / f"{table.name}.safetensors"
    fields = load_file(path)
    expected = {name: table[name].shape for name in table.columns} | {f"scalar.{name}": v.shape for name, v in table.scalars.items()}
    found = {name: value.shape for name, value in fields.items()}
    if found != expected:
        raise ValueError(f"{path} holds {_shape_list(found)}, but this model has {_shape_list(expected)}; use the config it was saved with")
    for name in table.columns:
        table[name].copy_(fields[name])
    for name, value in table.scalars.items():
        value.copy_(fields[f"scalar.{name}"])


def _shape_list(shapes: dict) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in sorted(shapes.items()))
