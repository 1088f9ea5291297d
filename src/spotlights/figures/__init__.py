"""Pictures of answers: results in, matplotlib figures out. The same class has the same colour everywhere.

`plot_…` makes a figure; `draw_…` draws on axes that are already there, for figures of one's own. Nothing here
touches pyplot, so figures can be made in threads and on machines without a display.
"""

from spotlights.errors import SettingError

try:
    import matplotlib  # noqa: F401  (asked first, to say what to install)
except ImportError:
    raise SettingError("Figures need matplotlib: pip install 'spotlights[figures]'.") from None

from spotlights.figures.attention import (
    draw_top,
    draw_totals,
    plot_attention,
    plot_top,
    plot_totals,
)
from spotlights.figures.canvas import new_figure, save
from spotlights.figures.explanation import Explanation, LayerExplanation, explain
from spotlights.figures.images import Captioned, ImageOf, draw_image, draw_images
from spotlights.figures.page import plot_explanation
from spotlights.figures.suspects import plot_suspects

__all__ = [
    "Captioned",
    "Explanation",
    "ImageOf",
    "LayerExplanation",
    "draw_image",
    "draw_images",
    "draw_top",
    "draw_totals",
    "explain",
    "new_figure",
    "plot_attention",
    "plot_explanation",
    "plot_suspects",
    "plot_top",
    "plot_totals",
    "save",
]
