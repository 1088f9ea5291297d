"""Class × class: where each class looks, and which new classes turned the answers of old ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spotlights.figures.canvas import new_figure, say
from spotlights.figures.palette import AGAINST, FOR, INK, QUIET, style

_SIGNED = LinearSegmentedColormap.from_list("signed", [AGAINST, "#f7f7f5", FOR])
_SHARE = LinearSegmentedColormap.from_list("share", ["#ffffff", "#0b5394"])


@dataclass(frozen=True, eq=False)
class HeatMap:
    """One map: rows and columns are classes, NaN where there is nothing to say."""

    title: str
    values: Float[np.ndarray, "rows columns"]


def plot_heat_maps(
    maps: Sequence[HeatMap],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    labels: tuple[str, str],
    signed: bool,
    note: str | None = None,
) -> Figure:
    """Maps side by side, numbers in their cells where there is room.

    Args:
        rows, columns: the names of the classes.
        labels: what the rows and the columns are.
        signed: contributions, on a scale around zero for each map; otherwise shares, on one scale.
        note: what a reader must know.
    """
    cell = 0.42 if len(columns) <= 10 else 0.24
    width = (cell * len(columns) + 0.9) * len(maps) + 0.8
    with style():
        figure = new_figure(width, max(cell * len(rows), 2.0) + 1.15)
        grid = figure.subplots(1, len(maps), squeeze=False)
        largest = max((np.nanmax(np.abs(each.values)) for each in maps if np.isfinite(each.values).any()), default=1)
        smallest = min((np.nanmin(each.values) for each in maps if np.isfinite(each.values).any()), default=0)
        for index, (axes, each) in enumerate(zip(grid[0], maps, strict=True)):
            own = np.nanmax(np.abs(each.values)) if signed and np.isfinite(each.values).any() else largest
            image = axes.imshow(
                np.ma.masked_invalid(each.values),
                cmap=_SIGNED if signed else _SHARE,
                vmin=-own if signed else smallest,
                vmax=own,
                aspect="equal",
            )
            _name_cells(axes, rows if index == 0 else [], columns)
            axes.set_title(each.title)
            axes.set_xlabel(labels[1])
            if index == 0:
                axes.set_ylabel(labels[0])
            if len(columns) <= 10:
                _number_cells(axes, each.values, own, percent=not signed)
            if signed or index + 1 == len(maps):
                bar = figure.colorbar(image, ax=axes, shrink=0.75, aspect=25, pad=0.02)
                bar.outline.set_visible(False)  # type: ignore[operator]
                bar.ax.tick_params(labelsize=7)
                if not signed:
                    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        say(figure, note)
    return figure


def _name_cells(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=7.5)
    slanted = any(len(name) > 3 for name in columns)
    for tick in axes.set_xticks(range(len(columns)), columns, fontsize=7.5):
        if slanted:
            tick.label1.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
    for spine in axes.spines.values():
        spine.set_visible(False)


def _number_cells(axes: Axes, values: np.ndarray, largest: float, *, percent: bool) -> None:
    for (row, column), value in np.ndenumerate(values):
        if value == value:
            text = f"{100 * value:.0f}" if percent else f"{value:.1f}".replace("-", "−")
            strong = abs(value) > 0.6 * largest
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color="white" if strong else INK)
        else:
            axes.text(column, row, "·", ha="center", va="center", color=QUIET)
