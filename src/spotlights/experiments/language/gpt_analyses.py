"""What is asked of a GPT: passages by score and by contribution, and both levels of its retrieval."""

from __future__ import annotations

from collections.abc import Sequence

from spotlights.experiments.language.asking import before, find, passages, passages_toward
from spotlights.experiments.language.gpt import GPTSettings
from spotlights.experiments.language.paper import Query
from spotlights.experiments.language.results import LanguageResults, Table
from spotlights.experiments.language.training import TrainedLanguage
from spotlights.experiments.language.two_levels import two_levels
from spotlights.experiments.progress import stage

_SHOWN = 10
"""Passages of each table."""


def analyse_gpt(
    trained: TrainedLanguage, settings: GPTSettings, queries: Sequence[Query], *, pictures: bool
) -> LanguageResults:
    """The paper's queries, put to another network than the paper's."""
    tables, levels = [], []
    for query in queries if pictures else ():
        position = find(trained.data, query.source, query.words)
        if position is None:  # a short text may not have them
            continue
        prompt = before(trained.data, query.source, position, settings.context)
        with stage(f"the query of Table {query.table}"):
            found = [passages(trained, prompt, k=_SHOWN, kernel=kernel) for kernel in settings.kernels]
            found.append(passages_toward(trained, prompt, k=_SHOWN))
        tables.append(Table(query.table, query.words, query.source, position, [], found))
        if not levels:
            with stage("two levels of retrieval"):
                levels.append(two_levels(trained, prompt))
    return LanguageResults(tables, None, levels)
