"""Attention: one scan over a memory's slots answers every question about them."""

from spotlights.attention.attention import Attention, Contributions, Spotlights
from spotlights.attention.influence import Influence
from spotlights.attention.passage_results import Passages
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Top, Totals
from spotlights.attention.suspects import Suspects

__all__ = [
    "AskTop",
    "AskTotals",
    "Attention",
    "Contributions",
    "Influence",
    "Passages",
    "Spotlights",
    "Suspects",
    "Top",
    "Totals",
]
