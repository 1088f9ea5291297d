"""The last resort: a small parameter that no adapter knows, recorded by its gradient at each step.

For scales, gates, position tables and class tokens, no adapter knows what the parameter is multiplied with. The
gradient that the optimizer uses becomes one slot of the step. Its key is 1, and it belongs to no example. So the slots
still add up to the trained parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, OneMapCall, WeightPart, own_parameters


class ParameterAdapter(ModuleAdapter):
    """Every parameter that a module holds itself is a map of the key 1."""

    kind = "parameter"
    last_resort = True

    def handles(self, module: nn.Module) -> bool:
        return bool(own_parameters(module))

    def maps(self, module: nn.Module) -> Mapping[str, LinearMap]:
        return {
            name: LinearMap({"weight": WeightPart(parameter)}, as_matrix=lambda weight: weight.reshape(-1, 1))
            for name, parameter in own_parameters(module).items()
        }


def parameter_call(name: str, parameter: nn.Parameter) -> Call:
    """A pass through the whole network: its one row is the parameter, whose key is 1."""
    call = OneMapCall(name, parameter, (1,), lambda numbers: numbers.new_ones(1, 1), lambda g: g.reshape(1, -1))
    call.shared = True
    return call
