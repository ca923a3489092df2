"""Draw PNGs: the curves of runs, and a map of words.

matplotlib and scikit-learn are imported where they are used: that takes a second.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from w2v.system.files import atomic_path, printable
from w2v.vectors.load import Words
from w2v.vectors.query import normalize
from w2v.vectors.runs import Run, mean_curve

log = logging.getLogger("w2v")

PANELS = (  # metric, its title, and the x axis; drawn if any run has the metric
    ("loss", "training loss", "words"),
    ("held_out_loss", "held-out loss", "words"),
    ("held_out_loss", "held-out loss", "seconds"),
    ("analogies", "analogy accuracy", "seconds"),
    ("words_per_s", "words per second", "seconds"),
)
X_TITLES = {"words": "raw words", "seconds": "seconds of training"}
# Readable on white and on black, as is GREY.
COLORS = "#2f7de1 #d9463e #0e8f7e #b26a00 #8a5cf0 #d63a8a #4d8f0e #0b87a8".split()
GREY = "#808890"
PERPLEXITY = 20.0
TSNE_STEPS = 500  # half of the default: the divergence is 2 % greater
CORNERS = [  # places around a dot where its name may be: from it in points, and which end is there
    (3, 1, "left", "bottom"),
    (3, -1, "left", "top"),
    (-3, 1, "right", "bottom"),
    (-3, -1, "right", "top"),
]


class PlotError(ValueError):
    """A picture that cannot be drawn; one line with the remedy."""


def curves(runs: Mapping[str, Sequence[Run]], file: Path) -> Path:
    """Draw losses, scores and speed of runs, finished or not.

    Args:
        runs: For each label of the legend one run, or several that differ in the seed: a line
            for their mean, and a band from the lowest to the highest.
        file: PNG to write.
    """
    shown = _panels(runs)
    if not shown:
        remedy = "a line is written every run.log_seconds and at the end"
        raise PlotError(f"metrics.jsonl of {', '.join(runs)} is empty; {remedy}")
    # Two panels side by side; the last row may have a free place.
    rows = -(-len(shown) // 2)
    columns = min(len(shown), 2)
    with _one_warning():
        figure = _figure(6.5 * columns, 4.5 * rows + 0.2 * len(runs))
        for number, panel in enumerate(shown, start=1):
            axis = figure.add_subplot(rows, columns, number)
            _draw_panel(axis, runs, panel)
        corpora = {run.settings["corpus.path"] for group in runs.values() for run in group}
        figure.suptitle(_plain(f"Training on {', '.join(sorted(corpora))}"))
        handles, labels = axis.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left")
        return _save(figure, file)


def panels(runs: Mapping[str, Sequence[Run]]) -> dict[str, bytes]:
    """Return each of the curves as SVG, by title, for light and dark pages."""
    grey = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), GREY)
    grey |= dict.fromkeys(("axes.titlecolor", "xtick.color", "ytick.color", "grid.color"), GREY)
    drawn = {}
    with import_module("matplotlib").rc_context(grey), _one_warning():
        for panel in _panels(runs):
            file = io.BytesIO()
            figure = _figure(4.5, 3)
            _draw_panel(figure.subplots(), runs, panel)
            figure.savefig(file, format="svg", transparent=True)
            _, title, x = panel
            drawn[f"{title}, by {X_TITLES[x]}"] = file.getvalue()
    return drawn


def _panels(runs: Mapping[str, Sequence[Run]]) -> list[tuple[str, str, str]]:
    """Return the panels for which there is a point."""
    everything = [run for group in runs.values() for run in group]
    return [panel for panel in PANELS if any(run.curve(panel[0]) for run in everything)]


def _draw_panel(axis: Any, runs: Mapping[str, Sequence[Run]], panel: tuple[str, str, str]) -> None:
    """Draw the mean of the runs of each label, and the band of several."""
    metric, title, x = panel
    for number, (label, group) in enumerate(runs.items()):
        label = _plain(label)
        # After all colors, the same ones with other line styles.
        color = COLORS[number % len(COLORS)]
        style = ("-", "--", ":")[number // len(COLORS) % 3]
        curve = mean_curve(group, metric)
        empty = np.empty(0)  # for the legend alone
        xs = curve.get(x, empty)
        ys = curve.get("mean", empty)
        axis.plot(xs, ys, color, marker=".", linewidth=1, label=label, linestyle=style)
        if len(group) > 1 and curve:
            low, high = curve["low"], curve["high"]
            axis.fill_between(xs, low, high, color=color, alpha=0.2, linewidth=0)
    axis.set(title=title, xlabel=X_TITLES[x])
    ticker = import_module("matplotlib.ticker")
    short = ticker.EngFormatter(sep="")  # such as 10M
    axis.xaxis.set_major_formatter(short)
    if x == "seconds":
        axis.set_xscale("log")  # runs that are compared may differ tenfold
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_minor_formatter("")
        axis.xaxis.set_major_formatter("{x:g}")
    if metric == "words_per_s":
        axis.yaxis.set_major_formatter(short)
    if metric == "analogies":
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1))
    if "loss" not in metric:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def word_map(kv: Words, file: Path, words: int) -> Path:
    """Draw the most frequent words in two dimensions, by t-SNE.

    Each word is a dot in the color of its group; more frequent words have larger names. A name is
    left out where it would cover one that is there.
    """
    vectors_ND = np.array(kv.vectors[:words], np.float32)
    places_N2, group_N = project(vectors_ND)
    figure = _figure(14, 14)
    axis = figure.subplots()
    colors = [COLORS[group] for group in group_N]
    axis.scatter(places_N2[:, 0], places_N2[:, 1], s=8, color=colors)
    axis.set(xticks=[], yticks=[])
    with _one_warning():
        named = _name_dots(axis, places_N2, kv.index_to_key[:words], colors)
        shown = f"the {len(places_N2):,} most frequent words by t-SNE of cosines"
        axis.set_title(f"{shown}; {named:,} named")
        return _save(figure, file)


@contextmanager
def _one_warning() -> Iterator[None]:
    """Log the first of matplotlib's warnings of letters without a glyph."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    missing = [str(warning.message) for warning in caught if "font" in str(warning.message)]
    if missing:
        another = "'font.family: Noto Sans CJK JP' in a file matplotlibrc sets another font"
        log.warning(f"matplotlib: {missing[0]}; a line such as {another}")


def project(vectors_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places [N, 2] by t-SNE and groups [N] by k-means, of cosines.

    They are the same at each call.
    """
    if len(vectors_ND) < 4 or vectors_ND.shape[1] < 2:
        few = f"a map of {len(vectors_ND)} words of {vectors_ND.shape[1]} dimensions shows nothing"
        raise PlotError(f"{few}; take 4 words or more, of 2 dimensions or more")
    unit_ND = normalize(vectors_ND - vectors_ND.mean(0))
    perplexity = min(PERPLEXITY, (len(unit_ND) - 1) / 3)
    tsne = import_module("sklearn.manifold").TSNE(
        perplexity=perplexity, init="pca", max_iter=TSNE_STEPS, random_state=0
    )
    kinds = min(len(COLORS), len(unit_ND))
    kmeans = import_module("sklearn.cluster").KMeans(kinds, n_init=1, random_state=0)
    # On busy cores, threads wait for each other and take six times as long.
    with import_module("threadpoolctl").threadpool_limits(1):
        return tsne.fit_transform(unit_ND), kmeans.fit_predict(unit_ND)


def _name_dots(
    axis: Any, places_N2: np.ndarray, words: Sequence[str], colors: Sequence[str]
) -> int:
    """Name dots where there is room, the first words first; count them."""
    axis.figure.draw_without_rendering()  # which sets the layout, and so the pixels of places
    taken = np.empty((0, 4))  # x0, y0, x1, y1 of each name
    for rank, (place, word, color) in enumerate(zip(places_N2, words, colors, strict=True)):
        text = axis.annotate(_plain(word), place, (0, 0), textcoords="offset points")
        text.set(color=color, fontsize=max(13 - rank / 25, 8), in_layout=False)
        for x, y, end, side in CORNERS:
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


def _plain(text: str) -> str:
    """Escape control characters, and the dollar signs of formulas."""
    return printable(text).replace("$", r"\$")


def _figure(width: float, height: float) -> Any:
    """Return a figure, in inches, that needs no window."""
    make = import_module("matplotlib.figure").Figure
    figure = make(figsize=(width, height), layout="constrained")
    # Without a canvas of pixels, each question for the size of a text makes a new one: 5 ms.
    import_module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file) as part:
        figure.savefig(part, dpi=120, format=file.suffix[1:] or "png")
    return file
