"""Work on a layer's keys by their number, or by the slot: values of whole layers, so that an engine does the work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.memory.reader import MemoryReader
from spotlights.query.plan import LayerValue
from spotlights.query.reducers import add_moments
from spotlights.sparse_rows import products


@dataclass(frozen=True, eq=False)
class VisitedKeyTotals(LayerValue):
    """Σ score (or |score|) over each group's slots: each distinct key's, as often as the group visited it."""

    queries: Float[Tensor, "queries in_features"]
    visits: Int64[Tensor, "groups keys"]
    absolute: bool

    def value(self, reader: MemoryReader, layer: str) -> Float[Tensor, "queries groups"]:
        counts = self.visits.to(self.queries.dtype)
        totals = torch.zeros(len(self.queries), len(counts), dtype=torch.float64)
        for keys in reader.layer(layer).key_table():
            scores = keys.times_scale(products(self.queries, keys.rows))
            totals += (scores.abs_() if self.absolute else scores) @ counts[:, keys.place].T
        return totals


@dataclass(frozen=True, eq=False)
class VisitedKeyMoments(LayerValue):
    """`Σ [k; 1] [k; 1]ᵀ` over the visits of distinct keys, without the last row (`KeyMomentsReducer`)."""

    visits: Int64[Tensor, "keys"]

    def value(self, reader: MemoryReader, layer: str) -> Float[Tensor, "keys_and_1 keys_and_1"]:
        recorded = reader.layer(layer)
        moments = torch.zeros(recorded.entry.moments_shape, dtype=torch.float64)
        add_moments(moments, recorded.key_table(), self.visits)
        return moments


@dataclass(frozen=True, eq=False)
class KeysOfSlots(LayerValue):
    """The keys of some slots."""

    slots: Int64[Tensor, "rows"]

    def value(self, reader: MemoryReader, layer: str) -> Float[Tensor, "rows in_features"]:
        return reader.layer(layer).keys_at(self.slots)


@dataclass(frozen=True, eq=False)
class KeysNumbered(LayerValue):
    """Some of a layer's distinct keys, by their number."""

    numbers: Int64[Tensor, "keys"]

    def value(self, reader: MemoryReader, layer: str) -> Float[Tensor, "keys in_features"]:
        return reader.layer(layer).keys_numbered(self.numbers)
