"""Rows that are zero but for a few entries: a token as a one-hot row, or how often each token is in a bag.

Their cost does not depend on how wide they are: products gather the entries, sums of outer products add to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor


@dataclass(frozen=True)
class SparseRows:
    """Rows of a wide matrix by their entries. Used like a tensor of shape `shape`, as far as that is needed."""

    places: Int64[Tensor, "*lead entries"]
    """Which entries of a row are not zero. No place comes twice in a row, unless its amount is 0 there."""
    amounts: Float[Tensor, "*lead entries"]
    width: int
    """How many entries a row has."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.places.shape[:-1], self.width))

    @property
    def dtype(self) -> torch.dtype:
        return self.amounts.dtype

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.amounts.nbytes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, rows: Any) -> SparseRows:
        return replace(self, places=self.places[rows], amounts=self.amounts[rows])

    def reshape(self, *shape: int) -> SparseRows:
        """With another leading shape."""
        lead, entries = shape[:-1], self.places.shape[-1]
        return replace(self, places=self.places.reshape(*lead, entries), amounts=self.amounts.reshape(*lead, entries))

    def to(self, *kind: Any) -> SparseRows:
        """On another device, or with numbers of another type."""
        amounts = self.amounts.to(*kind)
        return replace(self, places=self.places.to(amounts.device), amounts=amounts)

    def double(self) -> SparseRows:
        return self.to(torch.float64)

    def cpu(self) -> SparseRows:
        return self.to("cpu")

    def clone(self) -> SparseRows:
        return replace(self, places=self.places.clone(), amounts=self.amounts.clone())

    def min(self) -> Float[Tensor, ""]:
        return self.amounts.min().clamp(max=0.0)

    def abs(self) -> SparseRows:
        return replace(self, amounts=self.amounts.abs())

    def norms(self) -> Float[Tensor, "*lead"]:
        return self.amounts.norm(dim=-1)

    @property
    def used(self) -> Int64[Tensor, "used"]:
        """The places that are not zero in some row."""
        return self.places[self.amounts != 0].unique()

    def dense(self) -> Float[Tensor, "*lead width"]:
        zeros = self.amounts.new_zeros(self.shape)
        return zeros.scatter_add_(-1, self.places, self.amounts)

    def columns(self, which: slice | Int64[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
        """Some columns of the rows, as a matrix; `which` is in ascending order."""
        if isinstance(which, slice):
            which = torch.arange(which.start, which.stop, device=self.places.device)
        if not len(which):
            return self.amounts.new_zeros(len(self), 0)
        at = torch.searchsorted(which, self.places).clamp_(max=len(which) - 1)
        amounts = self.amounts * (which[at] == self.places)
        return self.amounts.new_zeros(len(self), len(which)).scatter_add_(1, at, amounts)

    def times(self, matrix: Float[Tensor, "out_features width"]) -> Float[Tensor, "rows out_features"]:
        """`M k` for each row k."""
        result = matrix.new_zeros(len(self), len(matrix))
        for place, amount in zip(self.places.T, self.amounts.T, strict=True):
            result += matrix[:, place].T * amount[:, None].to(matrix.dtype)
        return result

    def weighted_sum(self, weights: Float[Tensor, "sums rows"]) -> Float[Tensor, "sums width"]:
        """Sums of the rows, each times a number."""
        result = weights.new_zeros(self.width, len(weights))
        for place, amount in zip(self.places.T, self.amounts.T, strict=True):
            result.index_add_(0, place, weights.T * amount[:, None].to(weights.dtype))
        return result.T


Numbers = Shaped[Tensor, "..."] | SparseRows
"""Rows of either kind."""


def joined(rows: Sequence[Numbers]) -> Numbers:
    """One behind the other; all of the same kind."""
    dense = [some for some in rows if isinstance(some, Tensor)]
    if dense:
        return torch.cat(dense)
    sparse = [some for some in rows if isinstance(some, SparseRows)]
    entries = max(some.places.shape[-1] for some in sparse)

    def padded(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([torch.nn.functional.pad(tensor, (0, entries - tensor.shape[-1])) for tensor in tensors])

    places, amounts = padded([some.places for some in sparse]), padded([some.amounts for some in sparse])
    return SparseRows(places, amounts, sparse[0].width)


def columns_of(rows: Numbers, which: Int64[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
    """Some columns of rows of either kind, as a matrix."""
    return rows.index_select(1, which) if isinstance(rows, Tensor) else rows.columns(which)


def scaled_rows(rows: Numbers, by: Float[Tensor, "rows"]) -> Numbers:
    """Each row times a number."""
    by = by[:, None].to(rows.dtype)
    return rows * by if isinstance(rows, Tensor) else replace(rows, amounts=rows.amounts * by)


def dense(rows: Numbers) -> Shaped[Tensor, "..."]:
    return rows if isinstance(rows, Tensor) else rows.dense()


def products(matrix: Float[Tensor, "vectors width"], rows: Numbers) -> Float[Tensor, "vectors rows"]:
    """The product of each vector with each row."""
    return matrix @ rows.T if isinstance(rows, Tensor) else rows.times(matrix).T


def weighted_sum(weights: Float[Tensor, "sums rows"], rows: Numbers) -> Float[Tensor, "sums width"]:
    """Sums of rows, each times a number."""
    return weights @ rows if isinstance(rows, Tensor) else rows.weighted_sum(weights)
