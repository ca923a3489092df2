"""Tables of the documents, written from the files of results.

    python tests/bench/tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`. It has a row for each case of its
files that a pattern matches, and below it the commit and command of each file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "performance.md"]
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
    sources: bool = True  # list commit and command of each file


def numbered(stem: str, *numbers: int) -> list[str]:
    """Return the names of files of one day."""
    return [stem if number == 1 else f"{stem}-{number}" for number in numbers]


SPEED = Column("M words/s", "words/s", ".1f", 1e-6)
SECONDS = Column("training", "seconds [s]", ".2f s")
ANALOGIES = Column("analogies", "analogies [%]", ".1f %")
SCORES = [
    ANALOGIES,
    Column("WordSim-353", "wordsim353", ".3f"),
    Column("SimLex-999", "simlex999", ".3f"),
]
SHARED = "model.negative_pool=65536 model.negative_pool_steps=8"
STAGES = ["step", "sampling", "plan", "moves", "claim", "skip-gram", "optimizer"]
TABLES = {
    "summary": Table(
        ["baselines-2026-11-20", *numbered("train-2026-11-21", 2, 4)],
        {
            r"gensim.* 5 epochs": "gensim, 16 CPU threads, SGD",
            r"FULL-W2V.* 5 epochs": "FULL-W2V (CUDA), all rows on the GPU, SGD",
            r"wiki100 sgd resident float32": "w2v, all rows on the GPU, SGD",
            r"wiki100 adamw resident float32": "w2v, all rows on the GPU, AdamW",
            rf"wiki100 adamw mapped:50% float32 {SHARED}": (
                "w2v, half of the rows on the GPU, AdamW, shared negatives"
            ),
        },
        [Column("M words/s", "words/s", ".0f", 1e-6), SECONDS, ANALOGIES],
        sources=False,
    ),
    "training": Table(
        ["baselines-2026-11-20", *numbered("train-2026-11-21", 1, 2, 3, 4, 5, 6)],
        {
            r"(gensim.*|FULL-W2V.*)": r"\1",
            rf"wiki100 (\S+) (\S+) (\S+) {SHARED}": r"\1, `\2`, \3, shared negatives",
            r"wiki100 (\S+) (\S+) (\S+)": r"\1, `\2`, \3",
            r"wiki100 (\S+) (\S+) (\S+) train.epochs=20 (.*)": r"\1, `\2`, \3, 20 epochs, `\4`",
        },
        [SPEED, SECONDS, *SCORES, Column("rows read of used", "rows read [% of used]", ".1f %")],
    ),
    "stages": Table(
        numbered("train-2026-11-21", 1, 4, 3),
        {
            rf"wiki100 adam (\S+) (\S+) {SHARED}": r"`\1`, \2, shared negatives",
            r"wiki100 adam (\S+) (\S+)": r"`\1`, \2",
        },
        [Column(stage, f"{stage} [us]", ".0f") for stage in STAGES],
    ),
    "zipf": Table(
        [*numbered("zipf-2026-11-22", 1, 3, 4, 2), *numbered("zipf-2026-11-21", 1, 2)],
        {r".* for 8 steps": "default settings", r".* for . steps? (\S+)": r"`\1`"},
        [
            SPEED,
            Column("rows read a word", "read [rows a word]", ".3f"),
            Column("rows updated a word", "stepped [rows a word]", ".3f"),
            Column("GB/s each way", "to GPU [GB/s]", ".1f"),
        ],
    ),
    "ranks": Table(
        numbered("ranks-2026-11-21", 1, 6, 5, 4, 2, 3, 7, 10, 12, 8, 11, 9),
        {
            r"(.* GPUs?),.* mapped:(\S+) (batch \d+).* for (8 steps)": r"\1, \3, cache \2, \4",
            r"(.* GPUs?),.* mapped:(\S+) (batch \d+).*": r"\1, \3, cache \2, 1 step",
        },
        [SPEED, Column("GB/s each way per GPU", "to GPU [GB/s]", ".1f")],
    ),
    "optimizers": Table(
        ["optimizers-2026-11-21"],
        {r"(.*)": r"\1"},
        [
            *SCORES,
            Column("held-out loss", "held-out loss", ".3f"),
            SECONDS,
            Column("seeds", "seeds", ".0f"),
        ],
    ),
    "cpu": Table(
        ["cpu-2026-11-21"],
        {r".*, (gensim|w2v.*)": r"\1"},
        [
            Column("text to ids", "ingest [s]", ".1f s"),
            Column("training", "training [s]", ".1f s"),
            Column("M words/s", "words/s", ".2f", 1e-6),
            ANALOGIES,
            Column("evaluation", "evaluation [s]", ".1f s"),
            Column("whole process", "whole process [s]", ".0f s"),
            Column("peak memory", "peak [MiB]", ".0f MiB"),
            Column("without torch", "peak without torch [MiB]", ".0f MiB"),
        ],
    ),
    "ingest": Table(
        ["ingest-2026-11-21", "ingest-2026-11-21-2"],
        {r"(.*)": r"\1"},
        [
            SPEED,
            Column("time", "seconds [s]", ".1f s"),
            Column("peak memory", "peak memory [MiB]", ".0f MiB"),
        ],
    ),
    "records": Table(
        ["transfer-2026-11-21"],
        {
            r"contiguous .*": "contiguous copies",
            r"records 1536 B x (65536|1048576) rows of (.*)": r"\1 records of a table of \2",
        },
        [
            Column("to the GPU", "gather [GB/s]", ".1f GB/s"),
            Column("from the GPU", "scatter [GB/s]", ".1f GB/s"),
            Column("both at once", "both [GB/s]", ".1f GB/s"),
        ],
    ),
    "narrow": Table(
        ["transfer-2026-11-21", "transfer-2026-11-22-2"],
        {r"records 512 B x (\d+) rows of (.*)": r"\1 records of 512 bytes, of a table of \2"},
        [
            Column("to the GPU", "gather share [%]", ".0f %"),
            Column("from the GPU", "scatter share [%]", ".0f %"),
            Column("both at once", "both share [%]", ".0f %"),
        ],
    ),
    "rows": Table(
        ["transfer-2026-11-21-2"],
        {r"131072 of 10000000 rows, (.*)": r"\1"},
        [
            Column("to the GPU", "to GPU [ms]", ".2f ms"),
            Column("from the GPU", "from GPU [ms]", ".2f ms"),
        ],
    ),
}


def cell(figures: Mapping[str, float], column: Column) -> str:
    """Return a figure, with its standard deviation if there is one."""
    if column.metric not in figures:
        return ""
    form, _, unit = column.form.partition(" ")
    shown = f"{figures[column.metric] * column.scale:{form}}"
    name, bracket, metric_unit = column.metric.partition(" [")
    deviation = figures.get(f"{name} stdev{bracket}{metric_unit}")
    if deviation is not None:
        shown += f" ± {deviation * column.scale:{form}}"
    return f"{shown} {unit}".strip()


def read(file: str) -> dict:
    """Return the content of a file of results."""
    return json.loads((ROOT / "tests/bench/results" / f"{file}.json").read_text())


def cases(table: Table) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Yield label, commit and figures of each case that a pattern matches."""
    for run in map(read, table.files):
        for case, figures in run["figures"].items():
            matches = (re.fullmatch(pattern, case) for pattern in table.labels)
            match = next(filter(None, matches), None)
            if match:
                yield match.expand(table.labels[match.re.pattern]), run["commit"], figures


def markdown(table: Table) -> str:
    """Return the table, and below it commit and command of its files."""
    lines = [["", "commit"][: 1 + table.sources] + [column.heading for column in table.columns]]
    lines.append(["---"] * len(lines[0]))
    for label, commit, figures in cases(table):
        cells = [cell(figures, column) for column in table.columns]
        lines.append([label, *[commit] * table.sources, *cells])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{text}\n{''.join(map(source, table.files))}" if table.sources else text


def source(file: str) -> str:
    """Return a line with hardware, date, commit and command of a file."""
    run = read(file)
    commit = f", commit {run['commit']}" if run["commit"] else ""
    return f"- {run['gpu'] or run['cpu']}, {run['date']}{commit}: `{run['command']}`\n"


def render(document: str) -> str:
    """Return a document with its tables written anew."""
    return MARKED.sub(lambda found: f"{found[1]}{markdown(TABLES[found[2]])}{found[3]}", document)


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
