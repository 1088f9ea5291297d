"""`torch.optim.Muon`: the momentum times a polynomial of itself that makes it nearly orthogonal.

Each iteration of Newton–Schulz is `X ← (a + b·XXᵀ + c·(XXᵀ)²) X`. So the whole update is a matrix P times the momentum:
from the left, or from the right where the parameter is tall. Given P the update is linear in the gradients, and so in
the slots.

torch computes this polynomial in bfloat16, we in the type of the memory: the difference is rounding, about 1 % of what
training changed (docs/optimizers.md), and belongs to no slot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import LinearStep, Side
from spotlights.optimizers.rule import State, UpdateRule


class MuonStep(NamedTuple):
    """What Muon was told at one step, for one parameter."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: float
    a: float
    b: float
    c: float
    eps: float
    iterations: float
    match_rms: float
    """1 for adjust_lr_fn="match_rms_adamw"."""
    fresh: float
    active: float


class MuonRule(UpdateRule):
    name = "muon"
    row = MuonStep
    states = ("momentum_buffer",)
    moment = "momentum_buffer"
    rounding = 2.0**-5
    note = "torch's Muon makes its update orthogonal in bfloat16: that rounding belongs to no slot"

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is getattr(torch.optim, "Muon", None)  # new in torch 2.9

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        told = (group[name] for name in ("lr", "weight_decay", "momentum", "nesterov"))
        return [
            *map(float, told),
            *map(float, group["ns_coefficients"]),
            float(group["eps"]),
            float(group["ns_steps"]),
            float(group["adjust_lr_fn"] == "match_rms_adamw"),
            float(state.get("momentum_buffer") is None),
            float(has_gradient),
        ]

    def linear(self, step: MuonStep, shape: tuple[int, ...]) -> LinearStep:
        out_features, in_features = shape
        size = 0.2 * math.sqrt(max(shape)) if step.match_rms else math.sqrt(max(1.0, out_features / in_features))
        past = _share_of_moment(step)
        linear = LinearStep(
            w_pm=-step.lr * size * past,
            w_pg=-step.lr * size * (1.0 - past),
            m_m=step.momentum,
            m_g=1.0 - step.momentum,
            keep=1.0 - step.lr * step.weight_decay,
        )
        return linear.without_past() if step.fresh else linear

    def side(self, shape: tuple[int, ...]) -> Side:
        if len(shape) != 2:
            return "entries"  # Muon holds no such parameter; one that it does not train has no P
        return "right" if shape[0] > shape[1] else "left"

    def needs(self, step: MuonStep) -> set[str]:
        return {"momentum_buffer"}

    def precondition(self, step: MuonStep, state: State, g: Tensor) -> Tensor:
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


def _share_of_moment(step: MuonStep) -> float:
    """How much of the matrix that is made orthogonal is old momentum; the rest is g."""
    return step.momentum**2 if step.nesterov else step.momentum
