"""Lion, which torch does not have: the sign of c = β1·M + (1−β1)·g, which is c divided by |c|.

Several packages have a class of that name. A class counts as Lion if it updates a small test parameter as Lion does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spotlights.optimizers.rule import Read, State, UpdateRule


class LionRule(UpdateRule):
    name = "lion"
    optimizer = None
    fields = ("lr", "beta1", "beta2", "weight_decay", "fresh", "active")
    reads: ClassVar[Mapping[str, Read]] = {"fresh": lambda group, state: state.get("exp_avg") is None}
    states = ("exp_avg",)
    moment = "exp_avg"
    decoupled = True

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return type(optimizer).__name__ == "Lion" and _is_lion(optimizer)

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        past, now = step.lr * step.beta1, step.lr * (1.0 - step.beta1)
        return {"w_pm": -past, "w_pg": -now, "m_m": step.beta2, "m_g": 1.0 - step.beta2}

    def needs(self, step: Any) -> set[str]:
        return {"exp_avg"}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        size = torch.lerp(g, state["exp_avg"], step.beta1).abs_()
        return torch.where(size == 0.0, 0.0, size.reciprocal())


def _is_lion(optimizer: torch.optim.Optimizer) -> bool:
    """Whether three steps of the optimizer's class, with its own options, are three steps of Lion."""
    options: dict[str, Any] = {name: optimizer.param_groups[0].get(name) for name in ("lr", "betas", "weight_decay")}
    weights, moment, *gradients = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameter, moment = nn.Parameter(weights.clone()), torch.zeros_like(moment)
    try:
        lr, (beta1, beta2), decay = float(options["lr"]), options["betas"], float(options["weight_decay"])
        other = type(optimizer)([parameter], **options)  # type: ignore[call-arg]
        for gradient in gradients:
            parameter.grad = gradient.clone()
            other.step()
            weights = weights * (1.0 - lr * decay) - lr * torch.lerp(gradient, moment, beta1).sign()
            moment = torch.lerp(gradient, moment, beta2)
        return set(other.state[parameter]) == {"exp_avg"} and torch.allclose(parameter.detach(), weights, atol=1e-12)
    except Exception:  # another class may raise anything: it is not the Lion that we know
        return False
