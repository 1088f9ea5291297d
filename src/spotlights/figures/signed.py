"""What speaks for a logit and what against it: contributions by class, and the strongest training images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.ticker import MaxNLocator

from spotlights.figures.canvas import new_figure
from spotlights.figures.images import Captioned, draw_images
from spotlights.figures.measures import class_places, name_classes
from spotlights.figures.palette import INK, QUIET, sign_colours, style


@dataclass(frozen=True, eq=False)
class SignedPanel:
    """One layer's contributions to one logit."""

    layer: str
    target: str
    """What the logit stands for, such as "said: 3"."""
    values: Float[np.ndarray, "tasks classes"]
    total: str
    """What they add up to, in words."""
    strongest_for: Sequence[Captioned]
    strongest_against: Sequence[Captioned]


def plot_signed(panels: Sequence[SignedPanel], names: Sequence[str], *, tasks: Sequence[str] = ()) -> Figure:
    """Draws one row for each panel: bars above or below zero, then images for and against."""
    wide = 3.4 if len(names) <= 10 else 5.6
    with style():
        figure = new_figure(wide + 6.4, 1.75 * len(panels) + 0.7)
        grid = GridSpec(len(panels), 3, figure, width_ratios=(wide, 3.1, 3.1))
        for row, panel in enumerate(panels):
            axes = figure.add_subplot(grid[row, 0])
            flat = panel.values.reshape(-1)
            places = class_places(*panel.values.shape)
            axes.bar(places, flat, width=0.78, color=sign_colours(flat.tolist()))
            axes.axhline(0, color=QUIET, linewidth=0.8)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.set_ylabel(panel.layer, weight="bold", color=INK)
            axes.set_title(f"to the logit of {panel.target}: {panel.total}", fontsize=8.5, weight="normal")
            name_classes(axes, places, names if row + 1 == len(panels) else [])
            if row + 1 == len(panels) and len(tasks) > 1:
                axes.set_xlabel("   |   ".join(tasks), fontsize=8)
            for column, (images, heading) in enumerate(
                ((panel.strongest_for, "most for it"), (panel.strongest_against, "most against it")), start=1
            ):
                place = figure.add_subplot(grid[row, column])
                draw_images(place, images)
                if row == 0:
                    place.set_title(heading)
    return figure
