"""Measures: the switch between contribution, influence, score and |score|; and the values that are kept of a query.

A query's values, one for each slot of a layer, are computed once. Whatever is then asked (the largest, the
totals, a stretch of training) goes through the library's own reducers, without touching keys or errors again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from spotlights.attention import Attention
from spotlights.attention.measure import Measure, View
from spotlights.attention.scan import SweptValues, Values
from spotlights.errors import TooLargeError

KEPT_BYTES = 256 << 20


@dataclass(frozen=True)
class Kind:
    """One position of the switch."""

    name: str
    title: str
    help: str
    signed: bool = False
    """Has a target, speaks for or against it."""
    estimate: bool = False
    """Foretells instead of taking apart: over all layers, for examples only."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "contribution",
            "contribution",
            "What a training example adds to this output, with its sign. In the last layer exact: all of them and the "
            "initial weights add up to the output. In a hidden layer first order.",
            signed=True,
        ),
        Kind(
            "influence",
            "influence",
            "An estimate: had the example been left out of training, would this output be lower (for) or higher "
            "(against)? All visits and layers added up. Order and sign count; the size has no unit.",
            signed=True,
            estimate=True,
        ),
        Kind("score", "score", "key·query: how similar the layer finds the training example and this input."),
        Kind("absolute", "|score|", "The size of the score, whatever its sign."),
    )
}


def measure_of(kind: Kind, attention: Attention, row: int | None, target: Any) -> Measure:
    """The library's own measure of one layer, for one row of a query in that layer, or for all of them added up."""
    if kind.estimate:
        return attention._influence_part(target, None).whole()  # every row has its part in what would happen
    if row is not None:
        attention = attention.at(row)
    return attention.contributions(target).whole() if kind.signed else attention.whole()


class Held(Measure):
    """The values of every slot of a layer for one query, known already; for any view of the same memory."""

    def __init__(self, measure: Measure, held: Float[Tensor, "1 slots"], view: View) -> None:
        super().__init__(view, measure.layer, measure.queries[:1])
        self.what = measure.what
        self._note = measure.note
        self._held = held

    @property
    def note(self) -> str | None:
        return self._note

    def values(self, chosen: slice) -> Values:
        held = self._held[chosen]
        return lambda block: held.index_select(1, block.slots)


class Absolute(Measure):
    """The sizes of scores."""

    def __init__(self, measure: Measure) -> None:
        super().__init__(measure.view, measure.layer, measure.queries)
        self.what = f"|{measure.what}|"
        self._measure = measure

    @property
    def note(self) -> str | None:
        return self._measure.note

    def values(self, chosen: slice) -> Values:
        inner = self._measure.values(chosen)
        assert not isinstance(inner, SweptValues)  # those are contributions
        return lambda block: inner(block).abs()


class Kept:
    """What was computed lately, up to some size; the longest unused goes first. Any thread may ask."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Any:
        with self._lock:
            if key not in self._held:
                return None
            self._held.move_to_end(key)
            return self._held[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        with self._lock:
            _, replaced = self._held.pop(key, (None, 0))
            self._held[key] = value, size
            self._bytes += size - replaced
            while self._bytes > self._limit and len(self._held) > 1:
                _, (_, dropped) = self._held.popitem(last=False)
                self._bytes -= dropped


def hold(measure: Measure) -> Float[Tensor, "1 slots"] | None:
    """A measure's values for the whole memory; None if they are too many to keep."""
    try:
        return measure._all("The values")[0]
    except TooLargeError:
        return None
