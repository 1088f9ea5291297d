"""What one training step adds to a memory: its slots, and blocks of the gradients that the slots explain.

`G ≈ γ · Σ δ ⊗ k` on a block: least squares gives γ, by which the gradient was multiplied between `backward` and `step`
(clipping, loss scaling). The residual is the share that no slot explains (a second use of the weight, a penalty in the
loss). Every parameter has its own γ: weight and bias may be clipped, frozen or scaled separately. The slots are
compared as they are stored, so the rounding of a lossy storage type is part of the residual.

`blocks_of` gives both sides of the comparison, `compare` its result. In a run of several processes, each one knows what
its own slots explain; the reader adds up these sums and compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from spotlights.dual_form import gradient_factor, unexplained_share
from spotlights.memory.buffers import BufferPool, follows, runs
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.format.recipe import StepRecipe
from spotlights.memory.format.sampling import Draw
from spotlights.sparse_rows import SparseRows

UNITS, FEATURES = 16, 16
"""The largest block."""
_SUMS = 4
"""Random sums over the units, and over the features, of a gradient that several processes hold in shards."""
_AT_ONCE = 16384
"""Steps with fewer slots than this in all are compared together: more would not fit into the cache."""
ROUNDED, ROUNDED_COARSELY = 64.0, 8.0
"""A sum of rows is rounding below so many times ε·Σ|row|; or ε·Σ|row|/√rows, ε being that of rows stored or computed
coarsely. Measured: rounding is below 30 ε (behind a softmax; 5 ε before a batch norm), gradients are above 1,000 ε."""
UNEXPLAINED = 1e-3
"""A step whose gradient differs by more than this share from its slots is reported."""
NOT_EXPLAINED = "gradients that the recorded slots do not explain"
"""What a step log can say of a step, in words,"""
CAUSES = (
    "a penalty in the loss (L1, L2, of gradients), a use of the weight outside its module, values clipped one by one "
    "(clip_grad_value_), gradients that were not set to zero, or changed between backward() and step()"
)
MOVED_CAUSES = (
    "weights that were clamped, averaged, pruned, loaded or set between two steps; nothing is missing if they were put "
    "back as they were"
)
"""and the likely reasons."""
Entries = Mapping[str, Float[np.ndarray, "steps _entries"]]
"""By parameter: entries of its gradients, or of the sums of slots that explain them."""

_Steps = Float[np.ndarray, "steps"]
_Stored = tuple[Tensor | SparseRows | None, Tensor | None]
"""Stored rows and their scales."""


def plain(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    """A parameter as it is stored: bfloat16, which numpy lacks, becomes float32, which holds it exactly."""
    tensor = tensor.detach().cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass(slots=True)  # not frozen: that costs several times as much, at every step
class Rows:
    """The slots of one call of one layer, encoded for storage."""

    keys: Shaped[Tensor, "rows in_features"] | SparseRows
    key_scale: Float[Tensor, "rows"] | None
    errors: Shaped[Tensor, "rows out_features"] | SparseRows | None
    error_scale: Float[Tensor, "rows"] | None
    columns: Mapping[str, Shaped[np.ndarray, "rows"]]
    may_repeat: bool = False
    """The keys are data, not the output of another trained layer: the next epoch brings the same keys again."""
    computed: torch.dtype | None = None
    """The type of the layer's arithmetic, if that is coarser than its parameters' type (autocast)."""

    def __len__(self) -> int:
        return len(self.keys)

    def some(self, places: Int64[Tensor, "chosen"]) -> Rows:
        """Some of the slots."""
        given = {name: getattr(self, name) for name in ("keys", "key_scale", "errors", "error_scale")}
        some = {name: tensor[places] for name, tensor in given.items() if tensor is not None}
        return replace(self, columns={name: c[places.numpy()] for name, c in self.columns.items()}, **some)

    def give_back(self, pool: BufferPool) -> None:
        """Returns the memory of keys and errors, which have been written."""
        for rows in (self.keys, self.errors):
            if isinstance(rows, Tensor):
                pool.give(rows)

    @property
    def nbytes(self) -> int:
        columns = 8 * len(self) * len(self.columns)
        return self.keys.nbytes + (0 if self.errors is None else self.errors.nbytes) + columns


class GradientBlock(NamedTuple):
    """Some entries of a parameter's gradient, as a matrix or a row; the same number at every step."""

    seen: Float[np.ndarray, "units *features"]
    at: tuple[slice, ...] | None
    """Which units, and which features of one group; None if the whole gradient is zero; empty for random sums."""


@dataclass(slots=True)
class LayerStep:
    """What one optimizer step adds to one layer."""

    rows: list[Rows]
    gradients: dict[str, GradientBlock]
    """By parameter; empty if there is nothing to compare: no errors are stored, or there was no gradient."""
    moved: int
    """Reasons (`names.MOVED`) why the step does not follow from the one before; 0 if it does."""
    rule: dict[str, list[float]] = field(default_factory=dict)
    """Fields of the update rule, for weight and bias."""
    probed: dict[str, Shaped[np.ndarray, "entries"]] = field(default_factory=dict)
    """Entries of the parameters after the step (see `probed_entries`)."""
    explained: dict[str, Float[np.ndarray, "1 ..."]] | None = None
    """If only some slots are stored: the sum of all slots, in the blocks of `gradients`."""

    def thinned(self, draw: Draw, entry: LayerEntry) -> LayerStep:
        """The same step with some of its slots. Gradients are still compared with the sum of all slots."""
        drawn = (rows.some(draw.rows(len(rows))) for rows in self.rows)
        return replace(self, rows=[rows for rows in drawn if len(rows)], explained=explain([self], entry))


@dataclass(slots=True)
class StepRecord:
    """What one optimizer step adds to a memory."""

    step: int
    layers: dict[str, LayerStep]
    state: dict[str, Tensor] = field(default_factory=dict)
    """The optimizer's state before the step, at some steps (see `state_tensor`)."""
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    """Running statistics of normalisations after the step, by name."""
    recipe: StepRecipe | None = None
    """What a recipe keeps in place of slots."""

    @property
    def nbytes(self) -> int:
        rows = sum(rows.nbytes for layer in self.layers.values() for rows in layer.rows)
        return rows if self.recipe is None else rows + self.recipe.nbytes


def blocks_of(log: Sequence[LayerStep], entry: LayerEntry) -> tuple[Entries, Entries]:
    """The blocks of some steps' gradients, NaN where there is no gradient, and the sums of the steps' slots there."""
    dtype = np.float64 if entry.dtype == "float64" else np.float32
    seen, explained = {}, {}
    for name in entry.trained:
        columns = entry.weight_columns.get(name)
        features = 1 if columns is None else min(FEATURES, columns.stop - columns.start)
        size = _SUMS * (1 if columns is None else _SUMS) if entry.shards else min(UNITS, entry.out_features) * features
        shape = len(log), size
        seen[name], explained[name] = np.full(shape, np.nan, dtype), np.zeros(shape, dtype)
    done = 0
    for run in runs(log, _alike):
        here, done = slice(done, done + len(run)), done + len(run)
        sums = explain(run, entry) if run[0].explained is None else run[0].explained
        for name, summed in sums.items():
            blocks = np.stack([step.gradients[name].seen for step in run])
            seen[name][here], explained[name][here] = blocks.reshape(len(run), -1), summed.reshape(len(run), -1)
    return seen, explained


def _alike(run: list[LayerStep], after: LayerStep) -> bool:
    """Whether a step can be compared together with others: one call each, rows one behind the other, one block."""
    before = run[-1]
    if len(before.rows) != 1 or len(after.rows) != 1 or before.explained is not None or after.explained is not None:
        return False
    (then,), (now,) = before.rows, after.rows
    pairs = (then.keys, now.keys), (then.errors, now.errors)
    if before.gradients.keys() != after.gradients.keys():
        return False
    return (
        len(run) * len(now) < _AT_ONCE
        and all(isinstance(a, Tensor) and isinstance(b, Tensor) and follows(a, b) for a, b in pairs)
        and all(b.at is not None and b.at == after.gradients[name].at for name, b in before.gradients.items())
    )


def compare(steps: int, seen: Entries, explained: Entries, rounding: float) -> tuple[dict[str, _Steps], _Steps]:
    """γ of each parameter at each step, and the unexplained share; `rounding` is that of the slots' numbers."""
    if not seen:
        return {}, np.zeros(steps)
    known = {}
    for name, rows in seen.items():  # zeros where there is no gradient do not count for γ; a gradient of NaNs stays one
        absent = np.isnan(rows).all(axis=1, keepdims=True) & (explained[name] == 0.0).all(axis=1, keepdims=True)
        known[name] = np.where(absent, np.zeros((), rows.dtype), rows)
    gradient = np.concatenate(list(known.values()), axis=1)
    # Usually all parameters have the same factor: then the factor from all entries is the more precise one.
    alike = gradient_factor(gradient, np.concatenate([explained[name] for name in known], axis=1), rounding)
    near = 16 * max(np.finfo(gradient.dtype).eps, rounding) * np.abs(alike)
    factors = {}
    for name, rows in known.items():
        own = gradient_factor(rows, explained[name], rounding)
        factor = np.where(np.abs(own - alike) <= near, alike, own)
        # A gradient of zeros uses nothing of the slots.
        factors[name] = np.where((seen[name] == 0.0).all(axis=1), 0.0, factor)
    parts = [explained[name] * factors[name][:, None] for name in known]
    return factors, unexplained_share(gradient, np.concatenate(parts, axis=1))


def unexplained_steps(residual: Float[Tensor, "steps"], entry: LayerEntry) -> list[int]:
    """The steps whose gradients the slots explain less well than rounding allows."""
    threshold = max(UNEXPLAINED, 8 * entry.rounding)
    return (~(residual <= threshold)).nonzero().flatten().tolist()


def likely_cause(seen: Float[np.ndarray, "entries"], explained: Float[np.ndarray, "entries"]) -> str:
    """Why slots do not explain a gradient, as far as some entries of it tell."""
    bound = np.abs(seen).max(initial=0.0)
    inside = np.abs(explained) < bound * (1 - 1e-5)
    clipped = np.where(inside, explained, np.sign(explained) * bound)
    if not inside.all() and np.allclose(seen, clipped, rtol=1e-3, atol=1e-6 * bound):
        return (
            f"the gradient's values were clipped one by one at {bound:.3g} (clip_grad_value_), which no single factor "
            "describes; clip_grad_norm_ is recorded exactly"
        )
    return CAUSES


def rounding_limit(entry: LayerEntry, rows: int) -> float:
    """Which share of `Σ |δ||k|` over so many rows is rounding."""
    eps = float(np.finfo(np.float64 if entry.dtype == "float64" else np.float32).eps)
    return max(ROUNDED * eps, ROUNDED_COARSELY * entry.rounding * max(rows, 1) ** -0.5)


def is_rounding(step: LayerStep, entry: LayerEntry, difference: Mapping[str, np.ndarray]) -> bool:
    """Whether what the slots do not explain of a step's gradient is no more than the rounding of their sum.

    The gradient of a bias before a batch norm is a sum that cancels: nothing but rounding is left of it.
    """
    sizes = explain([step], entry, absolute=True) if step.rows and step.explained is None else {}
    limit = rounding_limit(entry, sum(map(len, step.rows)))
    return bool(sizes) and all((np.abs(difference[n]) <= limit * size.reshape(-1)).all() for n, size in sizes.items())


def explain(steps: Sequence[LayerStep], entry: LayerEntry, *, absolute: bool = False) -> dict[str, np.ndarray]:
    """For each of some steps that are alike: the blocks of `Σ δ⊗k` and `Σ δ`, or of their magnitudes."""
    blocks = steps[0].gradients
    if entry.shards:
        return _explain_sums(steps, entry)
    sums = {name: np.zeros((len(steps), *block.seen.shape), block.seen.dtype) for name, block in blocks.items()}
    for call in zip(*(step.rows for step in steps), strict=True):
        of_units, errors = None, torch.empty(0, 0, 0)
        for name, block in blocks.items():
            if block.at is None:
                continue
            if block.at[0] != of_units:
                of_units, errors = block.at[0], _numbers([(r.errors, r.error_scale) for r in call], block.at[0])
                errors = errors.abs() if absolute else errors
            if len(block.at) == 1:
                sums[name] += errors.sum(dim=1).numpy()
                continue
            stored = [(r.keys, r.key_scale) for r in call]
            if entry.groups == entry.out_features > 1:  # each unit has keys of its own
                units, width = block.at[0], entry.in_features // entry.groups
                keys = _numbers(stored, slice(units.start * width, units.stop * width)).unflatten(-1, (-1, width))
                keys = keys.abs() if absolute else keys
                sums[name] += (errors[..., None] * keys[..., block.at[1]]).sum(dim=1).numpy()
                continue
            for units, features in _within_groups(block.at[0], block.at[1], entry):
                # Not numpy: its BLAS would start threads of its own, beside those that train.
                keys = _numbers(stored, features)
                sums[name][:, units] += (errors[..., units].mT @ (keys.abs() if absolute else keys)).numpy()
    return sums


@lru_cache(maxsize=64)
def random_sums(size: int) -> Float[Tensor, "size sums"]:
    """By how much each entry counts in each of some sums: the same in all processes of a run."""
    return torch.randn(size, _SUMS, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def _explain_sums(steps: Sequence[LayerStep], entry: LayerEntry) -> dict[str, np.ndarray]:
    """The random sums of `Σ δ⊗k` and `Σ δ` for each step. (The sums of outer products are products of sums.)"""
    of_groups = (entry.groups, -1)
    by_unit = random_sums(entry.out_features).unflatten(0, of_groups)
    summed: dict[str, list[np.ndarray]] = {name: [] for name in steps[0].gradients}
    for step in steps:
        sums = {name: np.zeros_like(block.seen) for name, block in step.gradients.items()}
        for rows in step.rows:
            errors = _rows(rows.errors, rows.error_scale)
            keys = _rows(rows.keys, rows.key_scale)
            dtype = torch.float64 if errors.dtype == torch.float64 else torch.float32
            dense = (errors if isinstance(errors, Tensor) else errors.dense()).to(dtype)
            of_errors = torch.einsum("rgo,gos->rgs", dense.unflatten(1, of_groups), by_unit.to(dtype))
            for name in sums:
                columns = entry.weight_columns.get(name)
                if columns is None:
                    sums[name] += of_errors.sum(dim=(0, 1)).numpy()
                    continue
                by_feature = random_sums(columns.stop - columns.start).to(dtype)
                if isinstance(keys, SparseRows):
                    of_keys = keys.times(by_feature.T)[:, None]
                else:
                    inside = slice(None) if entry.groups > 1 else columns
                    of_keys = keys[:, inside].to(dtype).unflatten(1, of_groups) @ by_feature
                sums[name] += torch.einsum("rgs,rgt->st", of_errors, of_keys).numpy()
        for name, of_step in sums.items():
            summed[name].append(of_step)
    return {name: np.stack(of_steps) for name, of_steps in summed.items()}


def _rows(stored: Tensor | SparseRows | None, scale: Tensor | None) -> Tensor | SparseRows:
    assert stored is not None
    return stored if scale is None or isinstance(stored, SparseRows) else stored.float() * scale[:, None]


def _numbers(calls: Sequence[_Stored], columns: slice) -> Float[Tensor, "steps rows columns"]:
    """Columns of stored rows, scaled; the rows of all steps lie one behind the other."""
    first, scale = calls[0]
    assert first is not None
    if isinstance(first, SparseRows):
        return first.columns(columns)[None]
    shape, strides = (len(calls), *first.shape), (first.shape[0] * first.stride(0), *first.stride())
    numbers = first.as_strided(shape, strides)[..., columns]
    if scale is None:
        return numbers
    alike = all(other is scale for _, other in calls)
    scales = scale if alike else torch.stack([other for _, other in calls if other is not None])
    return numbers.float().mul_(scales[..., None])


def _within_groups(units: slice, features: slice, entry: LayerEntry) -> Iterator[tuple[slice, slice]]:
    """For each channel group that a block overlaps: which of the block's units, and which entries of the keys."""
    of_group, width = entry.out_features // entry.groups, entry.in_features // entry.groups
    for group in range(units.start // of_group, (units.stop - 1) // of_group + 1):
        first, end = max(units.start, group * of_group), min(units.stop, (group + 1) * of_group)
        columns = slice(group * width + features.start, group * width + features.stop)
        yield slice(first - units.start, end - units.start), columns
