"""One palette and one typeface for every picture: the same class or sign always looks the same.

Figures are made outside pyplot's global state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

Group = int | float | str | None
"""The value of a column that slots are grouped by."""

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

FOR, AGAINST = "#00706b", "#c05a00"
"""What speaks for an answer, and what speaks against it. Also told apart by the side of zero they are on."""

INK, QUIET, FAINT = "#1f2328", "#6b7280", "#e5e7eb"
"""Text; secondary text; grids and frames."""

MARK = "#ffe082"
"""Behind a token that is attended to."""

CAUTION = "#9a3412"
"""Notes about how far a number can be trusted."""

DPI = 150
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
    "text.parse_math": False,  # a name with $ is a name
    "pdf.fonttype": 42,  # text stays text
    "hatch.linewidth": 0.6,
}


@contextmanager
def style() -> Iterator[None]:
    """Spotlights' typeface and lines, for what is drawn inside; the user's own style comes back afterwards."""
    with matplotlib.rc_context(_STYLE):
        yield


def colours(groups: Sequence[Group]) -> list[str]:
    """A colour for each group: whole numbers get the colour of that class, other groups the colours in their order."""
    numbers = [group if isinstance(group, int) else position for position, group in enumerate(groups)]
    tints = [CLASSES[number % len(CLASSES)] for number in numbers]
    return [QUIET if group is None else tint for group, tint in zip(groups, tints, strict=True)]


def sign_colours(values: Sequence[float]) -> list[str]:
    """For or against, for each value."""
    return [FOR if value >= 0 else AGAINST for value in values]


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, with a layout that keeps labels apart."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)  # type: ignore[union-attr]
    return figure


def plotted(draw: Callable[..., None], panel: Any, width: float, height: float, **options: Any) -> Figure:
    """A figure with one panel on it, its title above and its note below."""
    with style():
        figure = new_figure(width, height)
        axes = figure.add_subplot()
        draw(axes, panel, **options)
        axes.set_title(panel.title)
        add_note(figure, panel.note)
    return figure


def named(group: Group, names: Mapping[Any, str] | None) -> str:
    """What to call a group: by its name, or by its value."""
    return (names or {}).get(group, "none" if group is None else str(group))


def add_note(figure: Figure, note: str | None) -> None:
    """Writes a caution below a figure."""
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, fontstyle="italic", color=CAUTION)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure in the format of the path's suffix (.png at 150 dpi, .pdf, .svg); creates its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path)
    return path
