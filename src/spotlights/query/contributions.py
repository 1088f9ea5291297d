"""Contributions: what each slot adds to a number of interest through one layer."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.memory.blocks import Block, Piece
from spotlights.memory.layer_reader import ROWS, LayerReader
from spotlights.memory.reader import MemoryReader
from spotlights.query.accounts import Missing, missing
from spotlights.query.coefficients import Coefficient, StepMatrices, Unrolled
from spotlights.query.contraction import Contraction, DirectedQueries, Factors, StepNumbers, WeightShare, group_products
from spotlights.query.engine import View
from spotlights.query.measured import AskTotals, LayerMeasured
from spotlights.query.plan import BlockValues, Measure, Sweep
from spotlights.query.reducers import WeightsReducer
from spotlights.query.weights import initial_part, rounding_part
from spotlights.results.answers import Totals, kappa

GROUP_WEIGHTS_BYTES = 1 << 30
"""What the matrices of all groups may take."""
_GROUP_COST = 1_000_000
"""What it takes to begin adding up the slots of one group, in multiplications."""
QUERIES_FOR_THREADS = 4
"""From so many queries on, a step's values are worth a thread."""


@dataclass(frozen=True, eq=False)
class Contribution(Measure):
    """What each slot adds to the layer's output in the direction of each query, or of the queries of each input."""

    asked: DirectedQueries
    unrolled: Unrolled
    inputs: tuple[int, ...] | None = None
    """How many queries each input has, one input's behind the other's; None if each query is an input."""

    @property
    def width(self) -> int:
        return len(self.asked) if self.inputs is None else len(self.inputs)

    def bind(self, reader: MemoryReader, layer: str) -> BlockValues | Sweep:
        contract = self._contraction(reader.layers[layer])
        if isinstance(self.unrolled, StepNumbers):
            factors = self.unrolled.factors
            return lambda block: contract(block, factors(block))
        sweep = self.unrolled.sweep(reader, layer)
        threads = torch.get_num_threads() if self.width >= QUERIES_FOR_THREADS else 1
        return Sweep(lambda selection: _together(_of_steps(sweep.steps(selection), contract, threads)))

    def _contraction(self, recorded: LayerReader) -> Callable[[Block, Factors], Float[Tensor, "queries rows"]]:
        if self.inputs is None:
            return Contraction(recorded, self.asked)
        edges = itertools.pairwise(itertools.accumulate(self.inputs, initial=0))
        own = [Contraction(recorded, self.asked[slice(*edge)], summed=True) for edge in edges]
        return lambda block, factors: torch.cat([contraction(block, factors) for contraction in own])


def _of_steps(
    steps: Iterator[tuple[Block, Factors]], contract: Callable[[Block, Factors], Tensor], threads: int
) -> Iterator[tuple[Block, Float[Tensor, "queries rows"]]]:
    """The values of each step's slots; by several threads while the sweep goes on."""
    waiting: deque[tuple[Block, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for block, factors in steps:
            if len(block) and threads == 1:
                yield block, contract(block, factors)
            elif len(block):
                waiting.append((block, pool.submit(contract, block, factors)))
            if len(waiting) > threads:  # each waiting step holds a matrix
                first, values = waiting.popleft()
                yield first, values.result()
        yield from ((block, values.result()) for block, values in waiting)


def _together(
    steps: Iterator[tuple[Block, Float[Tensor, "queries rows"]]],
) -> Iterator[tuple[Block, Float[Tensor, "queries rows"]]]:
    """The same, some thousand slots at a time, in the order of their numbers."""
    held: list[tuple[Piece, Tensor]] = []
    for block, values in steps:
        held += zip(block.pieces, values.split(list(map(len, block.pieces)), dim=1), strict=True)
        if sum(len(piece) for piece, _ in held) >= ROWS:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(held: list[tuple[Piece, Tensor]]) -> tuple[Block, Float[Tensor, "queries rows"]]:
    held.sort(key=lambda part: int(part[0].slots[0]))
    block = Block(held[0][0].segment.layer, tuple(piece for piece, _ in held))
    return block, torch.cat([values for _, values in held], dim=1)


class Contributions(LayerMeasured):
    """What each slot adds to a number of interest, through one layer; made by `Attention.contributions`.

    In the last layer the number is the layer's own output and the sum is exact. In a hidden layer each
    contribution is first order: what the slot adds to the layer's output, times how the number of interest changes
    with that output.
    """

    what = "contribution"
    signed = True

    def __init__(
        self,
        view: View,
        recorded: LayerReader,
        asked: DirectedQueries,
        *,
        adds_up: bool,
        unrolled: Unrolled | None = None,
        differs: str | None = None,
        inputs: tuple[int, ...] | None = None,
    ) -> None:
        """`adds_up`: the number of interest is a sum over the layer's output, so contributions are not first order;
        `inputs`: how many of the queries, one behind the other, are added up for each input, None for a value for each.
        """
        super().__init__(view, recorded, asked.queries)
        self.first_order = not adds_up
        """Whether these are a hidden layer's share, through the gradient of the target."""
        self._differs = differs
        self._asked = asked
        self._unrolled = unrolled or view.unrolled(recorded.name)
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self._asked) if self._inputs is None else len(self._inputs)

    @property
    def exact(self) -> bool:
        """Whether `initial`, `rounding` and `total()` of all slots add up to the number."""
        return self.adds_up and not self.recorded.storage.lossy

    @property
    def adds_up(self) -> bool:
        """The same, up to the rounding of keys and errors that were stored as float16 or int8."""
        return not (self.first_order or self.sample or self._differs or self.missing)

    @property
    def missing(self) -> Missing | None:
        """What the slots do not account for in this layer, with the reason; None if nothing is missing.

        Where the step log has a reason, the first call adds up the slots of the layer.
        """
        return self.recorded.once(("missing", self.view.until), lambda: missing(self.view, self.layer))

    @property
    def note(self) -> str | None:
        notes = (
            "first order: a hidden layer's share, through the gradient of the target" if self.first_order else None,
            self._differs,
            None if self.missing is None else str(self.missing),
            self._unrolled.note,
            super().note,
            None if self._inputs is None else rows_note(self._inputs),
        )
        return "; ".join(note for note in notes if note) or None

    def measure(self, some: slice) -> Measure:
        if self._inputs is None:
            return Contribution(self._asked[some], self._unrolled)
        own, first = self._inputs[some], sum(self._inputs[: some.start])
        return Contribution(self._asked[slice(first, first + sum(own))], self._unrolled, own)

    def whole(self) -> Contributions:
        """Added up over all queries."""
        return self._with(_inputs=(len(self._asked),))

    @property
    def kappa(self) -> Float[Tensor, "queries"]:
        """`κ = Σ|contribution| / |Σ contribution|` over the slots: how much of what they add cancels."""
        return kappa(self.totals("step", bins=1, absolute=True).values.sum(dim=1), self.total())

    @property
    def initial(self) -> Float[Tensor, "queries"]:
        """The part of the number that comes from the initial weights. With `rounding` and `total()`: the number."""
        return self._through(initial_part(self.view, self.layer, self._unrolled))

    def _through(self, part: WeightShare) -> Float[Tensor, "queries"]:
        """What a share of the weights adds to the number."""
        by_query = (part.output(self._asked.queries) * self._asked.directions.double()).sum(dim=1)
        if self._inputs is None:
            return by_query
        owners = torch.arange(len(self._inputs)).repeat_interleave(torch.tensor(self._inputs))
        return by_query.new_zeros(len(self._inputs)).index_add_(0, owners, by_query)

    @property
    def rounding(self) -> Float[Tensor, "queries"]:
        """The part of the number that no example taught: rounding that the optimizer made whole steps of.

        Such is the gradient of a bias before a batch norm, under Adam. With `initial` and `total()`: the number itself.
        """
        part = rounding_part(self.view, self.layer, self._unrolled)
        return torch.zeros_like(self.initial) if part is None else self._through(part)

    def totals(self, column: str, *, absolute: bool = False, bins: int | None = None) -> Totals:
        question, groups = AskTotals(column, absolute, bins), self.grouping(column, bins)
        by_slot = absolute or self._magnitudes or self._kept is not None or self.sample is not None
        if by_slot or not self._matrices_are_cheaper(len(groups)):
            return self.ask(question)[0]
        reducer = WeightsReducer(self.recorded.entry, groups)
        sums = self.view.reduce(self.layer, reducer, Coefficient(self._unrolled))
        inputs = (1,) * len(self) if self._inputs is None else self._inputs
        totals = group_products(sums.weights, sums.biases.sum(dim=1), self._asked, inputs)
        return question.totals(self, totals, sums.counts)

    totals.__doc__ = LayerMeasured.totals.__doc__

    def _matrices_are_cheaper(self, groups: int) -> bool:
        """Whether to add up each group's slots and each input's rows first, and to have no value for each slot.

        A convolution has hundreds of rows for each input and hundreds of slots for each example, but a small matrix.
        Counts multiplications; also whether the matrices of all groups fit in memory.
        """
        layer, entry, inputs, queries = self.recorded, self.recorded.entry, len(self), len(self._asked)
        size = math.prod(entry.matrix_shape) + entry.out_features
        if groups * size * 8 > GROUP_WEIGHTS_BYTES:
            return False
        if isinstance(self._unrolled, StepMatrices):
            stretches, pairs = self._unrolled.until, layer.slots * size
        else:
            stretches = -(-layer.slots // ROWS)
            pairs = layer.slots * entry.out_features + layer.distinct_keys * entry.in_features
        sums = min(layer.slots * inputs / max(queries, 1), stretches * groups)  # of an example's rows, or of a group
        by_group = (layer.slots + inputs * groups + queries) * size + sums * _GROUP_COST
        return by_group < min(queries * pairs, inputs * layer.slots * size)

    def __repr__(self) -> str:
        kind = "first order" if self.first_order else "exact" if self.exact else "not exact"
        kind = "estimates" if self.sample is not None and not self.first_order else kind
        gaps = "" if self.exact or self.first_order or self.sample is not None else f"; {self.note}"
        return f"Contributions({self.layer}: {len(self)} queries, {kind}{gaps})"


def rows_note(rows: Sequence[int]) -> str | None:
    """What to say of values that were added up over the rows of each input."""
    few, many = min(rows, default=0), max(rows, default=0)
    how_many = f"{many:,}" if few == many else f"{few:,} to {many:,}"
    return f"added up over the {how_many} rows of the input" if many > 1 else None
