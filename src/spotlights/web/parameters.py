"""What a request asks for: every parameter is read here, and a bad one gets a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import spotlights as sl
from spotlights.attention.results import Label
from spotlights.errors import SettingError
from spotlights.web.explorer import Explorer
from spotlights.web.masks import Mask
from spotlights.web.measured import Wanted
from spotlights.web.measures import KINDS
from spotlights.web.queries import Query, whole_number

MAX_MASKED = 2000
"""Single examples in one mask."""


class Parameters:
    """The parameters of one request; unknown ones are mistakes."""

    def __init__(self, given: Mapping[str, str], allowed: tuple[str, ...]) -> None:
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise SettingError(f"Unknown parameter {unknown[0][:40]!r}. There are: {', '.join(allowed) or 'none'}.")
        self._given = given

    def text(self, name: str, default: str | None = None) -> str:
        value = self._given.get(name, default)
        if value is None:
            raise SettingError(f"The parameter {name}= is missing.")
        return value

    def optional(self, name: str) -> str | None:
        return self._given.get(name) or None

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        value = self._given.get(name, choices[0])
        if value not in choices:
            raise SettingError(f"{name}={value[:40]!r}: give one of {', '.join(choices)}.")
        return value

    def number(self, name: str, default: int | None, low: int, high: int) -> int | None:
        given = self._given.get(name)
        if not given:
            return default
        value = whole_number(given, f"a value of {name}=")
        if not low <= value <= high:
            raise SettingError(f"{name}={value}: give {low:,} to {high:,}.")
        return value

    def count(self, name: str, default: int, low: int, high: int) -> int:
        value = self.number(name, default, low, high)
        return default if value is None else value


QUERY = ("q", "at")
LOOK = (*QUERY, "layer", "measure", "target", "by", "per", "steps", "top", "sorted")
MASK = ("mask", "in")


def read_query(parameters: Parameters, explorer: Explorer) -> Query:
    return explorer.query(parameters.text("q"), parameters.number("at", None, 0, 1 << 20))


def read_wanted(parameters: Parameters, explorer: Explorer) -> Wanted:
    layers = list(explorer.opened.memory.layers)
    layer = parameters.text("layer", layers[-1] if layers else "")
    if layer not in layers:
        raise sl.UnknownNameError(f'No layer "{layer[:80]}" in this memory. It has: {", ".join(layers)}.')
    steps = parameters.optional("steps")
    return Wanted(
        layer=layer,
        measure=parameters.choice("measure", tuple(KINDS)),
        target=parameters.number("target", None, 0, 1 << 30),
        by=parameters.choice("by", ("example", "slot")),
        per=parameters.optional("per"),
        steps=None if steps is None else _stretch(steps, explorer.opened.memory.steps),
        top=parameters.count("top", 24, 1, 500),
        sorted=parameters.count("sorted", 500, 1, 2000),
    )


def read_mask(parameters: Parameters, explorer: Explorer) -> Mask:
    opened = explorer.opened
    return parse_mask(parameters.text("mask", ""), parameters.optional("in"), opened.memory, opened.groups)


def parse_mask(left_out: str, layers: str | None, memory: sl.Memory, groups: Mapping[str, Sequence[Label]]) -> Mask:
    """Reads `label:3,5;source:mnist;steps:0-300;example:12,13` and, as layers, `layers.1,layers.2`."""
    values: dict[str, tuple[Label, ...]] = {}
    stretches: list[tuple[int, int]] = []
    examples: tuple[int, ...] = ()
    for part in filter(None, left_out.split(";")):
        column, colon, listed = part.partition(":")
        if not colon or not listed:
            raise SettingError(f"mask={part[:40]!r}: write column:value,value; for example label:3,5;steps:0-300.")
        if column == "steps":
            stretches += [_stretch(each, memory.steps) for each in listed.split(",")]
        elif column == "example":
            examples = _examples(listed.split(","), memory)
        elif column in groups:
            values[column] = _values(column, listed.split(","), groups[column])
        else:
            known = ", ".join(groups) or "no groups here"
            raise SettingError(f"mask={column[:40]!r}: leave out {known}, steps or example.")
    chosen = None if layers is None else tuple(layers.split(","))
    for name in chosen or ():
        if name not in memory.layers:
            raise sl.UnknownNameError(f'No layer "{name[:80]}" in this memory. It has: {", ".join(memory.layers)}.')
    if chosen is not None and set(chosen) >= set(memory.layers):
        chosen = None
    return Mask(tuple(sorted(values.items())), _merged(stretches), examples, chosen)


def _examples(listed: Sequence[str], memory: sl.Memory) -> tuple[int, ...]:
    if len(listed) > MAX_MASKED or "example" not in memory.columns:
        raise SettingError(f"A mask names at most {MAX_MASKED:,} single examples, of a memory that knows them.")
    return tuple(sorted({whole_number(each, "an example's id") for each in listed}))


def _values(column: str, listed: Sequence[str], group: Sequence[Label]) -> tuple[Label, ...]:
    known = {str(value): value for value in group}
    for each in listed:
        if each not in known:
            raise sl.UnknownNameError(f"No slot has {column}={each[:40]!r}. It has: {', '.join(known)}.")
    return tuple(value for name, value in known.items() if name in listed)


def _stretch(text: str, steps: int) -> tuple[int, int]:
    first, dash, end = text.partition("-")
    if not dash:
        raise SettingError(f"{text[:40]!r} is no stretch of steps: write first-end, such as 0-300.")
    pair = whole_number(first, "a step"), min(whole_number(end, "a step"), steps)
    if not 0 <= pair[0] < pair[1]:
        raise SettingError(f"{text[:40]!r} holds no step: this memory has steps 0 to {steps}, the end not included.")
    return pair


def _merged(stretches: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(stretches):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((first, end))
    return tuple(merged)
