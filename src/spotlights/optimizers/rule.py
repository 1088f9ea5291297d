"""What Spotlights needs to know of a family of optimizers.

Every optimizer here is linear in the gradients once one thing is known of each step, its preconditioner P: 1 for SGD,
a matrix of 1/√v for Adam, an orthogonalising matrix for Muon. A rule says three things: what to write to the log as the
optimizer steps, how a step looks given P (`linear`), and how to find P again from the gradients (`precondition`).
Unrolling, masks, chunks and checkpoints are the same for all and live elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import Adjoint, LinearStep, Side

State = dict[str, Tensor]
"""A parameter's optimizer state, by torch's names."""
WEIGHTS = "weights"
"""The parameter itself, where it counts among the state."""


@dataclass(frozen=True)
class Coefficients:
    """What a parameter is made of under a rule without P: `initial·W_0 + moment·M_0 + Σ_s per_step[s]·G_s`."""

    per_step: Float[Tensor, "steps"]
    initial: float
    moment: float


class UpdateRule(ABC):
    """Turns the step log into what a slot contributed."""

    name: ClassVar[str]
    row: ClassVar[type]
    """One row of the step log: a NamedTuple of numbers, whose names are the rule's fields.

    Every rule has `active`: the parameter had a gradient. Without one the optimizer leaves it alone, decay included.
    One with a P has `fresh` too: the optimizer had no state of the parameter before this step.
    """
    states: ClassVar[tuple[str, ...]]
    """The optimizer state that an already running optimizer brings along."""
    moment: ClassVar[str | None]
    """Which of them is M."""
    scalar: ClassVar[bool] = False
    """P is 1: a step's factor is one number."""
    rounding: ClassVar[float] = 0.0
    """What the optimizer's own arithmetic leaves, relative to the weights, where it is coarser than their type."""
    note: ClassVar[str | None] = None
    """What a reader of exact-looking numbers must know then."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The numbers written to the step log, for each parameter at each step."""
        return self.row._fields  # type: ignore[attr-defined]

    @abstractmethod
    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this rule describes the optimizer exactly."""

    @abstractmethod
    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        """The values of `fields` just before the optimizer steps."""

    @abstractmethod
    def linear(self, step: Any, shape: tuple[int, ...]) -> LinearStep:
        """An active step of a parameter of this shape, given P."""

    def side(self, shape: tuple[int, ...]) -> Side:
        """How P acts on a gradient of this shape."""
        return "entries"

    def needs(self, step: Any) -> set[str]:
        """The part of the state (and `WEIGHTS`) from which P follows; checkpoints of the memory keep it."""
        return set()

    def needed(self, logged: Sequence[float]) -> set[str]:
        """The same for a row of the log."""
        return self.needs(self.row(*logged))

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        """P, from the state before the step and its g. Moves the state on, but for M and the weights."""
        raise NotImplementedError(f"{self.name} has no preconditioner")

    def read(self, log: Float[Tensor, "steps fields"]) -> list[Any]:
        """The rows of a log by name."""
        return [self.row(*row) for row in log.tolist()]

    def coefficients(self, log: Float[Tensor, "steps fields"]) -> Coefficients:
        """Unrolls the logged steps of a rule without P, the last of them being the state asked about."""
        assert self.scalar
        steps, adjoint = self.read(log), Adjoint()
        per_step = [0.0] * len(steps)
        for s in range(len(steps) - 1, -1, -1):
            if steps[s].active:
                factor = adjoint.back(self.linear(steps[s], ()), 1.0)
                assert isinstance(factor, float)
                per_step[s] = factor
        assert isinstance(adjoint.to_weights, float)
        assert isinstance(adjoint.to_moment, float)
        return Coefficients(torch.tensor(per_step, dtype=torch.float64), adjoint.to_weights, adjoint.to_moment)


def with_coupled_decay(step: Any, states: set[str], moment: str | None) -> set[str]:
    """What `needs` has to answer where decay is part of g, and so of P: the weights, and M to move them on."""
    if step.weight_decay == 0.0:
        return states
    return states | {WEIGHTS} | ({moment} if moment else set())
