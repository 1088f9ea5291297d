"""Questions about a memory: plans over its slots, run by an engine."""

from spotlights.query.attention import Attention, Spotlights
from spotlights.query.contributions import Contributions
from spotlights.query.history import History
from spotlights.query.influence import Influence
from spotlights.query.measured import AskTop, AskTotals

__all__ = [
    "AskTop",
    "AskTotals",
    "Attention",
    "Contributions",
    "History",
    "Influence",
    "Spotlights",
]
