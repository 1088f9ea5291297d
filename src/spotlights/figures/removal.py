"""Removal curves: what becomes of test images when the training examples that a method ranks first are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from spotlights.figures.canvas import new_figure, say
from spotlights.figures.palette import CLASSES, FOR, QUIET, style

_COLOURS = {"influence": FOR, "random": QUIET}


@dataclass(frozen=True)
class Curve:
    """One method."""

    method: str
    dropped: Sequence[int]
    """How many training examples were left out."""
    margin: Sequence[float]
    """Mean over test images, of networks trained without them."""
    error: Sequence[float]
    """Standard error of the difference from leaving nothing out."""


def plot_removal(curves: Sequence[Curve], *, title: str, note: str | None = None) -> Figure:
    """One line for each method; the steps are evenly spaced, whatever their numbers."""
    with style():
        figure = new_figure(6.4, 3.6)
        axes = figure.add_subplot()
        for index, curve in enumerate(curves):
            colour = _COLOURS.get(curve.method, CLASSES[index % len(CLASSES)])
            places = [at + 0.03 * (index - (len(curves) - 1) / 2) for at in range(len(curve.dropped))]
            width = 2.4 if curve.method == "influence" else 1.6
            axes.errorbar(
                places, curve.margin, curve.error, color=colour, marker="o", markersize=4, linewidth=width, capsize=2
            )
            end = places[-1], curve.margin[-1]
            axes.annotate(curve.method, end, (8, 0), textcoords="offset points", va="center", color=colour)
        axes.axhline(0.0, color=QUIET, linewidth=0.8, linestyle=":")
        first = curves[0].dropped
        axes.set_xticks(range(len(first)), [f"{count:,}" for count in first])
        axes.set_xlim(-0.3, len(first) - 0.3)
        axes.set(
            xlabel="training examples left out: those that the method ranks first", ylabel="margin after retraining"
        )
        axes.set_title(title)
        say(figure, note)
    return figure
