"""Attention over training time: which steps the largest scores come from, and how much each stretch gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from spotlights.figures.canvas import new_figure
from spotlights.figures.palette import CLASSES, INK, QUIET, SOURCES, colours, style


@dataclass(frozen=True, eq=False)
class CaseTimeline:
    """One layer and one test image."""

    layer: str
    step: Int[np.ndarray, "k"]
    score: Float[np.ndarray, "k"]
    label: Int[np.ndarray, "k"]
    second_task: Int[np.ndarray, "k"]
    """1 for slots of the second task, drawn as other marks."""
    starts: Float[np.ndarray, "bins"]
    totals: Float[np.ndarray, "bins"]


@dataclass(frozen=True, eq=False)
class Timeline:
    """One layer and the test images of one task: shares of the total |score|."""

    layer: str
    source: str
    starts: Float[np.ndarray, "bins"]
    share: Float[np.ndarray, "bins"]
    spread: Float[np.ndarray, "bins"]


def plot_case_over_time(
    timelines: Sequence[CaseTimeline], *, steps: int, switch: int | None, names: dict[int, str]
) -> Figure:
    """One column for each layer: above, the top slots by step; below, the totals of stretches of steps."""
    with style():
        figure = new_figure(3.6 * len(timelines), 4.3)
        grid = figure.subplots(2, len(timelines), squeeze=False, sharex=True)
        seen: set[int] = set()
        for column, timeline in enumerate(timelines):
            above, below = grid[:, column]
            tints = np.array(colours("label", timeline.label.tolist()))
            for second, mark in ((0, "o"), (1, "^")):
                chosen = timeline.second_task == second
                above.scatter(
                    timeline.step[chosen],
                    timeline.score[chosen],
                    s=9,
                    marker=mark,
                    c=tints[chosen],
                    alpha=0.7,
                )
            seen |= set(timeline.label.tolist())
            edges = np.append(timeline.starts, steps)
            below.stairs(timeline.totals, edges, fill=True, color=CLASSES[0], alpha=0.35, linewidth=0)
            below.stairs(timeline.totals, edges, baseline=None, color=CLASSES[0], linewidth=1.4)
            below.set_xlim(0, steps)
            below.set_xlabel("step")
            above.set_title(f"{timeline.layer}: top {len(timeline.step)} slots by step")
            below.set_title("total score by step")
            for axes in (above, below):
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.yaxis.set_major_formatter(EngFormatter(sep=""))
                _mark_switch(axes, switch)
        labels = sorted(seen)
        handles = [
            Line2D([], [], marker="o", linestyle="", color=colour, label=names.get(label, str(label)))
            for label, colour in zip(labels, colours("label", labels), strict=True)
        ]
        if any((timeline.second_task == 1).any() for timeline in timelines):
            handles.append(Line2D([], [], marker="^", linestyle="", color=QUIET, label="second task"))
        in_a_row = 11 if all(len(str(handle.get_label())) <= 2 for handle in handles) else 6
        figure.legend(handles=handles, loc="outside lower center", ncols=in_a_row, frameon=False, fontsize=8)
    return figure


def plot_over_time(timelines: Sequence[Timeline], *, steps: int, switch: int | None) -> Figure:
    """One column for each layer, one line for each task's test images; the band is their spread."""
    layers = list(dict.fromkeys(timeline.layer for timeline in timelines))
    with style():
        figure = new_figure(3.6 * len(layers), 2.9)
        grid = figure.subplots(1, len(layers), squeeze=False, sharey=True)
        for axes, layer in zip(grid[0], layers, strict=True):
            for timeline in (each for each in timelines if each.layer == layer):
                edges = np.append(timeline.starts, steps)
                colour = SOURCES.get(timeline.source, INK)
                axes.stairs(timeline.share, edges, baseline=None, color=colour, linewidth=1.6, label=timeline.source)
                axes.stairs(
                    timeline.share + timeline.spread,
                    edges,
                    baseline=np.maximum(timeline.share - timeline.spread, 0),
                    fill=True,
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                )
            axes.set_xlim(0, steps)
            axes.set_title(layer)
            axes.set_xlabel("step")
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
            _mark_switch(axes, switch)
        highest = max(float((each.share + each.spread).max()) for each in timelines)
        grid[0, 0].set(ylabel="share of the total |score|", ylim=(0, 1.08 * highest))
        if len({timeline.source for timeline in timelines}) > 1:
            grid[0, 0].legend(title="test images of", frameon=False, fontsize=8, title_fontsize=8)
    return figure


def _mark_switch(axes: Axes, switch: int | None) -> None:
    if switch is not None:
        axes.axvline(switch, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
