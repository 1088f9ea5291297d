"""The paper's Figures 1 and 2, drawn from the last layer of a real network with its real numbers."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from spotlights.figures import new_figure
from spotlights.figures.palette import AGAINST, FOR, INK, QUIET, colours, style
from spotlights_paper.experiments.analyses.cases import Case
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.pictures import Picture, draw_image


def both_forms(results: ImageResults, case: Case, *, steps: int) -> Picture:
    """The last layer as a matrix (left), and as an attention over every slot of training (right)."""
    layer = case.layers[-1]
    pushed = layer.pushed[0]
    name = results.classes[case.source][pushed.target]
    shown = [*pushed.strongest_for, *pushed.strongest_against]
    rest = pushed.logit - pushed.initial - sum(image.value for image in shown)
    rows = [
        ("W₀ x and b₀, before training", pushed.initial),
        *((f"“{image.name}”", image.value) for image in shown),
        ("all other slots of training", rest),
    ]
    with style():
        figure = new_figure(10.5, 4.2)
        figure.set_layout_engine("none")
        plane = figure.add_axes((0, 0, 1, 1))
        plane.set(xlim=(0, 100), ylim=(4, 44))
        plane.axis("off")
        below = partial(plane.text, y=13.5, ha="center", va="top", fontsize=8)
        logit = partial(plane.text, s=f"logit of {name}\n{pushed.logit:+.2f}", va="center", fontsize=10, weight="bold")
        for x, title in ((3, "Figure 1: the primal form"), (40, "Figure 2: the dual form")):
            plane.text(x, 41, title, weight="bold", color=INK, fontsize=11)
        _draw_image(plane, case.pixels, case.label, (3, 17), 9)
        below(x=7.5, s=f"the network's input;\nx: what reaches\n{layer.layer}")
        _box(plane, (16, 17, 9, 9), f"W\n{layer.layer}")
        below(x=20.5, s=f"trained for {steps:,} steps,\nthen training is gone")
        _arrow(plane, (12.2, 21.5), (15.8, 21.5))
        _arrow(plane, (25.2, 21.5), (28, 21.5))
        logit(x=28.4, y=21.5)
        heights = [36 - row * 33 / len(rows) for row in range(len(rows))]
        middle = (heights[0] + heights[-1]) / 2
        for image, y in zip(shown, heights[1:], strict=False):
            _draw_image(plane, image.pixels, image.label, (41, y - 1.6), 3.4)
        for (words, value), y in zip(rows, heights, strict=True):
            line = partial(plane.text, y=y, va="center", fontsize=9)
            line(x=46, s=words)
            line(x=73, s=f"{value:+.4f}".replace("-", "−"), ha="right", color=FOR if value > 0 else AGAINST)
            _arrow(plane, (74, y), (83.5, middle), quiet=True)
        logit(x=84, y=middle)
        plane.text(59, 39, "all visits of a training image: Σ score · value", ha="center", fontsize=8, color=QUIET)
    return Picture(
        "figures-1-2",
        f"The last layer's logit of {name}, twice: as a product with the trained matrix, and as the initial part and "
        "the sum of score times value over all slots of training. Shown are the training images whose visits add most "
        "for it and against it, and the sum of all others.",
        figure,
    )


def _draw_image(plane: Axes, pixels: np.ndarray, label: int, corner: tuple[float, float], size: float) -> None:
    inner = plane.inset_axes((*corner, size, size), transform=plane.transData)
    draw_image(inner, pixels, frame=colours([label])[0])


def _box(plane: Axes, place: tuple[float, float, float, float], words: str) -> None:
    x, y, width, height = place
    plane.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.2", fill=False, edgecolor=INK))
    plane.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=10)


def _arrow(plane: Axes, start: tuple[float, float], end: tuple[float, float], *, quiet: bool = False) -> None:
    options = {"arrowstyle": "-" if quiet else "-|>", "mutation_scale": 10, "color": QUIET if quiet else INK}
    plane.add_patch(FancyArrowPatch(start, end, linewidth=0.7 if quiet else 1.1, **options))
