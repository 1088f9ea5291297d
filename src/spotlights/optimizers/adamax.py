"""`torch.optim.Adamax`: Adam with the largest |g| of late in place of the second moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule, with_coupled_decay


class AdamaxStep(NamedTuple):
    """What Adamax was told at one step, for one parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: float
    step: float
    fresh: float
    active: float


class AdamaxRule(UpdateRule):
    name = "adamax"
    row = AdamaxStep
    states = ("exp_avg", "exp_inf")
    moment = "exp_avg"

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.Adamax

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(group["maximize"]),
            float(state.get("step", 0.0)) + 1.0,
            float(not state),
            float(has_gradient),
        ]

    def linear(self, step: AdamaxStep, shape: tuple[int, ...]) -> LinearStep:
        size = step.lr / (1.0 - step.beta1**step.step)
        linear = LinearStep(
            w_pm=-size * step.beta1,
            w_pg=-size * (1.0 - step.beta1),
            m_m=step.beta1,
            m_g=1.0 - step.beta1,
            decay=step.weight_decay,
            sign=-1.0 if step.maximize else 1.0,
        )
        return linear.without_past() if step.fresh else linear

    def needs(self, step: AdamaxStep) -> set[str]:
        return with_coupled_decay(step, {"exp_inf"}, self.moment)

    def precondition(self, step: AdamaxStep, state: State, g: Tensor) -> Tensor:
        largest = state["exp_inf"].mul_(step.beta2)
        return torch.maximum(largest, g.abs().add_(step.eps), out=largest).reciprocal()
