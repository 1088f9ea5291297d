"""The equations of the dual form, as pure functions of tensors.

A linear layer trained by gradient descent is its initial weights plus one outer product (error ⊗ key)
for every slot, each times a factor that depends on the slot's step alone: a number for SGD, a matrix for
Adam and similar optimizers. This module computes that factor (the sweep), the attention that follows from it, and γ,
the factor that a gradient was multiplied by between `backward` and `step`. Modules, files and optimizers are elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.sparse_rows import SparseRows, dense


def dot_attention(
    keys: Float[Tensor, "slots in_features"],
    values: Float[Tensor, "slots out_features"],
    queries: Float[Tensor, "*batch in_features"],
) -> Float[Tensor, "*batch out_features"]:
    """Unnormalised attention, `Σ_t (k_t·q) v_t` (Definition 2.1 of the paper)."""
    return (queries @ keys.T) @ values


def linear_map(
    rows: Float[Tensor, "rows in_features"] | SparseRows, matrix: Float[Tensor, "out_features in_group"]
) -> Float[Tensor, "rows out_features"]:
    """`M k` for each row k. A matrix narrower than the rows has groups: each share of it acts on its share of a row."""
    if isinstance(rows, SparseRows):
        return rows.times(matrix)
    groups = rows.shape[1] // matrix.shape[1]
    if groups == 1:
        return rows @ matrix.T
    shares = rows.reshape(len(rows), groups, -1).transpose(0, 1)
    return (shares @ matrix.reshape(groups, -1, matrix.shape[1]).mT).transpose(0, 1).flatten(1)


def outer_sum(
    errors: Float[Tensor, "rows out_features"] | SparseRows,
    keys: Float[Tensor, "rows in_features"] | SparseRows,
    groups: int,
) -> Float[Tensor, "out_features in_group"]:
    """`Σ δ ⊗ k` over rows, each share of the errors with its share of the keys."""
    if isinstance(errors, SparseRows):
        return errors.weighted_sum(dense(keys).T).T
    if isinstance(keys, SparseRows):
        return keys.weighted_sum(errors.T)
    if groups == 1:
        return errors.T @ keys
    if groups == errors.shape[1] == keys.shape[1]:
        return (errors * keys).sum(dim=0)[:, None]
    of_errors, of_keys = (rows.reshape(len(rows), groups, -1).transpose(0, 1) for rows in (errors, keys))
    return (of_errors.mT @ of_keys).flatten(0, 1)


Factor = float | Tensor
"""What something is multiplied by: one number, or a matrix (see `Side`)."""

Side = Literal["entries", "left", "right"]
"""How a matrix acts on a gradient: entry by entry (Adam), from the left or from the right (Muon)."""


def act(side: Side, factor: Factor, gradient: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Applies a factor to a gradient."""
    if not isinstance(factor, Tensor) or side == "entries":
        return factor * gradient
    return factor @ gradient if side == "left" else gradient @ factor


def act_transposed(side: Side, factor: Factor, matrix: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The matrix whose product with a gradient equals this matrix's product with `act(gradient)`."""
    if not isinstance(factor, Tensor) or side == "entries":
        return factor * matrix
    return factor.T @ matrix if side == "left" else matrix @ factor.T


@dataclass(frozen=True)
class LinearStep:
    """One optimizer step, which is linear once its preconditioner P is known.

    With G the gradient, W the parameter, M the optimizer's first moment:

        g  = sign·G + decay·W
        W' = keep·W + (w_m + w_pm·P)·M + w_pg·P·g
        M' = m_m·M + (m_g + m_pg·P)·g

    P is 1 for SGD. A rule that never has a moment leaves the factors of M as they are.
    """

    w_pg: float
    w_m: float = 0.0
    w_pm: float = 0.0
    m_m: float = 1.0
    m_g: float = 0.0
    m_pg: float = 0.0
    keep: float = 1.0
    decay: float = 0.0
    sign: float = 1.0

    @property
    def moment_is_change(self) -> bool:
        """Whether W changes by a multiple of the new M: `W' = keep·W + w_pg/m_g·P·M'`, if P is 1 or `w_m` is 0."""
        return self.m_g != 0.0 == self.m_pg and math.isclose(
            (self.w_m + self.w_pm) * self.m_g, self.w_pg * self.m_m, rel_tol=1e-12
        )

    def gradient(self, raw: Tensor, weights: Tensor | None) -> Tensor:
        """g; the weights matter only where there is decay."""
        signed = raw if self.sign == 1.0 else raw * self.sign
        return signed if weights is None or self.decay == 0.0 else signed.add(weights, alpha=self.decay)

    def next_weights(self, side: Side, P: Factor, weights: Tensor, moment: Tensor | None, g: Tensor) -> Tensor:
        """W'; g is `gradient`, and None stands for a rule without M."""
        by_p = g * self.w_pg
        if moment is not None and self.w_pm != 0.0:
            by_p.add_(moment, alpha=self.w_pm)
        new = act(side, P, by_p) if isinstance(P, Tensor) else by_p.mul_(P)
        new = new.add_(weights, alpha=self.keep)
        return new if moment is None else new.add_(moment, alpha=self.w_m)

    def next_moment(self, side: Side, P: Factor, moment: Tensor, g: Tensor) -> Tensor:
        """M'; g is `gradient`."""
        kept = moment * self.m_m
        if self.m_g != 0.0:
            kept.add_(g, alpha=self.m_g)
        return kept if self.m_pg == 0.0 else kept.add_(act(side, P, g), alpha=self.m_pg)


class Adjoint:
    """How the final weights depend on W and M as they were, swept from the last step down to the first.

    `W_T = to_weights·W_s + to_moment·M_s + Σ_{later steps} (what back returned)·G`. Both start as numbers and
    become matrices only where a step makes them so: SGD's never do.
    """

    def __init__(self) -> None:
        self.to_weights: Factor = 1.0
        self.to_moment: Factor = 0.0

    def back(self, step: LinearStep, P: Factor, *, lazy: bool = False) -> Factor:
        """Goes back over one step; returns the factor of its gradient G. A lazy step is none where P is 0."""
        weights, moment = self.to_weights, self.to_moment
        number, scaled = (1.0, weights * P) if isinstance(weights, Tensor) else (weights, P)
        by_g = _sum((step.w_pg * number, scaled), (step.m_g, moment))
        if step.m_pg != 0.0:
            by_g = _sum((1.0, by_g), (step.m_pg, moment * P))
        self.to_moment = _sum((step.w_pm * number, scaled), (step.w_m, weights), (step.m_m, moment))
        self.to_weights = _sum((step.keep, weights), (step.decay, by_g))
        if lazy and isinstance(P, Tensor):
            by_g = _where(P == 0.0, 0.0, by_g)
            self.to_moment = _where(P == 0.0, moment, self.to_moment)
            self.to_weights = _where(P == 0.0, weights, self.to_weights)
        return by_g if step.sign == 1.0 else by_g * step.sign


@dataclass(frozen=True)
class Scaled:
    """A number times a tensor, not yet multiplied: the tensor may be large."""

    number: float
    tensor: Tensor

    @property
    def value(self) -> Tensor:
        return self.tensor * self.number


class PathAdjoint:
    """How the changes of a number during later steps depend on M, swept from the last step down to the first.

    A number f changes by `⟨ḡ_s, W_{s+1} − W_s⟩` at step s. The sum over all steps is
    `Σ_s (⟨back(…), g_s⟩ + (keep−1)⟨ḡ_s, W_s⟩) + ⟨to_moment, M_0⟩`, with g of `LinearStep`.
    """

    def __init__(self) -> None:
        self.to_moment: Scaled | None = None
        """None stands for zeros."""

    def back(self, step: LinearStep, side: Side, P: Factor, gradient: DiscreteGradient) -> Scaled:
        """Goes back over one step with its ḡ; returns the factor of the step's g, valid until the next call."""
        moment, has_moment = self.to_moment, any((step.w_m, step.w_pm, step.m_g, step.m_pg))
        if (has_moment and not step.moment_is_change) or (isinstance(P, Tensor) and step.w_m != 0.0):
            return self._generally(step, side, P, gradient.full())
        if isinstance(P, Tensor):
            gradient = DiscreteGradient(act_transposed(side, P, gradient.full()))
        if not has_moment:
            self.to_moment = None if moment is None else Scaled(moment.number * step.m_m, moment.tensor)
            return Scaled(step.w_pg, gradient.full())
        # What multiplies M is proportional to what multiplies g, so one tensor is enough for both.
        if moment is None:
            by_g = gradient.full().mul_(step.w_pg)
        else:
            by_g = gradient.add_to(moment.tensor, step.w_pg, keep=moment.number * step.m_g)
        self.to_moment = None if step.m_m == 0.0 else Scaled(step.m_m / step.m_g, by_g)
        return Scaled(1.0, by_g)

    def _generally(self, step: LinearStep, side: Side, P: Factor, gradient: Tensor) -> Scaled:
        moment = None if self.to_moment is None else self.to_moment.value
        by_p = act_transposed(side, P, gradient)
        by_g = by_p * step.w_pg
        if moment is not None:
            by_g.add_(moment, alpha=step.m_g)
            if step.m_pg != 0.0:
                by_g.add_(act_transposed(side, P, moment), alpha=step.m_pg)
            moment.mul_(step.m_m)
        for scale, term in ((step.w_m, gradient), (step.w_pm, by_p)):
            if scale != 0.0:
                moment = term * scale if moment is None else moment.add_(term, alpha=scale)
        self.to_moment = None if moment is None else Scaled(1.0, moment)
        return Scaled(1.0, by_g)


@dataclass(frozen=True)
class OuterSum:
    """`Σ e ⊗ k` over a few rows, not yet multiplied: the gradient of a linear layer for one input has one row."""

    errors: Float[Tensor, "rows out_features"]
    keys: Float[Tensor, "rows in_features"]

    @property
    def value(self) -> Float[Tensor, "out_features in_features"]:
        return self.errors.T @ self.keys

    def to(self, dtype: torch.dtype) -> OuterSum:
        return OuterSum(self.errors.to(dtype), self.keys.to(dtype))


@dataclass(frozen=True)
class DiscreteGradient:
    """`ḡ = ∇f(m) + share·ΔW`, not yet added up; ∇f(m) is None where f does not depend on the parameter there."""

    midpoint: Tensor | OuterSum | None
    change: Tensor | None = None
    share: float = 0.0

    def full(self) -> Tensor:
        """A tensor of its own."""
        if self.midpoint is None:
            assert self.change is not None
            return self.change * self.share
        gradient = self.midpoint.value if isinstance(self.midpoint, OuterSum) else self.midpoint.clone()
        return self._add_change(gradient, 1.0)

    def add_to(self, tensor: Tensor, number: float, *, keep: float) -> Tensor:
        """A multiple of a tensor plus one of this, in the memory of the tensor."""
        if isinstance(self.midpoint, OuterSum):
            tensor.addmm_(self.midpoint.errors.T, self.midpoint.keys, beta=keep, alpha=number)
        else:
            tensor.mul_(keep)
            if self.midpoint is not None:
                tensor.add_(self.midpoint, alpha=number)
        return self._add_change(tensor, number)

    def _add_change(self, tensor: Tensor, number: float) -> Tensor:
        if self.change is None or self.share == 0.0:
            return tensor
        return tensor.add_(self.change, alpha=number * self.share)

    def dot(self, other: Tensor) -> float:
        """The sum of the products of all entries."""
        product = 0.0 if self.midpoint is None else dot(self.midpoint, other)
        return product if self.change is None or self.share == 0.0 else product + self.share * dot(self.change, other)


def dot(gradient: Tensor | OuterSum, other: Tensor) -> float:
    """The sum of the products of all entries; in the type of the second."""
    if isinstance(gradient, OuterSum):
        return float(((gradient.errors @ other) * gradient.keys).sum())
    return float(torch.dot(gradient.reshape(-1).to(other.dtype), other.reshape(-1)))


def discrete_gradient_share(
    before: Float[Tensor, "numbers"],
    after: Float[Tensor, "numbers"],
    first_order: Float[Tensor, "numbers"],
    squared_length: float,
) -> Float[Tensor, "numbers"]:
    """The multiple of ΔW that turns the gradient at the midpoint of a step into a discrete gradient ḡ.

    With `first_order = ⟨∇f(m), ΔW⟩` and `squared_length = |ΔW|²`, `ḡ = ∇f(m) + share·ΔW` has
    `⟨ḡ, ΔW⟩ = after − before` exactly.
    """
    if squared_length == 0.0:
        return torch.zeros_like(before)
    return (after - before - first_order) / squared_length


def _where(condition: Tensor, one: Factor, other: Factor) -> Factor:
    if not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other:
        return one
    return torch.where(condition, torch.as_tensor(one), torch.as_tensor(other))


def _sum(*terms: tuple[float, Factor]) -> Factor:
    """Σ number·factor, without a matrix for what is only a number."""
    number, matrix = 0.0, None
    for scale, factor in terms:
        if not isinstance(factor, Tensor):
            number += scale * factor
        elif scale != 0.0:
            matrix = factor * scale if matrix is None else matrix.add_(factor, alpha=scale)
    if matrix is None:
        return number
    return matrix if number == 0.0 else matrix.add_(number)


def gradient_factor(
    gradient: Float[np.ndarray, "*steps entries"], from_slots: Float[np.ndarray, "*steps entries"], rounding: float
) -> Float[np.ndarray, "*steps"]:
    """γ, what a gradient was multiplied by after `backward` (clipping, loss scaling), by least squares.

    Compares some entries of `G` with the same ones of `Σ_t δ_t ⊗ k_t`; `rounding` is the relative error of the stored
    numbers that the latter come from.
    """
    seen, explained = gradient.astype(np.float64), from_slots.astype(np.float64)
    energy = np.square(explained).sum(axis=-1)
    with np.errstate(all="ignore"):
        factor = np.where(energy == 0.0, 1.0, (seen * explained).sum(axis=-1) / energy)
        # An untouched gradient: the difference is the rounding of the comparison itself.
        untouched = np.abs(factor - 1.0) < max(16 * np.finfo(gradient.dtype).eps, rounding)
    return np.where(untouched, 1.0, factor)


def unexplained_share(
    gradient: Float[np.ndarray, "*steps entries"], explained: Float[np.ndarray, "*steps entries"]
) -> Float[np.ndarray, "*steps"]:
    """The share of a gradient that the slots do not explain; 0 up to rounding when all is recorded."""
    with np.errstate(all="ignore"):
        norm = np.linalg.norm(gradient, axis=-1)
        return np.where(norm == 0.0, 0.0, np.linalg.norm(gradient - explained, axis=-1) / norm)
