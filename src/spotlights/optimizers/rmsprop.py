"""`torch.optim.RMSprop`: g divided by its size, then, perhaps, momentum of the quotient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule, with_coupled_decay


class RmspropStep(NamedTuple):
    """What RMSprop was told at one step, for one parameter."""

    lr: float
    alpha: float
    eps: float
    weight_decay: float
    momentum: float
    centered: float
    maximize: float
    fresh: float
    active: float


class RmspropRule(UpdateRule):
    name = "rmsprop"
    row = RmspropStep
    states = ("momentum_buffer", "square_avg", "grad_avg")
    moment = "momentum_buffer"

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.RMSprop

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        told = (group[name] for name in ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"))
        return [*map(float, told), float(not state), float(has_gradient)]

    def linear(self, step: RmspropStep, shape: tuple[int, ...]) -> LinearStep:
        linear = LinearStep(
            w_pg=-step.lr,
            w_m=-step.lr * step.momentum,
            m_m=step.momentum,
            m_pg=1.0 if step.momentum > 0.0 else 0.0,
            decay=step.weight_decay,
            sign=-1.0 if step.maximize else 1.0,
        )
        return linear.without_past() if step.fresh else linear

    def needs(self, step: RmspropStep) -> set[str]:
        states = {"square_avg", "grad_avg"} if step.centered else {"square_avg"}
        return with_coupled_decay(step, states, self.moment if step.momentum > 0.0 else None)

    def precondition(self, step: RmspropStep, state: State, g: Tensor) -> Tensor:
        second = state["square_avg"].mul_(step.alpha).addcmul_(g, g, value=1.0 - step.alpha)
        if step.centered:
            mean = state["grad_avg"].lerp_(g, 1.0 - step.alpha)
            second = second.addcmul(mean, mean, value=-1.0)
        return second.sqrt().add_(step.eps).reciprocal_()
