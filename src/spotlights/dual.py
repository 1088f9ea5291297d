"""Modules that compute from a memory: `DualLinear` attends to the training slots instead of using weights."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers import LayerAdapter, adapter_for, adapter_named
from spotlights.layers.adapter import unfuse
from spotlights.query.engine import View
from spotlights.query.forward import find_map
from spotlights.query.primal import Far, primal_model
from spotlights.query.weights import slot_outputs, untaught_part, view_parameters


class DualLinear(nn.Module):
    """A layer in dual form: `a·W_0 x + Σ_t value_t (key_t·x)`, streamed from the memory."""

    def __init__(self, view: View, layer: str, module: nn.Module, *, far: Far | None = None) -> None:
        """
        Args:
            view: the slots.
            layer: its name in the memory.
            module: the layer that it stands for. It says what its keys are; its weights are not used.
            far: warns of answers that are far from the module's.
        """
        super().__init__()
        self._far = far or Far(view)
        self._view = view
        self._layer = view.reader.layer(layer)
        view.unrolled(layer)  # a memory that cannot be computed from is refused here
        adapter = adapter_for(module)
        assert isinstance(adapter, LayerAdapter), "see dual_model"
        self._kind = adapter, module  # in a tuple: the module is not a part of this one
        # A module that shares its weight, and so the memory, may have its own bias.
        bias = None if self._layer.entry.bias else adapter.bias(module)
        self._own_bias = 0.0 if bias is None else bias.detach().double().cpu().reshape(-1)

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "..."]:
        adapter, module = self._kind
        inputs = adapter.inputs(module, args, kwargs)
        keys = adapter.keys(module, inputs.detach() if isinstance(inputs, Tensor) else inputs)
        queries, like = keys.reshape(-1, keys.shape[-1]).cpu(), keys if isinstance(keys, Tensor) else keys.amounts
        result = untaught_part(self._view, self._layer.name).output(queries) + self._own_bias
        for start in range(0, len(queries), QUERIES_AT_ONCE):
            some = slice(start, start + QUERIES_AT_ONCE)
            result[some] += slot_outputs(self._view, self._layer.name, queries[some])
        output = adapter.output(module, result.to(like).reshape(*keys.shape[:-1], result.shape[1]))
        if self._far.looks:
            with torch.no_grad():
                self._far.check(self._layer.name, output, module(*args, **kwargs))
        return output

    def extra_repr(self) -> str:
        return f"{self._layer.name}: {self._layer.slots:,} slots, {self._view.selection}"


QUERIES_AT_ONCE = 1024


def dual_model(view: View, model: nn.Module) -> nn.Module:
    """A copy of the model with every recorded layer in dual form.

    A map inside a module that does more than map (an LSTM's, which meets its own output again at every step), and a
    module that uses the transposed weight of a layer, attend by way of their weights: those that the slots add up to,
    which is the same sum in another order.
    """
    view.reader.need_all_slots("A dual network needs")
    layers = view.reader.manifest.layers
    inside = [name for name, entry in layers.items() if not isinstance(adapter_named(entry.kind), LayerAdapter)]
    by_weights = [*inside, *(name for name, entry in layers.items() if entry.turned and name not in inside)]
    replaced = primal_model(view, model, {name: view_parameters(view, name) for name in by_weights})
    duals: dict[nn.Module, DualLinear] = {}
    far = Far(view)
    for name, entry in layers.items():
        for path in entry.modules if name not in inside else ():
            module, _ = find_map(replaced, path, entry)
            duals[module] = DualLinear(view, name, module, far=far)
    unfuse(replaced)
    if replaced in duals:
        return duals[replaced]
    for path, module in list(replaced.named_modules(remove_duplicate=False)):  # a module may have two places
        if module in duals:
            parent, _, child = path.rpartition(".")
            setattr(replaced.get_submodule(parent), child, duals[module])
    return replaced
