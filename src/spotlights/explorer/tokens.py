"""Texts token by token: what training adds to an answer through each token of the input, and what each token of a
training text adds.

A training text is either one example with a slot for each of its tokens, or a stretch of a long text whose tokens are
examples of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spotlights.errors import SpotlightsError
from spotlights.explorer.explorer import Explorer
from spotlights.explorer.queries import KINDS, Query
from spotlights.explorer.spotlight import Values, Wanted, values_of
from spotlights.results import sentence_at
from spotlights.selections import parse_selections, where_any

Plain = dict[str, Any]


def shading(explorer: Explorer, query: Query, wanted: Wanted, examples: Sequence[int]) -> Plain:
    """The value of each token: of the input, and of some training texts; None for what has no such values."""
    if explorer.subject.tokenizer is None and explorer.subject.text is None:
        return {"input": None, "examples": {}}
    seen = values_of(explorer, query, wanted)
    texts = _of_passages if explorer.subject.text is not None else _of_texts
    return {"input": _of_input(explorer, query, wanted), "examples": texts(explorer, seen, wanted, examples)}


def _of_input(explorer: Explorer, query: Query, wanted: Wanted) -> Plain | None:
    """What training put into a layer that reads the input token by token, through each of its tokens.

    That is the layer that is looked at, if it is a hidden one; or the first one. What answers sees one token alone.
    """
    kind, spot, count = KINDS[wanted.measure], explorer.attend(query), len(query.tokens or ())
    answering = explorer.answering_layer(query)
    names = [name for name in (wanted.layer, *spot) if name in spot and name != answering]
    layer = next((name for name in names if len(spot[name].queries) == count > 1), None)
    if layer is None or not kind.signed or kind.estimate:
        return None
    toward: Any = query.target(spot.output, query.output_numbers(spot.output, wanted.target))
    try:
        contributions = spot[layer].contributions(toward, rows=True)
        values = contributions.totals("step", bins=1).values.sum(dim=1)
    except SpotlightsError:  # such a memory answers scores only
        return None
    return {"layer": layer, "values": values.tolist(), "note": contributions.note}


def _of_texts(explorer: Explorer, seen: Values, wanted: Wanted, examples: Sequence[int]) -> Plain:
    """Training texts with a slot for each token."""
    memory = explorer.opened.memory
    if seen.kind.estimate or "position" not in memory.columns:
        return {}
    view, shaded = where_any(memory, parse_selections(wanted.where)), {}
    for example in examples:
        totals = seen.measure.within(view.where(example=example)).totals("position")
        by_position = dict(zip(totals.groups, totals.values[0].tolist(), strict=True))
        tokens = _tokens(explorer, example, len(by_position))
        if len(by_position) > 1 and tokens:
            values = [by_position.get(place) for place in range(len(tokens))]
            shaded[str(example)] = {"tokens": tokens, "values": values, "mark": None}
    return shaded


def _tokens(explorer: Explorer, example: int, count: int) -> list[str]:
    """The tokens of a training text of which `count` have slots; none if the text is not known."""
    subject = explorer.subject
    tokenizer, give, show = subject.tokenizer, subject.example_input, subject.show_example
    if tokenizer is None:
        return []
    numbers = give(example).tolist() if give is not None else None
    if not isinstance(numbers, list) or any(isinstance(number, list) for number in numbers):
        text = None if show is None else show(example)
        try:
            numbers = list(tokenizer.encode(text)) if isinstance(text, str) else []
        except (KeyError, ValueError):
            return []
    return [tokenizer.decode([number]) for number in numbers] if len(numbers) >= count else []


def _of_passages(explorer: Explorer, seen: Values, wanted: Wanted, examples: Sequence[int]) -> Plain:
    """Tokens of a long text, each in its sentence, whose other tokens are examples as well."""
    text = explorer.subject.text or ""
    behind = "" if isinstance(text, str) else " "
    totals = seen.totals("example")[0]
    groups, values = np.asarray(totals.groups), totals.values[0].numpy()
    stretches = {example: range(*sentence_at(text, example)) for example in examples if 0 <= example < len(text)}
    needed = np.array(sorted({place for stretch in stretches.values() for place in stretch}), dtype=groups.dtype)
    at = np.flatnonzero(np.isin(groups, needed) & (totals.counts.numpy() > 0))
    value_of = dict(zip(groups[at].tolist(), values[at].tolist(), strict=True))
    return {
        str(example): {
            "tokens": [text[place] + behind for place in stretch],
            "values": [value_of.get(place) for place in stretch],
            "mark": example - stretch.start,
        }
        for example, stretch in stretches.items()
    }
