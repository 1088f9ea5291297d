"""What slots add to a layer's output in some direction, where a step's factor is a matrix C.

For a query x and a direction g it is `Σ_ij δ_i g_i C_ij x_j k_j`, a matrix product for each query. What makes it
bearable: behind a ReLU, and on black pixels, most of g and x is exactly 0, and what is 0 need not be multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.products import error_products
from spotlights.dual_form import Factor, Side, linear_map, outer_sum
from spotlights.memory.blocks import Block


@dataclass(frozen=True)
class Directed:
    """Queries, each with a direction in the layer's output: that of the number of interest."""

    queries: Float[Tensor, "queries in_features"]
    directions: Float[Tensor, "queries out_features"]
    ones: Float[Tensor, "queries"]
    """What the key 1 of the bias meets; other than 1 only where queries are transformed."""

    def __len__(self) -> int:
        return len(self.queries)

    def to(self, dtype: torch.dtype) -> Directed:
        return Directed(self.queries.to(dtype), self.directions.to(dtype), self.ones.to(dtype))


@dataclass(frozen=True)
class _Pair:
    """A query and its direction, without their zeros; None where there are too few to leave out."""

    units: Int64[Tensor, "units"] | None
    features: Int64[Tensor, "features"] | None
    direction: Float[Tensor, "units"]
    query: Float[Tensor, "features"]

    def contributions(
        self,
        keys: Float[Tensor, "rows in_features"],
        errors: Float[Tensor, "rows out_features"],
        factor: Float[Tensor, "out_features in_features"],
    ) -> Float[Tensor, "rows"]:
        errors, factor = _columns(errors, self.units), factor if self.units is None else factor[self.units]
        keys, factor = _columns(keys, self.features), _columns(factor, self.features)
        if len(factor) <= factor.shape[1]:
            made = (keys * self.query) @ factor.T
            return made.mul_(errors) @ self.direction
        made = (errors * self.direction) @ factor
        return made.mul_(keys) @ self.query


class Pairs:
    """Each query by itself."""

    def __init__(self, asked: Directed, *, columns: Sequence[slice], groups: int) -> None:
        """`columns`: which part of a key each weight of the layer acts on."""
        self._grouped = GroupedPairs(asked, groups) if groups > 1 else None
        self._columns = columns
        self._queries = asked.queries
        self._directions = asked.directions
        self._bias_directions = asked.directions * asked.ones[:, None]
        self._pairs = [
            [_pair(x, g) for x, g in zip(asked.queries[:, some], asked.directions, strict=True)] for some in columns
        ]

    def __len__(self) -> int:
        return len(self._queries)

    def empty(self, rows: int) -> Float[Tensor, "queries rows"]:
        """Room for the values of that many slots."""
        return self._queries.new_empty(len(self._queries), rows)

    def contributions(
        self, block: Block, sides: Sequence[Side], weights: Sequence[Factor], bias: Factor
    ) -> Float[Tensor, "queries rows"]:
        """What each slot of one step adds, with that step's factors."""
        if self._grouped is not None:
            (weight,) = weights
            return self._grouped.through_weight(block, weight) + self._grouped.through_bias(block, bias)
        result = self.empty(len(block))
        of_bias = self._bias_directions * bias
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            made = self._through_weight(0, keys.rows, errors.rows, sides[0], weights[0])
            for number in range(1, len(weights)):
                made += self._through_weight(number, keys.rows, errors.rows, sides[number], weights[number])
            if keys.scale is not None:
                made *= keys.scale
            made += of_bias @ errors.rows.T
            result[:, errors.place] = made if errors.scale is None else made.mul_(errors.scale)
        return result

    def _through_weight(self, number: int, keys: Tensor, errors: Tensor, side: Side, weight: Factor) -> Tensor:
        keys, queries = keys[:, self._columns[number]], self._queries[:, self._columns[number]]
        directions = self._directions
        if not isinstance(weight, Tensor):
            return (queries @ keys.T).mul_(directions @ errors.T).mul_(weight)
        if side == "left":
            return (queries @ keys.T).mul_((directions @ weight) @ errors.T)
        if side == "right":
            return ((queries @ weight.T) @ keys.T).mul_(directions @ errors.T)
        made = keys.new_empty(len(queries), len(keys))
        for row, pair in zip(made, self._pairs[number], strict=True):
            row.copy_(pair.contributions(keys, errors, weight))
        return made


class GroupedPairs:
    """The same for a layer that maps parts of its keys apart: the sum over groups of `(k·q) (δ·g)`."""

    def __init__(self, asked: Directed, groups: int) -> None:
        self._queries = asked.queries.reshape(len(asked), groups, -1)
        self._directions = asked.directions.reshape(len(asked), groups, -1)
        self._bias_directions = asked.directions * asked.ones[:, None]
        self._groups = groups

    def through_weight(self, block: Block, factor: Factor = 1.0) -> Float[Tensor, "queries rows"]:
        """What each slot adds by way of the weight, with a number or a matrix entry by entry as factor."""
        result = self._queries.new_empty(len(self._queries), len(block))
        matrix = factor.reshape(self._groups, -1, factor.shape[1]) if isinstance(factor, Tensor) else None
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            made = self._products(keys.rows, errors.rows, matrix)
            for scale in (keys.scale, errors.scale):
                if scale is not None:
                    made *= scale
            result[:, errors.place] = made
        return result if isinstance(factor, Tensor) else result.mul_(factor)

    def through_bias(self, block: Block, factor: Factor = 1.0) -> Float[Tensor, "queries rows"]:
        """The same by way of the bias."""
        return error_products(block, self._bias_directions * factor)

    def _products(
        self,
        keys: Float[Tensor, "rows in_features"],
        errors: Float[Tensor, "rows out_features"],
        factor: Float[Tensor, "groups out_group in_group"] | None,
    ) -> Float[Tensor, "queries rows"]:
        keys, errors = (rows.reshape(len(rows), self._groups, -1) for rows in (keys, errors))
        if keys.shape[2] == errors.shape[2] == 1:  # a diagonal layer: one product of all entries
            pairs = self._queries[:, :, 0] * self._directions[:, :, 0]
            return (pairs if factor is None else pairs * factor[:, 0, 0]) @ (keys * errors)[:, :, 0].T
        made = keys.new_zeros(len(self._queries), len(keys))
        for group in range(self._groups):
            k, e, q, g = (part[:, group] for part in (keys, errors, self._queries, self._directions))
            if factor is None:
                made += (q @ k.T).mul_(g @ e.T)
                continue
            for row, (x, direction) in enumerate(zip(q, g, strict=True)):
                made[row] += ((k * x) @ factor[group].T).mul_(e) @ direction
        return made


class SummedPairs:
    """The sum over all queries: `Σ_ij δ_i M_ij k_j` with `M = Σ g⊗q`, one number for each slot."""

    def __init__(self, asked: Directed, *, columns: Sequence[slice], groups: int) -> None:
        self._matrix = outer_sum(asked.directions, asked.queries, groups)
        self._bias_direction = asked.ones[None] @ asked.directions
        self._columns = columns

    def __len__(self) -> int:
        return 1

    def empty(self, rows: int) -> Float[Tensor, "1 rows"]:
        return self._matrix.new_empty(1, rows)

    def contributions(
        self, block: Block, sides: Sequence[Side], weights: Sequence[Factor], bias: Factor
    ) -> Float[Tensor, "1 rows"]:
        """What each slot of one step adds, with that step's factors."""
        parts = [
            _seen_through(side, weight, self._matrix[:, columns])
            for side, weight, columns in zip(sides, weights, self._columns, strict=True)
        ]
        return self._products(block, torch.cat(parts, dim=1)) + self.through_bias(block, bias)

    def through_weight(self, block: Block) -> Float[Tensor, "1 rows"]:
        return self._products(block, self._matrix)

    def through_bias(self, block: Block, factor: Factor = 1.0) -> Float[Tensor, "1 rows"]:
        return error_products(block, self._bias_direction * factor)

    def _products(self, block: Block, matrix: Float[Tensor, "out_features in_group"]) -> Float[Tensor, "1 rows"]:
        result = self.empty(len(block))
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            made = linear_map(keys.rows, matrix).mul_(errors.rows).sum(dim=1)
            for scale in (keys.scale, errors.scale):
                if scale is not None:
                    made *= scale
            result[0, errors.place] = made
        return result


def _seen_through(
    side: Side, factor: Factor, matrix: Float[Tensor, "out_features columns"]
) -> Float[Tensor, "out_features columns"]:
    """The matrix whose product with a gradient is this one's with what a step made of the gradient (`act`)."""
    if not isinstance(factor, Tensor) or side == "entries":
        return matrix * factor
    return factor.T @ matrix if side == "left" else matrix @ factor.T


def _pair(query: Float[Tensor, "in_features"], direction: Float[Tensor, "out_features"]) -> _Pair:
    units, features = (_few(row.nonzero().flatten(), len(row)) for row in (direction, query))
    return _Pair(
        units,
        features,
        direction if units is None else direction[units],
        query if features is None else query[features],
    )


def _few(where: Int64[Tensor, "some"], among: int) -> Int64[Tensor, "some"] | None:
    """To pick columns costs something too: it pays only if a good part is left out."""
    return where if len(where) <= 0.8 * among else None


def _columns(rows: Float[Tensor, "rows all"], some: Int64[Tensor, "some"] | None) -> Float[Tensor, "rows some"]:
    return rows if some is None else rows.index_select(1, some)
