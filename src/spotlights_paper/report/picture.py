"""What all figures of the report share: names, captions, class names and the colours of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spotlights.figures.palette import INK
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.experiments.registry import NAME

SHORT_NAMES = {"T-shirt/top": "T-shirt", "Ankle boot": "Boot"}
"""For class names that do not fit below a bar."""
TASK_COLOURS = {"mnist": "#0b5394", "fashion-mnist": "#d9722e"}


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, the name of its files and its caption."""

    name: str
    caption: str
    figure: Figure

    def __post_init__(self) -> None:
        if NAME.fullmatch(self.name) is None:  # it becomes a file
            raise ValueError(f"{self.name!r} is not the name of a figure")


def class_names(results: ImageResults, source: str) -> list[str]:
    return [SHORT_NAMES.get(name, name) for name in results.classes[source]]


def all_names(results: ImageResults) -> list[str]:
    """The class names of all sources, source by source."""
    return [name for source in results.sources for name in class_names(results, source)]


def task_colour(source: str) -> str:
    return TASK_COLOURS.get(source, INK)


def name_ticks(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Names on the x axis, at an angle where they are words; no ticks for an empty list."""
    slanted = any(len(name) > 3 for name in names)
    for tick in axes.set_xticks(places if len(names) else [], names, fontsize=7.5):
        if slanted:
            tick.label1.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")
