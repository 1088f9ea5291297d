"""Figures that belong to nobody's global state, and how they become files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from spotlights.figures.palette import CAUTION, style

DPI = 150


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that many inches, whose labels make room for each other."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08, wspace=0.03, hspace=0.05)  # type: ignore[union-attr]
    return figure


def say(figure: Figure, note: str | None) -> None:
    """Writes what a reader must know below a figure."""
    if note:
        figure.supxlabel(note, x=0.01, ha="left", fontsize=8.5, fontstyle="italic", color=CAUTION)


def save(figure: Figure, path: str | Path) -> Path:
    """Writes the figure as the path's suffix says (.png at 150 dpi, .pdf, .svg); makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path)
    return path
