"""A whole input at once, where a layer sees it as many rows: all positions of a convolution, all steps of a sequence.

Scores and contributions are linear in what the queries add up to, so the sum over the rows is found without the number
of each row and slot.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.attention import Attention, Contributions
from spotlights.attention.grouping import Grouping
from spotlights.attention.measure import Measure
from spotlights.attention.scan import SweptValues, Values


class WholeScores(Measure):
    """The scores of all rows added up: what a slot's key has in common with all of them together."""

    what = "score"

    def __init__(self, rows: Attention) -> None:
        super().__init__(rows.view, rows.layer, rows.queries[:1])
        self._rows = rows

    @property
    def note(self) -> str | None:
        return _noted(self._rows)

    def values(self, chosen: slice) -> Values:
        rows = self._rows
        if rows.kernel == "dot":  # a sum of products is the product with the sum
            return rows._values_of(rows.queries.sum(dim=0, keepdim=True))
        each = rows._values_of(rows.queries)
        return lambda block: each(block).sum(dim=0, keepdim=True)


class WholeContributions(Contributions):
    """The contributions through all rows added up: what a slot adds to the number of interest through this layer."""

    def __init__(self, rows: Contributions) -> None:
        super().__init__(
            rows.view,
            rows.layer,
            rows.queries[:1],
            rows._directions[:1],
            exact=rows.exact,
            unrolled=rows._unrolled,
        )
        self.what = rows.what
        self._rows = rows

    @property
    def note(self) -> str | None:
        return _noted(self._rows)

    def values(self, chosen: slice) -> Values | SweptValues:
        return self._unrolled.contributions(self._rows.directed(), summed=True)

    def totals_by_input(
        self, grouping: Grouping, owners: Int64[Tensor, "queries"], inputs: int
    ) -> tuple[Float[Tensor, "inputs groups"], Int64[Tensor, "groups"]] | None:
        every = torch.zeros(len(self._rows.queries), dtype=torch.int64)
        return self._rows.totals_by_input(grouping, every, inputs)

    @property
    def initial(self) -> Float[Tensor, "1"]:
        return self._rows.initial.sum(dim=0, keepdim=True)


def _noted(rows: Measure) -> str | None:
    count = len(rows.queries)
    added = f"added up over the {count:,} rows of the input" if count > 1 else None
    return "; ".join(note for note in (rows.note, added) if note) or None
