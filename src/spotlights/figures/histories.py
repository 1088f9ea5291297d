"""A number over the steps of training, with an area for each group of slots: who taught it, who erased it, when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from spotlights.figures.palette import INK, QUIET, Group, colours, named, plotted

_SHOWN_GROUPS = 10


@dataclass(frozen=True, eq=False)
class HistoryPanel:
    """One number of interest over the steps of training."""

    curve: Float[np.ndarray, "steps_and_one"]
    what: str
    """The name of the number."""
    edges: Float[np.ndarray, "points"] = field(default_factory=lambda: np.zeros(0))
    """After how many steps the areas are given."""
    areas: Float[np.ndarray, "groups points"] = field(default_factory=lambda: np.zeros((0, 0)))
    """What the slots of each group have added by then."""
    groups: Sequence[Group] = ()
    column: str | None = None
    note: str | None = None
    title: str = ""


def plot_history(panel: HistoryPanel, *, names: Mapping[Any, str] | None = None) -> Figure:
    """The number as a line; groups that raised it stacked upwards from the initial number, the others downwards.

    Args:
        panel: what `History.panel` gives.
        names: what to call the groups, such as `{0: "T-shirt"}`; others are called by their values.
    """
    return plotted(draw_history, panel, 8.0, 3.8, names=names)


def draw_history(axes: Axes, panel: HistoryPanel, *, names: Mapping[Any, str] | None = None) -> None:
    """Draws what `plot_history` shows on existing axes."""
    start = float(panel.curve[0])
    groups, areas = _largest(panel)
    tints = [QUIET if group == "others" else tint for group, tint in zip(groups, colours(groups), strict=True)]
    for sign in (1.0, -1.0):
        base = np.full(len(panel.edges), start)
        for group, area, tint in zip(groups, areas, tints, strict=True):
            top = base + sign * np.clip(sign * area, 0.0, None)
            label = named(group, names) if sign > 0 else None
            axes.fill_between(panel.edges, base, top, color=tint, alpha=0.75, linewidth=0.3, label=label)
            base = top
    axes.plot(np.arange(len(panel.curve)), panel.curve, color=INK, linewidth=1.3, label=panel.what)
    axes.axhline(start, color=QUIET, linewidth=0.8, linestyle=":")
    axes.set_xlim(0, max(len(panel.curve) - 1, 1))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("steps")
    axes.set_ylabel(panel.what)
    if panel.column:
        axes.legend(
            title=panel.column,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
            title_fontsize=8,
        )


def _largest(panel: HistoryPanel) -> tuple[list[Group], np.ndarray]:
    """The groups with the largest areas; all others as one."""
    groups, areas = list(panel.groups), panel.areas
    if len(groups) <= _SHOWN_GROUPS:
        return groups, areas
    size = np.abs(areas).max(axis=1)
    shown = np.sort(np.argsort(-size, kind="stable")[: _SHOWN_GROUPS - 1])
    others = np.delete(areas, shown, axis=0).sum(axis=0, keepdims=True)
    return [*(groups[i] for i in shown), "others"], np.concatenate([areas[shown], others])
