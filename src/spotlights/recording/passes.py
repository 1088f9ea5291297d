"""Backward passes: what the layers saw in one, kept together until it ends.

Hooks only note what passes by; the copying comes at the end of the pass, for all layers in one go. Between
two large products of the training step any code runs cold, at several times its usual cost (measured: a
third of what recording cost). A pass that dies never ends, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

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


@dataclass(eq=False)
class Returned:
    """A call, as the tensors that it returned know it."""

    call: Call | None
    """None when a pass has used up the graph. Where the user keeps a loss, the call must not be kept with it."""
    outputs: int
    """How many tensors it returned."""
    parts: Parts

    def forget(self) -> None:
        self.call, self.parts = None, {}


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
        return None not in self._gradients and self._call.is_through

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

    def after_pass(self, before: Standing, rows: list[Rows]) -> bool:
        """The pass has succeeded. Returns whether it has been through the layer, and not only come up to it."""
        ...


class _Open:
    """A pass that is under way."""

    def __init__(self, layers: Iterable[PassedLayer]) -> None:
        self.before = {layer: layer.before_pass() for layer in layers}
        self.met: dict[Returned, Met] = {}
        self.reached: list[Returned] = []
        self.rows: dict[PassedLayer, list[Rows]] = {}

    def copy(self, *, ended: bool) -> None:
        """As long as the pass has not ended, only calls that have been met as a whole."""
        due = [returned for returned, met in self.met.items() if ended or met.whole]
        for returned in due:  # one by one: each lets go of what it held
            met = self.met.pop(returned)
            for layer, part in returned.parts.items():
                self.rows.setdefault(layer, []).append(layer.copy(met, part))

    def end(self) -> None:
        self.copy(ended=True)
        through = {layer for layer, rows in self.rows.items() if layer.after_pass(self.before[layer], rows)}
        if not _get_current_graph_task_keep_graph():
            for returned in self.reached:
                if not through.isdisjoint(returned.parts):
                    returned.forget()


class Passes:
    """The backward passes that are under way."""

    def __init__(self, layers: Iterable[PassedLayer]) -> None:
        self._layers = list(layers)
        self._open: dict[int, _Open] = {}
        self._held = 0
        self.note = Untraced(self._note)

    def _note(self, returned: Returned, which: int, gradient: Tensor | None) -> None:
        """Called during a backward pass, when it reaches a tensor that a module has returned.

        Args:
            returned: what the module has returned.
            which: the tensor that is reached.
            gradient: what the pass brings; None if it reaches a neighbour alone.
        """
        call = returned.call
        if gradient is None or call is None:
            return
        task = torch._C._current_graph_task_id()
        under_way = self._open.get(task)
        if under_way is None:
            under_way = self._open[task] = _Open(self._layers)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        met = under_way.met.get(returned)
        if met is None:
            met = under_way.met[returned] = Met(call, returned.outputs)
            under_way.reached.append(returned)
            self._held += call.nbytes
        met.reach(which, gradient)
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
