"""Rank against time: when the top slots of each class were visited, for one test image."""

from __future__ import annotations

import numpy as np

from spotlights.figures import new_figure
from spotlights.figures.palette import INK, colours, style
from spotlights_paper.experiments.analyses.cases import Case
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.report.picture import Picture, class_names

_WINDOW = 25
"""Ranks that the dark line averages over."""


def ranks_against_time(results: ImageResults, case: Case, *, steps: int) -> Picture:
    """One panel for each layer behind the first: a dot for each slot, a line for the mean of neighbouring ranks."""
    layers = case.layers[1:]
    names = class_names(results, results.sources[0])
    with style():
        figure = new_figure(5.2 * len(layers), 3.5)
        grid = figure.subplots(1, len(layers), squeeze=False, sharey=True)[0]
        for axes, layer in zip(grid, layers, strict=True):
            visited = layer.top_steps[0]
            ranks = np.arange(1, visited.shape[1] + 1)
            for row, tint in zip(visited, colours(list(range(len(visited)))), strict=True):
                axes.scatter(ranks[row >= 0], row[row >= 0], s=2, color=tint, alpha=0.35, linewidths=0)
            width = min(_WINDOW, visited.shape[1])
            mean = np.convolve(visited.mean(axis=0), np.ones(width) / width, "valid")
            axes.plot(ranks[width // 2 :][: len(mean)], mean, color=INK, linewidth=1.8)
            axes.set(title=layer.layer, xlabel="rank within the class", ylim=(0, steps))
        grid[0].set_ylabel("step of the visit")
    return Picture(
        "ranks-against-time",
        f"Each dot is one of the top {layers[0].top_steps.shape[2]} slots of a class ({', '.join(names)}), for the "
        f"image of Figure {case.figure}: its rank within the class, and its step. The line is their mean.",
        figure,
    )
