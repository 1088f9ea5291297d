"""A plan: what is asked of a memory's slots, as data.

Plans can be printed, pickled and run elsewhere: an engine needs the plan and an opened memory, no more. A question
takes two phases where it has groups: the first plan finds which values a column has, the second one scans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from spotlights.memory.blocks import Block, Selection
from spotlights.memory.reader import MemoryReader
from spotlights.query.reducers import Reducer

BlockValues = Callable[[Block], Any]
"""The values of a block's slots, of shape (queries, rows); or what else the reducers take."""


@dataclass(frozen=True)
class Sweep:
    """Values that can only be computed step by step, where the number of a slot depends on all later steps."""

    blocks: Callable[[Selection], Iterator[tuple[Block, Any]]]
    """The selected slots with their values, in descending order of steps; only the last block may be empty."""


class Measure(ABC):
    """Says what number a slot gets, for each query. Plain data: queries, directions, coefficients."""

    @property
    def width(self) -> int:
        """How many values a slot gets: the larger, the fewer slots are looked at together."""
        return 1

    @abstractmethod
    def bind(self, reader: MemoryReader, layer: str) -> BlockValues | Sweep:
        """How to compute the values of a layer's slots."""


class LayerValue(Measure):
    """One value for a whole layer, found without looking at slots one by one; `View.values` asks for it."""

    @abstractmethod
    def value(self, reader: MemoryReader, layer: str) -> Any:
        """The value."""

    def bind(self, reader: MemoryReader, layer: str) -> Sweep:
        return Sweep(lambda selection: iter([(Block(reader.layer(layer), ()), self.value(reader, layer))]))


@dataclass(frozen=True)
class Plan:
    """One pass over the selected slots of a layer."""

    layer: str
    selection: Selection
    reducers: tuple[Reducer, ...]
    """Empty ones; running the plan leaves them empty."""
    measure: Measure | None = None
    """What the reducers get to know of each slot besides its columns, key and error."""
