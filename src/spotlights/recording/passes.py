"""Backward passes: what the layers saw in one, kept together until it ends.

Hooks only note what passes by; the copying comes at the end of the pass, for all layers in one go. Between
two large products of the training step any code runs cold, at several times its usual cost (measured: a
third of what recording cost). A pass that dies never ends, and leaves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

_HELD_BYTES = 32 << 20
"""What is noted may take so much memory; then it is copied before the pass ends."""


class Seen(NamedTuple):
    """One call of a layer, met by a backward pass. The tensors are the user's own, not copies."""

    module: nn.Module
    inputs: Tensor
    errors: Tensor
    columns: Mapping[str, np.ndarray]
    may_repeat: bool


@runtime_checkable
class LayerPass(Protocol):
    """What a layer does with its part of a pass."""

    def note(self, seen: Seen) -> None: ...

    def copy(self) -> None:
        """Copies what was noted."""

    def end(self) -> None:
        """The pass has succeeded."""


class Passes:
    """The backward passes that are under way."""

    def __init__(self) -> None:
        self._open: dict[int, dict[Any, LayerPass]] = {}
        self._held = 0

    def note(self, layer: Any, seen: Seen) -> None:
        """Called during a backward pass, when it reaches the output of `layer`."""
        task = torch._C._current_graph_task_id()
        layers = self._open.get(task)
        if layers is None:
            layers = self._open[task] = {}
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end(task))
        part = layers.get(layer)
        if part is None:
            part = layers[layer] = layer.begin_pass()
        part.note(seen)
        self._held += seen.inputs.nbytes + seen.errors.nbytes
        if self._held > _HELD_BYTES:
            self._copy(layers)

    def _copy(self, layers: dict[Any, LayerPass]) -> None:
        self._held = 0
        with torch.no_grad():
            for part in layers.values():
                part.copy()

    def _end(self, task: int) -> None:
        layers = self._open.pop(task, {})
        self._copy(layers)
        for part in layers.values():
            part.end()

    def clear(self) -> None:
        """Forgets the passes that never ended."""
        self._open.clear()
        self._held = 0
