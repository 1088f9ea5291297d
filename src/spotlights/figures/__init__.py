"""Pictures: arrays and words in, matplotlib figures out. The same class has the same colour everywhere.

`plot_…` makes a figure. `draw_…` draws on existing axes, for figures of your own. Nothing here touches pyplot, so
figures can be made in threads and on machines without a display. Results hand over their numbers as panels:
`top.panel(query)`, `totals.panel(query)`.
"""

from spotlights.errors import SettingError

try:
    import matplotlib  # noqa: F401  (imported first, to say what to install)
except ImportError:
    raise SettingError("Figures need matplotlib: pip install 'spotlights[figures]'.") from None

from spotlights.figures import palette
from spotlights.figures.histories import HistoryPanel, draw_history, plot_history
from spotlights.figures.palette import add_note, new_figure, save
from spotlights.figures.panels import (
    Texts,
    TopPanel,
    TotalsPanel,
    draw_top,
    draw_totals,
    plot_attention,
    plot_top,
    plot_totals,
)

__all__ = [
    "HistoryPanel",
    "Texts",
    "TopPanel",
    "TotalsPanel",
    "add_note",
    "draw_history",
    "draw_top",
    "draw_totals",
    "new_figure",
    "palette",
    "plot_attention",
    "plot_history",
    "plot_top",
    "plot_totals",
    "save",
]
