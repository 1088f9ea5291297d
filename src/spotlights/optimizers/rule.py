"""What Spotlights needs to know about a family of optimizers.

Every optimizer here is linear in the gradients once its preconditioner P is known for each step: 1 for SGD, a matrix of
1/√v for Adam, an orthogonalising matrix for Muon. A rule defines what to log when the optimizer steps (`fields`), a
step given P (`factors`), and how to recompute P from the gradients (`precondition`). Unrolling, masks and checkpoints
are the same for all rules and are elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.dual_form import Adjoint, LinearStep, Side
from spotlights.errors import MemoryFormatError

State = dict[str, Tensor]
"""A parameter's optimizer state, by torch's names."""
WEIGHTS = "weights"
"""The parameter itself, where P depends on it."""
Read = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""Reads a number of the log: from the parameter group and the parameter's state."""

_READS: Mapping[str, Read] = {
    "beta1": lambda group, state: group["betas"][0],
    "beta2": lambda group, state: group["betas"][1],
    "step": lambda group, state: float(state.get("step", 0.0)) + 1.0,  # the first step is 1
    "fresh": lambda group, state: not state,
}


@dataclass(frozen=True)
class Coefficients:
    """A parameter under a rule without P: `initial·W_0 + moment·M_0 + Σ_s per_step[s]·G_s`."""

    per_step: Float[Tensor, "steps"]
    initial: float
    moment: float


class UpdateRule(ABC):
    """Turns the step log into what a slot contributed."""

    name: ClassVar[str]
    optimizer: ClassVar[type[torch.optim.Optimizer] | None]
    """The class that the rule describes."""
    fields: tuple[str, ...]
    """The numbers in the step log, for each parameter at each step: options of the parameter group, and `reads`.

    Every rule has `active`: the parameter had a gradient. Without one, the optimizer leaves the parameter alone, weight
    decay included. A rule with a P has `fresh` too: the optimizer had no state of the parameter before this step.
    """
    reads: ClassVar[Mapping[str, Read]] = {}
    """Fields that are neither an option of the parameter group nor one of `_READS`."""
    decoupled: ClassVar[bool] = False
    """Weight decay shrinks the weights directly and is not part of g, unless the log has a field that says so."""
    states: ClassVar[tuple[str, ...]]
    """The optimizer state that an optimizer may have when recording starts."""
    moment: ClassVar[str | None]
    """Which of them is the momentum M."""
    scalar: ClassVar[bool] = False
    """P is 1: a step's factor is one number."""
    lazy: ClassVar[bool] = False
    """A step leaves tokens alone that it does not use: weights, moments and all. P is 0 there."""
    rounding: ClassVar[float] = 0.0
    """The optimizer's own rounding error relative to the weights, where it is larger than their type's."""
    note: ClassVar[str | None] = None
    """What to say about that error."""

    def __init_subclass__(cls) -> None:
        cls._row = namedtuple("_row", cls.fields)  # type: ignore[misc]
        reads = {**_READS, **cls.reads}
        cls._reads = [(name, reads.get(name)) for name in cls.fields]
        cls._active = cls.fields.index("active")

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this rule describes an optimizer that torch does not have."""
        return False

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        """The values of `fields` just before the optimizer steps."""
        values = [float(group.get(name, 0.0) if read is None else read(group, state)) for name, read in self._reads]
        values[self._active] = float(has_gradient)
        return values

    @property
    def idle(self) -> list[float]:
        """What is logged for a parameter that the optimizer does not hold."""
        return [0.0] * len(self.fields)

    def linear(self, step: Any, shape: tuple[int, ...]) -> LinearStep:
        """An active step of a parameter of this shape, given P."""
        with self.sensible(step):
            factors = self.factors(step, shape)
        if not self.scalar and step.fresh:  # there was no M before this step
            factors = {**factors, "w_m": 0.0, "w_pm": 0.0, "m_m": 0.0}
        decoupled = self.is_decoupled(step)
        return LinearStep(
            **factors,
            keep=1.0 - step.lr * step.weight_decay if decoupled else 1.0,
            decay=0.0 if decoupled else step.weight_decay,
            sign=-1.0 if getattr(step, "maximize", 0.0) else 1.0,
        )

    @contextmanager
    def sensible(self, step: Any) -> Iterator[None]:
        """Names logged settings that cannot be computed with: no optimizer has them."""
        try:
            yield
        except (ArithmeticError, ValueError, RuntimeError) as error:  # torch's own, of what no float32 can hold
            raise MemoryFormatError(
                f"The step log is damaged: {self.name} cannot have made a step with {step}: {error}."
            ) from error

    @abstractmethod
    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        """The factors of P, M and g in `LinearStep`, if there was an M before the step."""

    def is_decoupled(self, step: Any) -> bool:
        return bool(getattr(step, "decoupled", self.decoupled))

    def side(self, shape: tuple[int, ...]) -> Side:
        """How P acts on a gradient of this shape."""
        return "entries"

    def needs(self, step: Any) -> set[str]:
        """The part of the state (and `WEIGHTS`) that determines P; the memory's checkpoints store it."""
        states = set() if self.scalar else set(self.states) - self.unused(step)
        if step.weight_decay == 0.0 or self.scalar or self.is_decoupled(step):
            return states - {self.moment}
        return states | {WEIGHTS}  # decay is part of g, and so of P; M updates the weights

    def unused(self, step: Any) -> set[str]:
        """States that the options of this step leave out."""
        return set()

    def needed(self, logged: Sequence[float]) -> set[str]:
        """The same as `needs` for a row of the log."""
        return self.needs(self._row(*logged))

    def precondition(self, step: Any, state: State, g: Tensor) -> Tensor:
        """P, from the state before the step and g. Updates the state, except M and the weights."""
        raise NotImplementedError(f"{self.name} has no preconditioner")

    def read(self, log: Float[Tensor, "steps fields"]) -> list[Any]:
        """The rows of a log by name."""
        return [self._row(*row) for row in log.tolist()]

    def coefficients(self, log: Float[Tensor, "steps fields"]) -> Coefficients:
        """Unrolls the logged steps of a rule without P, as of the last of them."""
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
