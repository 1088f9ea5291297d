"""The equations of the dual form, as pure functions of tensors.

A linear layer trained by gradient descent is its initial weights plus one outer product (error ⊗ key)
for every slot, each times one number that depends on the slot's step alone. This module holds that
number (the sweep), the attention it leads to, and the probe that finds what happened to a gradient
between `backward` and `step`. It knows nothing of modules, files or optimizer classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class SgdStep:
    """What torch's SGD was told at one step, for one parameter."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    starts_buffer: bool = False
    """The momentum buffer did not exist before this step: it becomes the gradient itself, undampened."""
    active: bool = True
    """The parameter had a gradient. Without one the optimizer leaves it alone, decay included."""


@dataclass(frozen=True)
class SgdSweep:
    """Where a parameter came from: `initial·W_0 + buffer·B_0 + Σ_s per_step[s]·G_s`."""

    per_step: Float[Tensor, "steps"]
    initial: float
    buffer: float


def sgd_sweep(steps: Sequence[SgdStep]) -> SgdSweep:
    """Unrolls SGD with every option into one coefficient per step.

    SGD is a linear recurrence in (W, B), B being the momentum buffer. Its adjoint, swept once from the
    last step to the first, gives the derivative of the final weights by each step's gradient.
    """
    per_step = [0.0] * len(steps)
    to_weights, to_buffer = 1.0, 0.0  # how the final weights depend on W and B after step s
    for s in range(len(steps) - 1, -1, -1):
        step = steps[s]
        if not step.active:
            continue
        if step.momentum == 0.0:
            by_direction = -step.lr * to_weights
        else:
            by_buffer = to_buffer - step.lr * to_weights * (step.momentum if step.nesterov else 1.0)
            dampening = 0.0 if step.starts_buffer else step.dampening
            by_direction = by_buffer * (1.0 - dampening)
            if step.nesterov:
                by_direction -= step.lr * to_weights
            to_buffer = 0.0 if step.starts_buffer else by_buffer * step.momentum
        per_step[s] = -by_direction if step.maximize else by_direction
        to_weights += by_direction * step.weight_decay
    return SgdSweep(torch.tensor(per_step, dtype=torch.float64), to_weights, to_buffer)


@dataclass(frozen=True)
class GradientProbe:
    """How the recorded slots of one step relate to the gradient that the optimizer saw."""

    factor: float
    """γ: what the gradient was multiplied by after `backward` (clipping, loss scaling)."""
    residual: float
    """The share of the gradient that the slots do not explain; 0 up to rounding when all is recorded."""


def probe_gradient(
    gradient: Float[np.ndarray, "entries"], from_slots: Float[np.ndarray, "entries"], rounding: float
) -> GradientProbe:
    """Compares some entries of `G` with the same ones of `Σ_t δ_t ⊗ k_t`, by least squares.

    `rounding` is the relative error of the stored numbers that the slots' entries come from.
    """
    energy, norm = float(from_slots @ from_slots), math.sqrt(float(gradient @ gradient))
    if energy == 0.0:
        return GradientProbe(factor=1.0, residual=0.0 if norm == 0.0 else 1.0)
    if norm == 0.0:
        return GradientProbe(factor=0.0, residual=0.0)
    factor = float(gradient @ from_slots) / energy
    if abs(factor - 1.0) < max(16 * np.finfo(gradient.dtype).eps, rounding):
        factor = 1.0  # an untouched gradient: the difference is the rounding of the probe itself
    unexplained = gradient - factor * from_slots
    return GradientProbe(factor, math.sqrt(float(unexplained @ unexplained)) / norm)
