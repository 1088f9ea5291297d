"""Blocks of the gradients that the optimizer saw, and how far the slots of their steps explain them.

`G ≈ γ · Σ δ ⊗ k` on a block: least squares gives γ, what the gradient was multiplied by between `backward` and
`step` (clipping, loss scaling), and the rest is the share that no slot explains (a second use of the weight, a
penalty in the loss). Every parameter has its own γ: weight and bias may be clipped, frozen or scaled apart. The slots
are taken as they are stored, so the rounding of a lossy storage shows in that share too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float

from spotlights.dual_form import gradient_factor, unexplained_share

if TYPE_CHECKING:
    from spotlights.memory.slots import LayerStep, Rows

Part = slice


class GradientBlock(NamedTuple):
    """Some entries of a parameter's gradient, seen as matrix or row."""

    seen: Float[np.ndarray, "units *features"]
    at: tuple[Part, ...] | None
    """Which units, and which features among those of one group; None if all of the gradient is zero."""


class Group(NamedTuple):
    """How many units and how many features a group of the layer has."""

    units: int
    features: int


def compare(
    log: Sequence[LayerStep], parameters: Sequence[str], group: Group, rounding: float
) -> tuple[dict[str, Float[np.ndarray, "steps"]], Float[np.ndarray, "steps"]]:
    """γ of each parameter at each step, and the unexplained share; `rounding` is that of the slots' storage."""
    explained = [_explain(step.gradients, step.rows, group) for step in log]
    seen, sums = {}, {}
    for name in parameters:
        blocks = [step.gradients[name].seen if name in step.gradients else None for step in log]
        nothing = next((np.zeros_like(block) for block in blocks if block is not None), np.zeros(0, np.float32))
        seen[name] = np.stack([nothing if block is None else block for block in blocks]).reshape(len(log), -1)
        sums[name] = np.stack([each.get(name, nothing) for each in explained]).reshape(len(log), -1)
    if not seen:
        return {}, np.zeros(len(log))
    all_seen = np.concatenate(list(seen.values()), axis=1)
    factors = {name: gradient_factor(seen[name], sums[name], rounding) for name in parameters}
    # Most often all were treated alike: one factor, found from all entries, is then the better one.
    alike = gradient_factor(all_seen, np.concatenate(list(sums.values()), axis=1), rounding)
    near = 16 * max(np.finfo(all_seen.dtype).eps, rounding) * np.abs(alike)
    factors = {name: np.where(np.abs(own - alike) <= near, alike, own) for name, own in factors.items()}
    for name, factor in factors.items():
        # A gradient of zeros: whatever the slots say, nothing of it is used.
        factor[[name in step.gradients and step.gradients[name].at is None for step in log]] = 0.0
    explained_parts = [sums[name] * factors[name][:, None] for name in parameters]
    return factors, unexplained_share(all_seen, np.concatenate(explained_parts, axis=1))


def _explain(blocks: Mapping[str, GradientBlock], rows: Sequence[Rows], group: Group) -> dict[str, np.ndarray]:
    """The same blocks of `Σ δ⊗k` and `Σ δ`."""
    found = {name: np.zeros_like(block.seen) for name, block in blocks.items()}
    for each in rows:
        of_units, errors = None, np.empty((0, 0))
        for name, block in blocks.items():
            if block.at is None:
                continue
            if block.at[0] is not of_units:
                of_units, errors = block.at[0], each.some_errors(block.at[0])
            if len(block.at) == 1:
                found[name] += np.add.reduce(errors)
                continue
            for units, features in _within_groups(*block.at, group):
                found[name][units] += errors[:, units].T @ each.some_keys(features)
    return found


def _within_groups(units: Part, features: Part, group: Group) -> Iterator[tuple[Part, Part]]:
    """For each group that a block has a share in: which of the block's units, and which entries of the keys."""
    for number in range(units.start // group.units, (units.stop - 1) // group.units + 1):
        first, end = max(units.start, number * group.units), min(units.stop, (number + 1) * group.units)
        shift = number * group.features
        yield (
            slice(first - units.start, end - units.start),
            slice(shift + features.start, shift + features.stop),
        )
