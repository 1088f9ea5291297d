"""Lion, which torch does not have: the sign of c = β1·M + (1−β1)·g, that is c divided by |c|.

There are several classes of that name. One is taken for Lion if it does what Lion does, on a small parameter of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule


class LionStep(NamedTuple):
    """What Lion was told at one step, for one parameter."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    fresh: float
    active: float


class LionRule(UpdateRule):
    name = "lion"
    row = LionStep
    states = ("exp_avg",)
    moment = "exp_avg"

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer).__name__ == "Lion" and _is_lion(optimizer)

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        beta1, beta2 = group["betas"]
        told = (group["lr"], beta1, beta2, group["weight_decay"])
        return [*map(float, told), float(state.get("exp_avg") is None), float(has_gradient)]

    def linear(self, step: LionStep, shape: tuple[int, ...]) -> LinearStep:
        linear = LinearStep(
            w_pm=-step.lr * step.beta1,
            w_pg=-step.lr * (1.0 - step.beta1),
            m_m=step.beta2,
            m_g=1.0 - step.beta2,
            keep=1.0 - step.lr * step.weight_decay,
        )
        return linear.without_past() if step.fresh else linear

    def needs(self, step: LionStep) -> set[str]:
        return {"exp_avg"}

    def precondition(self, step: LionStep, state: State, g: Tensor) -> Tensor:
        size = torch.lerp(g, state["exp_avg"], step.beta1).abs_()
        return torch.where(size == 0.0, 0.0, size.reciprocal())


def _is_lion(optimizer: torch.optim.Optimizer) -> bool:
    """Whether three steps of its class, with its own options, are three steps of Lion."""
    told: dict[str, Any] = {name: optimizer.param_groups[0].get(name) for name in ("lr", "betas", "weight_decay")}
    weights, moment, *gradients = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameter, moment = nn.Parameter(weights.clone()), torch.zeros_like(moment)
    try:
        lr, (beta1, beta2), decay = float(told["lr"]), told["betas"], float(told["weight_decay"])
        other = type(optimizer)([parameter], **told)  # type: ignore[call-arg]
        for gradient in gradients:
            parameter.grad = gradient.clone()
            other.step()
            weights = weights * (1.0 - lr * decay) - lr * torch.lerp(gradient, moment, beta1).sign()
            moment = torch.lerp(gradient, moment, beta2)
        return set(other.state[parameter]) == {"exp_avg"} and torch.allclose(parameter.detach(), weights, atol=1e-12)
    except Exception:  # whatever a stranger's class may raise: it is not what we know
        return False
