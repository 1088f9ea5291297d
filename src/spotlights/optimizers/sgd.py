"""`torch.optim.SGD` with every option: one number per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from spotlights.optimizers.rule import Read, UpdateRule


class SgdRule(UpdateRule):
    name = "sgd"
    optimizer = torch.optim.SGD
    fields = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "starts_buffer", "active")
    reads: ClassVar[Mapping[str, Read]] = {
        # Without a momentum buffer before the step, the buffer becomes the gradient itself, without dampening.
        "starts_buffer": lambda group, state: state.get("momentum_buffer") is None,
    }
    states = ("momentum_buffer",)
    moment = "momentum_buffer"
    scalar = True

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        m_m, m_g, by_moment, by_gradient = 1.0, 0.0, 0.0, 1.0
        if step.momentum != 0.0:
            m_m, m_g = (0.0, 1.0) if step.starts_buffer else (step.momentum, 1.0 - step.dampening)
            ahead = step.momentum if step.nesterov else 1.0
            by_moment, by_gradient = ahead * m_m, ahead * m_g + (1.0 if step.nesterov else 0.0)
        return {"w_m": -step.lr * by_moment, "w_pg": -step.lr * by_gradient, "m_m": m_m, "m_g": m_g}
