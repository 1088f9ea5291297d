"""Attention: one scan over a memory's slots answers every question about them."""

from spotlights.attention.attention import Attention, Contributions, Spotlights
from spotlights.attention.questions import AskTop, AskTotals
from spotlights.attention.results import Top, Totals

__all__ = ["AskTop", "AskTotals", "Attention", "Contributions", "Spotlights", "Top", "Totals"]
