"""Where the attention goes: the largest scores by group, and the totals by group."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from spotlights.attention.attention import Attention
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Label, Top, Totals
from spotlights.errors import SettingError
from spotlights.figures.canvas import new_figure, say
from spotlights.figures.palette import CLASSES, INK, QUIET, colours, sign_colours, style

Texts = Mapping[Label, str]

_MAX_BARS = 40
"""More groups than this are drawn as a line."""
_SHORT = 3
"""Longer names than this, and many of them, are set at an angle."""


# -- figures ----------------------------------------------------------------------------------


def plot_top(top: Top, query: int = 0, *, names: Texts | None = None, marks: Texts | None = None) -> Figure:
    """One query's largest values in descending order, side by side for each group.

    Args:
        top: what `top(500, per="label")` answered.
        query: which of the queries.
        names: what to call the groups, such as `{0: "T-shirt"}`; others are called by their values.
        marks: a word to set below some of the groups, such as `{6: "said"}`.
    """
    with style():
        figure = new_figure(7.5 if top.per else 5.0, 3.0)
        axes = figure.add_subplot()
        draw_top(axes, top, query, names=names, marks=marks)
        axes.set_title(_top_title(top))
        say(figure, top.note)
    return figure


def plot_totals(totals: Totals, query: int = 0, *, names: Texts | None = None, marks: Texts | None = None) -> Figure:
    """One query's totals: a bar for each group, or an area over the ranges of a binned column.

    Arguments as for `plot_top`.
    """
    with style():
        figure = new_figure(5.0, 3.0)
        axes = figure.add_subplot()
        draw_totals(axes, totals, query, names=names, marks=marks)
        axes.set_title(f"{totals.name} by {totals.column} in {totals.layer}")
        say(figure, totals.note)
    return figure


def plot_attention(
    attention: Attention,
    query: int = 0,
    *,
    per: str = "label",
    k: int = 500,
    names: Texts | None = None,
    marks: Texts | None = None,
) -> Figure:
    """One layer at a glance: the k largest scores of each group beside the totals; one scan for both."""
    top, totals = attention.ask(AskTop(k, per), AskTotals(per))
    with style():
        figure = new_figure(11.0, 3.0)
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        draw_top(left, top, query, names=names, marks=marks)
        left.set_title(_top_title(top))
        draw_totals(right, totals, query, names=names, marks=marks)
        right.set_title(f"{totals.name} by {totals.column}")
        say(figure, top.note)
    return figure


# -- on axes ----------------------------------------------------------------------------------


def draw_top(axes: Axes, top: Top, query: int = 0, *, names: Texts | None = None, marks: Texts | None = None) -> None:
    """Draws what `plot_top` shows on axes that are already there."""
    _check_query(query, len(top))
    values, slots = top.values[query].numpy(), top.slots[query].numpy()
    groups, width = values.shape
    gap = max(1.0, 0.04 * width) if groups > 1 else 0.0
    tints = colours(top.per or "", top.groups) if top.per else [CLASSES[0]]
    centres = []
    for group in range(groups):
        start = group * (width + gap)
        shown = values[group][slots[group] >= 0]
        _draw_area(axes, start + np.arange(len(shown) + 1.0), shown, tints[group])
        centres.append(start + width / 2)
    axes.set_xlim(-gap, groups * (width + gap))
    _finish_values(axes, top.what)
    if top.per:
        _name_groups(axes, np.array(centres), top.groups, names, marks)
        axes.set_xlabel(top.per)
    else:
        axes.set_xlabel("rank")


def draw_totals(
    axes: Axes, totals: Totals, query: int = 0, *, names: Texts | None = None, marks: Texts | None = None
) -> None:
    """Draws what `plot_totals` shows on axes that are already there.

    Bars of contributions are coloured by their sign, bars of scores by their group.
    """
    _check_query(query, len(totals))
    values = totals.values[query].double().numpy()
    signed = totals.what == "contribution" and not totals.absolute
    if totals.binned:
        _draw_ranges(axes, values, totals)
    elif len(values) > _MAX_BARS:
        _draw_line(axes, values, totals)
    else:
        tints = sign_colours(values.tolist()) if signed else colours(totals.column, totals.groups)
        places = np.arange(len(values))
        errors = None if totals.standard_errors is None else totals.standard_errors[query].numpy()
        axes.bar(places, values, yerr=errors, width=0.78, color=tints, ecolor=QUIET)
        axes.set_xlim(-0.7, len(values) - 0.3)
        _name_groups(axes, places, totals.groups, names, marks)
        axes.set_xlabel(totals.column)
    _finish_values(axes, totals.name)


def _draw_ranges(axes: Axes, values: np.ndarray, totals: Totals) -> None:
    starts = np.array(totals.groups, dtype=float)
    width = starts[1] - starts[0] if len(starts) > 1 else 1.0
    edges = np.append(starts, starts[-1] + width) if len(starts) else np.zeros(1)
    _draw_area(axes, edges, values, CLASSES[0])
    axes.set_xlim(edges[0], edges[-1] if len(edges) > 1 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(f"{totals.column} (in {len(values)} ranges)")


def _draw_area(axes: Axes, edges: np.ndarray, values: np.ndarray, tint: str) -> None:
    """A step for each value, filled down to zero."""
    heights = np.repeat(values, 2)
    places = np.repeat(edges, 2)[1:-1]
    axes.fill_between(places, heights, color=tint, alpha=0.35, linewidth=0)
    axes.plot(places, heights, color=tint, linewidth=1.4)


def _draw_line(axes: Axes, values: np.ndarray, totals: Totals) -> None:
    """Many groups: along their values if these are numbers that mean something, else sorted."""
    ordered = totals.column not in ("example", "label") and all(isinstance(g, int | float) for g in totals.groups)
    if ordered:
        places = np.array(totals.groups, dtype=float)
        axes.set_xlabel(totals.column)
    else:
        values, places = np.sort(values)[::-1], np.arange(1, len(values) + 1, dtype=float)
        axes.set_xlabel(f"{totals.column}, by rank")
    axes.plot(places, values, color=CLASSES[0], linewidth=1.2)
    axes.set_xlim(places[0], places[-1])
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(short_number))


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
    axes.yaxis.set_major_formatter(FuncFormatter(short_number))


def short_number(value: float, _position: int | None = None) -> str:
    """A number at a tick: 12k is read faster than 12000, and 1.2e-05 only where it must be."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}".replace("-", "−")
    return f"{value:.4g}".replace("-", "−")


def _name_groups(axes: Axes, places: np.ndarray, groups: list[Label], names: Texts | None, marks: Texts | None) -> None:
    called = [(names or {}).get(group, "none" if group is None else str(group)) for group in groups]
    marked = [(marks or {}).get(group, "") for group in groups]
    slanted = len(groups) > _SHORT and any(len(name) > _SHORT for name in called)
    texts = [
        f"{name} ({mark})" if mark and slanted else f"{name}\n{mark}" if mark else name
        for name, mark in zip(called, marked, strict=True)
    ]
    labels = axes.set_xticks(places, texts)
    for tick, mark in zip(labels, marked, strict=True):
        if slanted:
            tick.label1.set(rotation=40, horizontalalignment="right", rotation_mode="anchor")
        if mark:
            tick.label1.set(fontweight="bold", color=INK, fontsize=9 if slanted else 7.5)


def _top_title(top: Top) -> str:
    what = "examples" if top.by else "slots"
    each = f" of each {top.per}" if top.per else ""
    return f"{top.what}s of the top {top.values.shape[2]} {what}{each} in {top.layer}"


def _check_query(query: int, count: int) -> None:
    if not -count <= query < count:
        raise SettingError(f"query={query}: there are {count} queries, 0 to {count - 1}.")
