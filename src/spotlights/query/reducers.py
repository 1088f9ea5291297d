"""Reducers: each question as a small monoid, fed by a pass over blocks of slots.

A reducer starts empty, is updated with blocks of slots, and merges with another one of its kind. A thread, a process or
a machine needs no more than that to answer its share of a question. Reducers hold plain data, so that a plan with
its reducers can be pickled.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.memory.blocks import Block
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.layer_reader import StoredRows
from spotlights.query.contraction import Factors, WeightShare, slot_sums
from spotlights.sparse_rows import SparseRows, dense, weighted_sum

if TYPE_CHECKING:
    from spotlights.query.columns import Cells, Grouping

_FEW_GROUPS = 256
"""Up to here a product with one-hot rows is quicker than `index_add_`."""

R = TypeVar("R", bound="Reducer")


class Reducer(ABC):
    """Collects the answer to one question. The fields of a reducer are the question; `start` makes an empty answer."""

    whole_steps: ClassVar[bool] = False
    """Whether a block must hold all selected slots of its steps."""
    adds: ClassVar[tuple[str, ...]] = ()
    """What merging adds up: numbers, tensors or lists."""

    def __post_init__(self) -> None:
        self.start()

    def fresh(self: R) -> R:
        """An empty reducer for the same question."""
        empty = copy.copy(self)
        empty.start()
        return empty

    @abstractmethod
    def start(self) -> None:
        """Forgets what was seen."""

    @abstractmethod
    def update(self, block: Block, values: Any) -> None:
        """Takes one block and what the plan's measure says of its slots."""

    def merge(self, other: Any) -> None:
        """Takes what another reducer of the same kind has seen."""
        for name in self.adds:
            setattr(self, name, operator.iadd(getattr(self, name), getattr(other, name)))


# -- of values: what a measure gives each query and slot --------------------------------------------


@dataclass(eq=False)
class TopReducer(Reducer):
    """The slots with the largest (or smallest) values, per query and group; the earlier of two equal slots wins."""

    queries: int
    k: int
    grouping: Grouping | None
    largest: bool = True

    def start(self) -> None:
        nothing = torch.empty(self.queries, 0), torch.empty(self.queries, 0, dtype=torch.int64)
        self.kept = [nothing] * (1 if self.grouping is None else len(self.grouping))
        """For each group the values and slots that are largest so far, in ascending order of slots."""

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        values = values if self.largest else -values
        if self.grouping is None:
            self._add(0, values, block.slots.expand(len(values), -1))
            return
        for group, members in enumerate(self.grouping.members(block)):
            self._add(group, values.index_select(1, members), block.slots[members].expand(len(values), -1))

    def _add(self, group: int, values: Float[Tensor, "queries rows"], slots: Int64[Tensor, "queries rows"]) -> None:
        """Takes more slots of a group, in ascending order."""
        kept, of_slots = self.kept[group]
        if not values.numel():
            return
        is_later = not kept.numel() or bool(slots[:, 0].min() > of_slots.max())
        if kept.shape[1] == self.k:
            least = kept.amin(dim=1, keepdim=True)  # later slots lose a tie
            better = (values > least if is_later else values >= least).any(dim=0).nonzero().flatten()
            if not len(better):
                return
            values, slots = values.index_select(1, better), slots.index_select(1, better)
        if kept.numel():
            values, slots = torch.cat([kept, values], dim=1), torch.cat([of_slots, slots], dim=1)
        if not is_later:
            order = slots.argsort(dim=1)
            values, slots = values.gather(1, order), slots.gather(1, order)
        if values.shape[1] > self.k:
            best = largest_first_in_order(values, self.k)
            values, slots = values.gather(1, best), slots.gather(1, best)
        self.kept[group] = values, slots

    def merge(self, other: Any) -> None:
        for group, kept in enumerate(other.kept):
            self._add(group, *kept)

    def result(self) -> tuple[Float[Tensor, "queries groups k"], Int64[Tensor, "queries groups k"]]:
        """Values and slots, the best first; where a group has fewer, the slot is -1 and the value NaN."""
        width = max((kept.shape[1] for kept, _ in self.kept), default=0)
        values = torch.full((self.queries, len(self.kept), width), float("nan"), dtype=torch.float64)
        slots = torch.full((self.queries, len(self.kept), width), -1)
        for group, (kept, of_slots) in enumerate(self.kept):
            ordered, order = kept.sort(dim=1, descending=True, stable=True)
            values[:, group, : ordered.shape[1]] = ordered.double()
            slots[:, group, : ordered.shape[1]] = of_slots.gather(1, order)
        return values if self.largest else -values, slots


def largest_first_in_order(values: Float[Tensor, "queries rows"], k: int) -> Int64[Tensor, "queries k"]:
    """Where the k largest values of each row are, in ascending order; the first of equal ones wins."""
    top, where = values.topk(k, dim=1)
    ambiguous = (values >= top[:, -1:]).sum(dim=1) > k
    if ambiguous.any():
        rows = ambiguous.nonzero().flatten()
        where[rows] = values[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return where.sort(dim=1).values


@dataclass(eq=False)
class TotalsReducer(Reducer):
    """Sums per query and group, in float64, and the number of slots in each group."""

    adds = ("sums", "counts")
    queries: int
    grouping: Grouping | Cells
    absolute: bool = False

    def start(self) -> None:
        self.sums = torch.zeros(self.queries, len(self.grouping), dtype=torch.float64)
        self.counts = torch.zeros(len(self.grouping), dtype=torch.int64)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        codes = self.grouping.codes(block)
        if self.absolute:
            values = values.abs()
        self.counts += self.grouping.counts(block)
        if len(values) > 1 and len(self.counts) <= _FEW_GROUPS:
            members = values.new_zeros(len(codes), len(self.counts))
            members.scatter_(1, codes[:, None], 1.0)
            self.sums += values @ members
        else:
            self.sums.index_add_(1, codes, values.double())


@dataclass(eq=False)
class SampledTotalsReducer(TotalsReducer):
    """Sums over sampled slots, with the sums of squares that their standard errors follow from.

    `Sample.standard_error` has the formula. Steps were sampled as a whole, so the sum of each step is squared.
    """

    whole_steps = True
    adds = (*TotalsReducer.adds, "squares", "step_squares")

    def start(self) -> None:
        super().start()
        self.squares, self.step_squares = torch.zeros_like(self.sums), torch.zeros_like(self.sums)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        super().update(block, values)
        values = values.abs().double() if self.absolute else values.double()
        codes, groups = self.grouping.codes(block), len(self.counts)
        self.squares.index_add_(1, codes, values.square())
        cells, cell = (block.column("step") * groups + codes).unique(return_inverse=True)
        sums = values.new_zeros(len(values), len(cells)).index_add_(1, cell, values)
        self.step_squares.index_add_(1, cells % groups, sums.square_())


@dataclass(eq=False)
class AllValuesReducer(Reducer):
    """The value of every slot."""

    adds = ("blocks",)
    queries: int

    def start(self) -> None:
        self.blocks: list[tuple[Tensor, Tensor]] = []

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        self.blocks.append((block.slots, values))

    def result(self) -> tuple[Float[Tensor, "queries slots"], Int64[Tensor, "slots"]]:
        if not self.blocks:
            return torch.zeros(self.queries, 0), torch.zeros(0, dtype=torch.int64)
        blocks = sorted(self.blocks, key=lambda block: int(block[0][0]))
        slots, values = torch.cat([some for some, _ in blocks]), torch.cat([some for _, some in blocks], dim=1)
        if bool((slots.diff() < 0).any()):  # a sweep goes step by step, and each process has its part of a step
            slots, order = slots.sort()
            values = values.index_select(1, order)
        return values, slots


@dataclass(eq=False)
class LogSumReducer(Reducer):
    """The logarithm of the sum of exponentials: what a softmax divides by."""

    queries: int

    def start(self) -> None:
        self.total = torch.full((self.queries,), -torch.inf, dtype=torch.float64)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        self.total = torch.logaddexp(self.total, values.double().logsumexp(dim=1))

    def merge(self, other: Any) -> None:
        self.total = torch.logaddexp(self.total, other.total)


@dataclass(eq=False)
class OutputReducer(Reducer):
    """`Σ value·(key·query)`: what slots add to a layer's output, in float64; the plan's measure is a score."""

    adds = ("output",)
    queries: int
    out_features: int
    weight: Float[Tensor, "steps"]
    bias: Float[Tensor, "steps"]

    def start(self) -> None:
        self.output = torch.zeros(self.queries, self.out_features, dtype=torch.float64)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        steps = block.column("step")
        weight, bias = (per_step[steps].to(values.dtype) for per_step in (self.weight, self.bias))
        weights = values * weight + bias
        for errors in block.errors():
            self.output += weighted_sum(errors.times_scale(weights[:, errors.place]), errors.rows)


@dataclass(eq=False)
class LastReducer(Reducer):
    """The value that came last: the end of a sweep."""

    def start(self) -> None:
        self.value: Any = None

    def update(self, block: Block, values: Any) -> None:
        self.value = values

    def merge(self, other: Any) -> None:
        self.value = self.value if other.value is None else other.value


# -- of slots themselves ----------------------------------------------------------------------------


@dataclass(eq=False)
class CountReducer(Reducer):
    """The number of slots of each group."""

    adds = ("counts",)
    groups: Grouping | None = None
    """None: all slots are one group."""

    def start(self) -> None:
        self.counts = torch.zeros(1 if self.groups is None else len(self.groups), dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        if self.groups is None:
            self.counts += len(block)
        else:
            self.counts += torch.bincount(self.groups.codes(block), minlength=len(self.counts))


@dataclass(eq=False)
class WeightsReducer(Reducer):
    """`Σ c δ⊗k` and `Σ c δ` over the slots of each group, in float64, and their number; `Coefficient` measures c."""

    adds = ("weights", "biases", "counts")
    entry: LayerEntry
    groups: Grouping | Cells | None = None
    """None: all slots are one group."""

    def start(self) -> None:
        groups, shape = 1 if self.groups is None else len(self.groups), self.entry.matrix_shape
        self.weights = torch.zeros(groups, *shape, dtype=torch.float64)
        self.biases = torch.zeros(groups, len(self.entry.bias_names), shape[0], dtype=torch.float64)
        self.counts = torch.zeros(groups, dtype=torch.int64)
        self.initial: WeightShare | None = None
        """What is left of the initial weights, where only the sweep over all steps can tell; and"""
        self.rounding: WeightShare | None = None
        """what rounding did."""

    def update(self, block: Block, values: Factors) -> None:
        self.initial = values.initial or self.initial
        self.rounding = values.rounding or self.rounding
        codes = None if self.groups is None or not len(block) else self.groups.codes(block)
        for group, count, weight, biases in slot_sums(block, values, codes):
            self.weights[group] += weight
            self.biases[group] += biases
            self.counts[group] += count

    def merge(self, other: Any) -> None:
        super().merge(other)
        self.initial = self.initial or other.initial
        self.rounding = self.rounding or other.rounding

    @property
    def share(self) -> WeightShare:
        """What all slots, as one group, make up."""
        return WeightShare(self.weights[0], self.biases[0])


@dataclass(eq=False)
class KeySumsReducer(Reducer):
    """The sum of the keys of each group, in float64, and the smallest number in any of them."""

    adds = ("sums", "counts")
    in_features: int
    grouping: Grouping

    def start(self) -> None:
        self.sums = torch.zeros(len(self.grouping), self.in_features, dtype=torch.float64)
        self.counts = torch.zeros(len(self.grouping), dtype=torch.int64)
        self.smallest = 0.0

    def update(self, block: Block, values: Any) -> None:
        codes = self.grouping.codes(block)
        self.counts += self.grouping.counts(block)
        for keys in block.keys():  # noqa: SIM118 (not a dict)
            rows = keys.rows
            members = torch.zeros(len(self.counts), len(rows), dtype=rows.dtype)
            members.scatter_(0, codes[keys.place][None], 1.0)
            self.sums += weighted_sum(keys.times_scale(members), rows)
            self.smallest = min(self.smallest, float(rows.min()))

    def merge(self, other: Any) -> None:
        super().merge(other)
        self.smallest = min(self.smallest, other.smallest)


@dataclass(eq=False)
class KeyVisitsReducer(Reducer):
    """How often each group visited each distinct key, where keys are stored once."""

    adds = ("visits",)
    distinct_keys: int
    grouping: Grouping

    def start(self) -> None:
        self.visits = torch.zeros(len(self.grouping), self.distinct_keys, dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        flat = self.grouping.codes(block) * self.distinct_keys + block.key_numbers()
        self.visits += torch.bincount(flat, minlength=self.visits.numel()).view_as(self.visits)


@dataclass(eq=False)
class ErrorSizeReducer(Reducer):
    """Σ |c|·‖δ‖² over slots, with one c for each step; and the number of slots."""

    adds = ("sum", "count")
    per_step: Float[Tensor, "steps"]

    def start(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, block: Block, values: Any) -> None:
        scales = self.per_step[block.column("step")]
        for errors in block.errors():
            scale = errors.times_scale(errors.times_scale(scales[errors.place]))
            rows = errors.rows.amounts if isinstance(errors.rows, SparseRows) else errors.rows
            self.sum += float(rows.square().sum(dim=1).double() @ scale)
            self.count += len(errors.rows)


@dataclass(eq=False)
class KeyMomentsReducer(Reducer):
    """`Σ [k; 1] [k; 1]ᵀ` or its diagonal, in float64; where keys are stored once, how often each was visited."""

    adds = ("sum", "visits")
    shape: tuple[int, ...]
    distinct_keys: int | None
    """How many there are where each is stored once, else None."""

    def start(self) -> None:
        self.sum = torch.zeros(self.shape, dtype=torch.float64)
        self.visits = torch.zeros(self.distinct_keys or 0, dtype=torch.int64)

    def update(self, block: Block, values: Any) -> None:
        if len(self.shape) == 1:
            for keys in block.keys():  # noqa: SIM118 (not a dict)
                assert isinstance(keys.rows, SparseRows)
                squares = keys.rows.amounts.double().square()
                self.sum.index_add_(0, keys.rows.places.flatten(), squares.flatten())
                self.sum[-1] += len(keys.rows)
        elif self.distinct_keys is None:
            add_moments(self.sum, block.keys())
        else:
            self.visits += torch.bincount(block.key_numbers(), minlength=len(self.visits))

    def result(self) -> Float[Tensor, "keys_and_1 *keys_and_1"]:
        """The whole matrix, or its diagonal; what distinct keys make of `visits` must be in the sum by now."""
        moments = self.sum.clone()
        if moments.ndim > 1:
            moments[-1, :-1] = moments[:-1, -1]
        return moments


def add_moments(moments: Tensor, keys: Iterable[StoredRows], visits: Tensor | None = None) -> None:
    """Adds all but the last row, which follows by symmetry."""
    for some in keys:
        if isinstance(some.rows, SparseRows) and some.rows.places.shape[1] == 1 and visits is None:
            _add_tokens(moments, some.scaled)
            continue
        rows = dense(some.scaled)
        counts = None if visits is None else visits[some.place].to(rows.dtype)
        weighted = rows if counts is None else rows * counts[:, None]
        moments[:-1, :-1] += weighted.T @ rows
        moments[:-1, -1] += weighted.sum(dim=0)
        moments[-1, -1] += len(rows) if counts is None else counts.sum()


def _add_tokens(moments: Tensor, rows: Any) -> None:
    """The same for keys with one number each: nothing but the diagonal and the last column."""
    places, amounts = rows.places.flatten(), rows.amounts.flatten().double()
    moments.diagonal()[:-1].index_add_(0, places, amounts.square())
    moments[:-1, -1].index_add_(0, places, amounts)
    moments[-1, -1] += len(places)
