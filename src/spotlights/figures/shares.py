"""Attention across tasks, and accuracies under masks: bars in the colours of the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spotlights.figures.canvas import new_figure
from spotlights.figures.palette import INK, QUIET, SOURCES, style


def plot_shares(shares: Mapping[str, Mapping[tuple[str, str], float]], tasks: Sequence[str]) -> Figure:
    """How the attention of each task's test images is divided among the tasks, layer by layer.

    Args:
        shares: for each layer, by the task of the test images and the task of the training slots.
    """
    with style():
        figure = new_figure(3.0 * len(tasks) + 1.6, 2.8)
        grid = figure.subplots(1, len(tasks), squeeze=False, sharey=True)
        layers = list(shares)
        for axes, test in zip(grid[0], tasks, strict=True):
            below = np.zeros(len(layers))
            for train in tasks:
                heights = np.array([shares[layer][test, train] for layer in layers])
                axes.bar(layers, heights, 0.6, bottom=below, color=SOURCES.get(train, INK), label=train)
                for place, (height, bottom) in enumerate(zip(heights, below, strict=True)):
                    text = f"{height:.0%}"
                    axes.text(place, bottom + height / 2, text, ha="center", va="center", color="white", fontsize=8)
                below += heights
            axes.set_ylim(0, 1)
            axes.set_title(f"test images of {test}")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        grid[0, 0].set_ylabel("share of the total |score|")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, title="goes to slots of", loc="outside right upper", frameon=False, fontsize=8)
    return figure


def plot_accuracies(rows: Sequence[tuple[str, Mapping[str, float]]], tasks: Sequence[str]) -> Figure:
    """Accuracies on each task under different masks, one group of bars for each."""
    with style():
        figure = new_figure(8.6, 0.36 * len(rows) + 1.0)
        axes = figure.add_subplot()
        places = np.arange(len(rows))[::-1].astype(float)
        height = 0.8 / len(tasks)
        for index, task in enumerate(tasks):
            values = np.array([accuracies[task] for _, accuracies in rows])
            at = places + 0.4 - height * (index + 0.5)
            axes.barh(at, values, height * 0.92, color=SOURCES.get(task, INK), label=task)
            for place, value in zip(at, values, strict=True):
                axes.text(value + 0.006, place, f"{value:.1%}", va="center", fontsize=7, color=INK)
        axes.set_yticks(places, [name for name, _ in rows], fontsize=8)
        axes.set_xlim(0, 1.08)
        axes.grid(visible=False)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel("test accuracy", color=QUIET)
        figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=8)  # clear of the bars
    return figure
