"""What a layer's slots do not account for: how far `a·W_0 + Σ v⊗k` is from the weights, and why.

The step log says at which steps the slots did not explain a gradient, and before which steps somebody else changed the
weights. Only where it does, or where the weights are of a coarse type, the difference is computed: that takes a pass
over the layer's slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spotlights.errors import SpotlightsError
from spotlights.memory.format.names import MOVED, moved_steps, probed_entries
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import NOT_EXPLAINED, unexplained_steps
from spotlights.optimizers import rule_named
from spotlights.query.engine import View
from spotlights.query.forward import same
from spotlights.query.trained import moved_at_the_end, trained_parameters
from spotlights.query.weights import view_parameters

EXACT = 1e-4
"""The share of the change that the arithmetic of float32 may miss. A larger tolerance is not called exact."""
_COARSE = ("bfloat16", "float16")


def tolerance_of(reader: MemoryReader, layer: str) -> float:
    """The share of the change that rounding may take: that of the network's arithmetic, and of the storage type."""
    entry = reader.manifest.layers[layer]
    own = 1e-10 if entry.dtype == "float64" and entry.storage == "float64" else EXACT
    return max(own, 16 * entry.rounding)


def weights_rounding(reader: MemoryReader, layer: str, steps: int) -> float:
    """What rounding may do, relative to the weights: each step rounds to their type, some optimizers on the way."""
    entry, rule = reader.manifest.layers[layer], rule_named(reader.manifest.rule)
    rules = [rule if name not in entry.rules else rule_named(entry.rules[name]) for name in entry.trained]
    own = float(torch.finfo(getattr(torch, entry.dtype)).eps) * max(steps, 1) ** 0.5
    return max(own, *(rule.rounding for rule in rules if rule is not None), 0.0)


# -- what is missing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Missing:
    """What a layer's slots, initial weights and rounding do not add up to."""

    unexplained: list[int]
    """Steps whose gradients the slots do not explain."""
    moved: dict[str, list[int]]
    """By reason: steps that do not follow from the one before."""
    moved_at_the_end: bool
    no_slots: bool
    rounded: str | None
    """The coarse type of the weights, which every step rounds to."""
    computed: str | None
    """The coarse type that the gradients were computed in (autocast)."""
    share: float | None
    """Of what training changed; None if that cannot be computed (a sample of the slots)."""

    @property
    def reasons(self) -> list[str]:
        """What the step log says; empty if it has no reason why something should be missing."""
        return [
            *([at_steps(NOT_EXPLAINED, self.unexplained)] if self.unexplained else []),
            *(at_steps(reason, steps) for reason, steps in self.moved.items()),
            *([f"{MOVED[1]} after the last step"] if self.moved_at_the_end else []),
            *(["the layer has no slots"] if self.no_slots else []),
            *([f"every step rounds the weights to {self.rounded}"] if self.rounded else []),
            *([f"gradients were computed in {self.computed}, and rounded"] if self.computed else []),
        ]

    def __str__(self) -> str:
        reasons = self.reasons
        if self.share is not None and self.share <= EXACT and reasons == [f"{MOVED[1]} after the last step"]:
            return f"{reasons[0]}; as of that step, nothing is missing"
        share = "an unknown share" if self.share is None else f"{self.share:.2g} (1 is all)"
        share = f"{self.share:.2%}" if self.share is not None and self.share <= 10 else share
        return f"missing: {share} of what training changed in this layer ({'; '.join(reasons)})"


def at_steps(what: str, steps: Sequence[int]) -> str:
    first = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
    return f"{what} at {f'{len(steps)} steps' if len(steps) > 1 else 'one step'} ({first})"


def has_gaps(reader: MemoryReader, layer: str, until: int) -> bool:
    """Whether the step log says that something may be missing. Reads the log alone."""
    return bool(_gaps(reader, layer, until).reasons)


def _gaps(reader: MemoryReader, layer: str, until: int) -> Missing:
    entry, log = reader.manifest.layers[layer], reader.log(layer)
    changed = False
    for name, probed in log.probed.items() if until else ():
        start = reader.initial[f"{layer}/{name}"].reshape(-1)
        changed |= not same(probed[until - 1], start[probed_entries(start.numel())])
    return Missing(
        unexplained_steps(log.residual[:until], entry),
        moved_steps(log.moved[:until].tolist()),
        until == reader.steps and moved_at_the_end(reader, layer),
        changed and not reader.layers[layer].slots,
        entry.dtype if entry.dtype in _COARSE else None,
        entry.computed or None,
        None,
    )


def missing(view: View, layer: str) -> Missing | None:
    """What is missing in a layer, as of the view's last step, if more is than rounding explains."""
    reader, until = view.reader, view.until
    gaps = _gaps(reader, layer, until)
    if not gaps.reasons:
        return None
    if reader.manifest.sample is not None or reader.manifest.fold is not None:
        return gaps
    whole = replace(view, selection=view.all_slots)
    try:
        summed = view_parameters(whole, layer)
    except SpotlightsError:  # no update rule, no errors: contributions are refused with their own reason
        return gaps
    trained = trained_parameters(reader, layer, until, own_final=False)
    initial = {name: reader.initial[f"{layer}/{name}"] for name in summed}
    difference, change = trained.like(summed) - trained.joined(), trained.joined() - trained.like(initial)
    share = ratio(difference.norm(), change.norm())
    if not gaps.unexplained and not gaps.no_slots and not gaps.moved_at_the_end and share <= EXACT:
        return None  # the weights were written, and stayed as they were
    return replace(gaps, share=share)


def ratio(difference: Tensor, norm: Tensor) -> float:
    return 0.0 if difference == 0 else float(difference / norm)
