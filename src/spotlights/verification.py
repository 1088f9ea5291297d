"""Does the memory equal the network? `a·W_0 + Σ v⊗k` beside the trained weights, layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spotlights.attention.forward import parameters_of
from spotlights.attention.measure import View
from spotlights.attention.replay import is_replayed, replay
from spotlights.attention.tables import Printable, build
from spotlights.dual import view_parameters
from spotlights.errors import MemoryFormatError, SpotlightsError, UnsupportedError
from spotlights.memory.conditions import as_of
from spotlights.memory.manifest import LayerEntry
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Everything
from spotlights.memory.slots import sample_slice
from spotlights.memory.step_log import unexplained_steps
from spotlights.optimizers import UpdateRule, rule_named
from spotlights.optimizers.replayed import MakeOptimizer


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
    moved_steps: list[int]
    """Steps before which somebody else than the optimizer changed the weights."""
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance


class Verification(Mapping[str, Check], Printable):
    """`{layer: check}`, which prints as a table."""

    def __init__(self, checks: dict[str, Check], damaged: list[str], note: str | None = None) -> None:
        self._checks = checks
        self._note = note
        self.damaged = damaged
        """Files whose content is not what was written, in sentences."""

    def __getitem__(self, layer: str) -> Check:
        return self._checks[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self._checks)

    def __len__(self) -> int:
        return len(self._checks)

    @property
    def ok(self) -> bool:
        return not self.damaged and all(check.ok for check in self.values())

    def table(self) -> Any:
        rows, notes = [], [*self.damaged, *([self._note] if self._note else [])]
        for name, check in self.items():
            verdict = "yes" if check.ok else "NO"
            errors = (f"{error:.1e}" for error in (check.relative_error, check.change_error))
            rows.append([name, verdict, *errors, check.compared_with])
            worst = f"; at worst {check.worst_residual:.0%} of the gradient"
            for steps, what, more in (
                (check.unexplained_steps, "gradients that the recorded slots do not explain", worst),
                (check.moved_steps, "weights changed outside the optimizer", ""),
            ):
                if steps:
                    first = ", ".join(map(str, steps[:5])) + (" …" if len(steps) > 5 else "")
                    count = f"{len(steps)} steps" if len(steps) > 1 else "one step"
                    notes.append(f"{name}: {what} at {count} ({first}){more}")
        names = ["layer", "exact", "relative error", "of the change", "compared with"]
        return build("does the memory equal the network?", names, rows, "\n".join(notes) or None)

    __str__ = Printable.__str__
    __repr__ = Printable.__repr__
    __hash__ = None  # type: ignore[assignment]


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
    with _damage_named(reader):
        if reader.manifest.fold is not None or reader.manifest.sample is not None:
            _refuse(reader, files=files)
        replayed = _replayed(view, optimizer) if is_replayed(reader) else None
        for layer in reader.layers if replayed is None else ():
            view.unrolled(layer)  # refuses before the long part, if it must
        damaged = reader.damaged() if files else []
        made = replayed or parameters or {name: view_parameters(view, name) for name in reader.layers}
        checks = {name: _check(view, name, model, dict(made[name])) for name in reader.layers}
    if replayed is not None:
        return Verification(checks, damaged, f"{reader.manifest.optimizer} was run again on the recorded gradients")
    rule = rule_named(reader.manifest.rule)
    return Verification(checks, damaged, None if rule is None else rule.note)


def _refuse(reader: MemoryReader, *, files: bool) -> None:
    """A folded memory, or a sample, cannot be verified; its files can."""
    damaged = reader.damaged() if files else []
    if damaged:
        raise MemoryFormatError(" ".join(damaged))
    reader.need_visits(
        "the errors that the weights could be verified by",
        "Its files are what was written: ask for scores, top or totals" if files else "Ask for scores, top or totals",
    )
    reader.need_all_slots(
        "To verify the weights takes",
        ("Its files are what was written, and memory.layers" if files else "memory.layers")
        + " says at how many steps all slots did not explain the gradients (it was compared as they were recorded)",
    )


def _replayed(view: View, optimizer: MakeOptimizer | None) -> dict[str, dict[str, Tensor]]:
    if view.selection != as_of(view.reader, Everything(), view.until):
        raise UnsupportedError(
            f"{view.reader.directory} was trained with {view.reader.manifest.optimizer}, which has no exact update "
            "rule: only the whole memory can be verified, not a part of it."
        )
    return replay(view.reader, view.until, optimizer)


def _check(view: View, name: str, model: nn.Module | None, found: dict[str, Tensor]) -> Check:
    """Compares one layer's parameters, `found` in its slots, with the model's or with those that were kept."""
    reader, until = view.reader, view.until
    entry, log = reader.manifest.layers[name], reader.log(name)
    initial = {p: reader.initial[f"{name}/{p}"].double() for p in found}
    if model is not None:
        held = parameters_of(model, entry)
        truth = {p: held[p].double().cpu() for p in found}
        source = "the model"
    elif reader.final is not None and until == reader.manifest.steps:
        truth = {p: reader.final[f"{name}/{p}"].double() for p in found}
        source = "final weights"
    else:
        source = f"samples at step {until}"
        truth = dict(initial)
        for parameter in entry.trained:
            kept = sample_slice(initial[parameter].numel())
            found[parameter] = found[parameter].reshape(-1)[kept]
            initial[parameter] = initial[parameter].reshape(-1)[kept]
            logged = log.samples[parameter][until - 1 : until]
            truth[parameter] = logged[0].double() if until else initial[parameter]

    def joined(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[p].reshape(-1) for p in sorted(found)])

    difference = (joined(found) - joined(truth)).norm()
    change = (joined(truth) - joined(initial)).norm()
    residual = log.residual[:until]
    return Check(
        relative_error=_ratio(difference, joined(truth).norm()),
        change_error=_ratio(difference, change),
        compared_with=source,
        unexplained_steps=unexplained_steps(residual, entry),
        worst_residual=float(residual.max()) if len(residual) else 0.0,
        moved_steps=log.moved[:until].nonzero().flatten().tolist(),
        tolerance=_tolerance(entry, rule_named(reader.manifest.rule)),
    )


@contextlib.contextmanager
def _damage_named(reader: MemoryReader) -> Iterator[None]:
    """Damaged numbers can fail anywhere: then the damaged file is the error."""
    try:
        yield
    except SpotlightsError:
        raise
    except Exception as error:
        damaged = reader.damaged()
        if not damaged:
            raise
        raise MemoryFormatError(" ".join(damaged)) from error


def _ratio(difference: Tensor, norm: Tensor) -> float:
    return 0.0 if difference == 0 else float(difference / norm)


def _tolerance(entry: LayerEntry, rule: UpdateRule | None) -> float:
    """What rounding allows: of the network's own arithmetic, of the storage type, and of the optimizer."""
    own = 1e-10 if entry.dtype == "float64" and entry.storage == "float64" else 1e-4
    return max(own, 16 * entry.rounding, 0.0 if rule is None else rule.rounding)
