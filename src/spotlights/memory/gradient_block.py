"""Blocks of the gradients that the optimizer saw, and how far the slots of their steps explain them.

`G ≈ γ · Σ δ ⊗ k` on a block: least squares gives γ, what the gradient was multiplied by between `backward` and
`step` (clipping, loss scaling), and the rest is the share that no slot explains (a second use of the weight, a
penalty in the loss). Every parameter has its own γ: weight and bias may be clipped, frozen or scaled apart. The slots
are taken as they are stored, so the rounding of a lossy storage shows in that share too.

`blocks_of` gives both sides of the comparison, `compare` its result. In a run of several processes each knows what its
own slots explain; the reader adds that up and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import gradient_factor, unexplained_share
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.storage import follows

if TYPE_CHECKING:
    from spotlights.memory.slots import LayerStep

Part = slice
UNITS, FEATURES = 16, 16
"""A block has at most so many."""
_AT_ONCE = 16384
"""Steps are compared together as long as their slots are fewer: more would not fit into the cache."""
Entries = Mapping[str, Float[np.ndarray, "steps _entries"]]
"""By parameter: entries of its gradients, or of what slots explain of them."""


class GradientBlock(NamedTuple):
    """Some entries of a parameter's gradient, seen as matrix or row; as many at every step."""

    seen: Float[np.ndarray, "units *features"]
    at: tuple[Part, ...] | None
    """Which units, and which features among those of one group; None if all of the gradient is zero."""


def blocks_of(log: Sequence[LayerStep], entry: LayerEntry) -> tuple[Entries, Entries]:
    """The blocks of some steps' gradients, NaN where there is none, and what the steps' slots sum up to in them."""
    dtype = np.float64 if entry.dtype == "float64" else np.float32
    seen, explained = {}, {}
    for name in entry.trained:
        columns = entry.weight_columns.get(name)
        features = 1 if columns is None else min(FEATURES, columns.stop - columns.start)
        shape = len(log), min(UNITS, entry.out_features) * features
        seen[name], explained[name] = np.full(shape, np.nan, dtype), np.zeros(shape, dtype)
    at = 0
    for run in _alike(log):
        here, at = slice(at, at + len(run)), at + len(run)
        sums = explain(run, entry) if run[0].explained is None else run[0].explained
        for name, found in sums.items():
            blocks = np.stack([step.gradients[name].seen for step in run])
            seen[name][here], explained[name][here] = blocks.reshape(len(run), -1), found.reshape(len(run), -1)
    return seen, explained


def _alike(log: Sequence[LayerStep]) -> Iterator[list[LayerStep]]:
    """The steps, in runs that can be compared at once: one call each, one behind the other, and the same block."""
    run: list[LayerStep] = []
    for step in log:
        if run and not (_goes_on(run[-1], step) and len(run) * len(step.rows[0]) < _AT_ONCE):
            yield run
            run = []
        run.append(step)
    if run:
        yield run


def _goes_on(before: LayerStep, after: LayerStep) -> bool:
    if len(before.rows) != 1 or len(after.rows) != 1 or before.explained is not None or after.explained is not None:
        return False
    (then,), (now,) = before.rows, after.rows
    if then.errors is None or now.errors is None or before.gradients.keys() != after.gradients.keys():
        return False
    return (
        follows(then.keys, now.keys)
        and follows(then.errors, now.errors)
        and all(b.at is not None and b.at == after.gradients[name].at for name, b in before.gradients.items())
    )


def compare(
    steps: int, seen: Entries, explained: Entries, rounding: float
) -> tuple[dict[str, Float[np.ndarray, "steps"]], Float[np.ndarray, "steps"]]:
    """γ of each parameter at each step, and the unexplained share; `rounding` is that of the slots' numbers."""
    if not seen:
        return {}, np.zeros(steps)
    known = {name: _without_absent(rows, explained[name]) for name, rows in seen.items()}
    gradient = np.concatenate(list(known.values()), axis=1)
    # Most often all were treated alike: one factor, found from all entries, is then the better one.
    alike = gradient_factor(gradient, np.concatenate([explained[name] for name in known], axis=1), rounding)
    near = 16 * max(np.finfo(gradient.dtype).eps, rounding) * np.abs(alike)
    factors = {}
    for name, rows in known.items():
        own = gradient_factor(rows, explained[name], rounding)
        factor = np.where(np.abs(own - alike) <= near, alike, own)
        # A gradient of zeros: whatever the slots say, nothing of it is used.
        factors[name] = np.where((seen[name] == 0.0).all(axis=1), 0.0, factor)
    parts = [explained[name] * factors[name][:, None] for name in known]
    return factors, unexplained_share(gradient, np.concatenate(parts, axis=1))


def _without_absent(
    seen: Float[np.ndarray, "steps entries"], explained: Float[np.ndarray, "steps entries"]
) -> Float[np.ndarray, "steps entries"]:
    """With zeros where there is no gradient, which say nothing of γ; a gradient of NaNs stays one."""
    absent = np.isnan(seen).all(axis=1, keepdims=True) & (explained == 0.0).all(axis=1, keepdims=True)
    return np.where(absent, np.zeros((), seen.dtype), seen)


def explain(steps: Sequence[LayerStep], entry: LayerEntry) -> dict[str, np.ndarray]:
    """For each of some steps that are alike: the same blocks of `Σ δ⊗k` and `Σ δ`."""
    blocks = steps[0].gradients
    found = {name: np.zeros((len(steps), *block.seen.shape), block.seen.dtype) for name, block in blocks.items()}
    for call in zip(*(step.rows for step in steps), strict=True):
        of_units, errors = None, torch.empty(0, 0, 0)
        for name, block in blocks.items():
            if block.at is None:
                continue
            if block.at[0] != of_units:
                of_units, errors = block.at[0], _numbers([(r.errors, r.error_scale) for r in call], block.at[0])
            if len(block.at) == 1:
                found[name] += errors.sum(dim=1).numpy()
                continue
            stored = [(r.keys, r.key_scale) for r in call]
            if entry.groups == entry.out_features > 1:  # each unit has keys of its own
                units, width = block.at[0], entry.in_features // entry.groups
                keys = _numbers(stored, slice(units.start * width, units.stop * width)).unflatten(-1, (-1, width))
                found[name] += (errors[..., None] * keys[..., block.at[1]]).sum(dim=1).numpy()
                continue
            for units, features in _within_groups(block.at[0], block.at[1], entry):
                # Not numpy: its BLAS would compute many rows with threads of its own, beside those that train.
                found[name][:, units] += (errors[..., units].mT @ _numbers(stored, features)).numpy()
    return found


def _numbers(calls: Sequence[tuple[Tensor | None, Tensor | None]], part: Part) -> Float[Tensor, "steps rows part"]:
    """Columns of stored rows, as numbers again; the rows of all steps lie one behind the other."""
    first, scale = calls[0]
    assert first is not None
    shape, strides = (len(calls), *first.shape), (first.shape[0] * first.stride(0), *first.stride())
    numbers = first.as_strided(shape, strides)[..., part]
    if scale is None:
        return numbers
    alike = all(other is scale for _, other in calls)
    scales = scale if alike else torch.stack([each for _, each in calls if each is not None])
    return numbers.float().mul_(scales[..., None])


def _within_groups(units: Part, features: Part, entry: LayerEntry) -> Iterator[tuple[Part, Part]]:
    """For each group that a block has a share in: which of the block's units, and which entries of the keys."""
    of_group, width = entry.out_features // entry.groups, entry.in_features // entry.groups
    for group in range(units.start // of_group, (units.stop - 1) // of_group + 1):
        first, end = max(units.start, group * of_group), min(units.stop, (group + 1) * of_group)
        shift = group * width
        yield (
            slice(first - units.start, end - units.start),
            slice(shift + features.start, shift + features.stop),
        )
