"""Backward passes: what the layers saw in one, kept together until it ends.

Hooks only note what passes by; the copying comes at the end of the pass, for all layers in one go. Between
two large products of the training step any code runs cold, at several times its usual cost (measured: a
third of what recording cost). A pass that dies never ends, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from spotlights.layers import Call
from spotlights.layers.untraced import Untraced

_HELD_BYTES = 32 << 20
"""What is noted may take so much memory; then it is copied before the pass ends."""


class Part(NamedTuple):
    """What of a call belongs to a layer."""

    map_name: str
    turned: bool
    """The layer has the weight the other way round: there, the call's errors are keys and its keys errors."""
    columns: Mapping[str, np.ndarray]


Parts = dict[Any, Part]
"""By layer."""


class Met:
    """One call of a module, met by a backward pass. Keys and errors are made when the first layer asks for them."""

    def __init__(self, call: Call, outputs: int) -> None:
        self._call = call
        self._gradients: list[Tensor | None] = [None] * outputs
        self.may_repeat = call.may_repeat

    def reach(self, output: int, gradient: Tensor) -> None:
        """The pass has reached one of the tensors that the module returned."""
        self._gradients[output] = gradient.detach()

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


class Seen(NamedTuple):
    """A layer's part of a call. The tensors are the user's own, not copies."""

    met: Met
    part: Part


@runtime_checkable
class LayerPass(Protocol):
    """What a layer does with its part of a pass."""

    def note(self, seen: Seen) -> None: ...

    def copy(self, *, ended: bool) -> None:
        """Copies what was noted; as long as the pass has not ended, only calls that have been met as a whole."""

    def end(self) -> None:
        """The pass has succeeded."""


@dataclass
class _Open:
    """A pass that is under way."""

    layers: dict[Any, LayerPass] = field(default_factory=dict)
    met: dict[Call, Met] = field(default_factory=dict)


class Passes:
    """The backward passes that are under way."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._held = 0
        self.note = Untraced(self._note)

    def _note(self, call: Call, place: tuple[int, int], gradient: Tensor, parts: Parts) -> None:
        """Called during a backward pass, when it reaches a tensor that a module has returned.

        Args:
            call: the call that returned it.
            place: which one it is, of how many.
            gradient: what the pass brings.
            parts: the layers that this is about.
        """
        task = torch._C._current_graph_task_id()
        under_way = self._open.get(task)
        if under_way is None:
            under_way = self._open[task] = _Open()
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        which, outputs = place
        met = under_way.met.get(call)
        if met is None:
            met = under_way.met[call] = Met(call, outputs)
            for layer, part in parts.items():
                own = under_way.layers.get(layer)
                if own is None:
                    own = under_way.layers[layer] = layer.begin_pass()
                own.note(Seen(met, part))
            self._held += call.nbytes
        met.reach(which, gradient)
        self._held += gradient.nbytes
        if self._held > _HELD_BYTES:
            self._copy(under_way, ended=False)

    def _copy(self, under_way: _Open, *, ended: bool) -> None:
        self._held = 0
        with torch.no_grad():
            for part in under_way.layers.values():
                part.copy(ended=ended)
        under_way.met = {call: met for call, met in under_way.met.items() if not met.whole}

    def _end(self, task: int) -> None:
        under_way = self._open.pop(task, _Open())
        self._copy(under_way, ended=True)
        for part in under_way.layers.values():
            part.end()

    def clear(self) -> None:
        """Forgets the passes that never ended."""
        self._open.clear()
        self._held = 0
