"""Work on a layer's keys by their number, or by the slot: measures, so that an engine does the work.

Each has one value for the whole layer, which a `LastReducer` takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.memory.blocks import Block, Selection
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.query.plan import Measure, Sweep
from spotlights.query.reducers import add_moments
from spotlights.sparse_rows import products


@dataclass(frozen=True, eq=False)
class VisitedKeyTotals(Measure):
    """Σ score (or |score|) over each group's slots: each distinct key's, as often as the group visited it."""

    queries: Float[Tensor, "queries in_features"]
    visits: Int64[Tensor, "groups keys"]
    absolute: bool

    def bind(self, reader: MemoryReader, layer: str) -> Sweep:
        def value() -> Float[Tensor, "queries groups"]:
            counts = self.visits.to(self.queries.dtype)
            totals = torch.zeros(len(self.queries), len(counts), dtype=torch.float64)
            for keys in reader.layer(layer).key_table():
                scores = products(self.queries, keys.rows)
                if keys.scale is not None:
                    scores *= keys.scale
                totals += (scores.abs_() if self.absolute else scores) @ counts[:, keys.place].T
            return totals

        return _of_layer(reader.layer(layer), value)


@dataclass(frozen=True, eq=False)
class VisitedKeyMoments(Measure):
    """`Σ [k; 1] [k; 1]ᵀ` over the visits of distinct keys, without the last row (`KeyMomentsReducer`)."""

    visits: Int64[Tensor, "keys"]

    def bind(self, reader: MemoryReader, layer: str) -> Sweep:
        recorded = reader.layer(layer)

        def value() -> Float[Tensor, "keys_and_1 keys_and_1"]:
            moments = torch.zeros(recorded.entry.moments_shape, dtype=torch.float64)
            add_moments(moments, recorded.key_table(), self.visits)
            return moments

        return _of_layer(recorded, value)


@dataclass(frozen=True, eq=False)
class KeysOfSlots(Measure):
    """The keys of some slots."""

    slots: Int64[Tensor, "rows"]

    def bind(self, reader: MemoryReader, layer: str) -> Sweep:
        recorded = reader.layer(layer)
        return _of_layer(recorded, lambda: recorded.keys_at(self.slots))


def _of_layer(layer: LayerReader, value: Any) -> Sweep:
    def blocks(selection: Selection) -> Iterator[tuple[Block, Any]]:
        yield Block(layer, ()), value()

    return Sweep(blocks)
