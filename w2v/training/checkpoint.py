"""The state of a run on disk: its tables in shards and a manifest that says the rest. safetensors and JSON, nothing that unpickles.

    checkpoints/step-00001234/
        input-00000-of-00002.safetensors    and others of `w2v/training/shards.py`; where several ranks train, each writes its own
        ...
        manifest.json                       where training stood, the fields of a record, the tables' scalars, each file's size and CRC-32

A checkpoint is written aside, synced, and gets its name when it is whole; the last two are kept. Hosts without a disk in common have a
folder each, with the files of their ranks and the same manifest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from w2v.distributed.ranks import SINGLE, Ranks
from w2v.model.table import Table, host_memory
from w2v.system.files import sync_folder, write_synced
from w2v.training import shards

FORMAT = 2
KEPT = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message is one line that names the file and the remedy."""


class Checkpoints:
    """Writes the checkpoints of one run into `folder`, one at a time; all ranks make the same calls.

    room: bytes of CPU memory for copies of records. `save` copies as many files' records as find room there, has the others written
    meanwhile, and returns when the tables may change again; a thread then writes the copies. As training changes every row within
    seconds, what is not copied has to be on disk before it goes on. What failed in the thread, or in that of another rank, is raised by
    the next call.
    """

    def __init__(self, folder: Path, tables: Sequence[Table], room: int, ranks: Ranks = SINGLE):
        self.folder, self._tables, self._ranks = folder, tables, ranks
        folder.mkdir(exist_ok=True)
        self._leads = ranks.leads(folder)
        fitting = _fitting(self._files(), room)
        self._copied = list(fitting)
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._memory = self._writer.submit(
            lambda: {name: _memory_like(records_nR) for name, records_nR in fitting.items()}
        )
        self._writing: Future | None = None

    @property
    def busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._writing is not None and not self._writing.done()

    def save(self, state: dict[str, Any], wait: bool = False) -> None:
        """Write the tables as they are now, and rank 0's `state` (JSON; its "step" names the checkpoint); `wait` until all is on disk."""
        self.wait()
        path = self.folder / f"step-{state['step']:08d}"
        if all(self._ranks.all_gather(path.exists())):
            self._remove_old()  # as who wrote it may have been killed before that
            return
        manifest = {"format": FORMAT, **state, "tables": _describe(self._tables, self._ranks)}
        if self._ranks.size > 1:
            manifest["ranks"] = self._ranks.size
        at_once = self._files()
        behind = {} if wait else {name: at_once.pop(name) for name in self._copied}
        with self._undone(path, manifest), self._ranks.reraise():
            copying = self._writer.submit(self._copy, behind) if behind else None
            _aside(path).mkdir(exist_ok=True)
            entries = shards.write(_aside(path), at_once)
            copies = copying.result() if copying else {}
        if wait:
            self._finish(path, manifest, entries, copies)
        else:
            self._writing = self._writer.submit(self._finish, path, manifest, entries, copies)

    def raise_failure(self) -> None:
        """Raise what has made the last one fail; as ranks look at times of their own, each has to say it."""
        try:
            if not self.busy:
                self.wait()
        except OSError as error:
            failed: Any = error
            failed.of = None
            raise

    def wait(self) -> None:
        """Return when the last one is on disk."""
        if self._writing is not None:
            done, self._writing = self._writing, None
            done.result()

    def _files(self) -> dict[str, Tensor]:
        return shards.files({table.name: table.records_VR for table in self._tables}, self._ranks)

    def _copy(self, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._memory.result()[name].copy_(records_nR)
            for name, records_nR in files.items()
        }

    def _finish(
        self,
        path: Path,
        manifest: dict[str, Any],
        entries: shards.Entries,
        copies: Mapping[str, Tensor],
    ) -> None:
        """Write the copies too, give the checkpoint its name when the files of all ranks are whole, and remove those that are too old."""
        aside, ranks = _aside(path), self._ranks
        with self._undone(path, manifest):
            with ranks.reraise(behind=True):
                entries = {**entries, **shards.write(aside, copies)}
                sync_folder(aside)
            given = ranks.all_gather((entries, manifest), behind=True)
            sealed = _sealed(
                given[0][1]
                | {"files": {name: entry for files, _ in given for name, entry in files.items()}}
            )
            with ranks.reraise(behind=True):
                if self._leads:
                    write_synced(aside / "manifest.json", [sealed.encode()])
                    sync_folder(aside)
                    _remove(
                        path
                    )  # what other hosts do not have: they had failed when it was written
                    os.replace(aside, path)
                    sync_folder(path.parent)
        self._remove_old()

    def _remove_old(self) -> None:
        for old in _saved(self.folder)[:-KEPT] if self._leads else []:
            _remove(old)

    @contextlib.contextmanager
    def _undone(self, path: Path, manifest: Mapping[str, Any]) -> Iterator[None]:
        """Where the disk fails in the block, nothing of the checkpoint is left, and the error says what it would have taken."""
        try:
            yield
        except OSError as error:
            if self._leads:
                shutil.rmtree(_aside(path), ignore_errors=True)
            needed = sum(
                manifest["tables"][table.name]["rows"] * shards.row_bytes(table.records_VR)
                for table in self._tables
            )
            said = f"{error.strerror or error}, so that a checkpoint of {needed:,} bytes cannot be written; --resume goes on from the last"
            error.strerror, error.filename = said, str(path.parent)
            raise


class Checkpoint:
    """One that was written: `state` is what `Checkpoints.save` was given, on rank 0 where there were several."""

    def __init__(self, path: Path):
        self.path = path
        file = path / "manifest.json"
        try:
            text = file.read_text(encoding="utf-8")
            manifest = json.loads(text)
            version = manifest["format"]
            whole = text == _sealed(manifest)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                self._damaged(file, " ".join(f"{type(error).__name__}: {error}".split())[:100])
            ) from None
        if whole and version != FORMAT:
            raise CheckpointError(
                f"{file} is of format {version}, and this version reads {FORMAT}; go on with the version that wrote it"
            )
        if not whole:
            raise CheckpointError(self._damaged(file, "its checksum differs"))
        self._files, self._tables, self.checksum = (
            manifest["files"],
            manifest["tables"],
            manifest["checksum"],
        )
        self.ranks: int = manifest.get("ranks", 1)  # how many wrote it
        about = {"format", "tables", "files", "checksum", "ranks"}
        self.state: dict[str, Any] = {key: manifest[key] for key in manifest.keys() - about}

    def load(self, tables: Sequence[Table], ranks: Ranks = SINGLE) -> None:
        """Fill the tables, whose rows, fields and dtype must be those saved, by however many ranks; on a `CheckpointError` they hold
        nothing of use."""
        wanted = _describe(tables, ranks)
        with ranks.reraise():
            for name, here in wanted.items():
                saved = self._tables.get(name)
                if saved is None or _fields(saved) != _fields(here):
                    told = f"{self.path} holds the table {saved}, but this run's is {here}"
                    raise CheckpointError(f"{told}; resume with the settings of the run")
            try:
                records = {
                    table.name: (wanted[table.name]["rows"], table.records_VR) for table in tables
                }
                shards.read(self.path, self._files, records, self.ranks, ranks)
            except shards.Damaged as error:
                raise CheckpointError(self._unreadable(error)) from None
        for table in tables:
            scalars = _of_each_rank(self._tables[table.name]["scalars"])
            for name, value in scalars[ranks.rank % self.ranks].items():
                table.scalars[name].fill_(value)

    def _unreadable(self, error: shards.Damaged) -> str:
        if self.ranks == 1 or not error.missing:
            return self._damaged(error.file, error.why)
        again = f"copy the files of all hosts into {self.path}, or start {self.ranks} ranks on the hosts where they were, in the same order"
        return f"{error.file} is missing here: each of {self.ranks} ranks wrote files of its own; {again}"

    def _damaged(self, file: Path, why: str) -> str:
        older = [path.name for path in _saved(self.path.parent) if path != self.path]
        rest = f"go on from {older[-1]}" if older else "start anew, as there is no older checkpoint"
        return f"{file} is damaged ({why}); restore it, or remove {self.path} to {rest}"


def latest(folder: Path, ranks: Ranks = SINGLE) -> Checkpoint | None:
    """The newest one in a folder that all ranks have, and None where there is none. Raises `CheckpointError` where it cannot be used."""
    seen = ranks.all_gather([path.name for path in _saved(folder)])
    common = [name for name in seen[0] if all(name in others for others in seen)]
    if not common and any(seen):
        have, lack = seen.index(max(seen, key=len)), seen.index(min(seen, key=len))
        held = [", ".join(seen[rank]) or "none" for rank in (have, lack)]
        raise CheckpointError(
            f"{folder} holds {held[0]} for rank {have} but {held[1]} for rank {lack}; bring it to all hosts"
        )
    if not common:
        return None
    with ranks.reraise():
        found = Checkpoint(folder / common[-1])
    ranks.require_equal(
        {f"the checksum of {found.path.name}": found.checksum},
        "bring all hosts the folder that rank 0 has",
    )
    return found


def clean(folder: Path) -> None:
    """Remove what a process that was killed left half-written."""
    for path in folder.glob("*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _saved(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def _remove(path: Path) -> None:
    """Give a checkpoint another name first, so that what bears the name of one is whole."""
    if path.exists():
        gone = Path(f"{path}.old.partial")
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _sealed(manifest: Mapping[str, Any]) -> str:
    """The text of a manifest, with the checksum of all else that it says."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    checksum = hashlib.blake2b(
        json.dumps(content, sort_keys=True).encode(), digest_size=16
    ).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=1, sort_keys=True) + "\n"


def _describe(tables: Sequence[Table], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """What the tables are by name, all ranks' shards together; scalars are those of each rank, where there are several."""
    described = {}
    for table in tables:
        parts = ranks.all_gather(
            (table.rows, {name: value.item() for name, value in table.scalars.items()})
        )
        rows, scalars = zip(*parts, strict=True)
        fields = [
            [name, part.stop - part.start] for name, part in table.columns.items()
        ]  # in the order of a record
        described[table.name] = {
            "rows": sum(rows),
            "dtype": shards.DTYPES[table.dtype],
            "fields": fields,
        }
        described[table.name]["scalars"] = list(scalars) if ranks.size > 1 else scalars[0]
    return described


def _fields(described: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for a table to be loaded: all but the values of its scalars."""
    return {**described, "scalars": sorted(_of_each_rank(described["scalars"])[0])}


def _of_each_rank(scalars: Any) -> list[dict[str, Any]]:
    return scalars if isinstance(scalars, list) else [scalars]


def _aside(path: Path) -> Path:
    return Path(f"{path}.partial")


def _fitting(files: Mapping[str, Tensor], room: int) -> dict[str, Tensor]:
    """Those of the files, in their order, that find room together in so many bytes."""
    fitting = {}
    for name, records_nR in files.items():
        if records_nR.nbytes <= room:
            fitting[name], room = records_nR, room - records_nR.nbytes
    return fitting


def _memory_like(records_VR: Tensor) -> Tensor:
    nbytes = records_VR.numel() * records_VR.element_size()
    return host_memory(nbytes).view(records_VR.dtype).view(records_VR.shape)
