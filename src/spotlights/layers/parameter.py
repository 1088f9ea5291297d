"""The last resort: a small parameter that no adapter knows, recorded by its gradient at each step.

For scales, gates, position tables and class tokens, no adapter knows what the parameter is multiplied with. The
gradient that the optimizer uses becomes one slot of the step. Its key is 1, and it belongs to no example. So the slots
still add up to the trained parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers.adapter import Call, LinearMap, ModuleAdapter, WeightPart, own_parameters


class ParameterCall(Call):
    """A pass through the whole network: its one row is the parameter, whose key is 1."""

    shared = True

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self._name, self._parameter = name, parameter

    def leads(self) -> Mapping[str, Sequence[int]]:
        return {self._name: (1,)}

    def keys(self) -> Mapping[str, Float[Tensor, "1 1"]]:
        return {self._name: self._parameter.detach().new_ones(1, 1)}

    def errors(self, gradients: Sequence[Tensor | None]) -> Mapping[str, Float[Tensor, "1 out_features"]]:
        """From the gradient of the parameter itself."""
        (gradient,) = gradients
        assert gradient is not None
        return {self._name: gradient.reshape(1, -1)}


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

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, before: Any) -> Call:
        raise NotImplementedError("no call tells what such a parameter is multiplied with")
