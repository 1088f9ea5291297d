"""Attention per training example: how unevenly it is spread, and who gets most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import EngFormatter, MaxNLocator

from spotlights.figures.canvas import new_figure
from spotlights.figures.images import Captioned, draw_images
from spotlights.figures.palette import CLASSES, QUIET, style


@dataclass(frozen=True, eq=False)
class RankedExamples:
    """One layer: total scores over all visits, largest first, at some ranks."""

    layer: str
    rank: Int[np.ndarray, "ranks"]
    total: Float[np.ndarray, "ranks"]
    pictures: Sequence[Captioned]


def plot_examples(layers: Sequence[RankedExamples]) -> Figure:
    """One column for each layer: the curve of totals by rank, and the training images of the first ranks."""
    with style():
        figure = new_figure(3.6 * len(layers), 3.9)
        grid = GridSpec(2, len(layers), figure, height_ratios=(1.5, 1))
        for column, layer in enumerate(layers):
            axes = figure.add_subplot(grid[0, column])
            axes.plot(layer.rank, layer.total, color=CLASSES[0], linewidth=1.6)
            axes.fill_between(layer.rank, layer.total, color=CLASSES[0], alpha=0.2, linewidth=0)
            axes.axhline(0, color=QUIET, linewidth=0.8)
            axes.set_xscale("log")
            axes.set_xlim(1, layer.rank[-1])
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set_title(layer.layer)
            axes.set_xlabel("training example, by rank")
            if column == 0:
                axes.set_ylabel("total score over all visits")
            draw_images(figure.add_subplot(grid[1, column]), layer.pictures)
    return figure
