"""Influence: an estimate of what leaving training examples out would do to an answer.

A contribution says what the trained layer is made of. It does not say what training without an example would have
led to, because the other examples would have taught much of the same. Influence is the contribution with whitened
queries (`whitening.py`), added up over an example's visits and over layers. How well it foretells real
retraining, and where it does not, is measured in docs/truth.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.attention import Contributions
from spotlights.attention.measure import MAX_SCORES_BYTES, Measure, View, ask, top_of
from spotlights.attention.questions import AskTotals
from spotlights.attention.results import Label, Top, Totals
from spotlights.attention.whitening import key_moments, whitened
from spotlights.errors import SettingError, TooLargeError
from spotlights.memory.reader import LayerReader

DAMPING = 0.3
"""λ, as chosen on one half of the tests and subsets of one setting (docs/truth.md)."""


class LayerInfluence(Contributions):
    """Contributions of one layer's slots, for whitened queries."""

    what = "influence"

    def __init__(
        self,
        view: View,
        layer: LayerReader,
        queries: Float[Tensor, "queries in_features"],
        directions: Float[Tensor, "queries out_features"],
        *,
        damping: float,
    ) -> None:
        view.unrolled(layer.name)  # refuses before the long part, if it must
        moment = key_moments(view.reader)[layer.name]
        keys, ones = whitened(queries, moment, damping=damping, bias="bias" in layer.entry.trained)
        super().__init__(view, layer, keys, directions, exact=False)
        self._bias_queries = ones
        self.damping = damping

    @property
    def note(self) -> str:
        storage = "" if self.layer.storage.name not in ("float16", "int8") else f"; stored as {self.layer.storage.name}"
        return (
            "an estimate of what leaving examples out would take away: ranks and signs count, "
            f"sizes are relative (λ = {self.damping:g}{storage})"
        )


class Influence:
    """What leaving examples out would take away from a number of interest: an estimate, for each input.

    Positive: without the example the number would be smaller. Made by `Spotlights.influence` (all layers, the
    better estimate) and `Attention.influence` (one layer's share).
    """

    def __init__(
        self,
        parts: Sequence[Measure],
        owners: Sequence[Int64[Tensor, "_"]],
        *,
        inputs: int,
        left_out: Sequence[str] = (),
    ) -> None:
        """
        Args:
            parts: the influence through each layer.
            owners: which input each query of a part belongs to.
            inputs: how many there are.
            left_out: the recorded layers through which it is not estimated.
        """
        if not parts:
            raise SettingError("No recorded layer was used for these inputs: there is nothing to estimate from.")
        self._parts = parts
        self._owners = owners
        self._inputs = inputs
        self._left_out = left_out
        self._totals: dict[tuple[str, int | None], Totals] = {}

    def __len__(self) -> int:
        return self._inputs

    @property
    def note(self) -> str | None:
        """What a reader of the numbers must know."""
        note = self._parts[0].note
        return f"{note}; not estimated through {', '.join(self._left_out)}" if self._left_out else note

    def totals(self, column: str, *, bins: int | None = None) -> Totals:
        """The influence of leaving out each group together: a class, a source, an example.

        Args:
            column: "label", "source", "example" or any other column.
            bins: that many ranges of a numerical column instead of its single values.
        """
        if (column, bins) not in self._totals:
            self._totals[column, bins] = self._added_up(column, bins)
        return self._totals[column, bins]

    def _added_up(self, column: str, bins: int | None) -> Totals:
        groups = max(len(part.grouping(column, bins)) for part in self._parts)
        size = 8 * groups * max(self._inputs, *(len(part.queries) for part in self._parts))
        if size > MAX_SCORES_BYTES:
            raise TooLargeError(
                f"The influence of {groups:,} groups on {self._inputs:,} inputs would take {size / 2**30:.1f} GB. "
                "Ask about fewer inputs at a time, or about larger groups, such as totals('label')."
            )
        found = [answers[0] for answers in ask(self._parts, [AskTotals(column, bins=bins)])]
        labels: dict[Label, int] = {}
        for each in found:
            for label in each.groups:
                labels.setdefault(label, len(labels))
        values = torch.zeros(self._inputs, len(labels), dtype=torch.float64)
        counts = torch.zeros(len(labels), dtype=torch.int64)
        for owners, each in zip(self._owners, found, strict=True):
            where = torch.tensor([labels[label] for label in each.groups], dtype=torch.int64)
            mine = torch.zeros(self._inputs, len(each.groups), dtype=torch.float64)
            values[:, where] += mine.index_add_(0, owners, each.values)
            counts[where] = torch.maximum(counts[where], each.counts)
        layer = self._parts[0].layer.name if len(self._parts) == 1 else "all layers"
        return replace(found[0], layer=layer, values=values, counts=counts, groups=list(labels), note=self.note)

    def top(self, k: int = 10, *, by: str = "example") -> Top:
        """The k examples without which the number would lose most."""
        return self._top(k, by, largest=True)

    def bottom(self, k: int = 10, *, by: str = "example") -> Top:
        """The k examples without which the number would gain most."""
        return self._top(k, by, largest=False)

    def _top(self, k: int, by: str, *, largest: bool) -> Top:
        if k < 1:
            raise SettingError(f"top({k}): ask for at least one {by}.")
        return top_of(self._parts[0], self.totals(by), k, largest)

    def total(self) -> Float[Tensor, "inputs"]:
        """The influence of leaving out all slots of the view: `memory.where(source="fashion").attend(…)`."""
        return self.totals("step", bins=1).values.sum(dim=1)

    def summed(self) -> Influence:
        """The influence on the sum over all inputs: what a whole validation set would lose or gain."""
        return Influence(
            self._parts, [torch.zeros_like(owners) for owners in self._owners], inputs=1, left_out=self._left_out
        )

    def numpy(self) -> Any:
        """Of shape (inputs, examples), in the order of `totals("example").groups`."""
        return self.totals("example").numpy()

    def __repr__(self) -> str:
        layers = ", ".join(part.layer.name for part in self._parts)
        return f"Influence({layers}: {self._inputs} inputs; {self.note})"
