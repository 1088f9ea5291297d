"""Any other optimizer: its options are logged, so that `verify` can run its class again on the recorded gradients.

That replay shows whether the memory has everything that the optimizer used. Contributions of slots are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spotlights.errors import UnsupportedError
from spotlights.optimizers.rule import UpdateRule

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""The optimizer's class, or a function from parameter groups to an optimizer."""


class ReplayedRule(UpdateRule):
    """Logs every numerical option of an optimizer's parameter groups."""

    name = "replayed"
    optimizer = None  # no optimizer exactly: the rule says nothing about single slots
    fields = ("group", "fresh", "active")
    states = ()
    moment = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._source = optimizer
        self._options = sorted({name for group in optimizer.param_groups for name in option_numbers(group)})
        self.fields = (*self.fields, *self._options)

    def log(self, group: Mapping[str, Any], state: Mapping[str, Any], has_gradient: bool) -> list[float]:
        index = next(i for i, other in enumerate(self._source.param_groups) if other is group)
        fresh = not state or float(state.get("step", 0.0)) == 0.0
        options = option_numbers(group)
        logged = (options.get(name, float("nan")) for name in self._options)
        return [float(index), float(fresh), float(has_gradient), *logged]

    def needed(self, logged: Sequence[float]) -> set[str]:
        return set()

    def factors(self, step: Any, shape: tuple[int, ...]) -> dict[str, float]:
        raise UnsupportedError(f"There is no exact update rule for {type(self._source).__name__}.")


def option_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """`{"lr": 0.1, "betas.0": 0.9, …}`"""
    numbers = {}
    for name, value in group.items():
        if name != "params":
            several = isinstance(value, tuple | list)
            for place, item in enumerate(value if several else [value]):
                if several and item is None:  # Adafactor's eps
                    numbers[f"{name}.{place}"] = float("nan")
                elif isinstance(item, int | float) or (isinstance(item, Tensor) and item.numel() == 1):
                    numbers[f"{name}.{place}" if several else name] = float(item)
    return numbers


def options_of(logged: Mapping[str, float], like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An optimizer's options from logged numbers; integers and booleans where `like` has them."""
    options: dict[str, Any] = {}
    for name, value in logged.items():
        base, _, place = name.partition(".")
        missing = value != value
        if name in ("group", "fresh", "active") or (missing and not place):
            continue
        options[base] = (*options.get(base, ()), None if missing else value) if place else value
    for name, value in options.items():
        kind = type((like or {}).get(name))
        if kind in (bool, int):
            options[name] = kind(value)
    return options
