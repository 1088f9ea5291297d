"""`torch.optim.Adadelta`: g in the units of the weights, by the ratio of two moving sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule, with_coupled_decay


class AdadeltaStep(NamedTuple):
    """What Adadelta was told at one step, for one parameter."""

    lr: float
    rho: float
    eps: float
    weight_decay: float
    maximize: float
    fresh: float
    active: float


class AdadeltaRule(UpdateRule):
    name = "adadelta"
    row = AdadeltaStep
    states = ("square_avg", "acc_delta")
    moment = None

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.Adadelta

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        told = (group[name] for name in ("lr", "rho", "eps", "weight_decay", "maximize"))
        return [*map(float, told), float(not state), float(has_gradient)]

    def linear(self, step: AdadeltaStep, shape: tuple[int, ...]) -> LinearStep:
        return LinearStep(w_pg=-step.lr, decay=step.weight_decay, sign=-1.0 if step.maximize else 1.0)

    def needs(self, step: AdadeltaStep) -> set[str]:
        return with_coupled_decay(step, {"square_avg", "acc_delta"}, None)

    def precondition(self, step: AdadeltaStep, state: State, g: Tensor) -> Tensor:
        size = state["square_avg"].mul_(step.rho).addcmul_(g, g, value=1.0 - step.rho)
        P = state["acc_delta"].add(step.eps).div_(size.add(step.eps)).sqrt_()
        delta = P * g
        state["acc_delta"].mul_(step.rho).addcmul_(delta, delta, value=1.0 - step.rho)
        return P
