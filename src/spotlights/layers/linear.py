"""`nn.Linear`, with any leading shape, with or without bias."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from spotlights.layers.adapter import LayerAdapter


class LinearAdapter(LayerAdapter):
    kind = "linear"

    def handles(self, module: nn.Module) -> bool:
        # A subclass with its own forward, or a weight that is computed (weight norm, spectral norm),
        # is another map than its name says.
        return (
            isinstance(module, nn.Linear)
            and type(module).forward is nn.Linear.forward
            and isinstance(module._parameters.get("weight"), nn.Parameter)
        )

    def weight(self, module: nn.Module) -> nn.Parameter:
        weight = module.weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def bias(self, module: nn.Module) -> nn.Parameter | None:
        assert isinstance(module, nn.Linear)
        return module.bias

    def keys(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Float[Tensor, "*lead in_features"]:
        return args[0] if args else kwargs["input"]

    def errors(self, module: nn.Module, output_gradient: Float[Tensor, "..."]) -> Float[Tensor, "*lead out_features"]:
        return output_gradient
