"""Questions: what can be asked about the values of all slots. Several can share one scan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.attention.reducers import LargestReducer, Reducer, SampledTotalsReducer, TotalsReducer
from spotlights.attention.results import Label, Top, Totals
from spotlights.errors import SettingError
from spotlights.memory.blocks import Block

if TYPE_CHECKING:
    from spotlights.attention.measure import Measure


class Question(ABC):
    """Something to ask about the values of all slots. Several can share one scan."""

    @abstractmethod
    def reducer(self, measure: Measure, queries: int) -> Reducer:
        """An empty reducer."""

    @abstractmethod
    def answer(self, measure: Measure, parts: list[Any]) -> Any:
        """The result, from the reducers of consecutive batches of queries."""


@dataclass(frozen=True)
class AskTop(Question):
    """Which slots have the largest values?"""

    k: int
    per: str | None = None
    largest: bool = True

    def reducer(self, measure: Measure, queries: int) -> Reducer:
        if self.k < 1:
            raise SettingError(f"top({self.k}): ask for at least one slot.")
        grouping = None if self.per is None else measure.grouping(self.per)
        return LargestReducer(self.k, grouping) if self.largest else _Smallest(self.k, grouping)

    def answer(self, measure: Measure, parts: list[Any]) -> Top:
        pairs = [part.result(queries) for part, queries in parts]
        values, slots = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        groups: list[Label] = [None] if self.per is None else measure.grouping(self.per).labels
        return Top(
            measure.layer.name,
            measure.what,
            values,
            slots,
            measure.columns_at(slots),
            self.per,
            groups,
            note=measure.note,
            largest=self.largest,
        )


class _Smallest(LargestReducer):
    """The slots with the smallest values, smallest first."""

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        super().update(block, -values)

    def result(self, queries: int) -> tuple[Tensor, Tensor]:
        values, slots = super().result(queries)
        return -values, slots


@dataclass(frozen=True)
class AskTotals(Question):
    """How large is the sum over each group of slots?"""

    column: str
    absolute: bool = False
    bins: int | None = None

    def reducer(self, measure: Measure, queries: int) -> Reducer:
        self.check(measure)
        grouping = measure.grouping(self.column, self.bins)
        kind = TotalsReducer if measure.sample is None else SampledTotalsReducer
        return kind(queries, grouping, absolute=self.absolute)

    def answer(self, measure: Measure, parts: list[Any]) -> Totals:
        sums, counts = torch.cat([part.sums for part, _ in parts]), parts[0][0].counts
        if measure.sample is None:
            return self.totals(measure, sums, counts)
        squares, of_steps = (torch.cat([getattr(p, n) for p, _ in parts]) for n in ("squares", "step_squares"))
        estimate = self.totals(measure, measure.sample.total(sums), counts)
        return replace(estimate, standard_errors=measure.sample.standard_error(squares, of_steps))

    def check(self, measure: Measure) -> None:
        """Refuses what a folded memory cannot answer."""
        if self.absolute:
            measure.view.reader.need_visits(
                "the size of each visit's score, which a sum of |score| adds up", "Ask for plain totals"
            )

    def totals(self, measure: Measure, sums: Tensor, counts: Tensor) -> Totals:
        return Totals(
            measure.layer.name,
            measure.what,
            self.column,
            sums,
            counts,
            measure.grouping(self.column, self.bins).labels,
            absolute=self.absolute,
            binned=self.bins is not None,
            note=measure.note,
        )
