"""`torch.optim.Muon`: the momentum times a polynomial of itself that makes it nearly orthogonal.

Each iteration of Newton–Schulz is `X ← (a + b·XXᵀ + c·(XXᵀ)²) X`. So the whole update is a matrix P times the momentum:
from the left, or from the right if the parameter is tall. Given P, the update is linear in the gradients.

torch computes this polynomial in bfloat16, Spotlights in the type of the memory. The difference is rounding, about 1 %
of what training changed (docs/optimizers.md), and belongs to no slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import Side
from spotlights.optimizers.rule import Read, State, UpdateRule


class MuonRule(UpdateRule):
    name = "muon"
    optimizer = getattr(torch.optim, "Muon", None)  # new in torch 2.9
    fields = (
        *("lr", "weight_decay", "momentum", "nesterov", "a", "b", "c", "eps", "iterations"),
        *("match_rms", "fresh", "active"),  # match_rms is 1 for `adjust_lr_fn="match_rms_adamw"`
    )
    reads: ClassVar[Mapping[str, Read]] = {
        "a": lambda group, state: group["ns_coefficients"][0],
        "b": lambda group, state: group["ns_coefficients"][1],
        "c": lambda group, state: group["ns_coefficients"][2],
        "iterations": lambda group, state: group["ns_steps"],
        "match_rms": lambda group, state: group["adjust_lr_fn"] == "match_rms_adamw",
        "fresh": lambda group, state: state.get("momentum_buffer") is None,
    }
    states = ("momentum_buffer",)
    moment = "momentum_buffer"
    decoupled = True
    rounding = 2.0**-5
    note = "torch's Muon makes its update orthogonal in bfloat16: that rounding belongs to no slot"

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        out_features, in_features = shape
        size = 0.2 * math.sqrt(max(shape)) if step.match_rms else math.sqrt(max(1.0, out_features / in_features))
        past = _share_of_moment(step)
        by_p = -step.lr * size
        return {"w_pm": by_p * past, "w_pg": by_p * (1.0 - past), "m_m": step.momentum, "m_g": 1.0 - step.momentum}

    def side(self, shape: tuple[int, ...]) -> Side:
        if len(shape) != 2:
            return "entries"  # Muon trains matrices only
        return "right" if shape[0] > shape[1] else "left"

    def needs(self, step: Any) -> set[str]:
        return {"momentum_buffer"}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        update = torch.lerp(g, state["momentum_buffer"], _share_of_moment(step))
        tall = update.shape[0] > update.shape[1]
        P = orthogonaliser(update.T if tall else update, (step.a, step.b, step.c), int(step.iterations), step.eps)
        return P.T if tall else P


def orthogonaliser(
    update: Float[Tensor, "narrow wide"], coefficients: tuple[float, float, float], iterations: int, eps: float
) -> Float[Tensor, "narrow narrow"]:
    """The matrix that Newton–Schulz multiplies `update` by, from the left."""
    a, b, c = coefficients
    scale = 1.0 / max(float(update.norm()), eps)
    gram = (update @ update.T).mul_(scale * scale)
    P = torch.eye(len(update), dtype=update.dtype).mul_(scale)
    for _ in range(iterations):
        # Polynomials of one matrix commute, so the next XXᵀ needs no X: (q X)(q X)ᵀ = q (XXᵀ) q.
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        P = factor @ P
        gram = factor @ gram @ factor
    return P


def _share_of_moment(step: Any) -> float:
    """The share of old momentum in the matrix that is made orthogonal; the rest is g."""
    return step.momentum**2 if step.nesterov else step.momentum
