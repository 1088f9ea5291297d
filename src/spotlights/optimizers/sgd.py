"""`torch.optim.SGD` with every option: one number per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from spotlights.dual_form import LinearStep
from spotlights.optimizers.rule import UpdateRule


class SgdStep(NamedTuple):
    """What torch's SGD was told at one step, for one parameter."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: float = 0.0
    maximize: float = 0.0
    starts_buffer: float = 0.0
    """The momentum buffer did not exist before this step: it becomes the gradient itself, undampened."""
    active: float = 1.0


class SgdRule(UpdateRule):
    name = "sgd"
    row = SgdStep
    states = ("momentum_buffer",)
    moment = "momentum_buffer"
    scalar = True

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer) is torch.optim.SGD

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        return [
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            float(group["nesterov"]),
            float(group["maximize"]),
            float(state.get("momentum_buffer") is None),
            float(has_gradient),
        ]

    def linear(self, step: SgdStep, shape: tuple[int, ...]) -> LinearStep:
        m_m, m_g, by_moment, by_gradient = 1.0, 0.0, 0.0, 1.0
        if step.momentum != 0.0:
            m_m, m_g = (0.0, 1.0) if step.starts_buffer else (step.momentum, 1.0 - step.dampening)
            ahead = step.momentum if step.nesterov else 1.0
            by_moment, by_gradient = ahead * m_m, ahead * m_g + (1.0 if step.nesterov else 0.0)
        return LinearStep(
            w_m=-step.lr * by_moment,
            w_pg=-step.lr * by_gradient,
            m_m=m_m,
            m_g=m_g,
            decay=step.weight_decay,
            sign=-1.0 if step.maximize else 1.0,
        )
