"""The equations of the dual form, as pure functions of tensors.

A linear layer trained by gradient descent is its initial weights plus one outer product (error ⊗ key)
for every slot, each times a factor that depends on the slot's step alone: a number for SGD, a matrix for
Adam and its kin. This module holds that factor (the sweep), the attention it leads to, and the comparison that finds
what happened to a gradient between `backward` and `step`. It knows nothing of modules, files or optimizer classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def dot_attention(
    keys: Float[Tensor, "slots in_features"],
    values: Float[Tensor, "slots out_features"],
    queries: Float[Tensor, "*batch in_features"],
) -> Float[Tensor, "*batch out_features"]:
    """Unnormalised attention, `Σ_t (k_t·q) v_t` (Definition 2.1 of the paper)."""
    return (queries @ keys.T) @ values


def linear_map(
    rows: Float[Tensor, "rows in_features"], matrix: Float[Tensor, "out_features in_group"]
) -> Float[Tensor, "rows out_features"]:
    """`M k` for each row k. A matrix narrower than the rows has groups: each share of it acts on its share of a row."""
    groups = rows.shape[1] // matrix.shape[1]
    if groups == 1:
        return rows @ matrix.T
    shares = rows.reshape(len(rows), groups, -1).transpose(0, 1)
    return (shares @ matrix.reshape(groups, -1, matrix.shape[1]).mT).transpose(0, 1).flatten(1)


def outer_sum(
    errors: Float[Tensor, "rows out_features"],
    keys: Float[Tensor, "rows in_features"],
    groups: int,
    *,
    out: Tensor | None = None,
) -> Float[Tensor, "out_features in_group"]:
    """`Σ δ ⊗ k` over rows, each share of the errors with its share of the keys."""
    if groups == 1:
        return torch.mm(errors.T, keys, out=out)
    if groups == errors.shape[1] == keys.shape[1]:
        made = (errors * keys).sum(dim=0)[:, None]
    else:
        of_errors, of_keys = (rows.reshape(len(rows), groups, -1).transpose(0, 1) for rows in (errors, keys))
        made = (of_errors.mT @ of_keys).flatten(0, 1)
    return made if out is None else out.copy_(made)


Factor = float | Tensor
"""What something is multiplied by: one number, or a matrix (see `Side`)."""

Side = Literal["entries", "left", "right"]
"""How a matrix acts on a gradient: entry by entry (Adam), from the left or from the right (Muon)."""


def act(side: Side, factor: Factor, gradient: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Applies a factor to a gradient."""
    if not isinstance(factor, Tensor) or side == "entries":
        return factor * gradient
    return factor @ gradient if side == "left" else gradient @ factor


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

    def without_past(self) -> LinearStep:
        """The same step where M did not exist before it."""
        return replace(self, w_m=0.0, w_pm=0.0, m_m=0.0)

    def gradient(self, raw: Tensor, weights: Tensor | None) -> Tensor:
        """g; the weights matter only where there is decay."""
        signed = raw if self.sign == 1.0 else raw * self.sign
        return signed if weights is None or self.decay == 0.0 else signed.add(weights, alpha=self.decay)

    def next_weights(self, P: Factor, weights: Tensor, moment: Factor, g: Tensor) -> Tensor:
        """W', for a P that acts entry by entry."""
        return weights * self.keep + (self.w_m + self.w_pm * P) * moment + (self.w_pg * P) * g

    def next_moment(self, P: Factor, moment: Tensor, g: Tensor) -> Tensor:
        """M', for a P that acts entry by entry or does not act on it at all."""
        scaled = g * self.m_g if self.m_pg == 0.0 else g * (self.m_g + self.m_pg * P)
        return scaled.add_(moment, alpha=self.m_m)


class Adjoint:
    """How the final weights depend on W and M as they were, swept from the last step down to the first.

    `W_T = to_weights·W_s + to_moment·M_s + Σ_{later steps} (what back returned)·G`. Both start as numbers and
    become matrices only where a step makes them so: SGD's never do.
    """

    def __init__(self) -> None:
        self.to_weights: Factor = 1.0
        self.to_moment: Factor = 0.0

    def back(self, step: LinearStep, P: Factor) -> Factor:
        """Goes back over one step; returns the factor of its gradient G."""
        weights, moment = self.to_weights, self.to_moment
        number, scaled = (1.0, weights * P) if isinstance(weights, Tensor) else (weights, P)
        by_g = _sum((step.w_pg * number, scaled), (step.m_g, moment))
        if step.m_pg != 0.0:
            by_g = _sum((1.0, by_g), (step.m_pg, moment * P))
        self.to_moment = _sum((step.w_pm * number, scaled), (step.w_m, weights), (step.m_m, moment))
        self.to_weights = _sum((step.keep, weights), (step.decay, by_g))
        return by_g if step.sign == 1.0 else by_g * step.sign


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
