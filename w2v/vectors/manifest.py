"""Manifest of vectors and the files made from them: vectors.sha256.

Its first line has the training step, and the others have checksums, as `sha256sum -c` reads them:

    # step 1234
    0b36...  vectors.kv
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from shlex import quote

from w2v.system.files import atomic_write, hash_file, refused

SUMS = "vectors.sha256"
STEP = "# step "
VECTORS = "vectors.*"  # this manifest too
DERIVED = "scores.json", "map.svg", "report.html", "report.js"  # from the vectors
STATIC = "static_embedding"  # a folder
FILES = {  # for other programs, by format
    "safetensors": "vectors.safetensors",
    "npy": "vectors.npy",
    "parquet": "vectors.parquet",
    "projector": "vectors.tsv",
    "sentence-transformers": STATIC,
    "index": "vectors.usearch",
}


class VectorsError(ValueError):
    """Vectors that cannot be saved or loaded; one line with the remedy."""


def write(folder: Path, step: int | None, sums: Mapping[str, str]) -> None:
    """Write the step, if known, and SHA-256 checksums of files by name."""
    lines = [f"{checksum}  {name}\n" for name, checksum in sorted(sums.items())]
    if step is not None:
        lines.insert(0, f"{STEP}{step}\n")
    atomic_write(folder / SUMS, "".join(lines))


def read(folder: Path) -> tuple[int | None, dict[str, str]]:
    """Return step and checksums by name; without a manifest, none of them."""
    path = folder / SUMS
    if not path.is_file():
        return None, {}
    step = None
    sums = {}
    remedy = "export the vectors again, or remove the checksums"
    with refused(VectorsError, f"{path} cannot be read", remedy):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith(STEP):
                step = int(line[len(STEP) :])
                continue
            checksum, name = line.split("  ", 1)
            if "/" in name:
                raise ValueError(f"{name!r} is not the name of a file in this folder")
            sums[name] = checksum
    return step, sums


def check(folder: Path, names: Iterable[str], sums: Mapping[str, str]) -> None:
    """Raise `VectorsError` if one of the files does not have its checksum."""
    for name in names:
        path = folder / name
        with refused(VectorsError, f"{path} cannot be read", "export it again"):
            if not path.is_file():  # a FIFO would block
                raise ValueError("there is no such file")
            if hash_file(path) != sums[name]:
                raise VectorsError(
                    f"{path} is damaged: its SHA-256 is not that in {SUMS}; "
                    f"export it again, or remove {folder / SUMS} if you have changed it yourself"
                )


def require_current(folder: Path) -> None:
    """Raise `VectorsError` if the run has a later step than its vectors."""
    step, _ = read(folder)
    names = [path.name[5:] for path in folder.glob("checkpoints/step-*")]
    newest = max((int(name) for name in names if name.isdecimal()), default=0)
    if step is not None and newest > step:
        older = f"vectors and scores in {folder} are of step {step:,}, but the run is at {newest:,}"
        resume = f"w2v train --resume {quote(str(folder))}"
        raise VectorsError(f"{older}; finish it: {resume}, or copy vectors.* to another folder")


def remove_derived(folder: Path) -> None:
    """Remove what was made from the vectors of an earlier step."""
    for name in DERIVED:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / STATIC, ignore_errors=True)
