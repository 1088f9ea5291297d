"""`torch.optim.Adam`, `AdamW`, `SparseAdam`, `NAdam`, `RAdam`, `Adamax`: a moving average of g over its moving size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from spotlights.optimizers.rule import Read, State, UpdateRule


class AdamRule(UpdateRule):
    name = "adam"
    optimizer = torch.optim.Adam
    fields = (
        *("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "amsgrad", "maximize", "step", "fresh", "active"),
        *("momentum_decay", "mu_product"),  # of NAdam; mu_product includes this step's momentum
    )
    reads: ClassVar[Mapping[str, Read]] = {
        "decoupled": lambda group, state: group.get("decoupled_weight_decay", False),
    }
    states = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    moment = "exp_avg"

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        return {"w_pm": -step.beta1, "w_pg": -(1.0 - step.beta1), "m_m": step.beta1, "m_g": 1.0 - step.beta1}

    def unused(self, step: Any) -> set[str]:
        return set() if step.amsgrad else {"max_exp_avg_sq"}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        second = state["exp_avg_sq"].mul_(step.beta2).addcmul_(g, g, value=1.0 - step.beta2)
        if step.amsgrad:
            second = torch.maximum(state["max_exp_avg_sq"], second, out=state["max_exp_avg_sq"])
        return self.inverse_size(step, second)

    def inverse_size(self, step: Any, second: Tensor) -> Tensor:
        """P, from the second moment."""
        size = step.lr / (1.0 - step.beta1**step.step)
        corrected = math.sqrt(1.0 - step.beta2**step.step)
        return second.sqrt().add_(step.eps * corrected).reciprocal_().mul_(size * corrected)


class AdamWRule(AdamRule):
    name = "adamw"
    optimizer = torch.optim.AdamW
    reads: ClassVar[Mapping[str, Read]] = {
        "decoupled": lambda group, state: group.get("decoupled_weight_decay", True),
    }


class SparseAdamRule(AdamRule):
    """Adam that leaves the rows of tokens alone that a step does not use."""

    name = "sparse-adam"
    optimizer = torch.optim.SparseAdam
    states = ("exp_avg", "exp_avg_sq")
    lazy = True

    def inverse_size(self, step: Any, second: Tensor) -> Tensor:
        size = step.lr * math.sqrt(1.0 - step.beta2**step.step) / (1.0 - step.beta1**step.step)
        return second.sqrt().add_(step.eps).reciprocal_().mul_(size)


class RAdamRule(AdamRule):
    """RAdam divides by the second moment only once enough steps have been averaged."""

    name = "radam"
    optimizer = torch.optim.RAdam
    states = ("exp_avg", "exp_avg_sq")

    def inverse_size(self, step: Any, second: Tensor) -> Tensor:
        size = step.lr / (1.0 - step.beta1**step.step)
        forgotten = step.beta2**step.step
        longest = 2.0 / (1.0 - step.beta2) - 1.0
        length = longest - 2.0 * step.step * forgotten / (1.0 - forgotten)
        if length <= 5.0:
            return torch.full_like(second, size)
        rectified = (length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)
        size *= math.sqrt(rectified * (1.0 - forgotten))
        return second.sqrt().add_(step.eps).reciprocal_().mul_(size)


def _nadam_momentum(beta1: float, decay: float, step: float) -> float:
    return beta1 * (1.0 - 0.5 * 0.96 ** (step * decay))


def _nadam_product(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    # Multiplied in the type of torch's own counter, because torch rounds the product to that type.
    product = state.get("mu_product")
    counter = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    product = torch.ones((), dtype=counter) if product is None else product.detach().clone()
    step = float(state.get("step", 0.0)) + 1.0
    product *= _nadam_momentum(float(group["betas"][0]), float(group["momentum_decay"]), step)
    return float(product)


class NAdamRule(AdamRule):
    """NAdam looks ahead as Nesterov's momentum does: P divides both g and its average."""

    name = "nadam"
    optimizer = torch.optim.NAdam
    reads: ClassVar[Mapping[str, Read]] = {**AdamRule.reads, "mu_product": _nadam_product}
    states = ("exp_avg", "exp_avg_sq")

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        now, ahead = (_nadam_momentum(step.beta1, step.momentum_decay, s) for s in (step.step, step.step + 1.0))
        by_gradient = -step.lr * (1.0 - now) / (1.0 - step.mu_product)
        by_moment = -step.lr * ahead / (1.0 - step.mu_product * ahead)
        adam = super().factors(step, shape)
        return {**adam, "w_pm": by_moment * adam["m_m"], "w_pg": by_gradient + by_moment * adam["m_g"]}

    def inverse_size(self, step: Any, second: Tensor) -> Tensor:
        corrected = math.sqrt(1.0 - step.beta2**step.step)
        return second.sqrt().add_(step.eps * corrected).reciprocal_().mul_(corrected)


class AdamaxRule(UpdateRule):
    """Adamax divides by a decaying maximum of |g| instead of the second moment."""

    name = "adamax"
    optimizer = torch.optim.Adamax
    fields = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "step", "fresh", "active")
    states = ("exp_avg", "exp_inf")
    moment = "exp_avg"

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        size, past = step.lr / (1.0 - step.beta1**step.step), step.beta1
        return {"w_pm": -size * past, "w_pg": -size * (1.0 - past), "m_m": past, "m_g": 1.0 - past}

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        largest = state["exp_inf"].mul_(step.beta2)
        return torch.maximum(largest, g.abs().add_(step.eps), out=largest).reciprocal()
