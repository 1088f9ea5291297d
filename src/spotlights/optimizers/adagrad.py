"""`torch.optim.Adagrad`, `RMSprop` and `Adadelta`: g divided by a running size of g."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from spotlights.optimizers.rule import Read, State, UpdateRule


class AdagradRule(UpdateRule):
    """Adagrad divides by the root of the sum of all squares."""

    name = "adagrad"
    optimizer = torch.optim.Adagrad
    fields = ("lr", "lr_decay", "eps", "weight_decay", "maximize", "initial", "step", "fresh", "active")
    reads: ClassVar[Mapping[str, Read]] = {
        "initial": lambda group, state: group["initial_accumulator_value"],
        "fresh": lambda group, state: float(state["step"]) == 0.0,  # the constructor creates the state
    }
    states = ("sum",)
    moment = None

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        return {"w_pg": -step.lr / (1.0 + (step.step - 1.0) * step.lr_decay)}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        if step.fresh:
            state["sum"].fill_(step.initial)
        return state["sum"].addcmul_(g, g).sqrt().add_(step.eps).reciprocal_()


class RmspropRule(UpdateRule):
    """RMSprop divides by the root of a moving average of squares, and may have momentum of the quotient."""

    name = "rmsprop"
    optimizer = torch.optim.RMSprop
    fields = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize", "fresh", "active")
    states = ("momentum_buffer", "square_avg", "grad_avg")
    moment = "momentum_buffer"

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        return {
            "w_pg": -step.lr,
            "w_m": -step.lr * step.momentum,
            "m_m": step.momentum,
            "m_pg": 1.0 if step.momentum > 0.0 else 0.0,
        }

    def unused(self, step: Any) -> set[str]:
        used = {"momentum_buffer": step.momentum > 0.0, "grad_avg": step.centered}
        return {name for name, is_used in used.items() if not is_used}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        second = state["square_avg"].mul_(step.alpha).addcmul_(g, g, value=1.0 - step.alpha)
        if step.centered:
            mean = state["grad_avg"].lerp_(g, 1.0 - step.alpha)
            second = second.addcmul(mean, mean, value=-1.0)
        return second.sqrt().add_(step.eps).reciprocal_()


class AdadeltaRule(UpdateRule):
    """Adadelta multiplies g by the ratio of two running sizes: of the updates, and of g."""

    name = "adadelta"
    optimizer = torch.optim.Adadelta
    fields = ("lr", "rho", "eps", "weight_decay", "maximize", "fresh", "active")
    states = ("square_avg", "acc_delta")
    moment = None

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        return {"w_pg": -step.lr}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        size = state["square_avg"].mul_(step.rho).addcmul_(g, g, value=1.0 - step.rho)
        P = state["acc_delta"].add(step.eps).div_(size.add(step.eps)).sqrt_()
        delta = P * g
        state["acc_delta"].mul_(step.rho).addcmul_(delta, delta, value=1.0 - step.rho)
        return P
