"""Write pictures of runs: an HTML page, and a map of words.

The page is drawn by plotly, whose script is one file for all pages of a folder of runs. Words and
neighbors are in report.js beside the page. Text that comes from a run is escaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import unicodedata
from base64 import b64encode
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from jinja2 import Template

from w2v.system.files import atomic_write, printable
from w2v.vectors import load, runs
from w2v.vectors.runs import SCRIPT, Comparison, Row, markup

TEMPLATE = Path(__file__).with_suffix(".html")
CURVES = {  # title of each metric
    "loss": "training loss",
    "held_out_loss": "held-out loss",
    "analogies": "analogy accuracy",
    "words_per_s": "words per second",
}
# Readable on white and on black.
COLORS = ("#2f7de1 #d9463e #0e8f7e #b26a00 #8a5cf0 #d63a8a #4d8f0e #0b87a8 #a8632a #6b7a90").split()
DASHES = ("solid", "dash", "dot")  # after all colors
MAP_WORDS = 10_000  # the most frequent ones
LANDMARKS = 1000  # words that t-SNE places; the others are placed among them: 2 s in place of 30
NEAR_LANDMARKS = 5
GROUPS = 8  # by k-means
PERPLEXITY = 20.0
TSNE_STEPS = 500  # half of the default: the divergence is 2 % greater
NEIGHBOR_BYTES = 2**26  # of all vectors of a page, a byte for each number
LARGEST = 1e15  # numbers of sound vectors
SIDE = 1200  # of a map, in pixels
MARGIN = 80


class ReportError(ValueError):
    """A page or map that cannot be made; one line with the remedy."""


def write(paths: Sequence[str | Path], to: str | Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        paths: Run folders, folders of run folders, or "latest"; runs may be unfinished. Or one
            file of vectors, whose words the page shows.
        to: The file, or a folder for report.html; by default in the run folder, or beside
            several runs, or beside the file of vectors.
    """
    for vectors in (path for path in map(Path, paths) if path.is_file() and path.name != SCRIPT):
        if len(paths) > 1:
            raise ReportError(f"{vectors} is a file of vectors; give it alone")
        file = runs.picture_path([vectors.parent], f"{vectors.name}.html", to)
        return write_page(Comparison([], {}, []), file, vectors=vectors)
    folders = runs.find_all(paths, "metrics.jsonl")
    compared = Comparison.of([runs.read(path) for path in folders])
    return write_page(compared, runs.picture_path(folders, "report.html", to))


def write_page(
    compared: Comparison, file: Path, with_map: bool = True, vectors: Path | None = None
) -> Path:
    """Write the page of runs, and plotly's script beside it or its run folder.

    with_map: Whether words have places on a map, which takes seconds.
    vectors: A run folder or file; by default that of the best run that has vectors.
    """
    try:  # without plotly's slow import
        script = distribution("plotly").locate_file(f"plotly/package_data/{SCRIPT}")
    except PackageNotFoundError:
        raise ReportError("report.html needs plotly: pip install plotly") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    is_in_run = (file.parent / "config.yaml").is_file()
    shown = (file.parent.parent if is_in_run else file.parent) / SCRIPT
    content = Path(str(script)).read_bytes()
    if not shown.is_file() or shown.stat().st_size != len(content):
        atomic_write(shown, content)
    rows, columns, verdicts = compared
    folders = [run.folder for row in rows for run in row.runs]
    vectors = vectors or next((at for at in folders if (at / "vectors.kv").exists()), None)
    words = file.with_suffix(".js")
    if vectors:
        found = json.dumps(_words(vectors, with_map), separators=(",", ":"))
        atomic_write(words, f"showWords({found});\n")
    _, *headings = columns or [""]  # without that of names
    cells = zip(*(columns[heading] for heading in headings), strict=True)
    page = Template(TEMPLATE.read_text(encoding="utf-8"), autoescape=True, finalize=_shown)
    html = page.render(
        title=", ".join(sorted({row.settings["corpus.path"] for row in rows})) or file.stem,
        rows=list(zip(rows, cells, strict=True)),
        headings=headings,
        best=len(rows) > 1 and runs.quality(rows[0].runs) > runs.UNSCORED and rows[0],
        verdicts=verdicts,
        curves=_curves(rows),
        palette=COLORS,
        plotly=quote(os.path.relpath(shown, file.parent)),
        words=quote(words.name) if vectors else "",
    )
    atomic_write(file, html)
    return file


def _shown(value: Any) -> Any:
    """Return text without control characters, as a page shows it."""
    return printable(value.replace(" +- ", " ± "), keep="\n") if type(value) is str else value


def _curves(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plotly's figure of all metrics: means and bands of seeds."""
    traces: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    named = set()  # rows that the legend has
    for metric, title in CURVES.items():
        curves = [runs.mean_curve(row.runs, metric) for row in rows]
        if not any(len(curve.get("words", ())) > 1 for curve in curves):
            continue
        panel = len(axes) + 1
        axis: dict[str, Any] = {"title": {"text": title}, "automargin": True}
        axes[f"yaxis{panel}"] = axis | ({"tickformat": "~%"} if metric == "analogies" else {})
        for number, (row, curve) in enumerate(zip(rows, curves, strict=True)):
            if not curve:
                continue
            points = {key: [float(f"{value:.6g}") for value in curve[key]] for key in curve}
            along = {axis: points[axis] for axis in ("words", "seconds")}
            color = COLORS[number % len(COLORS)]
            line = {"color": color, "dash": DASHES[number // len(COLORS) % len(DASHES)]}
            trace: dict[str, Any] = {"xaxis": f"x{panel}", "yaxis": f"y{panel}"}
            trace |= {"name": markup(row.name), "line": line, "legendgroup": number}
            trace |= {"mode": "lines+markers", "meta": along}
            traces.append(trace | {"y": points["mean"], "showlegend": number not in named})
            named.add(number)
            if len(row.runs) > 1:
                # Along the highest values, and back along the lowest ones.
                band: dict[str, Any] = {"y": points["high"] + points["low"][::-1], "mode": "none"}
                band |= {"meta": {axis: at + at[::-1] for axis, at in along.items()}}
                band |= {"fill": "toself", "fillcolor": f"{color}33", "hoverinfo": "skip"}
                traces.append(trace | band | {"showlegend": False})
    return {"data": traces, "layout": axes}


def _words(vectors: Path, with_map: bool) -> dict[str, Any]:
    """Return words, vectors as bytes, and places of frequent words."""
    kv = load.load_words(vectors)
    dim = kv.vectors.shape[1]
    wide_ND = _sound(kv.vectors[: NEIGHBOR_BYTES // dim])
    largest_N1 = np.abs(wide_ND).max(axis=1, keepdims=True)
    bytes_ND = np.rint(wide_ND * (127 / np.maximum(largest_N1, 1e-30))).astype(np.int8)
    found = {"run": str(vectors), "dim": dim, "x": [], "y": [], "groups": []}
    words = "\n".join(word.replace("\n", " ") for word in kv.index_to_key)
    found |= {"words": words, "bytes": b64encode(bytes_ND.tobytes()).decode()}
    with contextlib.suppress(ReportError):  # of too few or equal words
        if with_map:
            places_N2, group_N = project(wide_ND[:MAP_WORDS])
            places = [[float(f"{place:.4g}") for place in column] for column in places_N2.T]
            found |= {"x": places[0], "y": places[1], "groups": group_N.tolist()}
    return found


def _sound(vectors_ND: np.ndarray) -> np.ndarray:
    """Return float32 whose squares have sums: 0 for NaN and from LARGEST on."""
    with np.errstate(over="ignore"):
        vectors_ND = vectors_ND.astype(np.float32)
    return np.where(np.abs(vectors_ND) < LARGEST, vectors_ND, 0)


def word_map(kv: load.Words, file: Path, words: int) -> Path:
    """Draw the most frequent words in two dimensions, as SVG.

    The places are those of the report's map. Each word is a dot in the color of its group; more
    frequent words have larger names. A name is left out where it would cover one that is there.
    """
    if file.suffix != ".svg":
        raise ReportError(f"{file} is not an SVG file; name one, such as map.svg")
    places_N2, group_N = project(_sound(kv.vectors[:MAP_WORDS]))
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
        shown = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>{markup(word)}</title></circle>'
        if taken.isdisjoint(cells):
            taken |= cells
            place = f'x="{x + 5:.0f}" y="{y + 5:.0f}" font-size="{size:.0f}"'
            shown += f"<text {place}>{markup(word)}</text>"
        parts.append(f'<g fill="{COLORS[group_N[rank]]}">{shown}</g>\n')
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE} {SIDE}"'
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, f"<svg {head} font-family='sans-serif'>\n{''.join(parts)}</svg>\n")
    return file


def project(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places [N, 2] by t-SNE and groups [N] by k-means, of cosines.

    The first words are placed and grouped, the others between the nearest of them. Results repeat.
    """
    if len(vectors_ND) < 4 or vectors_ND.shape[1] < 2:
        few = f"a map of {len(vectors_ND)} words of {vectors_ND.shape[1]} dimensions shows nothing"
        raise ReportError(f"{few}; take 4 words or more, of 2 dimensions or more")
    unit_ND = import_module("sklearn.preprocessing").normalize(vectors_ND - vectors_ND.mean(0))
    first_LD = unit_ND[:LANDMARKS]
    count = len(first_LD)
    if not np.ptp(first_LD, axis=0).any():  # scikit-learn's t-SNE would crash
        raise ReportError(f"a map of {count} equal vectors shows nothing; train them longer")
    tsne = import_module("sklearn.manifold").TSNE(
        perplexity=min(PERPLEXITY, (count - 1) / 3), max_iter=TSNE_STEPS, random_state=0
    )
    kmeans = import_module("sklearn.cluster").KMeans(min(GROUPS, count), n_init=1, random_state=0)
    regressor = import_module("sklearn.neighbors").KNeighborsRegressor
    near = regressor(min(NEAR_LANDMARKS, count), weights="distance")
    # On busy cores, threads wait for each other and take six times as long.
    with import_module("threadpoolctl").threadpool_limits(1):
        near.fit(first_LD, tsne.fit_transform(first_LD))
        return near.predict(unit_ND), kmeans.fit(first_LD).predict(unit_ND)
