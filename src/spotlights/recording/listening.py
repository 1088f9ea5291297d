"""Listening to a module: its forward hook, and what tells when a backward pass has reached it.

The hook changes nothing: not the module, not what it returns, not the graph. Where a module uses its weights by
`F.linear`, that is what is listened to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from spotlights.layers import Call, FunctionalAdapter, ModuleAdapter
from spotlights.layers.adapter import tensors_of
from spotlights.layers.functional import watch
from spotlights.layers.untraced import Untraced
from spotlights.memory.columns import Batch, ColumnTable
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.passes import Part, Parts, Passes, Returned

MODULE = "module"
"""The column that says which module a slot is of, where several kinds share a weight."""


@runtime_checkable
class Handle(Protocol):
    """Ends some listening."""

    def remove(self) -> None: ...


class Heard(NamedTuple):
    """A layer that a map of a module belongs to."""

    layer: RecordedLayer
    path: str
    turned: bool


@dataclass
class Listener:
    """Listens to one module."""

    module: nn.Module
    adapter: ModuleAdapter
    heard: dict[str, Heard] = field(default_factory=dict)
    """Those of its maps that are recorded."""

    def start(self, columns: ColumnTable, current_batch: Callable[[], Batch | None], passes: Passes) -> list[Handle]:
        """Starts listening.

        Args:
            columns: of the memory.
            current_batch: gives the columns of the current batch, or None while paused.
            passes: told of every backward pass that reaches the module.
        """
        codes = {
            name: columns.code(MODULE, heard.path) for name, heard in self.heard.items() if heard.layer.several_kinds
        }

        def hear(call: Call, batch: Batch, outputs: list[Tensor], maps: list[str]) -> None:
            leads, chosen = call.leads(), None if call.chosen is None else call.chosen.numpy()
            parts: Parts = {}
            for name in maps:
                layer, _, turned = self.heard[name]
                rows = batch.rows(leads[name], layer.name, shared=call.shared)
                if name in codes:
                    rows = {**rows, MODULE: np.full(math.prod(leads[name]), codes[name])}
                if chosen is not None:
                    rows = {column: all_of[chosen] for column, all_of in rows.items()}
                parts[layer] = Part(name, turned, rows)
            returned = Returned(call, len(outputs), parts)
            for which, tensor in enumerate(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(partial(passes.note, returned, which))

        def batch_to_hear(outputs: list[Tensor]) -> Batch | None:
            if not (self.module.training and torch.is_grad_enabled()):
                return None
            for tensor in outputs:
                if tensor.requires_grad:
                    return current_batch()
            return None

        if isinstance(self.adapter, FunctionalAdapter):
            return self._watch(self.adapter, batch_to_hear, hear)

        noted: list[Any] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            wanted = module.training and torch.is_grad_enabled() and current_batch() is not None
            noted[:] = [self.adapter.before(module)] if wanted else []

        def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            outputs = tensors_of(output)
            batch = batch_to_hear(outputs)
            if batch is not None:
                call = self.adapter.call(module, args, kwargs, output, noted.pop() if noted else None)
                hear(call, batch, outputs, list(self.heard))

        handles: list[Handle] = [self.module.register_forward_hook(_Hook(forward), with_kwargs=True)]
        if type(self.adapter).before is not ModuleAdapter.before:
            handles.append(self.module.register_forward_pre_hook(_Hook(before)))
        return [*handles, *self.adapter.begin()]

    def _watch(
        self,
        adapter: FunctionalAdapter,
        batch_to_hear: Callable[[list[Tensor]], Batch | None],
        hear: Callable[[Call, Batch, list[Tensor], list[str]], None],
    ) -> list[Handle]:
        def watched(name: str) -> Handle:
            def use(input: Tensor, output: Tensor, rows: slice) -> Tensor:
                batch = batch_to_hear([output])
                call = adapter.use(self.module, name, input, rows)
                if batch is not None:
                    hear(call, batch, [output], [name])
                return output

            return watch(adapter.weights(self.module)[name][0], use)

        return [watched(name) for name in self.heard]


class _Hook(Untraced):
    """A hook that belongs to one model: copies of that model, deep or pickled, are not recorded."""

    def __reduce__(self) -> tuple[type[NotRecorded], tuple[()]]:
        return NotRecorded, ()


class NotRecorded:
    """What a copy of a recorded model has in place of its hook."""

    def __call__(self, *args: Any) -> None:
        pass
