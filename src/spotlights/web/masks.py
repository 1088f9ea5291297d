"""Masks: what the network would answer without some of its training.

A mask leaves out values of columns, stretches of steps and single examples. What can be told from the group
weights is; only the few slots that are left (single examples, a stretch that ends between two edges) are read.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

import spotlights as sl
from spotlights.attention.forward import find_map
from spotlights.attention.group_weights import GroupWeights, group_weight_bytes, has_group_weights
from spotlights.attention.results import Label
from spotlights.layers import Part
from spotlights.memory.selection import Both, Complement
from spotlights.web.measures import Kept

MAX_EDGES = 30
MAX_CELLS = 256
SCRATCH_BYTES = 2 << 30
_KEPT_WEIGHTS = 64 << 20


@dataclass(frozen=True)
class Mask:
    """What is left out, and in which layers."""

    values: tuple[tuple[str, tuple[Label, ...]], ...] = ()
    """For each column the values that are left out."""
    steps: tuple[tuple[int, int], ...] = ()
    """Stretches of steps, the end not included."""
    examples: tuple[int, ...] = ()
    layers: tuple[str, ...] | None = None
    """None for all."""

    def __bool__(self) -> bool:
        return bool(self.values or self.steps or self.examples)

    def conditions(self) -> list[dict[str, Any]]:
        """One call of `memory.without` for each."""
        found: list[dict[str, Any]] = [{column: list(values)} for column, values in self.values]
        found += [{"step": range(first, end)} for first, end in self.steps]
        return found + ([{"example": list(self.examples)}] if self.examples else [])

    def view(self, memory: sl.Memory) -> sl.Memory:
        """The memory without what is left out."""
        for condition in self.conditions():
            memory = memory.without(**condition)
        return memory


class Masks:
    """Answers of a network under masks; prepared once, then quick."""

    def __init__(self, memory: sl.Memory, model: nn.Module, columns: list[str], cells: int) -> None:
        memory._view.reader.need_all_slots("Masks need")
        # A copy: while it computes with other weights, nobody else must see them.
        self._memory, self._model = memory, copy.deepcopy(model).eval()
        self._names = _parameter_names(memory, self._model)
        self._lock = threading.Lock()
        self._kept = Kept(_KEPT_WEIGHTS)
        self._wholes: dict[str, Tensor] = {}
        self.progress = 0.0
        view = memory._view
        room = min(SCRATCH_BYTES, shutil.disk_usage(tempfile.gettempdir()).free // 4)
        count = min(MAX_EDGES, memory.steps, room // max(1, group_weight_bytes(view, cells)))
        self.groups: GroupWeights | None = None
        if count >= 1 and cells <= MAX_CELLS and has_group_weights(view):
            edges = sorted({round(memory.steps * edge / count) for edge in range(count + 1)})
            self.groups = GroupWeights(view, columns, edges)

    @property
    def ready(self) -> bool:
        return self.groups is None or self.progress == 1.0

    def build(self, turn: Callable[[], AbstractContextManager[object]]) -> None:
        """Adds up the group weights, in turns."""
        if self.groups is not None:
            self.groups.build(turn=turn, progress=self._went)

    def _went(self, share: float) -> None:
        self.progress = share

    def whole(self) -> dict[str, dict[str, Tensor]] | None:
        """What all slots and the initial weights make up, layer by layer, if it is known."""
        if self.groups is None:
            return None
        return {name: self._parameters(name, Mask()) for name in self._names}

    def network(self, mask: Mask) -> Callable[[Tensor], Any]:
        """The network without what the mask leaves out."""
        with self._lock:
            parameters = self._kept.get(mask)
            if parameters is None:
                parameters = self._all_parameters(mask)
                size = sum(value.nbytes for value in parameters.values())
                self._kept.put(mask, parameters, size)

        def answer(batch: Tensor) -> Any:
            with self._lock, torch.no_grad():
                return functional_call(self._model, parameters, (batch,))

        return answer

    def _all_parameters(self, mask: Mask) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        current = dict(self._model.named_parameters())
        for layer, parts in self._names.items():
            here = mask if mask.layers is None or layer in mask.layers else Mask()
            entry = self._memory._view.reader.manifest.layers[layer]
            for parameter, value in self._parameters(layer, here).items():
                name, part = parts[parameter]
                whole = found.setdefault(name, current[name].detach().clone())
                own = part.of(whole)
                own.copy_((entry.own(value) if parameter in entry.weight_columns else value).reshape(own.shape))
        return found

    def _parameters(self, layer: str, mask: Mask) -> dict[str, Tensor]:
        if self.groups is None:
            return mask.view(self._memory).parameters(layer)
        aligned = self._aligned(mask)
        made = self._whole(layer)
        if aligned:
            out = {(column, value) for column, values in aligned.values for value in values}
            columns, edges = self.groups.columns, self.groups.edges
            made = made - self.groups.removed(
                layer,
                lambda cell: any(pair in out for pair in zip(columns, cell, strict=True)),
                [(edges.index(first), edges.index(end)) for first, end in aligned.steps],
            )
        if mask.conditions() != aligned.conditions():
            made = made - self._rest(layer, mask, aligned)
        entry = self._memory._view.reader.manifest.layers[layer]
        width = entry.matrix_shape[1]
        return entry.split(made[:, :width], made[:, width:].T)

    def _aligned(self, mask: Mask) -> Mask:
        """The part of a mask that the group weights know."""
        assert self.groups is not None
        edges = set(self.groups.edges)
        return Mask(
            tuple((column, values) for column, values in mask.values if column in self.groups.columns),
            tuple(ends for ends in mask.steps if edges >= set(ends)),
        )

    def _rest(self, layer: str, mask: Mask, aligned: Mask) -> Float[Tensor, "out_features in_features_and_biases"]:
        """What the slots make up that the mask leaves out beyond its aligned part."""
        view = self._memory._view
        kept_by_both = mask.view(self._memory)._view.selection
        selection = Both(aligned.view(self._memory)._view.selection, Complement(kept_by_both))
        return view.unrolled(layer).parts(selection).matrix

    def _whole(self, layer: str) -> Float[Tensor, "out_features in_features_and_biases"]:
        if layer not in self._wholes:
            assert self.groups is not None
            total = self.groups.total(layer)
            self._wholes[layer] = (self._memory._view.unrolled(layer).initial.matrix + total).to(total.dtype)
        return self._wholes[layer]


def _parameter_names(memory: sl.Memory, model: nn.Module) -> dict[str, dict[str, tuple[str, Part]]]:
    """What the model calls the parameters of each recorded layer, and which part of them it is."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for layer, entry in memory._view.reader.manifest.layers.items():
        parts = find_map(model, entry.modules[0], entry)[1].parameters
        kept = (*entry.weight_columns, *entry.bias_names)
        found[layer] = {name: (names[id(parts[name].parameter)], parts[name]) for name in kept}
    return found
