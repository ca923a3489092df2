"""Write documents about runs: HTML page, map of words, model card.

The page is drawn by plotly, whose script is one file for all pages of a folder of runs. Words and
neighbors are in report.js beside the page. Text that comes from a run, such as its words, is
escaped. matplotlib and scikit-learn are imported where they are used: that takes a second.
"""

from __future__ import annotations

import contextlib
import html
import json
import logging
import os
import shutil
import warnings
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

log = logging.getLogger("w2v")
TEMPLATE = Path(__file__).with_suffix(".html")
FROM_ZERO = {"rangemode": "tozero"}
CURVES = {  # the vertical axis of each metric
    "loss": {"title": {"text": "training loss"}},
    "held_out_loss": {"title": {"text": "held-out loss"}},
    "analogies": {"title": {"text": "analogy accuracy"}, "tickformat": ".1%"} | FROM_ZERO,
    "words_per_s": {"title": {"text": "words per second"}} | FROM_ZERO,
}
LOWER_IS_BETTER = {"loss", "held-out loss", "seconds", "host MiB", "GPU MiB"}
# Readable on white and on black.
GREY = "#808890"
COLORS = ("#2f7de1 #d9463e #0e8f7e #b26a00 #8a5cf0 #d63a8a #4d8f0e #0b87a8 #a8632a #6b7a90").split()
DASHES = ("solid", "dash", "dot")  # after all colors
LINE = {"mode": "lines+markers", "marker": {"size": 4}}
BAR = {"type": "bar", "orientation": "h"}
ROWS = {"autorange": "reversed", "automargin": True}  # the vertical axis of bars
MAPS = 4  # of the best rows
MAP_WORDS = 10_000  # the most frequent ones
LANDMARKS = 1000  # words that t-SNE places; the others are placed among them: 2 s in place of 30
NEAR_LANDMARKS = 5
SHARPNESS = 10.0  # of their weights
GROUPS = 8  # by k-means
PERPLEXITY = 20.0
TSNE_STEPS = 500  # half of the default: the divergence is 2 % greater
NEIGHBOR_BYTES = 2**26  # of all vectors of a page, a byte for each number
# Where a name may be beside its dot: from it in points, and which end of the name is there.
ENDS = (3, "left"), (-3, "right")
SIDES = (1, "bottom"), (-1, "top")


class ReportError(ValueError):
    """A page or map that cannot be made; one line with the remedy."""


def write(paths: Iterable[str | Path], to: str | Path | None = None, with_map: bool = True) -> Path:
    """Write the page and return its path.

    Args:
        paths: Run folders, folders of run folders, or "latest"; runs may be unfinished. Or files
            of vectors, whose words the page shows.
        to: The file, or a folder for report.html; by default in the run folder, or beside
            several runs in the folder "pictures", or beside the first file of vectors.
        with_map: Whether words have places on a map, which takes seconds.
    """
    paths = list(paths)
    if files := {path.name: path for path in map(Path, paths) if path.is_file()}:
        if len(files) < len(paths):
            one = next(iter(files))
            raise ReportError(
                f"{one} is a file of vectors; give only such files, of different names"
            )
        first = Path(paths[0])
        file = runs.picture_path([first.parent], f"{first.name}.html", to)
        return write_page(Comparison([], {}, []), file, file.parent, with_map, files)
    folders = runs.find_all(paths, "metrics.jsonl")
    file = runs.picture_path(folders, "report.html", to)
    shared = file.parent
    if to is None:
        shared = folders[0].parent
    compared = Comparison.of([runs.read(folder) for folder in folders])
    return write_page(compared, file, shared, with_map)


def write_page(
    compared: Comparison,
    file: Path,
    shared: Path,
    with_map: bool = True,
    files: Mapping[str, Path] | None = None,
) -> Path:
    """Write the page of runs, and plotly's script into `shared`.

    files: Vectors by name; by default those of the best rows.
    """
    script = _script()
    file.parent.mkdir(parents=True, exist_ok=True)
    shown = shared / SCRIPT
    if not shown.is_file() or shown.stat().st_size != script.stat().st_size:
        with atomic_path(shown) as part:
            shutil.copyfile(script, part)
    rows = compared.rows
    corpora = sorted({row.settings["corpus.path"] for row in rows})
    maps = _maps(files or _best_vectors(rows), with_map)
    words = file.with_suffix(".js")
    if maps:
        atomic_write(words, f"showWords({json.dumps(maps, separators=(',', ':'))});\n")
    figures = {
        "curves": [curve for metric in CURVES if (curve := _curve(rows, metric))],
        "bars": [bars for bars in (_scores(rows), _phases(rows)) if bars],
    }
    legend = (
        f'<label><input type="checkbox" checked value="{number}">{_label(number, row)}</label>'
        for number, row in enumerate(rows)
    )
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_text(f"Word vectors of {', '.join(files or corpora)}"),
        comparison=_comparison(compared) if rows else "",
        compared="" if rows else "hidden",
        legend="\n".join(legend),
        hidden="" if maps else "hidden",
        # A "<" could end the script element.
        figures=json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c"),
        plotly=quote(os.path.relpath(shown, file.parent)),
        words=f'<script src="{quote(words.name)}" defer></script>' if maps else "",
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
    """Return the table of rows, verdicts, and folded details."""
    rows, columns, verdicts = compared
    common, shown = runs.split_common(columns)
    marked = [_label(number, row) for number, row in enumerate(rows)]
    if common:
        common = f"<p>All rows: {_text(common)}.</p>"
    if len(rows) > 1 and runs.quality(rows[0].runs) > runs.UNSCORED:
        marked[0] += ' <b title="best by the mean of its scores">★</b>'
    table = {"": marked}
    figures = runs.figures(rows[0].runs[0]).keys() - {"questions"}
    for heading in sorted(shown, key=lambda heading: heading in runs.ONLY_IN_FILES):
        if heading in ("optimizer", runs.OTHERS):
            continue  # in the names of rows, and in the details
        cells = [_text(cell.replace(" +- ", " ± ")) for cell in shown[heading]]
        scored = [row for row, cell in enumerate(cells) if cell not in ("-", "diverged")]
        if heading in figures and len(scored) > 1:
            pick = min if heading in LOWER_IS_BETTER else max
            best = pick(scored, key=lambda row: float(cells[row].split()[0]))
            cells[best] = f"<b>{cells[best]}</b>"
        table[heading] = cells
    found = [run for row in rows for run in row.runs]
    details = _sections(rows)
    if len(found) > 1:
        alone = runs.table([Row(run.settings, [run]) for run in found], tested=False)
        alone.pop(runs.OTHERS, None)
        each = {"run": [run.folder.absolute().name for run in found]} | alone
        details += _folded("each run", _table({key: map(_text, each[key]) for key in each}))
    details += _folded("settings", "".join(map(_details, found)))
    lines = "".join(f"<li>{_text(line)}</li>" for line in verdicts)
    return f"{common}{_table(table)}<ul>{lines}</ul>{details}"


def _sections(rows: Sequence[Row]) -> str:
    """Return scores of the sections that any run has counted, folded."""
    counted: dict[str, dict[str, list[float]]] = {}  # accuracies by section and row
    for row in rows:
        for run in row.runs:
            for part in run.scores["analogies"]["sections"]:
                if part["counted"]:
                    section = f"{part['name']}, {part['counted']:,} questions"
                    found = counted.setdefault(section, {}).setdefault(row.name, [])
                    found.append(100 * (part["accuracy"] or 0))
    if not counted:
        return ""
    columns = {"": [_text(section) for section in counted]}
    for row in rows:
        cells = (runs.spread(of_rows.get(row.name, []), ".1f") for of_rows in counted.values())
        columns[_text(row.name)] = list(cells)
    return _folded("sections of analogies, %", _table(columns))


def _details(run: Run) -> str:
    """Return the hardware and all settings of a run, folded."""
    lines = [runs.environment(run.folder)]
    lines += [f"{key}={value}" for key, value in run.settings.items()]
    content = f"<pre>{_text(chr(10).join(lines).strip())}</pre>"
    return _folded(f"settings of {_text(run.folder.absolute().name)}", content)


def _curve(rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """Return plotly's figure of a metric, by words and by seconds, or {}."""
    traces: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if not (curve := runs.mean_curve(row.runs, metric)):
            continue
        points = {key: [float(f"{value:.6g}") for value in curve[key]] for key in curve}
        color = COLORS[number % len(COLORS)]
        dash = DASHES[number // len(COLORS) % len(DASHES)]
        line = {"color": color, "dash": dash, "width": 1.5 + 1.5 * (number == 0)}
        x = {axis: points[axis] for axis in ("words", "seconds")}
        trace = {"name": _text(row.name), "line": line, "y": points["mean"]}
        traces.append(LINE | trace | {"meta": x | {"row": number}})
        if len(row.runs) > 1:
            # Along the highest values, and back along the lowest ones.
            around = {axis: at + at[::-1] for axis, at in x.items()}
            y = points["high"] + points["low"][::-1]
            band = {"y": y, "meta": around | {"row": number}, "hoverinfo": "skip"}
            traces.append(band | {"fill": "toself", "fillcolor": f"{color}33", "mode": "none"})
    if not any(len(set(trace["meta"]["words"])) > 1 for trace in traces):
        return {}
    return {"data": traces, "layout": {"yaxis": CURVES[metric]}}


def _scores(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plotly's bars of scores with 95 % intervals over items, or {}."""
    traces: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        sets, values, low, high = [], [], [], []
        for heading, ends in row.intervals.items():
            scale = 100 / runs.SCALES.get(heading[-1:], 1)
            sets.append(_text(heading.removesuffix(" %")))
            values.append(100 * float(np.nanmean(row.items[heading])))
            low.append(values[-1] - scale * ends[0])
            high.append(scale * ends[1] - values[-1])
        error = {"array": high, "arrayminus": low, "thickness": 1.5, "width": 4, "color": GREY}
        marker = {"color": COLORS[number % len(COLORS)]}
        trace = {"name": _text(row.name), "x": values, "y": sets, "meta": {"row": number}}
        traces.append(BAR | trace | {"error_x": error, "marker": marker})
    layout = {"barmode": "group", "height": 150 + 18 * sum(len(trace["x"]) for trace in traces)}
    return _bars(traces, "% right, 100 x correlation; 95 % intervals", layout)


def _phases(rows: Sequence[Row]) -> dict[str, Any]:
    """Return plotly's bars of the recorded seconds of phases, or {}."""
    seconds: dict[str, dict[str, float]] = {}  # by phase and row
    for row in rows:
        for line in row.runs[0].metrics:
            if line["phase"]:
                seconds.setdefault(line["phase"], {})[_text(row.name)] = line["seconds"] or 0
    traces = [
        BAR | {"name": _text(phase), "x": list(of_rows.values()), "y": list(of_rows)}
        for phase, of_rows in seconds.items()
    ]
    layout = {"barmode": "stack", "showlegend": True, "height": 200 + 30 * len(rows)}
    return _bars(traces, "seconds of the command", layout)


def _bars(traces: list[dict[str, Any]], title: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the figure of bars, or {} if there is none."""
    if not any(trace["x"] for trace in traces):
        return {}
    axes = {"xaxis": {"title": {"text": title}}, "yaxis": ROWS}
    return {"data": traces, "layout": layout | axes}


def _best_vectors(rows: Sequence[Row]) -> dict[str, Path]:
    """Return a run with vectors of each of the best rows, by the row's name."""
    saved: dict[str, Path] = {}
    for row in rows:
        with_vectors = [run.folder for run in row.runs if (run.folder / "vectors.kv").exists()]
        if with_vectors and len(saved) < MAPS:
            saved[row.name] = with_vectors[0]
    return saved


def _maps(saved: Mapping[str, Path], with_map: bool) -> list[dict[str, Any]]:
    """Return words, vectors and places of vectors by name."""
    maps: list[dict[str, Any]] = []
    for name, path in saved.items():
        kv = load.load_words(path)
        dim = kv.vectors.shape[1]
        wide_ND = kv.vectors[: NEIGHBOR_BYTES // len(saved) // dim]
        wide_ND = np.nan_to_num(wide_ND, posinf=0, neginf=0).astype(np.float32)
        largest_N1 = np.abs(wide_ND).max(axis=1, keepdims=True)
        bytes_ND = np.rint(wide_ND * (127 / np.maximum(largest_N1, 1e-30))).astype(np.int8)
        entry = {"name": name, "run": str(path), "dim": dim, "x": [], "y": [], "groups": []}
        entry |= {"words": "\n".join(kv.index_to_key), "bytes": b64encode(bytes_ND).decode()}
        with contextlib.suppress(ReportError):  # of too few words
            if with_map:
                places_N2, group_N = project(wide_ND[:MAP_WORDS])
                places = [[float(f"{place:.4g}") for place in column] for column in places_N2.T]
                entry |= {"x": places[0], "y": places[1], "groups": group_N.tolist()}
        maps.append(entry)
    return maps


def _table(columns: Mapping[str, Iterable[str]]) -> str:
    """Return cells of HTML as a table that scrolls by itself."""
    head = "".join(f"<th>{heading}</th>" for heading in columns)
    rows = zip(*columns.values(), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>{body}</table></div>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _label(number: int, row: Row) -> str:
    color = COLORS[number % len(COLORS)]
    return f'<i style="background: {color}"></i>{_text(row.name)}'


def _text(value: object) -> str:
    return html.escape(printable(str(value)))


def word_map(kv: load.Words, file: Path, words: int) -> Path:
    """Draw the most frequent words in two dimensions.

    The places are those of the report's map. Each word is a dot in the color of its group; more
    frequent words have larger names. A name is left out where it would cover one that is there.
    """
    places_N2, group_N = project(np.array(kv.vectors[:MAP_WORDS], np.float32))
    places_N2 = places_N2[:words]
    shown = kv.index_to_key[: len(places_N2)]
    figure = import_module("matplotlib.figure").Figure(figsize=(14, 14), layout="constrained")
    # Without a canvas of pixels, each question for the size of a text makes a new one: 5 ms.
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    family = {"font.family": _fonts("".join(shown))}
    with import_module("matplotlib").rc_context(family), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about each letter without a font; `_fonts` has named one
        axis = figure.subplots()
        colors = [COLORS[group] for group in group_N[:words]]
        axis.scatter(places_N2[:, 0], places_N2[:, 1], s=8, color=colors)
        axis.set(xticks=[], yticks=[])
        named = _name_dots(axis, places_N2, shown, colors)
        axis.set_title(f"the {len(shown):,} most frequent words by t-SNE; {named:,} named")
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as part:
            figure.savefig(part, dpi=120, format=file.suffix[1:] or "png")
    return file


def _fonts(text: str) -> list[str]:
    """Return matplotlib's font, and installed ones for letters that it lacks."""
    manager = import_module("matplotlib.font_manager")
    open_font = import_module("matplotlib.ft2font").FT2Font
    families = ["DejaVu Sans"]
    missing = set(map(ord, printable(text)))
    missing -= open_font(manager.findfont(families[0])).get_charmap().keys()
    # Of the files: matplotlib's own list may be older than a font.
    for path in sorted(manager.findSystemFonts()) if missing else ():
        with contextlib.suppress(RuntimeError, OSError):  # a format that it does not know
            font = open_font(path)
            if found := missing & font.get_charmap().keys():
                manager.fontManager.addfont(path)
                families.append(font.family_name)
                missing -= found
    if missing:
        letter = chr(min(missing))
        log.warning(f"map: no font has {letter!r}; install one, such as fonts-noto-cjk")
    return families


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
            min(NEAR_LANDMARKS, len(first_LD)),
            weights=lambda distance_NK: np.exp(-SHARPNESS * distance_NK**2),
        )
        places_N2 = near.fit(first_LD, places_L2).predict(unit_ND)
    places_N2[:LANDMARKS] = places_L2
    return places_N2, group_N


def _name_dots(
    axis: Any, places_N2: np.ndarray, words: Sequence[str], colors: Sequence[str]
) -> int:
    """Name dots where there is room, the first words first; count them."""
    axis.figure.draw_without_rendering()  # which sets the layout, and so the pixels of places
    taken = np.empty((0, 4))  # x0, y0, x1, y1 of each name
    for rank, (place, word, color) in enumerate(zip(places_N2, words, colors, strict=True)):
        plain = printable(word).replace("$", r"\$")  # else the mark of a formula
        text = axis.annotate(plain, place, (0, 0), textcoords="offset points")
        text.set(color=color, fontsize=max(13 - rank / 25, 8), in_layout=False)
        for (x, end), (y, side) in product(ENDS, SIDES):
            text.set(position=(x, y), ha=end, va=side)
            box = text.get_window_extent().padded(1)
            beside = (taken[:, 2] < box.x0) | (taken[:, 0] > box.x1)
            above = (taken[:, 3] < box.y0) | (taken[:, 1] > box.y1)
            if (beside | above).all():
                taken = np.vstack([taken, box.extents])
                break
        else:
            text.remove()
    return len(taken)


def write_card(folder: Path, vocab: Vocab) -> None:
    """Write README.md, the model card, into the folder of a finished run."""
    run = runs.read(folder)
    settings = run.settings
    words = len(vocab.words)
    environment = dict.fromkeys(("machine", "w2v", "commit", "python", "torch"), "unknown")
    for line in runs.environment(folder).splitlines():
        name, _, value = line.partition(" ")
        environment[name] = markup(value.replace(" |", ","))
    # Settings, scores and costs, as `w2v compare` has them, a row for each.
    columns = runs.table(runs.rows([run]), tested=False).items()
    figures = "\n".join(f"| {markup(name)} | {markup(cell)} |" for name, [cell] in columns)
    path = markup(settings["corpus.path"])
    model = {"cbow": "CBOW"}.get(settings["model.architecture"], "skip-gram")
    objectives = {"model.negative": "negative sampling", "model.hs": "hierarchical softmax"}
    by = [name for key, name in objectives.items() if settings[key]]
    card = f"""# Word vectors of {path}

{words:,} words of {settings["model.vector_size"]} dimensions, trained by {model} with \
{", ".join(by)} and {markup(settings["optimizer.name"])}.

```python
from gensim.models import KeyedVectors

vectors = KeyedVectors.load("vectors.kv")
vectors.most_similar({vocab.words[0]!r})
```

| | |
|---|---|
| text | {path}: {vocab.raw_words:,} words, {vocab.raw_types:,} distinct |
| vocabulary | {words:,} words; min_count {settings["vocab.min_count"]} |
| training | {run.scores["words"]:,} words in {run.scores["seconds"]:.1f} s |
| hardware | {environment["machine"]} |
| software | w2v {environment["w2v"]}, commit {environment["commit"]}, \
Python {environment["python"]}, torch {environment["torch"]} |
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
