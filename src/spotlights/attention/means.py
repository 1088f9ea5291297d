"""Means and spread: how large a slot's value is on average in each group, and how much it varies there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.grouping import Grouping
from spotlights.attention.measure import Measure
from spotlights.attention.questions import Question
from spotlights.attention.reducers import Reducer
from spotlights.attention.results import Label
from spotlights.attention.tables import Printable, build
from spotlights.memory.blocks import Block


@dataclass(frozen=True, repr=False)
class Means(Printable):
    """The mean value of each group's slots, and the standard deviation over them."""

    layer: str
    what: str
    column: str
    values: Float[Tensor, "queries groups"]
    spread: Float[Tensor, "queries groups"]
    counts: Int64[Tensor, "groups"]
    groups: list[Label]
    note: str | None = None

    def __len__(self) -> int:
        return len(self.values)

    def rows(self, query: int = 0) -> Iterator[dict[str, Any]]:
        """One query's answer, row by row."""
        for group, label in enumerate(self.groups):
            yield {
                self.column: label,
                f"mean {self.what}": float(self.values[query, group]),
                "spread": float(self.spread[query, group]),
                "slots": int(self.counts[group]),
            }

    def table(self) -> Any:
        rows = list(self.rows(0))
        names = [self.column, f"mean {self.what}", "spread", "slots"]
        title = f"mean {self.what} by {self.column} in {self.layer}"
        return build(title, names, ([row[name] for name in names] for row in rows), self.note)


@dataclass(frozen=True)
class AskMeans(Question):
    """How large are the values of each group's slots on average, and how spread?"""

    column: str

    def reducer(self, measure: Measure, queries: int) -> Reducer:
        measure.view.reader.need_visits(
            "the score of each visit, whose mean and spread are asked for", "Ask for totals"
        )
        return MeansReducer(queries, measure.grouping(self.column))

    def answer(self, measure: Measure, parts: list[Any]) -> Means:
        moments = [part for part, _ in parts]
        return Means(
            measure.layer.name,
            measure.what,
            self.column,
            torch.cat([part.means for part in moments]),
            torch.cat([(part.squares / part.counts.clamp_min(1)).sqrt() for part in moments]),
            moments[0].counts,
            measure.grouping(self.column).labels,
            note=measure.note,
        )


class MeansReducer(Reducer):
    """Means and sums of squared deviations per query and group, in float64, joined without cancellation."""

    def __init__(self, queries: int, grouping: Grouping) -> None:
        self._grouping = grouping
        self.means = torch.zeros(queries, len(grouping), dtype=torch.float64)
        self.squares = torch.zeros_like(self.means)
        self.counts = torch.zeros(len(grouping), dtype=torch.int64)

    def fresh(self) -> MeansReducer:
        return MeansReducer(len(self.means), self._grouping)

    def update(self, block: Block, values: Float[Tensor, "queries rows"]) -> None:
        codes = self._grouping.codes(block)
        other = self.fresh()
        other.counts += torch.bincount(codes, minlength=len(self.counts))
        wide = values.double()
        other.means.index_add_(1, codes, wide).div_(other.counts.clamp_min(1))
        other.squares.index_add_(1, codes, (wide - other.means[:, codes]).square_())
        self.merge(other)

    def merge(self, other: MeansReducer) -> None:
        together = (self.counts + other.counts).clamp_min(1)
        share = other.counts.double() / together  # a quotient of integers alone would be float32
        apart = other.means - self.means
        self.squares += other.squares + apart.square() * (self.counts * share)
        self.means += apart * share
        self.counts += other.counts
