"""An audit at a glance: the pictures of suspect examples, each with its label and what the network says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from spotlights.attention.suspects import NOTE, Suspects
from spotlights.attention.tables import shown
from spotlights.figures.attention import Texts
from spotlights.figures.canvas import new_figure, say
from spotlights.figures.images import Captioned, ImageOf, draw_images
from spotlights.figures.palette import AGAINST, QUIET, style

_ACROSS = 10


def plot_suspects(
    suspects: Suspects, image_of: ImageOf, *, k: int = 50, names: Texts | None = None, label: str = "label"
) -> Figure:
    """Draws the first k suspects, ten in a row; a coloured frame where label and network disagree.

    Args:
        suspects: what `memory.suspects(k)` gave.
        image_of: gives the pixels of a training example, by its id.
        k: how many of them.
        names: what to call the classes, such as `{0: "T-shirt"}`.
        label: the column that holds the label.
    """
    called = names or {}
    pictures = []
    for row in list(suspects.rows())[:k]:
        given, said = (
            None if value is None else str(called.get(value, value)) for value in (row.get(label), row["network says"])
        )
        pictures.append(suspect_picture(image_of(int(row["example"])), given, said, row["example"], row["suspicion"]))
    return plot_suspect_pictures(pictures)


def suspect_picture(
    pixels: np.ndarray, given: str | None, said: str | None, example: object, suspicion: float
) -> Captioned:
    """One suspect: its label above, what the network says below, a coloured frame where the two differ."""
    below = f"says {said or '–'}\n{example} · {shown(suspicion)}"
    return Captioned(pixels, given or "", below, AGAINST if said is not None and said != given else QUIET)


def plot_suspect_pictures(pictures: Sequence[Captioned]) -> Figure:
    """Ten in a row."""
    lines = [pictures[start : start + _ACROSS] for start in range(0, len(pictures), _ACROSS)]
    with style():
        figure = new_figure(11.0, 1.75 * max(len(lines), 1) + 0.4)
        grid = figure.subplots(max(len(lines), 1), 1, squeeze=False)
        for axes, line in zip(grid[:, 0], lines, strict=False):
            draw_images(axes, line, across=_ACROSS)
        grid[0, 0].set_title("training examples that the network kept disagreeing with: label above, answer below")
        say(figure, NOTE)
    return figure
