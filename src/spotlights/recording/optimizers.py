"""The optimizers that train the recorded network. Users wrap them, derive from them, or have several.

Each parameter follows the optimizer that holds it. A step of the memory is what happens between two backward passes: at
most one step of each optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spotlights.errors import SettingError, warn
from spotlights.optimizers import UpdateRule, rule_for
from spotlights.optimizers.replayed import ReplayedRule
from spotlights.torch_internals import step_may_nest

Given = Any
"""An optimizer, a wrapper around one (`.optimizer`), or several of these."""


class Optimizers:
    """One or several optimizers, each with its rule."""

    def __init__(self, given: Given) -> None:
        several = isinstance(given, list | tuple)
        self.all = [_unwrapped(item) for item in (given if several else [given])]
        if not self.all:
            raise SettingError("sl.record was given an empty list of optimizers. Give the optimizer of the model.")
        self.rules: list[UpdateRule] = [rule_for(optimizer) or ReplayedRule(optimizer) for optimizer in self.all]
        self.nested = {id(optimizer) for optimizer in self.all if step_may_nest(type(optimizer))}
        """Optimizers whose step may call the step of a class that they are derived from."""
        groups = self.groups()
        if any(groups[id(p)][0] != i for i, own in enumerate(self.all) for g in own.param_groups for p in g["params"]):
            raise SettingError(
                "Two of the optimizers given to sl.record train the same parameter. Give each parameter to one."
            )

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.all))

    @property
    def parameters(self) -> dict[int, nn.Parameter]:
        """What they train, by `id`."""
        return {id(p): p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]}

    def groups(self) -> dict[int, tuple[int, dict[str, Any]]]:
        """By the `id` of each parameter: the number of its optimizer, and its group there."""
        numbered = enumerate(self.all)
        return {id(p): (i, g) for i, optimizer in numbered for g in optimizer.param_groups for p in g["params"]}

    def rule_of(self, parameter: nn.Parameter) -> UpdateRule:
        """The rule of a parameter; that of the first optimizer where none holds it."""
        number, _ = self.groups().get(id(parameter), (0, {}))
        return self.rules[number]

    def state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        return next((optimizer.state[parameter] for optimizer in self.all if parameter in optimizer.state), {})

    def report(self) -> None:
        """Says what will not work, where an optimizer has no exact rule."""
        for optimizer, rule in zip(self.all, self.rules, strict=True):
            if isinstance(rule, ReplayedRule):
                name = type(optimizer).__name__
                warn(
                    f"{name} has no exact rule: scores, top and totals of this memory will work; contributions, masks, "
                    f"weights and influence will not. {self._verifies(optimizer)} Optimizers with a rule: "
                    "docs/optimizers.md."
                )

    def _verifies(self, optimizer: torch.optim.Optimizer) -> str:
        name, cls = type(optimizer).__name__, type(optimizer)
        if isinstance(optimizer, torch.optim.LBFGS):
            return f"verify will not work either: {name} computes several gradients in one step."
        if len(self.all) > 1:
            return "verify will not work either: it runs one optimizer again, not one of several."
        if cls is getattr(torch.optim, name, None):
            return "verify replays its class on the recorded gradients."
        return f"memory.verify(model, optimizer={name}) runs its class on the recorded gradients and says if that fits."


def _unwrapped(given: Any) -> torch.optim.Optimizer:
    """The optimizer itself, of one that a library (accelerate, Lightning) has wrapped."""
    optimizer = given
    for _ in range(8):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) and not hasattr(inner, "optimizer"):
            break
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(
            f"sl.record needs the optimizer that trains the model, not {given!r}. Give a torch.optim.Optimizer, or a "
            "list of them if several train the model."
        )
    return optimizer
