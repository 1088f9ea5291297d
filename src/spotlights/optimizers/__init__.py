"""Families of optimizers: one file each, turning the step log into what a slot contributed.

To add a family, write a rule (see `rule.py`) and put it in `RULES`.
"""

from __future__ import annotations

import torch

from spotlights.optimizers.adadelta import AdadeltaRule
from spotlights.optimizers.adagrad import AdagradRule
from spotlights.optimizers.adam import AdamRule, RAdamRule
from spotlights.optimizers.adamax import AdamaxRule
from spotlights.optimizers.lion import LionRule
from spotlights.optimizers.muon import MuonRule
from spotlights.optimizers.nadam import NAdamRule
from spotlights.optimizers.rmsprop import RmspropRule
from spotlights.optimizers.rule import WEIGHTS, Coefficients, State, UpdateRule
from spotlights.optimizers.sgd import SgdRule

RULES: tuple[UpdateRule, ...] = (
    SgdRule(),
    AdamRule(torch.optim.Adam),
    AdamRule(torch.optim.AdamW, decoupled=True),
    NAdamRule(torch.optim.NAdam),
    RAdamRule(torch.optim.RAdam),
    AdamaxRule(),
    RmspropRule(),
    AdagradRule(),
    AdadeltaRule(),
    LionRule(),
    MuonRule(),
)


def rule_for(optimizer: torch.optim.Optimizer) -> UpdateRule | None:
    """The rule that unrolls this optimizer exactly, if there is one."""
    return next((rule for rule in RULES if rule.handles(optimizer)), None)


def rule_named(name: str | None) -> UpdateRule | None:
    """The rule that a memory names."""
    return next((rule for rule in RULES if rule.name == name), None)


def exact_optimizers() -> str:
    """The rules there are, for error messages."""
    return ", ".join(rule.name.upper() for rule in RULES)


__all__ = [
    "RULES",
    "WEIGHTS",
    "Coefficients",
    "State",
    "UpdateRule",
    "exact_optimizers",
    "rule_for",
    "rule_named",
]
