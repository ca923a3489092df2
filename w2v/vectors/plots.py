"""Pictures as PNG, by matplotlib: the curves of runs, and a map of words. Shapes: N words, D dimensions."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gensim.models import KeyedVectors
    from matplotlib.figure import Figure
    from torch import Tensor

log = logging.getLogger("w2v")
PANELS = (
    ("loss", "loss of a positive pair", "words"),
    ("held_out_loss", "held-out loss of a positive pair", "words"),
    ("analogies", "analogies, share right", "words"),
    ("words_per_s", "words per second", "seconds"),
)
TSNE_STEPS, TSNE_EARLY = 750, 250  # steps, and those of them with attraction exaggerated
PERPLEXITY = 20.0


class PictureError(ValueError):
    """A picture that cannot be drawn; the message is one line with the remedy."""


def curves(runs: Iterable[str | Path], file: Path) -> Path:
    """Loss, speed and, where they were taken, scores over the course of runs, finished or not, from their metrics.jsonl."""
    logged = {Path(run).name: read_metrics(Path(run)) for run in runs}
    panels = [
        panel
        for panel in PANELS
        if any(line.get(panel[0]) is not None for lines in logged.values() for line in lines)
    ]
    if not panels:
        raise PictureError(
            f"metrics.jsonl of {', '.join(logged)} is empty; a line comes every run.log_seconds and at the end"
        )
    high, wide = -(-len(panels) // 2), min(len(panels), 2)
    figure = _figure(6.5 * wide, 4.5 * high + 0.2 * len(logged))
    from matplotlib.ticker import EngFormatter

    axes = list(figure.subplots(high, wide, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, (name, title, across) in zip(axes, panels, strict=False):
        for number, (run, lines) in enumerate(logged.items()):
            points = [(line[across], line[name]) for line in lines if line.get(name) is not None]
            label = run if axis is axes[0] else None
            axis.plot(
                *zip(*points, strict=True) if points else ([], []),
                color=f"C{number % 10}",
                marker=".",
                linewidth=1,
                label=label,
            )
        axis.set(ylabel=title, xlabel="raw words" if across == "words" else "seconds of training")
        axis.set_ylim(bottom=None if "loss" in name else 0)
        if across == "words":
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        if name == "words_per_s":
            axis.yaxis.set_major_formatter(EngFormatter(sep=""))
        axis.grid(alpha=0.3)
    figure.legend(loc="outside lower left")
    return _save(figure, file)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, of which the last may be half-written, and at the end the scores of a finished run."""
    try:
        whole = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        lines = [json.loads(line) for line in whole]
        if (run / "scores.json").exists():
            scores = json.loads((run / "scores.json").read_text(encoding="utf-8"))
            final = {key: scores.get(key) for key in ("words", "seconds", "held_out_loss")}
            lines.append(
                final | {"analogies": scores.get("analogies", {}).get("total", {}).get("accuracy")}
            )
        return lines
    except (OSError, ValueError) as error:
        raise PictureError(
            f"{run} has no metrics.jsonl that can be read ({error}); name run folders"
        ) from None


def word_map(kv: KeyedVectors, file: Path, words: int, method: str = "tsne") -> Path:
    """The most frequent words by meaning in two dimensions, each a dot; a name is left out where a more frequent word's stands."""
    import torch

    vectors_ND = torch.from_numpy(np.array(kv.vectors[:words], np.float32))
    if len(vectors_ND) < 4:
        raise PictureError(f"a map of {len(vectors_ND)} words shows nothing; take 4 or more")
    unit_ND = torch.nn.functional.normalize(vectors_ND - vectors_ND.mean(0))
    places_N2 = (tsne(unit_ND) if method == "tsne" else principal(unit_ND, 2)).numpy()
    figure = _figure(14, 14)
    axis = figure.subplots()
    axis.scatter(places_N2[:, 0], places_N2[:, 1], s=6, color="C0", alpha=0.5)
    axis.set_xticks([])
    axis.set_yticks([])
    how = "t-SNE of cosines" if method == "tsne" else "the first two principal components"
    with warnings.catch_warnings(record=True) as warned:  # two for each letter that the font lacks
        named = _name_dots(axis, places_N2, kv.index_to_key[:words])
        axis.set_title(
            f"the {len(places_N2):,} most frequent words by {how}; {named:,} of them named"
        )
        drawn = _save(figure, file)
    if said := list(dict.fromkeys(str(warning.message) for warning in warned)):
        remedy = "a line such as 'font.family: Noto Sans CJK JP' in a file matplotlibrc names another font"
        log.warning(f"matplotlib: {said[0]} ({len(said):,} such warnings; {remedy})")
    return drawn


def principal(values_ND: Tensor, dimensions: int) -> Tensor:
    """The first principal components: float32 [N, dimensions]; zero beyond D."""
    import torch

    left, size, _ = torch.linalg.svd(values_ND - values_ND.mean(0), full_matrices=False)
    found = (left * size)[:, :dimensions]
    return torch.nn.functional.pad(found, (0, dimensions - found.shape[1]))


def tsne(values_ND: Tensor) -> Tensor:
    """Places [N, 2] by exact t-SNE (van der Maaten and Hinton, JMLR 2008), begun from the principal components: no chance is in it."""
    import torch

    near_NN = _affinities(torch.cdist(values_ND, values_ND).square())
    place_N2 = principal(values_ND, 2)
    place_N2 = place_N2 / place_N2.std().clamp(min=1e-9) * 1e-2
    speed_N2, gain_N2 = torch.zeros_like(place_N2), torch.ones_like(place_N2)
    rate = max(
        50.0, len(values_ND) / 48
    )  # N / exaggeration / 4 (Belkina et al. 2019, arXiv 1712.04021)
    for step in range(TSNE_STEPS):
        early = step < TSNE_EARLY
        kernel_NN = 1 / (1 + torch.cdist(place_N2, place_N2).square())
        kernel_NN.fill_diagonal_(0)
        pull_NN = (near_NN * (12 if early else 1) - kernel_NN / kernel_NN.sum()) * kernel_NN
        grad_N2 = 4 * (pull_NN.sum(1, keepdim=True) * place_N2 - pull_NN @ place_N2)
        gain_N2 = torch.where(grad_N2 * speed_N2 > 0, gain_N2 * 0.8, gain_N2 + 0.2).clamp(min=0.01)
        speed_N2 = (0.5 if early else 0.8) * speed_N2 - rate * gain_N2 * grad_N2
        place_N2 = place_N2 + speed_N2
    return place_N2


def _affinities(square_NN: Tensor) -> Tensor:
    """Shares of neighbourhood, symmetric and of sum 1, with each point's width such that its perplexity is as wanted."""
    import torch

    size = len(square_NN)
    target = float(np.log(min(PERPLEXITY, (size - 1) / 3)))
    low_N1, high_N1 = torch.zeros(size, 1), torch.full((size, 1), 1e6)
    for _ in range(60):
        beta_N1 = (low_N1 + high_N1) / 2
        logit_NN = (-beta_N1 * square_NN).fill_diagonal_(-torch.inf)
        share_NN = logit_NN.softmax(1)
        entropy_N1 = torch.special.entr(share_NN).sum(1, keepdim=True)
        wide_N1 = entropy_N1 > target
        low_N1, high_N1 = (
            torch.where(wide_N1, beta_N1, low_N1),
            torch.where(wide_N1, high_N1, beta_N1),
        )
    return ((share_NN + share_NN.T) / (2 * size)).clamp(min=1e-12)


def _name_dots(axis: Any, places_N2: np.ndarray, words: list[str]) -> int:
    """Write words beside their dots where there is room, the first first; gives how many."""
    renderer, taken = axis.figure.canvas.get_renderer(), np.empty((0, 4))
    axis.figure.draw_without_rendering()  # so that places on the picture are known
    for place, word in zip(places_N2, words, strict=True):
        text = axis.annotate(
            word.replace("$", r"\$"), place, xytext=(2, 1), textcoords="offset points", fontsize=8
        )
        box = text.get_window_extent(renderer).padded(1)
        free = (
            (taken[:, 2] < box.x0)
            | (taken[:, 0] > box.x1)
            | (taken[:, 3] < box.y0)
            | (taken[:, 1] > box.y1)
        )
        if free.all():
            taken = np.vstack([taken, [box.x0, box.y0, box.x1, box.y1]])
        else:
            text.remove()
    return len(taken)


def _figure(width: float, height: float) -> Figure:
    """In inches, without a window."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError(
            "pictures need the package matplotlib, which cannot be imported; pip install matplotlib"
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, file: Path) -> Path:
    if file.is_dir():
        raise PictureError(f"{file} is a folder; name a file, such as {file / 'picture.png'}")
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.part")
    figure.savefig(aside, dpi=120, format="png")
    os.replace(aside, file)
    return file
