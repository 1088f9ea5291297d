"""What a language run found, as its folder keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotlights.attention.passage_results import Passages
from spotlights.experiments.language.evaluation import Evaluation
from spotlights.experiments.language.two_levels import TwoLevels


@dataclass(frozen=True)
class Table:
    """One query of the paper, answered with each kernel."""

    number: int
    """As the paper numbers its tables."""
    query: str
    source: str
    """Which text it is from: "test" or "train"."""
    position: int
    """Of its last token."""
    papers: list[str]
    """The paper's own passages, as far as they are known here."""
    ours: list[Passages]
    """One for each kernel."""


@dataclass(frozen=True)
class LanguageResults:
    """Every analysis of one run."""

    tables: list[Table] = field(default_factory=list)
    evaluation: Evaluation | None = None
    two_levels: list[TwoLevels] = field(default_factory=list)
    """Of a GPT."""
