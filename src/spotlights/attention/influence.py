"""Influence: an estimate of what leaving training examples out would do to an answer.

A contribution says what the trained layer is made of. It does not say what training without an example would have
led to, because the other examples would have taught much of the same. Influence is the contribution with whitened
queries (`whitening.py`), added up over an example's visits and over layers. Adam's preconditioner, and those of its
kin, are left out: the others make up for an absent example through the same one. How well influence foretells real
retraining, and where it does not, is measured in docs/truth.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from spotlights.attention.attention import Contributions
from spotlights.attention.measure import Measure, View
from spotlights.attention.per_input import PerInput
from spotlights.attention.unrolled import unroll_plainly
from spotlights.attention.whitening import key_moments, whitened
from spotlights.errors import SettingError
from spotlights.memory.layer_reader import LayerReader

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
        rows: float,
    ) -> None:
        steps = unroll_plainly(view.reader, layer.name, view.until)  # refuses before the long part, if it must
        moment = key_moments(view.reader)[layer.name]
        bias = bool(set(layer.entry.bias_names) & set(layer.entry.trained))
        keys, ones = whitened(queries, moment, damping=damping, bias=bias, rows=rows)
        super().__init__(view, layer, keys, directions, exact=False, unrolled=steps)
        self._bias_queries = ones
        self.damping = damping

    @property
    def note(self) -> str:
        storage = "" if self.layer.storage.name not in ("float16", "int8") else f"; stored as {self.layer.storage.name}"
        storage += "" if self.sample is None else f"; from a sample: {self.sample}, hence ±, at most"
        return (
            "an estimate of what leaving examples out would take away: ranks and signs count, "
            f"sizes are relative (λ = {self.damping:g}{storage})"
        )


class Influence(PerInput):
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
        super().__init__(parts, owners, inputs=inputs)
        self._left_out = left_out

    @property
    def note(self) -> str | None:
        """What a reader of the numbers must know."""
        note = super().note
        return f"{note}; not estimated through {', '.join(self._left_out)}" if self._left_out else note

    def summed(self) -> Influence:
        """The influence on the sum over all inputs: what a whole validation set would lose or gain."""
        return Influence(
            self._parts, [torch.zeros_like(owners) for owners in self._owners], inputs=1, left_out=self._left_out
        )

    def __repr__(self) -> str:
        layers = ", ".join(part.layer.name for part in self._parts)
        return f"Influence({layers}: {self._inputs} inputs; {self.note})"
