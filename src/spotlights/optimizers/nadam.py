"""`torch.optim.NAdam`: Adam with Nesterov's look ahead; P divides g and its average alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.optimizers.adam import AdamRule, AdamStep


class NAdamRule(AdamRule):
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def momentum(self, group: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[float, float]:
        decay = float(group["momentum_decay"])
        # As torch multiplies it, in the type of its own counter: there it is a rounded number.
        product = state.get("mu_product")
        product = torch.ones((), dtype=_counter_dtype()) if product is None else product.detach().clone()
        product *= _momentum(float(group["betas"][0]), decay, float(state.get("step", 0.0)) + 1.0)
        return decay, float(product)

    def linear(self, step: AdamStep, shape: tuple[int, ...]) -> LinearStep:
        now, ahead = (_momentum(step.beta1, step.momentum_decay, s) for s in (step.step, step.step + 1.0))
        by_gradient = -step.lr * (1.0 - now) / (1.0 - step.mu_product)
        by_moment = -step.lr * ahead / (1.0 - step.mu_product * ahead)
        adam = super().linear(step, shape)
        return replace(adam, w_pm=by_moment * adam.m_m, w_pg=by_gradient + by_moment * adam.m_g)

    def divided(self, step: AdamStep, second: Tensor) -> Tensor:
        corrected = math.sqrt(1.0 - step.beta2**step.step)
        return second.sqrt().add_(step.eps * corrected).reciprocal_().mul_(corrected)


def _momentum(beta1: float, decay: float, step: float) -> float:
    return beta1 * (1.0 - 0.5 * 0.96 ** (step * decay))


def _counter_dtype() -> torch.dtype:
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
