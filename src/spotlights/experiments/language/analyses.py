"""What is asked of every language experiment: the paper's tables, and how good such passages are."""

from __future__ import annotations

from collections.abc import Sequence

from spotlights.experiments.language.asking import before, find, passages
from spotlights.experiments.language.evaluation import evaluate
from spotlights.experiments.language.paper import Query
from spotlights.experiments.language.results import LanguageResults, Table
from spotlights.experiments.language.settings import LanguageSettings
from spotlights.experiments.language.training import TrainedLanguage
from spotlights.experiments.progress import stage

_SHOWN = 10
"""Passages of each table."""


def analyse_language(
    trained: TrainedLanguage, settings: LanguageSettings, queries: Sequence[Query], *, pictures: bool
) -> LanguageResults:
    """The passages of some queries, and the evaluation over random ones."""
    tables = []
    with stage("single queries"):
        for query in queries if pictures else ():
            position = find(trained.data, query.source, query.words)
            if position is not None:  # a short text may not have them
                tables.append(_table(trained, settings, query, position))
    return LanguageResults(tables, evaluate(trained, settings))


def _table(trained: TrainedLanguage, settings: LanguageSettings, query: Query, position: int) -> Table:
    prompt = before(trained.data, query.source, position, settings.context)
    return Table(
        query.table,
        query.words,
        query.source,
        position,
        list(query.papers),
        [passages(trained, prompt, k=_SHOWN, kernel=kernel) for kernel in settings.kernels],
    )
