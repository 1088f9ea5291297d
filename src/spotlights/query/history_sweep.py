"""The sweep of a history: what each slot added to some numbers of interest during training, through all layers.

Goes back over the steps of the trajectory. Each step changes a number f by `⟨ḡ_s, W_{s+1} − W_s⟩`, with ḡ the discrete
gradient; the adjoint of the optimizer's recurrence says what a slot's δ⊗k added to this change and to those of all
later steps. What weight decay, the optimizer's first momentum and running statistics added is kept apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from spotlights import interrupts
from spotlights.dual_form import DiscreteGradient, PathAdjoint, Scaled, discrete_gradient_share, dot, linear_map
from spotlights.errors import TooLargeError
from spotlights.memory.blocks import Block, Everything, Selection, StepBlocks, as_of
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import unexplained_steps
from spotlights.query.coefficients import rule_of
from spotlights.query.engine import Progress
from spotlights.query.example_shares import ExampleShares
from spotlights.query.forward import Target
from spotlights.query.measured import MAX_VALUES_BYTES
from spotlights.query.plan import LayerValue
from spotlights.query.replica import Place, Replica
from spotlights.query.trajectory import Move, Trajectory
from spotlights.sparse_rows import Numbers, SparseRows, dense, products

DECAY, OUTSIDE = "decay", "slots outside the view"
MOMENTUM, STATISTICS = "momentum before recording", "running statistics"
NOISE, ROUNDING = "gradients that are rounding", "rounding"
UNEXPLAINED, MOVED = "unexplained gradients", "weights changed outside the optimizer"
OTHER_MODEL = "the model's weights are not those of the memory"
_SAME_MODEL = 0.1
"""The rounding of no optimizer makes the rebuilt weights differ by more than this share from the model's."""


@dataclass(eq=False)
class Course:
    """What a sweep finds: how the numbers changed, and through what."""

    curve: Float[Tensor, "numbers steps_and_one"]
    """The numbers before the first step, and after every step."""
    said: Int64[Tensor, "inputs steps_and_one"] | None
    """The largest output, where outputs are classes."""
    slots: dict[str, Float[Tensor, "numbers _"]] = field(default_factory=dict)
    """By layer, what each of its slots added, by the number of the slot; 0 for slots outside the view."""
    carrier: str | None = None
    """The layer at whose slots the shares of examples in parameters without an adapter are; and"""
    carried: Float[Tensor, "numbers _"] | None = None
    """these shares (`ExampleShares`)."""
    shares: dict[str, Float[Tensor, "numbers"]] = field(default_factory=dict)
    """What was added by no slot of the view, by name."""
    missed: Float[Tensor, "numbers"] | float = 0.0
    """Σ|r_s|: what the gradients at the midpoints missed."""
    drift: float = 0.0
    """The relative difference between the rebuilt weights at the end and those of the model."""
    answer: Float[Tensor, "numbers"] | None = None
    """The numbers that the model itself has; None if the view ends before training did."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the numbers must know."""

    def add(self, name: str, share: Float[Tensor, "numbers"]) -> None:
        self.shares[name] = self.shares.get(name, 0.0) + share

    def add_to(self, name: str, number: int, share: float) -> None:
        """The same for one of the numbers."""
        if name not in self.shares:
            self.shares[name] = torch.zeros(len(self.curve), dtype=torch.float64)
        self.shares[name][number] += share


@dataclass(frozen=True, eq=False)
class HistoryCourse(LayerValue):
    """What each slot of any layer added to the numbers of interest.

    Goes over all steps of all layers together, back in time, whatever the layer that is asked about.
    """

    model: nn.Module
    inputs: Any
    targets: Mapping[str, Target]
    selection: Selection
    until: int
    progress: Progress | None = None
    """Is told by a sweep in this process; elsewhere there is nobody to tell."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "progress": None}

    def value(self, reader: MemoryReader, layer: str) -> Course:
        with torch.inference_mode(False):
            return _Backwards(reader, self).course()


class _Backwards:
    """The numbers and their adjoints, from the last step to the first."""

    def __init__(self, reader: MemoryReader, asked: HistoryCourse) -> None:
        self._asked = asked
        self._until = until = asked.until
        self._trajectory = Trajectory(reader, rule_of(reader), until)
        self._paths = self._trajectory.parameters
        self._statistics = reader.statistics
        places = [(path.layer, path.name) for path in self._paths]
        self._replica = Replica(asked.model, asked.inputs, reader.manifest.layers, places, asked.targets)
        self._layers = [_LayerValues(reader, name, asked.selection, places, until) for name in reader.layers]
        self._change, self._middle = (
            [torch.empty(path.shape, dtype=path.dtype) for path in self._paths] for _ in range(2)
        )
        _check_size(reader, self._replica.count)
        self._examples = ExampleShares(reader, places)
        self._adjoints = [[PathAdjoint() for _ in self._paths] for _ in range(self._replica.count)]
        curve = torch.empty(self._replica.count, until + 1, dtype=torch.float64)
        said = None if self._replica.said is None else torch.empty(len(self._replica.said), until + 1).long()
        self._course = Course(curve, said)
        if self._replica.statistics - set(self._statistics):
            self._course.notes.append(
                "recorded without running statistics: every step has the final running statistics"
            )
        self._whole = until == reader.manifest.steps
        logs = {name: reader.log(name) for name in reader.layers}
        self._moved = {s for log in logs.values() for s in log.moved[:until].nonzero().flatten().tolist()}
        self._unexplained = {
            s
            for name, log in logs.items()
            for s in unexplained_steps(log.residual[:until], reader.manifest.layers[name])
        }

    def course(self) -> Course:
        course, replica = self._course, self._replica
        trained = replica.weights()
        if self._whole:
            course.answer = replica.numbers()
        if not self._until:
            self._look(0, [path.start.to(path.dtype) for path in self._paths])
        for done, move in enumerate(self._trajectory.backwards(), start=1):
            interrupts.check()
            if done == 1:
                end = [moved.after for moved in move.parameters]
                course.drift = _relative_difference(end, trained) if self._whole else 0.0
                self._look(self._until, end)
            factors = self._back(move)
            of_examples = self._add_examples(move, factors)
            for layer in self._layers:
                layer.add(move, factors, course, of_examples.get(layer.recorded.name))
            if self._asked.progress is not None:
                self._asked.progress(done / self._until)
        for number, adjoints in enumerate(self._adjoints):
            for path, adjoint in zip(self._paths, adjoints, strict=True):
                if path.first_moment is not None and adjoint.to_moment is not None:
                    moment = path.first_moment.to(path.dtype)
                    course.add_to(MOMENTUM, number, adjoint.to_moment.number * dot(adjoint.to_moment.tensor, moment))
        if course.answer is not None:
            course.add(self._reason_of_drift(), course.answer - course.curve[:, -1])
        if self._examples.reason:
            course.notes.append(f"parameters without an adapter are no example's: {self._examples.reason}")
        return course

    def _add_examples(self, move: Move, factors: list[list[Scaled | None]]) -> dict[str, Tensor]:
        """Adds the shares of examples in parameters without an adapter; returns their sum in each such layer."""
        by_example = self._examples.of(move, factors)
        if by_example is None:
            return {}
        course, (block, shares, of_examples) = self._course, by_example
        mask = self._asked.selection.mask(block.column, len(block)) if len(block) else None
        chosen = shares if mask is None else shares * mask
        if mask is not None:
            course.add(OUTSIDE, (shares - chosen).sum(dim=1))
        if course.carried is None:
            course.carrier, course.carried = block.layer.name, shares.new_zeros(len(shares), block.layer.slots)
        course.carried.index_copy_(1, block.slots, chosen)
        return of_examples

    def _look(self, step: int, weights: list[Tensor]) -> Float[Tensor, "numbers"]:
        """The numbers after so many steps."""
        self._replica.set(weights, self._statistics_at(step))
        numbers = self._replica.numbers()
        self._course.curve[:, step] = numbers
        if self._course.said is not None and self._replica.said is not None:
            self._course.said[:, step] = self._replica.said
        return numbers

    def _statistics_at(self, step: int) -> dict[str, Tensor]:
        return {name: rows[step] for name, rows in self._statistics.items()}

    def _back(self, move: Move) -> list[list[Scaled | None]]:
        """Goes back over one step; returns what multiplies each parameter's Σ δ⊗k, for each number."""
        old, new = self._ends(move)
        pairs = [(moved.before, moved.after) for moved in move.parameters]
        change = [torch.sub(b, a, out=d) for (a, b), d in zip(pairs, self._change, strict=True)]
        middle = [torch.add(a, d, alpha=0.5, out=m) for (a, _), d, m in zip(pairs, change, self._middle, strict=True)]
        self._replica.set(middle, {})
        squared_length = sum(dot(d, d) for d in change)
        first_order, factors = torch.zeros_like(old), []
        for number, own in enumerate(self._replica.gradients()):
            gradients = [None if g is None else g.to(d.dtype) for g, d in zip(own, change, strict=True)]
            dots = (dot(g, d) for g, d in zip(gradients, change, strict=True) if g is not None)
            first_order[number] = sum(dots, start=0.0)
            share = discrete_gradient_share(old, new, first_order, squared_length)[number].item()
            full = [DiscreteGradient(g, d, share) for g, d in zip(gradients, change, strict=True)]
            factors.append([self._factor(number, place, move, full[place]) for place in range(len(full))])
        self._course.missed = self._course.missed + (new - old - first_order).abs()
        return factors

    def _ends(self, move: Move) -> tuple[Float[Tensor, "numbers"], Float[Tensor, "numbers"]]:
        """The numbers before and after the weights moved, with the same running statistics."""
        course, replica, s = self._course, self._replica, move.step
        before, after = ([getattr(moved, when) for moved in move.parameters] for when in ("before", "after"))
        new = course.curve[:, s + 1]
        if not move.joins:
            replica.set(after, self._statistics_at(s + 1))
            answer = replica.numbers()
            course.add(self._reason(s), new - answer)
            new = answer
        old = self._look(s, before)
        if self._statistics:  # the forward pass of the step has renewed them before the weights moved
            replica.set(before, self._statistics_at(s + 1))
            renewed = replica.numbers()
            course.add(STATISTICS, renewed - old)
            old = renewed
        return old, new

    def _factor(self, number: int, place: int, move: Move, gradient: DiscreteGradient) -> Scaled | None:
        """What multiplies a parameter's Σ δ⊗k of this step in the number; None if the optimizer did not step."""
        course, moved = self._course, move.parameters[place]
        if moved.correction is not None:
            course.add_to(self._reason(move.step), number, gradient.dot(moved.correction))
        linear = moved.linear
        if linear is None:
            return None
        by_g = self._adjoints[number][place].back(linear, moved.side, moved.P, gradient)
        if linear.keep != 1.0:
            course.add_to(DECAY, number, (linear.keep - 1.0) * gradient.dot(moved.before))
        if linear.decay != 0.0:
            course.add_to(DECAY, number, linear.decay * by_g.number * dot(by_g.tensor, moved.before))
        by_g = Scaled(by_g.number * linear.sign * moved.factor, by_g.tensor)
        if moved.noise is None or moved.from_slots is None:
            return by_g
        course.add_to(NOISE, number, by_g.number * dot(by_g.tensor * moved.noise, moved.from_slots))
        return Scaled(by_g.number, by_g.tensor.masked_fill(moved.noise, 0.0))

    def _reason_of_drift(self) -> str:
        """Why the rebuilt weights may differ from the model's at the end."""
        if self._moved:
            return MOVED
        if self._unexplained:
            return UNEXPLAINED
        return ROUNDING if self._course.drift <= _SAME_MODEL else OTHER_MODEL

    def _reason(self, step: int) -> str:
        """Why the weights after a step may differ from what its slots make of those before."""
        if step in self._moved:
            return MOVED
        return UNEXPLAINED if step in self._unexplained else ROUNDING


class _LayerValues:
    """One layer's slots, step by step: those of the view, and the sum over the others."""

    def __init__(self, reader: MemoryReader, name: str, selection: Selection, places: list[Place], until: int) -> None:
        self.recorded = reader.layer(name)
        self._entry = self.recorded.entry
        self._names = {i: parameter for i, (layer, parameter) in enumerate(places) if layer == name}
        self._selected = StepBlocks(self.recorded, selection)
        every = selection == as_of(reader, Everything(), until)
        self._others = None if every else StepBlocks(self.recorded, ~selection)

    def add(self, move: Move, factors: list[list[Scaled | None]], course: Course, of_examples: Tensor | None) -> None:
        """Adds what the layer's slots of one step did; `of_examples`: what of its one slot belongs to examples."""
        block = self._selected.block(move.step, move.step + 1)
        less = 0.0 if of_examples is None else of_examples[:, None]
        if len(block):
            values = self._values(block, factors) - less
            if self.recorded.name not in course.slots:
                course.slots[self.recorded.name] = values.new_zeros(len(values), self.recorded.slots)
            course.slots[self.recorded.name].index_copy_(1, block.slots, values)
        if self._others is not None:
            others = self._others.block(move.step, move.step + 1)
            if len(others):
                course.add(OUTSIDE, (self._values(others, factors) - less).sum(dim=1, dtype=torch.float64))

    def _values(self, block: Block, factors: list[list[Scaled | None]]) -> Float[Tensor, "numbers rows"]:
        values = torch.zeros(len(factors), len(block), dtype=self.recorded.storage.compute_dtype)
        matrices = [self._matrix(own) for own in factors]
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            for row, (weight, bias) in zip(values, matrices, strict=True):
                some = row[errors.place]
                if weight is not None:
                    torch.sum(_products(errors.rows, weight.tensor, keys.rows), dim=1, out=some).mul_(weight.number)
                if keys.scale is not None:
                    some *= keys.scale
                if bias is not None:
                    some += products(bias[None], errors.rows)[0]
                if errors.scale is not None:
                    some *= errors.scale
        return values

    def _matrix(self, factors: list[Scaled | None]) -> tuple[Scaled | None, Tensor | None]:
        """What multiplies δ⊗k and δ of a slot: the weights side by side, and the sum of the biases."""
        dtype, entry = self.recorded.storage.compute_dtype, self._entry
        own = {name: factor for place, name in self._names.items() if (factor := factors[place]) is not None}
        biases = [own[name].value for name in entry.bias_names if name in own]
        bias = torch.stack(biases).sum(dim=0).to(dtype) if biases else None
        weights = {name: own[name] for name in entry.weight_columns if name in own}
        if not weights:
            return None, bias
        if len(entry.weight_columns) == 1:
            (weight,) = weights.values()
            return Scaled(weight.number, weight.tensor.to(dtype)), bias
        matrix = torch.zeros(entry.matrix_shape, dtype=dtype)
        for name, factor in weights.items():
            matrix[:, entry.weight_columns[name]] = factor.value
        return Scaled(1.0, matrix), bias


def _products(errors: Numbers, weight: Float[Tensor, "out_features in_group"], keys: Numbers) -> Tensor:
    """Of each row, numbers that add up to `δᵀ W k`. Errors that are token numbers are multiplied with the weight."""
    if isinstance(errors, SparseRows):
        return errors.times(weight.T) * dense(keys)
    return linear_map(keys, weight).mul_(errors)


def _check_size(reader: MemoryReader, numbers: int) -> None:
    """Refuses a history whose values would not fit into main memory."""
    size = numbers * sum(layer.slots * layer.storage.compute_dtype.itemsize for layer in reader.layers.values())
    if size > MAX_VALUES_BYTES:
        raise TooLargeError(
            f"The history of {numbers:,} numbers has a value for each slot of each layer, {size / 2**30:.1f} GB. Ask "
            "about fewer inputs and targets at a time."
        )


def _relative_difference(replayed: list[Tensor], trained: list[Tensor]) -> float:
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(replayed, trained, strict=True))
    size = sum(float(b.double().square().sum()) for b in trained)
    return (apart / size) ** 0.5 if size else 0.0
