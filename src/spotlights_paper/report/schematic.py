"""The paper's Figures 1 and 2, drawn from the last layer of a real network with its real numbers."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from spotlights.figures import new_figure
from spotlights.figures.palette import INK, QUIET, colours, style
from spotlights_paper.experiments.analyses.cases import Case
from spotlights_paper.experiments.analyses.results import ImageResults
from spotlights_paper.pictures import Captioned, draw_image
from spotlights_paper.report.picture import Picture

_FOR, _AGAINST = "#0b5394", "#b45309"


def both_forms(results: ImageResults, case: Case, *, steps: int) -> Picture:
    """The last layer as a matrix (left), and as an attention over every slot of training (right)."""
    layer = case.layers[-1]
    pushed = layer.pushed[0]
    name = results.classes[case.source][pushed.target]
    shown = [*pushed.strongest_for, *pushed.strongest_against]
    rest = pushed.logit - pushed.initial - sum(image.value for image in shown)
    with style():
        figure = new_figure(10.5, 4.2)
        figure.set_layout_engine("none")
        plane = figure.add_axes((0, 0, 1, 1))
        plane.set(xlim=(0, 100), ylim=(4, 44))
        plane.axis("off")
        for x, title in ((3, "Figure 1: the primal form"), (40, "Figure 2: the dual form")):
            plane.text(x, 41, title, weight="bold", color=INK, fontsize=11)
        _image(plane, Captioned(case.pixels, "", "", colours([case.label])[0]), (3, 17), 9)
        plane.text(
            7.5, 13.5, "the network's input;\nx: what reaches\n" + layer.layer, ha="center", va="top", fontsize=8
        )
        _box(plane, (16, 17, 9, 9), f"W\n{layer.layer}")
        _arrow(plane, (12.2, 21.5), (15.8, 21.5))
        _arrow(plane, (25.2, 21.5), (28, 21.5))
        plane.text(28.4, 21.5, f"logit of {name}\n{pushed.logit:+.2f}", va="center", fontsize=10, weight="bold")
        plane.text(
            20.5, 13.5, f"trained for {steps:,} steps,\nthen training is gone", ha="center", va="top", fontsize=8
        )
        top, height = 36.0, 33 / (len(shown) + 2)
        rows = [(None, "W₀ x and b₀, before training", pushed.initial)]
        rows += [
            (
                image,
                f"“{image.name}”, step {image.step:,}" if image.step is not None else f"“{image.name}”",
                image.value,
            )
            for image in shown
        ]
        rows += [(None, "all other slots of training", rest)]
        for row, (image, words, value) in enumerate(rows):
            y = top - row * height
            if image is not None:
                _image(plane, Captioned(image.pixels, "", "", colours([image.label])[0]), (41, y - 1.6), 3.4)
            plane.text(46, y, words.replace("-", "−"), va="center", fontsize=9)
            plane.text(
                73,
                y,
                f"{value:+.4f}".replace("-", "−"),
                va="center",
                ha="right",
                fontsize=9,
                color=_FOR if value > 0 else _AGAINST,
            )
        middle = top - (len(rows) - 1) * height / 2
        for row in range(len(rows)):
            _arrow(plane, (74, top - row * height), (83.5, middle), quiet=True)
        plane.text(84, middle, f"logit of {name}\n{pushed.logit:+.2f}", va="center", fontsize=10, weight="bold")
        plane.text(59, 39, "all visits of a training image: Σ score · value", ha="center", fontsize=8, color=QUIET)
    return Picture(
        "figures-1-2",
        f"The last layer's logit of {name}, twice: as a product with the trained matrix, and as the initial part and "
        "the sum of score times value over all slots of training. Shown are the training images whose visits add most "
        "for it and against it, and the sum of all others.",
        figure,
    )


def _image(plane: Axes, image: Captioned, corner: tuple[float, float], size: float) -> None:
    inner = plane.inset_axes((*corner, size, size), transform=plane.transData)
    draw_image(inner, image.pixels, frame=image.frame)


def _box(plane: Axes, place: tuple[float, float, float, float], words: str) -> None:
    x, y, width, height = place
    plane.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.2", fill=False, edgecolor=INK))
    plane.text(x + width / 2, y + height / 2, words, ha="center", va="center", fontsize=10)


def _arrow(plane: Axes, start: tuple[float, float], end: tuple[float, float], *, quiet: bool = False) -> None:
    options = {"arrowstyle": "-" if quiet else "-|>", "mutation_scale": 10, "color": QUIET if quiet else INK}
    plane.add_patch(FancyArrowPatch(start, end, linewidth=0.7 if quiet else 1.1, **options))
