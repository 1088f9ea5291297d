"""The gradients of all examples, and `A Aᵀ`: what the joint estimate of influence solves with (`query/joint.py`).

A has a row for each example and a column for each weight: too large to hold. `A Aᵀ` is a sum over layers, and over
blocks of a layer's output units, so A is made block by block, by plans over the slots. Where keys are stored once, a
layer needs no more than `(errors·errorsᵀ) ∘ (keys·keysᵀ)`. Beyond `EXACT` examples the inverse is that of Nyström's
approximation from `LANDMARKS` examples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.query.contraction import DirectedQueries
from spotlights.query.distinct_keys import KeysNumbered
from spotlights.query.engine import View
from spotlights.query.reducers import Reducer
from spotlights.query.whitening import with_one
from spotlights.sparse_rows import dense

EXACT, LANDMARKS = 10_000, 2_000
"""Up to so many examples the inverse is exact; beyond, it is approximated from so many of them."""
_BYTES = 256 << 20
"""What the gradients of all examples may take at once."""
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class VisitNumbers:
    """A number for each visit of an example, found by the columns of a slot. Plain data."""

    examples: Int64[Tensor, "examples"]
    """The values of the column, sorted."""
    keys: Int64[Tensor, "visits"]
    """Of each visit the place of its example times `steps` plus its step, sorted."""
    steps: int
    numbers: Float[Tensor, "visits"]

    def of(self, block: Block) -> tuple[Int64[Tensor, "rows"], Float[Tensor, "rows"]]:
        """The place of each slot's example, and its visit's number; 0 for slots of no such visit."""
        column = block.column("example")
        places = torch.searchsorted(self.examples, column).clamp_(max=len(self.examples) - 1)
        wanted = places * self.steps + block.column("step")
        at = torch.searchsorted(self.keys, wanted).clamp_(max=len(self.keys) - 1)
        known = (self.examples[places] == column) & (self.keys[at] == wanted)
        return places, torch.where(known, self.numbers[at], 0.0)


# -- the examples' gradients, layer by layer --------------------------------------------------------


@dataclass(eq=False)
class ExampleGradientsReducer(Reducer):
    """`A` of one layer for some of its output units: `Σ w δ⊗[k; 1]` over the slots of each example."""

    adds = ("sums",)
    visits: VisitNumbers
    units: slice
    width: int
    """Numbers in a key, with the 1 of a bias."""
    bias: bool
    dtype: torch.dtype

    def start(self) -> None:
        units = self.units.stop - self.units.start
        self.sums = torch.zeros(len(self.visits.examples), units, self.width, dtype=self.dtype)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            scale = errors.times_scale(numbers[errors.place])
            rows, owners = dense(keys.scaled).to(self.dtype), places[errors.place]
            weighted = dense(errors.rows)[:, self.units].to(self.dtype) * scale[:, None].to(self.dtype)
            used = (scale != 0).nonzero().flatten()
            order = used[owners[used].argsort(stable=True)]
            self._add(owners[order], weighted[order], with_one(rows[order], bias=self.bias))

    def _add(self, owners: Tensor, errors: Tensor, keys: Tensor) -> None:
        """Rows sorted by their examples: those of an example side by side, then one product for each example."""
        examples, counts = owners.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        size = max(1, _CHUNK_BYTES // (8 * max(errors.shape[1] * self.width, 1)))
        for first in range(0, len(examples), size):
            some = slice(first, first + size)
            most = int(counts[some].max())
            place = torch.arange(most)
            inside = place < counts[some, None]
            rows = torch.where(inside, starts[some, None] + place, 0)
            left = torch.where(inside[..., None], errors[rows], 0.0)
            self.sums.index_add_(0, examples[some], left.transpose(1, 2) @ keys[rows])


@dataclass(eq=False)
class KeyPairsReducer(Reducer):
    """Which examples came with which of the keys that are stored once."""

    visits: VisitNumbers
    distinct_keys: int

    def start(self) -> None:
        self.pairs = torch.zeros(0, dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        self._take((places * self.distinct_keys + block.key_numbers())[numbers != 0])

    def merge(self, other: Any) -> None:
        self._take(other.pairs)

    def _take(self, pairs: Int64[Tensor, "_"]) -> None:
        self.pairs = torch.cat([self.pairs, pairs]).unique()


@dataclass(eq=False)
class KeyErrorsReducer(Reducer):
    """`Σ w δ` over the slots of each example with the same key."""

    adds = ("sums",)
    visits: VisitNumbers
    distinct_keys: int
    pairs: Int64[Tensor, "pairs"]
    out_features: int
    dtype: torch.dtype

    def start(self) -> None:
        self.sums = torch.zeros(len(self.pairs), self.out_features, dtype=self.dtype)

    def update(self, block: Block, values: Any) -> None:
        places, numbers = self.visits.of(block)
        at = torch.searchsorted(self.pairs, places * self.distinct_keys + block.key_numbers())
        at.clamp_(max=len(self.pairs) - 1)
        for errors in block.errors():
            scale = errors.times_scale(numbers[errors.place])
            weighted = dense(errors.rows).to(self.dtype) * scale[:, None].to(self.dtype)
            self.sums.index_add_(0, at[errors.place], weighted)


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """The gradient F of each input's number of interest with respect to a layer's weights: `Σ_rows g ⊗ [q; 1]`."""

    asked: DirectedQueries
    owners: Int64[Tensor, "queries"]
    inputs: int

    def keys(self, some: slice | Tensor = slice(None), *, bias: bool) -> Float[Tensor, "queries features"]:
        """The queries, with what the key 1 of a bias meets."""
        keys = dense(self.asked.queries[some])
        return torch.cat([keys, self.asked.ones[some, None].to(keys.dtype)], dim=1) if bias else keys

    def gradient(self, units: slice, *, bias: bool) -> Float[Tensor, "inputs gradient"]:
        """F for some output units, flattened."""
        queries = self.keys(bias=bias)
        directions = self.asked.directions[:, units].to(queries.dtype)
        gradients = queries.new_zeros(self.inputs, directions.shape[1], queries.shape[1])
        for some in torch.arange(len(queries)).split(max(1, _CHUNK_BYTES // (8 * max(gradients[:1].numel(), 1)))):
            gradients.index_add_(0, self.owners[some], directions[some, :, None] * queries[some, None])
        return gradients.flatten(1)


class LayerGradients:
    """A of one layer, in parts whose products add up; never as a whole."""

    def __init__(self, view: View, recorded: LayerReader, visits: VisitNumbers, *, by_keys: bool = True) -> None:
        """`by_keys`: to use that keys are stored once, where that is the shorter way."""
        self._view, self._recorded, self._visits = view, recorded, visits
        entry, self._dtype = recorded.entry, recorded.storage.compute_dtype
        self._bias = bool(set(entry.bias_names) & set(entry.trained))
        self._width = entry.in_features + self._bias
        self._pairs: Tensor | None = None
        """Examples with their keys, where keys are stored once and that is the shorter way."""
        examples = len(visits.examples)
        self.cost = examples * min(examples, EXACT) * entry.out_features * self._width
        """Multiplications for the products of all pairs of examples."""
        self.cost_of_sums = recorded.slots * entry.out_features * self._width
        self.size = 1.0
        """What the layer's products are divided by: the mean square of its examples' gradients, once balanced."""
        if entry.indexed and by_keys:
            pairs = self._reduce(KeyPairsReducer(visits, recorded.distinct_keys)).pairs
            cost = len(pairs) * min(len(pairs), EXACT) * (self._width + entry.out_features)
            if len(pairs) and cost < self.cost:
                self._pairs, self.cost = pairs, cost

    @property
    def by_keys(self) -> bool:
        """Whether products are made of errors and of keys that are stored once."""
        return self._pairs is not None

    def _reduce(self, reducer: Any) -> Any:
        return self._view.reduce(self._recorded.name, reducer, selection=self._view.all_slots)

    def _blocks(self) -> Iterator[tuple[slice, Float[Tensor, "examples gradient"]]]:
        """A for some output units after the other."""
        units = max(1, _BYTES // (len(self._visits.examples) * self._width * self._dtype.itemsize))
        for first in range(0, self._recorded.entry.out_features, units):
            some = slice(first, min(first + units, self._recorded.entry.out_features))
            reducer = ExampleGradientsReducer(self._visits, some, self._width, self._bias, self._dtype)
            yield some, self._reduce(reducer).sums.flatten(1)

    def _of_pairs(self, pairs: Tensor) -> tuple[Int64[Tensor, "pairs"], Tensor, Tensor]:
        """The example, the error and the key of each pair."""
        distinct = self._recorded.distinct_keys
        out_features = self._recorded.entry.out_features
        errors = self._reduce(KeyErrorsReducer(self._visits, distinct, pairs, out_features, self._dtype)).sums
        (keys,) = self._view.values((self._recorded.name, KeysNumbered(pairs % distinct)))
        return pairs // distinct, errors, with_one(keys.to(self._dtype), bias=self._bias)

    def gram(
        self, landmarks: Int64[Tensor, "landmarks"], *, balance: bool
    ) -> tuple[Float[Tensor, "examples landmarks"], Float[Tensor, "examples"]]:
        """The layer's part of `A Aᵀ`: its columns for some examples, and its diagonal."""
        examples = len(self._visits.examples)
        gram = torch.zeros(examples, len(landmarks), dtype=torch.float64)
        diagonal = torch.zeros(examples, dtype=torch.float64)
        if self._pairs is None:
            every = torch.equal(landmarks, torch.arange(examples))
            for _, flat in self._blocks():  # hundreds of MB: no copy of it is made unless it has to be
                products = flat @ (flat if every else flat[landmarks]).T
                diagonal += products.diagonal() if every else torch.linalg.vector_norm(flat, dim=1).double().square()
                gram += products
        else:
            self._add_pairs(gram, diagonal, landmarks, self._pairs)
        mean = float(diagonal.mean())
        if balance and mean > 0:
            self.size = mean
        return gram.div_(self.size), diagonal.div_(self.size)

    def _add_pairs(self, gram: Tensor, diagonal: Tensor, landmarks: Tensor, pairs: Tensor) -> None:
        owners, errors, keys = self._of_pairs(pairs)
        place = torch.full((len(self._visits.examples),), -1)
        place[landmarks] = torch.arange(len(landmarks))
        of_landmarks = (place[owners] >= 0).nonzero().flatten()
        columns = place[owners[of_landmarks]]
        for some in torch.arange(len(owners)).split(max(1, _CHUNK_BYTES // (8 * max(len(of_landmarks), 1)))):
            products = (errors[some] @ errors[of_landmarks].T) * (keys[some] @ keys[of_landmarks].T)
            summed = products.new_zeros(len(some), len(landmarks)).index_add_(1, columns, products)
            gram.index_add_(0, owners[some], summed.to(gram.dtype))
        for apart in range(int(torch.bincount(owners).max())):  # two keys of one example lie side by side
            first, second = slice(0, len(owners) - apart), slice(apart, None)
            both = (errors[first] * errors[second]).sum(dim=1) * (keys[first] * keys[second]).sum(dim=1)
            same = (owners[first] == owners[second]) * (1.0 if apart == 0 else 2.0)
            diagonal.index_add_(0, owners[first], both.double() * same)

    def add_products(self, asked: LayerQueries, products: Float[Tensor, "examples inputs"]) -> None:
        """Adds the layer's part of `A F`."""
        if self._pairs is None:
            for units, flat in self._blocks():
                products += flat @ asked.gradient(units, bias=self._bias).to(flat.dtype).T / self.size
            return
        owners, errors, keys = self._of_pairs(self._pairs)
        for some in torch.arange(len(asked.owners)).split(max(1, _CHUNK_BYTES // (8 * len(owners)))):
            queries = asked.keys(some, bias=self._bias).to(self._dtype)
            directions = asked.asked.directions[some].to(self._dtype)
            both = ((errors @ directions.T) * (keys @ queries.T)).double()
            summed = both.new_zeros(len(both), products.shape[1]).index_add_(1, asked.owners[some], both)
            products.index_add_(0, owners, summed / self.size)

    def not_spanned(self, asked: LayerQueries, solved: Float[Tensor, "inputs examples"]) -> Float[Tensor, "inputs"]:
        """`|F − Aᵀ solved|²`: what of F the examples' gradients do not make up."""
        total = torch.zeros(len(solved), dtype=torch.float64)
        for units, flat in self._blocks():
            total += (asked.gradient(units, bias=self._bias).double() - solved @ flat.double()).square().sum(dim=1)
        return total


# -- the inverse ------------------------------------------------------------------------------------


class Gram:
    """`A Aᵀ`, or its columns for some landmarks, and what its inverse makes of `A F`."""

    def __init__(
        self, layers: Sequence[LayerGradients], examples: int, *, balance: bool, landmarks: int | None = None
    ) -> None:
        places = torch.arange(examples)
        self.landmarks = (LANDMARKS if examples > EXACT else None) if landmarks is None else landmarks
        """How many examples the inverse is approximated from; None where it is exact."""
        if self.landmarks is not None:
            self.landmarks = min(self.landmarks, examples)
            places = (
                torch.randperm(examples, generator=torch.Generator().manual_seed(0))[: self.landmarks].sort().values
            )
        self._places = places
        self._gram = torch.zeros(examples, len(places), dtype=torch.float64)
        self._diagonal = torch.zeros(examples, dtype=torch.float64)
        for layer in layers:
            gram, diagonal = layer.gram(places, balance=balance)
            self._gram += gram
            self._diagonal += diagonal

    def solve(self, products: Float[Tensor, "examples inputs"], damping: float) -> Float[Tensor, "examples inputs"]:
        strength = damping * self._diagonal.mean()
        if not strength > 0:
            return products
        if self.landmarks is None:
            damped = self._gram.clone()
            damped.diagonal().add_(strength)
            return torch.cholesky_solve(products, torch.linalg.cholesky(damped))
        # With K ≈ C W⁻¹ Cᵀ, and the diagonal as it is: (K + D)⁻¹ b = D⁻¹ b − D⁻¹ C (W + Cᵀ D⁻¹ C)⁻¹ Cᵀ D⁻¹ b.
        core = self._gram[self._places]
        core.diagonal().add_(1e-8 * self._diagonal.mean())
        half = torch.linalg.solve_triangular(torch.linalg.cholesky(core), self._gram.T, upper=False)
        rest = (self._diagonal - half.square().sum(dim=0)).clamp_min(0.0) + strength
        inner = half / rest @ half.T
        inner.diagonal().add_(1.0)
        scaled = products / rest[:, None]
        solved = torch.cholesky_solve(half @ scaled, torch.linalg.cholesky(inner))
        return scaled - (half.T @ solved) / rest[:, None]
