"""The audit: training examples whose labels look wrong, and what they do to the chosen query."""

from __future__ import annotations

from typing import Any

from spotlights.attention.suspects import NOTE
from spotlights.web.data import show_example
from spotlights.web.explorer import Explorer
from spotlights.web.measured import Wanted, measured
from spotlights.web.queries import Query, output_name
from spotlights.web.subject import Subject


def audit(explorer: Explorer, query: Query | None, wanted: Wanted) -> dict[str, Any]:
    """The most suspicious examples (`memory.suspects`), each with the query's value of the wanted measure."""
    suspects = explorer.opened.memory.suspects(wanted.top)
    values: dict[Any, float] = {}
    seen = None
    if query is not None:
        seen = measured(explorer, query, wanted)
        totals = seen.totals("example")[0]
        values = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
    rows = []
    for row in suspects.rows():
        label, said = row.get("label"), row.pop("network says")
        row["says"] = said if label is not None else None  # a text has a label for each of its tokens
        row["label_name"] = _name(explorer.subject, label, row.get("source"))
        row["says_name"] = _name(explorer.subject, row["says"], row.get("source"))
        row["value"] = values.get(row["example"])
        row["shown"] = show_example(explorer, row["example"])
        rows.append(row)
    return {
        "layer": suspects.layer,
        "note": NOTE,
        "suspects": rows,
        "query": None if query is None else query.name,
        "measure": None if seen is None else wanted.measure,
        "of": None if seen is None else seen.layer,
        "target": None if seen is None else seen.target,
        "target_name": None if seen is None or query is None else _target_name(explorer.subject, query, seen.target),
        "caution": None if seen is None else seen.caution,
        "caution_note": None if seen is None else seen.note,
    }


def _target_name(subject: Subject, query: Query, target: int | None) -> str | None:
    return None if target is None else output_name(subject, query, target)


def _name(subject: Subject, number: Any, source: Any) -> str | None:
    if number is None:
        return None
    names = [] if subject.class_names is None else subject.class_names(source)
    return names[number] if isinstance(number, int) and 0 <= number < len(names) else str(number)
