"""`torch.optim.Adam`, `AdamW` and `RAdam`: a moving average of g, divided by a moving size of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule, with_coupled_decay


class AdamStep(NamedTuple):
    """What an optimizer of this family was told at one step, for one parameter."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: float
    """Decay shrinks the weights themselves, and is no part of g."""
    amsgrad: float
    maximize: float
    step: float
    """Counted by the optimizer from 1."""
    fresh: float
    active: float
    momentum_decay: float = 0.0
    """NAdam's alone, as the next one."""
    mu_product: float = 0.0
    """The product of all momenta, this step's included."""


class AdamRule(UpdateRule):
    """`torch.optim.Adam`, and `AdamW`, which differs by what `decoupled` means when the group does not say."""

    row = AdamStep
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    moment = "exp_avg"

    def __init__(self, optimizer: type[torch.optim.Optimizer], *, decoupled: bool = False) -> None:
        self.name = optimizer.__name__.lower()  # type: ignore[misc]
        self._optimizer = optimizer
        self._decoupled = decoupled

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is self._optimizer

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        beta1, beta2 = group["betas"]
        return [
            float(group["lr"]),
            float(beta1),
            float(beta2),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(group.get("decoupled_weight_decay", self._decoupled)),
            float(group.get("amsgrad", False)),
            float(group["maximize"]),
            float(state.get("step", 0.0)) + 1.0,
            float(not state),
            float(has_gradient),
            *self.momentum(group, state),
        ]

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[float, float]:
        """`momentum_decay` and `mu_product`."""
        return 0.0, 0.0

    def linear(self, step: AdamStep, shape: tuple[int, ...]) -> LinearStep:
        linear = LinearStep(
            w_pm=-step.beta1,
            w_pg=-(1.0 - step.beta1),
            m_m=step.beta1,
            m_g=1.0 - step.beta1,
            keep=1.0 - step.lr * step.weight_decay if step.decoupled else 1.0,
            decay=0.0 if step.decoupled else step.weight_decay,
            sign=-1.0 if step.maximize else 1.0,
        )
        return linear.without_past() if step.fresh else linear

    def needs(self, step: AdamStep) -> set[str]:
        states = set(self.states) - {"exp_avg"}
        if not step.amsgrad:
            states.discard("max_exp_avg_sq")
        return states if step.decoupled else with_coupled_decay(step, states, self.moment)

    def precondition(self, step: AdamStep, state: State, g: Tensor) -> Tensor:
        second = state["exp_avg_sq"].mul_(step.beta2).addcmul_(g, g, value=1.0 - step.beta2)
        if step.amsgrad:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        return self.divided(step, second)

    def divided(self, step: AdamStep, second: Tensor) -> Tensor:
        """P, from the second moment."""
        size = step.lr / (1.0 - step.beta1**step.step)
        corrected = math.sqrt(1.0 - step.beta2**step.step)
        return second.sqrt().add_(step.eps * corrected).reciprocal_().mul_(size * corrected)


class RAdamRule(AdamRule):
    """`torch.optim.RAdam`: divides by the second moment once enough steps have been averaged."""

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def divided(self, step: AdamStep, second: Tensor) -> Tensor:
        size = step.lr / (1.0 - step.beta1**step.step)
        forgotten = step.beta2**step.step
        longest = 2.0 / (1.0 - step.beta2) - 1.0
        length = longest - 2.0 * step.step * forgotten / (1.0 - forgotten)
        if length <= 5.0:
            return torch.full_like(second, size)
        rectified = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        size *= math.sqrt(rectified * (1.0 - forgotten))
        return second.sqrt().add_(step.eps).reciprocal_().mul_(size)
