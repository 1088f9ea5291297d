"""Modules that compute from a memory: `DualLinear` attends to the training slots instead of using weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.attention.forward import find_map, find_turned
from spotlights.attention.measure import View
from spotlights.layers import LayerAdapter, adapter_for, adapter_named
from spotlights.layers.wrappers import unfuse, unwrapped


class DualLinear(nn.Module):
    """A layer in dual form: `a·W_0 x + Σ_t value_t (key_t·x)`, streamed from the memory."""

    def __init__(self, view: View, layer: str, module: nn.Module, *, turned: bool = False) -> None:
        """
        Args:
            view: the slots.
            layer: its name in the memory.
            module: the layer that it stands for. It says what its keys are; its weights are not used.
            turned: the module uses the layer's weight the other way round.
        """
        super().__init__()
        self._turned = turned
        self._view = view
        self._layer = view.reader.layer(layer)
        self._unrolled = view.unrolled(layer)
        adapter = adapter_for(module)
        assert isinstance(adapter, LayerAdapter), "see dual_model"
        self._kind = adapter, module  # in a tuple: the module is no part of this one
        # A module that shares its weight, and so the memory, may have its own bias.
        bias = None if self._layer.entry.bias else adapter.bias(module)
        self._own_bias = 0.0 if bias is None else bias.detach().double().cpu().reshape(-1)

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "..."]:
        adapter, module = self._kind
        keys = adapter.keys(module, adapter.inputs(module, args, kwargs).detach())
        queries = keys.reshape(-1, keys.shape[-1]).cpu()
        if self._turned:
            weight = view_parameters(self._view, self._layer.name)["weight"]
            made = queries.double() @ weight
            return adapter.output(module, made.to(keys).reshape(*keys.shape[:-1], made.shape[1]))
        made = self._unrolled.initial.output(queries) + self._own_bias
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            some = slice(start, start + _QUERIES_AT_ONCE)
            made[some] += self._unrolled.outputs(self._view.selection, queries[some])
        return adapter.output(module, made.to(keys).reshape(*keys.shape[:-1], made.shape[1]))

    def extra_repr(self) -> str:
        return f"{self._layer.name}: {self._layer.slots:,} slots, {self._view.selection}"


_QUERIES_AT_ONCE = 1024


def dual_model(view: View, model: nn.Module) -> nn.Module:
    """A copy of the model with every recorded layer in dual form.

    A map inside a module that does more than map (an LSTM's, which meets its own output again at every step) attends
    by way of its weights: those that the slots add up to, which is the same sum in another order.
    """
    view.reader.need_all_slots("A dual network needs")
    layers = view.reader.manifest.layers
    inside = [name for name, entry in layers.items() if not isinstance(adapter_named(entry.kind), LayerAdapter)]
    replaced = primal_model(view, model, {name: view_parameters(view, name) for name in inside})
    duals: dict[nn.Module, DualLinear] = {}
    for name, entry in layers.items():
        for path in entry.modules if name not in inside else ():
            module, _ = find_map(replaced, path, entry)
            duals[module] = DualLinear(view, name, module)
        for path in entry.turned if name not in inside else ():
            module, adapter, _ = find_turned(replaced, path, entry)
            if isinstance(adapter, LayerAdapter):
                duals[module] = DualLinear(view, name, module, turned=True)
    unfuse(replaced)
    if replaced in duals:
        return duals[replaced]
    for path, module in list(replaced.named_modules(remove_duplicate=False)):  # a module may have two places
        if module in duals:
            parent, _, child = path.rpartition(".")
            setattr(replaced.get_submodule(parent), child, duals[module])
    return replaced


def primal_model(view: View, model: nn.Module, parameters: dict[str, dict[str, Tensor]]) -> nn.Module:
    """A copy of the model with the given weights in some of its recorded layers."""
    replaced = copy.deepcopy(unwrapped(model)).eval()
    with torch.no_grad():
        for name, found in parameters.items():
            entry = view.reader.manifest.layers[name]
            _, linear = find_map(replaced, entry.modules[0], entry)
            for parameter, value in found.items():
                own = linear.parameters[parameter].value
                own.copy_((entry.own(value) if parameter in entry.weight_columns else value).reshape(own.shape))
    return replaced


def view_parameters(view: View, layer: str) -> dict[str, Tensor]:
    """The parameters that the slots of the view, with the initial part, make up, by name; in float64."""
    view.reader.need_all_slots("Weights are made of")
    unrolled = view.unrolled(layer)
    initial, parts = unrolled.initial, unrolled.parts(view.selection)
    return view.reader.layer(layer).entry.split(initial.weight + parts.weight, initial.biases + parts.biases)
