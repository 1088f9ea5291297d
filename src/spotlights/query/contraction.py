"""The one product behind scores, contributions, groups and whole inputs.

A slot with key k and error δ adds `Σ_ij g_i C_ij δ_i k_j q_j` to a number of interest, where q is a query, g the
direction of that number in the layer's output, and C what the optimizer made of the slot's step. The sum can be taken
in three orders, which differ in cost alone:

- one number for each query and slot: `KeyScores` for k·q, `Contraction` for the whole product;
- queries first: with `M = Σ g⊗q` over the rows of an input, each slot needs one product (`Contraction(summed=True)`);
- slots first: with `Σ C δ⊗k` over the slots of a group (`slot_sums`), each input needs one product (`group_products`).

Stored rows are multiplied as they lie in the file. A row's scale is applied to its products, not to the row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.dual_form import Factor, Side, act, act_transposed, linear_map, outer_sum
from spotlights.memory.blocks import Block
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.layer_reader import LayerReader, StoredRows
from spotlights.sparse_rows import SparseRows, columns_of, dense, products, scaled_rows, weighted_sum

_INPUTS_BYTES = 64 << 20
_FEW = 0.8
"""Picking columns has a cost too: it pays only if a good part is left out."""


# -- what multiplies δ⊗k in the trained weights: a number, or a matrix --------------------------


@dataclass(frozen=True)
class WeightShare:
    """A share of a layer's weight and biases, in float64."""

    weight: Float[Tensor, "out_features in_group"]
    biases: Float[Tensor, "biases out_features"]

    @classmethod
    def joined(cls, entry: LayerEntry, parameters: Mapping[str, Tensor]) -> WeightShare:
        """Of a layer's parameters by name, as `LayerEntry.split` gives them."""
        weight = torch.cat([parameters[name] for name in entry.weight_columns], dim=1)
        return cls(weight, stacked([parameters[name] for name in entry.bias_names], entry.out_features))

    @property
    def bias(self) -> Float[Tensor, "out_features"]:
        """The sum of all biases: what is added to an output, whatever the query."""
        return self.biases.sum(dim=0)

    @property
    def matrix(self) -> Float[Tensor, "out_features in_group_and_biases"]:
        """The weight with one more column for each bias."""
        return torch.cat([self.weight, self.biases.T], dim=1)

    def __add__(self, other: WeightShare) -> WeightShare:
        return WeightShare(self.weight + other.weight, self.biases + other.biases)

    def output(
        self, queries: Float[Tensor, "queries in_features"] | SparseRows
    ) -> Float[Tensor, "queries out_features"]:
        """The output for some queries, in float64."""
        return linear_map(queries.double(), self.weight) + self.bias


def stacked(rows: list[Float[Tensor, "width"]], width: int) -> Float[Tensor, "rows width"]:
    """Rows as a matrix, which may have none."""
    return torch.stack(rows) if rows else torch.zeros(0, width, dtype=torch.float64)


@dataclass(frozen=True)
class RowFactors:
    """One number for each slot of a block."""

    weight: Float[Tensor, "rows"]
    """Multiplies δ⊗k."""
    biases: Float[Tensor, "biases rows"]
    """Multiplies δ in the sum for each bias."""
    initial: None = None
    rounding: None = None

    @property
    def bias(self) -> Float[Tensor, "rows"]:
        """All biases have the same gradient, so their sum gets the sum of their factors times that gradient."""
        return self.biases.sum(dim=0)

    def apply(self, weight: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """The factors are in the sums already."""
        return weight, biases


@dataclass(frozen=True, eq=False)
class StepNumbers:
    """`initial + Σ_t weight[step_t] δ_t⊗k_t`, and the same for each bias."""

    initial: WeightShare
    weight: Float[Tensor, "steps"]
    biases: Float[Tensor, "biases steps"]
    note: str | None = None
    """What a reader of the numbers must know of the optimizer's own arithmetic."""

    @cached_property
    def bias(self) -> Float[Tensor, "steps"]:
        return self.biases.sum(dim=0)

    def factors(self, block: Block) -> RowFactors:
        steps = block.column("step")
        return RowFactors(self.weight[steps], self.biases[:, steps])


@dataclass(frozen=True)
class WeightFactor:
    """The factor of one of the weights that make up a layer's matrix."""

    columns: slice
    """The columns of the matrix that belong to this weight."""
    side: Side
    factor: Factor

    def of(self, units: Int64[Tensor, "units"] | None, features: Int64[Tensor, "features"] | None) -> WeightFactor:
        """The factor of some output units and input features of a layer that has one weight."""
        if not isinstance(self.factor, Tensor) or self.side != "entries":
            return self
        some = self.factor if units is None else self.factor.index_select(0, units)
        some = some if features is None else some.index_select(1, features)
        return WeightFactor(slice(None), self.side, some)


@dataclass(frozen=True)
class StepFactors:
    """One factor for all slots of a block, which are of one step: a number or a matrix for each parameter."""

    weights: tuple[WeightFactor, ...]
    biases: tuple[Factor, ...]
    initial: WeightShare | None = None
    """What is left of the initial weights; known once the sweep has passed the first step. So is"""
    rounding: WeightShare | None = None
    """what rounding did: movement that no example taught, as the recorded slots have it."""

    @property
    def bias(self) -> Factor:
        return sum(self.biases, start=0.0)

    def apply(self, weight: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """What sums of δ⊗k and of δ (one row for each bias) become in the trained weights."""
        parts = [act(own.side, own.factor, weight[:, own.columns]) for own in self.weights]
        rows = [factor * row for factor, row in zip(self.biases, biases, strict=True)]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], torch.stack(rows) if rows else biases


Factors = RowFactors | StepFactors
_PLAIN = StepFactors((WeightFactor(slice(None), "entries", 1.0),), (1.0,))
"""The gradient as it is."""


# -- one number for each query and slot ---------------------------------------------------------


@dataclass(frozen=True)
class DirectedQueries:
    """Queries, each with the direction of the number of interest in the layer's output."""

    queries: Float[Tensor, "queries in_features"] | SparseRows
    directions: Float[Tensor, "queries out_features"]
    ones: Float[Tensor, "queries"]
    """The query that the bias's key 1 meets. Only transformed queries have another number than 1 here."""

    def __len__(self) -> int:
        return len(self.queries)

    def __getitem__(self, some: slice) -> DirectedQueries:
        return DirectedQueries(self.queries[some], self.directions[some], self.ones[some])

    def to(self, dtype: torch.dtype) -> DirectedQueries:
        return DirectedQueries(self.queries.to(dtype), self.directions.to(dtype), self.ones.to(dtype))

    @property
    def bias_directions(self) -> Float[Tensor, "queries out_features"]:
        return self.directions * self.ones[:, None]


class KeyScores:
    """k·q for some queries and any block of a layer.

    Where keys are stored once, each distinct key is multiplied once and its score is looked up. With `cosine`, keys and
    queries are scaled to length 1. With `key_parts` (each a run of neighbouring parts of a key), only these parts
    count, each is scaled by itself, and their scores are added up.
    """

    def __init__(
        self,
        layer: LayerReader,
        queries: Float[Tensor, "queries in_features"] | SparseRows,
        *,
        cosine: bool = False,
        key_parts: Sequence[Sequence[str]] | None = None,
    ) -> None:
        queries = queries.to(layer.storage.compute_dtype)
        self._used: Tensor | None = None
        """The columns of the keys that count, where queries are sparse."""
        if isinstance(queries, SparseRows):
            self._used = queries.used
            queries = queries.columns(self._used)
        self._cosine, self._queries, named = cosine, queries, layer.entry.stretches
        self._parts: list[tuple[slice, list[int], Tensor]] = []
        """For each run of neighbouring parts: its columns, the numbers of the parts, and its columns of the queries."""
        for names in key_parts or [tuple(named)]:
            columns = slice(named[names[0]].start, named[names[-1]].stop)
            own = queries if self._used is not None else queries[:, columns]
            numbers = [number for number, name in enumerate(named) if name in names]
            self._parts.append((columns, numbers, own / _norms(own)[:, None] if cosine else own.contiguous()))
        self._table: Tensor | None = None
        if layer.entry.indexed:
            self._table = queries.new_zeros(len(queries), layer.distinct_keys)
            for rows in layer.key_table():
                self._fill(self._table[:, rows.place], rows)

    def __call__(self, block: Block) -> Float[Tensor, "queries rows"]:
        if self._table is not None:
            return self._table.index_select(1, block.key_numbers())
        scores = self._queries.new_empty(len(self._queries), len(block))
        for rows in block.keys():  # noqa: SIM118 (not a dict)
            self._fill(scores[:, rows.place], rows)
        return scores

    def _fill(self, scores: Float[Tensor, "queries rows"], rows: StoredRows) -> None:
        for place, (columns, numbers, queries) in enumerate(self._parts):
            out = scores if place == 0 else torch.empty_like(scores)
            keys: Tensor | SparseRows = rows.rows
            if self._used is not None:
                out.copy_(queries @ columns_of(keys, self._used).T)
            elif isinstance(keys, SparseRows):
                out.copy_(products(queries, keys))
            else:
                keys = keys[:, columns]
                if len(queries) == 1:
                    torch.mv(keys, queries[0], out=out[0])
                else:
                    out.copy_(queries @ keys.T)
            if self._cosine:
                out /= _norms(keys if rows.norms is None else rows.norms[:, numbers])
            if place:
                scores += out
        if rows.scale is not None and (rows.norms is not None or not self._cosine):
            scores *= rows.scale


def _norms(rows: Float[Tensor, "rows features"] | SparseRows) -> Float[Tensor, "rows"]:
    norms = rows.norms() if isinstance(rows, SparseRows) else rows.norm(dim=1)
    return norms.clamp_min_(torch.finfo(rows.dtype).tiny)


def error_scores(block: Block, directions: Float[Tensor, "queries out_features"]) -> Float[Tensor, "queries rows"]:
    """δ·g for each direction and slot."""
    scores = directions.new_empty(len(directions), len(block))
    for errors in block.errors():
        rows = errors.rows
        some = directions @ rows.T if isinstance(rows, Tensor) else products(directions, rows)
        scores[:, errors.place] = errors.times_scale(some)
    return scores


def error_norms(block: Block) -> Float[Tensor, "rows"]:
    """‖δ‖ of each slot."""
    norms = torch.empty(len(block), dtype=block.layer.storage.compute_dtype)
    for errors in block.errors():
        some = errors.rows.norms() if isinstance(errors.rows, SparseRows) else errors.rows.norm(dim=1)
        norms[errors.place] = errors.times_scale(some)
    return norms


class Contraction:
    """What each slot of a block adds to the number of interest of each query, or, `summed`, of all queries together."""

    def __init__(self, layer: LayerReader, asked: DirectedQueries, *, summed: bool = False) -> None:
        self._layer = layer
        self._given = asked = asked.to(layer.storage.compute_dtype)
        self._features: Tensor | None = None
        """The only input features that count, where queries are sparse: the rest of the layer is as if it were not."""
        if isinstance(asked.queries, SparseRows):
            self._features = asked.queries.used
            asked = DirectedQueries(asked.queries.columns(self._features), asked.directions, asked.ones)
        self._asked = asked
        self._channel_groups = layer.entry.groups
        self._summed = summed and len(asked) > 1
        directions = self._asked.bias_directions
        self._bias_directions = directions.sum(dim=0, keepdim=True) if self._summed else directions

    def __call__(self, block: Block, factors: Factors) -> Float[Tensor, "queries rows"]:
        """The values of a block's slots, with their factors."""
        if isinstance(factors, StepFactors):
            return self._through_weights(block, factors.weights) + self._through_bias(block, factors.bias)
        weight, bias = (numbers.to(self._asked.directions.dtype) for numbers in (factors.weight, factors.bias))
        if self._matrix_is_cheaper or self._channel_groups > 1:
            products = self._through_weights(block, _PLAIN.weights).mul_(weight)
            return products.add_(self._through_bias(block, 1.0).mul_(bias))
        products = self._key_scores(block)
        products *= weight
        products.addr_(self._asked.ones, bias)
        products.mul_(error_scores(block, self._asked.directions))
        return products.sum(dim=0, keepdim=True) if self._summed else products

    @cached_property
    def _key_scores(self) -> KeyScores:
        return KeyScores(self._layer, self._given.queries)

    @property
    def _matrix_is_cheaper(self) -> bool:
        entry = self._layer.entry
        rows = len(self._asked) * (entry.in_features + entry.out_features)
        return self._summed and rows >= math.prod(entry.matrix_shape)

    def _through_bias(self, block: Block, factor: Factor) -> Float[Tensor, "queries rows"]:
        return error_scores(block, self._bias_directions * factor)

    def _through_weights(self, block: Block, factors: Sequence[WeightFactor]) -> Float[Tensor, "queries rows"]:
        values = self._bias_directions.new_empty(len(self._bias_directions), len(block))
        if self._features is not None:
            factors = [factor.of(None, self._features) for factor in factors]
        matrix = self._summed_matrix(factors) if self._summed else None
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            rows = dense(keys.rows) if self._features is None else columns_of(keys.rows, self._features)
            if matrix is not None:
                of_slots = _with_matrix(rows, errors.rows, matrix)[None]
            elif self._channel_groups > 1:
                of_slots = self._by_channel_group(rows, dense(errors.rows), factors[0].factor)
            else:
                of_slots = self._by_query(rows, errors.rows, factors)
            for scale in (keys.scale, errors.scale):
                if scale is not None:
                    of_slots *= scale
            values[:, errors.place] = of_slots
        return values

    # queries first

    @cached_property
    def _query_matrix(self) -> Float[Tensor, "out_features in_group"]:
        return outer_sum(self._asked.directions, self._asked.queries, self._channel_groups)

    def _summed_matrix(self, factors: Sequence[WeightFactor]) -> Float[Tensor, "out_features in_group"]:
        parts = [act_transposed(own.side, own.factor, self._query_matrix[:, own.columns]) for own in factors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    # query by query

    def _by_query(self, keys: Tensor, errors: Tensor | SparseRows, factors: Sequence[WeightFactor]) -> Tensor:
        total: Tensor | None = None
        all_directions = self._asked.directions
        if isinstance(errors, SparseRows):  # their tokens are the only output units that count
            units = errors.used
            all_directions, factors = all_directions[:, units], [factor.of(units, None) for factor in factors]
            errors = errors.columns(units)
        for factor in factors:
            own_keys, queries = keys[:, factor.columns], dense(self._asked.queries)[:, factor.columns]
            directions, matrix = all_directions, factor.factor
            if isinstance(matrix, Tensor) and factor.side == "entries":
                pairs = zip(queries, directions, strict=True)
                products = torch.stack([_sparse_products(own_keys, errors, *pair, matrix) for pair in pairs])
            else:
                if isinstance(matrix, Tensor) and factor.side == "left":
                    directions = directions @ matrix
                elif isinstance(matrix, Tensor):
                    queries = queries @ matrix.T
                products = (queries @ own_keys.T).mul_(directions @ errors.T)
                products = products if isinstance(matrix, Tensor) else products.mul_(matrix)
            total = products if total is None else total.add_(products)
        assert total is not None
        return total

    def _by_channel_group(self, keys: Tensor, errors: Tensor, factor: Factor) -> Tensor:
        groups, (queries, directions) = self._channel_groups, (dense(self._asked.queries), self._asked.directions)
        if keys.shape[1] == errors.shape[1] == groups:  # a diagonal layer: one product of all entries
            return (queries * directions * (factor[:, 0] if isinstance(factor, Tensor) else factor)) @ (keys * errors).T
        matrices = (outer_sum(g[None], q[None], groups) * factor for q, g in zip(queries, directions, strict=True))
        return torch.stack([linear_map(keys, matrix).mul_(errors).sum(dim=1) for matrix in matrices])


def _with_matrix(
    keys: Float[Tensor, "rows in_features"],
    errors: Float[Tensor, "rows out_features"] | SparseRows,
    matrix: Float[Tensor, "out_features in_group"],
) -> Float[Tensor, "rows"]:
    """`δᵀ M k` of each row."""
    if isinstance(errors, SparseRows):
        return errors.times(matrix.T).mul_(keys).sum(dim=1)
    return linear_map(keys, matrix).mul_(errors).sum(dim=1)


def _sparse_products(
    keys: Float[Tensor, "rows in_features"],
    errors: Float[Tensor, "rows out_features"],
    query: Float[Tensor, "in_features"],
    direction: Float[Tensor, "out_features"],
    matrix: Float[Tensor, "out_features in_features"],
) -> Float[Tensor, "rows"]:
    """`Σ_ij g_i C_ij δ_i k_j q_j` without zeros: behind a ReLU, and on black pixels, most entries are exactly 0."""
    units, features = direction.nonzero().flatten(), query.nonzero().flatten()
    if len(units) <= _FEW * len(direction):
        errors, direction, matrix = errors.index_select(1, units), direction[units], matrix[units]
    if len(features) <= _FEW * len(query):
        keys, query, matrix = keys.index_select(1, features), query[features], matrix.index_select(1, features)
    if len(matrix) <= matrix.shape[1]:
        return ((keys * query) @ matrix.T).mul_(errors) @ direction
    return ((errors * direction) @ matrix).mul_(keys) @ query


# -- slots first ---------------------------------------------------------------------------------


def slot_sums(
    block: Block, factors: Factors, codes: Int64[Tensor, "rows"] | None = None
) -> Iterator[tuple[int, int, Float[Tensor, "out_features in_group"], Float[Tensor, "biases out_features"]]]:
    """`Σ C δ⊗k` and `Σ C δ` over the slots of a block, or over each group of them, given its number in `codes`.

    Gives groups, each with its number of slots and its sums for weight and biases; a group may come more than once.
    """
    for keys, errors in zip(block.keys(), block.errors(), strict=True):
        weight, biases = _row_factors(factors, errors, keys)
        of_keys, of_errors, groups = keys.rows, errors.rows, [(0, slice(0, len(errors.rows)))]
        if codes is not None:
            sorted_codes, order = codes[errors.place].sort(stable=True)
            numbers, counts = sorted_codes.unique_consecutive(return_counts=True)
            edges = itertools.pairwise([0, *counts.cumsum(0).tolist()])
            groups = list(zip(numbers.tolist(), itertools.starmap(slice, edges), strict=True))
            of_keys, of_errors, biases = of_keys[order], of_errors[order], biases[:, order]
            weight = None if weight is None else weight[order]
        scaled = of_errors if weight is None else scaled_rows(of_errors, weight)
        for group, some in groups:
            product = outer_sum(scaled[some], of_keys[some], block.layer.entry.groups)
            of_ones = weighted_sum(biases[:, some], of_errors[some].to(biases.dtype))
            yield (group, some.stop - some.start, *factors.apply(product, of_ones))


def _row_factors(
    factors: Factors, errors: StoredRows, keys: StoredRows
) -> tuple[Float[Tensor, "rows"] | None, Float[Tensor, "biases rows"]]:
    """What to multiply each row's δ⊗k by (None for 1), and its δ for each bias; in float64 for exact sums of biases."""
    if isinstance(factors, RowFactors):
        weight, biases = factors.weight[errors.place], factors.biases[:, errors.place]
    else:
        weight, biases = None, torch.ones(len(factors.biases), len(errors.rows), dtype=torch.float64)
    if errors.scale is not None:
        weight, biases = errors.scale if weight is None else weight * errors.scale, biases * errors.scale
    if keys.scale is not None:
        weight = keys.scale if weight is None else weight * keys.scale
    return weight, biases


def gradient_of(block: Block) -> tuple[Float[Tensor, "out_features in_group"], Float[Tensor, "out_features"]]:
    """What some slots add to the gradient of the matrix and of each bias, as `backward` left them."""
    entry, dtype = block.layer.entry, block.layer.storage.compute_dtype
    weight, bias = torch.zeros(entry.matrix_shape, dtype=dtype), torch.zeros(entry.out_features, dtype=dtype)
    for _, _, of_weight, of_bias in slot_sums(block, _PLAIN):
        weight += of_weight
        bias += of_bias[0]
    return weight, bias


def add_gradient(weight: Float[Tensor, "out_features in_group"], block: Block, *, keep: float, factor: float) -> None:
    """`weight ← keep·weight + factor·Σ δ⊗k` over some slots of a layer without channel groups, in place."""
    for keys, errors in zip(block.keys(), block.errors(), strict=True):
        rows = errors.scaled if keys.scale is None else scaled_rows(errors.scaled, keys.scale)
        if isinstance(rows, Tensor) and isinstance(keys.rows, Tensor):
            weight.addmm_(rows.T, keys.rows, beta=keep, alpha=factor)
        else:
            weight.mul_(keep).add_(outer_sum(rows, keys.rows, 1), alpha=factor)
        keep = 1.0
    if keep != 1.0:
        weight.mul_(keep)


def error_sums(block: Block) -> tuple[Float[Tensor, "out_features"], Float[Tensor, "out_features"]]:
    """`Σ δ` and `Σ |δ|` over some slots."""
    sums = torch.zeros(2, block.layer.entry.out_features, dtype=block.layer.storage.compute_dtype)
    for errors in block.errors():
        ones = sums.new_ones(1, len(errors.rows)) if errors.scale is None else errors.scale[None]
        sums[0] += weighted_sum(ones, errors.rows)[0]
        sums[1] += weighted_sum(ones.abs(), errors.rows.abs())[0]
    return sums[0], sums[1]


def group_products(
    weights: Float[Tensor, "groups out_features in_group"],
    biases: Float[Tensor, "groups out_features"],
    asked: DirectedQueries,
    inputs: Sequence[int],
) -> Float[Tensor, "inputs groups"]:
    """What each group of slots, given as its part of the weights, adds to each input; in float64.

    `inputs`: how many queries each input has, one input's behind the other's.
    """
    channel_groups = asked.queries.shape[1] // weights.shape[2]
    flat = weights.flatten(1)
    rows_of = list(itertools.starmap(slice, itertools.pairwise(itertools.accumulate(inputs, initial=0))))
    totals = torch.empty(len(inputs), len(biases), dtype=torch.float64)
    at_once = max(1, _INPUTS_BYTES // (8 * flat.shape[1]))
    queries, directions, ones = asked.queries, asked.directions, asked.ones
    for start in range(0, len(inputs), at_once):
        some = rows_of[start : start + at_once]
        outer = [outer_sum(directions[r].double(), queries[r].double(), channel_groups) for r in some]
        of_bias = torch.stack([ones[r].double() @ directions[r].double() for r in some])
        totals[start : start + len(some)] = torch.stack(outer).flatten(1) @ flat.T + of_bias @ biases.T
    return totals
