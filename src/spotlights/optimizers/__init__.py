"""Families of optimizers: one file each, turning the step log into what a slot contributed.

To add a family, write a rule (see `rule.py`) and put it in `RULES`.
"""

from __future__ import annotations

import torch

from spotlights.optimizers.rule import Coefficients, UpdateRule
from spotlights.optimizers.sgd import SgdRule

RULES: tuple[UpdateRule, ...] = (SgdRule(),)


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule that unrolls this optimizer exactly, if there is one."""
    return next((rule for rule in RULES if rule.handles(optimizer)), None)


def rule_named(name: str | None) -> UpdateRule | None:
    """The rule that a memory names."""
    return next((rule for rule in RULES if rule.name == name), None)


def exact_optimizers() -> str:
    """The rules there are, for error messages."""
    return ", ".join(rule.name.upper() for rule in RULES)


__all__ = ["RULES", "Coefficients", "UpdateRule", "exact_optimizers", "rule_for", "rule_named"]
