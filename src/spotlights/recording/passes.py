"""Backward passes: what the layers saw in one, kept together until it ends.

Hooks only note what passes by; the copying comes at the end of the pass, for all layers in one go. Between
two large products of the training step any code runs cold, at several times its usual cost (measured: a
third of what recording cost). A pass that dies never ends, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from spotlights.layers import Call
from spotlights.layers.untraced import Untraced
from spotlights.memory.slots import Rows

_HELD_BYTES = 32 << 20
"""What is noted may take so much memory; then it is copied before the pass ends."""


class Part(NamedTuple):
    """What of a call belongs to a layer."""

    map_name: str
    turned: bool
    """The layer has the weight the other way round: there, the call's errors are keys and its keys errors."""
    columns: Mapping[str, np.ndarray]


Parts = dict["PassedLayer", Part]
"""By layer."""


class Met:
    """One call of a module, met by a backward pass. Keys and errors are made when the first layer asks for them."""

    def __init__(self, call: Call, outputs: int) -> None:
        self._call = call
        self._gradients: list[Tensor | None] = [None] * outputs
        self.may_repeat = call.may_repeat

    def reach(self, output: int, gradient: Tensor) -> None:
        """The pass has reached one of the tensors that the module returned."""
        self._gradients[output] = gradient

    @property
    def whole(self) -> bool:
        """All that was returned has been reached. Before its end, a pass does not say what it will not reach."""
        return None not in self._gradients

    @cached_property
    def keys(self) -> Mapping[str, Tensor]:
        return self._call.keys()

    @cached_property
    def errors(self) -> Mapping[str, Tensor]:
        return self._call.errors(self._gradients)


class Standing(NamedTuple):
    """How a layer's gradient stood when a pass began."""

    gradient: Tensor | None
    version: int | None


@runtime_checkable
class PassedLayer(Protocol):
    """What a layer does in a pass."""

    def before_pass(self) -> Standing:
        """A pass begins that may reach the layer."""
        ...

    def copy(self, met: Met, part: Part) -> Rows:
        """The slots of one call."""
        ...

    def after_pass(self, before: Standing, rows: list[Rows]) -> None:
        """The pass has succeeded."""


class _Open:
    """A pass that is under way."""

    def __init__(self, layers: Iterable[PassedLayer]) -> None:
        self.before = {layer: layer.before_pass() for layer in layers}
        self.met: dict[Call, tuple[Met, Parts]] = {}
        self.rows: dict[PassedLayer, list[Rows]] = {}

    def copy(self, *, ended: bool) -> None:
        """As long as the pass has not ended, only calls that have been met as a whole."""
        due = [call for call, (met, _) in self.met.items() if ended or met.whole]
        for call in due:  # one by one: each lets go of what it held
            met, parts = self.met.pop(call)
            for layer, part in parts.items():
                self.rows.setdefault(layer, []).append(layer.copy(met, part))

    def end(self) -> None:
        self.copy(ended=True)
        for layer, rows in self.rows.items():
            layer.after_pass(self.before[layer], rows)


class Passes:
    """The backward passes that are under way."""

    def __init__(self, layers: Iterable[PassedLayer]) -> None:
        self._layers = list(layers)
        self._open: dict[int, _Open] = {}
        self._held = 0
        self.note = Untraced(self._note)

    def _note(self, call: Call, place: tuple[int, int], parts: Parts, gradient: Tensor | None) -> None:
        """Called during a backward pass, when it reaches a tensor that a module has returned.

        Args:
            call: the call that returned it.
            place: which one it is, of how many.
            parts: the layers that this is about.
            gradient: what the pass brings; None if it reaches a neighbour alone.
        """
        if gradient is None:
            return
        task = torch._C._current_graph_task_id()
        under_way = self._open.get(task)
        if under_way is None:
            under_way = self._open[task] = _Open(self._layers)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        which, outputs = place
        if call not in under_way.met:
            under_way.met[call] = Met(call, outputs), parts
            self._held += call.nbytes
        under_way.met[call][0].reach(which, gradient)
        self._held += gradient.nbytes
        if self._held > _HELD_BYTES:
            self._held = 0
            with torch.no_grad():
                under_way.copy(ended=False)

    def _end(self, task: int) -> None:
        under_way = self._open.pop(task, None)
        self._held = 0
        if under_way is not None:
            with torch.no_grad():
                under_way.end()

    def clear(self) -> None:
        """Forgets the passes that never ended."""
        self._open.clear()
        self._held = 0
