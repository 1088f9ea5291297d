"""Does the memory equal the network? `a·W_0 + Σ v⊗k` beside the trained weights, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.errors import MemoryFormatError, SpotlightsError, UnsupportedError
from spotlights.memory.format.names import MOVED, moved_steps
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import CAUSES, MOVED_CAUSES, NOT_EXPLAINED, UNEXPLAINED, unexplained_steps
from spotlights.optimizers import rule_named
from spotlights.optimizers.replayed import MakeOptimizer
from spotlights.query.accounts import EXACT, at_steps, ratio, tolerance_of, weights_rounding
from spotlights.query.engine import View
from spotlights.query.forward import parameters_of, what_differs
from spotlights.query.plan import LayerValue
from spotlights.query.replay import Replay, is_replayed
from spotlights.query.trained import trained_parameters
from spotlights.query.weights import view_parameters
from spotlights.results.tables import Printable, build

_FILES = 4
"""So many are compared with their checksums by one plan."""


@dataclass(frozen=True)
class Check:
    """How well a layer's memory meets its weights."""

    relative_error: float
    """‖dual − trained‖ / ‖trained‖, over weight and bias."""
    change_error: float
    """The same difference, relative to what training changed."""
    compared_with: str
    unexplained_steps: list[int]
    """Steps whose gradient the slots do not explain."""
    worst_residual: float
    moved: dict[str, list[int]]
    """Steps that do not follow from the ones before, by the reason: weights changed outside the optimizer, …"""
    tolerance: float
    """What rounding allows of `change_error`."""
    weights_rounding: float
    """What the rounding of the weights themselves, at every step, allows of `relative_error`."""
    slots: int
    cancelling: float = 0.0
    """What rounding allows of `change_error` where a gradient is a small difference of large terms."""
    stored: str | None = None
    """The storage type, if that is lossy."""
    differs: str | None = None
    """How the model differs from the memory's last step, if it does."""

    @property
    def moved_steps(self) -> list[int]:
        """All of these steps."""
        return sorted({step for steps in self.moved.values() for step in steps})

    @property
    def allowed(self) -> float:
        """What rounding allows of `change_error`, where gradients nearly cancel too."""
        return max(self.tolerance, self.cancelling)

    @property
    def ok(self) -> bool:
        return self.change_error <= self.allowed or self.within_rounding

    @property
    def within_rounding(self) -> bool:
        """The difference is larger than what is allowed, and still no more than the weights' own rounding.

        A change of that size cannot be judged better: what the slots make up was rounded away, or rounded up.
        """
        if self.change_error <= self.allowed or (self.unexplained_steps and not self.slots):
            return False
        return self.relative_error <= self.weights_rounding

    @property
    def reasons(self) -> list[str]:
        """Why something is missing, or cannot be judged, in words."""
        reasons = []
        if self.unexplained_steps:
            worst = f"at worst {self.worst_residual:.0%} of the gradient"
            reasons.append(f"{at_steps(NOT_EXPLAINED, self.unexplained_steps)}; {worst}. Likely {CAUSES}")
        for reason, steps in self.moved.items():
            reasons.append(at_steps(reason, steps) + (f". Likely {MOVED_CAUSES}" if reason == MOVED[1] else ""))
        if self.within_rounding:
            reasons.append("training changed so little that rounding of the weights hides what is missing of it")
        elif self.ok and self.change_error > self.tolerance:
            reasons.append("gradients nearly cancel, and what is left of them has the rounding of large terms")
        elif not self.ok and not self.slots:
            reasons.append("the layer has no slots, and its weights have changed")
        elif not self.ok and self.stored is not None:
            reasons.append(f"numbers are stored as {self.stored}, and what their rounding does adds up")
        elif not self.ok and self.differs is not None:
            reasons.append(self.differs)
        elif not self.ok and not reasons:
            what = "not the weights after the last recorded step, or rounding that adds up"
            reasons.append(f"{self.compared_with}: {what}")
        return reasons


class Verification(Printable, dict[str, Check]):
    """`{layer: check}`, which prints as a table."""

    def __init__(self, checks: dict[str, Check], damaged: list[str], note: str | None = None) -> None:
        super().__init__(checks)
        self._note = note
        self.damaged = damaged
        """Files whose content is not what was written, in sentences."""

    @property
    def ok(self) -> bool:
        return not self.damaged and all(check.ok for check in self.values())

    def table(self) -> Any:
        rows, notes = [], [*self.damaged, *([self._note] if self._note else [])]
        reasons: dict[str, list[str]] = {}
        for name, check in self.items():
            exact = check.change_error <= check.tolerance <= EXACT
            within = "yes" if exact else f"within {check.allowed:.0e}"
            verdict = "to rounding" if check.within_rounding else within if check.ok else "NO"
            errors = (f"{error:.1e}" for error in (check.relative_error, check.change_error))
            rows.append([name, verdict, *errors, check.compared_with])
            for reason in check.reasons:
                reasons.setdefault(reason, []).append(name)
        notes += [f"{', '.join(layers)}: {reason}" for reason, layers in reasons.items()]
        names = ["layer", "exact", "relative error", "of the change", "compared with"]
        return build("does the memory equal the network?", names, rows, "\n".join(notes) or None)


def verify(
    view: View,
    model: nn.Module | None,
    *,
    files: bool,
    parameters: Mapping[str, dict[str, Tensor]] | None,
    optimizer: MakeOptimizer | None,
) -> Verification:
    """Compares the parameters that a view makes up with the trained ones; arguments as for `Memory.verify`."""
    reader = view.reader
    with _damage_named(reader, files=files):
        reader.need_recording("To verify weights takes")
        _need_all_errors(reader, files=files)
        replayed = _replayed(view, optimizer) if is_replayed(reader) else None
        for layer in reader.layers if replayed is None else ():
            view.unrolled(layer)  # refuses before the long part, if it must
        damaged = _damaged(view) if files else []
        summed = replayed or parameters or {name: view_parameters(view, name) for name in reader.layers}
        checks = {name: _check(view, name, model, dict(summed[name])) for name in reader.layers}
    if model is not None and not all(check.ok for check in checks.values()):
        layers = reader.manifest.layers
        differs = what_differs(view, lambda name: parameters_of(model, layers[name]), list(layers))
        checks = {name: replace(check, differs=differs) for name, check in checks.items()}
    if replayed is not None:
        return Verification(checks, damaged, f"{reader.manifest.optimizer} was run again on the recorded gradients")
    rule = rule_named(reader.manifest.rule)
    return Verification(checks, damaged, None if rule is None else rule.note)


def _need_all_errors(reader: MemoryReader, *, files: bool) -> None:
    """Refuses a folded memory and a sample, whose files can still be compared (`_damage_named`)."""
    fine = "Its files are what was written. " if files else ""
    reader.need_visits("the errors that the weights could be verified by", f"{fine}Ask for scores, top or totals")
    reader.need_all_slots(
        "To verify the weights takes",
        f"{fine}memory.layers says at how many steps all slots did not explain the gradients (compared as they were "
        "recorded)",
    )


@dataclass(frozen=True)
class Damage(LayerValue):
    """Which of some files do not hold what was written, in sentences; whatever the layer."""

    among: slice

    def value(self, reader: MemoryReader, layer: str) -> list[str]:
        return reader.damaged(self.among)


def _damaged(view: View) -> list[str]:
    """Of all files, some at a time: an engine divides them."""
    starts, layer = range(0, view.reader.files, _FILES), next(iter(view.reader.layers), None)
    of_files = view.values(*((layer, Damage(slice(first, first + _FILES))) for first in starts if layer is not None))
    return [sentence for sentences in of_files for sentence in sentences]


def _replayed(view: View, optimizer: MakeOptimizer | None) -> dict[str, dict[str, Tensor]]:
    if not view.is_whole:
        raise UnsupportedError(
            f"{view.reader.address} was trained with {view.reader.manifest.optimizer}, which has no exact update "
            "rule: only the whole memory can be verified, not a part of it."
        )
    (parameters,) = view.values((next(iter(view.reader.layers)), Replay(view.until, optimizer)))
    return parameters


def _check(view: View, name: str, model: nn.Module | None, summed: dict[str, Tensor]) -> Check:
    """Compares the parameters that one layer's slots add up to with the model's, or with the recorded final ones."""
    reader, until = view.reader, view.until
    entry, log = reader.manifest.layers[name], reader.log(name)
    trained = trained_parameters(reader, name, until, model)
    truth, from_slots = trained.joined(), trained.like(summed)
    initial = trained.like({p: reader.initial[f"{name}/{p}"] for p in summed})
    residual = log.residual[:until]
    unexplained = unexplained_steps(residual, entry)
    explained = residual.index_fill(0, torch.tensor(unexplained, dtype=torch.int64), 0.0)
    # Negative where the slots miss more than of other steps, and no more than the rounding of their terms.
    rounded, small = (-float(explained.min()), float(explained.max())) if len(explained) else (0.0, 0.0)
    cancelling = max(min(4 * small, EXACT), 4 * min(rounded, UNEXPLAINED))
    return Check(
        relative_error=ratio((from_slots - truth).norm(), truth.norm()),
        change_error=ratio((from_slots - truth).norm(), (truth - initial).norm()),
        compared_with=trained.source,
        unexplained_steps=unexplained,
        worst_residual=max(float(residual.max()), 0.0) if len(residual) else 0.0,
        moved=moved_steps(log.moved[:until].tolist()),
        tolerance=tolerance_of(reader, name),
        weights_rounding=weights_rounding(reader, name, until),
        slots=reader.layers[name].slots,
        cancelling=cancelling,
        stored=entry.storage if reader.layers[name].storage.lossy else None,
    )


@contextlib.contextmanager
def _damage_named(reader: MemoryReader, *, files: bool) -> Iterator[None]:
    """Damaged numbers can fail anywhere, and some memories cannot be verified: then a damaged file is the error."""
    try:
        yield
    except Exception as error:
        look = files if isinstance(error, UnsupportedError) else not isinstance(error, SpotlightsError)
        damaged = reader.damaged() if look else []
        if not damaged:
            raise
        raise MemoryFormatError(" ".join(damaged)) from error
