"""Answers: small objects that print as tables, plot, and convert to pandas and numpy."""

from spotlights.memory.files import write_whole
from spotlights.results.answers import ExampleVisits, Label, Top, Totals
from spotlights.results.forecasts import Calibration, Forecast
from spotlights.results.histories import Curve, Forgetting, Lost, Rest
from spotlights.results.pages import TablePage
from spotlights.results.passages import Hit, Passage, Passages, sentence_at
from spotlights.results.replayed import ReplayedInfluence
from spotlights.results.suspects import Suspects
from spotlights.results.table_files import check_table_file, write_rows
from spotlights.results.tables import Printable, TitledTable, build, frame, layer_named, printable, shown

__all__ = [
    "Calibration",
    "Curve",
    "ExampleVisits",
    "Forecast",
    "Forgetting",
    "Hit",
    "Label",
    "Lost",
    "Passage",
    "Passages",
    "Printable",
    "ReplayedInfluence",
    "Rest",
    "Suspects",
    "TablePage",
    "TitledTable",
    "Top",
    "Totals",
    "build",
    "check_table_file",
    "frame",
    "layer_named",
    "printable",
    "sentence_at",
    "shown",
    "write_rows",
    "write_whole",
]
