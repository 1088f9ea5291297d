"""Modules that compute from a memory: `DualLinear` attends to the training slots instead of using weights."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from spotlights.attention.forward import find_module
from spotlights.attention.measure import View


class DualLinear(nn.Module):
    """A linear layer in dual form: `a·W_0 x + Σ_t value_t (key_t·x)`, streamed from the memory."""

    def __init__(self, view: View, layer: str, *, own_bias: Tensor | None = None) -> None:
        """`own_bias`: that of a module which shares its weight, and so the memory, but not its bias."""
        super().__init__()
        self._own_bias = 0.0 if own_bias is None else own_bias.detach().double().cpu()
        self._view = view
        self._layer = view.reader.layer(layer)
        self._unrolled = view.unrolled(layer)

    def forward(self, input: Float[Tensor, "*lead in_features"]) -> Float[Tensor, "*lead out_features"]:
        queries = input.detach().reshape(-1, input.shape[-1]).cpu()
        initial = self._unrolled.initial
        made = queries.double() @ initial.weight.T + initial.bias + self._own_bias
        for start in range(0, len(queries), _QUERIES_AT_ONCE):
            some = slice(start, start + _QUERIES_AT_ONCE)
            made[some] += self._unrolled.outputs(self._view.selection, queries[some])
        return made.to(input).reshape(*input.shape[:-1], made.shape[1])

    def extra_repr(self) -> str:
        return f"{self._layer.name}: {self._layer.slots:,} slots, {self._view.selection}"


_QUERIES_AT_ONCE = 1024


def dual_model(view: View, model: nn.Module) -> nn.Module:
    """A copy of the model with every recorded layer in dual form."""
    replaced = copy.deepcopy(model).eval()
    duals: dict[nn.Module, DualLinear] = {}
    for name, entry in view.reader.manifest.layers.items():
        for path in entry.modules:
            module = find_module(replaced, path, entry)
            bias = None if entry.bias else module._parameters.get("bias")
            duals[module] = DualLinear(view, name, own_bias=bias)
    if replaced in duals:
        return duals[replaced]
    for path, module in list(replaced.named_modules(remove_duplicate=False)):  # a module may have two places
        if module in duals:
            parent, _, child = path.rpartition(".")
            setattr(replaced.get_submodule(parent), child, duals[module])
    return replaced


def primal_model(view: View, model: nn.Module, parameters: dict[str, dict[str, Tensor]]) -> nn.Module:
    """A copy of the model with the given weights in some of its recorded layers."""
    replaced = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, found in parameters.items():
            entry = view.reader.manifest.layers[name]
            module = find_module(replaced, entry.modules[0], entry)
            for parameter, value in found.items():
                getattr(module, parameter).copy_(value)
    return replaced
