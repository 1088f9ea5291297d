"""Weights that the slots of a view, or of each group, make up, and what slots add to a layer's output."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from spotlights.memory.blocks import Everything, OneOf, Selection
from spotlights.memory.layer_reader import LayerReader
from spotlights.query.coefficients import Coefficient, StepMatrices, StepNumbers, Unrolled
from spotlights.query.columns import cells
from spotlights.query.contraction import WeightShare
from spotlights.query.engine import Progress, Threads, Turn, View
from spotlights.query.measures import Score
from spotlights.query.reducers import OutputReducer, WeightsReducer
from spotlights.query.trained import trained_parameters
from spotlights.results.answers import Label
from spotlights.sparse_rows import Numbers


def slot_part(view: View, layer: str, *, selection: Selection | None = None) -> WeightShare:
    """What the view's slots (or another selection) add to a layer's weight and biases."""
    return _summed(view, layer, view.unrolled(layer), selection or view.selection).share


def initial_part(view: View, layer: str, unrolled: Unrolled) -> WeightShare:
    """What is left of the initial weight and biases, and of the optimizer's state as recording began."""
    if isinstance(unrolled, StepNumbers):
        return unrolled.initial

    def find() -> WeightShare:
        at_once = unrolled.sweep(view.reader, layer).initial_at_once()  # no sweep, where decay is the same everywhere
        initial = at_once or _summed(view, layer, unrolled, ~Everything()).initial
        assert initial is not None, "the end of a sweep knows it"
        return initial

    return view.reader.layer(layer).once(("initial", unrolled.until), find)


def rounding_part(view: View, layer: str, unrolled: Unrolled) -> WeightShare | None:
    """The movement of weight and biases that no example taught; None if there is none.

    A gradient that is rounding alone can be added up again, but with other rounding. So the part is what the slots
    leave of the weights, at the entries where there was such a gradient; where the weights of that step are not known,
    what the recorded slots say.
    """
    if isinstance(unrolled, StepNumbers):
        return None
    known, key = view.reader.layer(layer).known, ("rounding", unrolled.until)
    if key not in known:
        _summed(view, layer, unrolled, view.all_slots)  # notes it
    return known[key]


def _as_it_was(view: View, layer: str, rounding: WeightShare, rest: WeightShare) -> WeightShare:
    """A rounding part whose entries bring the rest to the weights that the run had, where these are known."""
    entry = view.reader.layer(layer).entry
    trained = trained_parameters(view.reader, layer, view.until, own_final=False)
    parts = {name: value.clone() for name, value in entry.split(rounding.weight, rounding.biases).items()}
    others = entry.split(rest.weight, rest.biases)
    for name, truth in trained.parameters.items():
        at = trained.entries.get(name, slice(None))
        part, other = parts[name].reshape(-1), others[name].reshape(-1)[at]
        part[at] = torch.where(part[at] != 0, truth.double() - other, 0.0)
        parts[name] = part.reshape(parts[name].shape)
    return WeightShare.joined(entry, parts)


def untaught_part(view: View, layer: str) -> WeightShare:
    """What no slot adds: what is left of the initial weights, and rounding."""
    unrolled = view.unrolled(layer)
    rounding = rounding_part(view, layer, unrolled)
    initial = initial_part(view, layer, unrolled)
    return initial if rounding is None else initial + rounding


def view_parameters(view: View, layer: str) -> dict[str, Tensor]:
    """The parameters that the view's slots, the initial part and rounding make up, by name; in float64."""
    recorded = view.reader.layer(layer)
    view.reader.need_all_slots("Weights are made of")
    part = slot_part(view, layer) + untaught_part(view, layer)
    return recorded.entry.split(part.weight, part.biases)


def slot_outputs(view: View, layer: str, queries: Numbers) -> Float[Tensor, "queries out_features"]:
    """What the view's slots add to the layer's output, in float64."""
    unrolled, recorded = view.unrolled(layer), view.reader.layer(layer)
    if isinstance(unrolled, StepNumbers) and recorded.entry.groups == 1:
        reducer = OutputReducer(len(queries), recorded.entry.out_features, unrolled.weight, unrolled.bias)
        return view.reduce(layer, reducer, Score(queries)).output
    # A slot has a matrix of its own, or a score for each group of channels: adding up the slots first is cheaper.
    key = view.until, view.selection
    return recorded.last("slots", key, lambda: slot_part(view, layer)).output(queries)


def _summed(view: View, layer: str, unrolled: Unrolled, selection: Selection) -> WeightsReducer:
    reducer = WeightsReducer(view.reader.layer(layer).entry)
    sums = view.reduce(layer, reducer, Coefficient(unrolled), selection=selection)
    if isinstance(unrolled, StepMatrices):
        assert sums.initial is not None
        assert sums.rounding is not None
        known, until = view.reader.layer(layer).known, unrolled.until
        known["initial", until] = sums.initial
        if not bool(sums.rounding.matrix.any()):
            known["rounding", until] = None
        elif selection == view.all_slots:
            known["rounding", until] = _as_it_was(view, layer, sums.rounding, sums.initial + sums.share)
    return sums


# -- of groups --------------------------------------------------------------------------------------

_ALL = -1
"""Stands for all cells together."""


class GroupWeights:
    """The part of each layer's weights that every group of slots makes up, computed once.

    A cell is a combination of values of some columns (label 3 of source mnist). For each cell and each of some edges of
    training time, a scratch file has `Σ v⊗k` over the cell's slots up to that edge. Any mask of cells and of stretches
    between edges is then a sum of a few matrices: `W_masked = W − Σ_masked ΔW_g`, without a scan.
    """

    def __init__(self, view: View, columns: Sequence[str], edges: Sequence[int]) -> None:
        """Of a whole memory; `edges` ascend from 0 to the number of its steps."""
        self.columns = tuple(columns)
        self.edges = tuple(edges)
        self._view = view
        self._cells = {name: cells(view, layer, columns) for name, layer in view.reader.layers.items()}
        self._kept = {
            name: _scratch(layer, len(edges), len(self._cells[name])) for name, layer in view.reader.layers.items()
        }
        """For each layer, edge and cell (the last one stands for all) the weight, with a column for each bias."""

    def build(self, *, turn: Turn = nullcontext, progress: Progress = lambda share: None) -> None:
        """Passes over the memory once, taking a turn for each stretch of training."""
        done, stretches = 0, len(self._cells) * (len(self.edges) - 1)
        engine = self._view.engine.of_the_whole
        # This is work for the background: it leaves the other cores alone, and never waits for them.
        view = replace(self._view, engine=Threads(1) if isinstance(engine, Threads) else engine)
        for name, groups in self._cells.items():
            sums = WeightsReducer(view.reader.layer(name).entry, groups)
            coefficient = Coefficient(view.unrolled(name))
            for edge, (start, stop) in enumerate(itertools.pairwise(self.edges), start=1):
                with turn():
                    sums.merge(view.reduce(name, sums, coefficient, selection=OneOf("step", range(start, stop))))
                    kept = self._kept[name][edge]
                    kept[:_ALL] = torch.cat([sums.weights, sums.biases.mT], dim=2)
                    kept[_ALL] = kept[:_ALL].sum(dim=0)
                done += 1
                progress(done / stretches)

    def removed(
        self, layer: str, masked: Callable[[tuple[Label, ...]], bool], stretches: Sequence[tuple[int, int]]
    ) -> Float[Tensor, "out_features in_features_and_biases"]:
        """The part that a mask takes away: of the masked cells everything, of the others some stretches.

        `masked` is asked with the values of a cell's columns; `stretches` are pairs of edges, which do not overlap.
        """
        kept, values = self._kept[layer], self._cells[layer].values
        whole = [cell for cell in range(len(values)) if masked(values[cell])]
        total = torch.zeros_like(self.total(layer))
        for cell in whole:
            total += kept[-1, cell]
        for first, end in stretches:
            total += kept[end, _ALL] - kept[first, _ALL]
            for cell in whole:
                total -= kept[end, cell] - kept[first, cell]
        return total

    def total(self, layer: str) -> Float[Tensor, "out_features in_features_and_biases"]:
        """What all slots together make up."""
        return self._kept[layer][-1, _ALL]


def _scratch(layer: LayerReader, edges: int, count: int) -> Float[Tensor, "edges cells out in_features_and_biases"]:
    """Zeros in a file that goes away with the tensor."""
    with tempfile.TemporaryFile(prefix="spotlights-") as file:
        kind = torch.empty(0, dtype=layer.storage.compute_dtype).numpy().dtype
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="w+", shape=(edges, *_scratch_shape(layer, count))))


def _scratch_shape(layer: LayerReader, count: int) -> tuple[int, ...]:
    """One more for all cells together; one more column for each bias."""
    entry = layer.entry
    return count + 1, entry.out_features, entry.matrix_shape[1] + len(entry.bias_names)


def group_weight_bytes(view: View, count: int) -> int:
    """What one edge of training time takes on disk, with that many cells."""
    layers = view.reader.layers.values()
    return sum(math.prod(_scratch_shape(layer, count)) * layer.storage.compute_dtype.itemsize for layer in layers)
