"""The trajectory: the weights of every step, rebuilt from the slots by the update rule, the last step first.

Weights follow from the gradients, that is from the slots, *forwards* in time; histories are computed *backwards*. All
weights of a run would not fit into main memory. So the trajectory is divided into stretches, from one checkpoint of the
memory to the next, and going back, each stretch is rebuilt from its start. Where stretches are too long for that, one
pass forwards makes checkpoints in between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spotlights.dual_form import Factor, LinearStep, Side
from spotlights.memory.blocks import Block, Everything, StepBlocks
from spotlights.memory.format.names import probed_entries
from spotlights.memory.reader import MemoryReader
from spotlights.optimizers import WEIGHTS, State, UpdateRule, rule_of_parameter
from spotlights.query.contraction import add_gradient, error_sums, gradient_of

TRAJECTORY_BYTES = 768 << 20
"""How much of the trajectory is kept at a time: states at the starts of stretches, and the weights of one stretch."""

_NOISE = 4.0
"""A sum is rounding error up to this many times 2ε (or their rounding over √n) of the sum of its n numbers' sizes."""


@dataclass(frozen=True)
class ParameterMove:
    """What one step did to one parameter."""

    before: Float[Tensor, "*shape"]
    after: Float[Tensor, "*shape"]
    linear: LinearStep | None
    """None if the optimizer left the parameter alone."""
    side: Side
    P: Factor
    factor: float
    """γ."""
    from_slots: Float[Tensor, "*shape"] | None = None
    """What the slots sum up to, where some of it is rounding error."""
    noise: Bool[Tensor, "*shape"] | None = None
    """Which entries of that sum are rounding error, and so no example's; None if none are."""
    correction: Float[Tensor, "*shape"] | None = None
    """By how much the logged weights after the step differ from what the rule makes of the slots."""


@dataclass(frozen=True)
class Move:
    """One step: what it did to each parameter, in the order of `Trajectory.parameters`."""

    step: int
    parameters: list[ParameterMove]
    joins: bool = True
    """Whether the weights after the step are those before the next one; a checkpoint may be rounded differently."""


class ParameterPath:
    """One trained parameter of a layer: its weights forwards in time."""

    def __init__(self, reader: MemoryReader, rule: UpdateRule, layer: str, name: str, until: int) -> None:
        rule = rule_of_parameter(reader.manifest.layers[layer].rules, name, rule)
        entry = reader.manifest.layers[layer]
        self.layer, self.name = layer, name
        self.columns = entry.weight_columns.get(name)
        """Of a weight: which columns of the layer's matrix it is; None for a bias."""
        self.start = reader.initial[f"{layer}/{name}"]
        self.shape = tuple(self.start.shape)
        self.side: Side = rule.side(self.shape)
        wide = torch.float64 in (self.start.dtype, reader.layer(layer).storage.compute_dtype)
        self.dtype = torch.float64 if wide else torch.float32
        log = reader.log(layer)
        self._rule = rule
        self._rows = rule.read(log.rule[name][:until])
        self._factor = log.factor[name].tolist()
        known = probed_entries(math.prod(self.shape)) == slice(0, math.prod(self.shape), 1)
        self._logged = log.probed[name] if known else None
        whole = self.columns is not None and len(entry.weight_columns) == 1 and entry.groups == 1
        self._unused: list[Float[Tensor, "*shape"]] = []
        self._in_place = whole and rule.scalar and self.dtype == reader.layer(layer).storage.compute_dtype
        own = self.shape[::-1] if entry.transposed else self.shape
        self._linear = [rule.linear(row, own) if row.active else None for row in self._rows]
        needed = set[str]().union(*(rule.needs(row) for row in self._rows if row.active))
        self._states = sorted(needed - {WEIGHTS} | ({rule.moment} if rule.moment else set()))
        self._reader = reader
        self._checkpoints = reader.checkpoints(layer, name)

    @property
    def bytes_of_state(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize * (1 + len(self._states))

    @property
    def bytes_of_step(self) -> int:
        """Of the weights and of P."""
        size = math.prod(self.shape)
        sides = {"entries": size, "left": self.shape[0] ** 2, "right": self.shape[-1] ** 2}
        return self.dtype.itemsize * (size + (0 if self._rule.scalar else sides[self.side]))

    @property
    def first_moment(self) -> Float[Tensor, "*shape"] | None:
        """The optimizer's momentum when recording began, if it had one."""
        return self._reader.initial.get(f"{self.layer}/{self.name}/{self._rule.moment}")

    def can_start_at(self, step: int) -> bool:
        """Whether the memory has the weights before this step, and so all of the optimizer's state."""
        return WEIGHTS in self._checkpoints.get(step, ())

    def state_at(self, step: int) -> State:
        """From a checkpoint; zeros where the optimizer had no state yet."""
        state = {}
        for name in (WEIGHTS, *self._states):
            state[name] = torch.zeros(self.shape, dtype=self.dtype)
            if name in self._checkpoints[step]:
                state[name].copy_(self._reader.state(self.layer, self.name, step, name).reshape(self.shape))
        return state

    def advance(
        self, s: int, state: State, from_slots: Float[Tensor, "*shape"], noise: Bool[Tensor, "*shape"] | None = None
    ) -> ParameterMove:
        """One step, from what its slots sum up to; moves the state on, without changing the tensors of weights.

        `noise`: which entries of that sum are rounding error.
        """
        linear, row, rule, weights = self._linear[s], self._rows[s], self._rule, state[WEIGHTS]
        if linear is None:
            correction = self._follow_log(s, state)
            return ParameterMove(weights, state[WEIGHTS], None, self.side, 1.0, 0.0, correction=correction)
        if getattr(row, "fresh", 0.0):
            for name in self._states:
                state[name] = torch.zeros_like(state[name])
        g = linear.gradient((from_slots * self._factor[s]).to(self.dtype), weights)
        with rule.sensible(row):
            P: Factor = 1.0 if rule.scalar else rule.precondition(row, state, g)
        moment = state[rule.moment] if rule.moment else None
        state[WEIGHTS] = linear.next_weights(self.side, P, weights, moment, g)
        if moment is not None and rule.moment:
            state[rule.moment] = linear.next_moment(self.side, P, moment, g)
        correction = self._follow_log(s, state)
        total = None if noise is None else from_slots.to(self.dtype)
        return ParameterMove(weights, state[WEIGHTS], linear, self.side, P, self._factor[s], total, noise, correction)

    def advance_in_place(self, s: int, state: State, block: Block, *, keep: bool) -> ParameterMove | None:
        """The same step of a whole matrix without a P, with less copying; None where that does not apply.

        `keep`: the weights before the step are needed, too.
        """
        linear, weights = self._linear[s], state[WEIGHTS]
        if linear is None or not self._in_place or self._logged is not None:
            return None
        factor = linear.sign * self._factor[s]
        moment = state[self._rule.moment] if self._rule.moment else None
        if linear.m_g == 0.0 and linear.w_m == 0.0:
            new = self._room().copy_(weights) if keep else weights
            add_gradient(new, block, keep=linear.keep + linear.w_pg * linear.decay, factor=linear.w_pg * factor)
        elif moment is not None and linear.keep == 1.0 and linear.moment_is_change:
            add_gradient(moment, block, keep=linear.m_m, factor=linear.m_g * factor)
            if linear.decay != 0.0:
                moment.add_(weights, alpha=linear.m_g * linear.decay)
            size = linear.w_pg / linear.m_g
            new = torch.add(weights, moment, alpha=size, out=self._room() if keep else weights)
        else:
            return None
        state[WEIGHTS] = new
        return ParameterMove(weights, new, linear, self.side, 1.0, self._factor[s])

    def _room(self) -> Float[Tensor, "*shape"]:
        """A tensor to fill: finding new memory for it takes longer than filling it."""
        return self._unused.pop() if self._unused else torch.empty(self.shape, dtype=self.dtype)

    def give_back(self, weights: Float[Tensor, "*shape"]) -> None:
        """Weights that nobody looks at any more."""
        if self._in_place and self._logged is None:  # else they are the log's
            self._unused.append(weights)

    def _follow_log(self, s: int, state: State) -> Float[Tensor, "*shape"] | None:
        """The log has all entries of a small parameter. What the rule made of the slots is rounded differently."""
        if self._logged is None:
            return None
        followed, logged = state[WEIGHTS], self._logged[s].to(self.dtype).reshape(self.shape)
        state[WEIGHTS] = logged
        return logged - followed


class Trajectory:
    """The weights of all trained parameters of all layers."""

    def __init__(self, reader: MemoryReader, rule: UpdateRule, until: int) -> None:
        self.parameters = [
            ParameterPath(reader, rule, layer, name, until)
            for layer, entry in reader.manifest.layers.items()
            for name in entry.trained
        ]
        self._reader, self._until = reader, until
        self._segments = reader.starts
        self._places = {
            name: [place for place, path in enumerate(self.parameters) if path.layer == name] for name in reader.layers
        }
        self._blocks = {name: StepBlocks(layer, Everything()) for name, layer in reader.layers.items()}

    def backwards(self) -> Iterator[Move]:
        """Every step, the last one first."""
        starts = [s for s in self._segments if s < self._until and all(p.can_start_at(s) for p in self.parameters)]
        stretches = [range(first, end) for first, end in itertools.pairwise([*starts, self._until])]
        for number, stretch in reversed(list(enumerate(stretches))):
            if number:
                self._reader.will_be_read(stretches[number - 1])
            states = [path.state_at(stretch.start) for path in self.parameters]
            for move in self._back(stretch.start, stretch.stop, states, TRAJECTORY_BYTES):
                yield replace(move, joins=False) if move.step == stretch.stop - 1 < self._until - 1 else move

    def _back(self, first: int, end: int, states: list[State], budget: int) -> Iterator[Move]:
        steps, of_step, of_state = end - first, self._bytes_of_step, self._bytes_of_state
        length = math.isqrt(max(1, steps * of_state // of_step)) + 1
        if steps * of_step <= budget or steps <= 2:
            moves = [self._advance(s, states, keep=True) for s in range(first, end)]
            while moves:
                move = moves.pop()
                yield move
                for path, moved in zip(self.parameters, move.parameters, strict=True):
                    if moved.after is not moved.before:
                        path.give_back(moved.after)
            return
        if -(-steps // length) * of_state + length * of_step > budget:
            length = -(-steps // max(2, budget // (2 * of_state)))
        kept = []
        for start in range(first, end, length):
            kept.append([{name: held.clone() for name, held in state.items()} for state in states])
            for s in range(start, start + length) if start + length < end else ():
                self._advance(s, states, keep=False)
        left = budget - len(kept) * of_state
        for start in reversed(range(first, end, length)):
            yield from self._back(start, min(start + length, end), kept.pop(), left)

    @property
    def _bytes_of_step(self) -> int:
        return sum(p.bytes_of_step for p in self.parameters) or 1

    @property
    def _bytes_of_state(self) -> int:
        return sum(p.bytes_of_state for p in self.parameters) or 1

    def _advance(self, s: int, states: list[State], *, keep: bool) -> Move:
        moves: list[ParameterMove | None] = [None] * len(self.parameters)
        for layer, places in self._places.items():
            block = self._blocks[layer].block(s, s + 1)
            bias, sizes = error_sums(block)
            noise = _rounding_error(block, bias, sizes)
            weight: Tensor | None = None
            for place in places:
                path, state = self.parameters[place], states[place]
                if path.columns is None:
                    moves[place] = path.advance(s, state, bias, noise)
                    continue
                moves[place] = path.advance_in_place(s, state, block, keep=keep)
                if moves[place] is None:
                    weight = gradient_of(block)[0] if weight is None else weight
                    moves[place] = path.advance(s, state, weight[:, path.columns])
        return Move(s, [move for move in moves if move is not None])


def _rounding_error(
    block: Block, total: Float[Tensor, "out_features"], sizes: Float[Tensor, "out_features"]
) -> Bool[Tensor, "out_features"] | None:
    """Where `Σ δ` is nothing but rounding error, as for a bias before a batch norm; None if it is so nowhere.

    Adam divides such a sum by its own size and makes a step of full size of it. `sizes`: `Σ |δ|`.
    """
    entry = block.layer.entry
    if not entry.bias_names or not len(block):
        return None
    relative = max(2.0 * torch.finfo(total.dtype).eps, entry.rounding / math.sqrt(len(block))) * _NOISE
    noise = total.abs() <= relative * sizes
    return noise if bool(noise.any()) else None
