"""Listening to a module: its forward hook, and what tells when a backward pass has reached it.

The hook changes nothing: not the module, not what it returns, not the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spotlights.layers import Call, ModuleAdapter
from spotlights.layers.adapter import tensors_of
from spotlights.memory.columns import Batch
from spotlights.recording.layer import RecordedLayer
from spotlights.recording.passes import ColumnsOf, Passes


def listen(
    module: nn.Module,
    adapter: ModuleAdapter,
    layers: Mapping[str, RecordedLayer],
    current_batch: Callable[[], Batch | None],
    passes: Passes,
) -> list[RemovableHandle]:
    """Starts listening.

    Args:
        module: the module that is listened to.
        adapter: the one for its kind.
        layers: those of its maps that are recorded.
        current_batch: gives the columns of the current batch, or None while paused.
        passes: told of every backward pass that reaches the module.
    """

    def forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return
        outputs = tensors_of(output)
        batch = current_batch() if any(tensor.requires_grad for tensor in outputs) else None
        if batch is None:
            return
        call = adapter.call(module, args, kwargs, output, noted.pop() if noted else None)
        leads, chosen = call.leads(), None if call.chosen is None else call.chosen.numpy()
        columns = {}
        for name, layer in layers.items():
            rows = batch.rows(leads[name], layer.name)
            columns[layer] = rows if chosen is None else {column: all_of[chosen] for column, all_of in rows.items()}
        for place, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_reached(passes, call, (place, len(outputs)), columns))

    noted: list[Any] = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        noted[:] = [adapter.before(module)]

    handles = [module.register_forward_hook(_Listener(forward), with_kwargs=True)]
    if type(adapter).before is not ModuleAdapter.before:
        handles.append(module.register_forward_pre_hook(_Listener(before)))
    return handles


def _reached(passes: Passes, call: Call, place: tuple[int, int], columns: ColumnsOf) -> Callable[[Tensor | None], None]:
    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:  # a neighbour was reached
            passes.note(call, place, gradient, columns)

    return hook


class _Listener:
    """A hook that belongs to one model: copies of that model, deep or pickled, are not recorded."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        self._hook(*args)

    def __reduce__(self) -> tuple[type[NotRecorded], tuple[()]]:
        return NotRecorded, ()


class NotRecorded:
    """What a copy of a recorded model has in place of its listener."""

    def __call__(self, *args: Any) -> None:
        pass
