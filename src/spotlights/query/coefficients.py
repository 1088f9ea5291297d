"""The step log unrolled: what multiplies each slot's δ⊗k in the trained weights.

Under SGD that is one number per step (`StepNumbers`). Under Adam and the other rules with a preconditioner it is a
matrix per step (`StepMatrices`), found by a sweep from the last step back to the first. Both are plain data, which
measures hold and engines bind to an opened memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from spotlights.errors import UnsupportedError
from spotlights.memory.blocks import Block, Selection
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers import UpdateRule, exact_optimizers, rule_named, rule_of_parameter
from spotlights.query.contraction import Factors, StepNumbers, WeightShare, stacked
from spotlights.query.plan import BlockValues, Measure, Sweep
from spotlights.query.sweep import LayerSweep


@dataclass(frozen=True)
class StepMatrices:
    """A factor per step that is a matrix: the first `until` steps have to be swept."""

    until: int
    note: str | None = None

    def sweep(self, reader: MemoryReader, layer: str) -> LayerSweep:
        return LayerSweep(reader, rule_of(reader), layer, self.until)


Unrolled = StepNumbers | StepMatrices


@dataclass(frozen=True, eq=False)
class Coefficient(Measure):
    """What multiplies δ⊗k of each slot in the trained weights: the factors themselves, for sums of weights."""

    unrolled: Unrolled

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues | Sweep:
        if isinstance(self.unrolled, StepNumbers):
            return self.unrolled.factors
        sweep = self.unrolled.sweep(reader, layer)

        def blocks(selection: Selection) -> Iterator[tuple[Block, Factors]]:
            yield from (step for step in sweep.steps(selection) if len(step[0]))
            yield sweep.end()

        return Sweep(blocks)


def unroll(reader: MemoryReader, layer: str, until: int) -> Unrolled:
    """Unrolls the first `until` steps of a layer's log; `View.unrolled` keeps the last result."""
    rule = rule_of(reader)
    reader.need_recording("Contributions, weights and masks need")
    numbers = _numbers(reader, rule, layer, until)
    if numbers is None:
        reader.need_all_slots(
            f"What {reader.manifest.optimizer} makes of a slot depends on the others, so contributions need",
            "Ask for scores, top, totals or influence",
        )
    entry = reader.layer(layer).entry
    notes = {rule_of_parameter(entry.rules, name, rule).note: None for name in entry.trained}
    return numbers or StepMatrices(until, "; ".join(filter(None, notes)) or None)


def unroll_plainly(reader: MemoryReader, layer: str, until: int) -> StepNumbers:
    """Every step as a plain gradient step of its learning rate: the preconditioner P is left out.

    Under SGD this is the layer itself. Under other rules it is what influence needs: P scales what an example taught,
    and what the other examples would have taught in its absence, by the same amount, so P cancels.
    """
    rule = rule_of(reader)
    numbers = reader.layer(layer).last("numbers", until, lambda: _numbers(reader, rule, layer, until))
    if numbers is not None:
        return numbers
    entry, log = reader.layer(layer).entry, reader.log(layer)
    shapes = {name: (entry.out_features, at.stop - at.start) for name, at in entry.weight_columns.items()}
    shapes |= dict.fromkeys(entry.bias_names, (entry.out_features,))
    per_step = {name: torch.zeros(until, dtype=torch.float64) for name in shapes}
    for name in entry.trained:
        own = rule_of_parameter(entry.rules, name, rule)
        steps = own.read(log.rule[name][:until])
        signed = [-step.lr * own.linear(step, shapes[name]).sign if step.active else 0.0 for step in steps]
        per_step[name] = torch.tensor(signed, dtype=torch.float64) * log.factor[name][:until]
    nothing = torch.zeros(entry.matrix_shape, dtype=torch.float64)
    return StepNumbers(
        WeightShare(nothing, stacked([nothing[:, 0] for _ in entry.bias_names], entry.out_features)),
        torch.stack([per_step[name] for name in entry.weight_columns]).mean(dim=0),  # equal, unless one is frozen
        stacked([per_step[name] for name in entry.bias_names], until),
    )


def rule_of(reader: MemoryReader) -> UpdateRule:
    """The update rule of the recorded run; refuses memories that contributions cannot be computed from."""
    manifest = reader.manifest
    reader.need_visits(
        "the error of each visit, which contributions, influence, weights and dual networks are made of",
        "Ask for scores, top or totals",
    )
    rule = rule_named(manifest.rule)
    if rule is None:
        raise UnsupportedError(
            f"{reader.address} was trained with {manifest.optimizer}, which has no exact update rule yet. "
            f"Scores, top and totals work; contributions, weights and masks need one of: "
            f"{exact_optimizers()}."
        )
    reader.need_errors("Contributions, weights, masks and verify are made of")
    return rule


def _numbers(reader: MemoryReader, rule: UpdateRule, layer: str, until: int) -> StepNumbers | None:
    """None where a step's factor is no number: the rule has matrices, or treated the weights of one differently."""
    entry, log = reader.layer(layer).entry, reader.log(layer)
    rules = {name: rule_of_parameter(entry.rules, name, rule) for name in entry.trained}
    if not all(own.scalar for own in (rules.values() or [rule])):
        return None
    per_step, initial = {}, {}
    for name in (*entry.weight_columns, *entry.bias_names):
        value = reader.initial[f"{layer}/{name}"].double()
        per_step[name] = torch.zeros(until, dtype=torch.float64)
        if name in entry.trained:
            coefficients = rules[name].coefficients(log.rule[name][:until])
            per_step[name] = coefficients.per_step * log.factor[name][:until]
            value = value * coefficients.initial
            moment = reader.initial.get(f"{layer}/{name}/{rules[name].moment}")
            if moment is not None:
                value = value + coefficients.moment * moment.double()
        initial[name] = value
    first, *others = (per_step[name] for name in entry.weight_columns)
    if not all(torch.equal(first, other) for other in others):
        return None
    return StepNumbers(
        WeightShare.joined(entry, initial),
        first,
        stacked([per_step[name] for name in entry.bias_names], until),
        rule.note,
    )
