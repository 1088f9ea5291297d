"""Rank against time: when the top slots of each class were visited, for one test image."""

from __future__ import annotations

import numpy as np

from spotlights.figures import new_figure
from spotlights.figures.palette import INK, colours, style
from spotlights_paper.experiments.analyses.cases import Case
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.report.picture import Picture, class_names

_WINDOW = 100
"""Ranks that the dark line averages over."""


def ranks_against_time(results: ImageResults, case: Case, *, steps: int) -> Picture:
    """A row for each layer, a panel for each class: a dot for each slot, a line for the mean of neighbouring ranks."""
    names = class_names(results, results.sources[0])
    with style():
        figure = new_figure(1.05 * len(names) + 0.6, 1.35 * len(case.layers) + 0.5)
        grid = figure.subplots(len(case.layers), len(names), squeeze=False, sharex=True, sharey=True)
        for line, layer in zip(grid, case.layers, strict=True):
            tints = colours(list(range(len(names))))
            for axes, visited, tint in zip(line, layer.top_steps[0], tints, strict=True):
                visited = visited[visited >= 0]
                ranks, width = np.arange(1, len(visited) + 1), min(_WINDOW, max(len(visited), 1))
                axes.scatter(ranks, visited, s=2, color=tint, alpha=0.6, linewidths=0)
                mean = np.convolve(visited, np.ones(width) / width, "valid")
                axes.plot(ranks[width // 2 :][: len(mean)], mean[: len(ranks) - width // 2], color=INK, linewidth=1.4)
                axes.tick_params(labelsize=7)
            line[0].set_ylabel(f"{layer.layer}\nstep", fontsize=8)
        for axes, name in zip(grid[0], names, strict=True):
            axes.set_title(name, loc="center")
        grid[0, 0].set_ylim(0, steps)
        figure.supxlabel("rank of the slot within its class", fontsize=8)
    return Picture(
        "ranks-against-time",
        f"When the top {case.layers[0].top_steps.shape[2]} slots of each class were visited, for the image of Figure "
        f"{case.figure}: a dot for each slot, a line for the mean of {_WINDOW} neighbouring ranks.",
        figure,
    )
