"""Selections of slots as text: one grammar for the command line, the explorer's address and `retrain-check`.

    label=3,5                   slots with the label 3 or 5
    label=3,5 step=0-300        ... of the steps 0 to 299: the end of a range is not included, as in Python
    label=3; source="old mail"  slots with the label 3, and all slots of that source

Terms joined by spaces must all hold. Of selections joined by `;`, any may hold. A value is a whole number, a range
of whole numbers, a decimal number or a string. A string that looks like something else, or has spaces or any of
`,;="'` in it, stands in double quotes, with `\\"` for a quote and `\\\\` for a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spotlights.errors import SettingError, UnknownNameError

if TYPE_CHECKING:
    from spotlights import Memory

MAX_VALUES = 2000
"""Of one column in a selection, such as single examples."""
EXAMPLE = "label=3,5 step=0-300"
_COLUMN = r'[^\s;,="\']+'
_VALUE = rf'"(?:[^"\\]|\\.)*"|{_COLUMN}'
_PIECE = re.compile(
    rf"\s+|(?P<next>;)|(?P<column>{_COLUMN})=(?P<values>(?:{_VALUE})(?:,(?:{_VALUE}))*)(?=[\s;]|$)", re.DOTALL
)
_WHOLE = re.compile(r"-?\d{1,18}", re.ASCII)
_RANGE = re.compile(r"(-?\d{1,18})-(-?\d{1,18})", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,18}(\.\d+)?([eE][+-]?\d{1,3})?", re.ASCII)
_SHOWN = 20
"""How many values a message lists."""

Selection = dict[str, Any]
"""Conditions as `memory.where(**selection)` takes them: a value, a list of values or a range for each column."""


# -- text and conditions ----------------------------------------------------------------------


def parse_selections(text: str) -> list[Selection]:
    """The conditions that a text states, one dictionary for each call of `memory.where`.

    A term that mixes ranges with each other or with values, as `step=0-10,20-30`, becomes several selections.
    """
    selections: list[Selection] = []
    for terms in _terms(text):
        expanded: list[Selection] = [{}]
        for column, values in terms.items():
            ranges = [value for value in values if isinstance(value, range)]
            others = [value for value in values if not isinstance(value, range)]
            options = [*ranges, *([others if len(others) > 1 else others[0]] if others else [])]
            expanded = [{**selection, column: option} for selection in expanded for option in options]
        selections += expanded
    return selections


def format_selections(selections: Sequence[Selection]) -> str:
    """The text that `parse_selections` reads as these conditions."""
    return "; ".join(
        " ".join(f"{column}={_format_values(wanted)}" for column, wanted in selection.items())
        for selection in selections
    )


def _terms(text: str) -> list[dict[str, list[Any]]]:
    """For each selection its columns, and for each column the values that the text lists."""
    selections: list[dict[str, list[Any]]] = [{}]
    place = 0
    while place < len(text):
        match = _PIECE.match(text, place)
        if match is None:
            raise SettingError(
                f"{_cut(text[place:])!r}: write column=value, such as {EXAMPLE}, with a comma between two values "
                f"and a space between two columns. Strings with spaces stand in double quotes: {_quoted('old mail')}."
            )
        place, column = match.end(), match["column"]
        if match["next"]:
            selections.append({})
        elif column in selections[-1]:
            raise SettingError(f"{column} is given twice, and both would have to hold. Write {column}=3,5 for either.")
        elif column:
            selections[-1][column] = [_value(column, value) for value in re.findall(_VALUE, match["values"], re.DOTALL)]
    return [terms for terms in selections if terms]


def _value(column: str, token: str) -> Any:
    if token.startswith('"'):
        return re.sub(r"\\(.)", r"\1", token[1:-1], flags=re.DOTALL)
    if _WHOLE.fullmatch(token):
        return int(token)
    if match := _RANGE.fullmatch(token):
        first, end = int(match.group(1)), int(match.group(2))
        if first >= end:
            raise SettingError(f"{column}={token} holds nothing: write FIRST-END, the end not included, such as 0-300.")
        return range(first, end)
    if _DECIMAL.fullmatch(token) and float(token) not in (float("inf"), float("-inf")):
        return float(token)
    if token.lstrip("-").isdigit():
        raise SettingError(f"{column}={_cut(token)}: a number has at most 18 digits.")
    return token


def _format_values(wanted: Any) -> str:
    values = wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
    return ",".join(_format_value(value) for value in values)


def _format_value(value: Any) -> str:
    if isinstance(value, range):
        return f"{value.start}-{value.stop}"
    if isinstance(value, str):
        plain = re.fullmatch(_COLUMN, value) and not any(kind.fullmatch(value) for kind in (_WHOLE, _RANGE, _DECIMAL))
        return value if plain and not value.lstrip("-").isdigit() else _quoted(value)
    return repr(value)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


# -- conditions and a memory ------------------------------------------------------------------


def read_selections(text: str, memory: Memory) -> list[Selection]:
    """The conditions that a text states about a memory, in the values that its columns really hold.

    Columns that are not there and values that no slot has are refused.
    """
    read = []
    for selection in parse_selections(text):
        for column, wanted in selection.items():
            if column not in memory.columns:
                raise UnknownNameError(
                    f'No column "{_cut(column)}" in this memory. It has: {", ".join(memory.columns)}.'
                )
            if isinstance(wanted, list) and len(wanted) > MAX_VALUES:
                raise SettingError(f"{column}= has {len(wanted):,} values; a selection has at most {MAX_VALUES:,}.")
            steps = range(memory.steps) if column == "step" else None
            values = _resolved(column, wanted, memory.distinct(column) if steps is None else steps)
            if steps is not None and isinstance(values, range):
                values = range(max(0, values.start), min(values.stop, len(steps)))
            selection[column] = values
        read.append(selection)
    return read


def where_any(memory: Memory, selections: Sequence[Selection]) -> Memory:
    """Only the slots that one of the selections has; all of them if there is no selection."""
    if len(selections) <= 1:
        return memory.where(**selections[0]) if selections else memory
    return ~without_any(memory, selections)


def without_any(memory: Memory, selections: Sequence[Selection]) -> Memory:
    """Only the slots that none of the selections has."""
    for selection in selections:
        memory = memory.without(**selection)
    return memory


def _resolved(column: str, wanted: Any, known: Sequence[Any]) -> Any:
    if isinstance(wanted, range):
        if _format_value(wanted) in known:  # a string that looks like a range
            return _format_value(wanted)
        if any(isinstance(value, int | float) and wanted.start <= value < wanted.stop for value in known):
            return wanted
        raise UnknownNameError(f"No slot has {column}={_format_value(wanted)}. {_what_exists(column, known)}")
    several, exact = wanted if isinstance(wanted, list) else [wanted], set(known)
    if exact.issuperset(several):
        return wanted
    spelled = {str(value): value for value in known}
    for value in several:
        if value not in exact and str(value) not in spelled:
            raise UnknownNameError(f"No slot has {column}={_cut(_format_value(value))}. {_what_exists(column, known)}")
    values = [value if value in exact else spelled[str(value)] for value in several]
    return values if isinstance(wanted, list) else values[0]


def _what_exists(column: str, known: Sequence[Any]) -> str:
    """A sentence about the values of a column: all of them, or the range they lie in."""
    values = [value for value in known if value is not None]
    if len(values) <= _SHOWN:
        return f"The column has: {', '.join(map(_format_value, values)) or 'no values'}."
    if all(isinstance(value, int | float) for value in values):
        return f"The column has {id_range(values)}."
    return f"The column has {len(values):,} values, such as {', '.join(map(_format_value, values[:_SHOWN]))}."


def id_range(ids: Sequence[Any]) -> str:
    """Which ids there are, for a message: "0 to 59", or "57 values from 3 to 99" if some between are missing."""
    low, high = min(ids), max(ids)
    whole = isinstance(low, int) and isinstance(high, int) and high - low + 1 == len(ids)
    return f"{low} to {high}" if whole else f"{len(ids):,} values from {low} to {high}"
