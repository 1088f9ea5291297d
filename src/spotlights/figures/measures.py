"""The same attention measured in several ways: a row for each layer, a column for each way, bars by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from spotlights.figures.canvas import new_figure
from spotlights.figures.palette import INK, QUIET, colours, style


@dataclass(frozen=True, eq=False)
class Bars:
    """One number for each class of each task, perhaps with a spread."""

    title: str
    values: Float[np.ndarray, "tasks classes"]
    spread: Float[np.ndarray, "tasks classes"] | None = None


def plot_measures(
    rows: Sequence[tuple[str, Sequence[Bars]]], names: Sequence[str], *, tasks: Sequence[str] = ()
) -> Figure:
    """Draws bars with one colour per class; a second task's bars follow the first's after a gap.

    Args:
        rows: a layer's name and its columns.
        names: of all classes, task by task.
        tasks: what to call the tasks, if there are several.
    """
    columns = len(rows[0][1])
    wide = 2.5 if len(names) <= 10 else 4.0
    with style():
        figure = new_figure(wide * columns + 0.4, 1.65 * len(rows) + 0.8)
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for row, (layer, bars) in enumerate(rows):
            for column, each in enumerate(bars):
                axes = grid[row, column]
                places = class_places(*each.values.shape)
                axes.bar(places, each.values.reshape(-1), width=0.78, color=_tints(each.values.shape))
                if each.spread is not None:
                    axes.errorbar(
                        places,
                        each.values.reshape(-1),
                        each.spread.reshape(-1),
                        fmt="none",
                        ecolor=INK,
                        elinewidth=0.9,
                        capsize=2,
                    )
                axes.axhline(0, color=QUIET, linewidth=0.8)
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.yaxis.set_major_formatter(EngFormatter(sep=""))
                name_classes(axes, places, names if row + 1 == len(rows) else [])
                if row == 0:
                    axes.set_title(each.title)
            grid[row, 0].set_ylabel(layer, weight="bold", color=INK)
        if len(tasks) > 1:
            for axes in grid[-1]:
                axes.set_xlabel("   |   ".join(tasks), fontsize=8)
    return figure


def class_places(tasks: int, classes: int) -> Float[np.ndarray, "bars"]:
    """Where the bars of each class stand: tasks one after the other, with a gap between."""
    return np.concatenate([np.arange(classes) + task * (classes + 1.0) for task in range(tasks)])


def name_classes(axes: Axes, places: np.ndarray, names: Sequence[str]) -> None:
    """Names below the bars, slanted where they are words; none at all for an empty list."""
    if not names:
        axes.set_xticks([])
        return
    slanted = any(len(name) > 3 for name in names)
    for tick in axes.set_xticks(places, names, fontsize=7.5):
        if slanted:
            tick.label1.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")


def _tints(shape: tuple[int, int]) -> list[str]:
    tasks, classes = shape
    return colours("label", list(range(classes))) * tasks
