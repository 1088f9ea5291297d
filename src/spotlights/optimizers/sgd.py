"""`torch.optim.SGD` with every option: one number per step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import SgdStep, sgd_sweep
from spotlights.optimizers.rule import Coefficients, UpdateRule


class SgdRule(UpdateRule):
    name = "sgd"
    fields = (
        "lr",
        "momentum",
        "dampening",
        "weight_decay",
        "nesterov",
        "maximize",
        "starts_buffer",
        "active",
    )
    states = ("momentum_buffer",)

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

    def coefficients(self, log: Float[Tensor, "steps fields"]) -> Coefficients:
        steps = [
            SgdStep(*row[:4], *(flag != 0.0 for flag in row[4:]))  # the order of `fields`
            for row in log.tolist()
        ]
        sweep = sgd_sweep(steps)
        return Coefficients(sweep.per_step, sweep.initial, {"momentum_buffer": sweep.buffer})
