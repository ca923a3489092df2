"""Write an HTML page about runs: scores, curves, phases, words, a map.

The page is one file and loads nothing. What comes from a run, words above all, is escaped.
"""

from __future__ import annotations

import html
import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import atomic_write
from w2v.vectors import load, plots, query, runs
from w2v.vectors.runs import Run

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

Runs = Mapping[str, Run]  # by the name that is shown

MAP_WORDS = 500  # the most frequent ones
NEAR = 8  # neighbours of each word


def write(paths: Iterable[str | Path], to: str | Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
        paths: Run folders, folders of run folders, or "latest"; runs may be unfinished.
        to: The file, or a folder for report.html; by default in the run folder, or beside
            several runs in the folder "pictures".
    """
    folders = runs.find_all(paths, "metrics.jsonl")
    names = [folder.name for folder in folders]
    labels = names if len(set(names)) == len(names) else map(str, folders)
    shown = {label: runs.read(folder) for label, folder in zip(labels, folders, strict=True)}
    maps: list[dict[str, Any]] = []
    nearest: dict[str, list[str]] = {}  # asked word -> a cell for each run with vectors
    for label, run in shown.items():
        if (run.folder / "vectors.kv").exists():
            kv = load.load(run.folder)
            nearest = nearest or {word: [] for word in query.telling(kv.index_to_key)}
            for word, cells in nearest.items():
                cells.append(_neighbours(kv, word))
            maps.append(_map(label, kv))
    header = ["", *(_text(entry["name"]) for entry in maps)]
    rows = ([f"<b>{_text(word)}</b>", *cells] for word, cells in nearest.items())
    corpora = sorted({str(run.settings["corpus.path"]) for run in shown.values()})
    page = PAGE.substitute(
        title=_text(f"Word vectors of {', '.join(corpora)}"),
        comparison=_comparison(shown),
        curves=_curves(shown),
        phases=_phases(shown),
        vectors=VECTORS.substitute(nearest=_table(header, rows)) if maps else "",
        # A "<" could end the script element.
        data=json.dumps(maps, separators=(",", ":")).replace("<", "\\u003c"),
        style=STYLE,
        script=SCRIPT,
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
    parts = [run.scores.get("analogies", {}).get("sections", []) for run in shown.values()]
    by_name = [{part["name"]: part for part in of_run} for of_run in parts]
    rows = [
        [_text(name), *(_share(each.get(name)) for each in by_name)]
        for name in dict.fromkeys(name for each in by_name for name in each)
    ]
    counted = [row for row in rows if set(row[1:]) != {"-"}]
    return _folded("sections of analogies", _table(header, counted)) if counted else ""


def _details(run: Run) -> str:
    """Return the hardware and all settings of a run, folded."""
    environment = run.folder / "env.txt"
    lines = [environment.read_text(encoding="utf-8")] if environment.exists() else []
    lines += [f"{key}={value}" for key, value in run.settings.items()]
    content = f"<pre>{_text(chr(10).join(lines))}</pre>"
    return _folded(f"settings of {_text(run.folder.name)}", content)


def _share(score: dict[str, Any] | None) -> str:
    if not score or not score["counted"]:
        return "-"
    return f"{score['accuracy']:.1%} <small>of {score['counted']:,}</small>"


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
        label: {line["phase"]: line["seconds"] for line in run.metrics if "phase" in line}
        for label, run in shown.items()
    }
    longest = max(sum(phases.values()) for phases in taken.values())
    if not longest:
        return ""
    names = list(dict.fromkeys(phase for phases in taken.values() for phase in phases))
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


def _neighbours(kv: KeyedVectors, word: str) -> str:
    if word not in kv:
        return "-"
    return _text(", ".join(near for near, _ in query.combination(kv, [word], NEAR)))


def _map(name: str, kv: KeyedVectors) -> dict[str, Any]:
    """Return words, places from 0 to 1, groups and neighbours for the map."""
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


STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1f2328; --faint: #57606a; --line: #d0d7de }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --text: #e6edf3; --faint: #9198a1; --line: #30363d } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--page); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2rem }
.wide { overflow-x: auto } table { border-collapse: collapse; overflow-wrap: normal }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; min-width: 4rem }
td:first-child { min-width: 7rem }
small, summary { color: var(--faint) }
pre { overflow-x: auto; font-size: .8rem } img { max-width: 100% }
.panels { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)) }
.panels img { width: 100% }
.legend { padding: 0; list-style: none; display: flex; flex-wrap: wrap; gap: 0 1rem }
i { display: inline-block; width: .7rem; height: .7rem; margin-right: .4rem; border-radius: 2px }
.bar { display: flex } .bar i { height: 1.2rem; margin: 0; border-radius: 0 }
form { display: flex; flex-wrap: wrap; gap: .5rem; margin-bottom: .5rem }
input, select, button { font: inherit; max-width: 100% } input { flex: 1 1 10rem; min-width: 0 }
#view { height: min(70vh, 40rem); overflow: auto; border: 1px solid var(--line); cursor: grab }
#map { position: relative } #map i { width: 7px; height: 7px; margin-right: 3px }
#map span { position: absolute; translate: -3px -50%; font-size: 13px; white-space: nowrap;
  user-select: none }
.unnamed { color: transparent } .faint { opacity: .35 }
""" + "\n".join(
    f".b{number} {{ background: {color} }}" for number, color in enumerate(plots.COLORS)
)

VECTORS = Template("""<h2>Nearest words</h2>$nearest
<h2>Map of the most frequent words</h2>
<form id="form"><select id="run" aria-label="run"></select>
<input id="find" type="search" placeholder="find a word" aria-label="find a word" list="words">
<datalist id="words"></datalist>
<button type="button" id="in" aria-label="zoom in">+</button>
<button type="button" id="out" aria-label="zoom out">&minus;</button>
<button type="button" id="all">all</button></form>
<div id="view"><div id="map"></div></div>
<p id="near" aria-live="polite">Drag to move, scroll to zoom, choose a word
to see the nearest ones on the map. Colors are groups found by k-means.</p>""")

SCRIPT = r"""
"use strict";
const get = (id) => document.getElementById(id);
const maps = JSON.parse(get("data").textContent);
if (maps.length) {
  const view = get("view");
  let map, spans, zoom, chosen, moved;

  // The chosen word first, then its neighbours, then the most frequent: first come, first named.
  function draw() {
    const first = chosen < 0 ? [] : [chosen, ...map.near[chosen]];
    const boxes = spans.map((span) => span.getBoundingClientRect()), taken = [];
    for (const n of new Set([...first, ...spans.keys()])) {
      const box = boxes[n];
      const isTaken = taken.some((other) => other.left < box.right && box.left < other.right &&
                                            other.top < box.bottom && box.top < other.bottom);
      if (!isTaken) taken.push(box);
      spans[n].classList.toggle("unnamed", isTaken);
      spans[n].classList.toggle("faint", chosen >= 0 && !first.includes(n));
    }
  }
  // Keep the point at the share (x, y) of the view where it is.
  function zoomTo(wanted, x = 0.5, y = 0.5) {
    const left = x * view.clientWidth, top = y * view.clientHeight;
    const factor = Math.min(Math.max(wanted, 1), 60) / zoom;
    const toLeft = (view.scrollLeft + left) * factor - left;
    const toTop = (view.scrollTop + top) * factor - top;
    zoom *= factor;
    get("map").style.width = get("map").style.height = 100 * zoom + "%";
    view.scrollTo(toLeft, toTop);
    draw();
  }
  function choose(n, go) {
    chosen = n;
    if (n >= 0) {
      get("near").textContent = "Nearest to " + map.words[n] + ": ";
      for (const other of map.near[n]) {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = map.words[other];
        button.onclick = () => choose(other, true);
        get("near").append(button, " ");
      }
      if (go) {
        zoomTo(Math.max(zoom, 3));
        view.scrollTo(spans[n].offsetLeft - view.clientWidth / 2,
                      spans[n].offsetTop - view.clientHeight / 2);
      }
    }
    draw();
  }
  function show(number) {
    map = maps[number];
    spans = map.words.map((word, n) => {
      const span = document.createElement("span"), dot = document.createElement("i");
      dot.className = "b" + map.groups[n];
      span.append(dot, word);
      span.style.left = 4 + 86 * map.places[n][0] + "%";
      span.style.top = 7 + 86 * map.places[n][1] + "%";
      return span;
    });
    get("map").replaceChildren(...spans);
    get("words").replaceChildren(...map.words.map((word) => new Option(word, word)));
    get("all").click();
  }
  view.onpointerdown = () => { moved = 0; };
  view.onpointermove = (event) => {
    if (!event.buttons || event.pointerType === "touch") return;  // which scrolls by itself
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    view.scrollBy(-event.movementX, -event.movementY);
  };
  view.onclick = (event) => {
    if (!(moved > 5)) choose(spans.indexOf(event.target.closest("span")), false);
  };
  view.addEventListener("wheel", (event) => {
    event.preventDefault();
    const box = view.getBoundingClientRect();
    zoomTo(zoom * Math.exp(-event.deltaY / 400), (event.clientX - box.left) / box.width,
           (event.clientY - box.top) / box.height);
  }, { passive: false });
  get("find").oninput = (event) => {
    const asked = event.target.value.trim().toLowerCase();
    const words = map.words.map((word) => word.toLowerCase());
    const exact = words.indexOf(asked);
    const found = exact >= 0 ? exact : words.findIndex((word) => asked && word.startsWith(asked));
    if (asked && found < 0) get("near").textContent = "Not among the words on the map.";
    choose(found, true);
  };
  get("form").onsubmit = (event) => event.preventDefault();
  get("run").replaceChildren(...maps.map((one, number) => new Option(one.name, number)));
  get("run").hidden = maps.length === 1;
  get("run").onchange = (event) => show(+event.target.value);
  get("in").onclick = () => zoomTo(zoom * 1.5);
  get("out").onclick = () => zoomTo(zoom / 1.5);
  get("all").onclick = () => { chosen = -1; zoom = 1; zoomTo(1); };
  window.addEventListener("resize", draw);
  show(0);
}
"""

PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>$style</style></head><body>
<h1>$title</h1>
$comparison
<h2>Curves</h2>$curves
$phases
$vectors
<script type="application/json" id="data">$data</script>
<script>$script</script>
</body></html>
""")
