"""Which entries of a step's gradient are rounding alone, and would become a full step all the same.

The gradient of a bias before a batch norm is a sum of errors that cancel. SGD hardly moves by what is left, but a
preconditioner P that divides by its own size makes a full step of it. No example taught such a step: entries where
`|Σ δk|` is no more than the rounding of `Σ |δ||k|`, and where P would amplify that rounding.

`Σ |δ||k|` is bounded by norms first, and added up for the few entries that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.dual_form import outer_sum
from spotlights.memory.blocks import Block
from spotlights.sparse_rows import Numbers, SparseRows, columns_of


@dataclass(frozen=True)
class Magnitudes:
    """What bounds `Σ |δ|⊗|k|` and `Σ |δ|` over some slots: the products `|δ_i||k_j|` of norms, and `√slots |δ_i|`."""

    slots: int
    units: Float[Tensor, "out_features"]
    """Norms `|δ_i|` over the slots."""
    features: Float[Tensor, "in_features"]
    """Norms `|k_j|`."""
    matrix: Float[Tensor, "out_features in_group"] | None
    """The first sum itself, where each unit has keys of its own."""


def magnitudes(block: Block) -> Magnitudes:
    entry, dtype = block.layer.entry, block.layer.storage.compute_dtype
    matrix = torch.zeros(entry.matrix_shape, dtype=dtype) if entry.groups > 1 else None
    features, units = torch.zeros(entry.in_features, dtype=dtype), torch.zeros(entry.out_features, dtype=dtype)
    slots = 0
    for keys, errors in zip(block.keys(), block.errors(), strict=True):
        k, d = keys.scaled, errors.scaled
        slots += len(d)
        units = torch.hypot(units, _column_norms(d))
        if matrix is not None:
            matrix += outer_sum(d.abs(), k.abs(), entry.groups)
        else:
            features = torch.hypot(features, _column_norms(k))
    return Magnitudes(slots, units, features, matrix)


def _column_norms(rows: Numbers) -> Float[Tensor, "features"]:
    if isinstance(rows, SparseRows):
        amounts = rows.amounts.square()
        return replace(rows, amounts=amounts).weighted_sum(amounts.new_ones(1, len(rows)))[0].sqrt()
    return torch.linalg.vector_norm(rows, dim=0)


def magnitudes_at(
    block: Block, units: Int64[Tensor, "entries"], features: Int64[Tensor, "entries"] | None
) -> Float[Tensor, "entries"]:
    """Single entries of `Σ |δ|⊗|k|`, of a layer without channel groups; without features, of `Σ |δ|`."""
    total = torch.zeros(len(units), dtype=block.layer.storage.compute_dtype)
    for keys, errors in zip(block.keys(), block.errors(), strict=True):
        k, d = keys.scaled, errors.scaled
        few = len(units) * len(d) <= d.shape[1] * k.shape[1] * 8
        if features is None:
            total += columns_of(d, units).abs().sum(dim=0)
        elif few and isinstance(k, Tensor) and isinstance(d, Tensor):
            total += (d[:, units] * k[:, features]).abs_().sum(dim=0)
        else:
            total += outer_sum(d.abs(), k.abs(), 1)[units, features]
    return total


def rounded_entries(
    block: Block,
    sizes: Magnitudes,
    P: Float[Tensor, "*shape"],
    summed: Float[Tensor, "*shape"],
    columns: slice | None,
    *,
    limit: float,
    least: float,
) -> Int64[Tensor, "rounded"]:
    """The entries of one parameter, counted flat, that are rounding in one step.

    Args:
        block: the slots of the step.
        sizes: their magnitudes.
        P: the parameter's preconditioner in that step.
        summed: what the slots sum up to.
        columns: of a weight, its columns in the layer's matrix; None for a bias.
        limit: which share of `Σ |δ||k|` is rounding.
        least: the size of `P Σ |δ||k|` from which that rounding counts.
    """

    def rounded(P: Tensor, summed: Tensor, most: Tensor) -> Int64[Tensor, "rounded"]:
        """Of some entries, those that may be rounding if `Σ |δ||k|` is at most this."""
        small = (summed.abs() < most * limit).view(-1).nonzero().flatten()
        return small[P.reshape(-1)[small] * most.reshape(-1)[small] >= least]

    if columns is None:
        units = rounded(P, summed, sizes.units * sizes.slots**0.5)
        exact = magnitudes_at(block, units, None) if len(units) else sizes.units[units]
        return units[rounded(P[units], summed[units], exact)]
    if sizes.matrix is not None:
        return rounded(P, summed, sizes.matrix[:, columns])
    width, features = P.shape[1], sizes.features[columns]
    units = (~((P * features).amax(dim=1) * sizes.units < least)).nonzero().flatten()  # mostly none
    among = rounded(P[units], summed[units], torch.outer(sizes.units[units], features))
    entries = units[among // width] * width + among % width
    if not len(entries):
        return entries
    exact = magnitudes_at(block, entries // width, entries % width + (columns.start or 0))
    return entries[rounded(P.reshape(-1)[entries], summed.reshape(-1)[entries], exact)]
