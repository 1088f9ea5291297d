"""Questions about a memory: plans over its slots, run by an engine."""

from spotlights.query.attention import Attention, Spotlights
from spotlights.query.contributions import Contributions
from spotlights.query.history import History
from spotlights.query.influence import Influence
from spotlights.query.measured import AskMeans, AskTop, AskTotals

__all__ = [
    "AskMeans",
    "AskTop",
    "AskTotals",
    "Attention",
    "Contributions",
    "History",
    "Influence",
    "Spotlights",
]
