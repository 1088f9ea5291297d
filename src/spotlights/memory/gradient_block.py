"""A block of the gradient that the optimizer saw, and how far the slots of its step explain it.

`G ≈ γ · Σ δ ⊗ k` on the block: least squares gives γ, what the gradient was multiplied by between `backward`
and `step` (clipping, loss scaling), and the rest is the share that no slot explains (a second use of the
weight, a penalty in the loss). The slots are taken as they are stored, so the rounding of a lossy storage
shows in that share too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from spotlights.dual_form import GradientProbe, probe_gradient

if TYPE_CHECKING:
    from spotlights.memory.slots import Rows

Part = slice
UNITS, FEATURES = 16, 16
"""A block has at most so many."""
ENTRIES = UNITS * FEATURES + UNITS
"""Those of a weight and its bias."""


@dataclass(frozen=True)
class GradientBlock:
    """Entries of the gradients of a weight and its bias; None for one that has no gradient."""

    units: Part
    features: Part
    """Among those of one group."""
    weight: Float[np.ndarray, "units features"] | None
    bias: Float[np.ndarray, "units"] | None
    group: tuple[int, int]
    """How many units and how many features a group of the layer has."""

    def any(self) -> bool:
        return any(part is not None and bool(part.any()) for part in (self.weight, self.bias))

    def compare(self, rows: Iterable[Rows], rounding: float) -> GradientProbe:
        """With the same block of what the rows sum up to; `rounding` is that of their numbers."""
        return probe_gradient(self.seen(), self.explained(rows), rounding)

    def seen(self) -> Float[np.ndarray, "entries"]:
        """All entries in a row."""
        return np.concatenate([part.reshape(-1) for part in self._parts()])

    def explained(self, rows: Iterable[Rows]) -> Float[np.ndarray, "entries"]:
        """The same entries of what the rows sum up to."""
        found = [np.zeros_like(part) for part in self._parts()]
        for each in rows:
            errors = each.some_errors(self.units)
            if self.weight is not None:
                for units, features in self._within_groups():
                    found[0][units] += errors[:, units].T @ each.some_keys(features)
            if self.bias is not None:
                found[-1] += errors.sum(axis=0)
        return np.concatenate([part.reshape(-1) for part in found])

    def _within_groups(self) -> Iterator[tuple[Part, Part]]:
        """For each group that the block has a share in: which of the block's units, and which entries of the keys."""
        of_group, width = self.group
        for group in range(self.units.start // of_group, (self.units.stop - 1) // of_group + 1):
            first, end = max(self.units.start, group * of_group), min(self.units.stop, (group + 1) * of_group)
            shift = group * width
            yield (
                slice(first - self.units.start, end - self.units.start),
                slice(shift + self.features.start, shift + self.features.stop),
            )

    def _parts(self) -> list[np.ndarray]:
        return [part for part in (self.weight, self.bias) if part is not None]
