"""Tables and figures of the documents, from the files of results.

    python tests/bench/tables.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`. It has a row for each case of its
files that a pattern matches, and below it the commit and command of each file. Figures within
sentences are in CITED, and a test compares them with their files.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.results import FOLDER, ROOT, deviation_of, over_seeds

DOCUMENTS = [ROOT / "README.md"]
DOCUMENTS += [ROOT / "docs" / name for name in ("performance.md", "tuning.md", "library.md")]
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
ANALOGIES = Column("analogies", "analogies [%]", ".1f %")
GOOGLE = Column("Google", "google", ".1f %", 100)
SIMILARITIES = [
    Column(name, metric, ".3f")
    for name, metric in (("WordSim-353", "wordsim353"), ("SimLex-999", "simlex999"))
]
SCORES = [ANALOGIES, *SIMILARITIES]
ALL_SCORES = [
    Column("seeds", "seeds", ".0f"),
    GOOGLE,
    Column("MSR", "msr", ".1f %", 100),
    *SIMILARITIES,
    Column("MTurk-287", "mturk287", ".3f"),
]
STEPS = [
    Column("step", "step [ms]", ".2f ms"),
    Column("GPU MiB", "GPU [MiB]", ".0f"),
    Column("host MiB", "host [MiB]", ".0f"),
]
NEAR = Column("near", "near", ".3f")
RUN_SCORES = ["google", "msr", "wordsim353", "simlex999", "mturk287", "near", "purity"]
PHASES = ["starting", "reading", "set-up", "training", "exporting", "saving", "scoring"]
STAGES = {  # in the files of results, and in the table
    **{name: name for name in ("step", "sampling")},
    "plan": "planning pages",
    "moves": "moving rows",
    "claim": "finding unique rows",
    **{name: name for name in ("skip-gram", "optimizer")},
}
GPUS = r"(\d GPUs?), 1019060 words .* Adam "  # of wiki100 twenty times
TABLES = {
    "summary": Table(
        [
            "cpu-2026-11-23-7",
            "fullw2v-2026-11-20",
            *numbered("train-2026-11-23", 2, 3),
            "train-2026-11-26",
        ],
        {
            r".* 5 epochs, gensim alpha .05.*": "gensim, 16 CPU cores, SGD, alpha .05",
            r"FULL-W2V.* 5 epochs": "FULL-W2V (CUDA), all rows on the GPU, SGD",
            r"wiki100 adam resident float32": "w2v, all rows on the GPU, Adam",
            r"wiki100 sgd resident float32": "w2v, all rows on the GPU, SGD",
            r"wiki100 adam mapped:50% float32": "w2v, half of the rows on the GPU, Adam",
        },
        [Column("M words/s", "words/s", ".0f", 1e-6), ANALOGIES],
        sources=False,
    ),
    "training": Table(
        [
            *numbered("cpu-2026-11-23", 7, 8),
            "fullw2v-2026-11-20",
            *numbered("train-2026-11-23", 2, 3),
            "train-2026-11-26",
            "train-2026-11-24",
        ],
        {
            r"wiki100 (.*) epochs, gensim,? ?(.*)": r"gensim 4.4, \1 epochs, \2",
            r"(FULL-W2V.* epochs.*)": r"\1",
            r"wiki100 (\S+) (\S+) float32": r"\1, `\2`",
        },
        [SPEED, *SCORES, Column("rows read of used", "rows read [% of used]", ".1f %")],
    ),
    "whole": Table(
        [*numbered("train-2026-11-23", 1, 2), "train-2026-11-22-5"],
        {
            r"wiki100 (adam) (\S+) float32": r"skip-gram, \1, `\2`",
            r"wiki100 (\S+) (\S+) float32 model.architecture=cbow": r"CBOW, \1, `\2`",
            r"wiki100 (\S+) (\S+) float32 .*negative=0": r"skip-gram with a tree, \1, `\2`",
            r"wiki100 (\S+) (\S+) .* model.architecture=cbow": r"CBOW with a tree, \1, `\2`",
        },
        [SPEED, *SCORES],
    ),
    "stages": Table(
        [*numbered("train-2026-11-23", 2, 3), "train-2026-11-26"],
        {r"wiki100 (\S+) (\S+) float32": r"\1, `\2`"},
        [Column(title, f"{stage} [us]", ".0f") for stage, title in STAGES.items()],
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
    "cpu": Table(
        ["cpu-2026-11-23-2"],
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
    "trees": Table(
        ["cpu-2026-11-22-5", "cpu-2026-11-23-3"],
        {r".*, (gensim|gensim sentences|Word2Vec SGD), (.*)-hs": r"\2, \1"},
        [
            Column("M words/s", "words/s", ".2f", 1e-6),
            *SCORES,
            Column("whole process", "whole process [s]", ".0f s"),
        ],
    ),
    "small": Table(
        ["small-2026-11-23"],
        {r"17,000 words, (.*)": r"\1"},
        [Column("least", "least [s]", ".3f s"), Column("median", "median [s]", ".3f s")],
    ),
    "cores": Table(
        numbered("cpu-2026-11-23", 6, 2, 4, 1, 5),
        {r"wiki100 5 epochs, (.*core.*)": r"\1", r"wiki100 5 epochs, (.*)": r"\1, 2 cores"},
        [SPEED, ANALOGIES],
    ),
    "steps": Table(
        ["cores-2026-11-23"],
        {r"1 cores": "one core", r"(.*)": r"\1"},
        [
            Column("SGD, M words/s", "w2v SGD [/s]", ".1f", 1e-6),
            Column("over one core", "w2v SGD over one", ".1f"),
            Column("apart", "w2v SGD apart over one", ".1f"),
            Column("Adam, M words/s", "w2v Adam [/s]", ".1f", 1e-6),
            Column("over one core", "w2v Adam over one", ".1f"),
            Column("apart", "w2v Adam apart over one", ".1f"),
            Column("rows in cache, apart", "rows in cache apart over one", ".1f"),
            Column("rows in memory, apart", "rows in memory apart over one", ".1f"),
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
        [*STEPS, Column("M samples/s", "samples/s", ".1f", 1e-6)],
    ),
    "stores": Table(
        ["library-2026-11-26"],
        {r".* rows: (.*)": r"\1"},
        [Column("get", "get [ms]", ".2f ms"), Column("put", "put [ms]", ".2f ms")],
    ),
    "reading": Table(
        numbered("reading-2026-11-23", 3),
        {r"(.*), (.*) cores": r"\1, \2 cores"},
        [
            Column("MB/s", "MB/s", ".0f"),
            SPEED,
            Column("M distinct words", "distinct words", ".1f", 1e-6),
        ],
    ),
    "commands": Table(
        ["run-2026-11-23"],
        {r"(.*)": r"\1"},
        [
            Column("whole command", "whole command [s]", ".1f s"),
            *[Column(name, f"{name} [s]", ".1f s") for name in PHASES],
            Column("after training / copying", "after training over copying [times]", ".2f"),
            SPEED,
            Column("of the steady rate", "over steady [times]", ".0f %", 100),
        ],
    ),
    "gensim": Table(
        ["tuning-2026-11-23-7"],
        {
            r"(wiki|books) (gensim alpha=[\d.]+)": r"\1, \2",
            r"(wiki|books) (\w+(?:, room for 50 %)?)": r"\1, \2",
        },
        ALL_SCORES,
        sources=False,
    ),
    "sizes": Table(
        ["tuning-2026-11-23-7"],
        {r"(wiki|books) (gensim alpha=[\d.]+|Adam), dim (50|300)": r"\1, dim \3, \2"},
        ALL_SCORES,
        sources=False,
    ),
    "baskets": Table(
        ["tuning-2026-11-23-7"],
        {r"baskets:24000 (gensim alpha=[\d.]+|Adam), dim (\d+)": r"dim \2, \1"},
        [ALL_SCORES[0], NEAR],
        sources=False,
    ),
    "places": Table(
        ["tuning-2026-11-23-3"],
        {r"(wiki|books):.3@ (gensim alpha=\S+|Adam)(, two cores| workers.*)?": r"\1, \2"},
        [*ALL_SCORES[1:]],
        sources=False,
    ),
    "cbow": Table(
        ["tuning-2026-11-22-5"],
        {r"wiki (CBOW hs|CBOW|skip-gram hs) (.*)": r"\1, \2"},
        [ALL_SCORES[0], GOOGLE, *SIMILARITIES],
        sources=False,
    ),
    "beginnings": Table(
        ["tuning-2026-11-23"],
        {r"(wiki|books):(\S+) (?:auto )?(gensim alpha=\S+|Adam)": r"\1 \2 M, \3"},
        ALL_SCORES,
        sources=False,
    ),
    "once": Table(
        ["tuning-2026-11-23-6"],
        {
            r"(wiki|books) (gensim alpha=\S+), 1 epochs": r"\1, \2",
            r"(wiki|books) (Adam|SGD) on two cores, 1 epochs, rate x 1": r"\1, \2",
        },
        ALL_SCORES[1:],
        sources=False,
    ),
    "rise": Table(
        ["tuning-2026-11-23-6"],
        {r"(wiki|books):(\.3|\.6|1)@ Adam, rate x (1|1\.2|1\.4)": r"\1 \2 M, rate x \3"},
        ALL_SCORES,
        sources=False,
    ),
    "graphs": Table(
        ["tuning-2026-11-23"],
        {r"graph (\w+) (\d) epochs (.*)": r"\1, epochs: \2, \3"},
        [ALL_SCORES[0], Column("purity", "purity", ".3f")],
        sources=False,
    ),
    "short": Table(
        ["tuning-2026-11-23-4"],
        {
            r"baskets:(\d+)-\d+ (\d+) epochs ((?!.* rate ).*)": r"\1 baskets, epochs: \2, \3",
            r"logs:(\d+)-\d+ (\d+) epochs ((?!.* rate ).*)": r"\1 lines of a log, epochs: \2, \3",
        },
        [ALL_SCORES[0], NEAR],
        sources=False,
    ),
    "windows": Table(
        ["tuning-2026-11-23-5"],
        {r"(wiki|books):([\d.]+) (Adam|SGD), (.*)": r"\1 \2 M, \3, \4"},
        ALL_SCORES,
        sources=False,
    ),
    "untouched": Table(
        ["tuning-2026-11-23-5"],
        {
            r"baskets:(\d+) (\d+) epochs (.*)": r"\1 baskets, epochs: \2, \3",
            r"logs:(\d+) (\d+) epochs (.*)": r"\1 lines of a log, epochs: \2, \3",
            r"graph:(\w+) (\d+) epochs (.*)": r"graph \1, epochs: \2, \3",
        },
        [ALL_SCORES[0], NEAR, Column("purity", "purity", ".3f")],
        sources=False,
    ),
    "rates": Table(
        ["tuning-2026-11-22-3"],
        {r"(.*) (CBOW|CBOW hs|skip-gram hs) (gensim .*|(?:Adam|SGD) .* [12])": r"\2, \1, \3"},
        [GOOGLE, *SIMILARITIES],
        sources=False,
    ),
    "two": Table(
        numbered("ranks-2026-11-26", 1, 2, 15, 16, *range(3, 15)),
        {
            rf"{GPUS}float32 resident \S+=(\d+) .*": r"\1, tables on the GPU, batches of \2",
            rf"{GPUS}.* \S+size=(\d+) .*bytes=10%": r"\1, paged, batches of \2",
            rf"{GPUS}.* model.negative_pool=0": r"\1, paged, no shared negatives, batches of 65536",
        },
        [
            SPEED,
            Column("step", "step [us]", ".0f us"),
            Column("CPU", "CPU [us]", ".0f us"),
            Column("GB/s to each GPU", "to GPU [GB/s]", ".1f"),
            Column("between GPUs", "sent by a GPU [GB/s]", ".1f"),
        ],
    ),
    "large": Table(
        ["ranks-2026-11-21-13"],
        {r"4 GPUs, 100000000 rows.*": "4 GPUs, two tables of 100 M rows"},
        [
            Column("records", "records [GiB]", ".0f GiB"),
            Column("set-up", "set-up [s]", ".0f s"),
            Column("CPU memory over records", "host memory over records [times]", ".3f"),
            SPEED,
            Column("GB/s to a GPU", "to GPU [GB/s]", ".1f"),
            Column("from a GPU", "from GPU [GB/s]", ".1f"),
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
        {r"131072 of 10000000 rows, (ours|CuPy pinned|torch pinned.*)": r"\1"},
        [
            Column("to the GPU", "to GPU [ms]", ".2f ms"),
            Column("from the GPU", "from GPU [ms]", ".2f ms"),
        ],
    ),
}


class Cited(NamedTuple):
    """Figures within a sentence: file, case and metric of each."""

    document: str
    text: str  # with fields such as {:.1f}; words/s are in millions
    figures: Sequence[tuple[str, str, str]]


WIKI = "wiki100 {} {} float32".format
ZIPF = "10000000 words of a text of 199747053, exponent 1, Adam float32 mapped:10% "
ZIPF += "negative_pool=65536 for 8 steps"
TRAIN = "train-2026-11-23-2"
RUN = "run-2026-11-23"
COLD = (RUN, "wiki100, first command")
WARM = (RUN, "wiki100, ids cached")
PAGED = "wiki100 x 40, paged, new text"
LARGE = "wiki100 x 40, ids cached"
MILLIONS = (
    "zipf-2026-11-23",
    ("60000000 words of a text of 124136492, Adam float32 mapped, 80 GiB of the GPU occupied"),
)
FULL_W2V = "fullw2v-2026-11-20"
FP16 = "wiki100 adam auto transfer.engine=resident train.precision=fp16 seeds=4"
BUFFER = ("transfer-2026-11-21-2", "131072 of 10000000 rows, torch pinned, staged")
ONE, TWO = numbered("ranks-2026-11-26", 5, 6)
RESIDENT = "1019060 words of a text of 338882060, Adam float32 resident train.batch_size=65536 "
RESIDENT += "transfer.engine=resident"
PERFORMANCE = "docs/performance.md"
CITED = [
    Cited(
        "README.md",
        "took {:.1f} s on an H200, and {:.1f} s the second time",
        [(*COLD, "whole command [s]"), (*WARM, "whole command [s]")],
    ),
    Cited(
        "README.md",
        "FULL-W2V's takes {:.1f} to {:.1f} s on the H200",
        [
            (FULL_W2V, "FULL-W2V, whole command", f"{which} [s]")
            for which in ("shortest", "longest")
        ],
    ),
    Cited(
        "README.md",
        "with .05 it answers {:.1f} %",
        [(FULL_W2V, "FULL-W2V, 14 threads, 5 epochs, alpha .05", "analogies [%]")],
    ),
    Cited(
        PERFORMANCE,
        "FULL-W2V's whole command took {:.1f} to {:.1f} s on the H200",
        [
            (FULL_W2V, "FULL-W2V, whole command", f"{which} [s]")
            for which in ("shortest", "longest")
        ],
    ),
    Cited(
        PERFORMANCE,
        "of 4.1 GB took {:.1f} s, and {:.1f} with cached ids, of which {:.1f} after training: "
        "files of {:.1f} GB, which take {:.1f} s to copy",
        [
            (RUN, PAGED, "whole command [s]"),
            (RUN, LARGE, "whole command [s]"),
            (RUN, LARGE, "after training [s]"),
            (RUN, LARGE, "files [GB]"),
            (RUN, LARGE, "copying [s]"),
        ],
    ),
    Cited(
        PERFORMANCE,
        "{:.0f} of {:.0f} M words/s on wiki100, {:.0f} by the first command",
        [(*WARM, "words/s"), (*WARM, "steady words/s"), (*COLD, "words/s")],
    ),
    Cited(
        PERFORMANCE,
        "SGD trains {:.1f} M words/s on one core of a machine and {:.1f} on sixteen",
        [
            ("cores-2026-11-23", "1 cores", "w2v SGD [/s]"),
            ("cores-2026-11-23", "16 cores", "w2v SGD [/s]"),
        ],
    ),
    Cited(
        PERFORMANCE,
        "skip-gram takes {:.0f} us (one GPU: {:.0f}), the optimizer, which reads the "
        "gradients of both, {:.0f} ({:.0f}), and reading rows of the other GPU {:.0f}",
        [
            (TWO, f"2 GPUs, {RESIDENT}", "skip-gram [us]"),
            (ONE, f"1 GPU, {RESIDENT}", "skip-gram [us]"),
            (TWO, f"2 GPUs, {RESIDENT}", "optimizer [us]"),
            (ONE, f"1 GPU, {RESIDENT}", "optimizer [us]"),
            (TWO, f"2 GPUs, {RESIDENT}", "lend [us]"),
        ],
    ),
    Cited(
        "docs/failure.md",
        "{:.1f} GiB were estimated and {:.2f} used",
        [(*MILLIONS, "GPU estimate [GiB]"), (*MILLIONS, "GPU peak [GiB]")],
    ),
    Cited(
        PERFORMANCE,
        "Adam to {:.1f} ± {:.1f} %",
        [("train-2026-11-21-10", FP16, f"analogies{kind} [%]") for kind in ("", " stdev")],
    ),
    Cited(
        PERFORMANCE,
        "{:.0f} of {:.0f} M words/s with Adam",
        [
            (TRAIN, WIKI("adam", "mapped:50%"), "words/s"),
            (TRAIN, WIKI("adam", "resident"), "words/s"),
        ],
    ),
    Cited(
        PERFORMANCE,
        "{:.0f} to {:.0f} MiB against gensim's {:.0f}",
        [
            ("cpu-2026-11-23-2", f"wiki100 5 epochs, {case}", "peak [MiB]")
            for case in ("w2v SGD", "w2v Adam", "gensim")
        ],
    ),
    Cited(PERFORMANCE, "{:.1f} GiB of records", [("zipf-2026-11-22", ZIPF, "tables [GiB]")]),
    Cited(
        PERFORMANCE,
        "({:.1f} in place of {:.1f})",
        [
            ("zipf-2026-11-22", ZIPF, "words/s"),
            ("zipf-2026-11-22-2", f"{ZIPF} transfer.lookahead=false", "words/s"),
        ],
    ),
    Cited(
        PERFORMANCE,
        'takes {:.1f} times as long as "ours" to the GPU and {:.1f} times from it',
        [(*BUFFER, "to GPU over ours [times]"), (*BUFFER, "from GPU over ours [times]")],
    ),
    Cited(
        PERFORMANCE,
        "set up in {:.1f} s in one run (2a515c9) and {:.1f} s in another (72fbc97)",
        [
            ("transfer-2026-11-21", "set-up 32 GiB", "set-up [s]"),
            ("transfer-2026-11-20", "set-up 32 GiB", "set-up [s]"),
        ],
    ),
    Cited(
        PERFORMANCE,
        "torch and CuPy takes {:.2f} times as much",
        [
            (
                "transfer-2026-11-20",
                "memory of 10000000 rows, torch pinned",
                "over the table [times]",
            )
        ],
    ),
    Cited(
        "docs/moving.md",
        "{:.1f} % of the analogies against gensim's {:.1f}",
        [
            ("cpu-2026-11-23-2", f"wiki100 5 epochs, {case}", "analogies [%]")
            for case in ("w2v SGD", "gensim")
        ],
    ),
    Cited(
        "docs/planning.md",
        "{:.3f} rows read per word, that bound is 92 M words/s; {:.1f} are measured",
        [("zipf-2026-11-22", ZIPF, "read [rows a word]"), ("zipf-2026-11-22", ZIPF, "words/s")],
    ),
    Cited(
        "docs/CHANGELOG.md",
        "1 GB is read at {:.0f}, {:.0f} and {:.0f} MB/s with 1, 4 and 16 cores",
        [
            ("reading-2026-11-23-3", "1.0 GB, 1 cores", "MB/s"),
            ("reading-2026-11-23-3", "1.0 GB, 4 cores", "MB/s"),
            ("reading-2026-11-23-3", "1.0 GB, 16 cores", "MB/s"),
        ],
    ),
]


def cited(sentence: Cited) -> str:
    """Return the text of a citation with the figures of its files."""
    values = []
    for file, case, metric in sentence.figures:
        value = read(file)["figures"][case][metric]
        values.append(value / 1e6 if metric.endswith(("words/s", "[/s]")) else value)
    return sentence.text.format(*values)


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


def read(file: str) -> dict:
    """Return the content of a file of results; of a table, means over runs."""
    path = FOLDER / f"{file}.json"
    if path.exists():
        return json.loads(path.read_text())
    runs: dict[str, list[dict[str, float]]] = {}
    with gzip.open(path.with_suffix(".csv.gz"), "rt") as lines:
        for run in csv.DictReader(lines):
            settings = re.sub(r" ?seed=\d+", "", run["settings"])
            text = re.sub(r"@.*", "@", run["text"])  # places of a text are pooled as seeds are
            scores = {name: float(run[name]) for name in RUN_SCORES if run.get(name)}
            runs.setdefault(f"{text} {settings}", []).append(scores)
    return {"commit": "", "figures": {case: over_seeds(of) for case, of in runs.items()}}


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
