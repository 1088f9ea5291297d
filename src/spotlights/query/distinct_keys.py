"""Moments of a layer's distinct keys, and the keys of some slots: values of whole layers, found by an engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.memory.reader import MemoryReader
from spotlights.query.plan import LayerValue
from spotlights.query.reducers import add_moments


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
