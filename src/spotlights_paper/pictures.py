"""Images with captions, and pages of suspicious training examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spotlights.figures.palette import AGAINST, QUIET, new_figure, style

_ACROSS = 10


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


def suspect_picture(
    pixels: np.ndarray, label: str | None, answer: str | None, example: object, suspicion: float
) -> Captioned:
    """One suspect: its label above, the network's answer below, a coloured frame where the two differ."""
    below = f"says {answer or '–'}\n{example} · {suspicion:.4g}"
    return Captioned(pixels, label or "", below, AGAINST if answer is not None and answer != label else QUIET)


def plot_suspects(pictures: Sequence[Captioned]) -> Figure:
    """Draws pictures, which `suspect_picture` makes, ten in a row."""
    lines = [pictures[start : start + _ACROSS] for start in range(0, len(pictures), _ACROSS)]
    with style():
        figure = new_figure(11.0, 1.75 * max(len(lines), 1) + 0.4)
        grid = figure.subplots(max(len(lines), 1), 1, squeeze=False)
        for axes, line in zip(grid[:, 0], lines, strict=False):
            draw_images(axes, line, across=_ACROSS)
        grid[0, 0].set_title("training examples that the network kept disagreeing with: label above, answer below")
    return figure
