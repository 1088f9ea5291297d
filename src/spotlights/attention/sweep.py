"""The sweep: a layer's steps from the last one down, each with the factor that its gradient has in the final weights.

Where a rule has a preconditioner P, that factor is a matrix for each step, far too much to keep. P follows from the
gradients, that is from the slots, going *up*; the factors go *down*. So the sweep takes the steps in chunks, from the
last chunk to the first: it goes up through a chunk from a checkpoint of the optimizer's state, keeping its P's, and
then down. Where checkpoints lie so far apart that their P's would not fit, it goes up twice and makes its own in
between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.dual_form import Adjoint, Factor, Side, act, outer_sum
from spotlights.memory.blocks import Block, StepBlocks
from spotlights.memory.layer_reader import Part
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Everything, Selection
from spotlights.optimizers import WEIGHTS, State, UpdateRule

CHUNK_BYTES = 192 << 20
"""How much of P is kept at a time. With checkpoints at their usual distance, one chunk reaches from one to the next."""


@dataclass(frozen=True)
class SweptStep:
    """One step on the way down."""

    block: Block
    """The step's selected slots."""
    place: slice | Int64[Tensor, "rows"]
    """Where they are among those of the chunk."""
    weights: list[Factor]
    """The factor of the slots' outer products in each final weight; it acts on them by the weight's `side`."""
    biases: list[Factor]

    @property
    def bias(self) -> Factor:
        """All biases have the same gradient: together they add the sum of their factors times it."""
        return sum(self.biases, start=0.0)


@dataclass(frozen=True)
class Chunk:
    """Some steps, to be gone through before the next chunk is asked for."""

    block: Block
    """All selected slots of these steps."""
    steps: Iterator[SweptStep]


class ParameterSweep:
    """One parameter on its way up and down."""

    def __init__(
        self,
        reader: MemoryReader,
        rule: UpdateRule,
        layer: str,
        name: str,
        shape: tuple[int, ...],
        until: int,
        columns: slice = slice(None),
    ) -> None:
        self.name = name
        self.shape = shape
        self.columns = columns
        """Of a weight: which columns of the layer's matrix it is."""
        self.side: Side = rule.side(shape)
        self._reader = reader
        self._rule = rule
        self._layer = layer
        self._dtype = reader.layer(layer).storage.compute_dtype
        self._log: list[Any] = []
        """Empty where the optimizer did not hold the parameter, else one row for each step; and γ."""
        self._factor: list[float] = []
        if name in reader.manifest.layers[layer].trained:
            self._log = rule.read(reader.log(layer).rule[name][:until])
            self._factor = reader.log(layer).factor[name].tolist()
        own = shape[::-1] if reader.manifest.layers[layer].transposed else shape
        self._linear = [rule.linear(step, own) if step.active else None for step in self._log]
        self._needs = set[str]().union(*(rule.needs(step) for step in self._log if step.active))
        self._kept = reader.checkpoints(layer, name) if self._needs else {}
        self._adjoint = Adjoint()

    def can_start_at(self, step: int) -> bool:
        """Whether a checkpoint before this step has all that P needs; recording itself begins with one."""
        return step == 0 or self._needs <= self._kept.get(step, set())

    @property
    def bytes_of_p(self) -> int:
        sides = {"entries": math.prod(self.shape), "left": self.shape[0] ** 2, "right": self.shape[-1] ** 2}
        return sides[self.side] * self._dtype.itemsize

    # -- up ----------------------------------------------------------------------------------

    def state_at(self, step: int) -> State:
        """What P needs to know, from a checkpoint; zeros where the optimizer had no state yet."""
        state = {name: torch.zeros(self.shape, dtype=self._dtype) for name in self._needs}
        for name in self._needs & self._kept.get(step, set()):
            state[name].copy_(self._reader.state(self._layer, self.name, step, name).reshape(self.shape))
        return state

    def up(self, s: int, state: State, from_slots: Float[Tensor, "*shape"]) -> Factor | None:
        """P of one step, from what its slots sum up to; moves the state on."""
        linear = self._linear[s] if self._linear else None
        if linear is None:
            return None
        logged, rule = self._log[s], self._rule
        if rule.scalar:
            return 1.0
        if logged.fresh:
            for name in set(rule.states) & set(state):
                state[name].zero_()
        g = linear.gradient(from_slots * self._factor[s], state.get(WEIGHTS))
        P = rule.precondition(logged, state, g)
        moment = state.get(rule.moment) if rule.moment else None
        if WEIGHTS in state:
            state[WEIGHTS] = linear.next_weights(P, state[WEIGHTS], 0.0 if moment is None else moment, g)
        if moment is not None and rule.moment is not None:
            state[rule.moment] = linear.next_moment(P, moment, g)
        return P

    # -- down --------------------------------------------------------------------------------

    def start_down(self) -> None:
        self._adjoint = Adjoint()

    def down(self, s: int, P: Factor | None) -> Factor:
        """The factor that what the step's slots sum up to has in the final parameter."""
        linear = self._linear[s] if self._linear else None
        return 0.0 if linear is None or P is None else _times(self._adjoint.back(linear, P), self._factor[s])

    def initial(self) -> Float[Tensor, "*shape"]:
        """What is left of the parameter and the moment as recording began, once all the way down is gone."""
        start = self._reader.initial.get(f"{self._layer}/{self.name}")
        if start is None:
            return torch.zeros(self.shape, dtype=torch.float64)
        made = act(self.side, _double(self._adjoint.to_weights), start.double().reshape(self.shape))
        held = self._first_moment()
        if held is not None:
            made = made + act(self.side, _double(self._adjoint.to_moment), held.double().reshape(self.shape))
        return made

    def initial_at_once(self) -> Float[Tensor, "*shape"] | None:
        """The same without a sweep, where decay alone counts and that is a number."""
        linear = [step for step in self._linear if step is not None]
        if self._first_moment() is not None or any(step.decay != 0.0 for step in linear):
            return None
        self._adjoint.to_weights = math.prod((step.keep for step in linear), start=1.0)
        return self.initial()

    def _first_moment(self) -> Tensor | None:
        return self._reader.initial.get(f"{self._layer}/{self.name}/{self._rule.moment}")


class LayerSweep:
    """One layer's weights and biases together."""

    def __init__(self, reader: MemoryReader, rule: UpdateRule, layer: str, until: int) -> None:
        entry = reader.manifest.layers[layer]
        self._layer = reader.layer(layer)
        self._until = until
        self._segments = reader.starts
        self.weights = [
            ParameterSweep(
                reader, rule, layer, name, (entry.out_features, columns.stop - columns.start), until, columns
            )
            for name, columns in entry.weight_columns.items()
        ]
        shape = (entry.out_features,)
        self.biases = [ParameterSweep(reader, rule, layer, name, shape, until) for name in entry.bias_names]
        self._parameters = [*self.weights, *self.biases]

    def chunks(self, selection: Selection) -> Iterator[Chunk]:
        """All steps from the last one down, with the selected slots of each."""
        chosen = StepBlocks(self._layer, selection)
        for parameter in self._parameters:
            parameter.start_down()
        for first, end, P in self._ups():
            block = chosen.block(first, end)
            yield Chunk(block, self._down(chosen, first, P, block))

    def initial(self) -> tuple[Float[Tensor, "out_features in_group"], Float[Tensor, "biases out_features"]]:
        """What the initial weight and biases, and the optimizer's state at that time, still make up."""
        known = [found for p in self._parameters if (found := p.initial_at_once()) is not None]
        if len(known) == len(self._parameters):
            return self._joined(known)
        for chunk in self.chunks(~Everything()):
            for _ in chunk.steps:
                pass
        return self.initial_after_sweep()

    def initial_after_sweep(
        self,
    ) -> tuple[Float[Tensor, "out_features in_group"], Float[Tensor, "biases out_features"]]:
        """The same, at the end of a sweep that was made anyway."""
        return self._joined([p.initial() for p in self._parameters])

    def _joined(self, values: list[Tensor]) -> tuple[Tensor, Tensor]:
        count = len(self.weights)
        return torch.cat(values[:count], dim=1), stacked(values[count:], self._layer.entry.out_features)

    def _down(
        self, chosen: StepBlocks, first: int, P: list[tuple[Factor | None, ...]], chunk: Block
    ) -> Iterator[SweptStep]:
        ends = _ends(chunk)
        for s in range(first + len(P) - 1, first - 1, -1):
            factors = [p.down(s, of_step) for p, of_step in zip(self._parameters, P.pop(), strict=True)]
            weights, biases = factors[: len(self.weights)], factors[len(self.weights) :]
            block = chosen.block(s, s + 1)
            yield SweptStep(block, _place(block, ends), weights, biases)

    def _ups(self) -> Iterator[tuple[int, int, list[tuple[Factor | None, ...]]]]:
        """Every chunk's P's, the last chunk first."""
        starts = [s for s in self._segments if s < self._until and all(p.can_start_at(s) for p in self._parameters)]
        for first, end in reversed(list(itertools.pairwise([*starts, self._until]))):
            length = max(1, CHUNK_BYTES // sum(weight.bytes_of_p for weight in self.weights))
            if end - first > length:
                length = max(length, math.isqrt(end - first - 1) + 1)
            states = [p.state_at(first) for p in self._parameters]
            kept = [states]
            for start in range(first, end - length, length):
                states = [{name: held.clone() for name, held in state.items()} for state in states]
                self._up(start, start + length, states)
                kept.append(states)
            for start in reversed(range(first, end, length)):
                stop = min(start + length, end)
                yield start, stop, self._up(start, stop, kept.pop(), keep=True)

    def _up(self, first: int, end: int, states: list[State], *, keep: bool = False) -> list[tuple[Factor | None, ...]]:
        every = StepBlocks(self._layer, Everything())
        found = []
        for s in range(first, end):
            of_weight, of_bias = block_gradients(every.block(s, s + 1))
            sums = [*(of_weight[:, weight.columns] for weight in self.weights), *(of_bias for _ in self.biases)]
            P = tuple(p.up(s, state, each) for p, state, each in zip(self._parameters, states, sums, strict=True))
            if keep:
                found.append(P)
        return found


def _ends(chunk: Block) -> dict[Part, int]:
    """Where the slots of each part end among those of a chunk."""
    return dict(zip((p.part for p in chunk.pieces), itertools.accumulate(map(len, chunk.pieces)), strict=True))


def _place(block: Block, ends: dict[Part, int]) -> slice | Int64[Tensor, "rows"]:
    """Where the slots of the last step not yet met are, in each part; takes them off its end."""
    places = []
    for piece in block.pieces:
        ends[piece.part] -= len(piece)
        places.append(slice(ends[piece.part], ends[piece.part] + len(piece)))
    if len(places) == 1:
        return places[0]
    return torch.cat([torch.arange(place.start, place.stop) for place in places]) if places else slice(0, 0)


def block_gradients(block: Block) -> tuple[Float[Tensor, "out_features in_group"], Float[Tensor, "out_features"]]:
    """What some slots add to the gradients of the weights, side by side, and of each bias, as `backward` left them."""
    entry, dtype = block.layer.entry, block.layer.storage.compute_dtype
    weight, bias = None, torch.zeros(entry.out_features, dtype=dtype)
    for keys, errors in zip(block.keys(), block.errors(), strict=True):
        rows = errors.rows if errors.scale is None else errors.rows * errors.scale[:, None]
        bias += rows.sum(dim=0)
        if keys.scale is not None:
            rows = rows * keys.scale[:, None]
        product = outer_sum(rows, keys.rows, entry.groups)
        weight = product if weight is None else weight.add_(product)
    return torch.zeros(entry.matrix_shape, dtype=dtype) if weight is None else weight, bias


def stacked(rows: list[Float[Tensor, "width"]], width: int) -> Float[Tensor, "rows width"]:
    """Rows as a matrix, which may have none."""
    return torch.stack(rows) if rows else torch.zeros(0, width, dtype=torch.float64)


def _times(factor: Factor, number: float) -> Factor:
    return factor if number == 1.0 else factor * number


def _double(factor: Factor) -> Factor:
    return factor.double() if isinstance(factor, Tensor) else factor
