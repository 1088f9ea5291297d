"""Influence: an estimate of what leaving training examples out would do to an answer.

A contribution says what the trained layer is made of. It does not say what training without an example would have
led to, because the other examples would have taught much of the same. Influence is the contribution with whitened
queries, added up over an example's visits and over layers. Preconditioners, as Adam's, are left out:
the other examples make up for an absent one through the same preconditioner. How well influence predicts real
retraining, and where not, is measured in docs/truth.md.

A whitened query is `(C + λ·mean(diag C)·I)⁻¹ [q; 1]`, with `C = E[[k; 1] [k; 1]ᵀ]` over the memory's slots. Directions
that all keys share say little about a single example: the other examples teach the same there. Whitening divides these
directions out, as an influence function does with the curvature of the loss; the keys' part of the curvature is enough
here. The score `k·q` becomes `k·q̃`: whatever computes scores computes these too. Where a layer has several rows for an
input, as a convolution has, the curvature adds up over them, and so does C.

The other part of the curvature, that of the layer's output, is taken as one number: the mean square of the layer's
errors, weighted as their steps were. Each layer's share is divided by it (`balance`). Without that, a layer would count
by its scale: an embedding that starts at 0.02 has errors fifty times as large as one that starts at 1, and computes
the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.errors import SettingError, TooLargeError
from spotlights.layers import ParameterAdapter
from spotlights.memory.blocks import Everything, as_of
from spotlights.memory.format.manifest import LayerEntry
from spotlights.memory.layer_reader import LayerReader
from spotlights.query.coefficients import StepNumbers, unroll_plainly
from spotlights.query.contraction import DirectedQueries
from spotlights.query.contributions import Contributions
from spotlights.query.engine import View
from spotlights.query.joint import JointInfluence
from spotlights.query.measured import MAX_VALUES_BYTES, OverLayers
from spotlights.query.reducers import ErrorSizeReducer
from spotlights.query.whitening import whitened_queries
from spotlights.results.answers import Totals
from spotlights.sparse_rows import Numbers

if TYPE_CHECKING:
    from spotlights.api import Memory

RULES = ("whitened", "joint", "both")
DAMPING = 0.3
"""λ, as chosen on one half of the tests and subsets of one setting (docs/truth.md)."""


def unsupported_influence(entry: LayerEntry) -> str | None:
    """Why there is no estimate through a layer; None if there is."""
    if entry.kind == ParameterAdapter.kind:
        return "its slots belong to no example"
    if entry.turned:
        return "its weight is shared by two kinds of layers"
    if entry.groups > 1:
        return f"it maps {entry.groups} parts of its keys apart from each other"
    return None


class LayerInfluence(Contributions):
    """One layer's share of an influence: contributions of its slots, for whitened queries."""

    what = "influence"

    def __init__(
        self,
        view: View,
        recorded: LayerReader,
        queries: Numbers,
        directions: Float[Tensor, "queries out_features"],
        *,
        inputs: tuple[int, ...] | None = None,
        damping: float | None = None,
        differs: str | None = None,
        balance: bool = True,
    ) -> None:
        """`inputs`: how many of the queries each input has, None for one; `differs`: how the model differs from the
        memory."""
        self.damping = DAMPING if damping is None else damping
        steps = unroll_plainly(view.reader, recorded.name, view.until)  # refuses before the long part, if it must
        rows = 1.0 if inputs is None else len(directions) / len(inputs)
        keys, ones = whitened_queries(view, recorded.name, queries, damping=self.damping, rows=rows)
        if balance:
            directions = directions / error_size(view, recorded.name, steps)
        asked = DirectedQueries(keys, directions, ones)
        super().__init__(view, recorded, asked, adds_up=False, unrolled=steps, differs=differs, inputs=inputs)

    @property
    def note(self) -> str:
        storage = self.recorded.storage
        more = f"; stored as {storage.name}" if storage.lossy else ""
        more += "" if self.sample is None else f"; from a sample: {self.sample}, hence ±, at most"
        return (
            "an estimate of what leaving examples out would take away: ranks and signs count, "
            f"sizes are relative (λ = {self.damping:g}{more})"
        ) + ("" if self._differs is None else f"; {self._differs}")


class Influence(OverLayers):
    """What leaving examples out would take away from a number of interest: an estimate, for each input.

    Positive: without the example the number would be smaller. Made by `Spotlights.influence` (all layers, the
    better estimate) and `Attention.influence` (one layer's share).
    """

    what = "influence"
    signed = True

    def __init__(
        self,
        parts: Sequence[Contributions | JointInfluence],
        *,
        left_out: Sequence[str] = (),
        too_large: bool = False,
    ) -> None:
        """
        Args:
            parts: the influence through each layer, or the joint estimate, or both; their values are added up.
            left_out: the recorded layers through which influence is not estimated.
            too_large: whether the joint estimate is missing because it would take long.
        """
        if not parts:
            raise SettingError("No recorded layer was used for these inputs: there is nothing to estimate from.")
        super().__init__(parts)
        self._parts: Sequence[Contributions | JointInfluence] = parts
        self._left_out = left_out
        self._too_large = too_large

    def __len__(self) -> int:
        return len(self._parts[0])

    @property
    def note(self) -> str | None:
        notes = [self._parts[0].note]
        if self._mixed:
            notes += [self._parts[-1].note, "both estimates with the same spread over the training examples"]
        if self._too_large:
            notes.append('without the joint estimate, which would take long (rule="both")')
        if self._left_out:
            notes.append(f"not estimated through {', '.join(self._left_out)}")
        notes.append(self._parts[0].view.reader.manifest.slots_note)
        return "; ".join(dict.fromkeys(filter(None, notes)))

    @property
    def rule(self) -> str:
        """What the estimate is made of: one of `RULES`."""
        return "both" if self._mixed else "joint" if isinstance(self._parts[0], JointInfluence) else "whitened"

    @property
    def _mixed(self) -> bool:
        return len({isinstance(part, JointInfluence) for part in self._parts}) > 1

    def summed(self) -> Influence:
        """The influence on the sum over all inputs: what a whole validation set would lose or gain."""
        return self._of([part.whole() for part in self._parts])

    def keep(self) -> Influence:
        """The influence on one input, with the values of all slots computed once."""
        if len(self) != 1:
            raise SettingError(f"keep() is for one input, and there are {len(self)}. Ask about one at a time.")
        return self._of([part.keep() for part in self._parts])

    def within(self, memory: Memory) -> Influence:
        """The same kept values, for the slots of another view of the memory."""
        return self.seen_from(memory.view)

    def seen_from(self, view: View) -> Influence:
        """The same for the slots of another view, input by input."""
        return self._of([part.seen_from(view) for part in self._parts])

    def _of(self, parts: Sequence[Contributions | JointInfluence]) -> Influence:
        return Influence(parts, left_out=self._left_out, too_large=self._too_large)

    @property
    def joint(self) -> JointInfluence | None:
        """The joint estimate that this one is made of, if it is."""
        return next((part for part in self._parts if isinstance(part, JointInfluence)), None)

    @property
    def loss(self) -> str | None:
        """What the joint estimate takes the loss for: "classes", "squared" or "tokens"."""
        return None if self.joint is None else self.joint.loss

    def _of_layers(self, column: str, bins: int | None) -> list[Totals]:
        groups = max(len(part.grouping(column, bins)) for part in self._parts)
        size = 8 * groups * len(self)
        if size > MAX_VALUES_BYTES:
            raise TooLargeError(
                f"The influence of {groups:,} groups on {len(self):,} inputs would take {size / 2**30:.1f} GB. "
                "Ask about fewer inputs at a time, or about larger groups, such as totals('label')."
            )
        return [part.totals(column, bins=bins) for part in self._parts]

    def spread(self) -> Float[Tensor, "inputs"]:
        """The standard deviation over all training examples, for each input; whatever the view."""
        view = self._parts[0].view
        whole = replace(view, selection=as_of(view.reader, Everything(), view.until), engine=view.engine.of_the_whole)
        total = self.seen_from(whole).totals("example")
        known = torch.tensor([group is not None for group in total.groups])
        return total.values[:, known].std(dim=1, correction=0)

    def __repr__(self) -> str:
        layers = ", ".join(dict.fromkeys(part.layer for part in self._parts))
        return f"Influence({layers}: {len(self)} inputs; {self.note})"


def error_size(view: View, layer: str, steps: StepNumbers) -> float:
    """The mean over slots of |c|·‖δ‖²: each step weighted by what multiplied its gradient."""

    def find() -> float:
        reducer = ErrorSizeReducer(steps.weight.abs() if bool(steps.weight.any()) else steps.bias.abs())
        errors = view.reduce(layer, reducer, selection=as_of(view.reader, Everything(), view.until))
        mean = errors.sum / max(errors.count, 1)
        return mean if mean > 0 else 1.0

    return view.reader.layer(layer).once(("error size", view.until), find)
