"""`torch.optim.Adagrad`: g divided by the root of the sum of all its squares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import State, UpdateRule, with_coupled_decay


class AdagradStep(NamedTuple):
    """What Adagrad was told at one step, for one parameter."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    maximize: float
    initial: float
    """What the sum starts with."""
    step: float
    fresh: float
    active: float


class AdagradRule(UpdateRule):
    name = "adagrad"
    row = AdagradStep
    states = ("sum",)
    moment = None

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.Adagrad

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        told = (group[name] for name in ("lr", "lr_decay", "eps", "weight_decay", "maximize"))
        steps = float(state["step"])  # Adagrad makes its state when it is made itself
        initial = float(group["initial_accumulator_value"])
        return [*map(float, told), initial, steps + 1.0, float(steps == 0.0), float(has_gradient)]

    def linear(self, step: AdagradStep, shape: tuple[int, ...]) -> LinearStep:
        return LinearStep(
            w_pg=-step.lr / (1.0 + (step.step - 1.0) * step.lr_decay),
            decay=step.weight_decay,
            sign=-1.0 if step.maximize else 1.0,
        )

    def needs(self, step: AdagradStep) -> set[str]:
        return with_coupled_decay(step, {"sum"}, None)

    def precondition(self, step: AdagradStep, state: State, g: Tensor) -> Tensor:
        if step.fresh:
            state["sum"].fill_(step.initial)
        return state["sum"].addcmul_(g, g).sqrt().add_(step.eps).reciprocal_()
