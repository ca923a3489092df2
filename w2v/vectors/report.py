"""Write documents about runs: HTML page, map of words, model card.

The page is drawn by plotly, whose script is one file for all pages of a folder of runs. Words and
neighbors are in report.js beside the page. Text that comes from a run, such as its words, is
escaped. scikit-learn is imported where it is used: that takes a second.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import shutil
import unicodedata
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

import numpy as np

from w2v.system.files import atomic_path, atomic_write, printable
from w2v.text.vocab import Vocab
from w2v.vectors import load, runs
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.runs import SCRIPT, Comparison, Row, Run, markup

TEMPLATE = Path(__file__).with_suffix(".html")
CURVES = {  # title of each metric
    "loss": "training loss",
    "held_out_loss": "held-out loss",
    "analogies": "analogy accuracy",
    "words_per_s": "words per second",
}
# Readable on white and on black.
GREY = "#808890"
COLORS = ("#2f7de1 #d9463e #0e8f7e #b26a00 #8a5cf0 #d63a8a #4d8f0e #0b87a8 #a8632a #6b7a90").split()
DASHES = ("solid", "dash", "dot")  # after all colors
MAP_WORDS = 10_000  # the most frequent ones
LANDMARKS = 1000  # words that t-SNE places; the others are placed among them: 2 s in place of 30
NEAR_LANDMARKS = 5
GROUPS = 8  # by k-means
PERPLEXITY = 20.0
TSNE_STEPS = 500  # half of the default: the divergence is 2 % greater
NEIGHBOR_BYTES = 2**26  # of all vectors of a page, a byte for each number
SIDE = 1200  # of a map, in pixels
MARGIN = 80


class ReportError(ValueError):
    """A page or map that cannot be made; one line with the remedy."""


def write(paths: Iterable[str | Path], to: str | Path | None = None, with_map: bool = True) -> Path:
    """Write the page and return its path.

    Args:
        paths: Run folders, folders of run folders, or "latest"; runs may be unfinished. Or one
            file of vectors, whose words the page shows.
        to: The file, or a folder for report.html; by default in the run folder, or beside
            several runs in the folder "pictures", or beside the file of vectors.
        with_map: Whether words have places on a map, which takes seconds.
    """
    paths = list(paths)
    for path in map(Path, paths):
        if path.is_file() and path.name != SCRIPT:
            if len(paths) > 1:
                raise ReportError(f"{path} is a file of vectors; give it alone")
            file = runs.picture_path([path.parent], f"{path.name}.html", to)
            return write_page(Comparison([], {}, []), file, file.parent, with_map, path)
    folders = runs.find_all(paths, "metrics.jsonl")
    file = runs.picture_path(folders, "report.html", to)
    shared = file.parent
    if to is None:
        shared = folders[0].parent
    return write_page(Comparison.of([runs.read(path) for path in folders]), file, shared, with_map)


def write_page(
    compared: Comparison,
    file: Path,
    shared: Path,
    with_map: bool = True,
    vectors: Path | None = None,
) -> Path:
    """Write the page of runs, and plotly's script into `shared`.

    vectors: A run folder or file; by default that of the best run that has vectors.
    """
    script = _script()
    file.parent.mkdir(parents=True, exist_ok=True)
    shown = shared / SCRIPT
    if not shown.is_file() or shown.stat().st_size != script.stat().st_size:
        with atomic_path(shown) as part:
            shutil.copyfile(script, part)
    rows = compared.rows
    folders = [run.folder for row in rows for run in row.runs]
    vectors = vectors or next((at for at in folders if (at / "vectors.kv").exists()), None)
    words = file.with_suffix(".js")
    if vectors:
        found = json.dumps(_words(vectors, with_map), separators=(",", ":"))
        atomic_write(words, f"showWords({found});\n")
    figures = {"curves": _curves(rows), "scores": _scores(rows)}
    texts = sorted({row.settings["corpus.path"] for row in rows})
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_text(", ".join(texts) if rows else file.stem),
        comparison=_comparison(compared) if rows else "",
        compared="" if rows else "hidden",
        hidden="" if vectors else "hidden",
        # A "<" could end the script element.
        figures=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=quote(os.path.relpath(shown, file.parent)),
        words=f'<script src="{quote(words.name)}" defer></script>' if vectors else "",
        palette=json.dumps(COLORS),
    )
    atomic_write(file, page)
    return file


def _script() -> Path:
    """Return the script of the installed plotly, without its slow import."""
    try:
        return Path(str(distribution("plotly").locate_file(f"plotly/package_data/{SCRIPT}")))
    except PackageNotFoundError:
        raise ReportError("report.html needs plotly: pip install plotly") from None


def _comparison(compared: Comparison) -> str:
    """Return the table of rows, verdicts, and folded settings."""
    rows, columns, verdicts = compared
    marked = [
        f'<i style="background: {COLORS[number % len(COLORS)]}"></i>{_text(row.name)}'
        for number, row in enumerate(rows)
    ]
    if len(rows) > 1 and runs.quality(rows[0].runs) > runs.UNSCORED:
        marked[0] += ' <b title="best by the mean of its scores">★</b>'
    table = {"": marked}
    for heading in list(columns)[1:]:
        table[heading] = [_text(cell.replace(" +- ", " ± ")) for cell in columns[heading]]
    lines = "".join(f"<li>{_text(line)}</li>" for line in verdicts)
    details = "".join(_details(run) for row in rows for run in row.runs)
    settings = f"<details><summary>settings of each run</summary>{details}</details>"
    return f"{_table(table)}<ul>{lines}</ul>{settings}"


def _table(columns: Mapping[str, Iterable[str]]) -> str:
    """Return cells of HTML as a table that scrolls by itself."""
    head = "".join(f"<th>{heading}</th>" for heading in map(_text, columns))
    rows = zip(*columns.values(), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def _details(run: Run) -> str:
    """Return the hardware and all settings of a run."""
    lines = [run.environment.strip()]
    lines += [f"{key}={value}" for key, value in run.settings.items()]
    return (
        f"<h3>{_text(run.folder.absolute().name)}</h3><pre>{html.escape(chr(10).join(lines))}</pre>"
    )


def _curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plotly's figure of all metrics, by words and by seconds."""
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    named = set()  # rows that the legend has
    for metric, title in CURVES.items():
        curves = [runs.mean_curve(row.runs, metric) for row in rows]
        if not any(len(curve.get("words", ())) > 1 for curve in curves):
            continue
        panel = len(axes) + 1
        axes[f"yaxis{panel}"] = {"title": {"text": title}, "automargin": True}
        for number, (row, curve) in enumerate(zip(rows, curves, strict=True)):
            if curve:
                shared = {"xaxis": f"x{panel}", "yaxis": f"y{panel}", "legendgroup": number}
                for trace in _line(row, number, curve):
                    traces.append(trace | shared | {"showlegend": number not in named})
                    named.add(number)
    return {"data": traces, "layout": axes}


def _line(row: Row, number: int, curve: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the mean of a row's seeds, and the band of several."""
    points = {key: [float(f"{value:.6g}") for value in curve[key]] for key in curve}
    color = COLORS[number % len(COLORS)]
    dash = DASHES[number // len(COLORS) % len(DASHES)]
    along = {axis: points[axis] for axis in ("words", "seconds")}
    line: dict[str, Any] = {"name": _text(row.name), "y": points["mean"], "meta": along}
    line |= {"line": {"color": color, "dash": dash}, "mode": "lines+markers", "marker": {"size": 4}}
    if len(row.runs) == 1:
        return [line]
    # Along the highest values, and back along the lowest ones.
    around = {axis: at + at[::-1] for axis, at in along.items()}
    band = {"y": points["high"] + points["low"][::-1], "meta": around, "hoverinfo": "skip"}
    return [line, band | {"fill": "toself", "fillcolor": f"{color}33", "mode": "none"}]


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plotly's bars of scores with 95 % intervals over items."""
    traces: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        ends = np.array(list(row.intervals.values())).reshape(-1, 2)
        scales = [100 / runs.scale(heading) for heading in row.intervals]
        values = [100 * float(np.nanmean(row.items[heading])) for heading in row.intervals]
        low, high = np.abs(ends.T * scales - values).tolist()
        error = {"array": high, "arrayminus": low, "thickness": 1.5, "width": 4, "color": GREY}
        trace = {"name": _text(row.name), "x": values, "error_x": error, "type": "bar"}
        trace |= {"y": [_text(heading.removesuffix(" %")) for heading in row.intervals]}
        traces.append(
            trace | {"orientation": "h", "marker": {"color": COLORS[number % len(COLORS)]}}
        )
    layout = {
        "height": 150 + 18 * sum(len(trace["x"]) for trace in traces),
        "xaxis": {"title": {"text": "% right, 100 x correlation; 95 % intervals"}},
        "yaxis": {"autorange": "reversed", "automargin": True},
    }
    return {"data": traces, "layout": layout}


def _words(vectors: Path, with_map: bool) -> dict[str, Any]:
    """Return words, vectors as bytes, and places of frequent words."""
    kv = load.load_words(vectors)
    dim = kv.vectors.shape[1]
    wide_ND = kv.vectors[: NEIGHBOR_BYTES // dim]
    wide_ND = np.nan_to_num(wide_ND, posinf=0, neginf=0).astype(np.float32)
    largest_N1 = np.abs(wide_ND).max(axis=1, keepdims=True)
    bytes_ND = np.rint(wide_ND * (127 / np.maximum(largest_N1, 1e-30))).astype(np.int8)
    found = {"run": str(vectors), "dim": dim, "x": [], "y": [], "groups": []}
    found |= {"words": "\n".join(kv.index_to_key), "bytes": b64encode(bytes_ND).decode()}
    with contextlib.suppress(ReportError):  # of too few words
        if with_map:
            places_N2, group_N = project(wide_ND[:MAP_WORDS])
            places = [[float(f"{place:.4g}") for place in column] for column in places_N2.T]
            found |= {"x": places[0], "y": places[1], "groups": group_N.tolist()}
    return found


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def word_map(kv: load.Words, file: Path, words: int) -> Path:
    """Draw the most frequent words in two dimensions, as SVG.

    The places are those of the report's map. Each word is a dot in the color of its group; more
    frequent words have larger names. A name is left out where it would cover one that is there.
    """
    if file.suffix != ".svg":
        raise ReportError(f"{file} is not an SVG file; name one, such as map.svg")
    places_N2, group_N = project(np.array(kv.vectors[:MAP_WORDS], np.float32))
    shown_N2 = places_N2[:words] * [1, -1]  # SVG counts from the top, as no plot does
    shown_N2 = (shown_N2 - shown_N2.min(0)) / np.maximum(np.ptp(shown_N2, axis=0), 1e-30)
    taken: set[tuple[int, int]] = set()  # cells of 8 x 16 pixels that names have
    parts = []
    for rank, (x, y) in enumerate(MARGIN + (SIDE - 2 * MARGIN) * shown_N2):
        word = kv.index_to_key[rank]
        size = max(18 - rank / 15, 10)
        letters = len(word) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in word)
        columns = range(int(x / 8), int((x + 10 + 0.6 * size * letters) / 8) + 1)
        cells = set(product(columns, (int(y / 16), int(y / 16) + 1)))
        name = ""
        if taken.isdisjoint(cells):
            taken |= cells
            name = (
                f'<text x="{x + 5:.0f}" y="{y + 5:.0f}" font-size="{size:.0f}">{_text(word)}</text>'
            )
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{_text(word)}</title></circle>'
        parts.append(f'<g fill="{COLORS[group_N[rank]]}">{dot}{name}</g>\n')
    head = (
        f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}" font-family="sans-serif"'
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, f"<svg {head}>\n{''.join(parts)}</svg>\n")
    return file


def project(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places [N, 2] by t-SNE and groups [N] by k-means, of cosines.

    The first words are placed and grouped, the others between the nearest of them. Results repeat.
    """
    if len(vectors_ND) < 4 or vectors_ND.shape[1] < 2:
        few = f"a map of {len(vectors_ND)} words of {vectors_ND.shape[1]} dimensions shows nothing"
        raise ReportError(f"{few}; take 4 words or more, of 2 dimensions or more")
    centered_ND = vectors_ND - vectors_ND.mean(0)
    unit_ND = import_module("sklearn.preprocessing").normalize(centered_ND)
    first_LD = unit_ND[:LANDMARKS]
    perplexity = min(PERPLEXITY, (len(first_LD) - 1) / 3)
    tsne = import_module("sklearn.manifold").TSNE(
        perplexity=perplexity, init="pca", max_iter=TSNE_STEPS, random_state=0
    )
    kinds = min(GROUPS, len(first_LD))
    kmeans = import_module("sklearn.cluster").KMeans(kinds, n_init=1, random_state=0)
    # On busy cores, threads wait for each other and take six times as long.
    with import_module("threadpoolctl").threadpool_limits(1):
        places_L2 = tsne.fit_transform(first_LD)
        group_N = kmeans.fit(first_LD).predict(unit_ND)
        near = import_module("sklearn.neighbors").KNeighborsRegressor(
            min(NEAR_LANDMARKS, len(first_LD)), weights="distance"
        )
        places_N2 = near.fit(first_LD, places_L2).predict(unit_ND)
    return places_N2, group_N


def write_card(folder: Path, vocab: Vocab) -> None:
    """Write README.md, the model card, into the folder of a finished run."""
    run = runs.read(folder)
    settings = run.settings
    # Settings, scores and costs, as `w2v compare` has them, a row for each.
    columns = runs.table(runs.rows([run]), tested=False).items()
    figures = "\n".join(f"| {markup(name)} | {markup(cell)} |" for name, [cell] in columns)
    lines = [line.partition(" ") for line in run.environment.splitlines()]
    environment = "\n".join(f"| {markup(name)} | {markup(value)} |" for name, _, value in lines)
    path = markup(settings["corpus.path"])
    card = f"""# Word vectors of {path}

```python
from gensim.models import KeyedVectors

vectors = KeyedVectors.load("vectors.kv")
vectors.most_similar({vocab.words[0]!r})
```

| | |
|---|---|
| text | {path}: {vocab.raw_words:,} words, {vocab.raw_types:,} distinct |
| vocabulary | {len(vocab.words):,} words; min_count {settings["vocab.min_count"]} |
| training | {run.scores["words"]:,} words in {run.scores["seconds"]:.1f} s |
{environment}
{figures}

Analogies are Google's, answered among the {RESTRICT_VOCAB:,} most frequent words, by gensim's
protocol; those of unknown words are not counted. Word pairs have Spearman's correlation with human
judgement. The loss is that of a positive pair.

## Settings

`w2v train config.yaml` trains it again.

```yaml
{(folder / "config.yaml").read_text(encoding="utf-8").rstrip()}
```
"""
    atomic_write(folder / "README.md", card)
