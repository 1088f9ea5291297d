"""One test image, layer by layer: the largest scores of each class, the totals, the training images.

With several tasks, each has columns of its own, on the same scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from torch import Tensor

from spotlights.attention.results import Top, Totals
from spotlights.figures.attention import Texts, draw_top, draw_totals
from spotlights.figures.canvas import new_figure
from spotlights.figures.images import Captioned, draw_images
from spotlights.figures.palette import INK, SOURCES, style


@dataclass(frozen=True, eq=False)
class Task:
    """What the classes of one task are called, and which of them to mark."""

    name: str
    names: Texts
    marks: Texts


@dataclass(frozen=True, eq=False)
class LayerPanel:
    """One layer: for each task the largest scores and the totals, and the training images."""

    name: str
    tops: Sequence[Top]
    totals: Sequence[Totals]
    pictures: Sequence[Captioned]


def plot_case(image: Captioned, panels: Sequence[LayerPanel], tasks: Sequence[Task], *, heading: str = "") -> Figure:
    """Draws one row for each layer, with the test image beside the first."""
    widths = [1.15, *(2.9 for _ in tasks), *(1.75 for _ in tasks), 2.5]
    with style():
        figure = new_figure(1.12 * sum(widths), 0.45 + 1.85 * len(panels))
        grid = GridSpec(len(panels), len(widths), figure, width_ratios=widths)
        draw_images(figure.add_subplot(grid[0, 0]), [image])
        for row, panel in enumerate(panels):
            _draw_layer(figure, grid, row, panel, tasks, last=row + 1 == len(panels))
        if heading:
            figure.suptitle(heading, x=0.01, ha="left", weight="bold", fontsize=11)
    return figure


def _draw_layer(
    figure: Figure, grid: GridSpec, row: int, panel: LayerPanel, tasks: Sequence[Task], *, last: bool
) -> None:
    count = len(tasks)
    tops, totals = [], []
    for index, task in enumerate(tasks):
        left = figure.add_subplot(grid[row, 1 + index], sharey=tops[0] if tops else None)
        right = figure.add_subplot(grid[row, 1 + count + index], sharey=totals[0] if totals else None)
        draw_top(left, panel.tops[index], names=task.names, marks=task.marks)
        draw_totals(right, panel.totals[index], names=task.names, marks=task.marks)
        for axes in (left, right):
            axes.set_ylabel("")
            axes.set_xlabel("")
            if not last:
                axes.set_xticks([])
            else:
                axes.tick_params(axis="x", labelsize=7.5)
            if index:
                axes.tick_params(axis="y", labelleft=False)
        if row == 0:
            k, colour = panel.tops[index].values.shape[2], SOURCES.get(task.name, INK) if count > 1 else INK
            of = f"{task.name}: " if count > 1 else "scores of the "
            left.set_title(f"{of}top {k} of each class", color=colour)
            right.set_title("total score", color=colour)
        tops.append(left)
        totals.append(right)
    _fit(tops, [top.values for top in panel.tops])
    _fit(totals, [total.values for total in panel.totals])
    tops[0].set_ylabel(panel.name, weight="bold", color=INK)
    pictures = figure.add_subplot(grid[row, -1])
    draw_images(pictures, panel.pictures)
    if row == 0:
        pictures.set_title("top training images")


def _fit(shared: Sequence[Axes], values: Sequence[Tensor]) -> None:
    """The scale that all tasks share has room for the largest of any."""
    shared[0].autoscale(axis="y")
    low, high = shared[0].get_ylim()
    if all(float(each.nan_to_num(0.0).min()) >= 0 for each in values):
        low = 0
    elif all(float(each.nan_to_num(0.0).max()) <= 0 for each in values):
        high = 0
    shared[0].set_ylim(low, high)
