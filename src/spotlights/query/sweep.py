"""The sweep: a layer's steps from the last to the first, each with the factor of its gradient in the final weights.

Where a rule has a preconditioner P, that factor is a matrix for each step: too much to keep for all steps. P follows
from the gradients, that is from the slots, *forwards* in time; the factors follow *backwards*. So the sweep takes the
steps in chunks, from the last chunk to the first. It runs forwards through a chunk from a checkpoint of the
optimizer's state, keeps the chunk's P's, and then runs backwards. Where checkpoints are too far apart for that, the
sweep runs forwards twice and makes checkpoints of its own.

Of entries of a step's gradient that are rounding alone (`rounding.py`), the slots get no share. What the step did there
is summed up apart (`rounding`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from spotlights.dual_form import Adjoint, Factor, Side, act
from spotlights.memory.blocks import Block, Everything, Selection, StepBlocks
from spotlights.memory.reader import MemoryReader
from spotlights.memory.slots import rounding_limit
from spotlights.optimizers import WEIGHTS, State, UpdateRule, rule_of_parameter
from spotlights.query.contraction import StepFactors, WeightFactor, WeightShare, gradient_of
from spotlights.query.rounding import magnitudes, rounded_entries
from spotlights.sparse_rows import SparseRows

CHUNK_BYTES = 192 << 20
"""How much of P is kept at a time. With checkpoints at their usual distance, one chunk reaches from one to the next."""
_AMPLIFIED = 1e3
"""What P must make of such rounding to count: so many times the rounding of a step as large as the learning rate."""
_AMPLIFIED_COARSELY = 2e-4
"""The same for a type coarser than float32, whatever its rounding."""


class ParameterSweep:
    """One parameter's way forwards (P) and backwards (factors)."""

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
        rule = rule_of_parameter(reader.manifest.layers[layer].rules, name, rule)
        self.name = name
        self.shape = shape
        self.columns = columns
        """Of a weight: which columns of the layer's matrix it is."""
        self.side: Side = rule.side(shape)
        self._reader = reader
        self._rule = rule
        self.lazy = rule.lazy
        self._layer = layer
        self._dtype = reader.layer(layer).storage.compute_dtype
        rounding, eps = reader.manifest.layers[layer].rounding, torch.finfo(self._dtype).eps
        coarse = rounding > torch.finfo(torch.float32).eps
        self._amplified_share = _AMPLIFIED_COARSELY if coarse else _AMPLIFIED * eps
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
        self.adjoint = Adjoint()
        self.rounding = torch.zeros(shape, dtype=torch.float64)
        """What the sweep has found of it so far."""

    def can_start_at(self, step: int) -> bool:
        """Whether a checkpoint before this step has all that P needs; recording itself begins with one."""
        return step == 0 or self._needs <= self._kept.get(step, set())

    @property
    def bytes_of_p(self) -> int:
        sides = {"entries": math.prod(self.shape), "left": self.shape[0] ** 2, "right": self.shape[-1] ** 2}
        return sides[self.side] * self._dtype.itemsize

    # -- forwards ----------------------------------------------------------------------------

    def state_at(self, step: int) -> State:
        """What P needs to know, from a checkpoint; zeros where the optimizer had no state yet."""
        state = {name: torch.zeros(self.shape, dtype=self._dtype) for name in self._needs}
        for name in self._needs & self._kept.get(step, set()):
            state[name].copy_(self._reader.state(self._layer, self.name, step, name).reshape(self.shape))
        return state

    def forwards(
        self, s: int, state: State, from_slots: Float[Tensor, "*shape"], used: Bool[Tensor, "tokens"] | None = None
    ) -> Factor | None:
        """P of one step, from what its slots sum up to; moves the state on. A lazy rule moves that of `used` tokens."""
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
        before = {} if used is None else {name: held.clone() for name, held in state.items()}
        with rule.sensible(logged):
            P = rule.precondition(logged, state, g)
        if used is not None:
            P = P * used
            for name, held in before.items():
                state[name].copy_(torch.where(used, state[name], held))
        moment = state.get(rule.moment) if rule.moment else None
        if WEIGHTS in state:
            state[WEIGHTS] = linear.next_weights(self.side, P, state[WEIGHTS], moment, g)
        if moment is not None and rule.moment is not None:
            state[rule.moment] = linear.next_moment(self.side, P, moment, g)
        return P

    def amplified(self, s: int, limit: float) -> float:
        """The size of `P Σ |δ||k|` from which the rounding of that sum counts."""
        linear = self._linear[s]
        assert linear is not None
        # γ of a gradient that is rounding alone is arbitrary, and may be small.
        noise = limit * max(abs(self._factor[s]), 1.0) * abs(linear.w_pg)
        return self._amplified_share * abs(self._log[s].lr) / noise if noise else math.inf

    # -- backwards ---------------------------------------------------------------------------

    def backwards(self, s: int, step: Preconditioned | None) -> Factor:
        """The factor that what the step's slots sum up to has in the final parameter."""
        linear = self._linear[s] if self._linear else None
        if linear is None or step is None:
            return 0.0
        factor, number = self.adjoint.back(linear, step.P, lazy=self._rule.lazy), self._factor[s]
        factor = factor if number == 1.0 else factor * number
        if len(step.rounded):
            assert isinstance(factor, Tensor)
            flat = factor.reshape(-1).clone()
            moved = self.rounding.view(-1)[step.rounded] + flat[step.rounded].double() * step.sums.double()
            # Where the recorded slots cancel to 0, torch's sum of them need not: the entry stays marked.
            self.rounding.view(-1)[step.rounded] = torch.where(moved == 0, torch.finfo(moved.dtype).tiny, moved)
            factor = flat.index_fill_(0, step.rounded, 0.0).view(self.shape)
        return factor

    def initial(self) -> Float[Tensor, "*shape"]:
        """What is left of the parameter and of its moment at the start of recording; known after the whole sweep."""
        start = self._reader.initial.get(f"{self._layer}/{self.name}")
        if start is None:
            return torch.zeros(self.shape, dtype=torch.float64)
        rest = act(self.side, _double(self.adjoint.to_weights), start.double().reshape(self.shape))
        held = self._first_moment()
        if held is not None:
            rest = rest + act(self.side, _double(self.adjoint.to_moment), held.double().reshape(self.shape))
        return rest

    def initial_at_once(self) -> Float[Tensor, "*shape"] | None:
        """The same without a sweep, where decay alone counts and that is a number."""
        linear = [step for step in self._linear if step is not None]
        if self._first_moment() is not None or any(step.decay != 0.0 for step in linear):
            return None
        self.adjoint.to_weights = math.prod((step.keep for step in linear), start=1.0)
        return self.initial()

    def _first_moment(self) -> Tensor | None:
        return self._reader.initial.get(f"{self._layer}/{self.name}/{self._rule.moment}")


@dataclass(frozen=True)
class Preconditioned:
    """A parameter's P of one step, and where the step's gradient was rounding alone."""

    P: Factor
    rounded: Int64[Tensor, "entries"]
    """Entries, counted flat."""
    sums: Float[Tensor, "entries"]
    """The sums of the step's slots there."""


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
        self._lazy = any(parameter.lazy for parameter in self._parameters)

    def steps(self, selection: Selection) -> Iterator[tuple[Block, StepFactors]]:
        """All steps from the last to the first, with the selected slots of each."""
        selected = StepBlocks(self._layer, selection)
        for parameter in self._parameters:
            parameter.adjoint = Adjoint()
            parameter.rounding.zero_()
        for first, P in self._preconditioners():
            for s in range(first + len(P) - 1, first - 1, -1):
                factors = [p.backwards(s, of_step) for p, of_step in zip(self._parameters, P.pop(), strict=True)]
                pairs = zip(self.weights, factors, strict=False)
                weights = tuple(WeightFactor(p.columns, p.side, factor) for p, factor in pairs)
                yield selected.block(s, s + 1), StepFactors(weights, tuple(factors[len(weights) :]))

    def end(self) -> tuple[Block, StepFactors]:
        """What is left of the initial weight and biases, and of the optimizer's state at that time, after the sweep."""
        initial = WeightShare.joined(self._layer.entry, {p.name: p.initial() for p in self._parameters})
        rounding = WeightShare.joined(self._layer.entry, {p.name: p.rounding for p in self._parameters})
        return Block(self._layer, ()), StepFactors((), (), initial, rounding)

    def initial_at_once(self) -> WeightShare | None:
        """The same without a sweep, where it follows from numbers alone."""
        known = {p.name: value for p in self._parameters if (value := p.initial_at_once()) is not None}
        return WeightShare.joined(self._layer.entry, known) if len(known) == len(self._parameters) else None

    def _preconditioners(self) -> Iterator[tuple[int, list[tuple[Preconditioned | None, ...]]]]:
        """Every chunk's first step and P's, the last chunk first."""
        starts = [s for s in self._segments if s < self._until and all(p.can_start_at(s) for p in self._parameters)]
        for first, end in reversed(list(itertools.pairwise([*starts, self._until]))):
            length = max(1, CHUNK_BYTES // sum(weight.bytes_of_p for weight in self.weights))
            if end - first > length:
                length = max(length, math.isqrt(end - first - 1) + 1)
            states = [p.state_at(first) for p in self._parameters]
            kept = [states]
            for start in range(first, end - length, length):
                states = [{name: held.clone() for name, held in state.items()} for state in states]
                self._forwards(start, start + length, states)
                kept.append(states)
            for start in reversed(range(first, end, length)):
                yield start, self._forwards(start, min(start + length, end), kept.pop(), keep=True)

    def _forwards(
        self, first: int, end: int, states: list[State], *, keep: bool = False
    ) -> list[tuple[Preconditioned | None, ...]]:
        every = StepBlocks(self._layer, Everything())
        preconditioners = []
        for s in range(first, end):
            block = every.block(s, s + 1)
            of_weight, of_bias = gradient_of(block)
            used = self._used(block) if self._lazy else None
            sums = [*(of_weight[:, weight.columns] for weight in self.weights), *(of_bias for _ in self.biases)]
            P = tuple(
                p.forwards(s, state, of_slots, used if p.lazy else None)
                for p, state, of_slots in zip(self._parameters, states, sums, strict=True)
            )
            if keep:
                preconditioners.append(tuple(self._marked(s, block, P, sums)))
        return preconditioners

    def _used(self, block: Block) -> Bool[Tensor, "tokens"]:
        """The tokens that some slots have."""
        used = torch.zeros(self._layer.entry.in_features, dtype=torch.bool)
        for keys in block.keys():  # noqa: SIM118 (not a dict)
            if isinstance(keys.rows, SparseRows):
                used[keys.rows.used] = True
        return used

    def _marked(
        self, s: int, block: Block, P: Sequence[Factor | None], sums: Sequence[Tensor]
    ) -> Iterator[Preconditioned | None]:
        """Each parameter's P, with the entries that are rounding."""
        sizes = magnitudes(block)
        limit = rounding_limit(self._layer.entry, sizes.slots)
        for p, of_step, summed in zip(self._parameters, P, sums, strict=True):
            if of_step is None:
                yield None
                continue
            rounded = torch.empty(0, dtype=torch.int64)
            if isinstance(of_step, Tensor) and p.side == "entries":
                columns = None if p in self.biases else p.columns
                least = p.amplified(s, limit)
                rounded = rounded_entries(block, sizes, of_step, summed, columns, limit=limit, least=least)
            yield Preconditioned(of_step, rounded, summed.reshape(-1)[rounded])


def _double(factor: Factor) -> Factor:
    return factor.double() if isinstance(factor, Tensor) else factor
