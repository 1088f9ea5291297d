"""The paper's statements as checks: section, statement in our own words, our number, and whether it holds."""

from spotlights_paper.statements import one_task, texts, two_tasks  # each enters its statements
from spotlights_paper.statements.judging import (
    FAILING_HEAD,
    HEAD,
    STATEMENTS,
    Findings,
    Judged,
    failing,
    judge,
    rows,
    summary,
    table,
)

__all__ = [
    "FAILING_HEAD",
    "HEAD",
    "STATEMENTS",
    "Findings",
    "Judged",
    "failing",
    "judge",
    "one_task",
    "rows",
    "summary",
    "table",
    "texts",
    "two_tasks",
]
