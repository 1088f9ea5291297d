"""What of a network is recorded, and what is not: said once as recording starts, and kept in the memory."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from spotlights.errors import SpotlightsWarning

_LOG = logging.getLogger("spotlights")
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class Coverage:
    """How many of the numbers that an optimizer trains belong to recorded layers."""

    covered: int
    trained: int
    uncovered: list[str]
    """Names of trained parameters that belong to no recorded layer."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer, recorded: Iterable[nn.Parameter]) -> Coverage:
        held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        known = {id(parameter) for parameter in recorded}
        covered = sum(p.numel() for key, p in held.items() if key in known)
        trained = sum(p.numel() for p in held.values())
        names = {id(p): name for name, p in model.named_parameters()}
        uncovered = [names.get(key, "a parameter outside the model") for key in held if key not in known]
        return cls(covered, trained, uncovered)

    def __str__(self) -> str:
        # Rounded down: 100 % only if it is all.
        share = 1000 * self.covered // max(self.trained, 1) / 10
        text = f"{share:g} % of {self.trained:,} trained parameters are recorded"
        if not self.uncovered:
            return text
        more = len(self.uncovered) - _NAMES_SHOWN
        names = ", ".join(self.uncovered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
        return f"{text}; not recorded: {names}"

    def tell(self, *, chosen: bool) -> None:
        """One line; a warning where the user has not chosen what to leave out."""
        if chosen or not self.uncovered:
            _LOG.info("%s.", self)
            return
        warnings.warn(
            f"{self}. What these parameters learn belongs to no slot. To choose so yourself, name the layers to record "
            "with layers=…; to record them, write an adapter (docs/layers.md).",
            SpotlightsWarning,
            stacklevel=8,
        )
