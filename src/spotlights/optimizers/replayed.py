"""Any other optimizer: what it was told is written down, so that its own class can be run again on recorded gradients.

That needs no rule, and shows whether the memory holds all that the optimizer saw. It does not divide the weights
among the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spotlights.dual_form import LinearStep
from spotlights.errors import UnsupportedError
from spotlights.optimizers.rule import UpdateRule

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""The optimizer's class, or a function that makes one of parameter groups."""


class ReplayedRule(UpdateRule):
    """Logs every numerical option of an optimizer's parameter groups."""

    name = "replayed"
    states = ()
    moment = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._options = sorted({name for group in optimizer.param_groups for name in _numbers(group)})

    @property
    def fields(self) -> tuple[str, ...]:
        return ("group", "fresh", "active", *self._options)

    def handles(self, optimizer: torch.optim.Optimizer) -> bool:
        return False  # not exactly: it says nothing of single slots

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        index = next(i for i, other in enumerate(self._optimizer.param_groups) if other is group)
        fresh = not state or float(state.get("step", 0.0)) == 0.0
        told = _numbers(group)
        return [float(index), float(fresh), float(has_gradient), *(told.get(n, float("nan")) for n in self._options)]

    def needed(self, logged: Sequence[float]) -> set[str]:
        return set()

    def linear(self, step: Any, shape: tuple[int, ...]) -> LinearStep:
        raise UnsupportedError(f"There is no exact update rule for {type(self._optimizer).__name__}.")


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """`{"lr": 0.1, "betas.0": 0.9, …}`"""
    found = {}
    for name, value in group.items():
        if name != "params":
            several = isinstance(value, tuple | list)
            for place, item in enumerate(value if several else [value]):
                if isinstance(item, int | float) or (isinstance(item, Tensor) and item.numel() == 1):
                    found[f"{name}.{place}" if several else name] = float(item)
    return found


def options_of(logged: Mapping[str, float], like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options as an optimizer takes them, from logged numbers; whole numbers and flags where `like` has such."""
    options: dict[str, Any] = {}
    for name, value in logged.items():
        if name in ("group", "fresh", "active") or value != value:
            continue
        base, _, place = name.partition(".")
        options[base] = (*options.get(base, ()), value) if place else value
    for name, value in options.items():
        kind = type((like or {}).get(name))
        if kind in (bool, int):
            options[name] = kind(value)
    return options
