"""Write tables of documents from files of results, and settings.

    python tests/bench/tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`. It has a row for each case of its
files that a pattern matches. The one named configuration is the list of all settings.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.results import FOLDER, ROOT, deviation_of
from w2v.config import describe_config

DOCUMENTS = [ROOT / "README.md", ROOT / "docs/dev/performance.md", ROOT / "docs/configuration.md"]
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Column(NamedTuple):
    """A metric of a case: its heading, name, scale and format."""

    heading: str
    metric: str
    form: str
    scale: float = 1


class Table(NamedTuple):
    """Cases of some files, by pattern and label, and columns of them."""

    files: Sequence[str]
    labels: Mapping[str, str]  # {pattern of a case: label, with groups of the pattern}
    columns: Sequence[Column]


def numbered(stem: str, *numbers: int) -> list[str]:
    """Return the names of files of one day."""
    return [stem if number == 1 else f"{stem}-{number}" for number in numbers]


SPEED = Column("M words/s", "words/s", ".1f", 1e-6)
ANALOGIES = Column("analogies", "analogies [%]", ".1f %")
STEPS = [
    Column("step", "step [ms]", ".2f ms"),
    Column("GPU MiB", "GPU [MiB]", ".0f"),
    Column("host MiB", "host [MiB]", ".0f"),
]
PHASES = ["whole command", "starting", "reading", "set-up", "training", "after training"]
TRAINED = numbered("train-2026-11-28", 1, 2)
GPUS = r"(\d GPUs?), 1019060 words .* Adam "  # of wiki100 twenty times
TABLES = {
    "summary": Table(
        ["cpu-2026-11-23-7", "fullw2v-2026-11-20", *TRAINED],
        {
            r".* 5 epochs, gensim alpha .05.*": "gensim, 16 CPU cores, SGD, alpha .05",
            r"FULL-W2V.* 5 epochs": "FULL-W2V (CUDA), all rows on the GPU, SGD",
            r"wiki100 adam resident float32": "w2v, all rows on the GPU, Adam",
            r"wiki100 sgd resident float32": "w2v, all rows on the GPU, SGD",
            r"wiki100 adam mapped:50% float32": "w2v, half of the rows on the GPU, Adam",
        },
        [Column("M words/s", "words/s", ".0f", 1e-6), ANALOGIES],
    ),
    "training": Table(
        [*numbered("cpu-2026-11-23", 7, 8), "fullw2v-2026-11-20", *TRAINED],
        {
            r"wiki100 (.*) epochs, gensim,? ?(.*)": r"gensim 4.4, \1 epochs, \2",
            r"(FULL-W2V).*threads, (.* epochs.*)": r"\1, \2",
            r"wiki100 (\S+) (resident) float32": r"\1, `\2`",
            r"wiki100 (adam|sgd) (\S+) float32": r"\1, `\2`",
        },
        [
            SPEED,
            ANALOGIES,
            Column("WordSim-353", "wordsim353", ".3f"),
            Column("SimLex-999", "simlex999", ".3f"),
        ],
    ),
    "commands": Table(
        ["run-2026-11-23"],
        {r"(.*)": r"\1"},
        [*[Column(name, f"{name} [s]", ".1f s") for name in PHASES], SPEED],
    ),
    "zipf": Table(
        numbered("zipf-2026-11-22", 1, 3, 4, 2),
        {r".* for 8 steps": "default settings", r".* for . steps? (\S+)": r"`\1`"},
        [
            SPEED,
            Column("rows read per word", "read [rows a word]", ".3f"),
            Column("GB/s each way", "to GPU [GB/s]", ".1f"),
        ],
    ),
    "two": Table(
        numbered("ranks-2026-11-26", 1, 2, 15, 16, *range(3, 15)),
        {
            rf"{GPUS}float32 resident \S+=(\d+) .*": r"\1, tables on the GPU, batch \2",
            rf"{GPUS}.* \S+size=(\d+) .*bytes=10%": r"\1, paged, batch \2",
            rf"{GPUS}.* model.negative_pool=0": r"\1, paged, negatives not shared, batch 65536",
        },
        [SPEED, Column("step", "step [us]", ".0f us"), Column("CPU", "CPU [us]", ".0f us")],
    ),
    "cpu": Table(
        ["cpu-2026-11-27"],
        {r".*, (gensim|w2v.*)": r"\1"},
        [
            Column("text to ids", "ingest [s]", ".1f s"),
            Column("training", "training [s]", ".1f s"),
            Column("M words/s", "words/s", ".2f", 1e-6),
            ANALOGIES,
            Column("whole process", "whole process [s]", ".0f s"),
            Column("peak memory", "peak [MiB]", ".0f MiB"),
        ],
    ),
    "library": Table(["library-2026-11-26-5"], {r".* ids: (.*)": r"\1"}, STEPS),
    "clicks": Table(
        [*numbered("library-2026-11-26", 6, 7, 8, 9, 2, 3), *numbered("library-2026-11-23", 5, 7)],
        {
            r"clicks, (\w+), .*, (\d+) rows x 64, (\d+) samples(.*): (.*)": (
                r"\1, \2 rows, \3 samples\4, \5"
            )
        },
        [*STEPS[:2], Column("M samples/s", "samples/s", ".1f", 1e-6)],
    ),
    "stores": Table(
        ["library-2026-11-26"],
        {r".* rows: (.*)": r"\1"},
        [Column("get", "get [ms]", ".2f ms"), Column("put", "put [ms]", ".2f ms")],
    ),
}


def cell(figures: Mapping[str, float], column: Column) -> str:
    """Return a figure, with its standard deviation if there is one."""
    if column.metric not in figures:
        return ""
    form, _, unit = column.form.partition(" ")
    shown = f"{figures[column.metric] * column.scale:{form}}"
    deviation = figures.get(deviation_of(column.metric))
    if deviation is not None:
        shown += f" ± {deviation * column.scale:{form}}"
    return f"{shown} {unit}".strip()


def cases(table: Table) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield label and figures of each case that a pattern matches."""
    for file in table.files:
        results = json.loads((FOLDER / f"{file}.json").read_text())
        for case, figures in results["figures"].items():
            for pattern, label in table.labels.items():
                match = re.fullmatch(pattern, case)
                if match:
                    yield match.expand(label), figures
                    break


def markdown(table: Table) -> str:
    """Return the table as Markdown."""
    lines = [["", *[column.heading for column in table.columns]]]
    lines.append(["---"] * len(lines[0]))
    for label, figures in cases(table):
        lines.append([label, *[cell(figures, column) for column in table.columns]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(document: str) -> str:
    """Return a document with its tables written anew."""

    def written(name: str) -> str:
        if name == "configuration":
            return f"```yaml\n{describe_config()}```\n"
        return markdown(TABLES[name])

    return MARKED.sub(lambda found: f"{found[1]}{written(found[2])}{found[3]}", document)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
