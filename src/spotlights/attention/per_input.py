"""Values added up over the rows of each input, and over layers: one number for each input and group of slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.attention import Contributions
from spotlights.attention.measure import MAX_SCORES_BYTES, Measure, ask, top_of
from spotlights.attention.questions import AskTotals
from spotlights.attention.results import Label, Top, Totals
from spotlights.errors import SettingError, TooLargeError


class PerInput:
    """The sum of some layers' values for each input; where a layer has several rows for an input, of all of them."""

    def __init__(self, parts: Sequence[Measure], owners: Sequence[Int64[Tensor, "_"]], *, inputs: int) -> None:
        """
        Args:
            parts: the values of each layer.
            owners: which input each query of a part belongs to.
            inputs: how many there are.
        """
        self._parts = parts
        self._owners = owners
        self._inputs = inputs
        self._totals: dict[tuple[str, int | None], Totals] = {}

    def __len__(self) -> int:
        return self._inputs

    @property
    def note(self) -> str | None:
        """What a reader of the numbers must know."""
        return self._parts[0].note

    def totals(self, column: str, *, bins: int | None = None) -> Totals:
        """The sum over the slots of each group: a class, a source, an example.

        Args:
            column: "label", "source", "example" or any other column.
            bins: that many ranges of a numerical column instead of its single values.
        """
        if (column, bins) not in self._totals:
            self._totals[column, bins] = self._added_up(column, bins)
        return self._totals[column, bins]

    def _added_up(self, column: str, bins: int | None) -> Totals:
        groups = max(len(part.grouping(column, bins)) for part in self._parts)
        self._check_size(groups, self._inputs)
        found = [self._of_layer(*part, column, bins) for part in zip(self._parts, self._owners, strict=True)]
        labels: dict[Label, int] = {}
        for each in found:
            for label in each.groups:
                labels.setdefault(label, len(labels))
        values = torch.zeros(self._inputs, len(labels), dtype=torch.float64)
        counts = torch.zeros(len(labels), dtype=torch.int64)
        # Of a sample: the errors of rows and layers may go together, so that their sum is what they are at most.
        errors = None if any(each.standard_errors is None for each in found) else torch.zeros_like(values)
        for each in found:
            where = torch.tensor([labels[label] for label in each.groups], dtype=torch.int64)
            values[:, where] += each.values
            if errors is not None and each.standard_errors is not None:
                errors[:, where] += each.standard_errors
            counts[where] = torch.maximum(counts[where], each.counts)
        layer = self._parts[0].layer.name if len(self._parts) == 1 else "all layers"
        named = replace(found[0], layer=layer, groups=list(labels), note=self.note)
        return replace(named, values=values, counts=counts, standard_errors=errors)

    def _of_layer(self, part: Measure, owners: Int64[Tensor, "_"], column: str, bins: int | None) -> Totals:
        question, grouping = AskTotals(column, bins=bins), part.grouping(column, bins)
        if isinstance(part, Contributions):
            quick = part.totals_by_input(grouping, owners, self._inputs)
            if quick is not None:
                return question.totals(part, *quick)
        self._check_size(len(grouping), len(part.queries))
        ((found,),) = ask([part], [question])
        none = torch.zeros(self._inputs, len(grouping), dtype=torch.float64)
        errors = None if found.standard_errors is None else none.index_add(0, owners, found.standard_errors)
        return replace(found, values=none.index_add(0, owners, found.values), standard_errors=errors)

    def _check_size(self, groups: int, queries: int) -> None:
        size = 8 * groups * queries
        if size > MAX_SCORES_BYTES:
            raise TooLargeError(
                f"The {self._parts[0].what} of {groups:,} groups on {queries:,} inputs (or rows of them) would take "
                f"{size / 2**30:.1f} GB. "
                "Ask about fewer inputs at a time, or about larger groups, such as totals('label')."
            )

    def top(self, k: int = 10, *, by: str = "example") -> Top:
        """The k examples with the largest sums: without which the number would lose most."""
        return self._top(k, by, largest=True)

    def bottom(self, k: int = 10, *, by: str = "example") -> Top:
        """The k examples with the smallest sums: without which the number would gain most."""
        return self._top(k, by, largest=False)

    def _top(self, k: int, by: str, *, largest: bool) -> Top:
        if k < 1:
            raise SettingError(f"top({k}): ask for at least one {by}.")
        return top_of(self._parts[0], self.totals(by), k, largest)

    def total(self) -> Float[Tensor, "inputs"]:
        """The sum over all slots of the view: `memory.where(source="fashion").attend(…)`."""
        return self.totals("step", bins=1).values.sum(dim=1)

    def numpy(self) -> Any:
        """Of shape (inputs, examples), in the order of `totals("example").groups`."""
        return self.totals("example").numpy()
