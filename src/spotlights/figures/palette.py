"""One palette and one typeface for every picture: the same class, source or sign always looks the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib

from spotlights.attention.results import Label

CLASSES = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#4d505c",
    "#92dadd",
)
"""Classes 0 to 9, told apart by colour-blind eyes too (after M. Petroff, arXiv:2107.02270; a darker 8)."""

SOURCES = {"mnist": "#0b5394", "fashion-mnist": "#d9722e", "digits": "#8f8f8f"}
"""Data sets, or tasks, by their names."""

FOR, AGAINST = "#00706b", "#c05a00"
"""What speaks for an answer, and what speaks against it. Also told apart by the side of zero they are on."""

INK, QUIET, FAINT = "#1f2328", "#6b7280", "#e5e7eb"
"""Text; what is said beside it; grids and frames."""

MARK = "#ffe082"
"""Behind a token that is attended to."""

CAUTION = "#9a3412"
"""What a reader must know before believing a number."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: pictures look the same on every machine
    "font.size": 9,
    "text.color": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 7,
    "axes.labelsize": 9,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": QUIET,
    "xtick.labelcolor": INK,
    "xtick.major.size": 0,
    "ytick.color": QUIET,
    "ytick.major.size": 0,
    "ytick.labelsize": 8,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "mathtext.default": "regular",
    "pdf.fonttype": 42,  # text stays text
    "hatch.linewidth": 0.6,
}


@contextmanager
def style() -> Iterator[None]:
    """The typeface and lines of Spotlights, for what is drawn inside; the user's own come back after it."""
    with matplotlib.rc_context(_STYLE):
        yield


def colours(column: str, groups: Sequence[Label]) -> list[str]:
    """A colour for each group of a column.

    Whole numbers get the colour of that class; known sources get their own; other groups get the colours in
    their order.
    """
    found = []
    for position, group in enumerate(groups):
        if group is None:
            found.append(QUIET)
        elif column == "source" and group in SOURCES:
            found.append(SOURCES[str(group)])
        else:
            number = group if isinstance(group, int) else position
            found.append(CLASSES[number % len(CLASSES)])
    return found


def sign_colours(values: Sequence[float]) -> list[str]:
    """For or against, for each value."""
    return [FOR if value >= 0 else AGAINST for value in values]
