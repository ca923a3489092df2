"""Draw PNGs with matplotlib: the curves of runs, and a map of words."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from w2v.system.files import atomic_path
from w2v.vectors.runs import Run

if TYPE_CHECKING:
    from gensim.models import KeyedVectors

log = logging.getLogger("w2v")
PANELS = (  # metric, its title, and the x axis; drawn if any run has the metric
    ("loss", "loss of a positive pair", "words"),
    ("held_out_loss", "held-out loss of a positive pair", "words"),
    ("held_out_loss", "held-out loss of a positive pair", "seconds"),
    ("analogies", "analogies, share right", "seconds"),
    ("words_per_s", "words per second", "seconds"),
)
X_TITLES = {"words": "raw words", "seconds": "seconds of training"}
PERPLEXITY = 20.0


class PlotError(ValueError):
    """A picture that cannot be drawn; one line with the remedy."""


def curves(runs: Mapping[str, Sequence[Run]], file: Path) -> Path:
    """Draw losses, scores and speed of runs, finished or not.

    `runs` holds for each label of the legend the runs that are drawn in its color.
    """
    everything = [run for group in runs.values() for run in group]
    panels = [panel for panel in PANELS if any(run.curve(panel[0]) for run in everything)]
    if not panels:
        raise PlotError(
            f"metrics.jsonl of {', '.join(runs)} is empty; "
            "a line is written every run.log_seconds and at the end"
        )
    # Two panels side by side; the last row may have a free place.
    rows, columns = -(-len(panels) // 2), min(len(panels), 2)
    figure = _figure(6.5 * columns, 4.5 * rows + 0.2 * len(runs))
    for number, panel in enumerate(panels, start=1):
        axis = figure.add_subplot(rows, columns, number)
        _draw_panel(axis, runs, *panel)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower left")
    return _save(figure, file)


def _draw_panel(
    axis: Any, runs: Mapping[str, Sequence[Run]], metric: str, title: str, x: str
) -> None:
    for number, (label, group) in enumerate(runs.items()):
        # Ten colors, then the same ones with other lines.
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":")[number // 10 % 3]}
        for run in group:
            points = np.array(run.curve(metric, x)).reshape(-1, 2)
            axis.plot(*points.T, marker=".", linewidth=1, label=label, **style)
            label = None  # one line in the legend for all seeds
    axis.set(ylabel=title, xlabel=X_TITLES[x])
    number = _module("matplotlib.ticker").EngFormatter(sep="")
    if x == "seconds":
        axis.set_xscale("log")  # runs that are compared may differ tenfold
    else:
        axis.xaxis.set_major_formatter(number)
    if metric == "words_per_s":
        axis.yaxis.set_major_formatter(number)
    if "loss" not in metric:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def word_map(kv: KeyedVectors, file: Path, words: int, method: str = "tsne") -> Path:
    """Draw the most frequent words in two dimensions, by t-SNE or PCA.

    Each word is a dot. Its name is left out where it would cover that of a more frequent word.
    """
    vectors_ND = np.array(kv.vectors[:words], np.float32)
    if len(vectors_ND) < 4 or vectors_ND.shape[1] < 2:
        raise PlotError(
            f"a map of {len(vectors_ND)} words of {vectors_ND.shape[1]} dimensions shows nothing; "
            "take 4 words or more, of 2 dimensions or more"
        )
    places_N2 = project(vectors_ND, method)
    figure = _figure(14, 14)
    axis = figure.subplots()
    axis.scatter(*places_N2.T, s=6, color="C0", alpha=0.5)
    axis.set(xticks=[], yticks=[])
    # matplotlib warns twice of each letter that the font lacks: log one of the warnings.
    with warnings.catch_warnings(record=True) as caught:
        named = _name_dots(axis, places_N2, kv.index_to_key[:words])
        how = "t-SNE of cosines" if method == "tsne" else "the first two principal components"
        axis.set_title(f"the {len(places_N2):,} most frequent words by {how}; {named:,} named")
        _save(figure, file)
    messages = list(dict.fromkeys(str(warning.message) for warning in caught))
    if messages:
        log.warning(
            f"matplotlib: {messages[0]} ({len(messages):,} such warnings; a line such as "
            "'font.family: Noto Sans CJK JP' in a file matplotlibrc sets another font)"
        )
    return file


def project(vectors_ND: np.ndarray, method: str) -> np.ndarray:
    """Return places [N, 2] by "tsne" or "pca"; the same ones at each call."""
    unit_ND = _module("sklearn.preprocessing").normalize(vectors_ND - vectors_ND.mean(0))
    if method == "tsne":
        perplexity = min(PERPLEXITY, (len(unit_ND) - 1) / 3)
        model = _module("sklearn.manifold").TSNE(perplexity=perplexity, init="pca", random_state=0)
    else:
        model = _module("sklearn.decomposition").PCA(n_components=2, random_state=0)
    # On busy cores, threads wait for each other and take six times as long.
    with _module("threadpoolctl").threadpool_limits(1):
        return model.fit_transform(unit_ND)


def _name_dots(axis: Any, places_N2: np.ndarray, words: list[str]) -> int:
    """Name dots where there is room, the first words first; count them."""
    axis.figure.draw_without_rendering()  # which sets the layout, and so the pixels of places
    taken = np.empty((0, 4))  # x0, y0, x1, y1 of each name
    for place, word in zip(places_N2, words, strict=True):
        text = axis.annotate(
            word.replace("$", r"\$"), place, xytext=(2, 1), textcoords="offset points", fontsize=8
        )
        box = text.get_window_extent().padded(1)
        beside = (taken[:, 2] < box.x0) | (taken[:, 0] > box.x1)
        above = (taken[:, 3] < box.y0) | (taken[:, 1] > box.y1)
        if (beside | above).all():
            taken = np.vstack([taken, box.extents])
        else:
            text.remove()
    return len(taken)


def _figure(width: float, height: float) -> Any:
    """Return a figure, in inches, that needs no window."""
    return _module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _module(name: str) -> Any:
    """Import a module of the optional packages."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = "matplotlib" if name.startswith("matplotlib") else "scikit-learn"
        raise PlotError(
            f"plots need the package {package}, which cannot be imported; pip install {package}"
        ) from None


def _save(figure: Any, file: Path) -> Path:
    if file.is_dir():
        raise PlotError(f"{file} is a folder; name a file, such as {file / 'plot.png'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(file) as part:
        figure.savefig(part, dpi=120, format="png")
    return file
