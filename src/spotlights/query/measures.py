"""Measures: what number a slot gets. Plain data; an engine binds a measure to an opened memory.

The contribution is beside `Contributions`, the coefficient alone in `coefficients.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from spotlights.memory.blocks import Block
from spotlights.memory.reader import MemoryReader
from spotlights.query.contraction import KeyScores, error_norms, error_scores
from spotlights.query.plan import BlockValues, Measure, Sweep
from spotlights.sparse_rows import SparseRows, dense


@dataclass(frozen=True, eq=False)
class Score(Measure):
    """k·q for each query and slot; `summed`: added up over the queries."""

    queries: Float[Tensor, "queries in_features"] | SparseRows
    cosine: bool = False
    key_parts: tuple[tuple[str, ...], ...] | None = None
    """Which parts of the keys count, each run of neighbours scaled by itself; None for all of the key."""
    transposed: bool = False
    """The module uses the transposed weight, so keys and errors swap roles: δ·q."""
    weighted: bool = False
    """(k·q) ‖δ‖: a slot that taught nothing counts nothing, however similar its key is."""
    shift: Float[Tensor, "queries 1"] | None = None
    """The logarithm of what a softmax divides by; None for no softmax."""
    summed: bool = False

    @property
    def width(self) -> int:
        return len(self.queries)

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues:
        recorded = reader.layer(layer)
        if self.summed and not self.cosine and self.shift is None:  # a sum of products is the product with the sum
            queries, add_up = _sum(self.queries), False
        else:
            queries, add_up = self.queries, self.summed
        if self.transposed:
            directions = dense(queries).to(recorded.storage.compute_dtype)
            return lambda block: error_scores(block, directions)
        scores = KeyScores(recorded, queries, cosine=self.cosine, key_parts=self.key_parts)

        def values(block: Block) -> Float[Tensor, "queries rows"]:
            products = scores(block)
            if self.weighted:
                products *= error_norms(block)
            if self.shift is not None:
                products = products.double().sub_(self.shift).exp_().to(queries.dtype)
            return products.sum(dim=0, keepdim=True) if add_up else products

        return values


def _sum(queries: Tensor | SparseRows) -> Tensor | SparseRows:
    """The sum of all queries, as one."""
    if isinstance(queries, Tensor):
        return queries.sum(dim=0, keepdim=True)
    used = queries.used
    return SparseRows(used[None], queries.columns(used).sum(dim=0, keepdim=True), queries.width)


@dataclass(frozen=True)
class Absolute(Measure):
    """The magnitude of another measure's values."""

    inner: Measure

    @property
    def width(self) -> int:
        return self.inner.width

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues | Sweep:
        values = self.inner.bind(reader, layer)
        if not isinstance(values, Sweep):
            return lambda block: values(block).abs()
        return Sweep(lambda selection: ((block, some.abs()) for block, some in values.blocks(selection)))


@dataclass(frozen=True, eq=False)
class Known(Measure):
    """What another measure gave, looked up by the number of the slot."""

    values: Float[Tensor, "queries slots"]

    @property
    def width(self) -> int:
        return len(self.values)

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues:
        return lambda block: self.values.index_select(1, block.slots)
