"""Families of optimizers, one file each: from the step log to what a slot contributed.

To add a family, write a rule (`rule.py`) and add it to `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spotlights.errors import UnsupportedError
from spotlights.optimizers.adagrad import AdadeltaRule, AdagradRule, RmspropRule
from spotlights.optimizers.adam import AdamaxRule, AdamRule, AdamWRule, NAdamRule, RAdamRule, SparseAdamRule
from spotlights.optimizers.lion import LionRule
from spotlights.optimizers.muon import MuonRule
from spotlights.optimizers.rule import WEIGHTS, State, UpdateRule
from spotlights.optimizers.sgd import SgdRule
from spotlights.torch_internals import step_function

RULES: tuple[UpdateRule, ...] = (
    SgdRule(),
    AdamRule(),
    AdamWRule(),
    NAdamRule(),
    RAdamRule(),
    SparseAdamRule(),
    AdamaxRule(),
    RmspropRule(),
    AdagradRule(),
    AdadeltaRule(),
    LionRule(),
    MuonRule(),
)


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule that unrolls this optimizer exactly, if there is one.

    A class that keeps the step of the class it is derived from keeps that one's rule.
    """
    cls = type(optimizer)
    for parent in cls.__mro__:
        rule = next((rule for rule in RULES if rule.optimizer is parent), None)
        if rule is not None:
            own = getattr(cls, "_init_group", None) is getattr(parent, "_init_group", None)
            if own and step_function(cls) is step_function(parent):
                return rule
            break
    return next((rule for rule in RULES if rule.handles(optimizer)), None)


def rule_named(name: str | None) -> UpdateRule | None:
    """The rule that a memory names."""
    return next((rule for rule in RULES if rule.name == name), None)


def rule_of_parameter(rules: Mapping[str, str], name: str, first: UpdateRule) -> UpdateRule:
    """The rule of a parameter, from what a layer's entry says of parameters that do not follow the first rule."""
    if name not in rules:
        return first
    rule = rule_named(rules[name])
    if rule is None:
        raise UnsupportedError(
            "A parameter of this layer is trained by an optimizer that has no exact rule. Scores, top and totals work; "
            f"contributions, weights and masks need one of: {exact_optimizers()}."
        )
    return rule


def exact_optimizers() -> str:
    """The names of all rules, for error messages."""
    return ", ".join(rule.name.upper() for rule in RULES)


__all__ = [
    "RULES",
    "WEIGHTS",
    "State",
    "UpdateRule",
    "exact_optimizers",
    "rule_for",
    "rule_named",
    "rule_of_parameter",
]
