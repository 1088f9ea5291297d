"""The largest values by group, and the totals by group: as figures, and on axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from spotlights.figures.palette import (
    CLASSES,
    INK,
    QUIET,
    Group,
    add_note,
    colours,
    named,
    new_figure,
    plotted,
    sign_colours,
    style,
)

Texts = Mapping[Any, str]
"""A word for some of the groups."""

_MAX_BARS = 40
"""More groups than this are drawn as a line."""
_SHORT = 3
"""Names longer than this are drawn at an angle where there are many of them."""


@dataclass(frozen=True, eq=False)
class TopPanel:
    """The largest values of each group, in descending order."""

    values: Float[np.ndarray, "groups k"]
    """NaN where a group has fewer than k."""
    groups: Sequence[Group]
    what: str
    """The name of a value, such as "score"."""
    column: str | None = None
    """The column whose values are the groups; None for one group of all slots."""
    title: str = ""
    note: str | None = None


@dataclass(frozen=True, eq=False)
class TotalsPanel:
    """One value for each group."""

    values: Float[np.ndarray, "groups"]
    groups: Sequence[Group]
    what: str
    """The name of a value, such as "total score"."""
    column: str
    title: str = ""
    binned: bool = False
    """The groups are the starts of equal ranges of a number."""
    signed: bool = False
    """Bars are coloured by their sign instead of by their group."""
    errors: Float[np.ndarray, "groups"] | None = None
    """Standard errors."""
    note: str | None = None


# -- figures ----------------------------------------------------------------------------------


def plot_top(panel: TopPanel, *, names: Texts | None = None, marks: Texts | None = None) -> Figure:
    """The largest values in descending order, the groups side by side.

    Args:
        panel: what `Top.panel` gives.
        names: what to call the groups, such as `{0: "T-shirt"}`; others are called by their values.
        marks: a word to put below some of the groups, such as `{6: "said"}`.
    """
    return plotted(draw_top, panel, 7.5 if panel.column else 5.0, 3.0, names=names, marks=marks)


def plot_totals(panel: TotalsPanel, *, names: Texts | None = None, marks: Texts | None = None) -> Figure:
    """A bar for each group, or an area over the ranges of a binned column. Arguments as for `plot_top`."""
    return plotted(draw_totals, panel, 5.0, 3.0, names=names, marks=marks)


def plot_attention(
    top: TopPanel, totals: TotalsPanel, *, names: Texts | None = None, marks: Texts | None = None
) -> Figure:
    """One layer at a glance: the largest values of each group beside the totals. Arguments as for `plot_top`."""
    with style():
        figure = new_figure(11.0, 3.0)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        draw_top(left, top, names=names, marks=marks)
        left.set_title(top.title)
        draw_totals(right, totals, names=names, marks=marks)
        right.set_title(f"{totals.what} by {totals.column}")
        add_note(figure, top.note)
    return figure


# -- on axes ----------------------------------------------------------------------------------


def draw_top(axes: Axes, panel: TopPanel, *, names: Texts | None = None, marks: Texts | None = None) -> None:
    """Draws what `plot_top` shows on existing axes."""
    groups, width = panel.values.shape
    gap = max(1.0, 0.04 * width) if groups > 1 else 0.0
    tints = colours(panel.groups) if panel.column else [CLASSES[0]]
    starts = np.arange(groups) * (width + gap)
    for start, values, tint in zip(starts, panel.values, tints, strict=True):
        present = values[~np.isnan(values)]
        _draw_area(axes, start + np.arange(len(present) + 1.0), present, tint)
    axes.set_xlim(-gap, groups * (width + gap))
    _finish_values(axes, panel.what)
    if panel.column:
        _name_groups(axes, starts + width / 2, panel.groups, names, marks)
    axes.set_xlabel(panel.column or "rank")


def draw_totals(axes: Axes, panel: TotalsPanel, *, names: Texts | None = None, marks: Texts | None = None) -> None:
    """Draws what `plot_totals` shows on existing axes."""
    values = panel.values.astype(float)
    if panel.binned:
        _draw_ranges(axes, values, panel)
    elif len(values) > _MAX_BARS:
        _draw_line(axes, values, panel)
    else:
        tints = sign_colours(values.tolist()) if panel.signed else colours(panel.groups)
        places = np.arange(len(values))
        axes.bar(places, values, yerr=panel.errors, width=0.78, color=tints, ecolor=QUIET)
        axes.set_xlim(-0.7, len(values) - 0.3)
        _name_groups(axes, places, panel.groups, names, marks)
        axes.set_xlabel(panel.column)
    _finish_values(axes, panel.what)


def _draw_ranges(axes: Axes, values: np.ndarray, panel: TotalsPanel) -> None:
    starts = np.array(panel.groups, dtype=float)
    width = starts[1] - starts[0] if len(starts) > 1 else 1.0
    edges = np.append(starts, starts[-1] + width) if len(starts) else np.zeros(1)
    _draw_area(axes, edges, values, CLASSES[0])
    axes.set_xlim(edges[0], edges[-1] if len(edges) > 1 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(f"{panel.column} (in {len(values)} ranges)")


def _draw_area(axes: Axes, edges: np.ndarray, values: np.ndarray, tint: str) -> None:
    """A step for each value, filled down to zero."""
    heights = np.repeat(values, 2)
    places = np.repeat(edges, 2)[1:-1]
    axes.fill_between(places, heights, color=tint, alpha=0.35, linewidth=0)
    axes.plot(places, heights, color=tint, linewidth=1.4)


def _draw_line(axes: Axes, values: np.ndarray, panel: TotalsPanel) -> None:
    """Many groups: along the numbers of an ordered column, else sorted."""
    ordered = panel.column not in ("example", "label") and all(isinstance(g, int | float) for g in panel.groups)
    if ordered:
        places = np.array(panel.groups, dtype=float)
        axes.set_xlabel(panel.column)
    else:
        values, places = np.sort(values)[::-1], np.arange(1, len(values) + 1, dtype=float)
        axes.set_xlabel(f"{panel.column}, by rank")
    axes.plot(places, values, color=CLASSES[0], linewidth=1.2)
    axes.set_xlim(places[0], places[-1])
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(_short_number))


def _finish_values(axes: Axes, name: str) -> None:
    axes.set_ylabel(name)
    axes.margins(y=0.08)
    axes.axhline(0, color=QUIET, linewidth=0.8)
    low, high = axes.get_ylim()
    if axes.dataLim.y0 >= 0:
        axes.set_ylim(0, high)
    elif axes.dataLim.y1 <= 0:
        axes.set_ylim(low, 0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(_short_number))


def _short_number(value: float, _position: int | None = None) -> str:
    """A number at a tick: 12k is read faster than 12000."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def _name_groups(
    axes: Axes, places: np.ndarray, groups: Sequence[Group], names: Texts | None, marks: Texts | None
) -> None:
    labels = [named(group, names) for group in groups]
    marked = [(marks or {}).get(group, "") for group in groups]
    slanted = len(groups) > _SHORT and any(len(label) > _SHORT for label in labels)
    texts = [
        f"{label} ({mark})" if mark and slanted else f"{label}\n{mark}" if mark else label
        for label, mark in zip(labels, marked, strict=True)
    ]
    ticks = axes.set_xticks(places, texts)
    for tick, mark in zip(ticks, marked, strict=True):
        if slanted:
            tick.label1.set(rotation=40, horizontalalignment="right", rotation_mode="anchor")
        if mark:
            tick.label1.set(fontweight="bold", color=INK, fontsize=9 if slanted else 7.5)
