"""What a recorded layer is made of: what each slot adds to its weights, to its output, and to a number of interest."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.cell_sums import CellPartsReducer, CellSums, Groups
from spotlights.attention.pairs import Directed, GroupedPairs, Pairs, SummedPairs
from spotlights.attention.products import Products, error_products
from spotlights.attention.reducers import OutputReducer, PartsReducer
from spotlights.attention.scan import Job, SweptValues, Values, scan
from spotlights.attention.sweep import Chunk, LayerSweep, SweptStep, block_gradients, stacked
from spotlights.dual_form import Side, act, linear_map
from spotlights.errors import UnsupportedError
from spotlights.memory.blocks import Block
from spotlights.memory.layer_reader import LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.memory.selection import Selection
from spotlights.memory.step_log import StepLog
from spotlights.optimizers import Coefficients, UpdateRule, exact_optimizers, rule_named

_NO_VALUES = torch.empty(0, 0)


@dataclass(frozen=True)
class Parts:
    """Some of a layer's weight and biases, in float64."""

    weight: Float[Tensor, "out_features in_group"]
    biases: Float[Tensor, "biases out_features"]

    @property
    def bias(self) -> Float[Tensor, "out_features"]:
        """What is added to an output, whatever the query."""
        return self.biases.sum(dim=0)

    @property
    def matrix(self) -> Float[Tensor, "out_features in_group_and_biases"]:
        """The weight with a column for each bias."""
        return torch.cat([self.weight, self.biases.T], dim=1)

    def output(self, queries: Float[Tensor, "queries in_features"]) -> Float[Tensor, "queries out_features"]:
        """What they make of some queries, in float64."""
        return linear_map(queries.double(), self.weight) + self.bias


@dataclass(frozen=True)
class GroupParts:
    """What each of some groups of slots adds to a layer's weight and bias, in float64, and its number of slots."""

    weights: Float[Tensor, "groups out_features in_group"]
    biases: Float[Tensor, "groups out_features"]
    counts: Int64[Tensor, "groups"]


class Unrolled(ABC):
    """A layer as its initial part plus what its slots add."""

    @property
    @abstractmethod
    def initial(self) -> Parts:
        """What is left of the layer, and of the optimizer's state, as recording began."""

    @abstractmethod
    def parts(self, selection: Selection) -> Parts:
        """What some slots add to weight and bias."""

    @abstractmethod
    def group_parts(self, selection: Selection, groups: Groups) -> GroupParts:
        """The same for each group of them."""

    @abstractmethod
    def outputs(
        self, selection: Selection, queries: Float[Tensor, "queries in_features"]
    ) -> Float[Tensor, "queries out_features"]:
        """What some slots add to the layer's output, in float64."""

    @abstractmethod
    def contributions(self, asked: Directed, *, summed: bool = False) -> Values | SweptValues:
        """What each slot adds to the layer's output in some directions; `summed`: added up over the queries."""


class UnrolledNumbers(Unrolled):
    """Under a rule without P: `initial + Σ_t weight[step_t] δ_t⊗k_t`, and the same for the biases."""

    def __init__(
        self,
        layer: LayerReader,
        initial: Parts,
        weight: Float[Tensor, "steps"],
        biases: Float[Tensor, "biases steps"],
    ) -> None:
        self._layer = layer
        self._initial = initial
        self.weight = weight
        self.biases = biases
        self.bias = biases.sum(dim=0)

    @property
    def initial(self) -> Parts:
        return self._initial

    def parts(self, selection: Selection) -> Parts:
        entry = self._layer.entry
        reducer = PartsReducer(entry.matrix_shape, self.weight, self.biases, groups=entry.groups)
        scan([Job(self._layer, selection, 0, lambda block: _NO_VALUES, [reducer])])
        return Parts(reducer.weight, reducer.bias)

    def group_parts(self, selection: Selection, groups: Groups) -> GroupParts:
        reducer = CellPartsReducer(self._layer, groups, self.weight, self.bias[None])
        scan([Job(self._layer, selection, 0, lambda block: _NO_VALUES, [reducer])])
        return GroupParts(reducer.weights, reducer.biases[:, 0], reducer.counts)

    def outputs(
        self, selection: Selection, queries: Float[Tensor, "queries in_features"]
    ) -> Float[Tensor, "queries out_features"]:
        if self._layer.entry.groups > 1:
            return self.parts(selection).output(queries)  # a slot has a score for each group: this order is quicker
        reducer = OutputReducer(len(queries), self._layer.entry.out_features, self.weight, self.bias)
        scan([Job(self._layer, selection, len(queries), Products(self._layer, queries), [reducer])])
        return reducer.output

    def contributions(self, asked: Directed, *, summed: bool = False) -> Values:
        entry, dtype = self._layer.entry, self._layer.storage.compute_dtype
        asked, weight, bias = asked.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        if summed and len(asked) * (entry.in_features + entry.out_features) < math.prod(entry.matrix_shape):
            apart = self.contributions(asked)  # so few that a matrix would cost more
            return lambda block: apart(block).sum(dim=0, keepdim=True)
        if summed or entry.groups > 1:
            whole = [slice(0, entry.in_features)]
            pairs = (
                SummedPairs(asked, columns=whole, groups=entry.groups) if summed else GroupedPairs(asked, entry.groups)
            )

            def by_weight_and_bias(block: Block) -> Tensor:
                steps = block.column("step")
                through_weight, through_bias = pairs.through_weight(block), pairs.through_bias(block)
                return through_weight.mul_(weight[steps]).add_(through_bias.mul_(bias[steps]))

            return by_weight_and_bias
        products = Products(self._layer, asked.queries)

        def values(block: Block) -> Tensor:
            steps = block.column("step")
            scores = products(block)
            scores *= weight[steps]
            scores.addr_(asked.ones, bias[steps])
            return scores.mul_(error_products(block, asked.directions))

        return values


class UnrolledMatrices(Unrolled):
    """Under a rule with P: a step's factor is a matrix, found by a sweep over the steps."""

    def __init__(self, reader: MemoryReader, rule: UpdateRule, layer: str, until: int) -> None:
        self._sweep = LayerSweep(reader, rule, layer, until)
        self.steps = until
        self._layer = reader.layer(layer)
        self._initial: Parts | None = None
        self._known: dict[Selection, Parts] = {}

    @property
    def initial(self) -> Parts:
        if self._initial is None:
            self._initial = Parts(*self._sweep.initial())
        return self._initial

    @torch.no_grad()
    def parts(self, selection: Selection) -> Parts:
        entry = self._layer.entry
        weight = torch.zeros(entry.matrix_shape, dtype=torch.float64)
        biases = torch.zeros(len(self._sweep.biases), entry.out_features, dtype=torch.float64)
        for chunk in self._sweep.chunks(selection):
            for step in chunk.steps:
                if len(step.block):
                    of_weight, of_bias = block_gradients(step.block)
                    for swept, factor in zip(self._sweep.weights, step.weights, strict=True):
                        weight[:, swept.columns] += act(swept.side, factor, of_weight[:, swept.columns])
                    for bias, factor in zip(biases, step.biases, strict=True):
                        bias += factor * of_bias
        self._initial = self._initial or Parts(*self._sweep.initial_after_sweep())
        return Parts(weight, biases)

    @torch.no_grad()
    def group_parts(self, selection: Selection, groups: Groups) -> GroupParts:
        entry, sums = self._layer.entry, CellSums(self._layer)
        weights = torch.zeros(len(groups), *entry.matrix_shape, dtype=torch.float64)
        biases = torch.zeros(len(groups), entry.out_features, dtype=torch.float64)
        counts = torch.zeros(len(groups), dtype=torch.int64)
        for chunk in self._sweep.chunks(selection):
            for step in chunk.steps:
                if not len(step.block):
                    continue
                ones = torch.ones(len(step.block), dtype=torch.float64)
                for group, count, of_weight, of_bias in sums.of(step.block, groups.codes(step.block), ones, ones[None]):
                    for swept, of_step in zip(self._sweep.weights, step.weights, strict=True):
                        part = of_weight[:, swept.columns]
                        weights[group, :, swept.columns] += act(swept.side, of_step, part)
                    biases[group] += step.bias * of_bias[0]
                    counts[group] += count
        return GroupParts(weights, biases, counts)

    def outputs(
        self, selection: Selection, queries: Float[Tensor, "queries in_features"]
    ) -> Float[Tensor, "queries out_features"]:
        # A slot's share is a matrix of its own here: adding these up first is the same sum in another order.
        if selection not in self._known:
            self._known = {selection: self.parts(selection)}
        return self._known[selection].output(queries)

    def contributions(self, asked: Directed, *, summed: bool = False) -> SweptValues:
        kind = SummedPairs if summed and len(asked) > 1 else Pairs
        columns = [swept.columns for swept in self._sweep.weights]
        pairs = kind(asked.to(self._layer.storage.compute_dtype), columns=columns, groups=self._layer.entry.groups)
        return _SweptContributions(self._sweep, pairs)


class _SweptContributions(SweptValues):
    """The sweep goes on while some threads compute the values of the steps behind it."""

    def __init__(self, sweep: LayerSweep, pairs: Pairs | SummedPairs) -> None:
        self._sweep = sweep
        self._pairs = pairs

    def blocks(self, selection: Selection) -> Iterator[tuple[Block, Float[Tensor, "queries rows"]]]:
        threads = torch.get_num_threads()
        if len(self._pairs) < _QUERIES_FOR_THREADS or threads == 1:
            for chunk in self._sweep.chunks(selection):
                yield chunk.block, self._values(chunk, lambda step, values: self._fill(step, values))
            return
        try:
            with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                for chunk in self._sweep.chunks(selection):
                    behind: deque[Future[None]] = deque()

                    def later(step: SweptStep, values: Tensor, behind: deque[Future[None]] = behind) -> None:
                        if len(behind) > threads:  # each holds a matrix
                            behind.popleft().result()
                        behind.append(pool.submit(self._fill, step, values))

                    values = self._values(chunk, later)
                    for future in behind:
                        future.result()
                    yield chunk.block, values
        finally:
            torch.set_num_threads(threads)  # the threads above changed what their BLAS shares with this one

    def _values(self, chunk: Chunk, fill: Callable[[SweptStep, Tensor], None]) -> Float[Tensor, "queries rows"]:
        values = self._pairs.empty(len(chunk.block))
        for step in chunk.steps:
            if len(step.block):
                fill(step, values)
        return values

    def _fill(self, step: SweptStep, values: Float[Tensor, "queries rows"]) -> None:
        sides: list[Side] = [swept.side for swept in self._sweep.weights]
        values[:, step.place] = self._pairs.contributions(step.block, sides, step.weights, step.bias)


_QUERIES_FOR_THREADS = 4


def unroll(reader: MemoryReader, layer: str, until: int) -> Unrolled:
    """Unrolls the first `until` steps of a layer's log."""
    rule = _rule_of(reader)
    numbers = _numbers(reader, rule, layer, until) if rule.scalar else None
    if numbers is None:
        reader.need_all_slots(
            f"What {reader.manifest.optimizer} makes of a slot depends on the others, so contributions need",
            "Ask for scores, top, totals or influence",
        )
    return numbers or UnrolledMatrices(reader, rule, layer, until)


def unroll_plainly(reader: MemoryReader, layer: str, until: int) -> UnrolledNumbers:
    """The same with P left out: every step as a plain gradient step of its learning rate.

    Under SGD that is what the layer is made of. Under other rules it is not, and is of use where P cancels out:
    what P makes larger as an example is learned, it makes larger as the others make up for its absence.
    """
    rule = _rule_of(reader)
    if rule.scalar and (numbers := _numbers(reader, rule, layer, until)) is not None:
        return numbers
    entry, log = reader.layer(layer).entry, reader.log(layer)
    shapes = {name: (entry.out_features, at.stop - at.start) for name, at in entry.weight_columns.items()}
    shapes |= dict.fromkeys(entry.bias_names, (entry.out_features,))
    per_step = {name: torch.zeros(until, dtype=torch.float64) for name in shapes}
    for name in entry.trained:
        steps = rule.read(log.rule[name][:until])
        signed = [-step.lr * rule.linear(step, shapes[name]).sign if step.active else 0.0 for step in steps]
        per_step[name] = torch.tensor(signed, dtype=torch.float64) * log.factor[name][:until]
    nothing = torch.zeros(entry.matrix_shape, dtype=torch.float64)
    return UnrolledNumbers(
        reader.layer(layer),
        Parts(nothing, stacked([nothing[:, 0] for _ in entry.bias_names], entry.out_features)),
        torch.stack([per_step[name] for name in entry.weight_columns]).mean(dim=0),  # alike, unless one is frozen
        stacked([per_step[name] for name in entry.bias_names], until),
    )


def _rule_of(reader: MemoryReader) -> UpdateRule:
    manifest = reader.manifest
    reader.need_visits(
        "the error of each visit, which contributions, influence, weights and dual networks are made of",
        "Ask for scores, top or totals",
    )
    rule = rule_named(manifest.rule)
    if rule is None:
        raise UnsupportedError(
            f"{reader.directory} was trained with {manifest.optimizer}, which has no exact update rule yet. "
            f"Scores, top, totals and verify work; contributions, weights and masks need one of: "
            f"{exact_optimizers()}."
        )
    if not manifest.errors:
        raise UnsupportedError(
            f"{reader.directory} was recorded with errors=False: it has keys only. Scores, top and totals "
            "work; contributions, weights, masks and verify need a memory with errors."
        )
    return rule


def _coefficients(rule: UpdateRule, log: StepLog, name: str, until: int) -> Coefficients:
    """Walking through all steps takes as long as a small scan: done once, not for every query."""
    known = log.known.get(name)
    if known is None or known[0] != until:
        known = log.known[name] = until, rule.coefficients(log.rule[name][:until])
    return known[1]


def _numbers(reader: MemoryReader, rule: UpdateRule, layer: str, until: int) -> UnrolledNumbers | None:
    """None where the weights that make up the matrix were not treated alike: a step's factor is then no number."""
    entry, log = reader.layer(layer).entry, reader.log(layer)
    per_step, initial = {}, {}
    for name in (*entry.weight_columns, *entry.bias_names):
        value = reader.initial[f"{layer}/{name}"].double()
        per_step[name] = torch.zeros(until, dtype=torch.float64)
        if name in entry.trained:
            coefficients = _coefficients(rule, log, name, until)
            per_step[name] = coefficients.per_step * log.factor[name][:until]
            value = value * coefficients.initial
            held = reader.initial.get(f"{layer}/{name}/{rule.moment}")
            if held is not None:
                value = value + coefficients.moment * held.double()
        initial[name] = value
    first, *others = (per_step[name] for name in entry.weight_columns)
    if not all(torch.equal(first, other) for other in others):
        return None
    weight = torch.cat([initial[name] for name in entry.weight_columns], dim=1)
    return UnrolledNumbers(
        reader.layer(layer),
        Parts(weight, stacked([initial[name] for name in entry.bias_names], entry.out_features)),
        first,
        stacked([per_step[name] for name in entry.bias_names], until),
    )
