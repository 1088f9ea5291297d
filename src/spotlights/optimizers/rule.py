"""What Spotlights needs to know of a family of optimizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Coefficients:
    """What a parameter is made of: `initial·W_0 + Σ_name states[name]·S_name + Σ_s per_step[s]·G_s`.

    `G_s` is the gradient the optimizer saw at step s; `S_name` a state tensor that the optimizer already
    had when recording began.
    """

    per_step: Float[Tensor, "steps"]
    initial: float
    states: Mapping[str, float]


class UpdateRule(ABC):
    """Turns the step log into what a slot contributed."""

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    """The numbers written to the step log, for each parameter at each step."""
    states: ClassVar[tuple[str, ...]]
    """The optimizer state that an already running optimizer brings along."""

    @abstractmethod
    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this rule describes the optimizer exactly."""

    @abstractmethod
    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        """The values of `fields` just before the optimizer steps."""

    @abstractmethod
    def coefficients(self, log: Float[Tensor, "steps fields"]) -> Coefficients:
        """Unrolls the logged steps, the last of them being the state asked about."""
