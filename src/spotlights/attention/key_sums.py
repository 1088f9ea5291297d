"""Totals of scores for many queries at once, without scoring every slot for each of them.

The sum of the scores of a group is the product of the query with the sum of its keys, so one scan serves
any number of queries; where neither keys nor queries are negative (a layer behind a ReLU), the same holds for
|score|. Where keys are kept once, each distinct key is scored once and counted as often as it was visited.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping
from spotlights.attention.reducers import Reducer
from spotlights.attention.scan import Job, scan
from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.selection import Selection

MANY_QUERIES = 16
"""From here on it pays; below, a plain scan reads the same bytes."""
FEW_GROUPS = 256
_QUERIES_AT_ONCE = 2048
_NO_VALUES = torch.empty(0, 0)


def quick_totals(
    layer: LayerReader,
    selection: Selection,
    queries: Float[Tensor, "queries in_features"],
    grouping: Grouping,
    *,
    absolute: bool,
) -> tuple[Float[Tensor, "queries groups"], Int64[Tensor, "groups"]] | None:
    """Totals and numbers of slots, or None where only a scan can tell."""
    if len(queries) < MANY_QUERIES or len(grouping) > FEW_GROUPS:
        return None
    queries = queries.to(layer.storage.compute_dtype)
    if layer.entry.indexed:
        return _from_distinct_keys(layer, selection, queries, grouping, absolute=absolute)
    sums = KeySumsReducer(layer.entry.in_features, grouping)
    scan([Job(layer, selection, 1, lambda block: _NO_VALUES, [sums])])
    if absolute and min(sums.smallest, float(queries.min())) < 0:
        return None
    return queries.double() @ sums.sums.T, sums.counts


class KeySumsReducer(Reducer):
    """The sum of the keys of each group, in float64, and the smallest number in any of them."""

    def __init__(self, in_features: int, grouping: Grouping) -> None:
        self._grouping = grouping
        self.sums = torch.zeros(len(grouping), in_features, dtype=torch.float64)
        self.counts = torch.zeros(len(grouping), dtype=torch.int64)
        self.smallest = 0.0

    def fresh(self) -> KeySumsReducer:
        return type(self)(self.sums.shape[1], self._grouping)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        codes = self._grouping.codes(block)
        self.counts += self._grouping.counts(block)
        for keys in block.keys():  # noqa: SIM118
            rows = keys.rows
            members = rows.new_zeros(len(self.counts), len(rows))
            ones = torch.ones(len(rows)) if keys.scale is None else keys.scale
            members.scatter_(0, codes[keys.place][None], ones.to(rows.dtype)[None])
            self.sums += members @ rows
            self.smallest = min(self.smallest, float(rows.min()))

    def merge(self, other: KeySumsReducer) -> None:
        self.sums += other.sums
        self.counts += other.counts
        self.smallest = min(self.smallest, other.smallest)


class VisitsReducer(Reducer):
    """How often each group visited each distinct key."""

    def __init__(self, distinct_keys: int, grouping: Grouping) -> None:
        self._grouping = grouping
        self.visits = torch.zeros(len(grouping), distinct_keys, dtype=torch.int64)

    def fresh(self) -> VisitsReducer:
        return type(self)(self.visits.shape[1], self._grouping)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        flat = self._grouping.codes(block) * self.visits.shape[1] + block.key_numbers()
        self.visits += torch.bincount(flat, minlength=self.visits.numel()).view_as(self.visits)

    def merge(self, other: VisitsReducer) -> None:
        self.visits += other.visits


def _from_distinct_keys(
    layer: LayerReader,
    selection: Selection,
    queries: Float[Tensor, "queries in_features"],
    grouping: Grouping,
    *,
    absolute: bool,
) -> tuple[Float[Tensor, "queries groups"], Int64[Tensor, "groups"]]:
    counted = VisitsReducer(layer.distinct_keys, grouping)
    scan([Job(layer, selection, 1, lambda block: _NO_VALUES, [counted])])
    visits = counted.visits.to(queries.dtype)
    totals = torch.zeros(len(queries), len(grouping), dtype=torch.float64)
    for start in range(0, len(queries), _QUERIES_AT_ONCE):
        some = queries[start : start + _QUERIES_AT_ONCE]
        for keys in layer.key_table():
            scores = some @ keys.rows.T
            if keys.scale is not None:
                scores *= keys.scale
            if absolute:
                scores.abs_()
            totals[start : start + len(some)] += scores @ visits[:, keys.place].T
    return totals, counted.visits.sum(dim=1)
