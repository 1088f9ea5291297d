"""Masks: what the network would answer without some of its training.

A mask leaves out selections of slots: values of columns, stretches of steps, single examples. Group weights answer most
of a mask at once. Only the few slots that are left (single examples, a stretch that ends between two edges) are read.
"""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from spotlights.layers import WeightPart
from spotlights.memory.blocks import Everything, Selection, meeting
from spotlights.query.columns import cells
from spotlights.query.engine import Progress, Turn, View
from spotlights.query.forward import find_map
from spotlights.query.weights import (
    GroupWeights,
    group_weight_bytes,
    has_group_weights,
    initial_part,
    slot_part,
    view_parameters,
)

MAX_EDGES = 30
MAX_CELLS = 256
SCRATCH_BYTES = 2 << 30
_KEPT_MASKS = 16

Conditions = tuple[tuple[str, Any], ...]
"""What all must hold of a slot: for each column its values, or a range."""


@dataclass(frozen=True)
class Mask:
    """What is left out, and in which layers."""

    selections: tuple[Conditions, ...] = ()
    """A slot is left out if it meets all conditions of any of these."""
    layers: tuple[str, ...] | None = None
    """None for all."""

    @classmethod
    def of(cls, selections: Sequence[Mapping[str, Any]], layers: Sequence[str] | None = None) -> Mask:
        """From conditions as `Memory.where` takes them."""
        frozen = tuple(tuple((name, _frozen(value)) for name, value in one.items()) for one in selections)
        return cls(frozen, None if layers is None else tuple(layers))

    def __bool__(self) -> bool:
        return bool(self.selections)

    def in_layer(self, layer: str) -> Mask:
        """What the mask leaves out of one layer."""
        return self if self.layers is None or layer in self.layers else Mask()

    def left_out(self, view: View) -> Selection:
        """The slots that the mask leaves out."""
        kept: Selection = Everything()
        for conditions in self.selections:
            kept = kept & ~meeting(view.reader, dict(conditions))
        return ~kept


def _frozen(value: Any) -> Any:
    if isinstance(value, range):
        return value
    return tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)


class Masks:
    """Answers of a network under masks; prepared once, then quick. Made by `Memory.masks`."""

    def __init__(self, view: View, model: nn.Module, columns: Sequence[str]) -> None:
        view.reader.need_recording("Masks need")
        view.reader.need_all_slots("Masks need")
        # A copy: while the copy computes with other weights, nobody else must see them.
        self._view, self._model = view, copy.deepcopy(model).eval()
        self._names = _parameter_names(view, self._model)
        self._lock = threading.Lock()
        self._kept = functools.lru_cache(_KEPT_MASKS)(self._all_parameters)
        self._whole: dict[str, Tensor] = {}
        self.progress = 0.0
        """The share of the preparation that is done."""
        self._groups: GroupWeights | None = None
        if has_group_weights(view):
            count = max((len(cells(view, layer, columns)) for layer in view.reader.layers.values()), default=0)
            room = min(SCRATCH_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 4)
            edges = min(MAX_EDGES, view.until, room // max(1, group_weight_bytes(view, count)))
            if edges >= 1 and count <= MAX_CELLS:
                self._groups = GroupWeights(
                    view, columns, sorted({round(view.until * edge / edges) for edge in range(edges + 1)})
                )

    @property
    def ready(self) -> bool:
        return self._groups is None or self.progress == 1.0

    @property
    def edges(self) -> tuple[int, ...]:
        """The steps between which stretches can be left out without reading slots; none without group weights."""
        return () if self._groups is None else self._groups.edges

    def build(self, *, turn: Turn = nullcontext, progress: Progress = lambda share: None) -> None:
        """Adds up the group weights; `turn` is held for each stretch of the pass."""

        def report(share: float) -> None:
            self.progress = share
            progress(share)

        if self._groups is not None:
            self._groups.build(turn=turn, progress=report)

    def whole(self) -> dict[str, dict[str, Tensor]] | None:
        """The parameters that all slots and the initial weights make up, layer by layer, if they are known."""
        if self._groups is None:
            return None
        return {name: self._parameters(name, Mask()) for name in self._names}

    def network(self, mask: Mask) -> Callable[[Any], Any]:
        """The network without what the mask leaves out: of a batch, or a tuple or dict of the model's arguments."""
        with self._lock:
            parameters = self._kept(mask)

        def answer(batch: Any) -> Any:
            arguments = batch if isinstance(batch, tuple) else () if isinstance(batch, dict) else (batch,)
            with self._lock, torch.no_grad():
                return functional_call(self._model, parameters, arguments, batch if isinstance(batch, dict) else None)

        return answer

    def _all_parameters(self, mask: Mask) -> dict[str, Tensor]:
        by_name: dict[str, Tensor] = {}
        current = dict(self._model.named_parameters())
        for layer, parts in self._names.items():
            entry = self._view.reader.manifest.layers[layer]
            for parameter, value in self._parameters(layer, mask.in_layer(layer)).items():
                name, part = parts[parameter]
                own = part.of(by_name.setdefault(name, current[name].detach().clone()))
                own.copy_(entry.own(parameter, value).reshape(own.shape))
        return by_name

    def _parameters(self, layer: str, mask: Mask) -> dict[str, Tensor]:
        if self._groups is None:
            return view_parameters(self._view.where(~mask.left_out(self._view)), layer)
        known = Mask(tuple(conditions for conditions in mask.selections if self._is_aligned(conditions)))
        matrix = self._whole_matrix(layer)
        if known:
            columns, edges = self._groups.columns, self._groups.edges
            out = {(column, v) for ((column, values),) in known.selections if column != "step" for v in values}
            stretches = _merged(steps for ((column, steps),) in known.selections if column == "step")
            matrix = matrix - self._groups.removed(
                layer,
                lambda cell: any(pair in out for pair in zip(columns, cell, strict=True)),
                [(edges.index(start), edges.index(stop)) for start, stop in stretches],
            )
        if mask.selections != known.selections:
            rest = ~known.left_out(self._view) & mask.left_out(self._view)
            matrix = matrix - slot_part(self._view, layer, selection=self._view.selection & rest).matrix
        entry = self._view.reader.manifest.layers[layer]
        width = entry.matrix_shape[1]
        return entry.split(matrix[:, :width], matrix[:, width:].T)

    def _is_aligned(self, conditions: Conditions) -> bool:
        """Whether the group weights know these slots: values of one column, or steps from edge to edge."""
        assert self._groups is not None
        if len(conditions) != 1:
            return False
        column, values = conditions[0]
        if column == "step":
            return isinstance(values, range) and values.step == 1 and {values.start, values.stop} <= set(self.edges)
        return column in self._groups.columns and not isinstance(values, range)

    def _whole_matrix(self, layer: str) -> Float[Tensor, "out_features in_features_and_biases"]:
        if layer not in self._whole:
            assert self._groups is not None
            total = self._groups.total(layer)
            self._whole[layer] = (initial_part(self._view, layer).matrix + total).to(total.dtype)
        return self._whole[layer]


def _merged(stretches: Iterable[range]) -> list[tuple[int, int]]:
    """The same steps as stretches that do not overlap."""
    merged: list[tuple[int, int]] = []
    for steps in sorted(stretches, key=lambda steps: steps.start):
        if merged and steps.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], steps.stop)
        else:
            merged.append((steps.start, steps.stop))
    return merged


def _parameter_names(view: View, model: nn.Module) -> dict[str, dict[str, tuple[str, WeightPart]]]:
    """What the model calls the parameters of each recorded layer, and which part of the parameter each is."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_layer = {}
    for layer, entry in view.reader.manifest.layers.items():
        parts = find_map(model, entry.modules[0], entry)[1].parameters
        kept = (*entry.weight_columns, *entry.bias_names)
        by_layer[layer] = {name: (names[id(parts[name].parameter)], parts[name]) for name in kept}
    return by_layer
