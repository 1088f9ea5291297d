"""What all figures share: images with captions, names of classes, colours of tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spotlights.figures.palette import INK, QUIET

SHORT_NAMES = {"T-shirt/top": "T-shirt", "Ankle boot": "Boot"}
"""For class names that do not fit below a bar."""
TASK_COLOURS = {"mnist": "#0b5394", "fashion-mnist": "#d9722e"}


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure, the name of its files and its caption."""

    name: str
    caption: str
    figure: Figure


def class_names(classes: Mapping[str, Sequence[str]], source: str) -> list[str]:
    """Short names of the classes of a source; `classes` has those of every source."""
    return [SHORT_NAMES.get(name, name) for name in classes[source]]


def all_names(classes: Mapping[str, Sequence[str]]) -> list[str]:
    """Short names of all classes, source by source."""
    return [name for source in classes for name in class_names(classes, source)]


def task_colour(source: str) -> str:
    return TASK_COLOURS.get(source, INK)


def name_ticks(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Names on the x axis, at an angle where they are words; no ticks for an empty list."""
    slanted = any(len(name) > 3 for name in names)
    for tick in axes.set_xticks(places if len(names) else [], names, fontsize=7.5):
        if slanted:
            tick.label1.set(rotation=45, horizontalalignment="right", rotation_mode="anchor")


# -- images with captions ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Captioned:
    """An image with a text above and below it, and the colour of its frame."""

    pixels: Shaped[np.ndarray, "height width"]
    above: str
    below: str
    frame: str = QUIET


ImageOf = Callable[[int], np.ndarray]
"""From an example's id to its pixels, height × width; large is ink."""


def draw_image(axes: Axes, pixels: Shaped[np.ndarray, "height width"], *, frame: str = QUIET) -> None:
    """Draws one image, each pixel a square, in a frame of some colour."""
    axes.imshow(pixels, cmap="gray_r", interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set(visible=True, color=frame, linewidth=2.0)


def draw_images(axes: Axes, images: Sequence[Captioned], *, across: int | None = None) -> None:
    """Draws images in a row with their captions; the row fills the axes, or has room for `across` images."""
    axes.axis("off")
    axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[])
    width = 1 / max(across or len(images), 1)
    for index, image in enumerate(images):
        middle = (index + 0.5) * width
        inset = axes.inset_axes((index * width + 0.02, 0.27, width - 0.04, 0.60))
        draw_image(inset, image.pixels, frame=image.frame)
        axes.text(middle, 0.91, image.above, ha="center", va="bottom", weight="bold")
        axes.text(middle, 0.22, image.below, ha="center", va="top", fontsize=7.5, color=QUIET, linespacing=1.4)
