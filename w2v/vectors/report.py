"""Write documents about runs: a model card, and an HTML page.

The page fills in the template report.html, and loads no other file. Text that comes from a run,
such as its words, is escaped.
"""

from __future__ import annotations

import contextlib
import html
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from w2v.system.files import atomic_write
from w2v.text.vocab import Vocab
from w2v.vectors import load, plots, query, runs
from w2v.vectors.datasets import RESTRICT_VOCAB
from w2v.vectors.runs import Run, markup

TEMPLATE = Path(__file__).with_suffix(".html")
Runs = Mapping[str, Run]  # by the name that is shown

MAP_WORDS = 500  # the most frequent ones
NEAR = 8  # neighbors of each word


def write(paths: Iterable[str | Path], to: str | Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        paths: Run folders, folders of run folders, or "latest"; runs may be unfinished.
        to: The file, or a folder for report.html; by default in the run folder, or beside
            several runs in the folder "pictures".
    """
    folders = runs.find_all(paths, "metrics.jsonl")
    shown = runs.read_all(folders)
    maps: list[dict[str, Any]] = []
    nearest: dict[str, list[str]] = {}  # a cell for each run with vectors, by word
    for label, run in shown.items():
        if not (run.folder / "vectors.kv").exists():
            continue
        kv = load.load_words(run.folder)
        with contextlib.suppress(plots.PlotError):  # too few words
            maps.append(_map(label, kv))
            nearest = nearest or {word: [] for word in query.example_words(kv.index_to_key)}
            for word, cells in nearest.items():
                near = "-"
                if word in kv.key_to_index:
                    near = ", ".join(other for other, _ in query.combination(kv, [word], NEAR))
                cells.append(_text(near))
    header = ["", *(_text(entry["name"]) for entry in maps)]
    rows = ([f"<b>{_text(word)}</b>", *cells] for word, cells in nearest.items())
    corpora = sorted({run.settings["corpus.path"] for run in shown.values()})
    colors = (f".b{number} {{ background: {color} }}" for number, color in enumerate(plots.COLORS))
    page = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_text(f"Word vectors of {', '.join(corpora)}"),
        comparison=_comparison(shown),
        curves=_curves(shown),
        phases=_phases(shown),
        hidden="" if maps else "hidden",
        nearest=_table(header, rows),
        # A "<" could end the script element.
        data=json.dumps(maps, separators=(",", ":")).replace("<", "\\u003c"),
        colors="\n".join(colors),
    )
    file = runs.picture_path(folders, "report.html", to)
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, page)
    return file


def _comparison(shown: Runs) -> str:
    """Return the table of settings and scores, with a column for each run."""
    compared = []
    for run in shown.values():
        settings = run.settings.items()
        own = {key: value for key, value in settings if not key.startswith(("run.", "corpus.data"))}
        compared.append(runs.Row(own, [run]))
    rows = [[_text(name), *map(_text, cells)] for name, cells in runs.table(compared).items()]
    header = ["", *_headers(shown)]
    return _table(header, rows) + _sections(shown, header) + "".join(map(_details, shown.values()))


def _sections(shown: Runs, header: Sequence[str]) -> str:
    """Return scores of the sections that any run has counted, folded."""
    counted: dict[str, dict[str, str]] = {}  # cells by section and run
    for label, run in shown.items():
        for part in run.scores["analogies"]["sections"]:
            if part["counted"]:
                score = f"{part['accuracy'] or 0:.1%} <small>of {part['counted']:,}</small>"
                counted.setdefault(part["name"], {})[label] = score
    rows = [
        [_text(name), *(cells.get(label, "-") for label in shown)]
        for name, cells in counted.items()
    ]
    if not rows:
        return ""
    return _folded("sections of analogies", _table(header, rows))


def _details(run: Run) -> str:
    """Return the hardware and all settings of a run, folded."""
    lines = [runs.environment(run.folder)]
    lines += [f"{key}={value}" for key, value in run.settings.items()]
    content = f"<pre>{_text(chr(10).join(lines).strip())}</pre>"
    return _folded(f"settings of {_text(run.folder.name)}", content)


def _curves(shown: Runs) -> str:
    """Return a drawing of each metric that a run has."""
    panels = plots.panels({label: [run] for label, run in shown.items()})
    images = [
        f'<img alt="{_text(title)}" src="data:image/svg+xml;base64,{b64encode(svg).decode()}">'
        for title, svg in panels.items()
    ]
    legend = "".join(f"<li>{header}</li>" for header in _headers(shown))
    return f'<ul class="legend">{legend}</ul><div class="panels">{"".join(images)}</div>'


def _phases(shown: Runs) -> str:
    """Return a bar of phases for each run that has recorded them."""
    taken = {
        label: {line["phase"]: line["seconds"] or 0 for line in run.metrics if line["phase"]}
        for label, run in shown.items()
    }
    longest = max(sum(phases.values()) for phases in taken.values())
    if longest <= 0:
        return ""
    names = list(dict.fromkeys(phase for phases in taken.values() for phase in phases))
    # All bars have one scale: that of the longest run fills the page.
    bars = ""
    for label, phases in taken.items():
        widths = [(names.index(phase), 100 * phases[phase] / longest) for phase in phases]
        pieces = "".join(_swatch(n, f' style="width: {width:.2f}%"') for n, width in widths)
        total = f"{_text(label)}: {sum(phases.values()):.1f} s"
        bars += f'<p>{total}</p><div class="bar">{pieces}</div>'
    rows = [
        [_swatch(n) + _text(name), *(f"{phases.get(name, 0):.2f} s" for phases in taken.values())]
        for n, name in enumerate(names)
    ]
    return f"<h2>Where the time went</h2>{bars}{_table(['', *map(_text, taken)], rows)}"


def _map(name: str, kv: load.Words) -> dict[str, Any]:
    """Return words, places from 0 to 1, groups and neighbors for the map."""
    vectors_ND = np.array(kv.vectors[:MAP_WORDS], np.float32)
    places_N2, group_N = plots.project(vectors_ND)
    low_2 = places_N2.min(0)
    places_N2 = (places_N2 - low_2) / np.maximum(places_N2.max(0) - low_2, 1e-9)
    unit_ND = query.normalize(vectors_ND)
    near_NK = np.argsort(-(unit_ND @ unit_ND.T), axis=1)[:, 1 : NEAR + 1]
    return {
        "name": name,
        "words": kv.index_to_key[:MAP_WORDS],
        "places": places_N2.round(4).tolist(),
        "groups": group_N.tolist(),
        "near": near_NK.tolist(),
    }


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return cells of HTML as a table that scrolls by itself."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{summary}</summary>{content}</details>"


def _headers(shown: Runs) -> list[str]:
    """Return the name of each run, with its color."""
    return [_swatch(number) + _text(label) for number, label in enumerate(shown)]


def _swatch(number: int, style: str = "") -> str:
    return f'<i class="b{number % len(plots.COLORS)}"{style}></i>'


def _text(value: object) -> str:
    return html.escape(str(value))


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
