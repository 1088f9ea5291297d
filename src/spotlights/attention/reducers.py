"""Reducers: every question as a small monoid, fed by one scan over blocks of slots.

A reducer starts empty, is updated with blocks in the order of their slots, and merges with another one of
its kind. That is all that a thread, a process or a machine needs to answer its share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping
from spotlights.dual_form import outer_sum
from spotlights.memory.blocks import Block


class Reducer(ABC):
    """Adds up what blocks of slots say to a question."""

    @abstractmethod
    def fresh(self) -> Reducer:
        """An empty reducer for the same question."""

    @abstractmethod
    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        """Takes one block. Blocks come in ascending order of slots."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Takes what another reducer of the same kind has seen."""


class LargestReducer(Reducer):
    """The slots with the largest values, per query and group; the earlier of two equal slots wins."""

    def __init__(self, k: int, grouping: Grouping | None) -> None:
        self._k = k
        self._grouping = grouping
        groups = 1 if grouping is None else len(grouping)
        self._values: list[Tensor | None] = [None] * groups
        self._slots: list[Tensor | None] = [None] * groups

    def fresh(self) -> LargestReducer:
        return type(self)(self._k, self._grouping)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        slots = block.slots
        if self._grouping is None:
            self._add(0, values, slots)
            return
        for group, members in enumerate(self._grouping.members(block)):
            if len(members):
                self._add(group, values.index_select(1, members), slots[members])

    def _add(self, group: int, values: Float[Tensor, "queries rows"], slots: Int64[Tensor, "rows"]) -> None:
        held = self._values[group]
        if held is not None and held.shape[1] == self._k:
            # Later slots lose a tie, so only strictly larger values can get in.
            better = (values > held.amin(dim=1, keepdim=True)).any(dim=0).nonzero().flatten()
            if not len(better):
                return
            values, slots = values.index_select(1, better), slots[better]
        self._join(group, values, slots.expand(len(values), -1))

    def _join(
        self,
        group: int,
        values: Float[Tensor, "queries rows"],
        slots: Int64[Tensor, "queries rows"],
    ) -> None:
        held_values, held_slots = self._values[group], self._slots[group]
        if held_values is not None and held_slots is not None:
            values = torch.cat([held_values, values], dim=1)
            slots = torch.cat([held_slots, slots], dim=1)
        if values.shape[1] > self._k:
            kept = largest_first_in_order(values, self._k)
            values, slots = values.gather(1, kept), slots.gather(1, kept)
        self._values[group], self._slots[group] = values.clone(), slots.clone()

    def merge(self, other: LargestReducer) -> None:
        for group, (values, slots) in enumerate(zip(other._values, other._slots, strict=True)):
            if values is None or slots is None:
                continue
            k, self._k = self._k, self._k + values.shape[1]  # join first, cut after sorting by slot
            self._join(group, values, slots)
            self._k = k
            joined, joined_slots = self._values[group], self._slots[group]
            assert joined is not None
            assert joined_slots is not None
            order = joined_slots.argsort(dim=1)
            self._values[group], self._slots[group] = None, None
            self._join(group, joined.gather(1, order), joined_slots.gather(1, order))

    def result(self, queries: int) -> tuple[Float[Tensor, "queries groups k"], Int64[Tensor, "queries groups k"]]:
        """Values and slots, largest first; where a group has fewer, the slot is -1 and the value NaN."""
        width = max((v.shape[1] for v in self._values if v is not None), default=0)
        values = torch.full((queries, len(self._values), width), float("nan"), dtype=torch.float64)
        slots = torch.full((queries, len(self._values), width), -1)
        for group, (held, held_slots) in enumerate(zip(self._values, self._slots, strict=True)):
            if held is not None and held_slots is not None:
                ordered, order = held.sort(dim=1, descending=True, stable=True)
                values[:, group, : held.shape[1]] = ordered.double()
                slots[:, group, : held.shape[1]] = held_slots.gather(1, order)
        return values, slots


def largest_first_in_order(values: Float[Tensor, "queries rows"], k: int) -> Int64[Tensor, "queries k"]:
    """Where the k largest values of each row are, in ascending order; the first of equal ones wins."""
    top, where = values.topk(k, dim=1)
    ambiguous = (values >= top[:, -1:]).sum(dim=1) > k
    if ambiguous.any():
        rows = ambiguous.nonzero().flatten()
        where[rows] = values[rows].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return where.sort(dim=1).values


class TotalsReducer(Reducer):
    """Sums per query and group, in float64, and the number of slots in each group."""

    def __init__(self, queries: int, grouping: Grouping, *, absolute: bool) -> None:
        self._grouping = grouping
        self._absolute = absolute
        self.sums = torch.zeros(queries, len(grouping), dtype=torch.float64)
        self.counts = torch.zeros(len(grouping), dtype=torch.int64)

    def fresh(self) -> TotalsReducer:
        return type(self)(len(self.sums), self._grouping, absolute=self._absolute)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        codes = self._grouping.codes(block)
        if self._absolute:
            values = values.abs()
        self.counts += self._grouping.counts(block)
        if len(values) > 1 and len(self.counts) <= _FEW_GROUPS:
            members = values.new_zeros(len(codes), len(self.counts))
            members.scatter_(1, codes[:, None], 1.0)
            self.sums += values @ members
        else:
            self.sums.index_add_(1, codes, values.double())

    def merge(self, other: TotalsReducer) -> None:
        self.sums += other.sums
        self.counts += other.counts


_FEW_GROUPS = 256


class SampledTotalsReducer(TotalsReducer):
    """Of a sample, also what the standard errors of the sums follow from: `Sample.standard_error` says why.

    Takes whole steps alone (`WholeSteps`), where not all steps were kept.
    """

    def __init__(self, queries: int, grouping: Grouping, *, absolute: bool) -> None:
        super().__init__(queries, grouping, absolute=absolute)
        self.squares = torch.zeros_like(self.sums)
        self.step_squares = torch.zeros_like(self.sums)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        super().update(block, values)
        values = values.abs().double() if self._absolute else values.double()
        codes, groups = self._grouping.codes(block), len(self.counts)
        self.squares.index_add_(1, codes, values.square())
        cells, cell = (block.column("step") * groups + codes).unique(return_inverse=True)
        sums = values.new_zeros(len(values), len(cells)).index_add_(1, cell, values)
        self.step_squares.index_add_(1, cells % groups, sums.square_())

    def merge(self, other: TotalsReducer) -> None:
        assert isinstance(other, SampledTotalsReducer)
        super().merge(other)
        self.squares += other.squares
        self.step_squares += other.step_squares


class ScoresReducer(Reducer):
    """All values, as they are."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, Tensor, Tensor]] = []

    def fresh(self) -> ScoresReducer:
        return type(self)()

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        slots = block.slots
        self._blocks.append((int(slots[0]), slots, values))

    def merge(self, other: ScoresReducer) -> None:
        self._blocks += other._blocks

    def result(self, queries: int) -> tuple[Float[Tensor, "queries slots"], Int64[Tensor, "slots"]]:
        if not self._blocks:
            return torch.zeros(queries, 0), torch.zeros(0, dtype=torch.int64)
        blocks = sorted(self._blocks, key=lambda block: block[0])
        return torch.cat([v for *_, v in blocks], dim=1), torch.cat([s for _, s, _ in blocks])


class LogSumReducer(Reducer):
    """The logarithm of the sum of exponentials: what a softmax divides by."""

    def __init__(self, queries: int) -> None:
        self.total = torch.full((queries,), -torch.inf, dtype=torch.float64)

    def fresh(self) -> LogSumReducer:
        return type(self)(len(self.total))

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        self.total = torch.logaddexp(self.total, values.double().logsumexp(dim=1))

    def merge(self, other: LogSumReducer) -> None:
        self.total = torch.logaddexp(self.total, other.total)


class PartsReducer(Reducer):
    """`Σ c δ⊗k` and `Σ c δ`: the part of weight and bias that some slots make up, in float64."""

    def __init__(
        self,
        shape: tuple[int, int],
        weight: Float[Tensor, "steps"],
        bias: Float[Tensor, "*biases steps"],
        *,
        groups: int = 1,
    ) -> None:
        self._shape = shape
        self._per_step = weight, bias
        self._groups = groups
        self.weight = torch.zeros(shape, dtype=torch.float64)
        self.bias = torch.zeros(*bias.shape[:-1], shape[0], dtype=torch.float64)

    def fresh(self) -> PartsReducer:
        return type(self)(self._shape, *self._per_step, groups=self._groups)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        steps = block.column("step")
        weight, bias = (per_step[..., steps] for per_step in self._per_step)
        for keys, errors in zip(block.keys(), block.errors(), strict=True):
            of_error, of_key = weight[errors.place], bias[..., errors.place]
            if errors.scale is not None:
                of_error, of_key = of_error * errors.scale, of_key * errors.scale
            if keys.scale is not None:
                of_error = of_error * keys.scale
            rows = errors.rows
            self.weight += outer_sum(rows * of_error.to(rows.dtype)[:, None], keys.rows, self._groups)
            self.bias += of_key @ rows.double()

    def merge(self, other: PartsReducer) -> None:
        self.weight += other.weight
        self.bias += other.bias


class OutputReducer(Reducer):
    """`Σ value·(key·query)`: what a layer's slots add to its output, in float64."""

    def __init__(
        self,
        queries: int,
        out_features: int,
        weight: Float[Tensor, "steps"],
        bias: Float[Tensor, "steps"],
    ) -> None:
        self._per_step = weight, bias
        self.output = torch.zeros(queries, out_features, dtype=torch.float64)

    def fresh(self) -> OutputReducer:
        queries, out_features = self.output.shape
        return type(self)(queries, out_features, *self._per_step)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        steps = block.column("step")
        weight, bias = (per_step[steps].to(values.dtype) for per_step in self._per_step)
        weights = values * weight + bias
        for errors in block.errors():
            some = weights[:, errors.place]
            self.output += (some if errors.scale is None else some * errors.scale) @ errors.rows

    def merge(self, other: OutputReducer) -> None:
        self.output += other.output
