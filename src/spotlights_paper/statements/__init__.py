"""The paper's statements as checks: section, statement in our own words, our number, and whether it holds."""

from spotlights_paper.statements import one_task, texts, two_tasks
from spotlights_paper.statements.judging import (
    FAILING_HEAD,
    HEAD,
    STATEMENTS,
    Judged,
    Statement,
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
    "Judged",
    "Statement",
    "failing",
    "judge",
    "one_task",
    "rows",
    "summary",
    "table",
    "texts",
    "two_tasks",
]
